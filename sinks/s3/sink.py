"""`S3Sink`: a branch is a set of multipart uploads, and its commit completes them.

write         rows ─► file ─► parts           nothing to see at the keys
preCommit     every part is stored            uploads are open, as long as it takes
commit        complete each, prove by HEAD    each object appears, whole, at once
publish  put the batch's manifest        all of the batch appears to `read_committed`
abort         abort each                      nothing was ever to be seen
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal
from urllib.parse import parse_qsl, urlsplit

import pyarrow as pa

from sparkonce.errors import (
    CommitRejectedError,
    CommitUnresolvedError,
    ConfigurationError,
    PreparedBranchLostError,
    PrepareRejectedError,
    ProtocolError,
    settle_command,
)
from sparkonce.finding import Finding
from sparkonce.model import BranchId, Committable, CommittedBatch, JsonValue, Owner
from sparkonce.parallel import at_once
from sparkonce.sinks.arrow_types import loosened
from sparkonce.sinks.base import Transform, TwoPhaseCommitSink
from sparkonce.sinks.capabilities import (
    AbortsDecided,
    ChecksLog,
    Diagnoses,
    FindsBranches,
    Publishes,
)
from sparkonce.sinks.committables import check_version
from sparkonce.sinks.s3.checks import check_schema, check_server
from sparkonce.sinks.s3.client import S3_ERRORS, Connection, describe, server_at
from sparkonce.sinks.s3.diagnosis import diagnose
from sparkonce.sinks.s3.formats import (
    MAX_PART_BYTES,
    MIN_PART_BYTES,
    PART_BYTES,
    Compression,
    FileFormat,
    Format,
)
from sparkonce.sinks.s3.layout import Place
from sparkonce.sinks.s3.listing import open_uploads
from sparkonce.sinks.s3.manifest import Layout, Manifest, source_folder
from sparkonce.sinks.s3.outcome import FileOutcome
from sparkonce.sinks.s3.publisher import Publisher
from sparkonce.sinks.s3.upload import Checksum, ObjectSettings, StagedFile
from sparkonce.sinks.s3.writer import BranchWriter

_PAYLOAD_VERSION = 2
"""1 may have neither checksums nor Amazon's partition."""

_PARALLEL_FILES = 8


