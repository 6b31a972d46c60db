"""Findings of `sparkonce doctor`: settings, rights and locks that would fail a batch later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg.rows import namedtuple_row

from sparkonce.errors import ConfigurationError
from sparkonce.finding import Finding, Level
from sparkonce.sinks.postgres.server.advice import next_step
from sparkonce.sinks.postgres.server.connections import Address, PgConnection, Pool
from sparkonce.sinks.postgres.server.sql import MARKER_TABLE, Timeouts
from sparkonce.sinks.postgres.target.table import Request, find

if TYPE_CHECKING:
    from sparkonce.sinks.postgres.target.writing import Writing

_LONG_S: Final = 300
"""A prepared transaction that is older was forgotten."""

_OF_DRIVER: Final = 4
_LITTLE_ROOM: Final = _OF_DRIVER + 2
"""Connections: the driver's, one for a task, and one for the command."""

_ROOM: Final = """
    SELECT least(
        current_setting('max_connections')::int - count(*)
            - current_setting('superuser_reserved_connections')::int
            - coalesce(current_setting('reserved_connections', true)::int, 0),
        CASE WHEN r.rolconnlimit >= 0
            THEN r.rolconnlimit - count(*) FILTER (WHERE a.usesysid = r.oid) END,
        CASE WHEN d.datconnlimit >= 0
            THEN d.datconnlimit - count(*) FILTER (WHERE a.datid = d.oid) END)
    FROM pg_stat_activity a, pg_roles r, pg_database d
    WHERE a.datid IS NOT NULL AND r.rolname = session_user AND d.datname = current_database()
    GROUP BY r.oid, r.rolconnlimit, d.oid, d.datconnlimit
"""
"""How many more connections the server accepts from this role into this database."""

_LOOK: Final = f"""
    SELECT current_setting('max_prepared_transactions')::int AS most_prepared,
        (SELECT count(*) FROM pg_prepared_xacts) AS prepared,
        (SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()
            AND prepared < now() - make_interval(secs => %(long_s)s)) AS old,
        ({_ROOM}) AS room,
        pg_is_in_recovery() AS is_standby, current_user AS role,
        has_any_column_privilege(c.oid, 'INSERT') AS may_insert,
        has_any_column_privilege(c.oid, 'UPDATE') AS may_update,
        (SELECT bool_and(has_column_privilege(c.oid, a.attnum, 'SELECT')) FROM pg_attribute a
            WHERE a.attrelid = c.oid AND a.attname = ANY (%(key)s)) AS may_read_key,
        quote_ident(n.nspname) || '.' || quote_ident(m.relname) AS marker,
        has_table_privilege(m.oid, 'SELECT') AND has_table_privilege(m.oid, 'INSERT') AS may_mark
    FROM (SELECT to_regclass(%(table)s) AS oid) AS named
        LEFT JOIN pg_class c ON c.oid = named.oid
        LEFT JOIN pg_namespace n ON n.oid = c.relnamespace
        LEFT JOIN pg_class m ON m.relnamespace = n.oid AND m.relname = %(marker)s
"""

_HOLDERS: Final = """
    SELECT l.pid, l.mode, a.state, coalesce(a.application_name, '') AS application,
        extract(epoch FROM now() - a.xact_start)::bigint AS seconds
    FROM pg_locks l LEFT JOIN pg_stat_activity a USING (pid)
    WHERE l.relation = to_regclass(%(table)s) AND l.granted AND l.mode <> ALL (%(harmless)s)
        AND l.pid IS DISTINCT FROM pg_backend_pid()
        AND NOT starts_with(coalesce(a.application_name, ''), 'sparkonce')
        AND a.xact_start < now() - make_interval(secs => %(lock_s)s)
        AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    ORDER BY seconds DESC LIMIT 5
"""


_READERS: Final = "AccessShareLock"
_UPKEEP: Final = "ShareUpdateExclusiveLock"
"""The lock of autovacuum, CREATE INDEX CONCURRENTLY and others, which wait only for each other."""


