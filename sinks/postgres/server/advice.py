"""Advice for the operator about an error of the server, appended to the error's text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import psycopg
from psycopg import errors as pg

from sparkonce.sinks.postgres.server.sql import Timeouts

_NO_ROOM_TO_PREPARE: Final = "MarkAsPreparing"
"""The server's function that raises the error; its text depends on the server's language."""

_TRANSIENT_STATES: Final = ("08", "53300", "57P", "57014", "55P03", "40")
"""Prefixes of SQLSTATEs that may not recur: lost connection, too many connections, server shutting
down or starting, cancellation, lock timeout, serialization."""

_TRANSIENT_WORDS: Final = re.compile(
    "(?i)connection refused|timeout expired|timed out|connection reset|server closed the connection"
    "|no route to host|network is unreachable|temporary failure in name resolution"
    "|is the server running|the database system is |consuming input failed"
    "|the connection is (closed|lost)"
)
"""libpq gives no SQLSTATE for a connection that fails, only a text."""

_FULL_WORDS: Final = re.compile(
    "too many (clients|connections)|connection slots|no more connections allowed"
)
"""Postgres' own texts of 53300, and PgBouncer's."""

_SPLITS: Final = "statement pooling mode"
"""In PgBouncer's text where it would split a transaction; its SQLSTATE, 08P01, has many causes."""


_OF_SUCH_ROWS: Final = (
    "filter or correct such rows in the query, and start it again; or let dead_letter= collect them"
)

_BY_KIND: Final[Mapping[type[psycopg.Error], str]] = {
    pg.ReadOnlySqlTransaction: (
        "the server is a standby, or default_transaction_read_only is on, as while a database "
        "moves to another server; point conninfo= to the new server, or reset the setting"
    ),
    pg.DiskFull: "make room on the server's disk; nothing of this batch is kept there",
    pg.ForeignKeyViolation: (
        f"{_OF_SUCH_ROWS}. If another sink of this pipeline writes the other table, neither sees "
        "the other's rows before the decision: give each its own pipeline, or drop the foreign key"
    ),
    psycopg.IntegrityError: _OF_SUCH_ROWS,
}


def is_transient(error: psycopg.Error) -> bool:
    """Whether the same call may succeed later, with unchanged settings."""
    if isinstance(error, pg.ConnectionTimeout):
        return True
    if _SPLITS in str(error):
        return False
    if error.sqlstate is not None:
        return error.sqlstate.startswith(_TRANSIENT_STATES)
    is_passing = is_full(error) or bool(_TRANSIENT_WORDS.search(str(error)))
    return isinstance(error, psycopg.OperationalError) and is_passing


def next_step(error: psycopg.Error, timeouts: Timeouts) -> str:
    """The setting at fault and what to do, in parentheses; empty if the error needs no advice."""
    advice = _of(error, timeouts)
    return f" ({advice})" if advice else ""


def _of(error: psycopg.Error, timeouts: Timeouts) -> str:  # noqa: C901, PLR0911 - a table
    if isinstance(error, pg.LockNotAvailable):
        return (
            f"lock_timeout_s={timeouts.lock:g}: another session, or a prepared transaction, holds "
            "the lock; pg_locks and pg_prepared_xacts show which; end it, or raise "
            "lock_timeout_s=. Never end a prepared transaction whose gid starts with sparkonce. "
            "manually, which would lose or duplicate its rows: `sparkonce recover JOB` or the next "
            "start of its pipeline ends it"
        )
    if isinstance(error, pg.QueryCanceled):
        canceled = "somebody canceled it (pg_cancel_backend)"
        limit = (
            f"statement_timeout_s={timeouts.statement:g}: make the batches smaller, or raise "
            f"statement_timeout_s=; or {canceled}"
        )
        return limit if timeouts.statement else canceled
    if isinstance(error, pg.OutOfMemory):
        if error.diag.source_function == _NO_ROOM_TO_PREPARE:
            return (
                "raise max_prepared_transactions and restart the server, or write with fewer tasks"
            )
        return "raise max_locks_per_transaction and restart the server"
    for kind, advice in _BY_KIND.items():
        if isinstance(error, kind):
            return advice
    if isinstance(error, pg.FeatureNotSupported) and "repare" in (error.diag.source_function or ""):
        return (
            "does a trigger of the table, or an event trigger on CREATE TABLE, use NOTIFY or a "
            "temporary table? A prepared transaction cannot"
        )
    if isinstance(error, pg.InsufficientPrivilege) and "schema" in str(error):
        return "GRANT USAGE ON SCHEMA … to the role"
    if _SPLITS in str(error):
        return "set the pooler's pool_mode to transaction or session"
    if is_full(error):
        return "raise max_connections, or let fewer tasks write at the same time"
    return ""


def is_full(error: BaseException) -> bool:
    """Whether the server, the role, the database or a pooler has no room for another connection."""
    if not isinstance(error, psycopg.OperationalError):
        return False
    return error.sqlstate == "53300" or bool(_FULL_WORDS.search(str(error)))
