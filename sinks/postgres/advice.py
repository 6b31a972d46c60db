"""What an operator can do about an error of the server, to stand behind the error's own words."""

from __future__ import annotations

import psycopg
from psycopg import errors as pg

from sparkonce.sinks.postgres.sql import Timeouts

_NO_ROOM_TO_PREPARE = "MarkAsPreparing"
"""The function of the server that raises it; its words differ with the server's language."""


def next_step(error: psycopg.Error, timeouts: Timeouts) -> str:
    """The setting at fault and what to do, in brackets; nothing where the error says enough."""
    said = _of(error, timeouts)
    return f" ({said})" if said else ""


def _of(error: psycopg.Error, timeouts: Timeouts) -> str:  # noqa: PLR0911 - a table
    if isinstance(error, pg.LockNotAvailable):
        return (
            f"lock_timeout={timeouts.lock:g} s: another session, or a prepared transaction, holds "
            "what this one needs; pg_locks and pg_prepared_xacts tell which; end that one, or "
            "raise lock_timeout=. What is prepared under a gid that begins with sparkonce. only "
            "its own pipeline may end (`sparkonce recover JOB`, or its next start): ended by hand, "
            "its rows would be lost, or come twice"
        )
    if isinstance(error, pg.QueryCanceled):
        canceled = "somebody canceled it (pg_cancel_backend)"
        limit = (
            f"statement_timeout={timeouts.statement:g} s: make the batches smaller, or raise "
            f"statement_timeout=; or {canceled}"
        )
        return limit if timeouts.statement else canceled
    if isinstance(error, pg.ReadOnlySqlTransaction):
        return (
            "it is a standby, or default_transaction_read_only is on, as where a database is held "
            "still while it moves; let conninfo= lead to where it moves, or reset the setting"
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
    # While it connects, libpq tells the server's words and no code.
    return error.sqlstate == "53300" or "too many clients" in str(error)
