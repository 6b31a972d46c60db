"""Servers that are killed while a driver uses them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from integration_tests.crash.scenario import Driver, Scenario, shown
from sparkonce.testing.crash import POLL_S, Arm
from sparkonce.testing.services import ServiceKind, Services

DEADLINE_S = 240.0
POINTS_OF_FAULTS = (
    "write.after",
    "prepare.after",
    "vote.after",
    "decide.before",
    "decide.after",
    "commit.before",
    "complete.before",
)
FAULT_IS_MET = re.compile(
    r"refused|could not connect|closed the connection|connection reset|terminating connection"
    r"|disconnected|still trying|does not respond|EndpointConnectionError|ConnectionClosedError",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Fault:
    """A server is killed while the driver is paused at a point.

    Attributes:
        server: the server that is killed.
        point: the point at which the driver is paused.
        is_back_first: the server starts before the driver resumes; else after it hit the fault.
    """

    server: ServiceKind
    point: str
    is_back_first: bool

    def arm(self, driver: Driver, batch: int) -> Arm:
        return driver.arm(self.point, batch=batch)

    def happen(self, services: Services, driver: Driver, arm: Arm) -> None:
        """Kill the server, resume the driver, and start the server, in the fault's order."""
        server = services[self.server]
        before = len(driver.said())
        server.kill()
        if self.is_back_first:
            server.start()
        driver.let_go(arm)
        if not self.is_back_first:
            wait_until(
                lambda: (
                    driver.process.status() is not None
                    or FAULT_IS_MET.search(driver.said()[before:]) is not None
                ),
                f"{self}: the driver did not hit the fault",
            )
            server.start()


def wait_until(reached: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < deadline, what
        time.sleep(POLL_S)


def go_on(driver: Driver, arms: Sequence[Arm]) -> int:
    """Wait until the driver reaches `arms`, or its end; restart it if it fails.

    Returns:
        The number of restarts.
    """
    for restarts in range(3):
        wait_until(
            lambda: (
                driver.process.status() is not None or len(driver.failpoints.hits(*arms)) > 0
                if arms
                else driver.process.status() is not None
            ),
            "the driver neither ended nor reached its next point",
        )
        if driver.process.status() in {None, 0}:
            return restarts
        driver.process.start()
    raise AssertionError(f"the driver fails again and again: {driver.said()[-3000:]}")


def break_servers(scenario: Scenario, services: Services, faults: Sequence[Fault]) -> None:
    """The first fault hits batch 0, the second batch 1, and so on."""
    driver = scenario.driver
    arm = faults[0].arm(driver, 0)
    driver.start(arm)
    for batch, fault in enumerate(faults):
        following = [each.arm(driver, batch + 1) for each in faults[batch + 1 : batch + 2]]
        fault.happen(services, driver, arm)
        restarts = go_on(driver, following)
        seen = scenario.visible_of(batch + 1)  # which asserts that this batch is visible once
        order = "before it resumed" if fault.is_back_first else "after it hit the fault"
        ended = "aborted, replayed" if restarts else "committed"
        scenario.note(scenario.commit, batch, fault.server, fault.point, order, ended)
        assert set(seen.values()) <= {"none", "all"}, shown(seen)
        (arm,) = following or [arm]
    assert driver.process.status() == 0
    scenario.check_end()
    scenario.print_table("policy", "batch", "killed", "driver at", "started again", "the batch")
