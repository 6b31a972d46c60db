"""How the commit of one file ends: by what stands at its key, never by what a call answered.

    complete ─► HEAD ─┬─ ours ─────────────────────────────────────────────► committed
                      ├─ absent, and complete answered "no such upload"
                      │      ─► ListParts ─ no such upload ─► HEAD ─ absent ─► LOST
                      └─ anything else ────────────────────────────────────► unresolved

S3 may answer 200 with an error in the body, and its answer may be lost; some servers answer 200 to
the completion of an upload that is gone, others deny an upload that they have completed. What
proves the commit is the object: our branch id in its metadata, and the ETag and the CRC32C that its
parts give. Where the server's ETags are no MD5s (with KMS keys, and on servers with a scheme of
their own) it is the CRC32C alone, and the size where the server keeps none.

"Lost" takes a terminal answer first and a fresh, absent proof after it, in that order: a commit
that happened in between is seen by the last HEAD. That one is repeated for a while, since servers
that complete by copying may deny both upload and object until the copy is whole. A crashed
versitygw 1.8.0 answers 200 to the completion, and denies upload and object until it is repaired:
that is unresolved.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from sparkonce.clients.s3 import code_of, has_delete_marker, status_of
from sparkonce.errors import CommitUnresolvedError, PreparedBranchLostError, settle_command
from sparkonce.model import BranchId
from sparkonce.sinks.s3.client import S3_ERRORS, Connection, Purpose, describe
from sparkonce.sinks.s3.upload import BRANCH_METADATA, StagedFile

_MD5_OF_PARTS = re.compile(r"[0-9a-f]{32}-[0-9]+")
_GONE = frozenset({"NoSuchUpload", "InvalidPart"})
"""What servers answer to the completion of an upload that they do not have (any more)."""

_NO_CONDITION = frozenset({"NotImplemented", "InvalidArgument", "InvalidRequest"})
"""What servers answer to an If-None-Match that they do not know."""

SETTLE_S = 10.0
"""How long an object has to be absent, after its upload is gone, to be called lost."""

_SETTLE_POLL_S = 0.5

pause = time.sleep
"""A test puts what happens meanwhile in its place."""


class Seen(Enum):
    """What stands at a file's key."""

    OURS = auto()
    FOREIGN = auto()
    ABSENT = auto()
    DELETED = auto()


