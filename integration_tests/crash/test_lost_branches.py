"""Decided branches are destroyed from outside while no driver runs, as timeouts and people do.

driver 1 killed at decide.after ─► a branch is lost ─► driver 2 rewrites it, or reports why not
                                                         └─ killed at rewrite.*, amend.*: driver 3
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import pytest

from integration_tests.crash.losses import lose, names_of
from integration_tests.crash.scenario import Scenario, shown
from integration_tests.crash.targets import real_targets
from sparkonce.model import Committable
from sparkonce.sinks.kafka.connecting.settings import KafkaSettings
from sparkonce.sinks.kafka.finishing.finisher import Finisher
from sparkonce.testing.services import Services
from sparkonce.txn_log.record import TransactionRecord

FIRST, EVERY = slice(0, 1), slice(None)


@dataclass(frozen=True)
class Loss:
    """The lost branches of a decided batch, and the points at which its repair is killed.

    Attributes:
        branches: by sink name, which of its branches are lost.
        killed_at: each repairing driver is killed at the next of these points.
    """

    branches: dict[str, slice]
    killed_at: tuple[str, ...] = ()

    def of(self, record: TransactionRecord) -> list[Committable]:
        return [
            committable
            for sink, which in self.branches.items()
            for committable in record.shares[sink].committables[which]
        ]

    def __str__(self) -> str:
        return ", ".join(
            f"{sink} {'whole' if which == EVERY else 'one'}"
            for sink, which in self.branches.items()
        )


def lose_one_after_the_other(scenario: Scenario, losses: Collection[Loss]) -> None:
    """Batch 0 has the first loss, batch 1 the second, and so on."""
    driver, expected = scenario.driver, {}
    for batch, loss in enumerate(losses):
        driver.start(driver.arm("decide.after", batch=batch))
        driver.kill()
        record = scenario.record(batch)
        lost = loss.of(record)
        assert len(record.shares["kafka"].committables) == 2, "one branch is not all of them"
        assert lost
        lose(scenario, lost)
        expected[batch] = record, lost
        for point in loss.killed_at:
            driver.start(driver.arm(point, batch=batch))
            seen = scenario.visible_of(batch)
            driver.kill()
            scenario.note(batch, loss, point, shown(seen))
            assert all(seen[name] != "all" for name in loss.branches)
        scenario.note(batch, loss, "", "all")
    scenario.finish()
    for batch, (decided, lost) in expected.items():
        check_record(scenario.record(batch), decided, lost)
    scenario.print_table("batch", "lost", "repair killed at", "visible then")


def check_record(
    record: TransactionRecord, decided: TransactionRecord, lost: Collection[Committable]
) -> None:
    """Assert that only the lost branches were rewritten, and that the record lists them."""
    assert record.revision == 1
    assert names_of(record.lost) == names_of(lost)
    for name, share in record.shares.items():
        before = names_of(decided.shares[name].committables)
        kept = names_of(c for c in share.committables if c.branch_id.write_pass == 0)
        again = [c for c in share.committables if c.branch_id.write_pass == 1]
        assert kept == before - names_of(lost)
        assert len(again) == len(before & names_of(lost))
        assert share.rows == decided.shares[name].rows


@pytest.fixture
def scenario(tmp_path: Path, services: Services, fresh_name: Callable[[], str]) -> Scenario:
    return Scenario(tmp_path, real_targets(services, fresh_name), 3, is_tagged=False)


def everything(services: Services) -> dict[str, slice]:
    return dict.fromkeys(["kafka", "postgres", *services.s3], EVERY)


def test_branches_of_all_sinks_are_lost_and_the_repair_is_killed(
    scenario: Scenario, services: Services
) -> None:
    """One branch of Kafka, and all of the others; only lost branches are rewritten."""
    loss = Loss({**everything(services), "kafka": FIRST}, ("amend.after",))
    with scenario:
        lose_one_after_the_other(scenario, [loss])


@pytest.mark.slow
def test_every_loss(tmp_path: Path, services: Services, fresh_name: Callable[[], str]) -> None:
    """One branch, all branches of a sink, all sinks; repairs run undisturbed, or are killed."""
    killed = ("rewrite.before", "amend.before", "amend.after")
    s3 = list(services.s3)
    losses = [
        Loss({"kafka": FIRST}),
        Loss({"kafka": EVERY}),
        Loss({"postgres": EVERY}),
        *(Loss({name: which}) for name in s3 for which in (FIRST, EVERY)),
        Loss(dict.fromkeys(["kafka", *s3], FIRST)),
        Loss(everything(services)),
        Loss({"kafka": FIRST}, killed),
        Loss({"postgres": EVERY}, killed),
        Loss({s3[0]: FIRST}, killed),
        Loss(everything(services), killed),
    ]
    targets = real_targets(services, fresh_name)
    with Scenario(tmp_path, targets, len(losses) + 1, is_tagged=False) as scenario:
        lose_one_after_the_other(scenario, losses)


@pytest.mark.slow
def test_kafka_times_the_transactions_out(
    tmp_path: Path, services: Services, fresh_name: Callable[[], str]
) -> None:
    """The broker's own transaction timeout aborts both branches."""
    timeout_s = 25.0
    targets = real_targets(services, fresh_name, transaction_timeout_s=timeout_s)
    with Scenario(tmp_path, targets, 2, is_tagged=False) as scenario:
        driver = scenario.driver
        driver.start(driver.arm("decide.after", batch=0))
        driver.kill()
        decided = scenario.record(0)
        lost = decided.shares["kafka"].committables
        wait_for_timeout(services, lost)
        scenario.note(0, f"kafka whole, by its timeout of {timeout_s:.0f} s", "", "all")
        scenario.finish()
        check_record(scenario.record(0), decided, lost)
        scenario.print_table("batch", "lost", "repair killed at", "visible then")


