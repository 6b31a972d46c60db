"""The messages for a table that does not exist."""

from __future__ import annotations

from sparkonce.errors import ConfigurationError
from sparkonce.finding import Finding, Level

_FIX = 'create it, or set create="if_missing"'


def refusal(where: str) -> ConfigurationError:
    """The error of a start that may not create it."""
    return ConfigurationError(f"{where} does not exist: {_FIX}")


def finding(where: str, *, creates: bool) -> Finding:
    """What `sparkonce doctor` says."""
    level, fix = (Level.OK, "the start creates it") if creates else (Level.ERROR, _FIX)
    return Finding(level, f"{where} does not exist", fix)
