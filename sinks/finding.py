"""What `sparkonce doctor` reports about a server."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    """It works now, and will fail in some situation."""
    ERROR = "error"
    """It cannot work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at, and what to do about it.

    Attributes:
        level: how bad it is.
        what: what was found, without secrets.
        fix: the next step; empty where there is nothing to do.
    """

    level: Level
    what: str
    fix: str = ""
