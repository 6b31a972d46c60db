"""The driver ends the prepared transactions of load="direct".

The situations of a commit, and what each proves:

    1  COMMIT PREPARED succeeds            committed
    2  gid unknown, marker row exists      committed before
    3  gid unknown, then no marker row     lost: a gid is used once, and the task prepared it
    4  no answer, a standby, another       unknown
       server or role, or another session
       is ending it now
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psycopg
from psycopg import errors as pg

from sparkonce.errors import CommitUnresolvedError, PreparedBranchLostError
from sparkonce.model import BranchId, Committable
from sparkonce.sinks.postgres.loading.direct import Prepared
from sparkonce.sinks.postgres.server.advice import next_step
from sparkonce.sinks.postgres.server.connections import Address, PgConnection, Pool
from sparkonce.sinks.postgres.server.outcome import abort_prepared, await_standbys, end_prepared
from sparkonce.sinks.postgres.server.sql import MARKER_TABLE, Timeouts


class Finisher:
    """Ends the prepared transactions of tasks, from any process."""

    def __init__(self, address: Address, pool: Pool, timeouts: Timeouts) -> None:
        self._address = address
        self._pool = pool
        self._timeouts = timeouts

    def commit(self, committable: Committable) -> None:
        """Make the task's rows visible; idempotent. The module docstring numbers the situations."""
        branch_id, prepared = committable.branch_id, Prepared.read(committable)
        what = (
            f"batch {branch_id.batch_id}, sink {branch_id.sink!r}, table {prepared.database}."
            f"{prepared.schema}.{prepared.table}"
        )
        with self._unresolved(what, branch_id, prepared):
            self._pool.run(lambda connection: self._commit(connection, what, branch_id, prepared))

    def roll_back(self, branch_id: BranchId) -> None:
        """End the prepared transaction, if it exists; leave a committed branch unchanged."""
        with self._unresolved(f"{branch_id} could not be aborted", branch_id, None):
            self._pool.run(lambda connection: abort_prepared(connection, branch_id))

    def _commit(
        self, connection: PgConnection, what: str, branch_id: BranchId, prepared: Prepared
    ) -> None:
        if not end_prepared(connection, self._timeouts, prepared, what, branch_id):  # 1, 2, 4
            raise PreparedBranchLostError(  # 3
                f"{what}: decided but lost: the prepared transaction {branch_id} is gone, and "
                f"{prepared.schema}.{MARKER_TABLE} shows no commit. Did somebody roll it back, or "
                "was a standby promoted that had not received it?",
                branch_id,
            ) from None
        await_standbys(connection, self._timeouts, prepared.schema, branch_id)

    @contextlib.contextmanager
    def _unresolved(
        self, what: str, branch_id: BranchId, prepared: Prepared | None
    ) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            said = self._address.said(error) + next_step(error, self._timeouts)
            if isinstance(error, pg.InsufficientPrivilege):
                role = repr(prepared.role) if prepared else "the owner in pg_prepared_xacts"
                said += f"; log in as {role}, which prepared it, or as a superuser"
            raise CommitUnresolvedError(f"{what}: {said}", branch_id) from self._address.cause(
                error
            )
