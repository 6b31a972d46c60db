"""The properties that prove how batches ended."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sparkonce.sinks.iceberg.properties import end_of, proof
from sparkonce.sinks.lakehouse import proofs
from sparkonce.sinks.lakehouse.ranges import (
    MOST_RUNS,
    as_ranges,
    in_ranges,
    is_forgotten,
    with_number,
)
from tests.iceberg.conftest import branch

if TYPE_CHECKING:
    import pytest


def table() -> Any:
    return SimpleNamespace(properties={})


def test_ranges_hold_what_was_added() -> None:
    choice = random.Random(11)  # noqa: S311
    for _ in range(200):
        numbers = {choice.randrange(40) for _ in range(choice.randrange(30))}
        text = as_ranges(numbers)
        assert {n for n in range(41) if in_ranges(text, n)} == numbers
        added = choice.randrange(40)
        assert with_number(text, added) == as_ranges({*numbers, added})


def test_ranges_are_short() -> None:
    assert as_ranges(range(100_000)) == "0-99999"
    assert as_ranges([1, 2, 3, 7]) == "1-3,7"
    assert as_ranges([]) == ""


def test_oldest_of_many_gaps_are_forgotten() -> None:
    """As where every second batch has no rows."""
    text = ""
    for number in range(0, 20_000, 2):
        text = with_number(text, number)
    assert len(text) < 20 * MOST_RUNS
    newest = range(20_000 - 2 * MOST_RUNS, 20_000)
    assert [n for n in newest if in_ranges(text, n)] == list(newest)[::2]
    assert not any(is_forgotten(text, n) for n in newest)
    assert all(is_forgotten(text, n) for n in range(20_000 - 2 * MOST_RUNS - 1))
    assert not any(in_ranges(text, n) for n in range(20_000 - 2 * MOST_RUNS))


def test_batches_before_many_gaps_are_forgotten() -> None:
    made = table()
    for n in range(0, 4 * MOST_RUNS, 2):
        made.properties |= proof(made, branch(n), "committed")
    ends = [end_of(made, branch(n)) for n in (0, 1, 4 * MOST_RUNS - 2, 4 * MOST_RUNS - 3)]
    assert ends == ["unknown", "unknown", "committed", None]


def test_crash_loop_forgets_no_driver_to_come() -> None:
    """Hundreds of drivers prepare and abort one batch; the next one's is neither known nor lost."""
    made = table()
    for token in range(proofs.KEPT + 20):
        made.properties |= proof(made, branch(42, token=token), "aborted")
    assert end_of(made, branch(42, token=proofs.KEPT + 20)) is None
    assert end_of(made, branch(42, token=proofs.KEPT + 19)) == "aborted"
    assert end_of(made, branch(42, token=3)) == "unknown"


def test_ends_of_batches() -> None:
    made = table()
    assert end_of(made, branch(1)) is None
    made.properties |= proof(made, branch(1), "committed")
    made.properties |= proof(made, branch(2), "committed")
    made.properties |= proof(made, branch(3, token=4), "aborted")
    assert [end_of(made, branch(n)) for n in (1, 2, 3)] == ["committed", "committed", None]
    assert [end_of(made, branch(n, token=4)) for n in (1, 3)] == [None, "aborted"]
    assert list(made.properties.values()) == ['{"t3.p0":"1-2"}', '{"t4.p0":"3"}']


def test_a_hundred_thousand_batches_cost_no_more_than_one() -> None:
    made = table()
    for n in range(0, 100_000, 1000):
        made.properties |= proof(made, branch(n), "committed")
    for n in range(3000):
        made.properties |= proof(made, branch(n), "committed")
    assert end_of(made, branch(2500)) == "committed"
    assert sum(map(len, made.properties.values())) < 1000


def test_oldest_drivers_are_forgotten_not_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody knows any more is neither committed nor lost."""
    monkeypatch.setattr(proofs, "KEPT", 5)
    made = table()
    for token in range(12):
        for batch in (2 * token, 2 * token + 1):
            made.properties |= proof(made, branch(batch, token=token), "committed")
    ends = [end_of(made, branch(2 * token, token=token)) for token in range(12)]
    assert ends == ["unknown"] * 8 + ["committed"] * 4
    assert end_of(made, branch(24, token=12)) is None
