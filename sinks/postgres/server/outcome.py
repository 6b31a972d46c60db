"""Prepares and commits transactions, and proves their outcome.

leave_prepared    PREPARE TRANSACTION, checked by its command tag and warnings
end_prepared      COMMIT PREPARED; if the gid is unknown, `is_committed` decides
is_committed      looks for the marker row, on the server that had the branch
await_standbys    waits until the standbys that a commit waits for have confirmed it
abort_prepared    ROLLBACK PREPARED, if the transaction exists
"""

from __future__ import annotations

import contextlib
from typing import Protocol

import psycopg
from psycopg import errors, sql

from sparkonce.errors import CommitUnresolvedError, settle_command
from sparkonce.model import BranchId
from sparkonce.sinks.postgres.server.connections import (
    PgConnection,
    limited,
    roll_back,
    warnings_of,
)
from sparkonce.sinks.postgres.server.identity import Server
from sparkonce.sinks.postgres.server.sql import (
    COMMIT,
    READ_COMMITTED,
    WRITE_NOTHING,
    Timeouts,
    commit_prepared,
    find_marker,
    prepare,
    require_marker,
    rollback_prepared,
    script,
    settings,
)

_LEAST_PATIENCE_S = 5.0


class Origin(Protocol):
    """Where a branch was prepared."""

    @property
    def schema(self) -> str: ...

    @property
    def system(self) -> str: ...

    @property
    def database(self) -> str: ...


def leave_prepared(connection: PgConnection, gid: str, *before: sql.Composable) -> str | None:
    """Run `before` and PREPARE TRANSACTION in one message.

    Returns:
        None if the transaction is prepared; otherwise why it does not count as prepared.
    """
    with warnings_of(connection) as warnings:
        cursor = connection.execute(script(*before, prepare(gid)))
        while cursor.nextset():
            pass
    # In a failed or ended transaction the server answers ROLLBACK, without an error.
    if cursor.statusmessage != "PREPARE TRANSACTION":
        return f"the server answered {cursor.statusmessage} to PREPARE TRANSACTION"
    if warnings:
        return (
            f"PREPARE TRANSACTION: {'; '.join(warnings)}. So no standby has confirmed it, and a "
            "failover would lose it"
        )
    return None


def end_prepared(
    connection: PgConnection, timeouts: Timeouts, origin: Origin, what: str, branch_id: BranchId
) -> bool:
    """COMMIT PREPARED; `await_standbys` checks whether standbys have it.

    Returns:
        Whether the branch is committed, now or before; False if it no longer exists.

    Raises:
        CommitUnresolvedError: as `is_committed`.
    """
    try:
        with limited(connection, _patience_s(timeouts)):
            connection.execute(commit_prepared(str(branch_id)))
    except (errors.UndefinedObject, errors.FeatureNotSupported) as error:
        if is_committed(connection, timeouts, origin, what, branch_id):
            return True
        if isinstance(error, errors.FeatureNotSupported):  # it exists in another database
            raise
        return False
    return True


def await_standbys(
    connection: PgConnection, timeouts: Timeouts, schema: str, branch_id: BranchId
) -> None:
    """Return when the standbys that a commit waits for have the committed branch.

    COMMIT PREPARED does not show that. It runs outside of any transaction, under the role's own
    `synchronous_commit` and `statement_timeout`; an interrupted wait is only a warning; and a
    restarted server does not resume the wait.

    The server that answers may be a standby that was promoted meanwhile and waits for no other
    standby. So one message checks its marker row and waits.

    Raises:
        psycopg.Error: no standby confirmed it within the lock timeout (at least 5 s), or the marker
            row is missing.
    """
    is_there = require_marker(schema, branch_id, "the server that answers does not have the commit")
    patience_s = _patience_s(timeouts)
    with warnings_of(connection) as warnings, limited(connection, patience_s) as cut:
        connection.execute(
            script(READ_COMMITTED, settings(timeouts), is_there, WRITE_NOTHING, COMMIT)
        )
    if warnings or cut.is_set():
        raise psycopg.OperationalError(
            "committed, but no standby in synchronous_standby_names has confirmed it within "
            f"{patience_s:g} s, so a failover would lose it; start the standby"
        )


def is_committed(
    connection: PgConnection, timeouts: Timeouts, origin: Origin, what: str, branch_id: BranchId
) -> bool:
    """Whether a branch that is no longer prepared has a marker row.

    It uses one connection, since the next one may lead to another server. The marker row was
    written with the rows: a dump, pg_upgrade or a replica has both or none. Its absence proves
    something only on the server that held the branch.

    Raises:
        CommitUnresolvedError: this server cannot prove it; `what` starts the text.
    """
    server = Server.ask(connection)
    reason = server.why_not(origin.system, origin.database)
    if server.is_standby:
        raise CommitUnresolvedError(f"{what}: {reason}", branch_id) from None
    try:
        connection.execute(script(READ_COMMITTED, settings(timeouts)))
        if connection.execute(find_marker(origin.schema, branch_id)).fetchone() is not None:
            return True
    except errors.UndefinedTable:
        if reason is None:
            raise
    finally:
        roll_back(connection)
    if reason is not None:
        reason = f"{reason}, or {settle_command(branch_id)}"
        raise CommitUnresolvedError(f"{what}: {reason}", branch_id) from None
    return False


def abort_prepared(connection: PgConnection, branch_id: BranchId) -> None:
    """ROLLBACK PREPARED, if the branch's prepared transaction exists."""
    with contextlib.suppress(errors.UndefinedObject):  # never prepared, or ended
        connection.execute(rollback_prepared(str(branch_id)))


def _patience_s(timeouts: Timeouts) -> float:
    """How long a commit may take; a lock timeout may be shorter than a round trip."""
    return max(timeouts.lock, _LEAST_PATIENCE_S)
