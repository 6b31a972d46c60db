"""Connections to the server: how they are made, kept, and what is told of their errors.

A process keeps its connections in one pool for each address, for all its sinks and, in a Python
worker, from task to task: Spark runs many tasks in one worker, one after another.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Conninfo, TransactionStatus
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from sparkonce.conninfo import KEPT_ALIVE, check_service, read_conninfo, said, shown_port
from sparkonce.sinks.postgres.sql import AS_LOGIN, BEGIN, COMMIT, script

PgConnection: TypeAlias = "psycopg.Connection[tuple[Any, ...]]"

ResultT = TypeVar("ResultT")

PASSING = (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure)
"""Nobody's fault: the same statement may well succeed when it is sent again."""

_TRIES = 5
_APPLICATION = "sparkonce"
_MAX_KEPT = 4
_IDLE_S = 60.0
"""As long as Spark itself keeps a Python worker without work."""


@dataclass(frozen=True)
class Address:
    """A checked conninfo; its `repr` has no secrets."""

    conninfo: str

    @classmethod
    def read(cls, conninfo: str) -> Address:
        known = read_conninfo(
            conninfo,
            "PostgresSink: conninfo= is neither a URL like postgresql://host:5432/database nor a "
            "list like 'host=… port=… dbname=…'",
        )
        check_service(known, "PostgresSink: conninfo=")
        return cls(conninfo)

    def __repr__(self) -> str:
        return f"<Address {self.shown}/{self.database}>"

    @cached_property
    def shown(self) -> str:
        """Host and port."""
        known = self._parameters()
        host = known.get("host") or known.get("hostaddr") or "localhost"
        return f"{host}:{shown_port(known)}"

    @property
    def names_several(self) -> bool:
        """Whether it names more servers than one, as for a failover."""
        known = self._parameters()
        return "," in (known.get("host") or known.get("hostaddr") or "")

    @cached_property
    def database(self) -> str:
        known = self._parameters()
        return known.get("dbname") or known.get("user") or ""

    def _parameters(self) -> dict[str, str]:
        """Defaults of libpq and the environment, and what the conninfo says instead."""
        defaults = {
            option.keyword.decode(): option.val.decode()
            for option in Conninfo.get_defaults()
            if option.val is not None
        }
        given = {key: str(value) for key, value in conninfo_to_dict(self.conninfo).items()}
        return {**defaults, **given}

    def connect(self) -> PgConnection:
        """An autocommit connection; whoever wants a transaction says BEGIN."""
        given = conninfo_to_dict(self.conninfo)
        settings = {key: value for key, value in KEPT_ALIVE.items() if key not in given}
        return psycopg.connect(
            self.conninfo,
            autocommit=True,
            prepare_threshold=None,  # each statement has names of its own; and poolers forget them
            client_encoding="UTF8",
            application_name=_APPLICATION,
            **settings,  # type: ignore[arg-type]
        )

    def said(self, error: Exception) -> str:
        """What may be told of it: see `sparkonce.conninfo.said`."""
        return said(error, conninfo_to_dict(self.conninfo))

    def cause(self, error: psycopg.Error) -> psycopg.Error:
        """The error as it may be chained, and so end in a log."""
        return type(error)(self.said(error))


def roll_back(connection: PgConnection) -> None:
    """End an open transaction; a connection that cannot do that is closed by the pool."""
    if connection.info.transaction_status != TransactionStatus.IDLE:
        with contextlib.suppress(psycopg.Error):
            connection.execute("ROLLBACK")


def ask_as_login(connection: PgConnection, query: sql.Composed) -> list[tuple[Any, ...]]:
    """The rows that the role sees which logged in, whatever role the session has switched to."""
    try:
        cursor = connection.execute(script(BEGIN, AS_LOGIN, query, COMMIT))
        while cursor.description is None:
            cursor.nextset()
        return cursor.fetchall()
    finally:
        roll_back(connection)


@contextlib.contextmanager
def warnings_of(connection: PgConnection) -> Iterator[list[str]]:
    """Gathers the server's warnings: a wait for a standby that is cut short is no error.

    Not its other notices: a role may have it send each statement that it logs.
    """
    told: list[str] = []

    def note(notice: psycopg.errors.Diagnostic) -> None:
        if notice.severity_nonlocalized == "WARNING":
            told.append(notice.message_primary or "")

    connection.add_notice_handler(note)
    try:
        yield told
    finally:
        connection.remove_notice_handler(note)


