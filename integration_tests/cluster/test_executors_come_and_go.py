"""Executors that are slow, too few, sent away or not there yet: Spark's own ways to move tasks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import psycopg
import pytest

from integration_tests.cluster.conftest import WORKERS, Farm, worker_of
from integration_tests.crash.faults import wait_until
from integration_tests.crash.scenario import Scenario
from sparkonce.testing.services import SparkWorker

CORES = 2 * WORKERS
MOST_CONNECTIONS = 12
"""Of one Python worker: to Spark, to Postgres, a producer's, and a pool of HTTP connections."""
SPLIT = {"spark.sql.files.maxPartitionBytes": "100", "spark.sql.files.openCostInBytes": "0"}
"""Some 70 tasks a batch."""
SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "200ms",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.quantile": "0.25",
    "spark.speculation.minTaskRuntime": "100ms",
}
DECOMMISSION = {"spark.decommission.enabled": "true"}
ALLOCATION = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.minExecutors": "0",
    "spark.dynamicAllocation.initialExecutors": "1",
    "spark.dynamicAllocation.executorIdleTimeout": "1s",
    "spark.dynamicAllocation.cachedExecutorIdleTimeout": "1s",
}


def ends_well(scenario: Scenario) -> None:
    status, said = scenario.driver.ends()
    assert status == 0, said[-3000:]
    scenario.check_end()


def executors(farm: Farm) -> list[psutil.Process]:
    return [executor for worker in farm.cluster.workers for executor in worker.executors()]


def connections(pid: int) -> int:
    """Open TCP connections of a process, which may be in another network namespace."""
    table = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    established = {row.split()[9] for row in table if row.split()[3] == "01"}
    links = [str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
    return sum(link.removeprefix("socket:[").rstrip("]") in established for link in links)


@pytest.mark.slow
def test_losing_attempts_have_prepared(farm: Farm, make_scenario: Callable[..., Scenario]) -> None:
    """Tasks that are frozen before they return: Spark's copies win, and the losers are swept."""
    scenario = make_scenario(3, conf=SPECULATION)
    driver, points = scenario.driver, scenario.driver.failpoints
    opened = points.arm("open.after", action="note", batch=1)
    paused, complete = driver.arm("prepare.after", batch=1), driver.arm("complete.before", batch=1)
    driver.start(paused)
    slow = points.hits(paused)[0].pid
    os.kill(slow, signal.SIGSTOP)
    driver.let_go(paused)
    driver.process.wait_for(complete)
    assert len(points.hits(opened)) > 2 * len(scenario.targets), "Spark has made no copy"
    assert scenario.leaks(), "the loser has prepared"
    if psutil.pid_exists(slow):  # Spark may have killed it
        os.kill(slow, signal.SIGCONT)
    driver.let_go(complete)
    ends_well(scenario)


@pytest.mark.slow
def test_many_tasks_on_few_cores(farm: Farm, make_scenario: Callable[..., Scenario]) -> None:
    """Connections are bounded by the cores, not by the tasks; an executor dies among them."""
    scenario = make_scenario(3, conf={**SPLIT, "spark.executor.instances": "400"})
    driver = scenario.driver
    writing, decided = driver.arm("write.after", batch=1), driver.arm("decide.after", batch=1)
    driver.start(writing)
    (hit, *_) = driver.failpoints.hits(writing)
    worker_of(farm, hit).executors()[0].kill()
    driver.let_go(writing)
    driver.process.wait_for(decided)
    record = scenario.record(1)
    tasks = {name: len(share.parts) for name, share in record.shares.items()}
    assert min(tasks.values()) >= 50, tasks
    with psycopg.connect(farm.services.postgres.dsn) as connection:
        (sessions,) = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'sparkonce%'"
        ).fetchone() or (0,)
    per_worker = [
        connections(process.pid)
        for worker in farm.cluster.workers
        for process in worker.python_workers()
    ]
    print(f"{tasks} tasks; {sessions} sessions of Postgres; sockets of each worker: {per_worker}")
    assert sessions <= CORES + 4
    assert 0 < max(per_worker) <= MOST_CONNECTIONS
    assert sum(per_worker) <= CORES * MOST_CONNECTIONS
    assert "and 400 may run at the same time: tasks will wait" in driver.said()
    driver.let_go(decided)
    ends_well(scenario)


@pytest.mark.slow
def test_worker_that_is_decommissioned(farm: Farm, make_scenario: Callable[..., Scenario]) -> None:
    """Its executor finishes or loses its tasks, and gets no more; the batch goes on elsewhere."""
    scenario = make_scenario(3, conf=DECOMMISSION)
    driver = scenario.driver
    writing = driver.arm("write.after", batch=1)
    driver.start(writing)
    (hit, *_) = driver.failpoints.hits(writing)
    worker: SparkWorker = worker_of(farm, hit)
    leaving = worker.executors()
    worker.executors()[0].send_signal(signal.SIGPWR)
    try:
        driver.let_go(writing)
        wait_until(
            lambda: not any(process.is_running() for process in leaving), "the executor has left"
        )
        ends_well(scenario)
    finally:
        worker.kill()
        worker.start()


@pytest.mark.slow
def test_no_executor_is_left_between_two_batches(
    farm: Farm, make_scenario: Callable[..., Scenario]
) -> None:
    scenario = make_scenario(3, conf=ALLOCATION)
    driver = scenario.driver
    delivered = driver.arm("deliver.after", batch=0)
    driver.start(delivered)
    wait_until(lambda: not executors(farm), "every executor has been sent away")
    driver.let_go(delivered)
    ends_well(scenario)
