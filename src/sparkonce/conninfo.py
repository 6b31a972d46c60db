"""How sinks and logs read libpq's connection strings, so that no password shows.

libpq takes a `/` or a second `@` in an unescaped password for the end of it, and finds the rest of
the password in the host, the port or the name of the database, which errors and logs show.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final

import psycopg
from psycopg.conninfo import conninfo_to_dict

from sparkonce.errors import ConfigurationError

_SECRETS: Final = ("password", "sslpassword")
KEPT_ALIVE: Final[Mapping[str, str]] = {
    "connect_timeout": "10",
    # A server that has gone without a word is noticed after a minute, not after two hours.
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",
}
"""Used where the user's connection string does not say otherwise."""

_URLS: Final = ("postgresql://", "postgres://")


def read_conninfo(conninfo: str, expected: str) -> dict[str, str]:
    """The parameters that a connection string names.

    Args:
        conninfo: a URL or a list of `key=value`.
        expected: the begin of the error: which setting it is, and what it should look like.

    Raises:
        ConfigurationError: libpq cannot read it, or reads something else than was meant; the text
            repeats nothing of it but the key that libpq does not know.
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
    # One for each host, which is empty for libpq's default.
    if not all(port.isdigit() for port in known.get("port", "").split(",") if port):
        raise refusal
    return known


def shown_port(known: Mapping[str, str]) -> str:
    """The port for messages; libpq leaves one empty, of each host, that is the default."""
    port = known.get("port", "")
    return port if port.strip(",") else "5432"


def check_service(known: Mapping[str, str], setting: str) -> None:
    """Refuse a service of libpq's that alone knows where the database is.

    Its file is not read here, and may be another one on each machine: the place would be called by
    libpq's defaults, which two services share.

    Args:
        known: what `read_conninfo` returned.
        setting: which it is, for the error.

    Raises:
        ConfigurationError: host or database are not named beside it.
    """
    service = known.get("service") or os.environ.get("PGSERVICE")
    is_placed = (known.get("host") or known.get("hostaddr")) and known.get("dbname")
    if service and not is_placed:
        raise ConfigurationError(
            f"{setting} leaves host or database to the service {service!r} of libpq's service "
            "file, which may differ from machine to machine: name host= and dbname= beside it; the "
            "rest may stay in the file (or unset PGSERVICE)"
        )


def said(error: Exception, known: Mapping[str, object]) -> str:
    """What went wrong, in Postgres' first sentence: its details show rows.

    Args:
        error: of psycopg.
        known: the connection's parameters, whose secrets may be part of libpq's words.
    """
    text = error.diag.message_primary if isinstance(error, psycopg.Error) else None
    text = text or str(error).partition("\nDETAIL:")[0].strip() or type(error).__name__
    for secret in _SECRETS:
        if known.get(secret):
            text = text.replace(str(known[secret]), "***")
    return text


def _unknown_key(conninfo: str, said: str) -> str | None:
    """The key that libpq rejects; None where it may be a piece of a password."""
    found = re.fullmatch(r'invalid (?:connection option|URI query parameter:) "(\w+)"\s*', said)
    if found is None:
        return None
    is_url = conninfo.startswith(_URLS)
    text = conninfo.partition("?")[2] if is_url else conninfo
    before, key, _ = text.rpartition(found[1])
    if (is_url and "@" in text) or any(secret in before for secret in _SECRETS):
        return None
    return key or None
