"""Which errors of a catalog or a store mean that it does not respond now.

The libraries of both formats have an error type of their own for each kind of catalog and store, or
one type for everything. So the words of the error decide, with its type.
"""

from __future__ import annotations

import re

_OUTAGE = re.compile(
    r"connection (refused|reset|aborted|timed out)|timed out|timeout|error sending request"
    r"|network_connection|service_?unavailable|slow_?down|too_?many_?requests|servererror"
    r"|starting up|(http|status|error|code)\D{0,20}(429|50[0234])\b",
    re.IGNORECASE,
)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def is_outage(error: Exception) -> bool:
    """Whether the same call may succeed a little later."""
    return _OUTAGE.search(f"{type(error).__name__}: {error}") is not None


def in_one_line(error: Exception) -> str:
    """The error's type and text; Delta's library draws a tree, in colours."""
    return " ".join(_COLOURS.sub("", f"{type(error).__name__}: {error}").split())
