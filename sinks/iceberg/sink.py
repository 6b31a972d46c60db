"""`IcebergSink`: each batch is one snapshot of an Apache Iceberg table.

A commit succeeds only if the main branch still has the snapshot that was read, and the proof is a
property of the table, which outlives the snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pyiceberg.exceptions import NoSuchTableError

from sparkonce.datasets import Dataset
from sparkonce.errors import ConfigurationError
from sparkonce.finding import Finding
from sparkonce.sinks.base import Transform
from sparkonce.sinks.capabilities import NamesDatasets
from sparkonce.sinks.iceberg.appending import begin
from sparkonce.sinks.iceberg.checking import add_columns, check_table, create, diagnose
from sparkonce.sinks.iceberg.table import IcebergTable
from sparkonce.sinks.iceberg.tables import Tables
from sparkonce.sinks.lakehouse import missing
from sparkonce.sinks.lakehouse.sink import LakehouseSink

if TYPE_CHECKING:
    import pyarrow as pa


class IcebergSink(LakehouseSink, NamesDatasets):
    """Appends each batch to an Apache Iceberg table, in one snapshot.

    Readers of every engine get whole batches. Other writers, compaction, expiry of snapshots and
    changes of schema and partitioning may run at the same time.

    Args:
        table: ``NAMESPACE.TABLE``. Its format version must be 2.
        catalog: pyiceberg's settings of the catalog, such as ``{"type": "rest", "uri": …}``; or the
            name of a catalog in pyiceberg's own configuration, which every executor must have.
        create: "if_missing": create a table without partitions from the first batch's columns.
        new_columns: "add": a start adds the columns that the rows have and the table lacks; they
            may be null. By default they are refused, as fields within a column always are.
        max_open_files: how many partitions one task may write.
        name: see `TwoPhaseCommitSink`.
        select: see `TwoPhaseCommitSink`.
        transform: see `TwoPhaseCommitSink`.
        writers: see `TwoPhaseCommitSink`.

    Raises:
        ConfigurationError: a setting cannot work.
    """

    kind: ClassVar[str] = "iceberg"

    def __init__(
        self,
        table: str,
        *,
        catalog: str | Mapping[str, str],
        create: Literal["if_missing"] | None = None,
        new_columns: Literal["add"] | None = None,
        max_open_files: int = 32,
        name: str | None = None,
        select: Sequence[str] | None = None,
        transform: Transform | None = None,
        writers: Literal[1] | None = None,
    ) -> None:
        super().__init__(
            create=create,
            new_columns=new_columns,
            max_open_files=max_open_files,
            name=name,
            select=select,
            transform=transform,
            writers=writers,
        )
        if "." not in table:
            raise ConfigurationError(
                f"IcebergSink: table={table!r} names no namespace: write NAMESPACE.TABLE"
            )
        self._tables = Tables(catalog, table)

    @property
    def target(self) -> str:
        return f"Iceberg table {self._tables.identifier} in catalog {self._tables.name}"

    def dataset(self) -> Dataset:
        return self._tables.dataset()

    def diagnose(self) -> Iterable[Finding]:
        return diagnose(self._tables, self.target, creates=self._create is not None)

    def close(self) -> None:
        self._tables.close()

    def _load(self) -> IcebergTable | None:
        try:
            return IcebergTable(self._tables.load())
        except NoSuchTableError:
            return None

    def _prepare_table(self, schema: pa.Schema) -> IcebergTable:
        try:
            table = self._tables.load()
        except NoSuchTableError:
            if self._create is None:
                raise missing.refusal(self.target) from None
            table = create(self._tables, schema)
        if self._new_columns is not None:
            table = add_columns(self._tables, schema, self.target)
        check_table(table, schema, self.target)
        begin(table)
        return IcebergTable(table)
