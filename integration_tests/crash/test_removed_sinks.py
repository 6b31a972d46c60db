"""Sinks are removed from the pipeline during a batch, and every later driver is killed too.

driver 1 killed at decide.before ─► one sink removed ─► driver 2 killed before it sweeps
driver 3 killed at decide.after  ─► one sink removed ─► drivers 4 and 5 killed at its commit
driver 6 runs to the end
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from integration_tests.crash.scenario import Scenario
from integration_tests.crash.targets import real_targets
from sparkonce.testing.services import Services

BATCHES = 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("undecided", "decided"),
    [("kafka", "postgres"), ("postgres", "versitygw"), ("s3mock", "kafka")],
)
def test_removed_sinks_lose_what_is_undecided_and_get_what_is_decided(
    tmp_path: Path,
    services: Services,
    fresh_name: Callable[[], str],
    undecided: str,
    decided: str,
) -> None:
    """So it is even if the drivers that finish and sweep are killed; the others get every batch."""
    if not {undecided, decided} <= {"kafka", "postgres", *services.s3}:
        pytest.skip(f"no S3 server {undecided} or {decided} runs here")
    targets = real_targets(services, fresh_name)
    with Scenario(tmp_path, targets, BATCHES, is_tagged=False) as scenario:
        driver = scenario.driver
        driver.start(driver.arm("decide.before", batch=1))
        driver.kill()
        scenario.remove(undecided, batches=1)
        driver.start(driver.arm("recover.after"))
        driver.kill()
        assert f"{undecided}:" in "\n".join(scenario.leaks())

        driver.start(driver.arm("decide.after", batch=1))
        driver.kill()
        assert undecided not in scenario.record(1).shares
        scenario.remove(decided, batches=2)
        for point in ("commit.before", "commit.after"):
            driver.start(driver.arm(point, batch=1, sink=decided))
            driver.kill()
        scenario.finish()
        assert scenario.record(1).shares[decided].committables
        assert scenario.record(2).shares.keys() == {
            target.name for target in targets if target.name not in scenario.removed
        }
