"""Commits one file: the object at its key proves the commit, never the answer to a call.

    complete ─► HEAD ─┬─ ours ─────────────────────────────────────────────► committed
    (if absent)       ├─ absent, and complete answered "no such upload"
                      │      ─► ListParts ─ no such upload ─► HEAD ─ absent ─► LOST
                      └─ anything else ────────────────────────────────────► unresolved

In a large batch one listing takes the place of the HEADs: `together`.

A completion never replaces an object. A query never uses a key twice, but two runs of a copied
checkpoint have equal names: the run that commits later must not destroy what the other run has
committed. So the completion carries If-None-Match. That condition also refuses a second commit of
the same branch, which the existing object proves.

S3 may answer 200 with an error in the body, and its answer may get lost. Some servers answer 200 to
the completion of an upload that is gone; others deny an upload that they have completed. The object
proves the commit: it has our branch id in its metadata, and the ETag and the CRC32C that follow
from its parts. If the server's ETags are no MD5s (with KMS keys, or a scheme of its own), only the
CRC32C counts, or the size if the server keeps no CRC32C.

A file is "lost" only after a final answer that its upload is gone, and then a HEAD that finds no
object. In this order the HEAD sees a commit that happened in between. It is repeated for a while,
because servers that complete by copying may deny both upload and object until the copy is whole. A
crashed versitygw 1.8.0 answers 200 to the completion, and denies upload and object until it is
repaired: that is unresolved.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

from sparkonce.clients.s3 import code_of, has_delete_marker, status_of
from sparkonce.errors import (
    CommitUnresolvedError,
    PreparedBranchLostError,
    TakeBackRefusedError,
    settle_command,
)
from sparkonce.model import BranchId
from sparkonce.sinks.s3.connecting.answers import S3_ERRORS, describe
from sparkonce.sinks.s3.connecting.client import Clients, Purpose
from sparkonce.sinks.s3.writing.objects import BRANCH_METADATA
from sparkonce.sinks.s3.writing.staged import StagedFile

_MD5_OF_PARTS = re.compile(r"[0-9a-f]{32}-[0-9]+")
_NOT_FOUND = 404
_GONE = frozenset({"NoSuchUpload", "InvalidPart"})
"""Answers of servers to the completion of an upload that they do not have (any more)."""

_NO_CONDITION = frozenset({"NotImplemented", "InvalidArgument", "InvalidRequest"})
"""Answers of servers to an If-None-Match that they do not know."""

PATIENCE_S = 10.0
"""How long an object must be absent, after its upload is gone, to be called lost."""

_POLL_S = 0.5

pause = time.sleep
"""Tests replace this to let something happen during the wait."""


class Seen(Enum):
    """What HEAD finds at the key of a file."""

    OURS = auto()
    OTHER_CONTENT = auto()
    """An object with our branch id, and without our content."""
    FOREIGN = auto()
    ABSENT = auto()
    DELETED = auto()


class Completed(NamedTuple):
    """What is known of a file after the call that completes it.

    Attributes:
        refusal: what the call answered; None for 200.
        etag: of the object that was listed at its key, without quotes; None if none was.
    """

    refusal: Exception | None
    etag: str | None = None


@dataclass(frozen=True, slots=True)
class FileOutcome:
    """Commits and aborts the files of one branch, one by one.

    Attributes:
        clients: of the server that is configured now.
        bucket: where the branch was prepared.
        branch_id: of all files.
        same_server: whether the branch was prepared at this endpoint. At another endpoint, absence
            proves nothing.
    """

    clients: Clients
    bucket: str
    branch_id: BranchId
    same_server: bool = True

    def commit(self, file: StagedFile, completed: Completed | None = None) -> None:
        """Complete the upload and prove it. Idempotent.

        Args:
            file: of the branch.
            completed: what is known, if it was completed together with others.

        Raises:
            CommitUnresolvedError: call it again.
            PreparedBranchLostError: proven: the upload is gone and there is no object.
        """
        refusal, listed = completed or Completed(self.complete(file))
        if listed is not None and listed == file.etag:
            return
        seen = self._look(file, refusal)
        if seen is Seen.OURS:
            return
        if seen is Seen.ABSENT and code_of(refusal) in _GONE and self._is_upload_gone(file):
            seen = self._look_patiently(file)
            if seen is Seen.OURS:
                return
            if seen is Seen.ABSENT and self.same_server:
                raise PreparedBranchLostError(
                    f"S3: batch {self.branch_id.batch_id} is decided, but {self.name(file)} is "
                    f"lost with its {file.rows} rows: the upload {file.upload_id} is gone and "
                    "there is no object. Somebody aborted it, or a lifecycle rule with "
                    "AbortIncompleteMultipartUpload did",
                    self.branch_id,
                )
        raise self._unresolved(file, seen, refusal)

    def abort(self, file: StagedFile) -> None:
        """Abort the upload, unless it is completed. Idempotent.

        First it looks for the object: S3Mock deletes an object whose key an aborted upload has,
        and if the object is ours there is nothing left to abort.
        """
        if self._look(StagedFile(file.key, file.upload_id)) is Seen.OURS:
            return
        try:
            self.clients.client(Purpose.ASK).abort_multipart_upload(
                Bucket=self.bucket, Key=file.key, UploadId=file.upload_id
            )
        except S3_ERRORS as error:
            if code_of(error) not in {"NoSuchUpload", "NoSuchBucket"}:
                raise

    def is_visible(self, file: StagedFile) -> bool:
        """Whether readers see an object at the key of an upload that is completed or aborted.

        The key belongs to this branch only, so every object there holds its rows. A copy in place
        may have changed its ETag or checksum, so that it no longer proves a commit.
        """
        return self._look_patiently(file) in {Seen.OURS, Seen.OTHER_CONTENT, Seen.FOREIGN}

    def visible_rows(self, file: StagedFile) -> int:
        """How many rows readers see of the file: all of them, or none.

        Raises:
            TakeBackRefusedError: another object is at its key, or this is another server.
            CommitUnresolvedError: the server does not show it now.
        """
        seen = self._look(file)
        if seen is Seen.OURS:
            return file.rows
        if seen in {Seen.ABSENT, Seen.DELETED} and self.same_server:
            return 0
        why = (
            "has other content than the batch wrote: it was changed since"
            if self.same_server
            else "was written at another endpoint than the sink's: point it there again"
        )
        raise TakeBackRefusedError(f"S3: {self.name(file)} {why}", self.branch_id)

    def remove(self, file: StagedFile) -> None:
        """Delete the object at the file's key, if there is one. Idempotent."""
        self.clients.client(Purpose.ASK).delete_object(Bucket=self.bucket, Key=file.key)

    def name(self, file: StagedFile) -> str:
        """The object's url, for messages."""
        return f"s3://{self.bucket}/{file.key}"

    def complete(self, file: StagedFile) -> Exception | None:
        """Complete the upload unless there is an object; return the refusal, if any.

        No answer proves anything: look at the object.
        """
        refusal = self._call_complete(file, IfNoneMatch="*")
        if code_of(refusal) not in _NO_CONDITION:
            return refusal
        # The server does not know the condition: a look beforehand replaces it as far as it can.
        if self._look(file, refusal) in {Seen.ABSENT, Seen.DELETED}:
            return self._call_complete(file)
        return refusal

    def _call_complete(self, file: StagedFile, **condition: Any) -> Exception | None:
        try:
            self.clients.client(Purpose.ONCE).complete_multipart_upload(
                Bucket=self.bucket,
                Key=file.key,
                UploadId=file.upload_id,
                **file.completion(),
                **condition,
            )
        except S3_ERRORS as error:
            return error
        return None

    def _look(self, file: StagedFile, refusal: Exception | None = None) -> Seen:
        checked: dict[str, Any] = {"ChecksumMode": "ENABLED"} if file.checksums else {}
        try:
            head = self.clients.client(Purpose.ASK).head_object(
                Bucket=self.bucket, Key=file.key, **checked
            )
        except S3_ERRORS as error:
            if status_of(error) != _NOT_FOUND:
                # A HEAD has no body with the reason; the refusal of the completion may have one.
                why = "" if refusal is None else f"; the completion: {describe(refusal)}"
                raise CommitUnresolvedError(
                    f"S3: cannot look at {self.name(file)} ({describe(error)}{why})",
                    self.branch_id,
                ) from error
            return Seen.DELETED if has_delete_marker(error) else Seen.ABSENT
        # Header names have no case, and proxies written in Go capitalise them.
        metadata = {name.lower(): value for name, value in head["Metadata"].items()}
        if metadata.get(BRANCH_METADATA) != str(self.branch_id):
            return Seen.FOREIGN
        is_known = bool(file.parts)  # if the file was found by its name, nothing else is known
        return Seen.OURS if not is_known or _has_content(head, file) else Seen.OTHER_CONTENT

    def _look_patiently(self, file: StagedFile) -> Seen:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            is_last = time.monotonic() >= deadline  # before the look: this process may be paused
            seen = self._look(file)
            if seen is not Seen.ABSENT or is_last:
                return seen
            pause(_POLL_S)

    def _is_upload_gone(self, file: StagedFile) -> bool:
        try:
            self.clients.client(Purpose.ASK).list_parts(
                Bucket=self.bucket, Key=file.key, UploadId=file.upload_id, MaxParts=1
            )
        except S3_ERRORS as error:
            if code_of(error) == "NoSuchUpload":
                return True
            raise CommitUnresolvedError(
                f"S3: {self.name(file)} of batch {self.branch_id.batch_id} does not exist, and "
                f"the server does not show whether its upload is lost ({describe(error)})",
                self.branch_id,
            ) from error
        return False

    def _unresolved(
        self, file: StagedFile, seen: Seen, refusal: Exception | None
    ) -> CommitUnresolvedError:
        answered = "200" if refusal is None else describe(refusal)
        found = {
            Seen.OTHER_CONTENT: "an object that is not this branch's is there: it has the branch's "
            "name, but other content, and is not replaced. If two queries run from copies of one "
            "checkpoint, stop the query with the copied checkpoint, and start it with a new "
            "checkpoint and another url=; delete the object if it is that query's. If the object "
            "was copied in place, restore the original",
            Seen.FOREIGN: "an object that is not this branch's is there: move it away, and "
            "restore ours if it was replaced",
            Seen.DELETED: "a delete marker is there, so the object may have been visible and "
            f"deleted: {settle_command(self.branch_id)}",
        }.get(seen, "there is no object")
        server = self.clients.other_server or f"Amazon's ({self.clients.partition})"
        elsewhere = (
            "" if self.same_server else f"; it was prepared at another endpoint than {server}"
        )
        return CommitUnresolvedError(
            f"S3: {self.name(file)} of batch {self.branch_id.batch_id} is not proven to be "
            f"committed: the completion answered {answered}, and {found}{elsewhere}",
            self.branch_id,
        )


def _has_content(head: Any, file: StagedFile) -> bool:
    """Whether the object's ETag and CRC32C, or at least its size, follow from the file's parts."""
    etag = head["ETag"].strip('"')
    uses_kms = head.get("ServerSideEncryption", "").startswith("aws:kms")
    proofs = []
    if file.etag is not None and _MD5_OF_PARTS.fullmatch(etag) is not None and not uses_kms:
        proofs.append(etag == file.etag)
    if file.checksums and "ChecksumCRC32C" in head:
        proofs.append(head["ChecksumCRC32C"] == file.checksum)
    if not proofs:
        proofs.append(head["ContentLength"] == file.bytes)
    return all(proofs)
