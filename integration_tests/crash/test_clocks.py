"""Drivers whose clock is wrong, or jumps while they run; the servers' clocks are right.

Spark runs with the driver's clock too. Its hosts' clocks are in `cluster/test_clocks.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from integration_tests.crash.pauses import TOKEN_TAKEN
from integration_tests.crash.scenario import PIPELINE, Scenario, Target, first_match
from integration_tests.crash.targets import kafka_target, postgres_target, s3_target
from integration_tests.support.clock import DAY_S, ShiftedClock
from integration_tests.support.kafka import eventually
from sparkonce.model import Owner
from sparkonce.protocol.pipeline import CommitPolicy
from sparkonce.testing.services import KafkaServer, Services
from sparkonce.txn_log.record import State

LEAP_S = 20 * 60.0
TIMEOUT_S = 25
"""Long enough to write a batch, and short enough to wait for."""
CONF = {"spark.network.timeout": "10d"}
"""By default Spark removes an executor whose heartbeat a leap of the clock has made old."""


def targets_with_any_clock(
    services: Services, fresh_name: Callable[[], str], **kafka_settings: Any
) -> list[Target]:
    """Kafka, Postgres and S3, set up so that a writer's clock is not refused.

    By default Kafka refuses rows from a clock that is more than an hour ahead; S3 refuses requests
    from one that is more than a quarter of an hour off, which S3Mock does not check.
    """
    topic = fresh_name()
    targets = [
        kafka_target(services.kafka, topic, **kafka_settings),
        postgres_target(services.postgres, fresh_name()),
        s3_target(services.s3["s3mock"], fresh_name(), "s3mock"),
    ]
    stamp_by_broker(services.kafka, topic)
    return targets


def wait_until_the_broker_has_dropped_the_branches(scenario: Scenario) -> None:
    with scenario.log() as log:
        head = log.head(PIPELINE)
        assert head is not None
        owner, kafka = Owner(log.log_id, head.query_id), scenario.target("kafka")
    assert kafka.leaks(owner), "no branch is open that the broker could drop"
    eventually(lambda: not kafka.leaks(owner), "the broker has aborted them")


def stamp_by_broker(server: KafkaServer, topic: str) -> None:
    setting = ConfigEntry(
        "message.timestamp.type", "LogAppendTime", incremental_operation=AlterConfigOpType.SET
    )
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[setting])
    admin = AdminClient({"bootstrap.servers": server.bootstrap_servers})
    admin.incremental_alter_configs([resource])[resource].result(timeout=30)


@pytest.fixture
def clock(fresh_clock: Callable[[], ShiftedClock]) -> ShiftedClock:
    return fresh_clock()


@pytest.mark.parametrize(
    ("policy", "held", "state"),
    [
        ("immediate", "decide.after", State.DECIDED),
        ("after_checkpoint", "hold.after", State.PREPARED),
    ],
)
@pytest.mark.slow
def test_clock_of_each_driver_is_two_days_off_the_one_before(
    tmp_path: Path,
    services: Services,
    fresh_name: Callable[[], str],
    clock: ShiftedClock,
    policy: CommitPolicy,
    held: str,
    state: State,
) -> None:
    """Each is killed between the decision and the commits, or before Spark's checkpoint."""
    targets = targets_with_any_clock(services, fresh_name)
    with Scenario(tmp_path, targets, 2, policy, conf=CONF, env=clock.env) as scenario:
        driver = scenario.driver
        for batch, ahead_s in enumerate([DAY_S, -DAY_S]):
            clock.set_ahead(ahead_s)
            driver.start(driver.arm(held, batch=batch))
            record = scenario.record(batch)
            assert record.state is state
            assert clock.is_near(record.times[state])
            driver.kill()
            assert set(scenario.visible_of(batch).values()) == {"none"}
        clock.set_ahead(DAY_S)
        scenario.finish()
        assert clock.is_near(scenario.record(1).times[State.COMPLETE])


@pytest.mark.slow
def test_clock_jumps_between_prepare_and_the_decision(
    tmp_path: Path, services: Services, fresh_name: Callable[[], str], clock: ShiftedClock
) -> None:
    """Back, while the broker drops the branches; then forward, so that they look dropped.

    Both times the batch is aborted, and the next start writes it again. If it were decided, Spark
    would not replay it, and an operator would have to enter its rows.
    """
    targets = targets_with_any_clock(services, fresh_name, transaction_timeout_s=TIMEOUT_S)
    with Scenario(tmp_path, targets, 1, "after_checkpoint", conf=CONF, env=clock.env) as scenario:
        driver = scenario.driver
        driver.start(driver.arm("hold.before", batch=0))
        clock.set_ahead(-DAY_S)
        wait_until_the_broker_has_dropped_the_branches(scenario)
        assert_aborted(scenario, r"may have dropped \d+ s ago, because writing the batch took")
        driver.start(driver.arm("hold.before", batch=0))
        clock.set_ahead(LEAP_S - DAY_S)
        assert_aborted(scenario, f"the driver's clock jumped forward by {LEAP_S:.0f} s")
        scenario.finish()
        assert clock.is_near(scenario.record(0).times[State.COMPLETE])


def assert_aborted(scenario: Scenario, reason: str) -> None:
    """Let the driver go on, and assert that it ends for this reason, and with nothing left."""
    driver = scenario.driver
    driver.let_go()
    status, said = driver.ends()
    assert status != 0, "the driver ends as if all were well"
    first_match(reason, said)
    assert set(scenario.visible_of(0).values()) == {"none"}
    assert scenario.leaks() == []


def test_suspended_driver_resumes_a_day_later_and_another_has_repaired_its_batch(
    tmp_path: Path, services: Services, fresh_name: Callable[[], str], clock: ShiftedClock
) -> None:
    """It was decided; the broker drops a branch meanwhile, and the newer driver writes it again."""
    targets = targets_with_any_clock(services, fresh_name, transaction_timeout_s=TIMEOUT_S)
    with Scenario(tmp_path, targets, 2, is_tagged=False, conf=CONF, env=clock.env) as scenario:
        older = scenario.driver
        older.start(older.arm("commit.before", batch=0, sink="kafka"))
        scenario.env = {}
        with older.frozen():
            wait_until_the_broker_has_dropped_the_branches(scenario)
            newer = scenario.new_driver()
            newer.start()
            assert newer.ends()[0] == 0, newer.said()[-3000:]
            assert scenario.record(0).lost
            clock.set_ahead(DAY_S)
            older.let_go()
        status, said = older.ends()
        assert status != 0, "the older driver ends as if all were well"
        first_match(TOKEN_TAKEN, said)
        scenario.check_end()
