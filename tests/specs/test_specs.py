"""The protocol's model: what it reaches, that each guard is needed, and that the code fits it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from specs.__main__ import check_model, check_without
from specs.checker import check
from specs.models import MODELS, PROBES, REVERTS
from specs.traces import Event, Impossible, replay

from tests.simulation.replaying import replay_seeds

SEEDS = 120
SLOW_SEEDS = 3_000
QUICK = (
    "a write checks the token",
    "a late start is refused",
    "decide waits for Spark",
    "every sink is prepared",
    "only the decided is committed",
    "the first record holds",
    "one undecided batch",
    "nothing is aborted after the decision",
    "a rewind checks what it saw",
)
"""Guards whose removal shows within a few thousand states."""

IN_A_SLICE = (
    "a batch is decided, and one of two sinks is committed",
    "a driver that was replaced is about to commit",
    "two drivers commit one batch",
)


def test_one_batch_under_two_drivers() -> None:
    """Every state of one batch keeps I1 to I8, and the interesting ones are reached."""
    probes = {name: PROBES["immediate"][name] for name in IN_A_SLICE}
    result = check(replace(MODELS["immediate"], batches=1), probes)
    print(result)
    assert (result.problem, result.path) == (None, [])
    assert sorted(result.reached) == sorted(IN_A_SLICE)
    assert result.states > 10_000


@pytest.mark.parametrize("guard", QUICK)
def test_guard_is_needed(guard: str) -> None:
    """Without the guard, the property that it holds fails."""
    result = check_without(guard)
    assert result.problem is not None, str(result)
    assert result.problem.startswith(REVERTS[guard].breaks)
    assert result.path


def test_runs_of_the_simulation_are_runs_of_the_model() -> None:
    """What the real protocol did in each seed is possible in the model, step by step."""
    replayed = replay_seeds(0, SEEDS)
    assert replayed.failures == []
    assert replayed.seeds > SEEDS // 4
    assert {"abandoned", "lost", "abort", "prepared"} <= replayed.kinds.keys()


def test_run_that_breaks_the_protocol_is_not_one_of_the_model() -> None:
    """A branch that becomes visible before its decision is noticed at that event."""
    events = [
        Event(0, "plan", {"waits": False}),
        Event(0, "look", {}),
        Event(0, "begin", {}),
        Event(0, "unfinished", {}),
        Event(0, "find", {}),
        Event(0, "prepare", {"batch": 0, "sink": "plain", "part": 0, "name": "a"}),
    ]
    decided = Event(0, "record", {"batch": 0, "state": "decided", "names": ["a"]})
    shown = Event(0, "show", {"name": "a"})
    replay([*events, decided, shown], first_batch=0, batches=1)
    with pytest.raises(Impossible, match="event 6: .*show"):
        replay([*events, shown, decided], first_batch=0, batches=1)


def _started(driver: int) -> list[Event]:
    return [Event(driver, "plan", {"waits": False}), Event(driver, "look", {})]


def test_a_start_is_late_only_if_another_run_has_begun() -> None:
    """A run that begins once more, or whose first try lands late, is no other run."""
    begin = [Event(driver, "begin", {}) for driver in range(3)]
    again = [Event(0, "unfinished", {}), begin[0]]
    first = [*_started(0), begin[0], *_started(1)]
    replay([*first, *again, begin[1]], first_batch=0, batches=1)
    replay([*first, Event(0, "look", {}), begin[0], begin[1]], first_batch=0, batches=1)
    third = [*_started(2), begin[2]]
    for late in (begin[0], begin[1]):
        with pytest.raises(Impossible, match="begin"):
            replay([*first, *third, late], first_batch=0, batches=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_state_of_the_model(name: str) -> None:
    """Two drivers, two sinks, three batches, and each kind of fault."""
    result, missing = check_model(name)
    print(result)
    assert (result.problem, result.path, missing) == (None, [], [])


@pytest.mark.slow
@pytest.mark.parametrize("guard", sorted(set(REVERTS) - set(QUICK)))
def test_every_guard_is_needed(guard: str) -> None:
    result = check_without(guard)
    assert result.problem is not None, str(result)
    assert result.problem.startswith(REVERTS[guard].breaks)


@pytest.mark.slow
def test_many_runs_of_the_simulation_are_runs_of_the_model() -> None:
    replayed = replay_seeds(SEEDS, SLOW_SEEDS)
    assert replayed.failures == []
