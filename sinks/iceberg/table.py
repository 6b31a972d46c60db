"""A table as the catalog had it, and what a commit of a batch changes in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.io.pyarrow import (
    DataFileStatistics,
    MetricModeTypes,
    MetricsMode,
    _determine_partitions,
    _get_parquet_writer_kwargs,
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
    schema_to_pyarrow,
)
from pyiceberg.manifest import DataFile as IcebergFile
from pyiceberg.manifest import DataFileContent, FileFormat
from pyiceberg.table import TableProperties
from pyiceberg.typedef import Record
from pyiceberg.utils.properties import property_as_int

from sparkonce.model import BranchId
from sparkonce.sinks.iceberg import properties
from sparkonce.sinks.iceberg.appending import Append, Conditional, begin
from sparkonce.sinks.iceberg.files import FORMAT_VERSION, attempts_in, prepared_manifest, to_json
from sparkonce.sinks.iceberg.reading import unreadable
from sparkonce.sinks.iceberg.removing import Removal, live_files
from sparkonce.sinks.iceberg.tables import Folders
from sparkonce.sinks.lakehouse.marks import Marks, batch_of
from sparkonce.sinks.lakehouse.payloads import PreparedBatch
from sparkonce.sinks.lakehouse.proofs import KEPT, End
from sparkonce.sinks.lakehouse.table import DataFile, Layout, LiveFile, LoadedTable

if TYPE_CHECKING:
    from pyiceberg.table import Table


class IcebergLayout(Layout):
    """How an Iceberg table wants its files.

    Args:
        table: as the catalog has it now.
        spec_id: the partition spec to write in.
    """

    def __init__(self, table: Table, spec_id: int) -> None:
        self._schema = table.schema()
        self._partitions = table.specs()[spec_id]
        self._plan = compute_statistics_plan(self._schema, table.properties)
        self._ids = parquet_path_to_id_mapping(self._schema)
        self.spec = spec_id
        self.schema = self.file_schema = schema_to_pyarrow(self._schema)
        self.is_partitioned = not self._partitions.is_unpartitioned()
        self.parquet = _get_parquet_writer_kwargs(table.properties)
        self.row_group = _number(
            table,
            TableProperties.PARQUET_ROW_GROUP_LIMIT,
            TableProperties.PARQUET_ROW_GROUP_LIMIT_DEFAULT,
        )
        self.file_bytes = _number(
            table,
            TableProperties.WRITE_TARGET_FILE_SIZE_BYTES,
            TableProperties.WRITE_TARGET_FILE_SIZE_BYTES_DEFAULT,
        )

    def split(self, rows: pa.Table) -> Iterator[tuple[Record, pa.Table]]:
        if not self.is_partitioned:
            yield Record(), rows
            return
        try:
            for part in _determine_partitions(self._partitions, self._schema, rows):
                yield part.partition_key.partition, part.arrow_table_partition
        except OverflowError as error:
            names = ", ".join(field.name for field in self._partitions.fields)
            raise pa.ArrowInvalid(
                f"the table is partitioned by {names}, and a row has a date before the year 1 or "
                "after the year 9999 there: leave such rows out of the query"
            ) from error

    def describe(self, file: DataFile) -> Mapping[str, Any]:
        data_file = IcebergFile.from_args(
            content=DataFileContent.DATA,
            file_path=file.path,
            file_format=FileFormat.PARQUET,
            partition=file.partition,
            file_size_in_bytes=file.bytes,
            sort_order_id=None,
            equality_ids=None,
            key_metadata=None,
            **self._statistics(file).to_serialized_dict(),
        )
        return to_json(data_file, self._partitions, self._schema)

    def _statistics(self, file: DataFile) -> DataFileStatistics:
        try:
            return data_file_statistics_from_parquet_metadata(file.footer, self._plan, self._ids)
        except OverflowError:  # a date that Python cannot hold: the file gets no bounds
            counts = MetricsMode(MetricModeTypes.COUNTS)
            plan = {number: replace(each, mode=counts) for number, each in self._plan.items()}
            return data_file_statistics_from_parquet_metadata(file.footer, plan, self._ids)


class IcebergTable(LoadedTable):
    """A table of a catalog, as it was loaded."""

    forgets = f"it keeps that of the newest {KEPT} drivers. Was the log restored from a backup?"

    def __init__(self, table: Table) -> None:
        self._table = table
        self._folders = Folders(table)
        self.id = str(table.metadata.table_uuid)
        self.marks = Marks(
            self._folders.storage, self.id, self._folders.marks, f"{self._folders.data}/"
        )

    def try_out(self) -> None:
        """Write, list and remove a file in each folder that a batch uses.

        Raises:
            OSError: that is not possible.
        """
        self.marks.try_out(self._folders.marks, self._folders.data, self._folders.metadata)

    def layout(self, spec: int | str | None = None) -> IcebergLayout:
        return IcebergLayout(self._table, self._table.spec().spec_id if spec is None else int(spec))

    def manifest(self, branch_id: BranchId, spec: int | str) -> str:
        return f"{self._folders.metadata}/{branch_id}s{spec}.avro"

    def write_manifest(
        self, path: str, spec: int | str, files: Sequence[Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        return prepared_manifest(self._table, int(spec), files, path)

    def end_of(self, branch_id: BranchId) -> End | Literal["unknown"] | None:
        return properties.end_of(self._table, branch_id)

    def obstacle(self, prepared: PreparedBatch | None) -> str | None:
        if why := self.keeps_files():
            return f"{why}, which IcebergSink does not write, and no table goes back"
        specs = {each["spec"] for each in prepared.manifests} if prepared else set()
        if gone := specs - set(self._table.specs()):
            return f"no longer has the partition spec {min(gone)}, in which the batch was written"
        return self._other_columns(prepared)

    def _other_columns(self, prepared: PreparedBatch | None) -> str | None:
        """Why the current schema cannot read the batch's files; None if it can."""
        manifests = prepared.manifests if prepared else ()
        known = self._table.schemas()
        # A batch of an earlier version does not say in which schemas its files are.
        for schema_id in sorted({n for each in manifests for n in each.get("schemas", ())}):
            if schema_id not in known:
                return f"no longer has the schema {schema_id}, in which the batch was written"
            if changed := unreadable(known[schema_id], self._table.schema()):
                return f"has other columns than the batch was written with: {changed}"
        return None

    def commit_end(
        self, branch_id: BranchId, end: End, prepared: PreparedBatch | None = None
    ) -> bool:
        if self._table.current_snapshot() is None:  # replaced since the start
            begin(self._table)
            return False
        proof = properties.proof(self._table, branch_id, end)
        return self._is_committed(Append(self._table, prepared), proof)

    def may_name(self, task: BranchId) -> bool:
        paths = [self.manifest(batch_of(task), spec) for spec in self._table.specs()]
        attempts = attempts_in(self._table, filter(self.marks.storage.exists, paths))
        return not attempts or task.attempt in attempts

    def is_taken_back(self, branch_id: BranchId) -> bool:
        return properties.is_taken_back(self._table, branch_id)

    def keeps_files(self) -> str | None:
        version = self._table.format_version
        return None if version == FORMAT_VERSION else f"has format version {version} by now"

    def live_files(self, batches: Sequence[PreparedBatch]) -> Sequence[Sequence[LiveFile]]:
        return live_files(self._table, batches)

    def commit_removal(self, branch_ids: Sequence[BranchId], files: Sequence[LiveFile]) -> bool:
        proof = properties.proof_of_removal(self._table, branch_ids)
        return self._is_committed(Removal(self._table, files), proof)

    @staticmethod
    def _is_committed(snapshot: Conditional, proof: Mapping[str, str]) -> bool:
        try:
            snapshot.commit_if_unchanged(proof)
        except CommitFailedException:
            # A client that repeats a request by itself gets this answer although the first request
            # succeeded, or will succeed later. So the manifest list stays.
            return False
        return True


def _number(table: Table, name: str, default: int) -> int:
    return property_as_int(table.properties, name, default) or default
