"""Names and SQL statements; nothing here talks to a server.

A staging table, and the session that creates or merges it, is named after its branch:

    sparkonce_<owner: 12 hex>_<sink: 8 hex>_t<token>_b<batch>_p<pass>_a<attempt>_

The digests have a fixed length and every number ends with a terminator, so no name is a prefix of
another branch's name. If the name would exceed 63 bytes, the numbers stand without the `_` between
them. The table's comment holds the full branch id, from which the name follows: only a table whose
name and comment agree is ours.

Names are searched by range in their "C" order, never by pattern: `_` and `%` are literal.
No statement takes bind parameters: utility statements cannot, and a `%` in a quoted name would be
read as a placeholder.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from psycopg import sql

from sparkonce.clients.postgres import SERVER_KEEPS_ALIVE
from sparkonce.errors import ProtocolError
from sparkonce.model import DRIVER_ATTEMPT, BranchId, Owner

MARKER_TABLE = "sparkonce_commits"
"""One row per committed batch, in the schema of the target; users may read it."""

MARKER_COLUMNS: Mapping[str, str] = {
    "branch": "text PRIMARY KEY",
    "log_id": "text NOT NULL",
    "query_id": "text NOT NULL",
    "sink": "text NOT NULL",
    "batch_id": "bigint NOT NULL",
    "token": "bigint NOT NULL",
    "rows": "bigint NOT NULL",
    "committed_at": "timestamptz NOT NULL DEFAULT now()",
}

MAX_NAME_BYTES = 63

OPEN, PREPARED, STAGED = 1, 2, 3
"""The forms of a branch on the server: an open session, a prepared transaction, a table."""

READ_COMMITTED = sql.SQL("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE")
"""Fails on a standby, even if nothing is written."""

TO_WRITE = sql.SQL("BEGIN ISOLATION LEVEL READ COMMITTED")
"""Fails if default_transaction_read_only is on, as while a database moves to another server, which
would lack the rows."""

BEGIN = sql.SQL("BEGIN")
COMMIT = sql.SQL("COMMIT")

_NUMBERS = re.compile(
    r"t(?P<token>\d+)_?b(?P<batch_id>\d+)_?p(?P<write_pass>\d+)_?a(?P<attempt>\d+)_"
)
_DROPPED_AT_ONCE = 50  # each table holds a few locks until the statement ends


@dataclass(frozen=True, slots=True)
class Timeouts:
    """In seconds; every transaction of the sink sets all of them.

    Attributes:
        lock: how long a statement waits for a lock.
        statement: how long a statement may take; 0 for no limit.
        idle: how long the open transaction may wait for a statement; 0 for no limit, since a held
            merge waits for the decision.
    """

    lock: float
    statement: float
    idle: float = 0


def staging_name(branch_id: BranchId) -> str:
    """The name of the branch's staging table and of its session.

    Raises:
        ProtocolError: the branch id has no batch, or its numbers make the name too long.
    """
    if branch_id.batch_id is None:
        raise ProtocolError(f"{branch_id.name}: a branch in Postgres needs its batch id")
    numbers = (
        f"t{branch_id.token}",
        f"b{branch_id.batch_id}",
        f"p{branch_id.write_pass}",
        f"a{branch_id.attempt}",
    )
    of_sink = _of_sink(branch_id.owner, branch_id.sink)
    for between in ("_", ""):
        name = f"{of_sink}{between.join(numbers)}_"
        if len(name) <= MAX_NAME_BYTES:
            return name
    raise ProtocolError(f"{branch_id}: {name} is longer than a name in Postgres may be")


def branch_of_session(owner: Owner, sink: str, name: str) -> BranchId | None:
    """The merge that the session of this name runs; None if it is not of this sink."""
    found = _NUMBERS.fullmatch(name.removeprefix(_of_sink(owner, sink)))
    if found is None or int(found["attempt"]) != DRIVER_ATTEMPT:
        return None
    numbers = {key: int(value) for key, value in found.groupdict().items()}
    return BranchId(owner=owner, sink=sink, **numbers)


def _of_owner(owner: Owner) -> str:
    return f"sparkonce_{owner.digest}_"


def _of_sink(owner: Owner, sink: str) -> str:
    return f"{_of_owner(owner)}{hashlib.sha256(sink.encode()).hexdigest()[:8]}_"


def qualified(schema: str, name: str) -> sql.Composable:
    return sql.Identifier(schema, name)


def columns_of(names: Sequence[str]) -> sql.Composable:
    return sql.SQL(", ").join(map(sql.Identifier, names))


def script(*statements: sql.Composable) -> sql.Composed:
    """Several statements, sent to the server in one message."""
    return sql.SQL("; ").join(statements)


def settings(
    timeouts: Timeouts, application_name: str | None = None, *, is_flushed: bool = True
) -> sql.Composed:
    """Settings of one transaction, set inside it, so that they also hold behind a pooler.

    With `is_flushed`, COMMIT waits for the disk.
    """
    values = {
        "lock_timeout": f"{max(1, round(timeouts.lock * 1000))}ms",
        "statement_timeout": f"{round(timeouts.statement * 1000)}ms",
        "idle_in_transaction_session_timeout": f"{round(timeouts.idle * 1000)}ms",
        # Only a warning shows that a wait for a standby was interrupted.
        "client_min_messages": "warning",
        # If off, the server reads a null in an array's text form as the text "NULL".
        "array_nulls": "on",
        **SERVER_KEEPS_ALIVE,
    }
    if application_name is not None:
        values["application_name"] = application_name
    calls = [
        sql.SQL("set_config({}, {}, true)").format(sql.Literal(key), sql.Literal(value))
        for key, value in values.items()
    ]
    flushed = _FLUSHED if is_flushed else _UNFLUSHED
    return sql.SQL("SELECT {}, {}, {}").format(sql.SQL(", ").join(calls), flushed, _UNLIMITED)


# A crash would lose what the server did not flush, and with it a prepared branch.
_FLUSHED = sql.SQL(
    "set_config('synchronous_commit', CASE current_setting('synchronous_commit') WHEN 'off' "
    "THEN 'on' ELSE current_setting('synchronous_commit') END, true)"
)

_UNFLUSHED = sql.SQL("set_config('synchronous_commit', 'off', true)")

# Postgres 17 introduced this setting; an open merge and a COPY last as long as Spark needs.
_UNLIMITED = sql.SQL(
    "CASE WHEN current_setting('transaction_timeout', true) IS NOT NULL "
    "THEN set_config('transaction_timeout', '0', true) END"
)


# -- staging ---------------------------------------------------------------------------------------


def create_staging(
    schema: str, name: str, types: Mapping[str, str], branch_id: BranchId
) -> sql.Composed:
    """Create the branch's staging table. Never UNLOGGED: see ADR 15."""
    table = qualified(schema, name)
    columns = sql.SQL(", ").join(
        sql.SQL("{} {}").format(sql.Identifier(column), sql.SQL(type_sql))
        for column, type_sql in types.items()  # the server's own format_type wrote the types
    )
    return script(
        # The table lives for one batch, and autovacuum would take a lock that DROP waits for.
        sql.SQL("CREATE TABLE {} ({}) WITH (autovacuum_enabled = false)").format(table, columns),
        sql.SQL("COMMENT ON TABLE {} IS {}").format(table, sql.Literal(str(branch_id))),
    )


