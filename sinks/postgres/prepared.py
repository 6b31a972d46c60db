"""``mode="prepared"``: each Spark task leaves its rows in the target, in a transaction of its own.

    append   BEGIN; COPY target …;                                  marker row; PREPARE TRANSACTION
    upsert   BEGIN; CREATE TABLE; COPY …; merge into target; DROP;  marker row; PREPARE TRANSACTION
                                                                    └─ driver: COMMIT PREPARED

What a commit may meet, and what each proves:

    1  COMMIT PREPARED answers so          committed
    2  gid unknown, marker there           committed before
    3  gid unknown, then marker absent     lost: a gid is given once, and the task had it
    4  no answer, a standby, another       unknown
       server or role, or somebody else
       at it just now

A transaction that is prepared keeps its locks until the driver ends it, and Postgres finds no
deadlock that goes through it, since nobody waits for that lock in a session. Hence lock_timeout
holds in each statement, and rows with one key must come from one task (`dealt_by`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn, Self

import psycopg
from psycopg import errors as pg
from psycopg import sql
from psycopg.pq import TransactionStatus

from sparkonce.errors import CommitUnresolvedError, PreparedBranchLostError
from sparkonce.model import BranchId, Committable, JsonValue
from sparkonce.sinks.postgres.advice import next_step
from sparkonce.sinks.postgres.catalog import Target
from sparkonce.sinks.postgres.connections import (
    PASSING,
    Address,
    PgConnection,
    Pool,
    retrying,
)
from sparkonce.sinks.postgres.fitness import unfit
from sparkonce.sinks.postgres.merge import Merge, duplicate_key, duplicate_told, statements
from sparkonce.sinks.postgres.server import (
    Server,
    await_standbys,
    end_prepared,
    leave_prepared,
)
from sparkonce.sinks.postgres.shape import Shape
from sparkonce.sinks.postgres.sql import (
    CHECK_CONSTRAINTS_NOW,
    MARKER_TABLE,
    Timeouts,
    copy_into,
    drop_staging,
    insert_marker,
    qualified,
    require_system,
    rollback_prepared,
    script,
    settings,
)
from sparkonce.sinks.postgres.staging import StagingWriter
from sparkonce.sinks.postgres.writing import Writing

PREPARED_VERSION = 1001
"""Of the payload. Far from those of the staged mode, which count up on their own."""

_SAVEPOINT = sql.SQL("SAVEPOINT sparkonce")
_BACK = sql.SQL("ROLLBACK TO SAVEPOINT sparkonce")


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that any process needs to commit one task's transaction; its gid is the full branch id.

    Attributes:
        schema: of the target and of the marker table.
        table: the target.
        rows: how many the task wrote.
        system: the server's own identifier; empty where it may not be read.
        database: in which it was prepared, and can be ended.
        role: which prepared it, and may end it.
    """

    schema: str
    table: str
    rows: int
    system: str
    database: str
    role: str

    @classmethod
    def read(cls, committable: Committable) -> Self:
        payload: dict[str, Any] = dict(committable.payload)
        return cls(**payload)

    def to_payload(self) -> dict[str, JsonValue]:
        return asdict(self)