class S3Sink(
    TwoPhaseCommitSink[BranchWriter],
    AbortsDecided,
    Publishes,
    FindsBranches,
    ChecksLog,
    Diagnoses,
):
    """Writes files into an S3 bucket: one for each Spark task and folder of a batch.

    Works with every server that has S3's multipart uploads. Rows are streamed, so with the default
    settings a task needs less than 256 MiB of memory whatever the size of its files. After 9,000
    parts, which are 242 GiB on Amazon's S3, a task starts another file (`docs/s3.md`).

    Each object appears whole; all objects of a batch appear together to `sparkonce.read_committed`
    and `sparkonce.committed_dataset`, through a manifest below ``_sparkonce/``.

    Rights: s3:PutObject, s3:GetObject, s3:AbortMultipartUpload and s3:ListMultipartUploadParts on
    the prefix, and s3:DeleteObject on ``_sparkonce/`` below it; s3:ListBucket and
    s3:ListBucketMultipartUploads on the bucket. docs/s3.md has more.

    Args:
        url: ``s3://BUCKET/PREFIX``. The bucket must exist.
        format: "parquet", "json" (lines) or "csv" (with a header).
        partition_by: columns that become folders (``day=2026-01-01/``) and are not in the files.
            As with Spark's own writer, an empty string and ``__HIVE_DEFAULT_PARTITION__`` are read
            back as null, and both times of the hour that autumn has twice as the earlier one.
        compression: one of zstd, snappy, lz4, gzip, brotli, none; of text gzip, zstd, none.
            Default: zstd for Parquet, gzip for text.
        parquet: settings of pyarrow's ParquetWriter, such as ``{"compression_level": 5}``,
            use_dictionary and write_statistics, and row_group_size, in rows.
        target_file_size: in bytes; a file that has reached it is followed by another one. Default:
            as large as its task makes it.
        storage_class: of the objects, such as "STANDARD_IA"; default: the server's.
        encryption: "AES256", "aws:kms" or "aws:kms:dsse"; default: the bucket's.
        kms_key: id or ARN of the key, with `encryption`.
        metadata: of each object, beside ``sparkonce-branch``.
        tags: of each object.
        endpoint_url: of another server than Amazon's.
        region: default: boto3's own settings.
        access_key: with `secret_key`; default: boto3's credential chain, on every executor.
        secret_key: with `access_key`.
        session_token: of temporary credentials, with `access_key`.
        path_style: True has the bucket in the path, False in the host name, which some servers
            demand. Default: as boto3's own files say, else in the path with `endpoint_url`.
        part_size: bytes of every part but the last, 5 to 32 MiB; or "growing": 8 MiB, doubled
            after each 1,000 parts up to 32 MiB. Default: "growing" on Amazon's S3, 8 MiB on any
            other server, since some refuse parts of several sizes when the file is
            completed, which is after the decision. Files of many folders have smaller parts, so
            that all their buffers fit into memory.
        checksum: "crc32c" or "none"; of each part, checked by servers that have it.
        max_open_files: how many folders one task may write; each takes 5 MiB of memory.
        name: see `TwoPhaseCommitSink`.
        select: see `TwoPhaseCommitSink`.
        transform: see `TwoPhaseCommitSink`.
        writers: see `TwoPhaseCommitSink`.

    Raises:
        ConfigurationError: a setting cannot work.
    """

    kind: ClassVar[str] = "s3"

    def __init__(
        self,
        url: str,
        *,
        format: Format = "parquet",  # noqa: A002  # Spark's own name for it
        partition_by: Sequence[str] = (),
        compression: Compression | None = None,
        parquet: Mapping[str, Any] | None = None,
        target_file_size: int | None = None,
        storage_class: str | None = None,
        encryption: str | None = None,
        kms_key: str | None = None,
        metadata: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
        endpoint_url: str | None = None,
        region: str | None = None,
        access_key: str | None = None,
        secret_key: str | None = None,
        session_token: str | None = None,
        path_style: bool | None = None,
        part_size: int | Literal["growing"] | None = None,
        checksum: Checksum = "crc32c",
        max_open_files: int = 32,
        name: str | None = None,
        select: Sequence[str] | None = None,
        transform: Transform | None = None,
        writers: Literal[1] | None = None,
    ) -> None:
        super().__init__(name=name, select=select, transform=transform, writers=writers)
        self._place = Place.from_url(url)
        if isinstance(partition_by, str) or len(set(partition_by)) != len(partition_by):
            raise ConfigurationError(
                f"S3Sink: partition_by={partition_by!r}: give a list of columns, each once"
            )
        if part_size not in {None, "growing"} and not (
            isinstance(part_size, int) and MIN_PART_BYTES <= part_size <= MAX_PART_BYTES
        ):
            raise ConfigurationError(
                f"S3Sink: part_size={part_size}: give {MIN_PART_BYTES} (the least that S3 takes) "
                f'to {MAX_PART_BYTES} bytes, or "growing"'
            )
        if max_open_files < 1:
            raise ConfigurationError(f"S3Sink: max_open_files={max_open_files}: give 1 or more")
        if (access_key is None) != (secret_key is None):
            raise ConfigurationError("S3Sink: give access_key= and secret_key= both, or neither")
        if endpoint_url is not None and ("@" in endpoint_url or "://" not in endpoint_url):
            raise ConfigurationError(
                "S3Sink: endpoint_url= is like http://HOST:PORT; credentials go into access_key= "
                "and secret_key="
            )
        if not isinstance(path_style, bool | None):  # "false" would count as true
            raise ConfigurationError(
                f"S3Sink: path_style={path_style!r}: give True or False, or leave it out"
            )
        if session_token is not None and access_key is None:
            raise ConfigurationError("S3Sink: session_token= goes with access_key= and secret_key=")
        if target_file_size is not None and target_file_size < 1:
            raise ConfigurationError(f"S3Sink: target_file_size={target_file_size}: give 1 or more")
        self._format = FileFormat(
            format,
            tuple(partition_by),
            compression or ("zstd" if format == "parquet" else "gzip"),
            part_size if isinstance(part_size, int) else None,
            max_open_files,
            target_file_size,
            dict(parquet or {}),
        )
        self._settings = ObjectSettings(
            dict(metadata or {}), dict(tags or {}), storage_class, encryption, kms_key, checksum
        )
        self._grows_anywhere = part_size == "growing"
        self._schema: pa.Schema | None = None
        if self._format.is_lines:
            self.columns = self._lines
        self._connection = Connection(
            endpoint_url=endpoint_url,
            region=region,
            access_key=access_key,
            secret_key=secret_key,
            session_token=session_token,
            path_style=path_style,
        )

    @property
    def target(self) -> str:
        return str(self._place)

    # -- on the executors ----------------------------------------------------------------------

    def beginTransaction(self, branch_id: BranchId) -> BranchWriter:
        if branch_id.batch_id is None:
            raise ProtocolError("S3Sink writes branches of a known batch only")
        file_format = self._format
        if file_format.part_bytes is None and not self._grows_anywhere:
            # Known only now: boto3's settings may name another server.
            part_bytes = PART_BYTES if self._connection.other_server else None
            file_format = replace(file_format, part_bytes=part_bytes)
        return BranchWriter(
            self._connection,
            self._place,
            file_format,
            branch_id,
            settings=self._settings,
            schema=self._schema,
        )

    def write(self, handle: BranchWriter, batch: pa.RecordBatch) -> None:
        with self._rejecting(handle.branch_id):
            handle.write(batch)

    def preCommit(self, handle: BranchWriter) -> Committable:
        with self._rejecting(handle.branch_id):
            files = handle.finish()
        return self._committable(handle.branch_id, files, handle.layout)

    def discard(self, handle: BranchWriter) -> None:
        handle.discard()

    # -- on the driver, or in any process --------------------------------------------------------

    def validate(self, schema: pa.Schema) -> None:
        if not self._format.is_lines:  # those are checked when their columns are made
            check_schema(schema, self._format)
        check_server(self._connection, self._place)

    def check_log(self, address: str) -> None:
        url = urlsplit(address)
        prefix = f"{url.path.strip('/')}/".lstrip("/")
        is_apart = not (prefix.startswith(ours := self._place.prefix) or ours.startswith(prefix))
        if (url.scheme, url.netloc) != ("s3", self._place.bucket) or is_apart:
            return
        settings = dict(parse_qsl(url.query))
        its = Connection(settings.get("endpoint_url"), settings.get("region"))
        if _server_of(its) == _server_of(self._connection):
            raise ConfigurationError(
                f"S3Sink: {self._place} and log=s3://{url.netloc}{url.path} lie in one another, so "
                "that documents of the log would be among the rows: give log= a prefix of its own, "
                f"such as s3://{url.netloc}/sparkonce-log (`sparkonce log copy` moves what it has)"
            )

    def diagnose(self) -> Iterable[Finding]:
        return diagnose(self._connection, self._place, self._settings)

    def commit(self, committable: Committable) -> None:
        branch_id = committable.branch_id
        outcome, files = self._files_of(committable)
        if not all(file.parts for file in files):
            raise ProtocolError(f"{branch_id} was found by its uploads: it can be aborted only")
        errors = _for_each(outcome.commit, files)
        lost = [error for error in errors if isinstance(error, PreparedBranchLostError)]
        others = [error for error in errors if not isinstance(error, PreparedBranchLostError)]
        if others:
            raise others[0]
        if lost and len(lost) < len(files):
            # Writing the branch again would show the rows of the other files twice (I4).
            raise CommitRejectedError(
                f"{len(lost)} of the {len(files)} files of a branch are lost while the others are "
                f"visible, so the branch cannot simply be written again. The first: {lost[0]}. "
                f"Delete the others, and {settle_command(branch_id, 'redo')}; or write the rows of "
                f"those that are lost by hand, and {settle_command(branch_id, 'committed')}",
                branch_id,
            )
        if lost:
            raise lost[0]

    def publish(self, batch: CommittedBatch) -> None:
        folder = source_folder(batch.pipeline, batch.owner.digest, self.name)
        publisher = Publisher(self._connection, self._place, folder, self._settings)
        publisher.publish(Manifest.of(batch, self.name, self._place.prefix))

    def abort(self, branch: BranchId | Committable) -> None:
        """End the branch's uploads; objects that it has committed stay.

        Raises:
            CommitUnresolvedError: the server did not answer; call it again.
        """
        if isinstance(branch, BranchId):
            found = self._uploads_of(branch.owner).get(branch, ())
            outcome, files = self._outcome(branch, self._place.bucket), tuple(found)
        else:
            outcome, files = self._files_of(branch)
        for error in _for_each(outcome.abort, files):
            if isinstance(error, S3_ERRORS):
                raise CommitUnresolvedError(
                    f"S3: an upload of {outcome.branch_id} is not aborted ({describe(error)})",
                    outcome.branch_id,
                ) from error
            raise error

    def abort_decided(self, committable: Committable) -> None:
        self.abort(committable)
        outcome, files = self._files_of(committable)
        standing: list[StagedFile] = []

        def look(file: StagedFile) -> None:
            if outcome.stands(file):
                standing.append(file)

        if errors := _for_each(look, files):
            raise errors[0]
        if standing:
            branch_id = committable.branch_id
            names = ", ".join(sorted(map(outcome.name, standing)))
            raise CommitRejectedError(
                f"{len(standing)} of the {len(files)} files of {branch_id} stand, so that its rows "
                f"would be there twice: {names}. Delete these, and start again; or leave them, "
                "write the rows of the others by hand, and say so, which leaves both out of the "
                f"manifest: {settle_command(branch_id, 'committed')}",
                branch_id,
            )

    def find_branches(self, owner: Owner) -> Iterable[Committable]:
        for branch_id, files in self._uploads_of(owner).items():
            yield self._committable(branch_id, files)

    def close(self) -> None:
        self._connection.close()

    # -- helpers that hold no choices --------------------------------------------------------------

    def _lines(self, schema: pa.Schema, row: str) -> list[str]:
        check_schema(schema, self._format)
        # For the executors, which get the lines alone: the sink is pickled to them after this.
        self._schema = loosened(schema)
        return self._format.lines(schema, row)

    def _uploads_of(self, owner: Owner) -> dict[BranchId, list[StagedFile]]:
        try:
            return open_uploads(self._connection, self._place, owner)
        except S3_ERRORS as error:
            raise CommitUnresolvedError(
                f"S3: the open uploads of {self._place} cannot be listed ({describe(error)})"
            ) from error

    def _committable(
        self, branch_id: BranchId, files: Iterable[StagedFile], layout: Layout | None = None
    ) -> Committable:
        payload: dict[str, JsonValue] = {
            "bucket": self._place.bucket,
            "endpoint": self._connection.other_server,
            "partition": self._connection.partition,
            "files": [file.to_json() for file in files],
            "layout": None if layout is None else layout.to_json(),
        }
        return Committable(branch_id, payload, _PAYLOAD_VERSION)

    def _files_of(self, committable: Committable) -> tuple[FileOutcome, tuple[StagedFile, ...]]:
        check_version(committable, _PAYLOAD_VERSION)
        payload: Any = committable.payload
        files = tuple(StagedFile.from_json(value) for value in payload["files"])
        here = self._connection.partition
        same_server = (
            server_at(payload["endpoint"]) == self._connection.other_server
            and payload.get("partition") in {None, here}  # older records do not tell
        )
        return self._outcome(committable.branch_id, payload["bucket"], same_server), files

    def _outcome(self, branch_id: BranchId, bucket: str, same_server: bool = True) -> FileOutcome:
        return FileOutcome(self._connection, bucket, branch_id, same_server)

    @contextlib.contextmanager
    def _rejecting(self, branch_id: BranchId) -> Iterator[None]:
        try:
            yield
        except S3_ERRORS as error:
            raise PrepareRejectedError(
                f"S3: the upload into {self._place} failed ({describe(error)})", branch_id
            ) from error
        except (pa.ArrowException, KeyError, ValueError, OverflowError) as error:
            raise PrepareRejectedError(
                f"S3: rows for {self._place} do not fit into its files ({error})", branch_id
            ) from error


def _server_of(connection: Connection) -> tuple[str | None, str | None]:
    """Within which names of buckets are unique, as far as addresses tell."""
    return connection.other_server, connection.partition


def _for_each(action: Callable[[StagedFile], None], files: Sequence[StagedFile]) -> list[Exception]:
    """Run the action on every file, some at once; the errors."""

    def run(file: StagedFile) -> Exception | None:
        try:
            action(file)
        except Exception as error:  # noqa: BLE001  # the caller raises it
            return error
        return None

    return [error for error in at_once(run, files, _PARALLEL_FILES) if error is not None]
