"""Connections to the server: opens and keeps them, and shows their errors without secrets.

A process has one pool for each address: ``once(Pool, address)``. All its sinks share the pool; in a
Python worker, which runs one task after another, the tasks share it too.
"""

from __future__ import annotations

import contextlib
import math
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
from tenacity import (
    Retrying,
    retry_if_exception,
    retry_if_exception_type,
    stop_after_attempt,
    stop_after_delay,
    wait_random_exponential,
)

from sparkonce.clients.postgres import (
    KEPT_ALIVE,
    check_service,
    read_conninfo,
    said,
    shown_port,
)
from sparkonce.sinks.postgres.server.advice import is_full
from sparkonce.sinks.postgres.server.sql import AS_LOGIN, BEGIN, COMMIT, script
from sparkonce.watching import still_trying

PgConnection: TypeAlias = "psycopg.Connection[tuple[Any, ...]]"

ResultT = TypeVar("ResultT")

PASSING = (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure)
"""Errors after which the same statement may succeed when it is sent again."""

_TRIES = 5
_APPLICATION = "sparkonce"
_MAX_KEPT = 4
_IDLE_S = 60.0
"""Spark keeps an idle Python worker equally long."""
_WAIT_FOR_ROOM_S = 120.0
"""Longer than other workers keep connections that they do not use."""


@dataclass(frozen=True)
class Address:
    """A checked connection string; its `repr` has no secrets."""

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
        """Whether it names several servers, for a failover."""
        known = self._parameters()
        return "," in (known.get("host") or known.get("hostaddr") or "")

    @cached_property
    def database(self) -> str:
        known = self._parameters()
        return known.get("dbname") or known.get("user") or ""

    def _parameters(self) -> dict[str, str]:
        """Parameters of the connection string, over the defaults of libpq and the environment."""
        defaults = {
            option.keyword.decode(): option.val.decode()
            for option in Conninfo.get_defaults()
            if option.val is not None
        }
        given = {key: str(value) for key, value in conninfo_to_dict(self.conninfo).items()}
        return {**defaults, **given}

    def connect(self) -> PgConnection:
        """Open a connection in autocommit mode; a transaction needs BEGIN."""
        given = conninfo_to_dict(self.conninfo)
        settings = {key: value for key, value in KEPT_ALIVE.items() if key not in given}
        return psycopg.connect(
            self.conninfo,
            autocommit=True,
            prepare_threshold=None,  # every statement has its own names, and poolers forget them
            client_encoding="UTF8",
            application_name=_APPLICATION,
            **settings,  # type: ignore[arg-type]
        )

    def said(self, error: Exception) -> str:
        """The error's text without secrets: see `sparkonce.clients.postgres.said`."""
        return said(error, conninfo_to_dict(self.conninfo))

    def cause(self, error: psycopg.Error) -> psycopg.Error:
        """A copy of the error without secrets and details, to chain: a log may show it."""
        return type(error)(self.said(error))


def roll_back(connection: PgConnection) -> None:
    """End an open transaction; the pool closes a connection that cannot do that."""
    if connection.info.transaction_status != TransactionStatus.IDLE:
        with contextlib.suppress(psycopg.Error):
            connection.execute("ROLLBACK")


def ask_as_login(connection: PgConnection, query: sql.Composed) -> list[tuple[Any, ...]]:
    """Run the query as the role that logged in, whatever role the session has switched to."""
    try:
        cursor = connection.execute(script(BEGIN, AS_LOGIN, query, COMMIT))
        while cursor.description is None:
            cursor.nextset()
        return cursor.fetchall()
    finally:
        roll_back(connection)


@contextlib.contextmanager
def warnings_of(connection: PgConnection) -> Iterator[list[str]]:
    """Collect the server's warnings: an interrupted wait for a standby raises no error.

    Other notices are left out: a role's settings may send each logged statement as a notice.
    """
    warnings: list[str] = []

    def note(notice: psycopg.errors.Diagnostic) -> None:
        if notice.severity_nonlocalized == "WARNING":
            warnings.append(notice.message_primary or "")

    connection.add_notice_handler(note)
    try:
        yield warnings
    finally:
        connection.remove_notice_handler(note)


@contextlib.contextmanager
def limited(connection: PgConnection, limit_s: float) -> Iterator[threading.Event]:
    """Cancel the running statement after `limit_s` seconds; the event is set if that happened.

    `statement_timeout` does not end a COMMIT that waits for a standby.
    """
    cut = threading.Event()

    def cancel() -> None:
        cut.set()
        with contextlib.suppress(psycopg.Error):  # it may have ended, or the server may not respond
            connection.cancel_safe()

    timer = threading.Timer(limit_s, cancel)
    timer.daemon = True
    timer.start()
    try:
        yield cut
    finally:
        timer.cancel()
        timer.join()  # it must not cancel the next statement


def retrying() -> Retrying:
    """Retry a few times after one of `PASSING`."""
    return Retrying(
        retry=retry_if_exception_type(PASSING),
        wait=wait_random_exponential(multiplier=0.05, max=1.0),
        stop=stop_after_attempt(_TRIES),
        reraise=True,
    )


class Pool:
    """A few connections, kept between calls and closed when idle. Thread-safe."""

    def __init__(self, address: Address, idle_s: float = _IDLE_S) -> None:
        self._address = address
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._kept: list[tuple[PgConnection, float]] = []
        self._timer: threading.Timer | None = None
        self._room = threading.BoundedSemaphore(_MAX_KEPT)

    def run(self, action: Callable[[PgConnection], ResultT]) -> ResultT:
        """Run an idempotent action; retry it on a new connection if a kept one has died.

        Only a few actions run at a time, so that many branches need few connections.
        """
        with self._room:
            connection, result = self.lend(action)
            self.give(connection)
            return result

    def lend(self, action: Callable[[PgConnection], ResultT]) -> tuple[PgConnection, ResultT]:
        """Like `run`, but the caller also gets the connection and gives it back later."""
        while True:
            connection, is_new = self.take()
            try:
                return connection, action(connection)
            except BaseException as error:
                has_died = isinstance(error, psycopg.OperationalError) and connection.closed
                self.give(connection)
                if is_new or not has_died:
                    raise

    def lend_in_time(
        self, action: Callable[[PgConnection], ResultT]
    ) -> tuple[PgConnection, ResultT]:
        """Like `lend`; while the server has no room for another connection, wait for one.

        Without a wait, each refusal would cost one of the few attempts that Spark gives a task.
        """
        return Retrying(
            retry=retry_if_exception(is_full),
            wait=wait_random_exponential(multiplier=0.1, max=3.0),
            stop=stop_after_delay(_WAIT_FOR_ROOM_S),
            before_sleep=still_trying(
                f"connect to {self._address.shown}, for at most {_WAIT_FOR_ROOM_S:.0f} s: it has "
                "no room for another connection"
            ),
            reraise=True,
        )(self.lend, action)

    def take(self) -> tuple[PgConnection, bool]:
        """A connection, and whether it is new."""
        with self._lock:
            if self._kept:
                return self._kept.pop()[0], False
        return self._address.connect(), True

    def give(self, connection: PgConnection) -> None:
        """Keep the connection for the next call, or close it if it is in a transaction."""
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
        """Start the timer that closes unused connections; the caller holds the lock."""
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
