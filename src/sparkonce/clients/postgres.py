"""Shared by the Postgres sink and the Postgres log: connection strings, and one transaction.

    PostgresLog                                    PostgresSink
    why_apart(Database) ◄─── asks the log ──────── why_two_phases: its own database
    shared_write(record) ──► Statement ──────────► commit_one_phase: runs it in its transaction

libpq ends an unescaped password at a `/` or a second `@`. It then takes the rest of the password
for the host, the port or the database, which errors and logs would show. So this module parses all
connection strings, and removes secrets from the texts of errors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict

from sparkonce.errors import ConfigurationError

_SECRETS: Final = ("password", "sslpassword")
# These detect, after a minute, that the other end vanished without closing the connection; the
# system's default is two hours.
_KEEPALIVES: Final = {"keepalives_idle": "30", "keepalives_interval": "10", "keepalives_count": "3"}
_USER_TIMEOUT: Final = {"tcp_user_timeout": "60000"}

KEPT_ALIVE: Final[Mapping[str, str]] = {"connect_timeout": "10", **_KEEPALIVES, **_USER_TIMEOUT}
"""Connection parameters that the user's connection string overrides."""

SERVER_KEEPS_ALIVE: Final[Mapping[str, str]] = {
    **{f"tcp_{name}": value for name, value in _KEEPALIVES.items()},
    **_USER_TIMEOUT,
}
"""The same, as settings of the server's end: a client that vanished would hold its locks for hours
in the middle of a COPY, which no other timeout of the server ends."""

_URLS: Final = ("postgresql://", "postgres://")


# -- one transaction of a sink and a log -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Database:
    """A sink's database; the log checks whether it is the log's own.

    Attributes:
        ask: runs a query as the sink's role and returns its rows.
    """

    ask: Callable[[str], list[tuple[Any, ...]]]


@dataclass(frozen=True, slots=True)
class Statement:
    """A write of the log, for a sink to run in its own transaction just before COMMIT.

    It fails, and the transaction with it, if another driver has written the pipeline's log since.
    """

    sql: str


# -- connection strings ----------------------------------------------------------------------------


def read_conninfo(conninfo: str, expected: str) -> dict[str, str]:
    """Parse a connection string into its parameters.

    Args:
        conninfo: a URL or a list of `key=value`.
        expected: start of the error text: the setting, and its expected form.

    Raises:
        ConfigurationError: libpq cannot read the string, or would read it differently than the user
            meant. The text quotes at most a key that libpq does not know.
    """
    refusal = ConfigurationError(
        f"{expected} (is a special character of the password not percent-encoded?)"
    )
    try:
        known = {key: str(value) for key, value in conninfo_to_dict(conninfo).items()}
    except psycopg.ProgrammingError as error:
        if key := _unknown_key(conninfo, str(error)):
            refusal = ConfigurationError(f"{expected}: libpq knows no parameter {key!r}")
        raise refusal from None  # libpq's message quotes what it could not read
    _, is_url, rest = conninfo.partition("://")
    if is_url:
        credentials, *more = rest.partition("?")[0].split("@")
        if len(more) > 1 or (more and "/" in credentials):
            raise refusal
    # One port for each host; an empty one is libpq's default.
    if not all(port.isdigit() for port in known.get("port", "").split(",") if port):
        raise refusal
    return known


def shown_port(known: Mapping[str, str]) -> str:
    """The port for messages; libpq leaves the default port empty, for each host."""
    port = known.get("port", "")
    return port if port.strip(",") else "5432"


def check_service(known: Mapping[str, str], setting: str) -> None:
    """Refuse a libpq service that is the only source of the host or the database.

    sparkonce does not read the service file, which may differ between machines. Without host and
    database, the target's name would hold libpq's defaults, and two services would share it.

    Raises:
        ConfigurationError: a service is set, but the connection string lacks host or database.
    """
    service = known.get("service") or os.environ.get("PGSERVICE")
    is_placed = (known.get("host") or known.get("hostaddr")) and known.get("dbname")
    if service and not is_placed:
        raise ConfigurationError(
            f"{setting} leaves host or database to the service {service!r} of libpq's service "
            "file, which may differ from machine to machine: also name host= and dbname=; the "
            "rest may stay in the file (or unset PGSERVICE)"
        )


def said(error: Exception, known: Mapping[str, object]) -> str:
    """The primary message of a Postgres error, without its details, which could show rows.

    It also leaves out the secrets among the connection's parameters, which libpq's text may quote.
    """
    text = error.diag.message_primary if isinstance(error, psycopg.Error) else None
    text = text or str(error).partition("\nDETAIL:")[0].strip() or type(error).__name__
    for secret in _SECRETS:
        if known.get(secret):
            text = text.replace(str(known[secret]), "***")
    return text


def _unknown_key(conninfo: str, text: str) -> str | None:
    """The key that libpq rejects; None if it may be part of a password."""
    found = re.fullmatch(r'invalid (?:connection option|URI query parameter:) "(\w+)"\s*', text)
    if found is None:
        return None
    is_url = conninfo.startswith(_URLS)
    given = conninfo.partition("?")[2] if is_url else conninfo
    before, key, _ = given.rpartition(found[1])
    if (is_url and "@" in given) or any(secret in before for secret in _SECRETS):
        return None
    return key or None
