"""The server behind an address: its identity, its settings, and what it can prove.

"No such prepared transaction, and no marker row" proves that a branch is lost only on the server
and in the database that had the branch, and never on a standby, which may lag.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import namedtuple_row

from sparkonce.errors import ConfigurationError
from sparkonce.sinks.postgres.server.connections import PgConnection

logger = logging.getLogger("sparkonce")

_ROW: Any = namedtuple_row

_ASK = """
    SELECT current_database()::text AS database, current_user::text AS role,
        pg_is_in_recovery() AS is_standby,
        current_setting('max_prepared_transactions')::int AS prepared_most,
        (SELECT count(*)::int FROM pg_catalog.pg_prepared_xacts) AS prepared_now,
        current_setting('synchronous_commit') AS synchronous_commit,
        current_setting('synchronous_standby_names') AS synchronous_standby_names
"""


def system_identifier(connection: PgConnection) -> str:
    """The cluster's identity: its replicas share it, other servers do not. Empty if unreadable."""
    try:
        row = connection.execute(
            "SELECT system_identifier::text FROM pg_catalog.pg_control_system()"
        ).fetchone()
    except psycopg.errors.InsufficientPrivilege:
        return ""
    return "" if row is None else str(row[0])


@dataclass(frozen=True, slots=True)
class Server:
    """One server, as one connection saw it."""

    system: str  # see `system_identifier`
    database: str
    role: str
    is_standby: bool
    prepared_most: int  # max_prepared_transactions
    prepared_now: int  # in all databases
    synchronous_commit: str
    synchronous_standby_names: str

    @classmethod
    def ask(cls, connection: PgConnection) -> Server:
        system = system_identifier(connection)
        with connection.cursor(row_factory=_ROW) as cursor:
            row: Any = cursor.execute(_ASK).fetchone()
        return cls(system, **row._asdict())

    def why_not(self, system: str, database: str) -> str | None:
        """Why this server proves nothing about a branch prepared there; None if it can."""
        if self.is_standby:
            return (
                "conninfo= leads to a standby; promote it, or name all servers and add "
                "target_session_attrs=read-write"
            )
        if database != self.database or (system and self.system and system != self.system):
            return (
                f"conninfo= leads to database {self.database!r} of the server with system "
                f"identifier {self.system}, but the batch was prepared in {database!r} of "
                f"{system}; point conninfo= there again. If that server is gone for good, as after "
                "pg_upgrade or a dump, look for the batch's rows in the table"
            )
        return None

    def check(self, where: str) -> None:
        """Raise ConfigurationError if the server is a standby, which takes no writes."""
        if self.is_standby:
            raise ConfigurationError(
                f"PostgresSink: {where} is a standby, which takes no writes; name the primary in "
                "conninfo=, or all servers with target_session_attrs=read-write"
            )

    def check_failover(self, where: str) -> None:
        """Warn if conninfo= names several servers, but a commit waits for no standby."""
        waits = self.synchronous_commit in {"on", "remote_apply", "off"}  # we raise "off" to "on"
        if not (self.synchronous_standby_names and waits):
            logger.warning(
                "%s: conninfo= names several servers, but a commit does not wait for a standby "
                "(synchronous_standby_names=%r, synchronous_commit=%s): a failover may silently "
                "lose complete batches. Set synchronous_standby_names, and "
                "synchronous_commit to on or remote_apply",
                where,
                self.synchronous_standby_names,
                self.synchronous_commit,
            )

    def check_prepares(self, where: str, writers: int | None) -> None:
        """Check that each of `writers` tasks can leave a prepared transaction.

        Raises:
            ConfigurationError: the server allows none, or fewer than `writers`.
        """
        if self.prepared_most < (writers or 1):
            raise ConfigurationError(
                f'PostgresSink: {where}: load="direct" leaves a prepared transaction for each '
                f"Spark task that writes{f', here {writers}' if writers else ''}, and the server "
                f"has max_prepared_transactions = {self.prepared_most}; raise it and restart the "
                'server, or set load="staged"'
            )
        room = self.prepared_most - self.prepared_now
        if room < (writers or 1):
            logger.warning(
                "%s: %d of max_prepared_transactions = %d are in use (pg_prepared_xacts shows "
                "whose), so the server may refuse a batch",
                where,
                self.prepared_now,
                self.prepared_most,
            )


def warn_of_publications(connection: PgConnection, schema: str, where: str) -> None:
    """Warn of publications that include every new table of the schema, and so the sink's own."""
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
            "%s: the publication %r carries every table of the schema %r, including the sink's own "
            "(staging, sparkonce_commits). No subscriber has those, so replication stops at the "
            "first batch (logical replication target relation does not exist). Publish the tables "
            "by name: CREATE PUBLICATION … FOR TABLE …",
            *(where, publication, schema),
        )
