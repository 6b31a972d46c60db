"""What the Kafka sink does on every broker: one with an EndTxn that fences, and older ones."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from kafka import errors
from kafka.admin import KafkaAdminClient

from integration_tests.support.kafka import (
    DEADLINE_S,
    ROWS,
    VALUE,
    World,
    committed_state,
    eventually,
    fenced,
    made,
    prepare,
    prepare_three,
    send,
    write_and_prepare,
)
from sparkonce.errors import (
    CommitUnresolvedError,
    ConfigurationError,
    PreparedBranchLostError,
    SinkError,
)
from sparkonce.model import BranchId, Committable, Owner
from sparkonce.sinks import KafkaSink
from sparkonce.sinks.kafka.branch import KafkaBranch
from sparkonce.sinks.kafka.finishing.finisher import Finisher


def test_each_verb_and_what_a_reader_sees(sink: KafkaSink, branch: BranchId, world: World) -> None:
    """Nothing is visible before `commit`; after it every row is, once, even after further calls."""
    handle = sink.beginTransaction(branch)
    assert world.state(branch) == "Empty"
    sink.write(handle, ROWS)
    sink.write(handle, ROWS.slice(0, 0))
    committable = sink.preCommit(handle)
    assert (world.state(branch), world.values()) == ("Ongoing", [])
    for _ in range(3):
        sink.commit(committable)
        world.sees("1", "2", "3")
    world.becomes(branch, committed_state(sink))


def test_committable_tells_the_truth(sink: KafkaSink, branch: BranchId, world: World) -> None:
    """Producer id and epoch are the coordinator's; `safe_until` is before its timeout."""
    before = time.time()
    committable = prepare(sink, branch)
    admin = KafkaAdminClient(bootstrap_servers=world.server.bootstrap_servers)
    described = admin.describe_transactions([branch.name])[branch.name]
    cluster_id = admin.describe_cluster()["cluster_id"]
    admin.close()
    payload = committable.payload
    assert (payload["producer_id"], payload["producer_epoch"]) == (
        described.producer_id,
        described.producer_epoch,
    )
    assert (payload["transactional_id"], payload["cluster_id"], payload["marker_topics"]) == (
        branch.name,
        cluster_id,
        [world.topic],
    )
    assert described.transaction_timeout_ms == 900_000
    assert committable.safe_until is not None
    assert before + 840 <= committable.safe_until <= described.transaction_start_time_ms / 1e3 + 840
    assert Committable.from_json(json.loads(json.dumps(committable.to_json()))) == committable
    sink.abort(committable)


def test_abort_at_each_stage(sink: KafkaSink, owner: Owner, world: World) -> None:
    """Begun, written or prepared: nothing becomes visible and no transaction stays open."""
    begun, written, prepared, named = (BranchId(owner, 7, 1, "kafka", 0, i) for i in range(4))
    sink.discard(sink.beginTransaction(begun))
    handle = sink.beginTransaction(written)
    sink.write(handle, ROWS)
    sink.discard(handle)
    sink.discard(handle)
    committable = prepare(sink, prepared)
    sink.abort(committable)
    prepare(sink, named)
    sink.abort(named)
    for each in (begun, written, named, committable, committable):
        sink.abort(each)
    for each in (prepared, named):
        world.becomes(each, "CompleteAbort")
    assert list(sink.find_branches(owner)) == []
    assert world.values() == []


def test_abort_after_commit(sink: KafkaSink, branch: BranchId, world: World) -> None:
    """It changes nothing, whether by committable or by name."""
    committable = prepare(sink, branch)
    sink.commit(committable)
    sink.abort(committable)
    sink.abort(branch)
    world.sees("1", "2", "3")
    world.becomes(branch, committed_state(sink))
    sink.abort(committable)
    sink.abort(branch)
    sink.commit(committable)
    world.sees("1", "2", "3")


