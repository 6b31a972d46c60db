"""Connections to the server: how they are made, kept, and what is told of their errors."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Conninfo, TransactionStatus
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from sparkonce.errors import ConfigurationError

PgConnection: TypeAlias = "psycopg.Connection[tuple[Any, ...]]"

ResultT = TypeVar("ResultT")

PASSING = (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure)
"""Nobody's fault: the same statement may well succeed when it is sent again."""

_TRIES = 5
_APPLICATION = "sparkonce"
_MAX_KEPT = 4

_DEFAULTS: Final[Mapping[str, str]] = {
    "connect_timeout": "10",
    # A server that has gone without a word is noticed after a minute, not after two hours.
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",
}
"""Used where the user's conninfo does not say otherwise."""

_SECRETS = ("password", "sslpassword")


@dataclass(frozen=True)
class Address:
    """A checked conninfo; its `repr` has no secrets."""

    conninfo: str

    @classmethod
    def read(cls, conninfo: str) -> Address:
        try:
            conninfo_to_dict(conninfo)
        except psycopg.ProgrammingError:
            # libpq's message quotes what it could not read, which may be the password.
            raise ConfigurationError(
                "PostgresSink: conninfo= is neither a URL like postgresql://host:5432/database "
                "nor a list like 'host=… port=… dbname=…' (is a special character of the password "
                "not percent-encoded?)"
            ) from None
        return cls(conninfo)

    def __repr__(self) -> str:
        return f"<Address {self.shown}/{self.database}>"

    @property
    def shown(self) -> str:
        """Host and port."""
        known = self._parameters()
        host = known.get("host") or known.get("hostaddr") or "localhost"
        return f"{host}:{known.get('port') or '5432'}"

    @property
    def names_several(self) -> bool:
        """Whether it names more servers than one, as for a failover."""
        known = self._parameters()
        return "," in (known.get("host") or known.get("hostaddr") or "")

    @property
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

    def connect(self, application_name: str = _APPLICATION) -> PgConnection:
        """An autocommit connection; whoever wants a transaction says BEGIN."""
        given = conninfo_to_dict(self.conninfo)
        settings = {key: value for key, value in _DEFAULTS.items() if key not in given}
        return psycopg.connect(
            self.conninfo,
            autocommit=True,
            prepare_threshold=None,  # each statement has names of its own; and poolers forget them
            client_encoding="UTF8",
            application_name=application_name,
            **settings,  # type: ignore[arg-type]
        )

    def said(self, error: Exception) -> str:
        """What went wrong, in Postgres' first sentence: its details show rows."""
        text = error.diag.message_primary if isinstance(error, psycopg.Error) else None
        text = text or str(error).partition("\nDETAIL:")[0].strip() or type(error).__name__
        known = conninfo_to_dict(self.conninfo)
        for secret in _SECRETS:
            if known.get(secret):
                text = text.replace(str(known[secret]), "***")
        return text

    def cause(self, error: psycopg.Error) -> psycopg.Error:
        """The error as it may be chained, and so end in a log."""
        return type(error)(self.said(error))


def roll_back(connection: PgConnection) -> None:
    """End an open transaction; a connection that cannot do that is closed by the pool."""
    if connection.info.transaction_status != TransactionStatus.IDLE:
        with contextlib.suppress(psycopg.Error):
            connection.execute("ROLLBACK")


def retrying() -> Retrying:
    """Calls again what failed with one of `PASSING`, a few times."""
    return Retrying(
        retry=retry_if_exception_type(PASSING),
        wait=wait_random_exponential(multiplier=0.05, max=1.0),
        stop=stop_after_attempt(_TRIES),
        reraise=True,
    )


class Pool:
    """A few connections that are kept between calls. Safe to use from several threads."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._kept: list[PgConnection] = []
        self._room = threading.BoundedSemaphore(_MAX_KEPT)

    def run(self, action: Callable[[PgConnection], ResultT]) -> ResultT:
        """Run an idempotent action; again on a new connection when a kept one has died.

        Only a few run at a time, so that many branches do not take as many connections.
        """
        with self._room:
            return self._run(action)

    def _run(self, action: Callable[[PgConnection], ResultT]) -> ResultT:
        connection, is_new = self.take()
        try:
            return action(connection)
        except psycopg.OperationalError:
            if is_new or not connection.closed:
                raise
        finally:
            self.give(connection)
        connection = self._address.connect()
        try:
            return action(connection)
        finally:
            self.give(connection)

    def take(self) -> tuple[PgConnection, bool]:
        """A connection, and whether it is a new one."""
        with self._lock:
            if self._kept:
                return self._kept.pop(), False
        return self._address.connect(), True

    def give(self, connection: PgConnection) -> None:
        """Keep the connection for the next call, or close it when it is not fit for that."""
        idle = connection.info.transaction_status == TransactionStatus.IDLE
        with self._lock:
            if idle and not connection.closed and len(self._kept) < _MAX_KEPT:
                self._kept.append(connection)
                return
        connection.close()

    def close(self) -> None:
        with self._lock:
            kept, self._kept = self._kept, []
        for connection in kept:
            connection.close()
