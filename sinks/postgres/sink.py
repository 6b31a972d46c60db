"""`PostgresSink`: the verbs of the contract, each a few lines over the modules beside it.

mode="staged"
executors   COPY ─► staging table per task                            (staging)
driver      vote: staging ─► target + marker row              (merging)
            commit: COMMIT PREPARED, or COMMIT; staging dropped
            commit_one_phase: the log's write and COMMIT, where the log is in the same database
mode="prepared"
executors   COPY ─► target + marker row, PREPARE TRANSACTION per task (prepared)
driver      commit: COMMIT PREPARED of each

A committable says itself in which mode it was made, so that a query may change its mode.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, get_args

import psycopg

from sparkonce.errors import (
    CommitRejectedError,
    CommitUnresolvedError,
    ConfigurationError,
    ProtocolError,
    settle_command,
)
from sparkonce.finding import Finding
from sparkonce.model import DRIVER_ATTEMPT, Ask, BranchId, Committable, Owner
from sparkonce.sinks.base import Transform, TwoPhaseCommitSink
from sparkonce.sinks.capabilities import (
    AbortsDecided,
    AbortsMany,
    CommitsOnePhase,
    Diagnoses,
    FindsBranches,
    Votes,
)
from sparkonce.sinks.postgres.advice import next_step
from sparkonce.sinks.postgres.attaching import Attach, warn_of_slots, with_attached
from sparkonce.sinks.postgres.attaching import check as check_attach
from sparkonce.sinks.postgres.catalog import Target, resolve, standing
from sparkonce.sinks.postgres.connections import (
    Address,
    PgConnection,
    Pool,
    ask_as_login,
    pool_of,
    roll_back,
)
from sparkonce.sinks.postgres.diagnosis import diagnose
from sparkonce.sinks.postgres.merge import PAYLOAD_VERSION, Merge
from sparkonce.sinks.postgres.merging import Merger
from sparkonce.sinks.postgres.prepared import (
    PREPARED_VERSION,
    Finisher,
    PreparedWriter,
    rolling_back,
)
from sparkonce.sinks.postgres.server import Server, warn_of_publications
from sparkonce.sinks.postgres.sql import (
    COMMIT,
    MARKER_TABLE,
    OPEN,
    PREPARED,
    READ_COMMITTED,
    STAGED,
    Timeouts,
    branch_of_session,
    drop_staging,
    end_holders,
    find_marker,
    find_schema,
    find_standing,
    script,
    settings,
    staging_name,
)
from sparkonce.sinks.postgres.staging import StagingWriter
from sparkonce.sinks.postgres.writing import Write, Writing
from sparkonce.sinks.verbs import abort_each

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger("sparkonce")

Mode: TypeAlias = Literal["staged", "prepared"]
"""How rows reach the target: by staging tables and one merge, or straight, task by task."""

_UPSERT_WRITERS = 4
"""A number that stays the same on every cluster: a replay must give each task its rows again."""

_LEAST_S, _MOST_S = 0.001, 2_147_483
"""Postgres keeps a timeout as an int of milliseconds, and takes 0 for none at all."""

_FROZEN_S = 60.0
"""How long the server keeps the rows of one phase locked for a driver that stands still."""

_TIDY_LOCK_S = 1.0
"""Nobody waits long for whoever reads staging tables, such as a backup; they are swept later."""

_TIDY_EACH_LOCK_S = 0.01
"""One by one, after they were waited for together: a backup may hold hundreds."""


class PostgresSink(
    TwoPhaseCommitSink[StagingWriter],
    Votes,
    CommitsOnePhase,
    AbortsMany,
    AbortsDecided,
    FindsBranches,
    Diagnoses,
):
    """Writes each batch into a Postgres table, visible as a whole unless you choose otherwise.

    Tasks COPY into staging tables beside the target. Before the decision the driver merges them in
    one transaction, in which every constraint is checked, and leaves it as a prepared one; where
    the server allows none (max_prepared_transactions = 0) it keeps the transaction open and, if its
    connection is lost, merges again from the staging tables. `validate` logs which of them holds.

    With mode="prepared" each task loads its rows straight into the target and leaves a prepared
    transaction: rows are written once, and become visible task by task. `docs/postgres.md` tells
    what it needs and which of the two to take.

    Where the sink is the pipeline's only one and the transaction log is in the same database, the
    merge and the log's record are committed in one transaction instead.

    The table ``sparkonce_commits`` in the target's schema has a row for each committed batch with
    rows; with mode="prepared" for each task of it.

    Args:
        conninfo: as psycopg takes it: a URL, or ``host=… dbname=…``. It reaches the executors,
            and no message.
        table: the target, written as in SQL: ``orders``, ``shop.orders``, ``"Mixed Case"``. The
            batch's columns go by their exact names; other columns get their defaults.
        key: columns that identify a row. A unique index must cover exactly these columns. As always
            in SQL, keys with a NULL equal no other key. Without `order_by` a key may come once in a
            batch.
        write: ``"append"``; ``"ignore"``: a row whose key is there is left out; ``"upsert"``: it
            updates that row; ``"merge"``: it updates or deletes that row. Default: what `key` and
            `delete` ask for.
        update: which columns an update sets; default: all of the batch but the key.
        order_by: of several rows with one key in a batch the one with the greatest value counts, as
            if there were no others. NULL is the least; a tie for the greatest is refused.
        delete: a boolean column, or a condition in Postgres' SQL over the batch's columns, such as
            ``"op = 'D'"``; a row for which it is true deletes the table's row of its key. Columns
            that only `delete` or `order_by` uses need not be in the table.
        create: ``"if_missing"`` creates the table with types that follow from the batch's, and
            `key` as its primary key; the statement is logged. Default: a missing table is refused.
        dead_letter: a table, in the target's schema if no other is named, for rows that violate a
            constraint of the target, with the reason; the rest of the batch commits with them. It
            is created where it is missing. Default: such a row aborts the batch in every sink.
        name: see `TwoPhaseCommitSink`.
        select: see `TwoPhaseCommitSink`.
        transform: see `TwoPhaseCommitSink`.
        mode: "staged" or "prepared".
        writers: see `TwoPhaseCommitSink`. With mode="prepared" and a `key`, any number: rows are
            dealt out by their keys to so many tasks, 4 by default. It is part of what a replay
            must repeat: change it only while no batch is unfinished.
        lock_timeout: how long a statement waits for a lock, in seconds.
        statement_timeout: how long the merge of a batch may take, in seconds.
        attach: the bigint column by whose LIST the target is partitioned, for the fast append: what
            a task has loaded becomes a partition, instead of being copied (docs/postgres.md).
        attach_rows: how many rows the tasks of a batch must have loaded for that, on average; the
            rows of a batch with fewer are copied.

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
        key: Sequence[str] | None = None,
        write: Write | None = None,
        update: Sequence[str] | None = None,
        order_by: str | Sequence[str] | None = None,
        delete: str | None = None,
        create: Literal["if_missing"] | None = None,
        dead_letter: str | None = None,
        name: str | None = None,
        select: Sequence[str] | None = None,
        transform: Transform | None = None,
        mode: Mode = "staged",
        writers: int | None = None,
        lock_timeout: float = 30.0,
        statement_timeout: float = 600.0,
        attach: str | None = None,
        attach_rows: int = 100_000,
    ) -> None:
        if mode == "prepared" and key is not None and not isinstance(key, str):
            # Two tasks with one key would wait for each other, where Postgres cannot see it.
            self.dealt_by = tuple(key)
            writers = _UPSERT_WRITERS if writers is None else writers
        super().__init__(name=name, select=select, transform=transform, writers=writers)
        if mode not in get_args(Mode):
            raise ConfigurationError(f'{self.name}: mode={mode!r} must be "staged" or "prepared"')
        if mode == "prepared" and (attach or dead_letter):
            raise ConfigurationError(
                f'{self.name}: attach= and dead_letter= need mode="staged", in which the driver '
                "merges a batch as a whole"
            )
        if create not in {None, "if_missing"}:
            raise ConfigurationError(
                f'{self.name}: create={create!r} must be "if_missing", or be left out'
            )
        for setting, value in (
            ("lock_timeout", lock_timeout),
            ("statement_timeout", statement_timeout),
        ):
            if not _LEAST_S <= value <= _MOST_S:
                raise ConfigurationError(
                    f"{self.name}: {setting}={value} must be {_LEAST_S} to {_MOST_S} seconds"
                )
        if attach is not None and (key or create or dead_letter):
            raise ConfigurationError(
                f"{self.name}: attach= appends whole loads to a table that is there, so it takes "
                "no key=, create= or dead_letter="
            )
        if attach_rows < 1:
            raise ConfigurationError(f"{self.name}: attach_rows={attach_rows} must be 1 or more")
        self._address = Address.read(conninfo)
        self._table = table
        self._writing = Writing.of(
            self.name, write, key=key, update=update, order_by=order_by, delete=delete
        )
        self._creates = create is not None
        self._dead_letter = dead_letter
        self._mode = mode
        self._timeouts = Timeouts(lock_timeout, statement_timeout)
        self._attach = None if attach is None else Attach(attach, attach_rows)
        self._target: Target | None = None
        self._server: Server | None = None
        self._start()

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, PgConnection] = {}
        """Merges that wait in an open transaction, by their full branch id."""

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in {"_lock", "_held"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    @property
    def _pool(self) -> Pool:
        return pool_of(self._address)

    @property
    def target(self) -> str:
        return f"postgres table {self._address.database}.{self._table}"

    @property
    def where(self) -> str:
        return f"{self.target} at {self._address.shown}"

    # -- on the executors ------------------------------------------------------------------------

    def beginTransaction(self, branch_id: BranchId) -> StagingWriter:
        target, server = self._validated(branch_id)
        if self._mode == "prepared":
            return PreparedWriter(
                *(self._address, target, branch_id, self._timeouts),
                writing=self._writing,
                server=server,
            )
        # COPY lasts as long as the task feeds it: no limit on the statement.
        timeouts = Timeouts(self._timeouts.lock, 0)
        return StagingWriter(self._address, target, branch_id, timeouts, self._attach)

    def write(self, handle: StagingWriter, batch: pa.RecordBatch) -> None:
        handle.write(batch)

    def preCommit(self, handle: StagingWriter) -> Committable:
        handle.finish()
        if isinstance(handle, PreparedWriter):
            return Committable(handle.branch_id, handle.prepared.to_payload(), PREPARED_VERSION)
        return Committable(
            handle.branch_id,
            {"schema": handle.schema, "staging": handle.name, "rows": handle.rows},
            PAYLOAD_VERSION,
        )

    def discard(self, handle: StagingWriter) -> None:
        handle.discard()

    # -- on the driver ---------------------------------------------------------------------------

    def validate(self, schema: pa.Schema) -> None:
        try:
            server = self._pool.run(Server.ask)
            server.check(self.where)
            target = self._pool.run(lambda c: self._resolve(c, schema))
            self._pool.run(lambda c: warn_of_publications(c, target.schema, self.where))
            if self._attach is not None:
                self._pool.run(lambda c: warn_of_slots(c, self.where))
        except psycopg.Error as error:
            raise ConfigurationError(
                f"PostgresSink: {self.where} cannot be used: {self._address.said(error)}"
                f"{next_step(error, self._timeouts)}"
            ) from self._address.cause(error)
        if self._address.names_several:
            server.check_failover(self.where)
        if self._mode == "prepared":
            server.check_prepares(self.where, self.writers)
            if target.why_open is not None:
                raise ConfigurationError(
                    f'PostgresSink: {self.where}: {target.why_open}; take mode="staged"'
                )
        logger.info("%s: %s", self.where, self._promise(server, target.why_open))
        self._target, self._server = target, server

    def _promise(self, server: Server, why_open: str | None) -> str:
        if self._mode == "prepared":
            return (
                "each Spark task leaves a prepared transaction, so a batch becomes visible task "
                f"by task, not as a whole; {server.prepared_most - server.prepared_now} of "
                f"max_prepared_transactions = {server.prepared_most} are free"
            )
        held_as = (
            "a prepared transaction"
            if why_open is None
            else f"an open transaction, since {why_open}: a decided batch that is lost with its "
            "connection is merged again, and may be refused then"
        )
        return f"in two phases a merged batch waits for the decision as {held_as}"

    def diagnose(self) -> Iterable[Finding]:
        return diagnose(
            self._pool,
            self._address,
            self._table,
            self._standing,
            updates=self._writing.mode in {"upsert", "merge"},
            attaches=self._attach is not None,
        )

    def vote(
        self, branch_id: BranchId, committables: Sequence[Committable]
    ) -> Sequence[Committable]:
        if self._mode == "prepared":
            return committables
        return self._merge(branch_id, committables)

    def prepare_one_phase(
        self, branch_id: BranchId, committables: Sequence[Committable]
    ) -> Sequence[Committable]:
        return self._merge(branch_id, committables, one_phase=True)

    def _merge(
        self, branch_id: BranchId, committables: Sequence[Committable], *, one_phase: bool = False
    ) -> Sequence[Committable]:
        if not committables:
            return ()
        target, _ = self._validated(branch_id)
        loads: list[Any] = [committable.payload for committable in committables]
        staging, rows = [load["staging"] for load in loads], sum(load["rows"] for load in loads)
        merge = Merge.of(target, self._writing, staging, rows)
        merge = with_attached(merge, self._attach, committables)
        timeouts = self._timeouts
        if one_phase:
            merge, timeouts = replace(merge, prepared=False), replace(timeouts, idle=_FROZEN_S)
        held = Merger(self._address, self._pool, timeouts, branch_id, merge).prepare()
        if held is not None:
            with self._lock:
                self._held[str(branch_id)] = held
        return (Committable(branch_id, merge.to_payload(), PAYLOAD_VERSION),)

    def commit(self, committable: Committable) -> None:
        if committable.version == PREPARED_VERSION:
            self._finisher().commit(committable)
            return
        merge = Merge.read(committable)
        merger = self._merger(committable.branch_id, merge)
        merger.commit(self._take_held(committable.branch_id))
        try:
            self._drop(merge.schema, merge.staging)
        except psycopg.Error as error:
            # Committed all the same; `find_branches` will see what is left.
            logger.debug("%s: staging is left over: %s", self.where, self._address.said(error))

    def why_two_phases(self, why_not: Callable[[Ask], str | None]) -> str | None:
        if self._mode == "prepared":
            return 'mode="prepared" commits task by task'
        try:
            return why_not(lambda query: self._pool.run(lambda c: c.execute(query).fetchall()))
        except psycopg.Error as error:
            return f"{self.where}: {self._address.said(error)}"

    def commit_one_phase(self, committable: Committable, log_write: str) -> None:
        branch_id = committable.branch_id
        held = self._take_held(branch_id)
        if held is None:
            raise CommitUnresolvedError(f"{branch_id} is not open in this process", branch_id)
        self._merger(branch_id, Merge.read(committable)).commit_with(held, log_write)

    def abort(self, branch: BranchId | Committable) -> None:
        committable = Committable(branch) if isinstance(branch, BranchId) else branch
        branch_id, payload = committable.branch_id, committable.payload
        of_task = branch_id.attempt != DRIVER_ATTEMPT
        if of_task and "staging" not in payload:
            self._finisher().roll_back(branch_id)
        if committable.version == PREPARED_VERSION:
            return
        with self._aborting(branch_id):
            if of_task:
                schema = str(payload.get("schema") or self._schema())
                self._drop(schema, [staging_name(branch_id)])
                return
            self._end_merge(branch_id)  # first, since it locks the tables
            if payload:
                merge = Merge.read(committable)
                self._drop(merge.schema, merge.staging)

    def abort_decided(self, committable: Committable) -> None:
        self.abort(committable)
        branch_id = committable.branch_id
        query = find_marker(str(committable.payload["schema"]), branch_id)
        with self._aborting(branch_id):
            row = self._pool.run(lambda c: c.execute(query).fetchone())
        if row is not None:
            raise CommitRejectedError(
                f"{branch_id} is committed, as its row in {MARKER_TABLE} shows, so that its rows "
                "would be there twice. If a standby has to confirm it, let that run; or say so: "
                f"{settle_command(branch_id, 'committed')}",
                branch_id,
            )

    def abort_many(self, found: Sequence[Committable]) -> Sequence[Exception | None]:
        merges = [c for c in found if "staging" not in c.payload]
        staged = [c for c in found if "staging" in c.payload]
        # Merges first: they lock their staging tables.
        errors = dict(zip((c.branch_id for c in merges), abort_each(self, merges), strict=True))
        try:
            for schema in {str(c.payload["schema"]) for c in staged}:
                names = [staging_name(c.branch_id) for c in staged if c.payload["schema"] == schema]
                self._drop(schema, names)
        except psycopg.Error:  # one table in use keeps no other alive
            for c in staged:
                schema, name = str(c.payload["schema"]), staging_name(c.branch_id)
                try:
                    with self._aborting(c.branch_id):
                        self._drop(schema, [name], _TIDY_EACH_LOCK_S)
                except CommitUnresolvedError as error:
                    errors[c.branch_id] = error
        return [errors.get(c.branch_id) for c in found]

    def find_branches(self, owner: Owner) -> Iterable[Committable]:
        rows = self._pool.run(lambda c: ask_as_login(c, find_standing(owner)))
        return list(self._ours(owner, rows))

    def close(self) -> None:
        with self._lock:
            held, self._held = self._held, {}
        for connection in held.values():
            connection.close()  # rolls back; a decided one is merged again
        self._pool.close()

    # -- helpers ---------------------------------------------------------------------------------

    @property
    def _copies(self) -> bool:
        return self._mode == "prepared" and self._writing.key is None

    def _standing(self, connection: PgConnection) -> object:
        return standing(
            connection, self._table, self._writing, creates=self._creates, copies=self._copies
        )

    def _resolve(self, connection: PgConnection, schema: pa.Schema) -> Target:
        target = resolve(
            connection,
            self._table,
            self._writing,
            schema,
            creates=self._creates,
            dead_letter=self._dead_letter,
            copies=self._copies,
            is_dealt=self._mode == "prepared" and self.writers != 1,
        )
        if self._attach is not None:
            check_attach(connection, target, self._attach)
        return target

    def _validated(self, branch_id: BranchId) -> tuple[Target, Server]:
        if self._target is None or self._server is None:
            raise ProtocolError(f"{branch_id}: validate() comes before the first batch")
        return self._target, self._server

    def _finisher(self) -> Finisher:
        return Finisher(self._address, self._pool, self._timeouts)

    def _merger(self, branch_id: BranchId, merge: Merge) -> Merger:
        return Merger(self._address, self._pool, self._timeouts, branch_id, merge)

    def _take_held(self, branch_id: BranchId) -> PgConnection | None:
        with self._lock:
            return self._held.pop(str(branch_id), None)

    def _end_merge(self, branch_id: BranchId) -> None:
        """Roll the merge back, whoever holds it; one that is committed is not touched."""
        held = self._take_held(branch_id)
        if held is not None:
            roll_back(held)
            self._pool.give(held)

        def end(connection: PgConnection) -> None:
            ask_as_login(connection, end_holders(staging_name(branch_id)))
            rolling_back(branch_id)(connection)

        self._pool.run(end)

    @contextlib.contextmanager
    def _aborting(self, branch_id: BranchId) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            raise CommitUnresolvedError(
                f"{self.where}: {branch_id} could not be aborted: {self._address.said(error)}",
                branch_id,
            ) from self._address.cause(error)

    def _drop(self, schema: str, names: Sequence[str], lock_s: float = _TIDY_LOCK_S) -> None:
        timeouts = Timeouts(min(lock_s, self._timeouts.lock), self._timeouts.statement)

        def drop(connection: PgConnection) -> None:
            for statement in drop_staging(schema, names):
                try:
                    # Waits for no standby: what a failover brings back is swept.
                    opening = script(READ_COMMITTED, settings(timeouts, is_flushed=False))
                    connection.execute(script(opening, statement, COMMIT))
                finally:
                    roll_back(connection)

        self._pool.run(drop)

    def _schema(self) -> str:
        if self._target is not None:
            return self._target.schema
        row = self._pool.run(lambda c: c.execute(find_schema(self._table)).fetchone())
        if row is None:
            raise ConfigurationError(f"{self.where} does not exist: correct table=")
        return str(row[0])

    def _ours(self, owner: Owner, rows: Iterable[tuple[Any, ...]]) -> Iterator[Committable]:
        """In the order in which they must be aborted: a merge locks its staging tables."""
        with self._lock:
            held = [BranchId.from_name(name) for name in self._held]
        merges = {branch_id: None for branch_id in held if branch_id and branch_id.owner == owner}
        staged = []
        for place, schema, name, comment in rows:
            if place == OPEN:
                branch_id = branch_of_session(owner, self.name, name)
            else:
                branch_id = BranchId.from_name(comment or "")
            if branch_id is None or branch_id.owner != owner or branch_id.batch_id is None:
                continue
            if place == PREPARED and branch_id.attempt != DRIVER_ATTEMPT:
                yield Committable(branch_id, version=PREPARED_VERSION)
            elif place != STAGED:
                merges[branch_id] = None
            elif staging_name(branch_id) == name:
                staged.append(Committable(branch_id, {"schema": schema, "staging": name}))
        yield from map(Committable, merges)
        yield from staged