def test_abort_of_a_younger_holder_of_the_name(
    sink: KafkaSink, branch: BranchId, world: World
) -> None:
    """An old committable aborts only its own transaction, never a newer one of that name."""
    old = prepare(sink, branch)
    sink.abort(old)
    world.becomes(branch, "CompleteAbort")
    young = prepare(sink, branch)
    sink.abort(old)
    assert world.state(branch) == "Ongoing"
    sink.commit(young)
    world.sees("1", "2", "3")


def test_branch_without_rows(
    sink: KafkaSink, make_sink: Callable[..., KafkaSink], owner: Owner, world: World
) -> None:
    """It prepares and commits like any other, even if no topic was ever named."""
    for attempt, each in enumerate((sink, make_sink(None))):
        committable = each.preCommit(
            each.beginTransaction(BranchId(owner, 1, 1, "kafka", 0, attempt))
        )
        each.commit(committable)
        each.commit(committable)
        each.abort(committable)
    assert world.values() == []


def test_many_branches_from_many_threads(sink: KafkaSink, owner: Owner, world: World) -> None:
    """One sink commits from several threads at once, twice each."""
    committables = [prepare(sink, BranchId(owner, 7, 1, "kafka", 0, i)) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(sink.commit, committables * 2))
    world.sees(*["1", "2", "3"] * 8)


def test_lost_branch_keeps_no_other_of_its_batch_back(
    sink: KafkaSink, owner: Owner, world: World
) -> None:
    """Each branch has its own outcome, in the order of the arguments."""
    committables = prepare_three(sink, owner)
    sink.abort(committables[1])
    first, second, third = sink.commit_many(committables)
    assert (first, third) == (None, None)
    assert isinstance(second, PreparedBranchLostError)
    world.sees("1", "3")


WRITER = """
import json, pickle, sys
sink, branch, rows = pickle.load(sys.stdin.buffer)
handle = sink.beginTransaction(branch)
sink.write(handle, rows)
print(json.dumps(sink.preCommit(handle).to_json()), flush=True)
sys.stdin.buffer.read()
"""


def test_writer_killed_after_it_prepared(sink: KafkaSink, branch: BranchId, world: World) -> None:
    """Another process commits the branch of a process that got SIGKILL."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER + "input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(pickle.dumps((sink, branch, ROWS)))
        process.stdin.flush()
        committable = Committable.from_json(json.loads(process.stdout.readline()))
        process.kill()
    assert (world.state(branch), world.values()) == ("Ongoing", [])
    sink.commit(committable)
    sink.commit(committable)
    world.sees("1", "2", "3")


def test_broker_killed_between_prepare_and_commit(
    sink: KafkaSink, branch: BranchId, world: World
) -> None:
    """While it is down the commit is unresolved; afterwards the same commit takes effect once."""
    committable = prepare(sink, branch)
    sink._patience_s = 0.5
    world.server.kill()
    try:
        with pytest.raises(CommitUnresolvedError, match="asked for 0.5 s") as unresolved:
            sink.commit(committable)
        assert unresolved.value.branch_id == branch
        with pytest.raises(SinkError, match="cannot be aborted"):
            sink.abort(committable)
        with pytest.raises(SinkError, match="cannot be listed"):
            list(sink.find_branches(branch.owner))
    finally:
        world.server.start()
    sink._patience_s = DEADLINE_S
    sink.commit(committable)
    world.sees("1", "2", "3")
    sink.commit(committable)
    world.sees("1", "2", "3")


def test_broker_killed_after_commit(sink: KafkaSink, branch: BranchId, world: World) -> None:
    """A commit that got its response survives SIGKILL, and can be repeated."""
    committable = prepare(sink, branch)
    sink.commit(committable)
    world.server.kill()
    world.server.start()
    sink._patience_s = DEADLINE_S
    sink.commit(committable)
    world.sees("1", "2", "3")


def test_where_kafka_keeps_the_proof(sink: KafkaSink, owner: Owner, world: World) -> None:
    """We compute the same partition of a group's offsets as the coordinator reports."""
    for attempt in range(10):
        branch = BranchId(owner, 7, 1, "kafka", 0, attempt)
        committable = prepare(sink, branch)
        with KafkaAdminClient(bootstrap_servers=world.server.bootstrap_servers) as admin:
            held = admin.describe_transactions([branch.name])[branch.name].topic_partitions
        (number,) = [p.partition for p in held if p.topic == "__consumer_offsets"]
        assert sink._finisher.offsets_partition(branch.name) == {"__consumer_offsets": [number]}
        assert committable.payload["partitions"] == {world.topic: [0]}
        sink.abort(committable)


