"""Executors die between the moment when a batch is computed and the moment when it is read.

    source ─► snapshot on the executors ─► pass of sink A ─► pass of sink B
          │                            ✘                  ✘
          ├─► rows that the driver collects, for a small batch
          ✘
          └─► hashes that the driver sums, to compare a replay

Each kill waits until the job has reached that moment; see `placement_job`. A seed chooses the
executor where several will do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from decimal import Decimal
from functools import reduce
from operator import add
from typing import Any

import psutil
import pytest

from integration_tests.cluster.conftest import Farm, three_targets, worker_of
from integration_tests.crash.losses import lose
from integration_tests.crash.scenario import Driver, Row, Scenario, Target
from integration_tests.crash.targets import kafka_target, postgres_target, s3_target
from sparkonce.model import DRIVER_ATTEMPT, BranchId
from sparkonce.testing.crash import Arm
from sparkonce.testing.job import FILES_PER_BATCH
from sparkonce.txn_log.record import Fingerprint, Share, State

JOB = "integration_tests.cluster.placement_job"
INTERRUPTED = "batch {} was interrupted: a snapshot of its rows was lost with an executor"
WRITTEN_AGAIN = f"{INTERRUPTED}. It is written again"
MOST_WRITES = 6


def with_transform(farm: Farm, fresh_name: Callable[[], str]) -> list[Target]:
    """Two passes: one of Kafka and S3, and a second one of Postgres."""
    targets = three_targets(farm.services, fresh_name)
    return [with_settings(each, {"postgres": {"transform": "id >= 0"}}) for each in targets]


def with_writers(farm: Farm, fresh_name: Callable[[], str]) -> list[Target]:
    """Three passes: one task for each partition, two that get rows by their key, and one task."""
    services = farm.services
    dealt = {"key": ["id"], "load": "direct", "writers": 2}
    return [
        kafka_target(services.kafka, fresh_name()),
        postgres_target(services.postgres, fresh_name(), **dealt),
        with_settings(
            s3_target(services.s3["versitygw"], fresh_name(), "s3"), {"s3": {"writers": 1}}
        ),
    ]


def with_settings(target: Target, settings: Mapping[str, Mapping[str, Any]]) -> Target:
    return replace(target, settings={**target.settings, **settings.get(target.name, {})})


def snapshot_of(driver: Driver, batch: int) -> Arm:
    """Armed for the moment when the batch's snapshot is there, and nothing has read it."""
    return driver.arm("write.after", sink="snapshot", batch=batch)


def holders(farm: Farm, driver: Driver, arm: Arm) -> list[psutil.Process]:
    """The executors that hold the snapshot."""
    *_, hit = driver.process.wait_for(arm)
    running = [each for worker in farm.cluster.workers for each in worker.executors()]
    found = [each for each in running if id_of(each) in hit.where["holders"]]
    assert found, f"no executor holds the snapshot: {hit}"
    return found


def id_of(executor: psutil.Process) -> str:
    words = executor.cmdline()
    return words[words.index("--executor-id") + 1]


def kill(*processes: psutil.Process) -> None:
    for process in processes:
        process.kill()
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive


def ends_well(scenario: Scenario) -> str:
    """Wait for the driver's end and check everything; returns what it said."""
    status, said = scenario.driver.ends()
    assert status == 0, said[-3000:]
    scenario.check_end()
    return said


def is_by_driver(scenario: Scenario, batch: int) -> bool:
    """Whether the driver wrote the batch into every sink; fails if it wrote it into some."""
    shares = scenario.record(batch).shares.values()
    branches = [BranchId.from_name(part.branch) for share in shares for part in share.parts]
    (told,) = {branch is not None and branch.attempt > DRIVER_ATTEMPT for branch in branches}
    return told


def content(share: Share) -> Fingerprint:
    return reduce(add, (part.content for part in share.parts))


@pytest.mark.slow
@pytest.mark.parametrize("make_targets", [with_transform, with_writers])
def test_executor_with_a_snapshot_dies_before_it_is_read(
    farm: Farm,
    make_scenario: Callable[..., Scenario],
    fresh_name: Callable[[], str],
    make_targets: Callable[..., list[Target]],
    dice: random.Random,
) -> None:
    """One of its holders, then all of them, then one of them when a sink of a pass has prepared."""
    scenario = make_scenario(4, *make_targets(farm, fresh_name), job=JOB)
    driver = scenario.driver
    one, every, kept = (snapshot_of(driver, batch) for batch in (1, 2, 3))
    prepared = driver.arm("prepare.after", sink="kafka", batch=3)
    driver.start(one)
    kill(dice.choice(holders(farm, driver, one)))
    driver.let_go(one)
    kill(*holders(farm, driver, every))
    driver.let_go(every)
    held = dice.choice(holders(farm, driver, kept))
    driver.let_go(kept)
    driver.process.wait_for(prepared)
    kill(held)
    driver.let_go(prepared)
    said = ends_well(scenario)
    assert [batch for batch in range(4) if WRITTEN_AGAIN.format(batch) in said] == [1, 2, 3]