def diagnose(
    pool: Pool,
    address: Address,
    request: Request,
    timeouts: Timeouts,
) -> Iterator[Finding]:
    """Check the server's settings, the role's rights on the table, and the sessions that lock it.

    The table is checked as at a start, without a batch's schema.
    """
    table, writing = request.table, request.writing
    where = f"{address.shown}, database {address.database}"
    try:
        seen, holders = pool.run(lambda c: _ask(c, table, writing.key or (), timeouts.lock))
    except psycopg.Error as error:
        yield Finding(
            Level.ERROR,
            f"{where}: {address.said(error)}",
            next_step(error, timeouts).strip(" ()")
            or "check that the server runs, its address, the role, its password and pg_hba.conf",
        )
        return
    yield from _server(seen)
    try:
        is_there = pool.run(lambda connection: find(connection, request)) is not None
    except ConfigurationError as error:
        yield Finding(Level.ERROR, str(error))
        return
    if not is_there:
        yield Finding(Level.OK, f"there is no table {table} yet: the first start creates it")
        return
    yield from _rights(seen, table, writing)
    yield from _holders(holders, table)


def room_for_tasks(connection: PgConnection) -> int:
    """How many tasks can connect, besides the driver."""
    row = connection.execute(_ROOM).fetchone()
    return int(row[0]) - _OF_DRIVER if row else 0


def _ask(
    connection: PgConnection, table: str, key: Sequence[str], lock_s: float
) -> tuple[Any, list[Any]]:
    values = {
        "table": table,
        "key": list(key),
        "marker": MARKER_TABLE,
        "long_s": _LONG_S,
        "lock_s": lock_s,
        "harmless": [_READERS, _UPKEEP],
    }
    # In a transaction, which a pooler may not split.
    with connection.transaction(), connection.cursor(row_factory=namedtuple_row) as cursor:
        seen = cursor.execute(_LOOK, values).fetchone()
        return seen, cursor.execute(_HOLDERS, values).fetchall()


def _server(seen: Any) -> Iterator[Finding]:
    if seen.is_standby:
        yield Finding(
            Level.ERROR, "the server is a read-only standby", "give the primary's address"
        )
    if seen.most_prepared == 0:
        yield Finding(
            Level.WARNING,
            "max_prepared_transactions=0: a merged batch waits in an open connection; if that is "
            "lost after the decision, the sink merges again, and the server may refuse the batch",
            "set max_prepared_transactions to 10 or more, and restart the server",
        )
    elif seen.prepared >= seen.most_prepared:
        yield Finding(
            Level.ERROR,
            f"all {seen.most_prepared} prepared transactions that the server allows are in use",
            "end unused ones (SELECT * FROM pg_prepared_xacts), but none whose gid starts with "
            "sparkonce. (`sparkonce recover JOB` of its pipeline ends those), or raise "
            "max_prepared_transactions",
        )
    else:
        yield Finding(
            Level.OK, f"max_prepared_transactions={seen.most_prepared}, {seen.prepared} in use"
        )
    has_room = seen.room >= _LITTLE_ROOM
    yield Finding(
        Level.OK if has_room else Level.WARNING,
        f"room for {seen.room} more connections; the pipeline needs one for each core of its "
        "executors and four for the driver, and one more for a log in Postgres",
        "" if has_room else "raise max_connections, or the CONNECTION LIMIT of role or database",
    )
    if seen.old:
        yield Finding(
            Level.WARNING,
            f"{seen.old} prepared transactions are older than {_LONG_S} s: they hold locks, and "
            "keep VACUUM from cleaning up",
            "if the gid is sparkonce.…: sparkonce recover JOB; else ask their owner",
        )


def _holders(holders: list[Any], table: str) -> Iterator[Finding]:
    for holder in holders:
        yield Finding(
            Level.WARNING,
            f"process {holder.pid} ({holder.application or 'no name'}, {holder.state}) holds "
            f"{holder.mode} on {table} for {holder.seconds} s: a merge that waits for it fails "
            "after lock_timeout_s=",
            f"end it: SELECT pg_terminate_backend({holder.pid})",
        )


def _rights(seen: Any, table: str, writing: Writing) -> Iterator[Finding]:
    """Check the key, and any other column: only the start knows which columns a batch has."""
    updates = writing.mode in {"upsert", "merge"}
    needed = (
        ("INSERT", table, seen.may_insert),
        ("UPDATE", table, seen.may_update or not updates),
        ("SELECT", table, seen.may_read_key is not False),
        ("SELECT, INSERT", seen.marker, seen.may_mark is not False),
    )
    missing = [(right, on) for right, on, there in needed if not there]
    for right, on in missing:
        yield Finding(
            Level.ERROR,
            f"the role {seen.role} has no {right} right on {on}",
            f'GRANT {right} ON {on} TO "{seen.role}"',
        )
    if not missing:
        yield Finding(Level.OK, f"the role {seen.role} may write {table} and stage rows")