@pytest.mark.parametrize("end_version", [4, 5])
def test_answer_of_the_commit_lost(
    sink: KafkaSink,
    branch: BranchId,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    end_version: int,
) -> None:
    """The broker commits and its response is lost: after a retry the branch is committed once."""
    sink.close()
    sink._finisher = Finisher(sink._settings, end_version)
    real, calls = Finisher.end, []

    def lose_the_first_answer(self: Finisher, *args: Any, **kwargs: Any) -> bool:
        answer = real(self, *args, **kwargs)
        calls.append(args)
        if len(calls) == 1:
            raise errors.KafkaConnectionError("the answer was lost")
        return answer

    monkeypatch.setattr(Finisher, "end", lose_the_first_answer)
    committable = prepare(sink, branch)
    sink.commit(committable)
    assert len(calls) == 2
    world.sees("1", "2", "3")


@pytest.mark.parametrize("reinitialised", [False, True])
def test_committed_by_somebody_else_meanwhile(
    sink: KafkaSink, branch: BranchId, world: World, reinitialised: bool
) -> None:
    """Fenced by the commit, or initialised again since: the marker proves the commit."""
    committable = prepare(sink, branch)
    payload = committable.payload
    finisher = Finisher(sink._settings)
    finisher.end(branch.name, payload["producer_id"], payload["producer_epoch"], commit=True)
    world.becomes(branch, "CompleteCommit")
    if reinitialised:
        finisher.fence(branch.name)
        world.becomes(branch, "Empty")
    finisher.close()
    sink.commit(committable)
    world.sees("1", "2", "3")


def test_transaction_that_timed_out(
    make_sink: Callable[..., KafkaSink], branch: BranchId, world: World
) -> None:
    """It is proven lost; the error names batch, sink, transaction, timeout and the next step."""
    sink = make_sink(world.topic, transaction_timeout_s=1)
    sink.validate(ROWS.schema)
    committable = prepare(sink, branch)
    world.becomes(branch, "CompleteAbort")
    with pytest.raises(PreparedBranchLostError) as lost:
        sink.commit(committable)
    for words in ("batch 7", "'kafka'", branch.name, "timed out", "1 s", "transaction_timeout_s="):
        assert words in str(lost.value)
    assert pickle.loads(pickle.dumps(lost.value)).branch_id == branch  # noqa: S301
    assert world.values() == []


@pytest.mark.parametrize("by", ["abort", "fence"])
def test_transaction_ended_from_outside(
    sink: KafkaSink, branch: BranchId, world: World, by: str
) -> None:
    """Aborted elsewhere, or its name initialised again: proven lost, not assumed committed."""
    committable = prepare(sink, branch)
    if by == "abort":
        sink.abort(branch)
    else:
        finisher = Finisher(sink._settings)
        eventually(lambda: fenced(finisher, branch), "initialised again")
        finisher.close()
    with pytest.raises(PreparedBranchLostError):
        sink.commit(committable)
    assert world.values() == []


def abort_by_hand(sink: KafkaSink, branch: KafkaBranch, partitions: dict[str, list[int]]) -> None:
    """Abort it in single partitions, like `kafka-transactions.sh`, without the coordinator."""
    sink._finisher.write_markers(
        branch.transactional_id,
        partitions,
        branch.producer_id,
        branch.producer_epoch,
        commit=False,
    )


def by_hand(sink: KafkaSink, topic: str, committable: Committable) -> None:
    abort_by_hand(sink, KafkaBranch.of(committable), {topic: [1]})


