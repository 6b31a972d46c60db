"""`LakehouseSink`: a branch is a set of Parquet files, and one commit of the table shows a batch.

beginTransaction  a mark                          write   Parquet files, which no table names
preCommit         the files are complete          vote    one manifest names all tasks' files
commit            the table names the files, if it still is as it was loaded; the same commit
                  holds the proof
abort             a commit that adds no files, with a proof that rules the batch out
"""

from __future__ import annotations

import contextlib
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal

import pyarrow as pa

from sparkonce.errors import (
    CommitRejectedError,
    ConfigurationError,
    PrepareRejectedError,
    SinkUnavailableError,
    SparkOnceError,
)
from sparkonce.model import BranchId, Committable, Owner
from sparkonce.sinks.base import Transform, TwoPhaseCommitSink
from sparkonce.sinks.capabilities import (
    AbortsDecided,
    Delivered,
    Diagnoses,
    FindsBranches,
    TakesBack,
    Visible,
    Votes,
)
from sparkonce.sinks.committables import name_used_before
from sparkonce.sinks.lakehouse.finishing import BatchEnd, TaskEnd
from sparkonce.sinks.lakehouse.marks import Mark, batch_of
from sparkonce.sinks.lakehouse.outages import in_one_line, is_outage
from sparkonce.sinks.lakehouse.payloads import PreparedBatch, WrittenFiles
from sparkonce.sinks.lakehouse.ranges import as_ranges
from sparkonce.sinks.lakehouse.table import LoadedTable
from sparkonce.sinks.lakehouse.taking_back import Remover
from sparkonce.sinks.lakehouse.writing import BranchWriter

ORPHANS_KEPT_S: Final = (3 * 24 - 1) * 3600.0
"""How long a prepared file is safe: by default Iceberg's `remove_orphan_files` deletes files that
no snapshot names once they are three days old, and Delta's VACUUM once they are seven."""


