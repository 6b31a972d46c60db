"""Executors, Python workers, whole workers and drivers of a cluster are killed: nothing is lost.

Each kill waits until a process has reached a point of the protocol, which a seed chooses.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import pytest

from integration_tests.cluster.conftest import Farm, worker_of
from integration_tests.crash.faults import wait_until
from integration_tests.crash.scenario import Scenario
from sparkonce.testing.crash import Hit

Victim: TypeAlias = Literal["executor", "python worker", "worker", "driver"]
VICTIMS: Sequence[Victim] = ("executor", "python worker", "worker", "driver")
IN_TASKS = ("open.after", "write.after", "prepare.before", "prepare.after")
ON_DRIVER = ("vote.after", "decide.before", "decide.after", "commit.before", "complete.before")


@dataclass(frozen=True)
class ClusterKill:
    """A victim, and the point at which a process has arrived when it dies."""

    victim: Victim
    point: str

    def __str__(self) -> str:
        return f"{self.victim} at {self.point}"


def kill(farm: Farm, scenario: Scenario, victim: Victim, hit: Hit) -> str:
    """Kill it, where the point was hit if it runs there; returns what was killed."""
    worker = worker_of(farm, hit)
    if victim == "driver":
        scenario.driver.process.kill()
    elif victim == "worker":
        worker.kill()
    elif victim == "python worker" and (found := worker.python_workers()):
        next((p for p in found if p.pid == hit.pid), found[0]).kill()
    else:  # an executor that has just started has no Python worker yet
        wait_until(lambda: bool(worker.executors()), f"{worker.folder.name} has an executor")
        worker.executors()[0].kill()
        return "executor"
    return victim


def run_kills(farm: Farm, scenario: Scenario, kills: Sequence[ClusterKill]) -> None:
    """One kill in each batch, then a batch without any."""
    driver = scenario.driver
    arm = driver.arm(kills[0].point, batch=0)
    driver.start()
    for batch, each in enumerate(kills):
        if driver.process.status() is not None:  # the kill before ended the query
            driver.start()
        (hit, *_) = driver.process.wait_for(arm)
        reached = arm
        if batch + 1 < len(kills):
            arm = driver.arm(kills[batch + 1].point, batch=batch + 1)
        killed = kill(farm, scenario, each.victim, hit)
        driver.let_go(reached)
        for worker in farm.cluster.workers:
            worker.start()  # only a killed one starts
        scenario.note(batch, killed, each.point)
    wait_until(lambda: driver.process.status() is not None, "the query does not end")
    while driver.process.status() != 0:
        scenario.note("-", "the query ended, and is started again", "")
        driver.process.start()
        driver.process.wait()
    scenario.check_end()
    scenario.print_table("batch", "killed", "at")


def test_each_kind_of_process_is_killed(farm: Farm, make_scenario: Callable[..., Scenario]) -> None:
    kills = [
        ClusterKill("executor", "prepare.after"),
        ClusterKill("python worker", "write.after"),
        ClusterKill("worker", "vote.after"),
        ClusterKill("driver", "decide.after"),
    ]
    run_kills(farm, make_scenario(len(kills) + 1), kills)


@pytest.mark.slow
def test_a_hundred_random_kills(
    farm: Farm, make_scenario: Callable[..., Scenario], dice: random.Random
) -> None:
    kills = []
    for _ in range(100):
        victim = dice.choices(VICTIMS, weights=(5, 4, 2, 1))[0]
        kills.append(ClusterKill(victim, dice.choice((*IN_TASKS, *ON_DRIVER))))
    run_kills(farm, make_scenario(len(kills) + 1), kills)
