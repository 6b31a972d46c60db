"""How sinks and logs read libpq's connection strings, so that no password shows.

libpq takes a `/` or a second `@` in an unescaped password for the end of it, and finds the rest of
the password in the host, the port or the name of the database, which errors and logs show.
"""

from __future__ import annotations

from typing import Final

import psycopg
from psycopg.conninfo import conninfo_to_dict

from sparkonce.errors import ConfigurationError

SECRETS: Final = ("password", "sslpassword")


def read_conninfo(conninfo: str, expected: str) -> dict[str, str]:
    """The parameters that a connection string names.

    Args:
        conninfo: a URL or a list of `key=value`.
        expected: the begin of the error: which setting it is, and what it should look like.

    Raises:
        ConfigurationError: libpq cannot read it, or reads something else than was meant; the text
            repeats nothing of it.
    """
    refusal = ConfigurationError(
        f"{expected} (is a special character of the password not percent-encoded?)"
    )
    try:
        known = {key: str(value) for key, value in conninfo_to_dict(conninfo).items()}
    except psycopg.ProgrammingError:
        raise refusal from None  # libpq's message quotes what it could not read
    _, is_url, rest = conninfo.partition("://")
    if is_url:
        credentials, *more = rest.partition("?")[0].split("@")
        if len(more) > 1 or (more and "/" in credentials):
            raise refusal
    if (port := known.get("port")) and not port.replace(",", "").isdigit():
        raise refusal
    return known
