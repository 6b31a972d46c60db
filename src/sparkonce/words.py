"""Numbers with their nouns, and times, for logs and messages."""

from __future__ import annotations

import time
from calendar import timegm

_ONE_CLOCK_S = 60
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"))


def counted(number: int, noun: str) -> str:
    """`1 row`, `2 rows`, `1 left-over branch`, `0 batches`, `12,000 rows`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith('ch') else 's'}"


def age(at: str | None) -> str:
    """How long ago, from ISO 8601; "never" when there is no such time."""
    if at is None:
        return "never"
    passed_s = _passed_s(at)
    if passed_s < -_ONE_CLOCK_S:
        return f"{-passed_s / 60:.0f} min ahead of this machine's clock: the two differ"
    return f"{_span(max(passed_s, 0))} ago"


def until(at: str) -> str:
    """A time, and how far it is from now."""
    passed_s = _passed_s(at)
    distance = f"passed {_span(passed_s)} ago" if passed_s > 0 else f"in {_span(-passed_s)}"
    return f"{when(at)}, {distance}"


def has_passed(at: str | None) -> bool:
    """Whether there is such a time, and it is over."""
    return at is not None and _passed_s(at) > 0


def when(at: str) -> str:
    """The time without its letters."""
    return at.replace("T", " ").replace("Z", " UTC")


def _passed_s(at: str) -> float:
    return time.time() - timegm(time.strptime(at, "%Y-%m-%dT%H:%M:%SZ"))


def _span(span_s: float) -> str:
    for seconds, unit in _UNITS:
        if span_s >= 2 * seconds:
            return f"{span_s / seconds:.0f} {unit}"
    return f"{span_s:.0f} s"
