"""The server behind an address: who it is, and what it promises.

A proof of absence ("no such prepared transaction, and no marker row") holds only on the server that
had the branch, in its database, and while it is no standby: one that lags would call committed rows
lost.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Protocol

import psycopg
from psycopg import errors, sql
from psycopg.rows import namedtuple_row

from sparkonce.errors import CommitUnresolvedError, ConfigurationError, settle_command
from sparkonce.model import BranchId
from sparkonce.sinks.postgres.catalog import system_identifier
from sparkonce.sinks.postgres.connections import PgConnection, limited, roll_back, warnings_of
from sparkonce.sinks.postgres.sql import (
    COMMIT,
    READ_COMMITTED,
    WRITE_NOTHING,
    Timeouts,
    commit_prepared,
    find_marker,
    prepare,
    require_marker,
    script,
    settings,
)

logger = logging.getLogger("sparkonce")

_ROW: Any = namedtuple_row
_LEAST_PATIENCE_S = 5.0

_ASK = """
    SELECT current_database()::text AS database, current_user::text AS role,
        pg_is_in_recovery() AS is_standby,
        current_setting('max_prepared_transactions')::int AS prepared_most,
        (SELECT count(*)::int FROM pg_catalog.pg_prepared_xacts) AS prepared_now,
        current_setting('synchronous_commit') AS synchronous_commit,
        current_setting('synchronous_standby_names') AS synchronous_standby_names
"""


class Held(Protocol):
    """Where a branch was prepared."""

    @property
    def schema(self) -> str: ...

    @property
    def system(self) -> str: ...

    @property
    def database(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Server:
    """One server, as one connection saw it.

    Attributes:
        system: its own identifier, which its standbys share; empty where it may not be read.
        database: the connection's.
        role: the connection's.
        is_standby: it takes no writes now.
        prepared_most: max_prepared_transactions.
        prepared_now: how many stand, of all databases.
        synchronous_commit: of the connection.
        synchronous_standby_names: which standbys a commit waits for.
    """

    system: str
    database: str
    role: str
    is_standby: bool
    prepared_most: int
    prepared_now: int
    synchronous_commit: str
    synchronous_standby_names: str

    @classmethod
    def ask(cls, connection: PgConnection) -> Server:
        system = system_identifier(connection)
        with connection.cursor(row_factory=_ROW) as cursor:
            row: Any = cursor.execute(_ASK).fetchone()
        return cls(system, **row._asdict())

    def why_not(self, system: str, database: str) -> str | None:
        """Why this server proves nothing of what was prepared there; None when it does."""
        if self.is_standby:
            return (
                "conninfo= leads to a standby; promote it, or name all servers and add "
                "target_session_attrs=read-write"
            )
        if database != self.database or (system and self.system and system != self.system):
            return (
                f"conninfo= leads to database {self.database!r} of the server with system "
                f"identifier {self.system}, and the batch was prepared in {database!r} of "
                f"{system}; let it lead there again. If that server is gone for good, as behind "
                "pg_upgrade or a dump, look for the batch's rows in the table"
            )
        return None

    def check(self, where: str) -> None:
        """See that it takes writes.

        Raises:
            ConfigurationError: it is a standby.
        """
        if self.is_standby:
            raise ConfigurationError(
                f"PostgresSink: {where} is a standby, which takes no writes; name the primary in "
                "conninfo=, or all servers with target_session_attrs=read-write"
            )

    def check_failover(self, where: str) -> None:
        """Warn where several servers are named and a commit waits for none of the standbys."""
        waits = self.synchronous_commit in {"on", "remote_apply", "off"}  # off is raised to on
        if not (self.synchronous_standby_names and waits):
            logger.warning(
                "%s: conninfo= names several servers, but a commit does not wait for a standby "
                "(synchronous_standby_names=%r, synchronous_commit=%s): a failover may take back "
                "batches that were complete, and nothing will tell. Set synchronous_standby_names, "
                "and synchronous_commit to on or remote_apply",
                where,
                self.synchronous_standby_names,
                self.synchronous_commit,
            )

    def check_prepares(self, where: str, writers: int | None) -> None:
        """See that every task of a batch can leave a prepared transaction.

        Args:
            where: for messages.
            writers: how many tasks write at the most; None where that is Spark's choice.

        Raises:
            ConfigurationError: the server allows none, or fewer than `writers`.
        """
        if self.prepared_most < (writers or 1):
            raise ConfigurationError(
                f"PostgresSink: {where}: mode='prepared' leaves a prepared transaction for each "
                f"Spark task that writes{f', here {writers}' if writers else ''}, and the server "
                f"has max_prepared_transactions = {self.prepared_most}; raise it and restart the "
                "server, or take mode='staged'"
            )
        room = self.prepared_most - self.prepared_now
        if room < (writers or 1):
            logger.warning(
                "%s: %d of max_prepared_transactions = %d stand already (pg_prepared_xacts shows "
                "whose), so a batch may be refused",
                where,
                self.prepared_now,
                self.prepared_most,
            )


def warn_of_publications(connection: PgConnection, schema: str, where: str) -> None:
    """Warn where a publication carries whatever table is made in the schema: the sink's, too."""
    of_schema = "false"
    if connection.execute("SELECT to_regclass('pg_publication_namespace')").fetchone() != (None,):
        of_schema = (  # since Postgres 15
            "oid IN (SELECT p.pnpubid FROM pg_catalog.pg_publication_namespace p "
            "JOIN pg_catalog.pg_namespace n ON n.oid = p.pnnspid WHERE n.nspname = {})"
        )
    query = "SELECT pubname FROM pg_catalog.pg_publication WHERE puballtables OR " + of_schema
    found = connection.execute(sql.SQL(query + " ORDER BY 1").format(sql.Literal(schema)))
    for (publication,) in found.fetchall():
        logger.warning(
            "%s: the publication %r has every table of the schema %r, and so those that the sink "
            "makes (staging, sparkonce_commits), which no subscriber has: it stops at the first "
            "batch (logical replication target relation does not exist). Publish the tables by "
            "their names: CREATE PUBLICATION … FOR TABLE …",
            *(where, publication, schema),
        )