def copy_into(
    schema: str, name: str, columns: Sequence[str], *, binary: bool, freeze: bool = True
) -> sql.Composed:
    """COPY into a table; FREEZE saves work, and needs a table that this transaction created."""
    format_ = sql.SQL("FORMAT binary") if binary else sql.SQL("FORMAT text")
    options = format_ + sql.SQL(", FREEZE") if freeze else format_
    return sql.SQL("COPY {} ({}) FROM STDIN ({})").format(
        qualified(schema, name), columns_of(columns), options
    )


def drop_staging(schema: str, names: Sequence[str]) -> list[sql.Composed]:
    """DROP statements for the tables, each short enough for the server's lock table."""
    return [
        sql.SQL("DROP TABLE IF EXISTS {}").format(
            sql.SQL(", ").join(
                qualified(schema, name) for name in names[at : at + _DROPPED_AT_ONCE]
            )
        )
        for at in range(0, len(names), _DROPPED_AT_ONCE)
    ]


# -- merging ---------------------------------------------------------------------------------------


def prepare(gid: str) -> sql.Composed:
    return sql.SQL("PREPARE TRANSACTION {}").format(sql.Literal(gid))


def commit_prepared(gid: str) -> sql.Composed:
    return sql.SQL("COMMIT PREPARED {}").format(sql.Literal(gid))


def rollback_prepared(gid: str) -> sql.Composed:
    return sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid))


WRITE_NOTHING = sql.SQL(
    "SELECT CASE WHEN current_setting('synchronous_standby_names') <> '' "
    "THEN pg_logical_emit_message(true, 'sparkonce', '') END"
)
"""A write that nobody reads, so that COMMIT waits for the standbys."""

SORT_IN_MEMORY = sql.SQL(
    "SELECT set_config('work_mem', '64MB', true) "
    "WHERE pg_size_bytes(current_setting('work_mem')) < pg_size_bytes('64MB')"
)
"""By default Postgres sorts more than 4 MiB on disk."""

CHECK_CONSTRAINTS_NOW = sql.SQL("SET CONSTRAINTS ALL IMMEDIATE")


# -- the marker ------------------------------------------------------------------------------------


