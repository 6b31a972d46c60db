"""One driver after the other is killed, each at the next point of the protocol.

A chain is a table of steps. Each step is met by the next batch, or, where it says `again`, by the
recovery from the step before. What must be visible when the driver stands there:

    NONE    nothing of the batch, in any sink
    ALL     the whole batch, in every sink
    HELD    nothing in the sink of the step; the others may be ahead
    AHEAD   something in the sink of the step, nothing in the others, which are held back
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from integration_tests.crash.scenario import POLICIES, Scenario, shown
from integration_tests.crash.targets import file_target, real_targets
from sparkonce.failpoints import POINTS
from sparkonce.spark_hooks.coordinator import CommitPolicy
from sparkonce.testing.crash import Arm
from sparkonce.testing.services import Services

NONE, ALL, HELD, AHEAD = "none", "all", "held", "ahead"

AFTER_A_LOSS = {"redo.before", "amend.before", "amend.after"}
OF_EACH_POLICY = {
    "prepared": POINTS.keys()
    - AFTER_A_LOSS
    - {"prepared.before", "prepared.after", "abandon.before", "abandon.after"},
    "checkpoint": POINTS.keys() - AFTER_A_LOSS,
}
WITHOUT_BATCH = {"begin.before", "begin.after", "recover.before_sweep"}


@dataclass(frozen=True)
class Step:
    """A point at which a driver is killed.

    Attributes:
        point: its name.
        seen: what must be visible then, see the module.
        sink: at which sink, where the point is one of each sink.
        again: in the recovery from the step before, with the same batch.
        aborts: the attempt that is killed may never become visible.
        is_beside_planning: Spark plans the next batch meanwhile, in a thread of its own.
    """

    point: str
    seen: str
    sink: str | None = None
    again: bool = False
    aborts: bool = False
    is_beside_planning: bool = False


Sinks = Callable[[], Iterable[str]]
"""The sinks at which a point of each sink is met: the next in turn, or every one."""


def before_the_decision(sinks: Sinks) -> Iterator[Step]:
    for point in ("write.first", "write.batch"):
        yield Step(point, NONE, aborts=True)
    for point in (
        "precommit.before",
        "precommit.after",
        "prepare_batch.before",
        "prepare_batch.after",
    ):
        for sink in sinks():
            yield Step(point, NONE, sink, aborts=True)


def commits(sinks: Sinks) -> Iterator[Step]:
    for point, seen in (("commit.before", HELD), ("commit.after", AHEAD)):
        for sink in sinks():
            yield Step(point, seen, sink)
    for point in ("complete.before", "complete.after"):
        yield Step(point, ALL)


def beside_planning(step: Step) -> Step:
    """A step of a batch that Spark has committed already."""
    return replace(step, is_beside_planning=True)


def chain_of(policy: CommitPolicy, sinks: Sinks, *, is_deep: bool = True) -> list[Step]:
    """Every point that the policy reaches; where deep, also the commits in a recovery."""
    begun_again = [Step(point, NONE, again=True) for point in ("begin.before", "begin.after")]
    committed_again = [
        Step("commit.before", HELD, next(iter(sinks())), again=True),
        Step("complete.before", ALL, again=True),
        Step("complete.after", ALL, again=True),
    ]
    decided_again = [
        Step("recover.before_finish", NONE, again=True),
        *(committed_again if is_deep else ()),
        Step("recover.before_sweep", ALL, again=True),
    ]
    if policy == "prepared":
        return [
            *before_the_decision(sinks),
            Step("decide.before", NONE, aborts=True),
            Step("decide.after", NONE),
            *begun_again,
            *decided_again,
            *commits(sinks),
            Step("return.before", ALL),
        ]
    return [
        *before_the_decision(sinks),
        Step("prepared.before", NONE, aborts=True),
        Step("prepared.after", NONE, aborts=True),
        *begun_again,
        Step("abandon.before", NONE, again=True),
        Step("abandon.after", NONE, again=True),
        Step("recover.before_sweep", NONE, again=True),
        Step("return.before", NONE, aborts=True),
        beside_planning(Step("decide.before", NONE)),
        *begun_again,
        Step("decide.before", NONE, again=True),
        Step("decide.after", NONE, again=True),
        *decided_again,
        beside_planning(Step("decide.after", NONE)),
        *map(beside_planning, commits(sinks)),
    ]


def kill_at_every_step(scenario: Scenario, steps: Sequence[Step]) -> None:
    """One batch after the other meets its step; then check everything."""
    batch, driver = -1, scenario.driver
    for step in steps:
        batch += not step.again
        driver.start(*arms_of(scenario, step, batch))
        seen, pid = scenario.visible_of(batch), driver.pid
        if step.is_beside_planning:
            scenario.wait_until_planned(batch + 1)
        driver.kill()
        place = f"{step.point}{' again' * step.again}"
        scenario.note(scenario.commit, batch, place, step.sink or "", shown(seen))
        check_seen(step, seen)
        if step.aborts:
            scenario.aborted.add((batch, pid))
    assert batch + 1 < scenario.batches, "the last batch shows that the pipeline goes on"
    scenario.finish()
    scenario.print_table("policy", "batch", "killed at", "sink", "visible then")


def arms_of(scenario: Scenario, step: Step, batch: int) -> list[Arm]:
    driver = scenario.driver
    if step.point in WITHOUT_BATCH:
        return [driver.arm(step.point)]
    arms = [driver.arm(step.point, batch=batch, sink=step.sink)]
    if step.seen == AHEAD:  # the others must not go on meanwhile
        others = [target.name for target in scenario.targets if target.name != step.sink]
        arms += [driver.arm("commit.before", batch=batch, sink=other) for other in others]
    return arms


def check_seen(step: Step, seen: dict[str, str]) -> None:
    if step.seen in {NONE, ALL}:
        assert set(seen.values()) == {step.seen}, f"{step}: {seen}"
        return
    others = {what for name, what in seen.items() if name != step.sink}
    if step.seen == AHEAD:
        assert seen[str(step.sink)] != "none", f"{step}: {seen}"
        assert others == {"none"}, f"{step}: {seen}"
    else:
        assert seen[str(step.sink)] == "none", f"{step}: {seen}"


def in_turn(names: Sequence[str]) -> Sinks:
    """Each call gives the next sink alone, so that a chain meets each of them somewhere."""
    calls = iter(range(1000))
    return lambda: [names[next(calls) % len(names)]]


def run_chain(scenario: Scenario, steps: Sequence[Step], *, whole: bool = True) -> None:
    assert not whole or {step.point for step in steps} == OF_EACH_POLICY[scenario.commit]
    kill_at_every_step(scenario, steps)
    fired = {hit.point for hit in scenario.driver.failpoints.hits()}
    assert fired == {step.point for step in steps} | (fired & {"commit.before"})


def batches_of(steps: Sequence[Step]) -> int:
    return sum(not step.again for step in steps) + 1


@pytest.mark.parametrize("policy", ["prepared", pytest.param("checkpoint", marks=pytest.mark.slow)])
def test_driver_killed_at_every_point_with_all_real_sinks(
    tmp_path: Path, services: Services, fresh_name: Callable[[], str], policy: CommitPolicy
) -> None:
    """Kafka, Postgres and each S3 server in one pipeline: every row is visible once in each."""
    targets = real_targets(services, fresh_name)
    sinks = in_turn([target.name for target in targets])
    steps = chain_of(policy, sinks, is_deep=policy == "checkpoint")
    with Scenario(tmp_path, targets, batches_of(steps), policy) as scenario:
        run_chain(scenario, steps)


def test_driver_killed_around_sparks_commit_with_all_real_sinks(
    tmp_path: Path, services: Services, fresh_name: Callable[[], str]
) -> None:
    """The points that only commit="checkpoint" has: what it prepares is abandoned or decided."""
    targets = real_targets(services, fresh_name)
    steps = [
        Step("prepared.after", NONE, aborts=True),
        Step("abandon.before", NONE, again=True),
        Step("abandon.after", NONE, again=True),
        beside_planning(Step("decide.before", NONE)),
        Step("decide.after", NONE, again=True),
        Step("commit.after", AHEAD, "kafka", again=True),
    ]
    with Scenario(tmp_path, targets, batches_of(steps), "checkpoint") as scenario:
        run_chain(scenario, steps, whole=False)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_matrix_of_points_and_sinks(
    tmp_path: Path, services: Services, fresh_name: Callable[[], str], policy: CommitPolicy
) -> None:
    """Every point of the policy, those of a sink at every one of the real sinks."""
    targets = real_targets(services, fresh_name)
    steps = chain_of(policy, lambda: [target.name for target in targets])
    with Scenario(tmp_path, targets, batches_of(steps), policy) as scenario:
        run_chain(scenario, steps)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_driver_killed_at_every_point_with_folders_as_sinks(
    tmp_path: Path, policy: CommitPolicy
) -> None:
    """The same with the simplest sinks, to tell a fault of the protocol from one of a sink."""
    targets = [file_target(tmp_path / name, name) for name in ("left", "right")]
    steps = chain_of(policy, in_turn(["left", "right"]))
    with Scenario(tmp_path, targets, batches_of(steps), policy) as scenario:
        run_chain(scenario, steps)
