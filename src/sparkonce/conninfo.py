"""How sinks and logs read libpq's connection strings, so that no password shows.

libpq takes a `/` or a second `@` in an unescaped password for the end of it, and finds the rest of
the password in the host, the port or the name of the database, which errors and logs show.
"""

from __future__ import annotations

import re
from typing import Final

import psycopg
from psycopg.conninfo import conninfo_to_dict

from sparkonce.errors import ConfigurationError

SECRETS: Final = ("password", "sslpassword")
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
    if (port := known.get("port")) and not port.replace(",", "").isdigit():
        raise refusal
    return known


def _unknown_key(conninfo: str, said: str) -> str | None:
    """The key that libpq rejects; None where it may be a piece of a password."""
    found = re.fullmatch(r'invalid (?:connection option|URI query parameter:) "(\w+)"\s*', said)
    if found is None:
        return None
    is_url = conninfo.startswith(_URLS)
    text = conninfo.partition("?")[2] if is_url else conninfo
    before, key, _ = text.rpartition(found[1])
    if (is_url and "@" in text) or any(secret in before for secret in SECRETS):
        return None
    return key or None
