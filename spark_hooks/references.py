"""Secrets by reference: a value names the place of a secret, and no text holds the secret itself.

    {"env": "ORDERS_DSN"}                the environment variable of the process that reads it
    {"file": "/run/secrets/orders_dsn"}  the file's text, without the end of its last line

Spark shows the options of a query in plans, in its log, in its UI and in the event log. So what is
known to be a secret is refused as plain text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, TypeAlias

from sparkonce.errors import ConfigurationError

Reveal: TypeAlias = Callable[[str, str, str], str]
"""Takes "env" or "file", the name in it, and where the reference is; returns the value."""

KINDS: Final = ("env", "file")

_SECRET_NAME: Final = re.compile(
    r"passw|secret|token|credential|jaas|user\.info|key\.pem$|private.?key|account.?key|sas.?key"
)
"""Names of settings that the sinks' clients know as secrets."""

_NO_SECRET_NAME: Final = re.compile(r"endpoint|(?:url|uri|location|file|source)$")
"""Names that match above, and hold an address, a path or a choice."""

_SECRET_TEXT: Final = re.compile(r"://[^@]*:[^@]*@|(?:^|[\s?&])(?:ssl)?password\s*=", re.IGNORECASE)
"""A password in a URL or in a list of libpq's parameters."""

_NO_SETTINGS: Final = frozenset({"select", "delete", "value_schema", "parquet"})
"""Parameters that hold SQL or names of columns, which may look like a setting."""

_LEAST: Final = 4
"""The length from which a value is masked; a shorter one would mask parts of words."""


def at(where: str, name: str) -> str:
    """Where a setting is, for messages."""
    return f"{where} {name}" if where.endswith(":") else f"{where}.{name}"


def is_reference(value: object) -> bool:
    """Whether the value names the place of another value."""
    return isinstance(value, dict) and len(value) == 1 and next(iter(value)) in KINDS


def reveal(kind: str, name: str, where: str) -> str:
    """The value that a reference names.

    Raises:
        ConfigurationError: there is no such variable, or the file cannot be read.
    """
    if kind == "env":
        if name not in os.environ:
            raise ConfigurationError(
                f"{where}: the environment variable {name} is not set: set it where Spark's driver "
                "starts, and for the command sparkonce where that runs"
            )
        return os.environ[name]
    try:
        return Path(name).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no text in UTF-8"
        raise ConfigurationError(
            f"{where}: the file {name} cannot be read ({reason}): Spark's driver reads it, and so "
            "does the command sparkonce"
        ) from None


def masked(text: str, secrets: Iterable[str]) -> str:
    """The text without these values, in any case: some settings are read in upper case."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _LEAST:
            text = re.sub(re.escape(secret), "***", text, flags=re.IGNORECASE)
    return text


def refuse_plain_secrets(value: Any, where: str, name: str = "") -> None:
    """Refuse a secret that is written out.

    Args:
        value: from JSON.
        where: for the message, which does not show the value.
        name: of the setting that holds the value.

    Raises:
        ConfigurationError: there is one.
    """
    if is_reference(value) or name in _NO_SETTINGS:
        return
    if isinstance(value, dict):
        for key, inner in value.items():
            refuse_plain_secrets(inner, at(where, key), key)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            refuse_plain_secrets(inner, f"{where}[{number}]", name)
    elif isinstance(value, str) and _is_secret(name.lower(), value):
        raise ConfigurationError(
            f'{where} is a secret as plain text: write {{"env": "NAME"}} or {{"file": "/PATH"}} in '
            "its place, with the secret in that variable or file. If it was an option, change the "
            "secret: Spark shows options in plans and logs"
        )


def _is_secret(name: str, value: str) -> bool:
    is_named = _SECRET_NAME.search(name) and not _NO_SECRET_NAME.search(name)
    return bool(value) and bool(is_named or _SECRET_TEXT.search(value))
