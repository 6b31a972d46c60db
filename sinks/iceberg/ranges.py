"""Sets of numbers as short text, such as ``"1-3,7"``: attempts and batches mostly count up."""

from __future__ import annotations

from collections.abc import Iterable


def as_ranges(numbers: Iterable[int]) -> str:
    """Write numbers as ranges."""
    text = ""
    for number in sorted(set(numbers)):
        text = with_number(text, number)
    return text


def in_ranges(text: str, number: int) -> bool:
    """Whether a number is in the ranges."""
    return any(first <= number <= last for first, last in _runs(text))


def with_number(text: str, number: int) -> str:
    """The ranges with one more number."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted([*_runs(text), (number, number)]):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], last)
        else:
            merged.append((first, last))
    return ",".join(f"{first}-{last}" if first < last else str(first) for first, last in merged)


def highest(text: str) -> int:
    """The highest number in the ranges; -1 if they are empty."""
    return max((last for _, last in _runs(text)), default=-1)


def _runs(text: str) -> list[tuple[int, int]]:
    pairs = [run.partition("-") for run in text.split(",") if run]
    return [(int(first), int(last or first)) for first, _, last in pairs]
