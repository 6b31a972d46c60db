"""What of a Postgres server bites a pipeline in a bad hour."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import psycopg
from psycopg.rows import namedtuple_row

from sparkonce.sinks.finding import Finding, Level
from sparkonce.sinks.postgres.connections import Address, PgConnection, Pool

_LONG_S: Final = 300
"""A transaction that holds the table for longer makes merges wait and fail."""

_LOOK: Final = """
    SELECT current_setting('max_prepared_transactions')::int AS most_prepared,
        (SELECT count(*) FROM pg_prepared_xacts) AS prepared,
        (SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()
            AND prepared < now() - make_interval(secs => %(long_s)s)) AS old,
        pg_is_in_recovery() AS is_standby, current_user AS role,
        c.oid IS NOT NULL AS is_there, n.nspname AS schema,
        has_table_privilege(c.oid, 'INSERT') AS may_insert,
        has_any_column_privilege(c.oid, 'UPDATE') AS may_update,
        has_schema_privilege(n.oid, 'CREATE') AS may_create
    FROM (SELECT to_regclass(%(table)s) AS oid) AS c
        LEFT JOIN pg_class r ON r.oid = c.oid LEFT JOIN pg_namespace n ON n.oid = r.relnamespace
"""

_HOLDERS: Final = """
    SELECT l.pid, l.mode, a.state, coalesce(a.application_name, '') AS application,
        extract(epoch FROM now() - a.xact_start)::bigint AS seconds
    FROM pg_locks l LEFT JOIN pg_stat_activity a USING (pid)
    WHERE l.relation = to_regclass(%(table)s) AND l.granted AND l.mode <> 'AccessShareLock'
        AND l.pid IS DISTINCT FROM pg_backend_pid()
        AND NOT starts_with(coalesce(a.application_name, ''), 'sparkonce')
        AND a.xact_start < now() - make_interval(secs => %(long_s)s)
        AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    ORDER BY seconds DESC LIMIT 5
"""


def diagnose(pool: Pool, address: Address, table: str, *, upserts: bool) -> Iterator[Finding]:
    """Ask the server about its settings, our rights on the table, and who holds it."""

    def ask(connection: PgConnection) -> tuple[Any, list[Any]]:
        values = {"table": table, "long_s": _LONG_S}
        with connection.cursor(row_factory=namedtuple_row) as cursor:
            seen = cursor.execute(_LOOK, values).fetchone()
            return seen, cursor.execute(_HOLDERS, values).fetchall()

    where = f"{address.shown}, database {address.database}"
    try:
        seen, holders = pool.run(ask)
    except psycopg.Error as error:
        yield Finding(
            Level.ERROR,
            f"{where}: {address.said(error)}",
            "check the address, the role, its password and pg_hba.conf",
        )
        return
    yield from _server(seen)
    if not seen.is_there:
        yield Finding(
            Level.ERROR, f"{where}: there is no table {table}", "create it, or fix table="
        )
        return
    yield from _rights(seen, table, upserts=upserts)
    for holder in holders:
        yield Finding(
            Level.WARNING,
            f"process {holder.pid} ({holder.application or 'no name'}, {holder.state}) holds "
            f"{holder.mode} on {table} since {holder.seconds} s: a merge that waits for it fails "
            "after lock_timeout=",
            f"end it: SELECT pg_terminate_backend({holder.pid})",
        )


def _server(seen: Any) -> Iterator[Finding]:
    if seen.is_standby:
        yield Finding(
            Level.ERROR, "the server is a read-only standby", "give the primary's address"
        )
    if seen.most_prepared == 0:
        yield Finding(
            Level.WARNING,
            "max_prepared_transactions=0: a merged batch waits in an open connection; if that is "
            "lost after the decision, it is merged again and may be refused then",
            "set max_prepared_transactions to 10 or more, and restart the server",
        )
    elif seen.prepared >= seen.most_prepared:
        yield Finding(
            Level.ERROR,
            f"all {seen.most_prepared} prepared transactions that the server allows are in use",
            "end those that nobody needs (SELECT * FROM pg_prepared_xacts), but none whose gid "
            "begins with sparkonce. (`sparkonce recover JOB` of its pipeline does), or raise "
            "max_prepared_transactions",
        )
    else:
        yield Finding(
            Level.OK, f"max_prepared_transactions={seen.most_prepared}, {seen.prepared} in use"
        )
    if seen.old:
        yield Finding(
            Level.WARNING,
            f"{seen.old} prepared transactions are older than {_LONG_S} s: they hold locks, and "
            "keep VACUUM from cleaning up",
            "if they are ours (gid sparkonce.…): sparkonce recover JOB; else ask whose they are",
        )


def _rights(seen: Any, table: str, *, upserts: bool) -> Iterator[Finding]:
    missing = [
        right
        for right, there in (
            (f"INSERT ON {table}", seen.may_insert),
            (f"UPDATE ON {table}", seen.may_update or not upserts),
            (f"CREATE ON SCHEMA {seen.schema}", seen.may_create),
        )
        if not there
    ]
    for right in missing:
        yield Finding(
            Level.ERROR,
            f"the role {seen.role} has no {right.split(' ON ')[0]} right on "
            f"{right.split(' ON ')[1].lower() if 'SCHEMA' in right else table}",
            f'GRANT {right} TO "{seen.role}"',
        )
    if not missing:
        yield Finding(Level.OK, f"the role {seen.role} may write {table} and stage beside it")
