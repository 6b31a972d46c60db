"""Two live drivers of one pipeline on one checkpoint: the newer one fences the older.

    driver A pauses at a point of batch N ─────────────────────── resumes ─► ends, names driver B
            driver B starts, takes over, pauses at the next point of batch N+1 ── resumes ─► …

Each driver of a chain is first the newer and then the older one. `frozen` stops A's whole process
tree as well, as a hypervisor or a swapping machine does.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from integration_tests.crash.pauses import TOKEN_TAKEN, Pause, take_over_one_after_the_other
from integration_tests.crash.scenario import POLICIES, Scenario, first_match
from integration_tests.crash.targets import file_target, real_targets
from sparkonce.protocol.pipeline import CommitPolicy
from sparkonce.testing.services import Services


def pauses_of(policy: CommitPolicy) -> list[Pause]:
    both = [
        Pause("write.after"),
        Pause("prepare.after", "kafka"),
        Pause("decide.before"),
        Pause("decide.after"),
        Pause("commit.before", "postgres"),
        Pause("complete.before"),
        Pause("decide.before", is_frozen=True),
        Pause("commit.before", "kafka", is_frozen=True),
    ]
    waiting = [Pause("hold.before"), Pause("hold.after"), Pause("hold.after", is_frozen=True)]
    return both if policy == "immediate" else [*both[:2], *waiting, *both[2:]]


def test_newer_driver_takes_over(
    tmp_path: Path, services: Services, fresh_name: Callable[[], str]
) -> None:
    """Before and after the decision: the older one ends, names the newer, and changes nothing."""
    pauses = [Pause("prepare.after", "kafka"), Pause("commit.before", "kafka", is_frozen=True)]
    with Scenario(tmp_path, real_targets(services, fresh_name), len(pauses) + 1) as scenario:
        take_over_one_after_the_other(scenario, pauses)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_newer_driver_takes_over_at_every_pause(
    tmp_path: Path, services: Services, fresh_name: Callable[[], str], policy: CommitPolicy
) -> None:
    pauses = pauses_of(policy)
    targets = real_targets(services, fresh_name)
    with Scenario(tmp_path, targets, len(pauses) + 1, policy) as scenario:
        take_over_one_after_the_other(scenario, pauses)


@pytest.mark.slow
def test_older_driver_lets_spark_pass_a_batch_that_the_newer_one_writes_again(
    tmp_path: Path, services: Services, fresh_name: Callable[[], str]
) -> None:
    """A has prepared batch 1 and B abandons it; then A's Spark writes commits/1 while B runs.

    To B this looks like a driver with a copy of the log that has delivered the batch. So B shows
    nothing, and the next start names the files that an operator must remove.
    """
    with Scenario(tmp_path, real_targets(services, fresh_name), 3, "after_checkpoint") as scenario:
        older, newer = scenario.driver, scenario.new_driver()
        older.start(older.arm("hold.after", batch=1))
        newer.start(newer.arm("write.after", batch=1))
        older.let_go()
        status, said = older.ends()
        assert status != 0
        first_match(TOKEN_TAKEN, said)
        commit = scenario.checkpoint / "commits" / "1"
        assert commit.exists()
        newer.let_go()
        status, said = newer.ends()
        assert status != 0
        first_match("another driver has continued from", said)
        assert set(scenario.visible_of(1).values()) == {"none"}
        third = scenario.new_driver()
        third.start()
        status, said = third.ends()
        assert status != 0
        first_match("is in no sink.* Delete commits/1 and all later files", said)
        # It has planned batch 2.
        for path in (commit, scenario.checkpoint / "offsets" / "2"):
            path.unlink()
            path.with_name(f".{path.name}.crc").unlink()
        scenario.finish()


def copy_with_other_offsets(scenario: Scenario) -> Path:
    """A copy of the checkpoint whose newest batch has other offsets than the original's."""
    copy = scenario.folder / "copied"
    shutil.copytree(scenario.checkpoint, copy)
    newest = max((copy / "offsets").glob("[0-9]*"), key=lambda path: int(path.name))
    head = newest.read_text().splitlines()[:2]
    newest.write_text("\n".join([*head, json.dumps({"logOffset": 0})]))
    (copy / "offsets" / f".{newest.name}.crc").unlink()
    return copy


@pytest.mark.slow
def test_start_that_is_refused_leaves_the_running_driver_alone(
    tmp_path: Path, services: Services, fresh_name: Callable[[], str]
) -> None:
    """The identity guard takes no token: the healthy driver runs to the end."""
    with Scenario(tmp_path, real_targets(services, fresh_name), 3) as scenario:
        healthy = scenario.driver
        healthy.start(healthy.arm("decide.after", batch=1))
        copy = copy_with_other_offsets(scenario)
        refusals = {
            scenario.folder / "fresh": "is bound to the checkpoint of query",
            copy: "was rolled back, or copied",
        }
        for checkpoint, reason in refusals.items():
            second = scenario.new_driver(scenario.write_config(checkpoint.name, checkpoint))
            second.start()
            status, said = second.ends()
            scenario.note(checkpoint.name, status, first_match(reason, said))
            assert status != 0
        healthy.let_go()
        status, said = healthy.ends()
        assert status == 0, said[-3000:]
        scenario.check_end()
        scenario.print_table("checkpoint of the second start", "ends", "because")


@pytest.mark.slow
def test_older_copy_of_the_checkpoint_settles_nothing(
    tmp_path: Path, services: Services, fresh_name: Callable[[], str]
) -> None:
    """It has not begun the batch that the healthy driver has prepared and Spark will commit."""
    with Scenario(tmp_path, real_targets(services, fresh_name), 3, "after_checkpoint") as scenario:
        healthy = scenario.driver
        healthy.start(healthy.arm("hold.after", batch=2))
        copy = scenario.folder / "copied"
        shutil.copytree(scenario.checkpoint, copy)
        for name in ("offsets/2", "offsets/.2.crc", "commits/1", "commits/.1.crc"):
            (copy / name).unlink()
        second = scenario.new_driver(scenario.write_config("copied", copy))
        second.start()
        status, said = second.ends()
        assert status != 0
        first_match("at batch 1, has not begun it: it was rolled back, copied before", said)
        healthy.let_go()
        status, said = healthy.ends()
        assert status == 0, said[-3000:]
        scenario.check_end()


@pytest.mark.slow
def test_rolled_back_checkpoint_of_a_file_source_is_refused(tmp_path: Path) -> None:
    """Its batch 1 has other files: draining it would lose them, and later repeat delivered ones."""
    targets = [file_target(tmp_path / name, name) for name in ("left", "right")]
    with Scenario(tmp_path, targets, 3, is_tagged=False) as scenario:
        driver, older = scenario.driver, tmp_path / "older"
        later = {number: scenario.source / f"{number:05d}.json" for number in range(2, 6)}
        for path in later.values():
            path.unlink()
        driver.start()
        assert driver.ends()[0] == 0
        shutil.copytree(scenario.checkpoint, older)
        for number in (2, 3):
            scenario.write_file(number)
        driver.start()
        assert driver.ends()[0] == 0
        for number in (4, 5):
            scenario.write_file(number)
            os.utime(later[number], (1, 1))  # Spark now takes them before files 2 and 3
        shutil.rmtree(scenario.checkpoint)
        older.rename(scenario.checkpoint)
        driver.start()
        assert driver.ends()[0] != 0, "batch 1 was taken for a replay of another batch 1"