def leave_prepared(connection: PgConnection, gid: str, *before: sql.Composable) -> str | None:
    """PREPARE TRANSACTION, in one message with what is still to be done before it.

    Returns:
        Why the transaction does not count as prepared; None where it does.
    """
    with warnings_of(connection) as warnings:
        cursor = connection.execute(script(*before, prepare(gid)))
        while cursor.nextset():
            pass
    # A transaction that has failed or ended answers with ROLLBACK, and no error.
    if cursor.statusmessage != "PREPARE TRANSACTION":
        return f"the server answered {cursor.statusmessage} to PREPARE TRANSACTION"
    if warnings:
        return (
            f"PREPARE TRANSACTION: {'; '.join(warnings)}. So no standby has confirmed it, and a "
            "failover would lose it"
        )
    return None


def end_prepared(
    connection: PgConnection, timeouts: Timeouts, held: Held, what: str, branch_id: BranchId
) -> bool:
    """COMMIT PREPARED; whether standbys have it is for `await_standbys` to see.

    Returns:
        Whether the branch is committed, now or before; False where it stands nowhere any more.

    Raises:
        CommitUnresolvedError: as `is_committed`.
    """
    try:
        with limited(connection, _patience_s(timeouts)):
            connection.execute(commit_prepared(str(branch_id)))
    except (errors.UndefinedObject, errors.FeatureNotSupported) as error:
        if is_committed(connection, timeouts, held, what, branch_id):
            return True
        if isinstance(error, errors.FeatureNotSupported):  # it stands, in another database
            raise
        return False
    return True


def await_standbys(
    connection: PgConnection, timeouts: Timeouts, schema: str, branch_id: BranchId
) -> None:
    """Return when the standbys that a commit waits for have the branch, which is committed.

    COMMIT PREPARED alone does not say so. It runs outside of any transaction, under whatever
    `synchronous_commit` and `statement_timeout` the role has; a wait that is cut short is a
    warning, and no error; and a server that starts again does not take up the wait.

    The server that answers may be a standby that was promoted meanwhile, and waits for none: so its
    own look at the marker is in the same message as the wait.

    Raises:
        psycopg.Error: they have not confirmed it within `lock_timeout` (5 s, if that is shorter),
            or it is not there.
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
            f"{patience_s:g} s, so a failover would take it back; let the standby run"
        )


def is_committed(
    connection: PgConnection, timeouts: Timeouts, held: Held, what: str, branch_id: BranchId
) -> bool:
    """Whether the marker row of a branch is there that does not stand prepared any more.

    On one connection, since the next one may lead to another server. The marker came with the rows,
    wherever it is: a dump, pg_upgrade or a replica has both or none of them. That it is absent
    proves something only on the server that held the branch.

    Raises:
        CommitUnresolvedError: this server proves nothing; `what` stands before the reason.
    """
    server = Server.ask(connection)
    told = server.why_not(held.system, held.database)
    if server.is_standby:
        raise CommitUnresolvedError(f"{what}: {told}", branch_id) from None
    try:
        connection.execute(script(READ_COMMITTED, settings(timeouts)))
        if connection.execute(find_marker(held.schema, branch_id)).fetchone() is not None:
            return True
    except errors.UndefinedTable:
        if told is None:
            raise
    finally:
        roll_back(connection)
    if told is not None:
        told = f"{told}, or {settle_command(branch_id)}"
        raise CommitUnresolvedError(f"{what}: {told}", branch_id) from None
    return False


def _patience_s(timeouts: Timeouts) -> float:
    """How long a commit may take; `lock_timeout` may be shorter than the way to the server."""
    return max(timeouts.lock, _LEAST_PATIENCE_S)
