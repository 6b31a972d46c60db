"""load="direct": each Spark task leaves its rows in the target, in a prepared transaction.

    append   BEGIN; COPY target …;                                  marker; PREPARE TRANSACTION
    upsert   BEGIN; CREATE TABLE; COPY …; merge into target; DROP;  marker; PREPARE TRANSACTION
                                                          driver: COMMIT PREPARED, see `finishing`

A prepared transaction keeps its locks until the driver ends it. No session waits for a lock on its
behalf, so Postgres finds no deadlock that goes through it. So every statement has a lock timeout,
and all rows of a key must come from one task (`distribute_by`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

import psycopg
from psycopg import errors as pg
from psycopg import sql
from psycopg.pq import TransactionStatus

from sparkonce.model import BranchId, Committable, JsonValue
from sparkonce.sinks.postgres.loading.staging import StagingWriter
from sparkonce.sinks.postgres.merging.merge import Merge
from sparkonce.sinks.postgres.merging.statements import (
    duplicate_key,
    duplicate_shown,
    statements,
)
from sparkonce.sinks.postgres.server.connections import PASSING, Address, retrying
from sparkonce.sinks.postgres.server.identity import Server
from sparkonce.sinks.postgres.server.outcome import leave_prepared
from sparkonce.sinks.postgres.server.sql import (
    CHECK_CONSTRAINTS_NOW,
    Timeouts,
    copy_into,
    drop_staging,
    insert_marker,
    qualified,
    require_system,
    script,
    settings,
)
from sparkonce.sinks.postgres.target.fitness import unfit
from sparkonce.sinks.postgres.target.shape import Shape, table_changed
from sparkonce.sinks.postgres.target.table import Target
from sparkonce.sinks.postgres.target.writing import Writing

PREPARED_VERSION: Final = 1001
"""The payload's version. Those of staged loads count up separately, far below it."""

_SAVEPOINT = sql.SQL("SAVEPOINT sparkonce")
_BACK = sql.SQL("ROLLBACK TO SAVEPOINT sparkonce")


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that any process needs to commit one task's transaction; its gid is the full branch id.

    Attributes:
        schema: of the target and of the marker table.
        table: the target.
        rows: number of rows that the task wrote.
        system: the server's identifier; empty if the role may not read it.
        database: where the transaction was prepared and can be ended.
        role: prepared the transaction, and may end it.
        mode: what happened to a row whose key was in the table; empty in older records.
    """

    schema: str
    table: str
    rows: int
    system: str
    database: str
    role: str
    mode: str = ""

    @classmethod
    def read(cls, committable: Committable) -> Self:
        payload: dict[str, Any] = dict(committable.payload)
        return cls(**payload)

    def committable(self, branch_id: BranchId) -> Committable:
        payload: dict[str, JsonValue] = {k: v for k, v in asdict(self).items() if k != "mode" or v}
        text = f"table {self.schema}.{self.table}, prepared transaction {branch_id}"
        return Committable(branch_id, payload, PREPARED_VERSION, text=text)


class DirectWriter(StagingWriter):
    """An open COPY into the target itself or, with a key, into a table that is dropped again."""

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
        super().__init__(address, target, branch_id, timeouts)

    def committable(self) -> Committable:
        target, server = self._target, self._server
        return Prepared(
            target.schema,
            target.table,
            self.rows,
            target.system,
            target.database,
            server.role,
            self._writing.mode,
        ).committable(self.branch_id)

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
        self._check_shape()  # the transaction's lock on the target now prevents further changes
        self._check_fitness()
        if self._connection.info.transaction_status != TransactionStatus.INTRANS:
            # Outside of a transaction the script would prepare the marker row without the rows.
            self._reject("the transaction ended before PREPARE TRANSACTION", None)
        reason = leave_prepared(
            self._connection,
            str(self.branch_id),
            CHECK_CONSTRAINTS_NOW,
            require_system(self._target.system),
            insert_marker(self.schema, self.branch_id, self.rows),
        )
        if reason is not None:
            self._reject(reason, None)

    def _merge(self) -> None:
        """Merge from the copied table in one step; retry after a deadlock."""
        merge = Merge.of(self._target, self._writing, [self.name], self.rows)
        moves = script(*statements(merge, self.branch_id))
        self._connection.execute(_SAVEPOINT)

        def attempt() -> None:
            try:
                self._connection.execute(moves)
            except PASSING:
                self._connection.execute(_BACK)  # which releases its locks
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
                return duplicate_shown(merge, row)
        return None

    def _check_shape(self) -> None:
        now = Shape.read(self._connection, self._table, self._target.filled)
        if changed := self._target.shape.difference(now):
            self._reject(table_changed(changed), None)

    def _check_fitness(self) -> None:
        reason = unfit(self._connection, self._table, self._writing.mode, prepares=True)
        if reason is not None:
            self._reject(table_changed(reason), None)

    @property
    def _table(self) -> str:
        return qualified(self.schema, self._target.table).as_string()