@contextlib.contextmanager
def limited(connection: PgConnection, limit_s: float) -> Iterator[threading.Event]:
    """Cancel what still runs after so many seconds; the event says whether it was.

    For what `statement_timeout` does not end: a COMMIT that waits for a standby.
    """
    cut = threading.Event()

    def cancel() -> None:
        cut.set()
        with contextlib.suppress(psycopg.Error):  # or it has ended, or nobody answers
            connection.cancel_safe()

    timer = threading.Timer(limit_s, cancel)
    timer.daemon = True
    timer.start()
    try:
        yield cut
    finally:
        timer.cancel()
        timer.join()  # the next statement must not be what it cancels


def retrying() -> Retrying:
    """Calls again what failed with one of `PASSING`, a few times."""
    return Retrying(
        retry=retry_if_exception_type(PASSING),
        wait=wait_random_exponential(multiplier=0.05, max=1.0),
        stop=stop_after_attempt(_TRIES),
        reraise=True,
    )


class Pool:
    """A few connections that are kept between calls. Safe to use from several threads.

    Args:
        address: of the server.
        idle_s: how long a connection is kept without use, in seconds.
    """

    def __init__(self, address: Address, idle_s: float = _IDLE_S) -> None:
        self._address = address
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._kept: list[tuple[PgConnection, float]] = []
        self._timer: threading.Timer | None = None
        self._room = threading.BoundedSemaphore(_MAX_KEPT)

    def run(self, action: Callable[[PgConnection], ResultT]) -> ResultT:
        """Run an idempotent action; again on a new connection when a kept one has died.

        Only a few run at a time, so that many branches do not take as many connections.
        """
        with self._room:
            connection, result = self.lend(action)
            self.give(connection)
            return result

    def lend(self, action: Callable[[PgConnection], ResultT]) -> tuple[PgConnection, ResultT]:
        """As `run`, and the caller gets the connection too, for as long as it likes."""
        while True:
            connection, is_new = self.take()
            try:
                return connection, action(connection)
            except BaseException as error:
                has_died = isinstance(error, psycopg.OperationalError) and connection.closed
                self.give(connection)
                if is_new or not has_died:
                    raise

    def take(self) -> tuple[PgConnection, bool]:
        """A connection, and whether it is a new one."""
        with self._lock:
            if self._kept:
                return self._kept.pop()[0], False
        return self._address.connect(), True

    def give(self, connection: PgConnection) -> None:
        """Keep the connection for the next call, or close it when it is not fit for that."""
        idle = connection.info.transaction_status == TransactionStatus.IDLE
        with self._lock:
            if idle and not connection.closed and len(self._kept) < _MAX_KEPT:
                self._kept.append((connection, time.monotonic()))
                self._watch()
                return
        connection.close()

    def close(self) -> None:
        self._close_unused_since(math.inf)

    def _watch(self) -> None:
        """Close what nobody uses, in time; called with the lock held."""
        if self._timer is None and self._kept:
            self._timer = threading.Timer(self._idle_s, self._close_idle)
            self._timer.daemon = True
            self._timer.start()

    def _close_idle(self) -> None:
        self._close_unused_since(time.monotonic() - self._idle_s)
        with self._lock:
            self._timer = None
            self._watch()

    def _close_unused_since(self, then: float) -> None:
        with self._lock:
            unused = [connection for connection, since in self._kept if since <= then]
            self._kept = [(c, since) for c, since in self._kept if since > then]
        for connection in unused:
            connection.close()


_pools: dict[tuple[int, Address], Pool] = {}
_pools_lock = threading.Lock()


def pool_of(address: Address) -> Pool:
    """The connections that this process keeps to that address.

    A forked process gets a pool of its own: a connection serves only the process that made it.
    """
    with _pools_lock:
        return _pools.setdefault((os.getpid(), address), Pool(address))


def _renew_lock() -> None:
    global _pools_lock  # noqa: PLW0603  # a fork may copy it while another thread holds it
    _pools_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