def wait_for_timeout(services: Services, lost: Collection[Committable]) -> None:
    finisher = Finisher(KafkaSettings(services.kafka.bootstrap_servers))
    states = {"Ongoing"}
    while states & {"Ongoing", "PrepareEpochFence", "PrepareAbort"}:
        states = {state.state for state in finisher.describe(names_of(lost)).values()}
    finisher.close()
    assert states == {"CompleteAbort"}


@pytest.mark.slow
@pytest.mark.parametrize("sink", ["kafka", "postgres"])
def test_replay_with_other_rows_is_not_taken_for_what_was_lost(
    scenario: Scenario, sink: str
) -> None:
    """The replay has as many rows with other values: every start fails and rewrites nothing."""
    with scenario:
        driver = scenario.driver
        driver.start(driver.arm("decide.after", batch=1))
        driver.kill()
        lost = scenario.record(1).shares[sink].committables[0]
        lose(scenario, [lost])
        for number in (2, 3):
            scenario.write_file(number, lambda row: row._replace(name="someone else"))
        for _ in range(2):
            driver.start()
            status, said = driver.ends()
            assert status != 0
            check_loss_error(said, sink, lost, "the replay has other values")
            seen = scenario.visible_of(1)
            scenario.note(1, f"{sink} one", "changed replay", shown(seen))
            assert {what for name, what in seen.items() if name != sink} == {"all"}
            assert seen[sink] == ("none" if sink == "postgres" else "some")
        assert scenario.leaks() == []
        scenario.print_table("batch", "lost", "then", "visible")


def check_loss_error(said: str, sink: str, lost: Committable, why: str) -> None:
    """Assert that the error names the batch, the sink, the branch, its rows and the reason."""
    errors = re.findall(r"PreparedBranchLostError: (.*)", said)
    for part in ("batch 1 of pipeline 'crash'", str(lost.branch_id), " rows)", why):
        assert any(part in text for text in errors), f"{part!r} is not in {said[-4000:]}"
    assert f".{sink}." in str(lost.branch_id)


@pytest.mark.slow
def test_loss_that_spark_does_not_replay_any_more(
    tmp_path: Path, services: Services, fresh_name: Callable[[], str]
) -> None:
    """commit="after_checkpoint": Spark does not replay it; every start fails, no batch follows."""
    targets = real_targets(services, fresh_name)
    with Scenario(tmp_path, targets, 3, "after_checkpoint") as scenario:
        driver = scenario.driver
        driver.start(driver.arm("decide.before", batch=1))
        driver.kill()
        lost = scenario.record(1).shares["kafka"].committables[0]
        lose(scenario, [lost])
        for _ in range(2):
            driver.start()
            status, said = driver.ends()
            assert status != 0
            check_loss_error(said, "kafka", lost, "Spark does not replay the batch any more")
            seen = scenario.visible_of(1)
            scenario.note(1, "kafka one", "no replay", shown(seen))
            assert {what for name, what in seen.items() if name != "kafka"} == {"all"}
            assert seen["kafka"] == "some"
        assert scenario.leaks() == []
        scenario.print_table("batch", "lost", "then", "visible")