def insert_marker(schema: str, branch_id: BranchId, rows: int) -> sql.Composed:
    values = [
        *(str(branch_id), branch_id.owner.log_id, branch_id.owner.query_id, branch_id.sink),
        *(branch_id.batch_id, branch_id.token, rows),
    ]
    return sql.SQL("INSERT INTO {} ({}) VALUES ({})").format(
        qualified(schema, MARKER_TABLE),
        columns_of([name for name in MARKER_COLUMNS if name != "committed_at"]),
        sql.SQL(", ").join(map(sql.Literal, values)),
    )


def find_marker(schema: str, branch_id: BranchId) -> sql.Composed:
    """Look for the marker row; fails if row security may hide it.

    A missing marker row proves that nothing was committed, so it must not be hidden.
    """
    table = qualified(schema, MARKER_TABLE)
    hidden = f"row security may hide rows of {MARKER_TABLE} from this role"
    return sql.SQL(
        "SELECT FROM {table} WHERE branch = {branch} UNION ALL SELECT WHERE "
        "CASE WHEN row_security_active({name}) THEN concat({hidden})::int END IS NOT NULL"
    ).format(
        table=table,
        branch=sql.Literal(str(branch_id)),
        name=sql.Literal(table.as_string()),
        hidden=sql.Literal(hidden),
    )


def require_marker(schema: str, branch_id: BranchId, otherwise: str) -> sql.Composed:
    """Fails if there is no marker row; `concat` keeps the planner from casting a constant."""
    return sql.SQL(
        "SELECT CASE count(*) WHEN 0 THEN concat({})::int END FROM {} WHERE branch = {}"
    ).format(sql.Literal(otherwise), qualified(schema, MARKER_TABLE), sql.Literal(str(branch_id)))


def require_own_transaction(otherwise: str) -> sql.Composed:
    """Fails outside of a transaction that has written.

    Without an open transaction, a message is a transaction of its own, which has not written yet.
    """
    return sql.SQL(
        "SELECT CASE WHEN txid_current_if_assigned() IS NULL THEN concat({})::int END"
    ).format(sql.Literal(otherwise))


def require_system(system: str) -> sql.Composed:
    """Fails on a server with another identifier; checks nothing if `system` is empty."""
    if not system:
        return script(sql.SQL("SELECT"))
    return sql.SQL(
        "SELECT CASE WHEN system_identifier::text <> {} THEN concat({})::int END "
        "FROM pg_catalog.pg_control_system()"
    ).format(
        sql.Literal(system),
        sql.Literal(
            "conninfo= leads to another server since the query began; start the query again"
        ),
    )


# -- what exists -----------------------------------------------------------------------------------

AS_LOGIN = sql.SQL("SET LOCAL ROLE NONE")
"""Only a role that may act as a session's login role can see the session's state and end it; a role
that the session switched to (`ALTER ROLE … SET role`) may not. Holds until the end of the
transaction."""


def find_existing(owner: Owner) -> sql.Composed:
    """The owner's open merges, prepared transactions and staging tables, in this order.

    It searches every schema, since the target may have been dropped or moved. Run it `AS_LOGIN`.
    """
    prefix = _of_owner(owner)
    return sql.SQL(
        "SELECT {open} AS place, NULL AS schema, application_name AS name, NULL AS branch "
        "FROM pg_stat_activity WHERE datname = current_database() AND usename = session_user "
        "AND state LIKE 'idle in transaction%' AND starts_with(application_name, {prefix}) "
        "UNION ALL SELECT {prepared}, NULL, gid, gid FROM pg_prepared_xacts "
        "WHERE database = current_database() AND starts_with(gid, {gids}) "
        "UNION ALL SELECT {staged}, n.nspname, c.relname, obj_description(c.oid, 'pg_class') "
        "FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind = 'r' "
        "AND c.relname >= {prefix}::name AND c.relname < {end}::name "
        "ORDER BY 1, 3"
    ).format(
        open=sql.Literal(OPEN),
        prepared=sql.Literal(PREPARED),
        staged=sql.Literal(STAGED),
        prefix=sql.Literal(prefix),
        end=sql.Literal(prefix[:-1] + chr(ord(prefix[-1]) + 1)),
        gids=sql.Literal(owner.prefix),
    )


def find_schema(table: str) -> sql.Composed:
    return sql.SQL(
        "SELECT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE c.oid = to_regclass({})"
    ).format(sql.Literal(table))


def end_holders(application_name: str) -> sql.Composed:
    """End the sessions that hold exactly this merge open and are idle. Run it `AS_LOGIN`."""
    return sql.SQL(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
        "AND usename = session_user AND pid <> pg_backend_pid() "
        "AND state LIKE 'idle in transaction%' AND application_name = {}"
    ).format(sql.Literal(application_name))
