"""What an operator can do about an error of the server, appended to the error's own words."""

from __future__ import annotations

import re
from typing import Final

import psycopg
from psycopg import errors as pg

from sparkonce.sinks.postgres.server.sql import Timeouts

_NO_ROOM_TO_PREPARE: Final = "MarkAsPreparing"
"""The server's function that raises the error; its words depend on the server's language."""

_TRANSIENT_STATES: Final = ("08", "53300", "57P", "57014", "55P03", "40")
"""Starts of SQLSTATEs that another try may not meet: lost connection, too many connections, server
shutting down or starting, cancellation, lock timeout, serialization."""

_TRANSIENT_WORDS: Final = re.compile(
    "(?i)connection refused|timeout expired|timed out|connection reset|server closed the connection"
    "|no route to host|network is unreachable|temporary failure in name resolution"
    "|is the server running|the database system is |too many (clients|connections)"
    "|connection slots|consuming input failed|the connection is (closed|lost)"
)
"""libpq gives no SQLSTATE for a connection that fails, only words."""


def is_transient(error: psycopg.Error) -> bool:
    """Whether the server cannot be used now but may be soon, with unchanged settings."""
    if isinstance(error, pg.ConnectionTimeout):
        return True
    if error.sqlstate is not None:
        return error.sqlstate.startswith(_TRANSIENT_STATES)
    return isinstance(error, psycopg.OperationalError) and bool(_TRANSIENT_WORDS.search(str(error)))


def next_step(error: psycopg.Error, timeouts: Timeouts) -> str:
    """The setting at fault and what to do, in brackets; empty where the error says enough."""
    advice = _of(error, timeouts)
    return f" ({advice})" if advice else ""


def _of(error: psycopg.Error, timeouts: Timeouts) -> str:  # noqa: PLR0911 - a table
    if isinstance(error, pg.LockNotAvailable):
        return (
            f"lock_timeout_s={timeouts.lock:g}: another session, or a prepared transaction, holds "
            "the lock; pg_locks and pg_prepared_xacts show which; end it, or raise "
            "lock_timeout_s=. Never end a prepared transaction whose gid starts with sparkonce. "
            "yourself: `sparkonce recover JOB` or the next start of its pipeline does; ended "
            "manually, its rows would be lost or come twice"
        )
    if isinstance(error, pg.QueryCanceled):
        canceled = "somebody canceled it (pg_cancel_backend)"
        limit = (
            f"statement_timeout_s={timeouts.statement:g}: make the batches smaller, or raise "
            f"statement_timeout_s=; or {canceled}"
        )
        return limit if timeouts.statement else canceled
    if isinstance(error, pg.ReadOnlySqlTransaction):
        return (
            "the server is a standby, or default_transaction_read_only is on, as while a database "
            "moves to another server; point conninfo= to the new server, or reset the setting"
        )
    if isinstance(error, pg.OutOfMemory):
        if error.diag.source_function == _NO_ROOM_TO_PREPARE:
            return (
                "raise max_prepared_transactions and restart the server, or write with fewer tasks"
            )
        return "raise max_locks_per_transaction and restart the server"
    if isinstance(error, pg.DiskFull):
        return "make room on the server's disk; nothing of this batch is kept there"
    if isinstance(error, pg.FeatureNotSupported) and "repare" in (error.diag.source_function or ""):
        return (
            "does a trigger of the table, or an event trigger on CREATE TABLE, use NOTIFY or a "
            "temporary table? No prepared transaction can"
        )
    if _is_full(error):
        return "raise max_connections, or let fewer tasks write at the same time"
    return ""


def _is_full(error: psycopg.Error) -> bool:
    # While connecting, libpq reports the server's words and no code.
    return error.sqlstate == "53300" or "too many clients" in str(error)
