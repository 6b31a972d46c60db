"""The driver ends the prepared transactions of load="direct".

What a commit may meet, and what each proves:

    1  COMMIT PREPARED succeeds            committed
    2  gid unknown, marker row exists      committed before
    3  gid unknown, then no marker row     lost: a gid is used once, and the task had it
    4  no answer, a standby, another       unknown
       server or role, or another session
       is ending it now
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NoReturn

import psycopg
from psycopg import errors as pg

from sparkonce.errors import CommitUnresolvedError, PreparedBranchLostError
from sparkonce.model import BranchId, Committable
from sparkonce.sinks.postgres.loading.direct import Prepared
from sparkonce.sinks.postgres.server.advice import next_step
from sparkonce.sinks.postgres.server.connections import Address, PgConnection, Pool
from sparkonce.sinks.postgres.server.outcome import await_standbys, end_prepared, rolling_back
from sparkonce.sinks.postgres.server.sql import MARKER_TABLE, Timeouts


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

    def roll_back(self, branch_id: BranchId) -> None:
        """End the prepared transaction, if it exists; a committed branch is not touched."""
        with self._unresolved(f"{branch_id} could not be aborted", branch_id, None):
            self._pool.run(rolling_back(branch_id))

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
