"""Sets of numbers as short text, such as ``"1-3,7"``: attempts and batches mostly count up.

``"?9,12-20"`` is a set of which nothing is known up to 9.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

MOST_RUNS: Final = 200
"""What `with_number` keeps of a set with gaps, 10 to 20 bytes each."""

_FORGOTTEN: Final = "?"


def as_ranges(numbers: Iterable[int]) -> str:
    """Write numbers as ranges."""
    return _text(-1, _merged([(number, number) for number in numbers]))


def in_ranges(text: str, number: int) -> bool:
    """Whether a number is in the ranges."""
    return any(first <= number <= last for first, last in _runs(text))


def numbers_in(text: str) -> set[int]:
    """All numbers in the ranges."""
    return {number for first, last in _runs(text) for number in range(first, last + 1)}


def is_forgotten(text: str, number: int) -> bool:
    """Whether nothing is known about a number."""
    return number <= _forgotten(text)


def forgotten(number: int) -> str:
    """A set of which nothing is known up to a number."""
    return _text(number, [])


def with_number(text: str, number: int) -> str:
    """The ranges with one more number; the oldest are forgotten when there are too many."""
    merged = _merged([*_runs(text), (number, number)])
    old, kept = merged[:-MOST_RUNS], merged[-MOST_RUNS:]
    return _text(max([_forgotten(text), *(last for _, last in old)]), kept)


def _merged(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(runs):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], last)
        else:
            merged.append((first, last))
    return merged


def _text(forgotten: int, runs: Iterable[tuple[int, int]]) -> str:
    parts = [f"{first}-{last}" if first < last else str(first) for first, last in runs]
    return ",".join(([f"{_FORGOTTEN}{forgotten}"] if forgotten >= 0 else []) + parts)


def _forgotten(text: str) -> int:
    first = text.partition(",")[0]
    return int(first[1:]) if first.startswith(_FORGOTTEN) else -1


def _runs(text: str) -> list[tuple[int, int]]:
    known = [run for run in text.split(",") if run and not run.startswith(_FORGOTTEN)]
    pairs = [run.partition("-") for run in known]
    return [(int(first), int(last or first)) for first, _, last in pairs]
