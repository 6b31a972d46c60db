"""The form of what the transaction log stores: versioned JSON with a checksum over its body.

    {"v": 2, "body": {"id": {...}, "state": "decided", ...}, "sha256": "…"}
    {"v": 2, "zlib": "eNrtfQlz3Ma17l…", "sha256": "…"}    where the body is long: many branches

A record that differs from what was written raises `LogCorruptError`; sparkonce never guesses what
it said.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Container, Mapping
from typing import Any, Final

from sparkonce.errors import LogCorruptError

FORMAT_VERSION = 2
"""The version that is written. Version 1, which lacks settlements, `Head.checkpoint` and moves, can
still be read."""

_READABLE = range(1, FORMAT_VERSION + 1)

_LONG: Final = 64 * 1024
"""Characters of JSON from which on a body is compressed: about 150 branches."""


def seal(body: Mapping[str, Any], version: int = FORMAT_VERSION) -> str:
    """Encode `body` with its version and checksum."""
    text = json.dumps(body)
    content = f'"body": {text}'
    if len(text) >= _LONG:
        content = f'"zlib": "{base64.b64encode(zlib.compress(text.encode(), 1)).decode()}"'
    return f'{{"v": {version}, {content}, "sha256": "{_checksum(body)}"}}'


def unseal(
    text: str,
    where: str,
    *,
    readable: Container[int] = _READABLE,
    fix: str = "restore the transaction log from a copy",
) -> dict[str, Any]:
    """Decode what `seal` wrote.

    Args:
        text: the whole of it.
        where: it was found, for messages.
        readable: the versions that can be read.
        fix: the next step if it is damaged.

    Raises:
        LogCorruptError: the text is incomplete or was changed, or its format is newer.
    """
    try:
        outer = json.loads(text)
        if (version := outer["v"]) not in readable:  # a newer format may have other fields
            raise LogCorruptError(
                f"{where} has format {version}, which this sparkonce cannot read: use a newer one"
            )
        if (packed := outer.get("zlib")) is not None:
            outer["body"] = json.loads(zlib.decompress(base64.b64decode(packed)))
        body, checksum = outer["body"], outer["sha256"]
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise LogCorruptError(f"{where} is not a whole record; {fix}") from error
    if checksum != _checksum(body):
        raise LogCorruptError(f"{where} was changed after it was written; {fix}")
    return dict(body)


def _checksum(body: Mapping[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
