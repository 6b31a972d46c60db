"""What `sparkonce doctor` reports about a server: a sink's, or the transaction log's."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    """It works now, and will cause trouble at a bad moment."""
    ERROR = "error"
    """It cannot work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was checked, and what to do about it.

    Attributes:
        level: how bad it is.
        what: what was found, without secrets.
        fix: the next step; empty where there is nothing to do.
    """

    level: Level
    what: str
    fix: str = ""