@pytest.mark.slow
def test_small_batch_whose_snapshot_is_lost(
    farm: Farm, make_scenario: Callable[..., Scenario], fresh_name: Callable[[], str]
) -> None:
    """The driver cannot read it, nor can the executors: they write the batch from a new one."""
    scenario = make_scenario(5, *with_transform(farm, fresh_name), job=JOB, driver_rows=1000)
    driver = scenario.driver
    arm = snapshot_of(driver, 3)
    driver.start(arm)
    kill(*holders(farm, driver, arm))
    driver.let_go(arm)
    said = ends_well(scenario)
    assert "batch 3: the driver could not write it as a small batch" in said
    assert WRITTEN_AGAIN.format(3) in said
    assert not is_by_driver(scenario, 3)


@pytest.mark.slow
def test_executor_dies_while_it_computes_the_rows_of_a_small_batch(
    farm: Farm, make_scenario: Callable[..., Scenario]
) -> None:
    """Another executor computes them, and the driver writes them."""
    scenario = make_scenario(5, job=JOB, driver_rows=1000)
    driver = scenario.driver
    before = driver.arm("complete.after", batch=2)
    driver.start(before)
    computing = driver.arm("write.after", sink="source")
    driver.let_go(before)
    hit, *_ = driver.process.wait_for(computing)
    kill(*worker_of(farm, hit).executors())
    driver.let_go(computing)
    said = ends_well(scenario)
    assert "It is written again" not in said
    assert [is_by_driver(scenario, batch) for batch in range(5)] == [False] * 3 + [True] * 2


@pytest.mark.slow
def test_executor_with_a_snapshot_dies_in_each_attempt(
    farm: Farm, make_scenario: Callable[..., Scenario], fresh_name: Callable[[], str]
) -> None:
    """The query fails and says why, and nothing of the batch is there; the next start writes it."""
    scenario = make_scenario(3, *with_transform(farm, fresh_name), job=JOB)
    driver = scenario.driver
    arm = snapshot_of(driver, 1)
    driver.start(arm)
    for left in reversed(range(MOST_WRITES)):
        victims, reached = holders(farm, driver, arm), arm
        arm = snapshot_of(driver, 1)
        kill(*victims)
        driver.let_go(reached)
        if left:
            driver.process.wait_for(arm)
    status, said = driver.ends()
    assert status != 0
    assert f"BatchInterruptedError: {INTERRUPTED.format(1)}" in said, said[-3000:]
    assert said.count(WRITTEN_AGAIN.format(1)) == MOST_WRITES - 1
    assert set(scenario.visible_of(1).values()) == {"none"}
    assert scenario.leaks() == []
    scenario.finish()


def changed(row: Row) -> Row:
    return row._replace(amount=row.amount + Decimal(1)) if row.id % 50 == 0 else row


@pytest.mark.slow
@pytest.mark.parametrize("is_changed", [False, True])
def test_executor_dies_while_a_replay_is_compared(
    farm: Farm, make_scenario: Callable[..., Scenario], is_changed: bool
) -> None:
    """The fingerprint is that of the batch, or of other rows if the source has others now."""
    scenario = make_scenario(3, job=JOB, is_tagged=False)
    driver = scenario.driver
    driver.start(driver.arm("deliver.after", batch=1))
    driver.kill()
    assert scenario.record(1).state is State.COMPLETE
    if is_changed:
        scenario.write_file(FILES_PER_BATCH, changed)
    computing = driver.arm("write.after", sink="source")
    driver.start()
    hit, *_ = driver.process.wait_for(computing)
    assert "is complete: its replay is read to the end" in driver.said()
    kill(*worker_of(farm, hit).executors())
    driver.let_go(computing)
    said = ends_well(scenario)
    differs = "its replay differs: sink {!r}, the replay has other values in its 100 rows"
    names = [each.name for each in scenario.targets]
    assert [differs.format(name) in said for name in names] == [is_changed] * len(names)


@pytest.mark.slow
def test_executor_dies_while_lost_branches_are_rewritten(
    farm: Farm, make_scenario: Callable[..., Scenario], fresh_name: Callable[[], str]
) -> None:
    """The replay's snapshot is lost; what is written again has the rows of the decision."""
    scenario = make_scenario(2, *with_transform(farm, fresh_name), job=JOB, is_tagged=False)
    driver = scenario.driver
    driver.start(driver.arm("decide.after", batch=1))
    driver.kill()
    decided = scenario.record(1)
    lose(scenario, [c for name in decided.shares for c in decided.shares[name].committables])
    arm = snapshot_of(driver, 1)
    driver.start(arm)
    kill(*holders(farm, driver, arm))
    driver.let_go(arm)
    said = ends_well(scenario)
    assert WRITTEN_AGAIN.format(1) in said
    record = scenario.record(1)
    assert record.revision == 1
    for name, share in record.shares.items():
        assert content(share) == content(decided.shares[name])
