"""One driver after the other is killed, each at the next point of the protocol.

The chains are those of `sparkonce.testing.kills`: each kill hits the next batch, or the recovery
from the kill before, and states what must be visible while the driver is paused there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from integration_tests.crash.chains import batches_of, kill_at_every_step, run_chain
from integration_tests.crash.scenario import POLICIES, Scenario
from integration_tests.crash.targets import (
    Target,
    delta_target,
    direct_targets,
    file_target,
    iceberg_target,
    real_targets,
)
from sparkonce.model import DRIVER_ATTEMPT, BranchId
from sparkonce.protocol.pipeline import CommitPolicy
from sparkonce.testing.kills import Kill, beside_planning, crash_points
from sparkonce.testing.services import Services


@pytest.fixture
def all_targets(
    tmp_path: Path, services: Services, fresh_name: Callable[[], str]
) -> Sequence[Target]:
    """Kafka, Postgres, each S3 server, two tables."""
    return [
        *real_targets(services, fresh_name),
        iceberg_target(tmp_path / "iceberg", "iceberg"),
        delta_target(tmp_path / "delta", "delta"),
    ]


def test_driver_killed_around_the_decision_with_all_real_sinks(
    tmp_path: Path,
    services: Services,
    fresh_name: Callable[[], str],
    all_targets: Sequence[Target],
) -> None:
    """Before the decision, after it, in the recovery, and between the commits of two sinks."""
    steps = [
        Kill("vote.after", "none", "iceberg", aborts=True),
        Kill("decide.after", "none"),
        Kill("recover.after", "all", again=True),
        Kill("commit.before", "held", "delta"),
        Kill("commit.after", "ahead", "straight"),
    ]
    targets = [*all_targets, *direct_targets(services.postgres, fresh_name)]
    with Scenario(tmp_path, targets, batches_of(steps)) as scenario:
        run_chain(scenario, steps, whole=False)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_driver_killed_at_every_point_with_all_real_sinks(
    tmp_path: Path, all_targets: Sequence[Target], policy: CommitPolicy
) -> None:
    """Every row is visible once in each of them."""
    names = [target.name for target in all_targets]
    steps = crash_points(names, policy, is_each=False, is_deep=policy == "after_checkpoint")
    with Scenario(tmp_path, all_targets, batches_of(steps), policy) as scenario:
        run_chain(scenario, steps)


def test_driver_killed_around_sparks_commit_with_all_real_sinks(
    tmp_path: Path, services: Services, fresh_name: Callable[[], str]
) -> None:
    """Points that only commit="after_checkpoint" has: a prepared batch is abandoned or decided."""
    targets = real_targets(services, fresh_name)
    steps = [
        Kill("hold.after", "none", aborts=True),
        beside_planning(Kill("decide.before", "none")),
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


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("table", [iceberg_target, delta_target])
def test_driver_killed_at_every_point_with_a_table_and_a_folder(
    tmp_path: Path, table: Callable[[Path, str], Target], policy: CommitPolicy
) -> None:
    """A batch is in the table as a whole, or not at all, wherever the driver dies."""
    targets = [table(tmp_path / "table", "table"), file_target(tmp_path / "left", "left")]
    steps = crash_points(["table", "left"], policy)
    with Scenario(tmp_path, targets, batches_of(steps), policy) as scenario:
        run_chain(scenario, steps)
