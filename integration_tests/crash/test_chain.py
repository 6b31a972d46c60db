"""One driver after the other is killed, each at the next point of the protocol.

The chains are those of `sparkonce.testing.kills`: each kill hits the next batch, or the recovery
from the kill before, and states what must be visible while the driver is paused there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from integration_tests.crash.scenario import POLICIES, Scenario, shown
from integration_tests.crash.targets import file_target, real_targets
from sparkonce.model import DRIVER_ATTEMPT, BranchId
from sparkonce.protocol.pipeline import CommitPolicy
from sparkonce.steps import POINTS
from sparkonce.testing.kills import Kill, beside_planning, crash_points
from sparkonce.testing.services import Services

AFTER_A_LOSS = {"rewrite.before", "amend.before", "amend.after"}
OF_EACH_POLICY = {
    "immediate": POINTS.keys()
    - AFTER_A_LOSS
    - {"hold.before", "hold.after", "abandon.before", "abandon.after"},
    "after_checkpoint": POINTS.keys() - AFTER_A_LOSS,
}


def kill_at_every_step(scenario: Scenario, steps: Sequence[Kill], *, lead: int = 0) -> set[int]:
    """Kill a driver at each of the steps, then check everything.

    Args:
        scenario: has `batches_of(steps, lead)` batches.
        steps: the kills, one per batch, or `again` in the same batch.
        lead: the number of batches that a driver writes before the batch at which it is killed.

    Returns:
        The drivers' process ids.
    """
    batch, driver, pids = -1, scenario.driver, set()
    for step in steps:
        batch += 0 if step.again else lead + 1
        names = [target.name for target in scenario.targets]
        driver.start(*step.arm(driver.failpoints, batch, names))
        seen, pid = scenario.visible_of(batch), driver.pid
        pids.add(pid)
        if step.is_beside_planning:
            scenario.wait_until_planned(batch + 1)
        driver.kill()
        place = f"{step.point}{' again' * step.again}"
        scenario.note(scenario.commit, batch, place, step.sink or "", shown(seen))
        step.check(seen)
        if step.aborts:
            scenario.aborted.add((batch, pid))
    assert batch + 1 < scenario.batches, "the last batch shows that the pipeline still runs"
    scenario.finish()
    scenario.print_table("policy", "batch", "killed at", "sink", "visible then")
    return pids


def run_chain(scenario: Scenario, steps: Sequence[Kill], *, whole: bool = True) -> None:
    assert not whole or {step.point for step in steps} == OF_EACH_POLICY[scenario.commit]
    kill_at_every_step(scenario, steps)
    fired = {hit.point for hit in scenario.driver.failpoints.hits()}
    assert fired == {step.point for step in steps} | (fired & {"commit.before"})


def batches_of(steps: Sequence[Kill], lead: int = 0) -> int:
    return sum(not step.again for step in steps) * (lead + 1) + 1


@pytest.mark.parametrize(
    "policy", ["immediate", pytest.param("after_checkpoint", marks=pytest.mark.slow)]
)
def test_driver_killed_at_every_point_with_all_real_sinks(
    tmp_path: Path, services: Services, fresh_name: Callable[[], str], policy: CommitPolicy
) -> None:
    """Kafka, Postgres and each S3 server in one pipeline: every row is visible once in each."""
    targets = real_targets(services, fresh_name)
    names = [target.name for target in targets]
    steps = crash_points(names, policy, is_each=False, is_deep=policy == "after_checkpoint")
    with Scenario(tmp_path, targets, batches_of(steps), policy) as scenario:
        run_chain(scenario, steps)


def test_driver_killed_around_sparks_commit_with_all_real_sinks(
    tmp_path: Path, services: Services, fresh_name: Callable[[], str]
) -> None:
    """Points that only commit="after_checkpoint" has: a prepared batch is abandoned or decided."""
    targets = real_targets(services, fresh_name)
    steps = [
        Kill("hold.after", "none", aborts=True),
        Kill("abandon.before", "none", again=True),
        Kill("abandon.after", "none", again=True),
        beside_planning(Kill("decide.before", "none")),
        Kill("decide.after", "none", again=True),
        Kill("commit.after", "ahead", "kafka", again=True),
    ]
    with Scenario(tmp_path, targets, batches_of(steps), "after_checkpoint") as scenario:
        run_chain(scenario, steps, whole=False)


BY_DRIVER = {
    "immediate": [
        Kill("open.after", "none", "postgres", aborts=True),
        Kill("prepare.after", "none", "kafka", aborts=True),
        Kill("vote.after", "none", "versitygw", aborts=True),
        Kill("decide.after", "none"),
        Kill("commit.after", "ahead", "kafka"),
        Kill("deliver.after", "all"),
    ],
    "after_checkpoint": [
        Kill("prepare.before", "none", "s3mock", aborts=True),
        Kill("hold.after", "none", aborts=True),
        beside_planning(Kill("decide.after", "none")),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_driver_killed_with_small_batches_that_it_writes_itself(
    tmp_path: Path, services: Services, fresh_name: Callable[[], str], policy: CommitPolicy
) -> None:
    """After three small batches the driver writes itself: it dies with its prepared branches."""
    targets, steps = real_targets(services, fresh_name), BY_DRIVER[policy]
    with Scenario(tmp_path, targets, batches_of(steps, lead=3), policy) as scenario:
        pids = kill_at_every_step(scenario, steps, lead=3)
        hits = scenario.driver.failpoints.hits()
        assert {hit.point for hit in hits} - {"commit.before"} == {step.point for step in steps}
        assert {h.pid for h in hits if h.point.startswith(("write", "precommit"))} <= pids
        decided = [step.point for step in steps].index("decide.after")
        for share in scenario.record(batches_of(steps[: decided + 1], lead=3) - 2).shares.values():
            (part,) = share.parts
            branch_id = BranchId.from_name(part.branch)
            assert branch_id is not None
            assert branch_id.attempt > DRIVER_ATTEMPT


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_matrix_of_points_and_sinks(
    tmp_path: Path, services: Services, fresh_name: Callable[[], str], policy: CommitPolicy
) -> None:
    """Every point of the policy; the points of a sink at every real sink."""
    targets = real_targets(services, fresh_name)
    steps = crash_points([target.name for target in targets], policy)
    with Scenario(tmp_path, targets, batches_of(steps), policy) as scenario:
        run_chain(scenario, steps)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_driver_killed_at_every_point_with_folders_as_sinks(
    tmp_path: Path, policy: CommitPolicy
) -> None:
    """The same with the simplest sinks, to distinguish bugs of the protocol from a sink's."""
    targets = [file_target(tmp_path / name, name) for name in ("left", "right")]
    steps = crash_points(["left", "right"], policy, is_each=False)
    with Scenario(tmp_path, targets, batches_of(steps), policy) as scenario:
        run_chain(scenario, steps)
