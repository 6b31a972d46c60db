"""The rows of one branch, from Arrow record batches to Parquet files with statistics.

    batch ─► the table's types ─► by partition ─► rows that wait (bounded) ─► row group ─► file

There is one open file for each partition, and a file that is large enough is followed by another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sparkonce.errors import PrepareRejectedError
from sparkonce.model import BranchId
from sparkonce.sinks.committables import name_used_before
from sparkonce.sinks.lakehouse.fitting import check_known, fitted
from sparkonce.sinks.lakehouse.marks import file_name
from sparkonce.sinks.lakehouse.payloads import WrittenFiles
from sparkonce.sinks.lakehouse.table import DataFile, LoadedTable

_WAITING_BYTES = 16 << 20  # a file is compressed while Spark computes its next rows
_WAITING_BYTES_PARTITIONED = 64 << 20


@dataclass
class _OpenFile:
    path: str
    stream: pa.NativeFile
    writer: pq.ParquetWriter
    partition: Hashable
    waiting: list[pa.Table] = field(default_factory=list)
    waiting_rows: int = 0

    def flush(self) -> None:
        """Write what waits as one row group."""
        if self.waiting:
            self.writer.write_table(pa.concat_tables(self.waiting))
        self.waiting, self.waiting_rows = [], 0

    def close(self) -> DataFile:
        """Finish the file."""
        self.writer.close()
        size = int(self.stream.tell())
        self.stream.close()
        return DataFile(self.path, self.partition, size, self.writer.writer.metadata)


class BranchWriter:
    """Writes one task's rows.

    Args:
        table: as loaded.
        spec: how to partition the files; None as the table says now.
        branch_id: names the files.
        max_open_files: the most partitions.
        where: the table, for messages.
    """

    def __init__(
        self,
        table: LoadedTable,
        spec: int | str | None,
        branch_id: BranchId,
        max_open_files: int,
        where: str,
    ) -> None:
        self.branch_id = branch_id
        self.rows = 0
        self._where = where
        self._layout = table.layout(spec)
        self._marks = table.marks
        self._folder = self._marks.data(branch_id)
        self._max_open_files = max_open_files
        # A dictionary of numbers that hardly repeat doubles the time of a file, and its size.
        texts: Any = _texts(self._layout.file_schema)
        self._settings = {**self._layout.parquet, "use_dictionary": texts}
        self._most_waiting_bytes = (
            _WAITING_BYTES_PARTITIONED if self._layout.is_partitioned else _WAITING_BYTES
        )
        self._known: pa.Schema | None = None
        self._open: dict[Hashable, _OpenFile] = {}
        self._waiting_bytes = 0
        self._count = 0
        self._files: list[Mapping[str, Any]] = []
        if self._marks.storage.exists(self._path(0)):  # it may be the table's
            raise name_used_before(where, branch_id)
        self._marks.write(branch_id)

    def write(self, batch: pa.RecordBatch) -> None:
        """Write rows.

        Raises:
            PrepareRejectedError: they belong to too many partitions.
            pa.ArrowException: they do not fit into the table's types.
        """
        if batch.schema != self._known:
            check_known(batch.schema, self._layout.schema)
            self._known = batch.schema
        rows = fitted(batch, self._layout.schema)
        parts = list(self._layout.split(rows))
        if sum(part.num_rows for _, part in parts) != rows.num_rows:
            raise ValueError("some of them belong to no partition, or to two")
        for partition, part in parts:
            if not part.num_rows:
                continue
            file = self._open.get(partition) or self._opened(partition)
            file.waiting.append(part)
            file.waiting_rows += part.num_rows
            if file.waiting_rows >= self._layout.row_group:
                file.flush()
        self.rows += rows.num_rows
        self._waiting_bytes += rows.nbytes
        if self._waiting_bytes > self._most_waiting_bytes:
            self._flush()

    def finish(self) -> WrittenFiles:
        """Close the files, which are then durable."""
        self._flush()
        for file in list(self._open.values()):
            self._close(file)
        self._marks.ensure(self.branch_id)  # a sweep may have aborted the task while it ran
        return WrittenFiles(self._marks.table, self._folder, self._layout.spec, tuple(self._files))

    def discard(self) -> None:
        """Delete everything, as far as that works now."""
        for file in self._open.values():
            with contextlib.suppress(Exception):
                file.close()
        with contextlib.suppress(Exception):
            self._marks.remove_files(self._folder, str(self.branch_id.attempt))
            self._marks.remove(self.branch_id)

    def _opened(self, partition: Hashable) -> _OpenFile:
        if len(self._open) >= self._max_open_files:
            raise PrepareRejectedError(
                f"a task has rows of more than {self._max_open_files} partitions of {self._where}: "
                "raise max_open_files, or bring the rows of a partition to one task (repartition)",
                self.branch_id,
            )
        path = self._path(self._count)
        self._count += 1
        stream = self._marks.storage.create(path)
        schema, settings = self._layout.file_schema, self._settings
        writer = pq.ParquetWriter(stream, schema, store_decimal_as_integer=True, **settings)
        self._open[partition] = _OpenFile(path, stream, writer, partition)
        return self._open[partition]

    def _path(self, number: int) -> str:
        return f"{self._folder}/{file_name(self.branch_id.attempt, number)}"

    def _flush(self) -> None:
        for file in list(self._open.values()):
            file.flush()
            if file.stream.tell() >= self._layout.file_bytes:
                self._close(file)
        self._waiting_bytes = 0

    def _close(self, file: _OpenFile) -> None:
        del self._open[file.partition]
        self._files.append(self._layout.describe(file.close()))


def _texts(schema: pa.Schema) -> list[str]:
    """The paths of the columns, also nested ones, that hold text or bytes."""
    return [
        column.path
        for column in _columns(schema)
        if column.physical_type == "BYTE_ARRAY" and column.logical_type.type != "DECIMAL"
    ]


def _columns(schema: pa.Schema) -> Iterator[pq.ColumnSchema]:
    file = pa.BufferOutputStream()
    with pq.ParquetWriter(file, schema) as writer:
        writer.write_table(schema.empty_table())
    described = pq.read_metadata(pa.BufferReader(file.getvalue())).schema
    return (described.column(n) for n in range(len(described)))
