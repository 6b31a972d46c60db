"""`S3Sink`: a branch is a set of multipart uploads, and its commit completes them.

write         rows ─► file ─► parts           nothing is visible at the keys
preCommit     every part is stored            the uploads stay open as long as needed
commit        complete each, prove by HEAD    each object appears whole, at once
abort         abort each                      nothing was ever visible
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal
from urllib.parse import parse_qsl, urlsplit

import pyarrow as pa

from sparkonce.datasets import Dataset
from sparkonce.errors import (
    CommitUnresolvedError,
    ConfigurationError,
    PrepareRejectedError,
    ProtocolError,
    SparkOnceError,
)
from sparkonce.finding import Finding
from sparkonce.model import BranchId, Committable, Owner
from sparkonce.sinks.base import Transform, TwoPhaseCommitSink
from sparkonce.sinks.capabilities import (
    AbortsDecided,
    ChecksLog,
    CommitsMany,
    Delivered,
    Diagnoses,
    FindsBranches,
    NamesDatasets,
    TakesBack,
    Visible,
)
from sparkonce.sinks.s3.connecting.answers import S3_ERRORS, describe
from sparkonce.sinks.s3.connecting.checks import check_server
from sparkonce.sinks.s3.connecting.client import Clients
from sparkonce.sinks.s3.connecting.diagnosis import diagnose
from sparkonce.sinks.s3.connecting.place import Place
from sparkonce.sinks.s3.connecting.settings import ClientFactory, S3Connection
from sparkonce.sinks.s3.finishing.branch import BranchOutcome, committable_of
from sparkonce.sinks.s3.finishing.listing import open_uploads
from sparkonce.sinks.s3.finishing.outcome import FileOutcome
from sparkonce.sinks.s3.finishing.together import complete_together
from sparkonce.sinks.s3.writing.columns import check_schema
from sparkonce.sinks.s3.writing.formats import PART_BYTES, Compression, FileFormat, Format
from sparkonce.sinks.s3.writing.objects import S3Objects
from sparkonce.sinks.s3.writing.staged import StagedFile
from sparkonce.sinks.s3.writing.writer import BranchWriter
from sparkonce.sinks.verbs import commit_each


class S3Sink(
    TwoPhaseCommitSink[BranchWriter],
    CommitsMany,
    AbortsDecided,
    FindsBranches,
    TakesBack,
    ChecksLog,
    Diagnoses,
    NamesDatasets,
):
    """Writes files into an S3 bucket: one for each Spark task and folder of a batch.

    It works with every server that has S3's multipart uploads. Rows are streamed, so with the
    default settings a task needs less than 256 MiB of memory for files of any size. After 9,000
    parts, which are 242 GiB on Amazon's S3, a task starts another file (`docs/howto/s3.md`).

    Each object appears whole, but the objects of a batch appear one by one. Where readers need
    whole batches, use `IcebergSink` or `DeltaSink`.

    Rights: s3:PutObject, s3:GetObject, s3:AbortMultipartUpload and s3:ListMultipartUploadParts on
    the prefix; s3:ListBucket and s3:ListBucketMultipartUploads on the bucket. `sparkonce savepoint
    rewind` also needs s3:DeleteObject.
    docs/howto/s3-operations.md has more.

    Args:
        url: ``s3://BUCKET/PREFIX``. The bucket must exist.
        format: "parquet", "json" (lines) or "csv" (with a header).
        partition_by: columns that become folders (``day=2026-01-01/``) and are not in the files.
            As with Spark's own writer, readers get null for an empty string and for
            ``__HIVE_DEFAULT_PARTITION__``, and the earlier time for both times of the hour that
            occurs twice in autumn.
        compression: one of zstd, snappy, lz4, gzip, brotli, none; for text gzip, zstd, none.
            Default: zstd for Parquet, gzip for text.
        parquet: settings of pyarrow's ParquetWriter, such as ``{"compression_level": 5}``,
            use_dictionary and write_statistics, and row_group_size, in rows.
        target_file_size: in bytes; a file that reaches it is followed by another file. Default:
            one file for each task and folder.
        part_size: bytes of every part except the last, 5 to 32 MiB; or "growing": 8 MiB, doubled
            after each 1,000 parts up to 32 MiB. Default: "growing" on Amazon's S3, 8 MiB on any
            other server, because some refuse parts of several sizes when the file is completed,
            which is after the decision. With many folders the parts are smaller, so that all
            buffers fit into memory.
        max_open_files: how many folders one task may write; each takes 5 MiB of memory.
        connection: server and credentials; default: boto3's own chain, on every executor.
        client: a function that makes a boto3 client in place of `connection`, such as
            ``lambda config: boto3.session.Session().client("s3", config=config)``. The function is
            pickled to the executors and called there; it must use the Config that it gets.
        objects: storage class, encryption, ACL, metadata, tags and checksum of each object.
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
        part_size: int | Literal["growing"] | None = None,
        max_open_files: int = 32,
        connection: S3Connection | None = None,
        client: ClientFactory | None = None,
        objects: S3Objects | None = None,
        name: str | None = None,
        select: Sequence[str] | None = None,
        transform: Transform | None = None,
        writers: Literal[1] | None = None,
    ) -> None:
        super().__init__(name=name, select=select, transform=transform, writers=writers)
        if isinstance(partition_by, str):
            raise ConfigurationError(f"S3Sink: partition_by={partition_by!r}: give a list")
        self._place = Place.from_url(url)
        self._format = FileFormat(
            format,
            tuple(partition_by),
            compression or ("zstd" if format == "parquet" else "gzip"),
            part_size,
            max_open_files,
            target_file_size,
            dict(parquet or {}),
        )
        self._objects = objects or S3Objects()
        self._clients = _clients(connection, client)
        if self._format.is_lines:
            self.columns = self._lines

    @property
    def target(self) -> str:
        return str(self._place)

    def dataset(self) -> Dataset:
        return Dataset.at(str(self._place))

    # -- on the executors ----------------------------------------------------------------------

    def beginTransaction(self, branch_id: BranchId) -> BranchWriter:
        if branch_id.batch_id is None:
            raise ProtocolError("S3Sink writes branches of a known batch only")
        file_format = self._format
        # Known only now: boto3's settings on this machine may name another server.
        if file_format.part_size is None and self._clients.other_server is not None:
            file_format = replace(file_format, part_size=PART_BYTES)
        return BranchWriter(
            self._clients,
            self._place,
            file_format,
            branch_id,
            objects=self._objects,
        )

    def write(self, handle: BranchWriter, batch: pa.RecordBatch) -> None:
        with self._rejecting(handle.branch_id):
            handle.write(batch)

    def preCommit(self, handle: BranchWriter) -> Committable:
        with self._rejecting(handle.branch_id):
            files = handle.finish()
        return committable_of(self._clients, self._place, handle.branch_id, files)

    def discard(self, handle: BranchWriter) -> None:
        handle.discard()

    # -- on the driver, or in any process --------------------------------------------------------

    def validate(self, schema: pa.Schema) -> None:
        """Check settings, rights, server and schema.

        Raises:
            ConfigurationError: a setting, a right or a column cannot work.
            SinkUnavailableError: the server cannot be reached now; try again.
        """
        if not self._format.is_lines:  # lines are checked when their columns are made
            check_schema(schema, self._format)
        check_server(self._clients, self._place)

    def check_log(self, address: str) -> None:
        url = urlsplit(address)
        prefix = f"{url.path.strip('/')}/".lstrip("/")
        is_apart = not (prefix.startswith(ours := self._place.prefix) or ours.startswith(prefix))
        if (url.scheme, url.netloc) != ("s3", self._place.bucket) or is_apart:
            return
        settings = dict(parse_qsl(url.query))
        try:
            its = S3Connection(settings.get("region"), endpoint_url=settings.get("endpoint_url"))
        except ConfigurationError:  # the log refuses this address itself
            return
        ours_at, its_at = ((c.other_server, c.partition) for c in (self._clients, Clients(its)))
        if ours_at == its_at:  # names of buckets are unique within a server and partition
            raise ConfigurationError(
                f"S3Sink: {self._place} and log=s3://{url.netloc}{url.path} overlap, so readers of "
                "the rows would find the log's documents: give log= a separate prefix, such as "
                f"s3://{url.netloc}/sparkonce-log (`sparkonce log copy` moves an existing log)"
            )

    def diagnose(self) -> Iterable[Finding]:
        return diagnose(self._clients, self._place, self._objects.protection())

    def commit(self, committable: Committable) -> None:
        BranchOutcome.of(committable, self._clients).commit()

    def commit_many(self, committables: Sequence[Committable]) -> Sequence[SparkOnceError | None]:
        completed = complete_together(self._clients, committables)

        def commit(committable: Committable) -> None:
            BranchOutcome.of(committable, self._clients).commit(completed)

        return commit_each(self, committables, commit)

    def abort(self, branch: BranchId | Committable) -> None:
        """Abort the branch's uploads; objects that it has committed stay.

        Raises:
            CommitUnresolvedError: the server did not confirm it; call it again.
        """
        if isinstance(branch, BranchId):
            found = tuple(self._uploads_of(branch.owner).get(branch, ()))
            BranchOutcome(FileOutcome(self._clients, self._place.bucket, branch), found).abort()
        else:
            BranchOutcome.of(branch, self._clients).abort()

    def abort_decided(self, committable: Committable) -> None:
        outcome = BranchOutcome.of(committable, self._clients)
        outcome.abort()
        outcome.check_invisible()

    def find_branches(self, owner: Owner) -> Iterable[Committable]:
        for branch_id, files in self._uploads_of(owner).items():
            yield committable_of(self._clients, self._place, branch_id, files)

    def find_delivered(self, branches: Sequence[Delivered]) -> Sequence[Visible]:
        return [BranchOutcome.of(found, self._clients).find() for found, _ in branches]

    def take_back(self, branches: Sequence[Delivered]) -> None:
        for committable, rows in branches:
            BranchOutcome.of(committable, self._clients).remove(rows)

    def close(self) -> None:
        self._clients.close()

    # -- helpers ---------------------------------------------------------------------------------

    def _lines(self, schema: pa.Schema, row: str) -> list[str]:
        check_schema(schema, self._format)
        return self._format.lines(schema, row)

    def _uploads_of(self, owner: Owner) -> dict[BranchId, list[StagedFile]]:
        try:
            return open_uploads(self._clients, self._place, owner)
        except S3_ERRORS as error:
            raise CommitUnresolvedError(
                f"S3: the open uploads of {self._place} cannot be listed ({describe(error)})"
            ) from error

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


def _clients(connection: S3Connection | None, factory: ClientFactory | None) -> Clients:
    if factory is None:
        return Clients(connection or S3Connection())
    if connection is not None:
        raise ConfigurationError("S3Sink: give connection= or client=, not both")
    if not callable(factory):
        raise ConfigurationError(
            "S3Sink: client= is a function that makes a client on each executor, such as "
            'lambda config: boto3.client("s3", config=config); a client itself does not pickle'
        )
    return Clients.made_by(factory)