def made_anew(sink: KafkaSink, topic: str, _: Committable, partitions: int = 3) -> None:
    admin = AdminClient({"bootstrap.servers": sink._settings.bootstrap_servers})
    admin.delete_topics([topic])[topic].result(30)
    eventually(lambda: made(admin, topic, partitions), "made anew")
    eventually(lambda: not sink._finisher.topic(topic).error, "known")


def made_smaller(sink: KafkaSink, topic: str, committable: Committable) -> None:
    made_anew(sink, topic, committable, 1)


@pytest.mark.parametrize("how", [KafkaSink.commit_many, KafkaSink.commit])
@pytest.mark.parametrize("tear", [by_hand, made_anew, made_smaller])
def test_branch_of_which_a_part_is_gone(
    make_sink: Callable[..., KafkaSink],
    owner: Owner,
    world: World,
    fresh_topic: Callable[..., str],
    tear: Callable[[KafkaSink, str, Committable], None],
    how: Callable[..., Any],
) -> None:
    """EndTxn would commit only the rest: instead it is proven lost, and rewritten as a whole."""
    topic = fresh_topic(3)
    sink = make_sink(None)
    torn, whole = (BranchId(owner, 7, 1, "kafka", 0, attempt) for attempt in range(2))
    rows = pa.RecordBatch.from_pydict(
        {
            "value": ["1", "2", "3"],
            "topic": [topic, world.topic, topic],
            "partition": pa.array([1, 0, 2], pa.int32()),
        }
    )
    beside = prepare(sink, whole, ROWS.append_column("topic", pa.array([world.topic] * 3)))
    prepared = prepare(sink, torn, rows)
    tear(sink, topic, prepared)
    if how == KafkaSink.commit_many:
        lost, kept = sink.commit_many([prepared, beside])
        assert kept is None
    else:
        sink.commit(beside)
        with pytest.raises(PreparedBranchLostError) as raised:
            sink.commit(prepared)
        lost = raised.value
    assert isinstance(lost, PreparedBranchLostError)
    for words in (f"'{topic}': [1", "manually", "sparkonce orphans JOB --abort"):
        assert words in str(lost)
    world.becomes(torn, "CompleteAbort")
    world.sees("1", "2", "3")
    assert world.values(topic) == []
    with pytest.raises(PreparedBranchLostError):
        sink.commit(prepared)
    sink.commit(prepare(sink, replace(torn, write_pass=1), rows.drop_columns(["partition"])))
    world.sees("1", "2", "2", "3")
    eventually(lambda: world.values(topic) == [b"1", b"3"], "written again")


def test_branch_that_was_aborted_by_hand_while_it_was_written(
    sink: KafkaSink, branch: BranchId, world: World
) -> None:
    """Rows written afterwards open it again: they do not become visible without the others."""
    handle = sink.beginTransaction(branch)
    sink.write(handle, ROWS)
    assert handle._producer is not None
    handle._producer.flush(30)
    (found,) = sink.find_branches(branch.owner)
    abort_by_hand(sink, KafkaBranch.of(found), {world.topic: [0]})
    committable = write_and_prepare(sink, handle, ROWS)
    prepared = KafkaBranch.of(committable)
    assert sink._finisher.open_partitions(prepared.partitions, prepared.producer_id)
    with pytest.raises(PreparedBranchLostError, match="manually"):
        sink.commit(committable)
    assert world.values() == []


def test_rows_that_are_deleted_before_their_commit(
    sink: KafkaSink, branch: BranchId, world: World
) -> None:
    """By DeleteRecords or by retention: they were deleted on purpose, so none are rewritten."""
    committable = prepare(sink, branch)
    admin = AdminClient({"bootstrap.servers": world.server.bootstrap_servers})
    (deleted,) = admin.delete_records([TopicPartition(world.topic, 0, -1)]).values()
    deleted.result(30)
    sink.commit(committable)
    world.becomes(branch, committed_state(sink))
    assert world.values() == []