class LakehouseSink(
    TwoPhaseCommitSink[BranchWriter], Votes, AbortsDecided, FindsBranches, TakesBack, Diagnoses
):
    """What the sinks of table formats share.

    Args:
        create: "if_missing": the first start creates the table.
        new_columns: "add": a start adds the columns that the table lacks.
        max_open_files: how many partitions one task may write.
        name: see `TwoPhaseCommitSink`.
        select: see `TwoPhaseCommitSink`.
        transform: see `TwoPhaseCommitSink`.
        writers: see `TwoPhaseCommitSink`.
    """

    def __init__(
        self,
        *,
        create: Literal["if_missing"] | None,
        new_columns: Literal["add"] | None,
        max_open_files: int,
        name: str | None,
        select: Sequence[str] | None,
        transform: Transform | None,
        writers: Literal[1] | None,
    ) -> None:
        super().__init__(name=name, select=select, transform=transform, writers=writers)
        if create not in {None, "if_missing"}:
            raise ConfigurationError(
                f'{type(self).__name__}: create={create!r}: write "if_missing" or None'
            )
        if new_columns not in {None, "add"}:
            raise ConfigurationError(
                f'{type(self).__name__}: new_columns={new_columns!r}: write "add" or None'
            )
        self._create = create
        self._new_columns = new_columns
        self._max_open_files = max_open_files
        self._spec: int | str | None = None

    @abstractmethod
    def _load(self) -> LoadedTable | None:
        """The table as it is now; None if there is none."""

    @abstractmethod
    def _prepare_table(self, schema: pa.Schema) -> LoadedTable:
        """Check that the table takes the rows; first create or extend it where the sink may.

        Raises:
            ConfigurationError: a setting, the table or a column cannot work.
        """

    # -- on the executors --------------------------------------------------------------------------

    def beginTransaction(self, branch_id: BranchId) -> BranchWriter:
        table = self._load()
        if table is None:
            raise PrepareRejectedError(f"{self.target} does not exist any more", branch_id)
        return BranchWriter(table, self._spec, branch_id, self._max_open_files, self.target)

    def write(self, handle: BranchWriter, batch: pa.RecordBatch) -> None:
        with self._rejecting(handle.branch_id):
            handle.write(batch)

    def preCommit(self, handle: BranchWriter) -> Committable:
        with self._rejecting(handle.branch_id):
            written = handle.finish()
        return written.committable(
            handle.branch_id, safe_until=time.time() + ORPHANS_KEPT_S, rows=handle.rows
        )

    def discard(self, handle: BranchWriter) -> None:
        handle.discard()

    # -- on the driver, or in any process ----------------------------------------------------------

    def validate(self, schema: pa.Schema) -> None:
        """Check the table, its storage and the columns.

        Raises:
            ConfigurationError: a setting, the table or a column cannot work.
            SinkUnavailableError: the catalog or the storage does not respond now.
        """
        try:
            self._spec = self._prepare_table(schema).layout().spec
        except SparkOnceError:
            raise
        except Exception as error:
            if not is_outage(error):
                raise
            raise SinkUnavailableError(
                f"{type(self).__name__}: {self.target} is unavailable now ({in_one_line(error)})"
            ) from error

    def vote(
        self, branch_id: BranchId, committables: Sequence[Committable]
    ) -> Sequence[Committable]:
        written = [WrittenFiles.of(committable) for committable in committables]
        files = [file for each in written for file in each.files]
        if not files:
            return []
        table = self._load()
        if table is not None and table.end_of(branch_id) == "committed":
            raise name_used_before(self.target, branch_id)
        where = None if table is None else (table.id, table.marks.data(branch_id))
        if table is None or where is None or {where} != {(w.table, w.data) for w in written}:
            raise PrepareRejectedError(
                f"{self.target} was moved, or dropped and created again, while tasks wrote to it",
                branch_id,
            )
        attempts = as_ranges(committable.branch_id.attempt for committable in committables)
        by_spec = {
            spec: [file for each in written if each.spec == spec for file in each.files]
            for spec in sorted({each.spec for each in written if each.files}, key=str)
        }
        paths = {spec: table.manifest(branch_id, spec) for spec in by_spec}
        table.marks.write(branch_id, Mark(*where, attempts, list(paths.values())))
        prepared = PreparedBatch(
            *where,
            attempts,
            len(files),
            sum(file["rows"] for file in files),
            sum(file["bytes"] for file in files),
            tuple(table.write_manifest(paths[spec], spec, by_spec[spec]) for spec in by_spec),
        )
        if obstacle := table.obstacle(prepared):
            raise PrepareRejectedError(f"{self.target} {obstacle}", branch_id)
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
        if branch_id == batch_of(branch_id):
            prepared = PreparedBatch.of(found) if found.payload else None
            self._ending(branch_id).abort(prepared)
        elif table := self._load():
            TaskEnd(table, self.target, branch_id).abort()

    def abort_decided(self, committable: Committable) -> None:
        if not self._ending(committable.branch_id).abort_ruled(PreparedBatch.of(committable)):
            raise CommitRejectedError(
                f"{committable.branch_id} is committed in {self.target}, and a rewrite would "
                "duplicate its rows",
                committable.branch_id,
            )

    def find_branches(self, owner: Owner) -> Iterable[Committable]:
        table = self._load()
        return [] if table is None else map(Committable, table.marks.of(owner))

    def find_delivered(self, branches: Sequence[Delivered]) -> Sequence[Visible]:
        return self._remover().find(branches)

    def take_back(self, branches: Sequence[Delivered]) -> None:
        self._remover().take_back(branches)

    # -- helpers -----------------------------------------------------------------------------------

    def _remover(self) -> Remover:
        return Remover(self._load, self.target, self.name)

    def _ending(self, branch_id: BranchId) -> BatchEnd:
        return BatchEnd(self._load, self.target, branch_id)

    @contextlib.contextmanager
    def _rejecting(self, branch_id: BranchId) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, ValueError, KeyError, OverflowError) as error:
            raise PrepareRejectedError(
                f"{type(self).__name__}: rows do not fit into {self.target} ({error})", branch_id
            ) from error