class PreparedWriter(StagingWriter):
    """An open COPY into the target itself, or for an upsert into a table that comes and goes.

    Args:
        address: of the server.
        target: the table.
        branch_id: of the task.
        timeouts: of every statement but the COPY, which lasts as long as the task feeds it.
        writing: what becomes of a row whose key is there.
        server: as `validate` saw it.
    """

    def __init__(
        self,
        address: Address,
        target: Target,
        branch_id: BranchId,
        timeouts: Timeouts,
        *,
        writing: Writing,
        server: Server,
    ) -> None:
        self._writing = writing
        self._server = server
        self._limits = timeouts
        super().__init__(address, target, branch_id, Timeouts(timeouts.lock, 0))

    @property
    def prepared(self) -> Prepared:
        target, server = self._target, self._server
        return Prepared(
            target.schema, target.table, self.rows, target.system, target.database, server.role
        )

    def _opening(self) -> Sequence[sql.Composable]:
        return super()._opening() if self._writing.key is not None else ()

    def _copy_statement(self) -> sql.Composed:
        self._check_shape()
        if self._writing.key is not None:
            return super()._copy_statement()
        names, is_binary = self._target.names, self._target.is_binary
        return copy_into(self.schema, self._target.table, names, binary=is_binary, freeze=False)

    @property
    def _copied(self) -> str:
        return self._target.table if self._writing.key is None else self.name

    def _closing(self) -> None:
        self._connection.execute(settings(self._limits))
        self._timeouts = self._limits
        if self._writing.key is not None:
            self._merge()
        self._check_shape()  # the target is locked by now, so it stays like this
        self._check_fitness()
        if self._connection.info.transaction_status != TransactionStatus.INTRANS:
            # A script outside of a transaction is one by itself: the marker without its rows.
            self._reject("the transaction was ended by somebody else", None)
        told = leave_prepared(
            self._connection,
            str(self.branch_id),
            CHECK_CONSTRAINTS_NOW,
            require_system(self._target.system),
            insert_marker(self.schema, self.branch_id, self.rows),
        )
        if told is not None:
            self._reject(told, None)

    def _merge(self) -> None:
        """From the table that was copied into, in one step; again after a deadlock."""
        merge = Merge.of(self._target, self._writing, [self.name], self.rows)
        moves = script(*statements(merge, self.branch_id))
        self._connection.execute(_SAVEPOINT)

        def attempt() -> None:
            try:
                self._connection.execute(moves)
            except PASSING:
                self._connection.execute(_BACK)  # which gives its locks back
                raise

        try:
            retrying()(attempt)
        except pg.CardinalityViolation as error:
            self._reject(self._duplicate(merge) or self._address.said(error), error)
        for drop in drop_staging(self.schema, [self.name]):
            self._connection.execute(drop)

    def _duplicate(self, merge: Merge) -> str | None:
        with contextlib.suppress(psycopg.Error):
            self._connection.execute(_BACK)
            row = self._connection.execute(duplicate_key(merge)).fetchone()
            if row is not None:
                return duplicate_told(merge, row)
        return None

    def _check_shape(self) -> None:
        table = qualified(self.schema, self._target.table).as_string()
        now = Shape.read(self._connection, table, self._target.filled)
        if told := self._target.shape.difference(now):
            self._reject(
                f"the table has changed since the query began: {told}; start the query again", None
            )

    def _check_fitness(self) -> None:
        table = qualified(self.schema, self._target.table).as_string()
        told = unfit(self._connection, table, self._writing.mode, prepares=True)
        if told is not None:
            self._reject(f"the table has changed since the query began: {told}", None)


class Finisher:
    """Ends the prepared transactions of tasks, from any process.

    Args:
        address: of the server.
        pool: of connections to it.
        timeouts: of this sink.
    """

    def __init__(self, address: Address, pool: Pool, timeouts: Timeouts) -> None:
        self._address = address
        self._pool = pool
        self._timeouts = timeouts

    def commit(self, committable: Committable) -> None:
        """Make the task's rows visible; idempotent. The module's text numbers the situations."""
        branch_id, held = committable.branch_id, Prepared.read(committable)
        what = (
            f"batch {branch_id.batch_id}, sink {branch_id.sink!r}, table {held.database}."
            f"{held.schema}.{held.table}"
        )
        with self._unresolved(what, branch_id, held):
            self._pool.run(lambda connection: self._commit(connection, what, branch_id, held))

    def _commit(
        self, connection: PgConnection, what: str, branch_id: BranchId, held: Prepared
    ) -> None:
        if not end_prepared(connection, self._timeouts, held, what, branch_id):  # 1, 2, 4
            self._lost(what, branch_id, held)  # 3
        await_standbys(connection, self._timeouts, held.schema, branch_id)

    def _lost(self, what: str, branch_id: BranchId, held: Prepared) -> NoReturn:
        raise PreparedBranchLostError(
            f"{what}: decided, and lost from outside: the prepared transaction {branch_id} is "
            f"gone, and {held.schema}.{MARKER_TABLE} shows no commit. Did somebody roll it back, "
            "or was a standby promoted that had not received it?",
            branch_id,
        ) from None

    def roll_back(self, branch_id: BranchId) -> None:
        """End it, if it stands; what is committed is not touched."""
        with self._unresolved(f"{branch_id} could not be aborted", branch_id, None):
            self._pool.run(rolling_back(branch_id))

    @contextlib.contextmanager
    def _unresolved(self, what: str, branch_id: BranchId, held: Prepared | None) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            said = self._address.said(error) + next_step(error, self._timeouts)
            if isinstance(error, pg.InsufficientPrivilege):
                owner = repr(held.role) if held else "the role that pg_prepared_xacts shows"
                said += f"; log in as {owner}, who prepared it, or as a superuser"
            raise CommitUnresolvedError(f"{what}: {said}", branch_id) from self._address.cause(
                error
            )


def rolling_back(branch_id: BranchId) -> Callable[[PgConnection], None]:
    """What ends a prepared transaction, if it stands."""

    def end(connection: PgConnection) -> None:
        with contextlib.suppress(pg.UndefinedObject):  # never prepared, or ended
            connection.execute(rollback_prepared(str(branch_id)))

    return end
