"""`PostgresSink`: the verbs of the contract, each a few lines over the rooms below.

load="staged"
executors   COPY ─► staging table per task                            (loading.staging)
driver      vote: staging ─► target + marker row                      (merging.preparing)
            commit: COMMIT PREPARED, or COMMIT; staging dropped       (merging.committing)
            commit_one_phase: the log's write and COMMIT, if the log is in the same database
load="direct"
executors   COPY ─► target + marker row, PREPARE TRANSACTION per task (loading.direct)
driver      commit: COMMIT PREPARED of each                           (loading.finishing)

A committable shows which load made it, so a query may change `load=`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import psycopg

from sparkonce.clients.postgres import Database, Statement
from sparkonce.errors import (
    CommitUnresolvedError,
    ConfigurationError,
    ProtocolError,
    SinkUnavailableError,
)
from sparkonce.finding import Finding
from sparkonce.model import BranchId, Committable, Owner
from sparkonce.once import once
from sparkonce.sinks.base import Transform, TwoPhaseCommitSink
from sparkonce.sinks.capabilities import (
    AbortsDecided,
    AbortsMany,
    ChecksOthers,
    CommitsOnePhase,
    Delivered,
    Diagnoses,
    FindsBranches,
    TakesBack,
    Visible,
    Votes,
)
from sparkonce.sinks.postgres.loading.direct import PREPARED_VERSION, DirectWriter
from sparkonce.sinks.postgres.loading.finishing import Finisher
from sparkonce.sinks.postgres.loading.staging import StagingWriter
from sparkonce.sinks.postgres.merging.committing import MergeCommitter
from sparkonce.sinks.postgres.merging.held import HeldMerges
from sparkonce.sinks.postgres.merging.merge import Merge
from sparkonce.sinks.postgres.merging.preparing import prepare
from sparkonce.sinks.postgres.merging.work import MergeWork
from sparkonce.sinks.postgres.naming import NamesTable
from sparkonce.sinks.postgres.server.advice import is_transient, next_step
from sparkonce.sinks.postgres.server.connections import Address, Pool
from sparkonce.sinks.postgres.server.identity import Server, warn_of_publications
from sparkonce.sinks.postgres.server.sql import Timeouts
from sparkonce.sinks.postgres.settings import Load, check_settings, promise
from sparkonce.sinks.postgres.sweeping import Sweeper
from sparkonce.sinks.postgres.taking_back import Remover
from sparkonce.sinks.postgres.target.diagnosis import diagnose, room_for_tasks
from sparkonce.sinks.postgres.target.neighbours import check_neighbours
from sparkonce.sinks.postgres.target.table import Request, Target, resolve
from sparkonce.sinks.postgres.target.writing import Write, Writing, one_or_several
from sparkonce.sinks.verbs import abort_each

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger("sparkonce")

_UPSERT_WRITERS: Final = 4
"""The same on every cluster: a replay must deal the same rows to each task."""

_FROZEN_S: Final = 60.0
"""A paused driver may keep the rows of a one-phase merge locked for this long."""


class PostgresSink(
    TwoPhaseCommitSink[StagingWriter],
    Votes,
    CommitsOnePhase,
    AbortsMany,
    AbortsDecided,
    FindsBranches,
    TakesBack,
    ChecksOthers,
    Diagnoses,
    NamesTable,
):
    """Writes each batch into a Postgres table; with the default `load=` readers see whole batches.

    Tasks COPY into staging tables. Before the decision the driver merges these into the target in
    one transaction, which checks every constraint, and prepares it. If the server allows no
    prepared transactions, the transaction stays open; if lost, it is merged again from staging.

    With load="direct" each task loads its rows into the target itself and leaves a prepared
    transaction: rows become visible task by task. If this is the pipeline's only sink and the log
    is in the same database, one transaction commits both. See `docs/howto/postgres.md`.

    Args:
        conninfo: as psycopg takes it: a URL, or ``host=… dbname=…``. No message shows it.
        table: the target, written as in SQL: ``orders``, ``shop.orders``, ``"Mixed Case"``. The
            batch's columns are matched by exact name; the table's other columns get their defaults.
        key: the column or columns that identify a row; a unique index must cover exactly these. A
            key with a NULL equals no other key. Without `order_by` a key may occur once in a batch.
        write: ``"append"``; ``"ignore"``: rows whose key is in the table are skipped;
            ``"upsert"``: they update the table's row; ``"merge"``: they update or delete it.
            Default: "append" without a `key`, "upsert" with one, "merge" with a `key` and `delete`.
        update: columns that an update sets; default: all columns of the batch but the key.
        order_by: one column, or a list of columns. Only the row with the greatest value counts
            for its key; NULL is the least value. A tie is refused.
        delete: a boolean column, or a condition in Postgres' SQL over the batch's columns, such as
            ``"op = 'D'"``; a row for which it is true deletes the table's row of its key. Columns
            that only `delete` or `order_by` uses need not be in the table.
        create: ``"if_missing"`` creates the table, with types that follow from the batch's and
            `key` as its primary key. Default: a missing table is refused.
        dead_letter: a table, created if it is missing, for rows that violate a constraint of the
            target; the other rows are committed. Default: such a row aborts the batch in all sinks.
        name: see `TwoPhaseCommitSink`, also for `select` and `transform`.
        load: "staged" or "direct".
        writers: see `TwoPhaseCommitSink`. With load="direct" and a `key`: the number of tasks that
            write, 4 by default; all rows of a key go to one task. A replay must use the same
            number, so change it only while no batch is unfinished.
        lock_timeout_s: how many seconds a statement waits for a lock.
        statement_timeout_s: how many seconds a statement, such as the merge of a batch, may take.

    Raises:
        ConfigurationError: a setting cannot work.
    """

    kind: ClassVar[str] = "postgres"
    lists_uncommitted_only: ClassVar[bool] = True

    def __init__(
        self,
        conninfo: str,
        *,
        table: str,
        key: str | Sequence[str] | None = None,
        write: Write | None = None,
        update: Sequence[str] | None = None,
        order_by: str | Sequence[str] | None = None,
        delete: str | None = None,
        create: Literal["if_missing"] | None = None,
        dead_letter: str | None = None,
        name: str | None = None,
        select: Sequence[str] | None = None,
        transform: Transform | None = None,
        load: Load = "staged",
        writers: int | None = None,
        lock_timeout_s: float = 30.0,
        statement_timeout_s: float = 600.0,
    ) -> None:
        columns, is_direct = one_or_several(key), load == "direct"
        if is_direct and columns is not None:
            # Two tasks with one key would wait for each other, and Postgres would not notice.
            self.distribute_by = tuple(columns)
            writers = _UPSERT_WRITERS if writers is None else writers
        super().__init__(name=name, select=select, transform=transform, writers=writers)
        self._timeouts = Timeouts(lock_timeout_s, statement_timeout_s)
        check_settings(self.name, self._timeouts, load, create, dead_letter)
        self._address, self._load = Address.read(conninfo), load
        self._request = Request(
            table,
            Writing.of(self.name, write, key=key, update=update, order_by=order_by, delete=delete),
            creates=create is not None,
            dead_letter=dead_letter,
            copies=is_direct and columns is None,
            is_dealt=is_direct and writers != 1,
        )
        self._target: Target | None = None
        self._server: Server | None = None
        self._held = HeldMerges()

    @property
    def target(self) -> str:
        return f"postgres table {self._address.database}.{self._request.table}"

    @property
    def where(self) -> str:
        return f"{self.target} at {self._address.shown}"

    # -- on the executors ------------------------------------------------------------------------

    def beginTransaction(self, branch_id: BranchId) -> StagingWriter:
        target, server = self._validated(branch_id)
        task = (self._address, target, branch_id, self._timeouts)
        if self._load == "direct":
            return DirectWriter(*task, writing=self._request.writing, server=server)
        return StagingWriter(*task)

    def write(self, handle: StagingWriter, batch: pa.RecordBatch) -> None:
        handle.write(batch)

    def preCommit(self, handle: StagingWriter) -> Committable:
        return handle.finish()

    def discard(self, handle: StagingWriter) -> None:
        handle.discard()

    # -- on the driver ---------------------------------------------------------------------------

    def validate(self, schema: pa.Schema) -> None:
        with _asking(self._address, self.where, self._timeouts):
            server = self._pool.run(Server.ask)
            server.check(self.where)
            target = self._pool.run(lambda c: resolve(c, self._request, schema))
            self._pool.run(lambda c: warn_of_publications(c, target.schema, self.where))
        if self._address.names_several:
            server.check_failover(self.where)
        if self._load == "direct":
            server.check_prepares(self.where, self.writers)
            if target.why_open is not None:
                self._request.refuse(f'{target.why_open}; set load="staged"')
        logger.info("%s: %s", self.where, promise(self._load, server, target.why_open))
        self._target, self._server = target, server

    def check_others(self, others: Sequence[object]) -> None:
        found = [sink._target for sink in others if isinstance(sink, PostgresSink)]  # noqa: SLF001
        if self._request.dead_letter is not None and found:
            with _asking(self._address, self.where, self._timeouts):
                self._pool.run(lambda c: check_neighbours(c, self._request, self._target, found))

    def diagnose(self) -> Iterable[Finding]:
        return diagnose(self._pool, self._address, self._request, self._timeouts)

    def room_for_tasks(self) -> int | None:
        return self._pool.run(room_for_tasks)

    def vote(
        self, branch_id: BranchId, committables: Sequence[Committable]
    ) -> Sequence[Committable]:
        return committables if self._load == "direct" else self._merge(branch_id, committables)

    def commit(self, committable: Committable) -> None:
        if committable.version == PREPARED_VERSION:
            Finisher(self._address, self._pool, self._timeouts).commit(committable)
            return
        branch_id, merge = committable.branch_id, Merge.read(committable)
        MergeCommitter(self._work(branch_id, merge)).commit(self._held.take(branch_id))
        self._sweeper.tidy(merge)

    # -- one transaction with the log ------------------------------------------------------------

    def why_two_phases(self, why_apart: Callable[[object], str | None]) -> str | None:
        if self._load == "direct":
            return 'load="direct" commits task by task'
        try:
            return why_apart(Database(lambda q: self._pool.run(lambda c: c.execute(q).fetchall())))
        except psycopg.Error as error:
            return f"{self.where}: {self._address.said(error)}"

    def prepare_one_phase(
        self, branch_id: BranchId, committables: Sequence[Committable]
    ) -> Sequence[Committable]:
        return self._merge(branch_id, committables, one_phase=True)

    def commit_one_phase(self, committable: Committable, log_write: object) -> None:
        branch_id, merge = committable.branch_id, Merge.read(committable)
        if not isinstance(log_write, Statement):
            raise ProtocolError(f"{branch_id}: {log_write!r} is not a write of a Postgres log")
        if (held := self._held.take(branch_id)) is None:
            raise CommitUnresolvedError(f"{branch_id} is not open in this process", branch_id)
        MergeCommitter(self._work(branch_id, merge)).commit_with(held, log_write)
        self._sweeper.tidy(merge)

    def abort(self, branch: BranchId | Committable) -> None:
        self._sweeper.abort(Committable(branch) if isinstance(branch, BranchId) else branch)

    def abort_decided(self, committable: Committable) -> None:
        self.abort(committable)
        self._sweeper.refuse_committed(committable)

    def abort_many(self, found: Sequence[Committable]) -> Sequence[Exception | None]:
        merges = [c for c in found if "staging" not in c.payload]
        staged = [c for c in found if "staging" in c.payload]
        # Merges first: they lock their staging tables.
        errors = dict(zip((c.branch_id for c in merges), abort_each(self, merges), strict=True))
        errors.update(self._sweeper.abort_staged(staged))
        return [errors.get(c.branch_id) for c in found]

    def find_branches(self, owner: Owner) -> Iterable[Committable]:
        return self._sweeper.find(owner)

    def find_delivered(self, branches: Sequence[Delivered]) -> Sequence[Visible]:
        return Remover(self.where, self._address, self._timeouts).find(branches)

    def take_back(self, branches: Sequence[Delivered]) -> None:
        Remover(self.where, self._address, self._timeouts).take_back(branches)

    def close(self) -> None:
        self._held.close()
        self._pool.close()

    @property
    def _pool(self) -> Pool:
        return once(Pool, self._address)

    @property
    def _sweeper(self) -> Sweeper:
        schema = None if self._target is None else self._target.schema
        named = (self.name, self.where, self._request.table, schema)
        return Sweeper(*named, self._address, self._timeouts, self._held)

    def _merge(
        self, branch_id: BranchId, committables: Sequence[Committable], *, one_phase: bool = False
    ) -> Sequence[Committable]:
        if not committables:
            return ()
        target, _ = self._validated(branch_id)
        loads: list[Any] = [committable.payload for committable in committables]
        staging, rows = [load["staging"] for load in loads], sum(load["rows"] for load in loads)
        merge, idle_s = Merge.of(target, self._request.writing, staging, rows), 0.0
        if one_phase:
            merge, idle_s = replace(merge, prepared=False), _FROZEN_S
        if (held := prepare(self._work(branch_id, merge, idle_s))) is not None:
            self._held.put(branch_id, held)
        return (merge.committable(branch_id),)

    def _work(self, branch_id: BranchId, merge: Merge, idle_s: float = 0) -> MergeWork:
        timeouts = replace(self._timeouts, idle=idle_s)
        return MergeWork(self._address, self._pool, timeouts, branch_id, merge)

    def _validated(self, branch_id: BranchId) -> tuple[Target, Server]:
        if self._target is None or self._server is None:
            raise ProtocolError(f"{branch_id}: call validate() before the first batch")
        return self._target, self._server


@contextmanager
def _asking(address: Address, where: str, timeouts: Timeouts) -> Iterator[None]:
    """Turn what the server says before any data moves into one of our errors."""
    try:
        yield
    except psycopg.Error as error:
        said, cause = address.said(error) + next_step(error, timeouts), address.cause(error)
        if is_transient(error):
            raise SinkUnavailableError(
                f"PostgresSink: {where} is unavailable now: {said}"
            ) from cause
        raise ConfigurationError(f"PostgresSink: {where} cannot be used: {said}") from cause