@pytest.mark.parametrize("end_version", [4, 5])
def test_zombie_that_writes_on_after_the_commit(
    sink: KafkaSink,
    branch: BranchId,
    world: World,
    fresh_topic: Callable[..., str],
    end_version: int,
) -> None:
    """An executor believed dead cannot add rows, and a second commit publishes nothing."""
    sink.close()
    sink._finisher = Finisher(sink._settings, end_version)
    handle = sink.beginTransaction(branch)
    sink.write(handle, ROWS)
    zombie = handle._producer
    committable = sink.preCommit(handle)
    sink.commit(committable)
    world.becomes(branch, committed_state(sink))
    other = fresh_topic(1)
    assert zombie is not None
    send(zombie, world.topic, b"zombie")
    send(zombie, other, b"zombie")
    with pytest.raises(KafkaException):  # noqa: PT012 - whichever notices first
        zombie.flush(30)
        zombie.send_offsets(branch.name, 8, "", [world.topic], 30)
    sink.commit(committable)
    world.sees("1", "2", "3")
    assert world.values(other) == []
    assert list(sink.find_branches(branch.owner)) == []


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("end_version", [4, 5])
def test_loser_that_writes_on_after_its_abort(
    sink: KafkaSink, branch: BranchId, world: World, end_version: int
) -> None:
    """Its rows are refused; they would block all readers, in a transaction that nobody can end."""
    sink.close()
    sink._finisher = Finisher(sink._settings, end_version)
    handle = sink.beginTransaction(branch)
    sink.write(handle, ROWS)
    loser = handle._producer
    assert loser is not None
    loser.flush(30)
    (found,) = sink.find_branches(branch.owner)
    assert sink.abort_many([found]) == [None]
    world.becomes(branch, "CompleteAbort")
    send(loser, world.topic, b"loser")
    with pytest.raises(KafkaException):  # noqa: PT012 - whichever notices first
        loser.flush(30)
        loser.send_offsets(branch.name, 8, "", [world.topic], 30)
    sink.commit(prepare(sink, replace(branch, attempt=1)))
    world.sees("1", "2", "3")


def test_orphans_of_one_owner(sink: KafkaSink, owner: Owner, world: World) -> None:
    """Found only for their owner and aborted by identity; readers are no longer blocked."""
    longer = Owner(owner.log_id, owner.query_id + "0")
    other_log = Owner("f" * 16, owner.query_id)
    mine = [BranchId(owner, 7, 1, name, 0, i) for i, name in enumerate(["orders", "orders-eu"])]
    theirs = [BranchId(each, 7, 1, "orders", 0, 0) for each in (longer, other_log)]
    for each in (*mine, *theirs):
        prepare(sink, each)
    stranger = Producer(
        {
            "bootstrap.servers": world.server.bootstrap_servers,
            "transactional.id": f"app-{owner.prefix}",
        }
    )
    stranger.init_transactions(30)
    stranger.begin_transaction()
    stranger.produce(world.topic, b"stranger")
    stranger.flush(30)
    found = {each.branch_id.name: each for each in sink.find_branches(owner)}
    assert set(found) == {each.name for each in mine}
    assert all(each.branch_id.batch_id is None for each in found.values())
    assert all(each.payload["partitions"] == {world.topic: [0]} for each in found.values())
    for orphan in found.values():
        sink.abort(orphan)
    for each in mine:
        world.becomes(each, "CompleteAbort")
    assert list(sink.find_branches(owner)) == []
    assert [world.state(each) for each in theirs] == ["Ongoing", "Ongoing"]
    stranger.commit_transaction(30)
    assert world.values() == []
    for each in theirs:
        sink.abort(each)
    world.sees("stranger")


def test_timeout_longer_than_the_broker_allows(
    make_sink: Callable[..., KafkaSink], topic: str
) -> None:
    """Refused, with both numbers. By default the sink uses the longest that the broker allows."""
    with pytest.raises(ConfigurationError, match=r"(?s)900\.001.*transaction\.max.*=900000"):
        make_sink(topic, transaction_timeout_s=900.001).validate(VALUE)
    sink = make_sink(topic)
    sink.validate(VALUE)
    assert sink._seen is not None
    assert sink._seen.timeout_ms == 900_000
