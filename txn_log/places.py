"""Compares locations of checkpoints: do two of them name one place?

    file:/a    file:///a/    /a    a link to /a       one place on this machine
    hdfs://NameNode:8020/a   hdfs://namenode:8020//a  one place
    s3a://bucket/a           s3://bucket/./a/         one place

Spark, Hadoop and people write a location in different ways. Links on this machine are followed.
"""

from __future__ import annotations

import os
import posixpath
import re
from typing import Final

from sparkonce.storage.local import expanded

_IN_CHECKPOINT: Final = "checkpoint:"
_LOCATION: Final = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*):(?://(?P<host>[^/]*))?(?P<path>/.*)?", re.DOTALL
)
_S3: Final = frozenset({"s3a", "s3n"})


def place_of_log(address: str) -> str | None:
    """The folder around a log whose address is ``checkpoint:FOLDER``; None for any other log."""
    return address.removeprefix(_IN_CHECKPOINT) if address.startswith(_IN_CHECKPOINT) else None


def how_to_follow(address: str) -> str:
    """What a user changes whose pipeline was moved to the log at this address."""
    place = place_of_log(address)
    if place is None:
        return "pass that log as log=, a Postgres one with its user"
    return f"start the query with the checkpoint {place}, and leave log= as it is"


def is_same_place(one: str, other: str) -> bool:
    """Whether both locations are known and name one folder."""
    return bool(one) and bool(other) and _normal(one) == _normal(other)


def _normal(location: str) -> tuple[str, str, str]:
    found = _LOCATION.fullmatch(location)
    if found is None:
        return "file", "", os.path.realpath(expanded(location))
    scheme, host, path = found["scheme"].lower(), found["host"] or "", found["path"] or "/"
    if scheme == "file":
        return "file", "", os.path.realpath(path)
    path = posixpath.normpath(re.sub("/+", "/", path)).rstrip("/")
    return "s3" if scheme in _S3 else scheme, host.lower(), path
