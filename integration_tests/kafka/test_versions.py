"""Tests of `test_kafka_sink` on brokers whose EndTxn does not fence the producer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kafka.admin import KafkaAdminClient

from integration_tests.kafka import test_sink as contract
from sparkonce.model import BranchId, Owner
from sparkonce.sinks.kafka.branch import KafkaBranch
from sparkonce.sinks.kafka.finishing.states import is_complete
from sparkonce.testing.services import KafkaServer, ServiceError, start_services
from sparkonce.testing.services.java import java

NOT_FINISHED = "4.3 without its new features"
FIXTURES = ("topic", "world", "make_sink", "sink", "owner", "branch", "unverified")
TESTS = (
    contract.test_each_verb_and_what_a_reader_sees,
    contract.test_committable_tells_the_truth,
    contract.test_abort_at_each_stage,
    contract.test_abort_after_commit,
    contract.test_abort_of_a_younger_holder_of_the_name,
    contract.test_branch_without_rows,
    contract.test_many_branches_from_many_threads,
    contract.test_lost_branch_keeps_no_other_of_its_batch_back,
    contract.test_writer_killed_after_it_prepared,
    contract.test_broker_killed_between_prepare_and_commit,
    contract.test_broker_killed_after_commit,
    contract.test_where_kafka_keeps_the_proof,
    contract.test_answer_of_the_commit_lost,
    contract.test_committed_by_somebody_else_meanwhile,
    contract.test_transaction_that_timed_out,
    contract.test_transaction_ended_from_outside,
    contract.test_branch_of_which_a_part_is_gone,
    contract.test_branch_that_was_aborted_by_hand_while_it_was_written,
    contract.test_rows_that_are_deleted_before_their_commit,
    contract.test_zombie_that_writes_on_after_the_commit,
    contract.test_loser_that_writes_on_after_its_abort,
    contract.test_orphans_of_one_owner,
    contract.test_timeout_longer_than_the_broker_allows,
)
globals().update({name: getattr(contract, name) for name in FIXTURES})
globals().update({test.__name__: test for test in TESTS})


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
    sink: contract.KafkaSink,
    branch: contract.BranchId,
    world: contract.World,
) -> None:
    """A connected driver notices it, and commits a branch that was prepared before exactly once."""
    prepared = contract.prepare(sink, branch)
    assert not sink._finisher.end_fences()
    set_feature(kafka, "UPGRADE", 2)
    try:
        contract.eventually(sink._finisher.end_fences, "noticed")
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
    kafka: KafkaServer, sink: contract.KafkaSink, owner: Owner, world: contract.World
) -> None:
    """The newer EndTxn would leave transactions that nobody can end, and block readers."""
    set_feature(kafka, "UPGRADE", 2)
    try:
        sink.close()
        contract.eventually(sink._finisher.end_fences, "upgraded")
        together, alone, aborted = (
            contract.prepare(sink, BranchId(owner, 7, 1, "kafka", 0, i)) for i in range(3)
        )
    finally:
        set_feature(kafka, "SAFE_DOWNGRADE", 0)
    assert sink.commit_many([together]) == [None]
    sink.commit(alone)
    sink.abort(aborted)
    world.sees(*"112233")


def test_brokers_that_do_not_fence(sink: contract.KafkaSink) -> None:
    """The tests above must run on brokers without the EndTxn that fences."""
    assert not sink._finisher.end_fences()


def test_state_after_a_commit(sink: contract.KafkaSink, branch: BranchId) -> None:
    """Fencing replaces the state; a repair of the markers relies on what remains of it."""
    committable = contract.prepare(sink, branch)
    sink.commit(committable)
    state = sink._finisher.describe([branch.name])[branch.name]
    assert state.state == "Empty"
    assert is_complete(KafkaBranch.of(committable), state, commit=True)
