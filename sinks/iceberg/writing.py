"""The rows of one branch, from Arrow record batches to Parquet files with statistics.

    batch ─► the table's types ─► by partition ─► rows that wait (bounded) ─► row group ─► file

There is one open file for each partition, and a file that is large enough is followed by another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io.pyarrow import (
    _determine_partitions,
    _get_parquet_writer_kwargs,
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
    schema_to_pyarrow,
)
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table import TableProperties
from pyiceberg.typedef import Record
from pyiceberg.utils.properties import property_as_int

from sparkonce.errors import PrepareRejectedError
from sparkonce.model import BranchId
from sparkonce.sinks.iceberg.files import WrittenFiles, to_json
from sparkonce.sinks.iceberg.marks import Marks, file_name

if TYPE_CHECKING:
    from pyiceberg.table import Table

_WAITING_BYTES = 16 << 20  # a file is compressed while Spark computes its next rows
_WAITING_BYTES_PARTITIONED = 64 << 20


@dataclass
class _OpenFile:
    path: str
    stream: Any
    writer: pq.ParquetWriter
    partition: Record
    waiting: list[pa.Table] = field(default_factory=list)
    waiting_rows: int = 0

    def flush(self) -> None:
        """Write what waits as one row group."""
        if self.waiting:
            self.writer.write_table(pa.concat_tables(self.waiting))
        self.waiting, self.waiting_rows = [], 0

    def close(self) -> int:
        """Finish the file; return its size in bytes."""
        self.writer.close()
        size = int(self.stream.tell())
        self.stream.close()
        return size


class BranchWriter:
    """Writes one task's rows.

    Args:
        table: as the catalog has it now.
        spec_id: the partition spec to write in.
        branch_id: names the files.
        max_open_files: the most partitions.
    """

    def __init__(
        self, table: Table, spec_id: int, branch_id: BranchId, max_open_files: int
    ) -> None:
        self.branch_id = branch_id
        self.rows = 0
        self._table = table
        self._schema = table.schema()
        self._spec = table.specs()[spec_id]
        self._arrow = schema_to_pyarrow(self._schema)
        self._marks = Marks(table)
        self._folder = self._marks.data(branch_id)
        self._max_open_files = max_open_files
        self._settings = {
            **_get_parquet_writer_kwargs(table.properties),
            # A dictionary of numbers that hardly repeat doubles the time of a file, and its size.
            "use_dictionary": _texts(self._arrow),
        }
        self._row_group = _number(
            table,
            TableProperties.PARQUET_ROW_GROUP_LIMIT,
            TableProperties.PARQUET_ROW_GROUP_LIMIT_DEFAULT,
        )
        self._file_bytes = _number(
            table,
            TableProperties.WRITE_TARGET_FILE_SIZE_BYTES,
            TableProperties.WRITE_TARGET_FILE_SIZE_BYTES_DEFAULT,
        )
        self._plan = compute_statistics_plan(self._schema, table.properties)
        self._ids = parquet_path_to_id_mapping(self._schema)
        self._most_waiting_bytes = (
            _WAITING_BYTES if self._spec.is_unpartitioned() else _WAITING_BYTES_PARTITIONED
        )
        self._open: dict[Record, _OpenFile] = {}
        self._waiting_bytes = 0
        self._count = 0
        self._files: list[Mapping[str, Any]] = []
        self._marks.write(branch_id)

    def write(self, batch: pa.RecordBatch) -> None:
        """Write rows.

        Raises:
            PrepareRejectedError: they belong to too many partitions.
            pa.ArrowException: they do not fit into the table's types.
        """
        rows = fitted(batch, self._arrow)
        parts = list(self._by_partition(rows))
        if sum(part.num_rows for _, part in parts) != rows.num_rows:
            raise ValueError("some of them belong to no partition, or to two")
        for partition, part in parts:
            file = self._open.get(partition) or self._opened(partition)
            file.waiting.append(part)
            file.waiting_rows += part.num_rows
            if file.waiting_rows >= self._row_group:
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
        self._marks.write(self.branch_id)  # a sweep may have aborted the task while it ran
        return WrittenFiles(self._marks.table, self._folder, self._spec.spec_id, tuple(self._files))

    def discard(self) -> None:
        """Delete everything, as far as that works now."""
        for file in self._open.values():
            with contextlib.suppress(Exception):
                file.close()
        with contextlib.suppress(Exception):
            self._marks.remove_files(self._folder, str(self.branch_id.attempt))
            self._marks.remove(self.branch_id)

    def _by_partition(self, rows: pa.Table) -> Iterator[tuple[Record, pa.Table]]:
        if self._spec.is_unpartitioned():
            yield Record(), rows
            return
        for part in _determine_partitions(self._spec, self._schema, rows):
            yield part.partition_key.partition, part.arrow_table_partition

    def _opened(self, partition: Record) -> _OpenFile:
        if len(self._open) >= self._max_open_files:
            raise PrepareRejectedError(
                f"IcebergSink: a task has rows of more than {self._max_open_files} partitions of "
                f"{'.'.join(self._table.name())}: raise max_open_files, or bring the rows of a "
                "partition to one task (repartition)",
                self.branch_id,
            )
        path = f"{self._folder}/{file_name(self.branch_id.attempt, self._count)}"
        self._count += 1
        stream: Any = self._table.io.new_output(path).create(overwrite=True)
        writer = pq.ParquetWriter(
            stream, self._arrow, store_decimal_as_integer=True, **self._settings
        )
        self._open[partition] = _OpenFile(path, stream, writer, partition)
        return self._open[partition]

    def _flush(self) -> None:
        for file in list(self._open.values()):
            file.flush()
            if file.stream.tell() >= self._file_bytes:
                self._close(file)
        self._waiting_bytes = 0

    def _close(self, file: _OpenFile) -> None:
        del self._open[file.partition]
        size = file.close()
        statistics = data_file_statistics_from_parquet_metadata(
            file.writer.writer.metadata, self._plan, self._ids
        )
        data_file = DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=file.path,
            file_format=FileFormat.PARQUET,
            partition=file.partition,
            file_size_in_bytes=size,
            sort_order_id=None,
            equality_ids=None,
            key_metadata=None,
            **statistics.to_serialized_dict(),
        )
        self._files.append(to_json(data_file, self._spec, self._schema))


def _unknown(given: pa.DataType, wanted: pa.DataType, path: str = "") -> Iterator[str]:
    """The fields that a cast would leave out, at any depth."""
    names = [wanted.field(n).name for n in range(wanted.num_fields)]
    for n in range(given.num_fields):
        field = given.field(n)
        where = f"{path}.{field.name}".lstrip(".")
        if not pa.types.is_struct(given):  # lists and maps call their fields as they like
            yield from _unknown(field.type, wanted.field(n).type, where)
        elif field.name not in names:
            yield where
        else:
            yield from _unknown(field.type, wanted.field(names.index(field.name)).type, where)


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


def fitted(batch: pa.RecordBatch, wanted: pa.Schema) -> pa.Table:
    """Rows with the table's columns and types; columns that the rows lack are null.

    Raises:
        pa.ArrowException: a value does not fit.
    """
    given = batch.schema.names
    if unknown := list(_unknown(pa.struct(list(batch.schema)), pa.struct(list(wanted)))):
        raise pa.ArrowInvalid(f"the table no longer has the column {', '.join(unknown)}")
    columns = []
    for each in wanted:
        column = batch.column(each.name) if each.name in given else pa.nulls(batch.num_rows)
        if column.null_count and not each.nullable:
            raise pa.ArrowInvalid(f"column {each.name} is required, and a row has none")
        columns.append(column.cast(each.type))
    return pa.Table.from_arrays(columns, schema=wanted)


def _number(table: Table, name: str, default: int) -> int:
    return property_as_int(table.properties, name, default) or default
