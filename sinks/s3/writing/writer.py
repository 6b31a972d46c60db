"""The rows of one branch, from Arrow record batches to files in S3.

    batch ─► by folder ─► rows that wait (bounded) ─► row group ─► PartStream

There is one open file per folder. The memory of all open files is bounded: waiting rows as Arrow
memory until a row group is worth writing, and one part buffer for each open file.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from sparkonce.errors import PrepareRejectedError
from sparkonce.model import BranchId
from sparkonce.sinks.arrow_types import zone_of
from sparkonce.sinks.s3.connecting.answers import describe
from sparkonce.sinks.s3.connecting.client import Clients
from sparkonce.sinks.s3.connecting.place import MAX_KEY_BYTES, Place
from sparkonce.sinks.s3.writing.formats import FileFormat, RowWriter
from sparkonce.sinks.s3.writing.keys import MAX_FOLDER_BYTES, file_key, folder_name
from sparkonce.sinks.s3.writing.objects import S3Objects
from sparkonce.sinks.s3.writing.staged import StagedFile
from sparkonce.sinks.s3.writing.upload import MAX_PARTS, PartStream, Transfers, numbers

logger = logging.getLogger("sparkonce")

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_WAITING_BYTES = 64 << 20
_WAITING_BYTES_PARTITIONED = 32 << 20
# A file with this number of parts is followed by another file. The rest of the 10,000 parts is for
# its last row group and its footer.
ROLL_AT_PARTS = MAX_PARTS - 1000


@dataclass(slots=True)
class _OpenFile:
    stream: PartStream
    writer: RowWriter
    rows: int = 0
    waiting: list[pa.RecordBatch] = field(default_factory=list)
    waiting_rows: int = 0
    waiting_bytes: int = 0


class BranchWriter:
    """The open files of one branch; used by one thread."""

    def __init__(
        self,
        clients: Clients,
        place: Place,
        file_format: FileFormat,
        branch_id: BranchId,
        *,
        objects: S3Objects,
    ) -> None:
        self.branch_id = branch_id
        self._objects = objects
        self._clients = clients
        self._place = place
        self._format = file_format
        self._transfers = Transfers()
        self._next_number = numbers()
        self._open: dict[str, _OpenFile] = {}
        self._streams: list[PartStream] = []
        self._ended: list[tuple[PartStream, int]] = []
        self._waiting_bytes = 0
        self._max_waiting_bytes = (
            _WAITING_BYTES_PARTITIONED if file_format.partition_by else _WAITING_BYTES
        )

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows; return when no more than the bounded amount waits in memory."""
        for folder, rows in split(batch, self._format.partition_by):
            file = self._open.get(folder) or self._open_file(folder, rows.schema)
            file.waiting.append(rows)
            file.waiting_rows += rows.num_rows
            file.waiting_bytes += rows.nbytes
            self._waiting_bytes += rows.nbytes
            if file.waiting_rows >= self._format.rows_per_group:
                self._write_group(file)
            while self._waiting_bytes > self._max_waiting_bytes:
                self._write_group(max(self._open.values(), key=lambda f: f.waiting_bytes))
            if self._is_full(file):
                self._end(folder)

    def finish(self) -> tuple[StagedFile, ...]:
        """Write the waiting rows; return when the server holds every part of every file."""
        for folder in list(self._open):
            self._end(folder)
        staged = tuple(stream.staged(rows) for stream, rows in self._ended)
        self._transfers.close()
        return staged

    def discard(self) -> None:
        """End the threads and abort the uploads; a sweep aborts those that fail here."""
        for stream in self._streams:
            stream.discard()
        for file in self._open.values():
            with contextlib.suppress(Exception):
                file.writer.close()
        self._open.clear()
        self._transfers.close()
        for stream in self._streams:
            try:
                stream.abort()
            except Exception as error:  # noqa: BLE001  # best effort: the next abort may succeed
                logger.warning(
                    "an upload of %s is not aborted (%s); the sweep will do it",
                    self.branch_id,
                    describe(error),
                )

    def _open_file(self, folder: str, schema: pa.Schema) -> _OpenFile:
        self._check_folder(folder)
        stream = PartStream(
            self._clients,
            self._place.bucket,
            self.branch_id,
            self._objects,
            lambda: self._key(folder, self._next_number()),
            part_sizes=self._format.part_sizes,
            transfers=self._transfers,
        )
        self._streams.append(stream)
        sink = pa.PythonFile(stream, mode="w")  # type: ignore[arg-type]  # has what it calls
        file = _OpenFile(stream, self._format.writer(sink, schema))
        self._open[folder] = file
        return file

    def _key(self, folder: str, number: int) -> str:
        return file_key(self._place, folder, self.branch_id, number, self._format.extension)

    def _check_folder(self, folder: str) -> None:
        limit = self._format.max_open_files
        columns = list(self._format.partition_by)
        if len(self._open) >= limit:
            raise PrepareRejectedError(
                f"a task has rows for more than {limit} folders of {self._place} "
                f"(partition_by={columns}), and each folder is an open file. Repartition the batch "
                "by these columns and leave writers= out, S3Sink(transform=lambda df: "
                f"df.repartition({', '.join(map(repr, columns))})), partition by columns with "
                "fewer values, or raise max_open_files= if the executors have the memory",
                self.branch_id,
            )
        # Such a server would take the parts, and refuse to complete the upload.
        if any(len(name.encode()) > MAX_FOLDER_BYTES for name in folder.split("/")):
            raise PrepareRejectedError(
                f"the folder {folder[:80]!r}... has a name longer than {MAX_FOLDER_BYTES} bytes "
                f"(partition_by={columns}): shorten the values",
                self.branch_id,
            )
        # With the highest number that is tried, so that no later key is too long.
        if len(self._key(folder, 10**6).encode()) > MAX_KEY_BYTES:
            raise PrepareRejectedError(
                f"the folder {folder[:80]!r}... makes a key longer than S3's {MAX_KEY_BYTES} "
                f"bytes (partition_by={columns}): shorten the values",
                self.branch_id,
            )

    def _is_full(self, file: _OpenFile) -> bool:
        target = self._format.target_bytes
        # Waiting rows are Arrow memory; in a file they take less.
        if target is not None and file.waiting_bytes >= target:
            self._write_group(file)
        return file.stream.part_count >= ROLL_AT_PARTS or (
            target is not None and file.stream.size >= target
        )

    def _write_group(self, file: _OpenFile) -> None:
        rows = pa.Table.from_batches(file.waiting)
        file.waiting.clear()
        file.writer.write(rows)
        file.rows += rows.num_rows
        self._waiting_bytes -= file.waiting_bytes
        file.waiting_rows = file.waiting_bytes = 0

    def _end(self, folder: str) -> None:
        file = self._open[folder]
        if file.waiting:
            self._write_group(file)
        file.writer.close()
        file.stream.end()
        self._ended.append((file.stream, file.rows))
        del self._open[folder]  # only now: `discard` closes a writer that failed


