"""How long a batch took, as far as the times of its record show it.

    (the batch before ended)      prepared        decided      complete
              └── waiting, writing ──┴── in doubt ───┴─ committing ─┘

The log records when a batch reached a state. It does not record when the batch began.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from sparkonce.txn_log.record import TransactionRecord

_MEANING: Final = {
    ("prepared", "decided"): "in doubt, until Spark's checkpoint showed that it commits",
    ("prepared", "abandoned"): "in doubt, until Spark's checkpoint showed that it ends",
    ("decided", "complete"): "committing in every sink",
    ("decided", "settled"): "committing, until an operator's ruling ended it",
}


class Span(NamedTuple):
    """One bar of a waterfall.

    Attributes:
        kind: the state that it ends with, or "before".
        text: what happened in it.
        seconds: how long it took.
        left: where it starts, in per cent of the whole.
        width: in per cent of the whole.
    """

    kind: str
    text: str
    seconds: float
    left: float
    width: float

    @property
    def took(self) -> str:
        return took(self.seconds)


def took(seconds: float) -> str:
    """A duration for people."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:  # noqa: PLR2004 - two minutes
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7_200 else f"{seconds / 3_600:.1f} h"  # noqa: PLR2004


def duration(record: TransactionRecord) -> float:
    """Seconds between the first and the last state of the record."""
    return max(record.times.values(), default=0.0) - min(record.times.values(), default=0.0)


def waterfall(
    record: TransactionRecord, before: TransactionRecord | None = None, whole: float | None = None
) -> Sequence[Span]:
    """The bars of a batch, from left to right.

    Args:
        record: of the batch.
        before: the record of the batch before it; its end is where the first bar starts.
        whole: seconds of the full width; default: those of the batch.
    """
    times = sorted(record.times.items(), key=lambda item: item[1])
    if not times:
        return []
    marks: list[tuple[str, float]] = [(state.value, at) for state, at in times]
    if before is not None and before.times and max(before.times.values()) < times[0][1]:
        marks.insert(0, ("", max(before.times.values())))
    start, end = marks[0][1], marks[-1][1]
    full = max(whole if whole is not None else end - start, 1e-6)
    spans = []
    for (first, at), (second, until) in pairwise(marks):
        text = _MEANING.get((first, second), f"{first} to {second}")
        if not first and before is not None:
            text = f"since batch {before.id.batch_id} ended: waiting for data, and writing"
        left, width = 100 * (at - start) / full, 100 * (until - at) / full
        kind = second if first else "before"
        spans.append(Span(kind, text, until - at, round(left, 2), round(width, 2)))
    return spans
