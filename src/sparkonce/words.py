"""Numbers with their nouns, for logs and messages."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 row`, `2 rows`, `1 left-over branch`, `0 batches`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"
