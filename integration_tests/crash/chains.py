"""Kills, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from integration_tests.crash import recording
from integration_tests.crash.scenario import Scenario, shown
from sparkonce.steps import POINTS
from sparkonce.testing.kills import Kill

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
    """Kill at each step, and replay what the drivers did through the model: `specs.traces`."""
    assert not whole or {step.point for step in steps} == OF_EACH_POLICY[scenario.commit]
    recording.enable(scenario.folder)
    kill_at_every_step(scenario, steps)
    recording.check_run(scenario.folder, scenario.batches)
    fired = {hit.point for hit in scenario.driver.failpoints.hits()}
    assert fired == {step.point for step in steps} | (fired & {"commit.before"})


def batches_of(steps: Sequence[Kill], lead: int = 0) -> int:
    return sum(not step.again for step in steps) * (lead + 1) + 1
