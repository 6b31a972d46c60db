"""Delete files, as engines write them that merge on read; pyiceberg has no call for that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.conversions import to_bytes
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestWriterV2,
)
from pyiceberg.table.delete_file_index import PATH_FIELD_ID
from pyiceberg.table.snapshots import Operation
from pyiceberg.typedef import Record
from pyiceberg.types import StringType

from sparkonce.sinks.iceberg.appending import Conditional

if TYPE_CHECKING:
    from pyiceberg.table import Table


class _DeletesWriter(ManifestWriterV2):
    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


class _Deletes(Conditional):
    def __init__(self, table: Table, file: DataFile) -> None:
        super().__init__(Operation.DELETE, table, {})
        self._file = file

    def _manifests(self) -> list[ManifestFile]:
        spec, output = self._transaction.table_metadata.spec(), self.new_manifest_output()
        with _DeletesWriter(spec, self.schema(), output, self._snapshot_id, "deflate") as writer:
            writer.add(
                ManifestEntry.from_args(
                    status=ManifestEntryStatus.ADDED,
                    snapshot_id=self._snapshot_id,
                    sequence_number=None,
                    file_sequence_number=None,
                    data_file=self._file,
                )
            )
        return [writer.to_manifest_file(), *self._existing_manifests()]


def delete_position(table: Table, path: str, *partition: Any, bounds: bool = True) -> None:
    """Delete the first row of a data file."""
    rows = pa.table({"file_path": [path], "pos": pa.array([0], pa.int64())})
    bound = {PATH_FIELD_ID: to_bytes(StringType(), path)} if bounds else {}
    _commit(table, rows, DataFileContent.POSITION_DELETES, bound, partition)


def delete_id(table: Table, number: int, *partition: Any) -> None:
    """Delete the rows with this id, by an equality delete."""
    rows = pa.table({"id": pa.array([number], pa.int64())})
    _commit(table, rows, DataFileContent.EQUALITY_DELETES, {}, partition)


def _commit(
    table: Table,
    rows: pa.Table,
    content: DataFileContent,
    bounds: dict[int, bytes],
    partition: tuple[Any, ...],
) -> None:
    place = f"{table.location()}/data/deletes-{table.metadata.last_sequence_number}.parquet"
    pq.write_table(rows, place.removeprefix("file://"))
    file = DataFile.from_args(
        content=content,
        file_path=place,
        file_format=FileFormat.PARQUET,
        partition=Record(*partition),
        record_count=rows.num_rows,
        file_size_in_bytes=100,
        lower_bounds=bounds,
        upper_bounds=bounds,
        equality_ids=[1] if content is DataFileContent.EQUALITY_DELETES else None,
        sort_order_id=None,
        key_metadata=None,
    )
    _Deletes(table, file).commit_if_unchanged({})