@dataclass(frozen=True, slots=True)
class FileOutcome:
    """Settles the files of one branch.

    Attributes:
        connection: to the server that is configured now.
        bucket: the one that the branch was prepared in.
        branch_id: the branch.
        same_server: whether the branch was prepared at this endpoint. At another one, absence
            proves nothing.
    """

    connection: Connection
    bucket: str
    branch_id: BranchId
    same_server: bool = True

    def commit(self, file: StagedFile) -> None:
        """Complete the upload and prove it. Idempotent.

        Raises:
            CommitUnresolvedError: call it again.
            PreparedBranchLostError: proven: the upload is gone and there is no object.
        """
        refusal = self._complete(file)
        seen = self._look(file, refusal)
        if seen is Seen.OURS:
            return
        if seen is Seen.ABSENT and code_of(refusal) in _GONE and self._is_upload_gone(file):
            seen = self._look_patiently(file)
            if seen is Seen.OURS:
                return
            if seen is Seen.ABSENT and self.same_server:
                raise PreparedBranchLostError(
                    f"S3: batch {self.branch_id.batch_id} is decided, and {self.name(file)} is "
                    f"lost with its {file.rows} rows: the upload {file.upload_id} is gone and "
                    "there is no object. Somebody aborted it, or a lifecycle rule with "
                    "AbortIncompleteMultipartUpload did",
                    self.branch_id,
                )
        raise self._unresolved(file, seen, refusal)

    def abort(self, file: StagedFile) -> None:
        """Abort the upload, unless it is completed. Idempotent.

        The object is looked for first: S3Mock deletes what stands at the key of an upload that is
        aborted, and nothing is left to abort when it is ours.
        """
        if self._look(StagedFile(file.key, file.upload_id)) is Seen.OURS:
            return
        try:
            self.connection.client(Purpose.ASK).abort_multipart_upload(
                Bucket=self.bucket, Key=file.key, UploadId=file.upload_id
            )
        except S3_ERRORS as error:
            if code_of(error) not in {"NoSuchUpload", "NoSuchBucket"}:
                raise

    def stands(self, file: StagedFile) -> bool:
        """Whether readers see an object under the key of an upload that has ended.

        The key is ours alone, so whatever is there holds our rows, also where a copy in place has
        given it another ETag or checksum, which prove no commit any more.
        """
        return self._look_patiently(file) in {Seen.OURS, Seen.FOREIGN}

    def name(self, file: StagedFile) -> str:
        """The object's url, for messages."""
        return f"s3://{self.bucket}/{file.key}"

    def _complete(self, file: StagedFile, **condition: Any) -> Exception | None:
        try:
            self.connection.client(Purpose.ONCE).complete_multipart_upload(
                Bucket=self.bucket,
                Key=file.key,
                UploadId=file.upload_id,
                **file.completion(),
                **condition,
            )
        except S3_ERRORS as error:
            if code_of(error) == "AccessDenied" and not condition:
                # A bucket's policy may demand the condition. Not sent at once: S3 may answer 409
                # to it, which asks for another upload.
                second = self._complete(file, IfNoneMatch="*")
                return error if code_of(second) in _NO_CONDITION else second
            return error
        return None

    def _look(self, file: StagedFile, refusal: Exception | None = None) -> Seen:
        checked: dict[str, Any] = {"ChecksumMode": "ENABLED"} if file.checksums else {}
        try:
            head = self.connection.client(Purpose.ASK).head_object(
                Bucket=self.bucket,
                Key=file.key,
                **checked,
            )
        except S3_ERRORS as error:
            if status_of(error) != 404:  # noqa: PLR2004
                # HEAD has no body to say why; the refusal of the completion may know.
                said = "" if refusal is None else f"; the completion: {describe(refusal)}"
                raise CommitUnresolvedError(
                    f"S3: cannot look at {self.name(file)} ({describe(error)}{said})",
                    self.branch_id,
                ) from error
            return Seen.DELETED if has_delete_marker(error) else Seen.ABSENT
        # Names of HTTP headers have no case, and proxies in Go write their words in capitals.
        metadata = {name.lower(): value for name, value in head["Metadata"].items()}
        if metadata.get(BRANCH_METADATA) != str(self.branch_id):
            return Seen.FOREIGN
        etag = head["ETag"].strip('"')
        is_md5 = _MD5_OF_PARTS.fullmatch(etag) is not None and not head.get(
            "ServerSideEncryption", ""
        ).startswith("aws:kms")
        if not file.parts:  # found by its name: nothing more is known
            return Seen.OURS
        proofs = []
        if file.etag is not None and is_md5:
            proofs.append(etag == file.etag)
        if file.checksums and "ChecksumCRC32C" in head:
            proofs.append(head["ChecksumCRC32C"] == file.checksum)
        if not proofs:
            proofs.append(head["ContentLength"] == file.bytes)
        return Seen.OURS if all(proofs) else Seen.FOREIGN

    def _look_patiently(self, file: StagedFile) -> Seen:
        deadline = time.monotonic() + SETTLE_S
        while True:
            is_last = time.monotonic() >= deadline  # of a look that begins now: we may stand still
            seen = self._look(file)
            if seen is not Seen.ABSENT or is_last:
                return seen
            pause(_SETTLE_POLL_S)

    def _is_upload_gone(self, file: StagedFile) -> bool:
        try:
            self.connection.client(Purpose.ASK).list_parts(
                Bucket=self.bucket, Key=file.key, UploadId=file.upload_id, MaxParts=1
            )
        except S3_ERRORS as error:
            if code_of(error) == "NoSuchUpload":
                return True
            raise CommitUnresolvedError(
                f"S3: {self.name(file)} of batch {self.branch_id.batch_id} is not there, and "
                f"whether its upload is lost cannot be told ({describe(error)})",
                self.branch_id,
            ) from error
        return False

    def _unresolved(
        self, file: StagedFile, seen: Seen, refusal: Exception | None
    ) -> CommitUnresolvedError:
        answered = "200" if refusal is None else describe(refusal)
        stands = {
            Seen.FOREIGN: "an object that is not this branch's stands there: move it away, and "
            "restore ours if it was replaced",
            Seen.DELETED: "a delete marker stands there, so the object may have been visible and "
            f"deleted: {settle_command(self.branch_id)}",
        }.get(seen, "there is no object")
        server = self.connection.other_server or f"Amazon's ({self.connection.partition})"
        elsewhere = (
            "" if self.same_server else f"; it was prepared at another endpoint than {server}"
        )
        return CommitUnresolvedError(
            f"S3: {self.name(file)} of batch {self.branch_id.batch_id} is not proven to be "
            f"committed: the completion answered {answered}, and {stands}{elsewhere}",
            self.branch_id,
        )