def split(batch: pa.RecordBatch, columns: Sequence[str]) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The name and the rows of each folder, without the columns that are in the name."""
    if batch.num_rows == 0:
        return
    if not columns:
        yield "", batch
        return
    rest = batch.drop_columns(list(columns))
    encoded = [
        cast(
            "pa.DictionaryArray[Any, Any]",
            pc.dictionary_encode(batch[name], null_encoding="encode"),
        )
        for name in columns
    ]
    groups = np.zeros(batch.num_rows, dtype=np.int64)
    for column in encoded:
        # Groups are numbered again for each column, so that the product cannot overflow.
        codes = groups * len(column.dictionary) + column.indices.to_numpy(zero_copy_only=False)
        _, groups = np.unique(codes, return_inverse=True)
    # Each group gets a copy of its rows: a slice would keep the whole batch in memory while its
    # folder waits.
    for group in range(int(groups.max()) + 1):
        at = np.flatnonzero(groups == group)
        values = [_value(n, c, int(at[0])) for n, c in zip(columns, encoded, strict=True)]
        whole = len(at) == batch.num_rows
        yield folder_name(columns, values), rest if whole else rest.take(at)


def _value(name: str, column: pa.DictionaryArray[Any, Any], at: int) -> object:
    try:
        value: Any = column.dictionary[column.indices[at].as_py()]
        kind = value.type
        if pat.is_timestamp(kind) and kind.tz is not None and value.is_valid:
            since_epoch = dt.timedelta(microseconds=value.cast(pa.timestamp("us", kind.tz)).value)
            return (_EPOCH + since_epoch).astimezone(zone_of(kind.tz))
        return value.as_py()
    except (OverflowError, ValueError) as error:
        is_text = isinstance(error, UnicodeDecodeError)
        why = "text is UTF-8" if is_text else "times have years from 1 to 9999"
        raise ValueError(
            f"column {name!r} has a value that can name no folder ({error}): {why}; change it "
            "(select=), or give another partition_by="
        ) from error
