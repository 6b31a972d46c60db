"""A host is cut off from the driver while its tasks still reach the sinks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from integration_tests.cluster.conftest import Farm, worker_of
from integration_tests.crash.faults import wait_until
from integration_tests.crash.scenario import Scenario


def test_tasks_of_a_host_that_was_cut_off_prepare_late(
    farm: Farm, make_scenario: Callable[..., Scenario]
) -> None:
    """Its tasks prepare when the batch is decided with other tasks' branches: they are aborted."""
    if farm.network is None:
        pytest.skip("needs hosts with networks of their own")
    # The cut-off executor must live, on a slow machine too, until its tasks go on.
    scenario = make_scenario(3, conf={"spark.executor.heartbeat.maxFailures": "1000"})
    driver, points = scenario.driver, scenario.driver.failpoints
    prepared = points.arm("prepare.after", action="note", batch=1)
    paused, complete = driver.arm("prepare.before", batch=1), driver.arm("complete.before", batch=1)
    driver.start(paused)
    cut_off = worker_of(farm, points.hits(paused)[0])
    assert cut_off.host is not None
    late = {process.pid for process in cut_off.python_workers()}
    for pid in late:
        os.kill(pid, signal.SIGSTOP)
    cut_off.host.refuse(farm.network.driver_address)
    try:
        driver.let_go(paused)
        driver.process.wait_for(complete)
        assert not late & {hit.pid for hit in points.hits(prepared)}
        for pid in late:
            os.kill(pid, signal.SIGCONT)

        def sinks_of_late_tasks() -> set[object]:
            return {hit.where["sink"] for hit in points.hits(prepared) if hit.pid in late}

        names = {target.name for target in scenario.targets}
        wait_until(lambda: sinks_of_late_tasks() == names, "the late tasks prepare in every sink")
        assert scenario.leaks()
    finally:
        cut_off.host.accept(farm.network.driver_address)
    driver.let_go(complete)
    status, said = driver.ends()
    assert status == 0, said[-3000:]
    scenario.check_end()
