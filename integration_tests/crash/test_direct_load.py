"""The crashes with Postgres in ``load="direct"``: each task prepares its own transaction.

The pipeline also has an upsert with the same load, whose rows are distributed by their keys in
their own pass, and a folder, the simplest sink. `test_chain.py` has some of them in every test run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from integration_tests.crash.chains import batches_of, run_chain
from integration_tests.crash.faults import POINTS_OF_FAULTS, Fault, break_servers
from integration_tests.crash.losses import lose, names_of
from integration_tests.crash.scenario import POLICIES, Scenario, Target
from integration_tests.crash.targets import direct_targets, file_target
from sparkonce.protocol.pipeline import CommitPolicy
from sparkonce.testing.kills import crash_points
from sparkonce.testing.services import Services


@pytest.fixture
def targets(tmp_path: Path, services: Services, fresh_name: Callable[[], str]) -> list[Target]:
    direct = direct_targets(services.postgres, fresh_name)
    return [*direct, file_target(tmp_path / "folder", "folder")]


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_driver_killed_at_every_point(
    tmp_path: Path, targets: list[Target], policy: CommitPolicy
) -> None:
    steps = crash_points([target.name for target in targets], policy, is_each=False)
    with Scenario(tmp_path, targets, batches_of(steps), policy) as scenario:
        run_chain(scenario, steps)


@pytest.mark.slow
def test_branches_rolled_back_by_an_operator_are_written_again(
    tmp_path: Path, targets: list[Target]
) -> None:
    """One task's branch of each sink is lost and rewritten; the other branches stay."""
    with Scenario(tmp_path, targets, 3, is_tagged=False) as scenario:
        driver = scenario.driver
        driver.start(driver.arm("decide.after", batch=1))
        driver.kill()
        decided = scenario.record(1)
        sinks = ("straight", "upsert")
        assert all(len(decided.shares[name].committables) > 1 for name in sinks)
        lost = [decided.shares[name].committables[0] for name in sinks]
        lose(scenario, lost)
        scenario.finish()
        record = scenario.record(1)
        assert names_of(record.lost) == names_of(lost)
        for name in sinks:
            kept = names_of(decided.shares[name].committables[1:])
            assert kept < names_of(record.shares[name].committables)


@pytest.mark.slow
def test_server_killed_on_both_sides_of_the_decision(
    tmp_path: Path, targets: list[Target], services: Services
) -> None:
    faults = [
        Fault("postgres", "prepare.after", is_back_first=True),
        Fault("postgres", "commit.before", is_back_first=False),
    ]
    with Scenario(tmp_path, targets, len(faults) + 1) as scenario:
        break_servers(scenario, services, faults)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_server_killed_at_every_point(
    tmp_path: Path, targets: list[Target], services: Services, policy: CommitPolicy
) -> None:
    faults = [
        Fault("postgres", point, first) for point in POINTS_OF_FAULTS for first in (True, False)
    ]
    with Scenario(tmp_path, targets, len(faults) + 1, policy) as scenario:
        break_servers(scenario, services, faults)
