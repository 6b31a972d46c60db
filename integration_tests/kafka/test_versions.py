"""The tests of `every_version` on brokers whose EndTxn does not fence the producer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kafka.admin import KafkaAdminClient

from integration_tests.kafka import every_version
from integration_tests.support.collecting import cases_of
from integration_tests.support.kafka import World, eventually, prepare
from sparkonce.model import BranchId, Owner
from sparkonce.sinks import KafkaSink
from sparkonce.sinks.kafka.branch import KafkaBranch
from sparkonce.sinks.kafka.finishing.states import is_complete
from sparkonce.testing.services import KafkaServer, ServiceError, start_services
from sparkonce.testing.services.java import java

NOT_FINISHED = "4.3 without its new features"
globals().update(cases_of(every_version))


def set_feature(server: KafkaServer, how: str, level: int) -> None:
    with KafkaAdminClient(bootstrap_servers=server.bootstrap_servers) as admin:
        answer = admin.update_features({"transaction.version": (how, level)})
        assert answer == {"transaction.version": "OK"}


@pytest.fixture(scope="module", params=[NOT_FINISHED, pytest.param("3.9", marks=pytest.mark.slow)])
def kafka(request: pytest.FixtureRequest) -> Iterator[KafkaServer]:
    """An old broker, and a new one whose operator has not finished the upgrade."""
    try:
        java()
    except ServiceError as error:
        pytest.skip(f"kafka: {error}")
    version, *as_it_was = request.param.split(" ", 1)
    with start_services(["kafka"], kafka_version=version) as services:
        if as_it_was:
            set_feature(services.kafka, "SAFE_DOWNGRADE", 0)
        yield services.kafka


@pytest.mark.parametrize("kafka", [NOT_FINISHED], indirect=True)
def test_upgrade_is_finished_between_prepare_and_commit(
    kafka: KafkaServer,
    sink: KafkaSink,
    branch: BranchId,
    world: World,
) -> None:
    """A connected driver notices it, and commits a branch that was prepared before exactly once."""
    prepared = prepare(sink, branch)
    assert not sink._finisher.end_fences()
    set_feature(kafka, "UPGRADE", 2)
    try:
        eventually(sink._finisher.end_fences, "noticed")
        for _ in range(2):
            sink.commit(prepared)
            world.sees("1", "2", "3")
        sink.close()
        sink.commit(prepared)
        world.sees("1", "2", "3")
    finally:
        set_feature(kafka, "SAFE_DOWNGRADE", 0)


@pytest.mark.parametrize("kafka", [NOT_FINISHED], indirect=True)
def test_upgrade_is_taken_back_under_a_connected_driver(
    kafka: KafkaServer, sink: KafkaSink, owner: Owner, world: World
) -> None:
    """The newer EndTxn would leave transactions that nobody can end, and block readers."""
    set_feature(kafka, "UPGRADE", 2)
    try:
        sink.close()
        eventually(sink._finisher.end_fences, "upgraded")
        together, alone, aborted = (
            prepare(sink, BranchId(owner, 7, 1, "kafka", 0, i)) for i in range(3)
        )
    finally:
        set_feature(kafka, "SAFE_DOWNGRADE", 0)
    assert sink.commit_many([together]) == [None]
    sink.commit(alone)
    sink.abort(aborted)
    world.sees(*"112233")


def test_brokers_that_do_not_fence(sink: KafkaSink) -> None:
    """The tests above must run on brokers without the EndTxn that fences."""
    assert not sink._finisher.end_fences()


def test_state_after_a_commit(sink: KafkaSink, branch: BranchId) -> None:
    """Fencing replaces the state; a repair of the markers relies on what remains of it."""
    committable = prepare(sink, branch)
    sink.commit(committable)
    state = sink._finisher.describe([branch.name])[branch.name]
    assert state.state == "Empty"
    assert is_complete(KafkaBranch.of(committable), state, commit=True)
