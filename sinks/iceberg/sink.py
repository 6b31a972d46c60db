"""`IcebergSink`: a branch is a set of Parquet files, and one commit of the table shows a batch.

beginTransaction  a mark                          write   Parquet files, which no table names
preCommit         the files are complete          vote    one manifest names all tasks' files
commit            a snapshot adds the manifest, if main still has the snapshot that was read; in the
                  same commit a property of the table proves it
abort             a snapshot that adds nothing, with a property that rules the batch out
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Final, Literal

import pyarrow as pa
from pyiceberg.exceptions import NoSuchTableError

from sparkonce.errors import CommitRejectedError, ConfigurationError, PrepareRejectedError
from sparkonce.finding import Finding
from sparkonce.model import BranchId, Committable, Owner
from sparkonce.sinks.base import Transform, TwoPhaseCommitSink
from sparkonce.sinks.capabilities import AbortsDecided, Diagnoses, FindsBranches, Votes
from sparkonce.sinks.iceberg.checking import begin, check_table, create, diagnose
from sparkonce.sinks.iceberg.files import (
    PreparedBatch,
    WrittenFiles,
    prepared_manifest,
)
from sparkonce.sinks.iceberg.finishing import BatchEnd, TaskEnd
from sparkonce.sinks.iceberg.marks import Mark, Marks, batch_of
from sparkonce.sinks.iceberg.ranges import as_ranges
from sparkonce.sinks.iceberg.tables import Tables
from sparkonce.sinks.iceberg.writing import BranchWriter

if TYPE_CHECKING:
    from pyiceberg.table import Table

_KEPT_S: Final = (3 * 24 - 1) * 3600.0
"""How long a prepared file is safe: Iceberg's `remove_orphan_files` deletes files that no snapshot
names once they are three days old, by default."""


class IcebergSink(TwoPhaseCommitSink[BranchWriter], Votes, AbortsDecided, FindsBranches, Diagnoses):
    """Appends each batch to an Apache Iceberg table, in one snapshot.

    Readers of every engine get whole batches. Other writers, compaction, expiry of snapshots and
    changes of schema and partitioning may run at the same time.

    Args:
        table: ``NAMESPACE.TABLE``. Its format version must be 2.
        catalog: pyiceberg's settings of the catalog, such as ``{"type": "rest", "uri": …}``; or the
            name of a catalog in pyiceberg's own configuration, which every executor must have.
        create: "if_missing": create a table without partitions from the first batch's columns.
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
        max_open_files: int = 32,
        name: str | None = None,
        select: Sequence[str] | None = None,
        transform: Transform | None = None,
        writers: Literal[1] | None = None,
    ) -> None:
        super().__init__(name=name, select=select, transform=transform, writers=writers)
        if "." not in table:
            raise ConfigurationError(
                f"IcebergSink: table={table!r} names no namespace: write NAMESPACE.TABLE"
            )
        if create not in {None, "if_missing"}:
            raise ConfigurationError(f'IcebergSink: create={create!r}: write "if_missing" or None')
        self._tables = Tables(catalog, table)
        self._create = create
        self._max_open_files = max_open_files
        self._spec_id: int | None = None

    @property
    def target(self) -> str:
        return f"Iceberg table {self._tables.identifier} in catalog {self._tables.name}"

    # -- on the executors --------------------------------------------------------------------------

    def beginTransaction(self, branch_id: BranchId) -> BranchWriter:
        table = self._tables.load()
        spec_id = table.spec().spec_id if self._spec_id is None else self._spec_id
        return BranchWriter(table, spec_id, branch_id, self._max_open_files)

    def write(self, handle: BranchWriter, batch: pa.RecordBatch) -> None:
        with self._rejecting(handle.branch_id):
            handle.write(batch)

    def preCommit(self, handle: BranchWriter) -> Committable:
        with self._rejecting(handle.branch_id):
            written = handle.finish()
        return written.committable(
            handle.branch_id, safe_until=time.time() + _KEPT_S, rows=handle.rows
        )

    def discard(self, handle: BranchWriter) -> None:
        handle.discard()

    # -- on the driver, or in any process ----------------------------------------------------------

    def validate(self, schema: pa.Schema) -> None:
        """Check catalog, table and columns.

        Raises:
            ConfigurationError: a setting, the table or a column cannot work.
        """
        try:
            table = self._tables.load()
        except NoSuchTableError:
            if self._create is None:
                raise ConfigurationError(
                    f'{self.target} does not exist: create it, or set create="if_missing"'
                ) from None
            table = create(self._tables, schema)
        check_table(table, schema, self.target)
        begin(table)
        self._spec_id = table.spec().spec_id

    def vote(
        self, branch_id: BranchId, committables: Sequence[Committable]
    ) -> Sequence[Committable]:
        written = [WrittenFiles.of(committable) for committable in committables]
        files = [file for each in written for file in each.files]
        if not files:
            return []
        table = self._tables.load()
        marks = Marks(table)
        where = (marks.table, marks.data(branch_id))
        if {where} != {(each.table, each.data) for each in written}:
            raise PrepareRejectedError(
                f"{self.target} was moved, or dropped and created again, while tasks wrote to it",
                branch_id,
            )
        attempts = as_ranges(committable.branch_id.attempt for committable in committables)
        by_spec = {
            spec: [file for each in written if each.spec == spec for file in each.files]
            for spec in sorted({each.spec for each in written if each.files})
        }
        paths = {spec: marks.manifest(branch_id, spec) for spec in by_spec}
        marks.write(branch_id, Mark(*where, attempts, list(paths.values())))
        prepared = PreparedBatch(
            *where,
            attempts,
            len(files),
            sum(file["rows"] for file in files),
            sum(file["bytes"] for file in files),
            tuple(
                prepared_manifest(table, spec, of_spec, paths[spec])
                for spec, of_spec in by_spec.items()
            ),
        )
        return [
            prepared.committable(
                branch_id,
                safe_until=min(c.safe_until or 0 for c in committables),
                text=f"{prepared.rows} rows in {prepared.files} files",
            )
        ]

    def commit(self, committable: Committable) -> None:
        self._ending(committable.branch_id).commit(PreparedBatch.of(committable))

    def abort(self, branch: BranchId | Committable) -> None:
        found = branch if isinstance(branch, Committable) else Committable(branch)
        branch_id = found.branch_id
        if self._create is not None and self._table() is None:
            return
        if branch_id != batch_of(branch_id):
            TaskEnd(self._tables, self.target, branch_id).abort()
        else:
            prepared = PreparedBatch.of(found) if found.payload else None
            self._ending(branch_id).abort(prepared)

    def abort_decided(self, committable: Committable) -> None:
        if not self._ending(committable.branch_id).abort(PreparedBatch.of(committable)):
            raise CommitRejectedError(
                f"{committable.branch_id} is committed in {self.target}, and a rewrite would "
                "duplicate its rows",
                committable.branch_id,
            )

    def find_branches(self, owner: Owner) -> Iterable[Committable]:
        table = self._table()
        return [] if table is None else [Committable(found) for found in Marks(table).of(owner)]

    def diagnose(self) -> Iterable[Finding]:
        return diagnose(self._tables, self.target, creates=self._create is not None)

    def close(self) -> None:
        self._tables.close()

    # -- helpers -----------------------------------------------------------------------------------

    def _table(self) -> Table | None:
        """The table as it is now; None if the first start has yet to create it."""
        try:
            return self._tables.load()
        except NoSuchTableError:
            if self._create is None:
                raise
            return None

    def _ending(self, branch_id: BranchId) -> BatchEnd:
        return BatchEnd(self._tables, self.target, branch_id)

    @contextlib.contextmanager
    def _rejecting(self, branch_id: BranchId) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, ValueError, KeyError) as error:
            raise PrepareRejectedError(
                f"IcebergSink: rows do not fit into {self.target} ({error})", branch_id
            ) from error
