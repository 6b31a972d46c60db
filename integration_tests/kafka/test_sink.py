"""The Kafka sink on a real broker.

After each verb other clients check the result: a consumer that reads only committed records, and
the coordinator's own description of the transaction.
"""

from __future__ import annotations

import datetime as dt
import json
import pickle
import struct
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from kafka import errors
from kafka.partitioner.default import murmur2
from py4j.protocol import Py4JJavaError

from integration_tests.kafka import every_version
from integration_tests.support.collecting import cases_of
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
    write_and_prepare,
)
from sparkonce.errors import (
    CommitUnresolvedError,
    ConfigurationError,
    PrepareRejectedError,
    SinkUnavailableError,
)
from sparkonce.model import BranchId, Committable, Owner
from sparkonce.sinks import KafkaSink
from sparkonce.sinks.kafka.branch import KafkaBranch
from sparkonce.sinks.kafka.finishing import open_partitions, outcome, together
from sparkonce.sinks.kafka.finishing.finisher import Finisher
from sparkonce.sinks.kafka.writing import producer
from sparkonce.testing.services.process import log_tail

if TYPE_CHECKING:
    from confluent_kafka import Message
    from pyspark.sql import DataFrame, SparkSession

globals().update(cases_of(every_version))


INSTANT = pa.timestamp("us", tz="UTC")
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def written_by_spark(
    frame: DataFrame, world: World, fresh_topic: Callable[..., str], **options: str
) -> str:
    """A topic of five partitions with the rows, written by Spark's own sink and its producer.

    In two of about a hundred runs that producer got no response for two minutes, in a topic that
    had just been created; the cause is unknown. Then a warning shows what is known, and another
    topic is tried.
    """
    servers = {"kafka.bootstrap.servers": world.server.bootstrap_servers}
    for is_last in (False, True):
        topic = fresh_topic(5)
        writer = frame.write.format("kafka").options(**servers, **options, topic=topic)
        try:
            writer.option("kafka.client.id", topic).save()
        except Py4JJavaError as error:
            if is_last or "ms has passed since batch creation" not in str(error):
                raise
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                log = getattr(world.server.runtime, "log", None)  # of a local process
                warnings.warn(
                    f"Spark's own sink got no answer; the leaders of {topic} are "
                    f"{world.leaders(topic)}; the broker's log: {log and log_tail(log)}",
                    stacklevel=2,
                )
        else:
            break
    return topic


# -- verbs and their visibility --------------------------------------------------------------------


def test_proof_while_nothing_is_decided(sink: KafkaSink, branch: BranchId, world: World) -> None:
    """An open transaction's marker reads as undecided, never as absent; later it is there."""
    committable = prepare(sink, branch)
    with pytest.raises(errors.UnstableOffsetCommitError):
        sink._finisher.markers(branch.name, [world.topic])
    sink.commit(committable)
    world.becomes(branch, "CompleteCommit")
    assert sink._finisher.markers(branch.name, [world.topic]) == [(7, str(branch))]


@pytest.mark.parametrize("at_once", [outcome.TOGETHER, 2])
def test_branches_of_a_batch_are_committed_with_few_requests(
    sink: KafkaSink, owner: Owner, world: World, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """All together if nothing fails, and visible on return; a second call changes nothing."""
    committables = prepare_three(sink, owner)
    monkeypatch.setattr(outcome, "TOGETHER", at_once)
    assert world.values() == []
    with monkeypatch.context() as patch:
        patch.setattr(Finisher, "end", lambda *_args, **_kwargs: pytest.fail("one by one"))
        for _ in range(2):
            assert sink.commit_many(committables) == [None] * 3
            partitions = {world.topic: [0, 1]}
            for committable in committables:
                producer_id = committable.payload["producer_id"]
                assert not sink._finisher.open_partitions(partitions, int(str(producer_id)))
    world.sees("1", "2", "3")


def test_many_branches_are_committed_together_on_a_connection_in_use(
    sink: KafkaSink, owner: Owner, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection takes a request for each branch at the same time."""
    names = [BranchId(owner, 7, 1, "kafka", 0, i) for i in range(12)]
    committables = [prepare(sink, each) for each in names]
    assert len(sink._finisher.describe([each.name for each in names])) == 12
    monkeypatch.setattr(together, "PATIENCE_S", DEADLINE_S)
    assert sink._outcome.commit_together(committables) == {each.name for each in names}
    world.sees(*["1", "2", "3"] * 12)


@pytest.mark.parametrize("is_alone", [True, False])
def test_partitions_are_looked_at_closely_only_while_something_is_open(
    sink: KafkaSink,
    owner: Owner,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    is_alone: bool,
) -> None:
    """DescribeProducers lists each producer of the last day: megabytes where many tasks write."""
    asked = []
    real = open_partitions.DescribeProducersRequest

    def counted(**fields: Any) -> Any:
        asked.append(fields)
        return real(**fields)

    counted.TopicRequest = real.TopicRequest  # type: ignore[attr-defined]
    ours = prepare(sink, BranchId(owner, 7, 1, "kafka", 0, 0))
    if not is_alone:
        prepare(sink, BranchId(owner, 7, 1, "kafka", 0, 1))
    finisher = Finisher(sink._settings)
    branch = KafkaBranch.of(ours)
    assert finisher.open_partitions(branch.partitions, branch.producer_id) == branch.partitions
    monkeypatch.setattr(open_partitions, "DescribeProducersRequest", counted)
    for _ in range(2):
        sink.commit(ours)
    eventually(
        lambda: not finisher.open_partitions(branch.partitions, branch.producer_id), "visible"
    )
    asked.clear()
    assert finisher.open_partitions(branch.partitions, branch.producer_id) == {}
    assert bool(asked) is not is_alone
    assert sink._outcome.commit_together([ours]) == {ours.branch_id.name}
    finisher.close()


@pytest.mark.parametrize("failure", [errors.NotCoordinatorError(), KeyError("a partition")])
def test_batch_that_cannot_be_committed_together_is_committed_one_by_one(
    sink: KafkaSink,
    owner: Owner,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    failure: Exception,
) -> None:
    """Some branches may have ended by then: a second EndTxn changes nothing."""
    real = Finisher.commit_together

    def fail(self: Finisher, branches: Any) -> set[str]:
        real(self, branches[:1])
        raise failure

    monkeypatch.setattr(Finisher, "commit_together", fail)
    assert sink.commit_many(prepare_three(sink, owner)) == [None] * 3
    world.sees("1", "2", "3")


def still_open(patch: pytest.MonkeyPatch, branch: KafkaBranch) -> None:
    """One partition of the branch does not have its marker yet."""
    real = together.open_producers
    ((topic, numbers),) = branch.partitions.items()

    async def found(*asked: Any) -> set[tuple[str, int, int]]:
        return {*await real(*asked), (topic, numbers[-1], branch.producer_id)}

    patch.setattr(together, "open_producers", found)


def unstable(patch: pytest.MonkeyPatch, branch: KafkaBranch) -> None:
    """The marker of the branch's own group is not written yet."""
    real = together._ask_markers

    async def spoiled(answer: Any) -> Any:
        told = await answer
        for group in told.groups:
            if group.group_id == branch.transactional_id:
                group.topics[0].partitions[0].error_code = errors.UnstableOffsetCommitError.errno
        return told

    patch.setattr(together, "_ask_markers", lambda *asked: [spoiled(a) for a in real(*asked)])


@pytest.mark.parametrize("keep_back", [still_open, unstable])
def test_branch_that_is_not_proven_together_is_proven_by_itself(
    sink: KafkaSink,
    owner: Owner,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    keep_back: Callable[[pytest.MonkeyPatch, KafkaBranch], None],
) -> None:
    """Neither EndTxn's success nor the proof of the other branches proves this one."""
    committables = prepare_three(sink, owner)
    assert sink.commit_many(committables) == [None] * 3
    for committable in committables:
        world.becomes(committable.branch_id, committed_state(sink))
    first, kept_back, third = (committable.branch_id.name for committable in committables)
    ended = []
    real = Finisher.end

    def end(self: Finisher, name: str, *rest: Any, **more: Any) -> bool:
        ended.append(name)
        return real(self, name, *rest, **more)

    monkeypatch.setattr(Finisher, "end", end)
    keep_back(monkeypatch, KafkaBranch.of(committables[1]))
    assert sink._outcome.commit_together(committables) == {first, third}
    assert ended == []
    assert sink.commit_many(committables) == [None] * 3
    assert ended == [kept_back]
    world.sees("1", "2", "3")


def test_markers_that_stay_away_are_waited_for_one_by_one(
    sink: KafkaSink, owner: Owner, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EndTxn's success is not enough: a branch still open in a partition is not yet committed."""
    committables = prepare_three(sink, owner)
    monkeypatch.setattr(together, "PATIENCE_S", 0.05)
    seen = []

    async def nothing_visible(*_args: Any) -> set[str]:
        seen.append(1)
        return set()

    with monkeypatch.context() as patch:
        patch.setattr(together, "_visible", nothing_visible)
        assert sink._outcome.commit_together(committables) == set()
    assert len(seen) > 1
    assert sink.commit_many(committables) == [None] * 3
    world.sees("1", "2", "3")


# -- crashes ---------------------------------------------------------------------------------------


def test_outage_is_one_line_when_it_begins_and_one_when_it_ends(
    sink: KafkaSink,
    branch: BranchId,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In the driver, which commits and validates, and in a task. Both clients log nothing."""
    monkeypatch.setattr(producer, "CONNECT_TIMEOUT_S", 2.0)
    committable = prepare(sink, branch)
    sink._patience_s = 4.0
    capfd.readouterr()
    world.server.kill()
    try:
        with pytest.raises(CommitUnresolvedError):
            sink.commit(committable)
        with pytest.raises(SinkUnavailableError, match="brokers up"):
            sink.validate(ROWS.schema)
        with pytest.raises(PrepareRejectedError):
            sink.beginTransaction(replace(branch, attempt=1))
        told = list(caplog.messages)  # from the driver, the task, and clients of other tests
        assert 2 <= len(told) <= 6
        assert all("does not respond" in message for message in told)
        shown = capfd.readouterr().err.splitlines()  # clients of other tests may write there too
        assert not [line for line in shown if world.server.bootstrap_servers in line]
    finally:
        world.server.start()
    sink._patience_s = DEADLINE_S
    sink.validate(ROWS.schema)
    sink.commit(committable)
    again = caplog.messages[len(told) :]
    assert again
    assert all("responds again, after" in message for message in again)
    assert {record.name for record in caplog.records} == {"sparkonce"}


def test_threads_waiting_for_a_broker_that_is_down(sink: KafkaSink, owner: Owner) -> None:
    """Each thread fails when its own patience ends; they do not queue up for the connection."""
    server_down = KafkaSink("t", bootstrap_servers="127.0.0.1:1")
    server_down._patience_s = 0.3
    committable = prepare(sink, BranchId(owner, 1, 1, "kafka", 0, 0))
    raised: list[BaseException] = []

    def commit() -> None:
        with pytest.raises(CommitUnresolvedError) as unresolved:
            server_down.commit(committable)
        raised.append(unresolved.value)

    threads = [threading.Thread(target=commit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(raised) == 4
    sink.abort(committable)


def test_markers_written_by_hand(
    make_sink: Callable[..., KafkaSink],
    branch: BranchId,
    world: World,
    fresh_topic: Callable[..., str],
) -> None:
    """A broker that was killed may omit markers; with ours, rows and proof become visible.

    The fault occurs once in dozens of kills, so this test writes markers without the coordinator.
    """
    topic = fresh_topic(3)
    rows = pa.RecordBatch.from_pydict({"value": ["1", "2", "3"], "key": ["a", "b", "zz"]})
    sink = make_sink(topic)
    committable = prepare(sink, branch, rows)
    partitions, producer_id = committable.payload["partitions"], committable.payload["producer_id"]
    finisher = Finisher(sink._settings)
    assert finisher.open_partitions(partitions, producer_id) == partitions  # type: ignore[arg-type]
    everywhere = {**partitions, **finisher.offsets_partition(branch.name)}  # type: ignore[dict-item]
    finisher.write_markers(branch.name, everywhere, producer_id, 1, commit=True)  # type: ignore[arg-type]
    assert finisher.open_partitions(partitions, producer_id) == {}  # type: ignore[arg-type]
    finisher.write_markers(branch.name, everywhere, producer_id, 1, commit=True)  # type: ignore[arg-type]
    finisher.close()
    eventually(lambda: world.values(topic) == [b"1", b"2", b"3"], "rows visible")
    assert {m.partition() for m in world.messages(topic)} == set(partitions[topic])  # type: ignore[index,call-overload]
    eventually(lambda: marked(sink, branch, topic), "marker visible")


def test_markers_of_an_abort_written_by_hand(
    sink: KafkaSink, branch: BranchId, world: World
) -> None:
    """Its rows never appear, and neither they nor the proof block readers."""
    aborted = prepare(sink, branch)
    payload: Any = aborted.payload
    partitions, producer_id = payload["partitions"], payload["producer_id"]
    sink.commit(prepare(sink, replace(branch, attempt=1)))
    assert world.values() == []
    everywhere = {**partitions, **sink._finisher.offsets_partition(branch.name)}
    epoch = payload["producer_epoch"] + 1
    sink._finisher.write_markers(branch.name, everywhere, producer_id, epoch, commit=False)
    assert sink._finisher.open_partitions(partitions, producer_id) == {}
    world.sees("1", "2", "3")

    def is_read() -> bool:
        try:
            return not sink._finisher.markers(branch.name, [world.topic])
        except errors.UnstableOffsetCommitError:
            return False

    eventually(is_read, "no marker")
    sink.abort(aborted)
    world.sees("1", "2", "3")


def test_markers_written_by_hand_after_the_coordinator_moved(
    sink: KafkaSink, branch: BranchId, world: World
) -> None:
    """Partitions remember the coordinator's epoch for each producer, and refuse an older one."""
    world.server.kill()
    world.server.start()
    sink._patience_s = DEADLINE_S
    sink.commit(prepare(sink, branch))
    later = replace(branch, batch_id=8)
    payload: Any = prepare(sink, later).payload
    partitions, producer_id = payload["partitions"], payload["producer_id"]
    everywhere = {**partitions, **sink._finisher.offsets_partition(branch.name)}
    epoch = payload["producer_epoch"] + 1
    sink._finisher.write_markers(branch.name, everywhere, producer_id, epoch, commit=True)
    assert sink._finisher.open_partitions(partitions, producer_id) == {}
    world.sees(*"112233")
    eventually(lambda: marked(sink, later, world.topic), "marker visible")


def test_time_before_the_first_row(sink: KafkaSink, branch: BranchId, world: World) -> None:
    """Until the first row arrives, no clock runs, and librdkafka's events do not pile up."""
    handle = sink.beginTransaction(branch)

    def is_polled() -> bool:
        sink.idle(handle)
        return handle._reports.statistics is not None

    eventually(is_polled, "statistics are taken")
    handle._began_at -= 86_400
    handle._deadline -= 86_400
    sink.write(handle, ROWS)
    committable = sink.preCommit(handle)
    assert committable.safe_until is not None
    assert committable.safe_until > time.time()
    sink.commit(committable)
    world.sees("1", "2", "3")


def marked(sink: KafkaSink, branch: BranchId, topic: str) -> bool:
    try:
        return sink._finisher.markers(branch.name, [topic]) == [(branch.batch_id, str(branch))]
    except errors.UnstableOffsetCommitError:
        return False


# -- lost responses, lost branches, zombies --------------------------------------------------------


def test_fresh_batch_is_committed_with_no_look_before(
    sink: KafkaSink, branch: BranchId, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that this process has just received needs no further request."""
    committable = prepare(sink, branch)
    sink.vote(branch, [committable])
    monkeypatch.setattr(Finisher, "closed", lambda *_: pytest.fail("looked"))
    monkeypatch.setattr(together, "PATIENCE_S", DEADLINE_S)
    assert sink.commit_many([committable]) == [None]
    world.sees("1", "2", "3")


def test_one_of_its_topics_is_made_anew_after_the_commit(
    make_sink: Callable[..., KafkaSink],
    branch: BranchId,
    world: World,
    fresh_topic: Callable[..., str],
) -> None:
    """The proof in its other topic still holds, as do the rows there: nothing is rewritten."""
    first, second = sorted([world.topic, fresh_topic(1)])
    rows = pa.RecordBatch.from_pydict({"value": ["1", "2"], "topic": [first, second]})
    sink = make_sink(None)
    sink.validate(rows.schema)
    committable = prepare(sink, branch, rows)
    sink.commit(committable)
    eventually(lambda: world.values(second) == [b"2"], "visible")
    admin = AdminClient({"bootstrap.servers": world.server.bootstrap_servers})
    admin.delete_topics([first])[first].result(30)
    eventually(lambda: bool(sink._finisher.topic(first).error), "deleted")
    sink.commit(committable)
    eventually(lambda: made(admin, first), "made anew")
    for _ in range(2):  # the coordinator forgets the commit, too
        eventually(lambda: fenced(sink._finisher, branch), "initialised again")
    sink.commit(committable)
    assert (world.values(first), world.values(second)) == ([], [b"2"])


def test_another_cluster_at_the_same_address(sink: KafkaSink, branch: BranchId) -> None:
    """It does not know the branch, which proves nothing: unresolved, naming both clusters."""
    committable = prepare(sink, branch)
    sink.abort(committable)
    elsewhere = Committable(
        branch,
        {**committable.payload, "cluster_id": "elsewhere", "transactional_id": "unheard-of"},
    )
    with pytest.raises(CommitUnresolvedError, match="prepared on elsewhere"):
        sink.commit(elsewhere)


# -- delivery errors -------------------------------------------------------------------------------


def big_rows(size: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"value": ["small", "x" * size, "small"]})


def nothing_open_after_a_sweep(sink: KafkaSink, owner: Owner) -> bool:
    """`discard` may precede the first row at the broker; then the sweep finds the transaction."""
    found = list(sink.find_branches(owner))
    for orphan in found:
        sink.abort(orphan)
    return not found


@pytest.mark.parametrize("extra", [{}, {"timestamp": dt.datetime(2026, 1, 1, tzinfo=dt.UTC)}])
@pytest.mark.parametrize("by", ["broker", "producer"])
def test_record_too_large(
    make_sink: Callable[..., KafkaSink],
    branch: BranchId,
    world: World,
    by: str,
    extra: dict[str, Any],
) -> None:
    """Rejected, by client or broker; the rows next to it never become visible either."""
    topic = f"{world.topic}-small"
    admin = AdminClient({"bootstrap.servers": world.server.bootstrap_servers})
    limit = "1000" if by == "broker" else "10000000"
    admin.create_topics([NewTopic(topic, 1, 1, config={"max.message.bytes": limit})])[topic].result(
        timeout=30
    )
    sink = make_sink(topic, config={"compression.type": "none"})
    rows = big_rows(5_000 if by == "broker" else 2_000_000)
    for name, value in extra.items():
        rows = rows.append_column(name, pa.array([value] * 3, pa.timestamp("us", tz="UTC")))
    sink.validate(rows.schema)
    handle = sink.beginTransaction(branch)
    with pytest.raises(PrepareRejectedError, match=f"(?s){topic}.*max.message.bytes") as rejected:
        write_and_prepare(sink, handle, rows)
    assert rejected.value.branch_id == branch
    sink.discard(handle)
    eventually(lambda: nothing_open_after_a_sweep(sink, branch.owner), "nothing is left open")
    assert world.values(topic) == []


@pytest.mark.parametrize(
    ("config", "column", "advice"),
    [
        ({"max.message.bytes": "2000"}, {}, r"config=\{'batch.size'"),
        ({"cleanup.policy": "compact"}, {}, "cleanup.policy=compact accepts no row without a key"),
        *(
            (
                {"message.timestamp.before.max.ms": "60000"},
                {"timestamp": pa.array([None] * (200 - n) + [10**15] * n, INSTANT)},
                "message.timestamp.before.max.ms",
            )
            for n in (1, 2, 200)
        ),
    ],
    ids=["small batches only", "compacted", "one is too old", "two are", "all are"],
)
def test_topic_out_of_the_rows_that_does_not_take_them(
    make_sink: Callable[..., KafkaSink],
    branch: BranchId,
    world: World,
    config: dict[str, str],
    column: dict[str, pa.Array],
    advice: str,
) -> None:
    """The error names the setting to change; `validate` cannot know such a topic."""
    topic = f"{world.topic}-picky"
    admin = AdminClient({"bootstrap.servers": world.server.bootstrap_servers})
    admin.create_topics([NewTopic(topic, 1, 1, config=config)])[topic].result(timeout=30)
    sink = make_sink(None, config={"compression.type": "none"})
    values = {"value": ["x" * 500] * 200, "topic": [topic] * 200}
    rows = pa.RecordBatch.from_pydict({**values, **column})
    sink.validate(rows.schema)
    handle = sink.beginTransaction(branch)
    with pytest.raises(PrepareRejectedError, match=f"(?s){topic}.*{advice}"):
        write_and_prepare(sink, handle, rows)
    sink.discard(handle)
    eventually(lambda: nothing_open_after_a_sweep(sink, branch.owner), "nothing is left open")


def test_small_batches_for_a_topic_with_a_small_limit(
    make_sink: Callable[..., KafkaSink], branch: BranchId, world: World
) -> None:
    """Rows that fit individually arrive, though a full batch of them would be too large."""
    topic = f"{world.topic}-small"
    admin = AdminClient({"bootstrap.servers": world.server.bootstrap_servers})
    admin.create_topics([NewTopic(topic, 1, 1, config={"max.message.bytes": "2000"})])[
        topic
    ].result(timeout=30)
    sink = make_sink(topic, config={"compression.type": "none"})
    rows = pa.RecordBatch.from_pydict({"value": ["x" * 500] * 200})
    sink.validate(rows.schema)
    sink.commit(prepare(sink, branch, rows))
    eventually(lambda: len(world.values(topic)) == 200, "all rows visible")


def test_fenced_while_it_writes(sink: KafkaSink, branch: BranchId, world: World) -> None:
    """A younger producer took the name: rejected at once, and nothing is visible."""
    handle = sink.beginTransaction(branch)
    sink.write(handle, ROWS)
    younger = sink.beginTransaction(branch)
    with pytest.raises(PrepareRejectedError, match="(?i)fence|newer instance"):
        write_and_prepare(sink, handle, ROWS)
    sink.discard(handle)
    sink.discard(younger)
    assert world.values() == []


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"partition": pa.array([99], pa.int32())}, "fewer partitions"),
        ({"partition": pa.array([-2], pa.int32())}, "'partition' holds -2"),
        ({"topic": pa.array([None], pa.string())}, "'topic' is null"),
    ],
)
def test_row_that_has_no_place(
    make_sink: Callable[..., KafkaSink],
    branch: BranchId,
    world: World,
    columns: dict[str, pa.Array],
    words: str,
) -> None:
    """Rejected, naming the column or the topic."""
    sink = make_sink(None if "topic" in columns else world.topic)
    handle = sink.beginTransaction(branch)
    rows = pa.RecordBatch.from_pydict({"value": ["1"], **columns})
    with pytest.raises(PrepareRejectedError, match=words):
        write_and_prepare(sink, handle, rows)
    sink.discard(handle)


@pytest.mark.parametrize(
    "refused",
    [None, {"partition": pa.array([99, 99], pa.int32())}, {"topic": pa.array(["nowhere", ""])}],
    ids=["nothing", "a partition", "a topic"],
)
def test_discard_ends_the_transaction(
    sink: KafkaSink,
    branch: BranchId,
    world: World,
    refused: dict[str, pa.Array] | None,
) -> None:
    """Even with rows that were never sent, and without a sweep."""
    handle = sink.beginTransaction(branch)
    sink.write(handle, ROWS)
    assert handle._producer is not None
    assert handle._producer.flush(30) == 0
    if refused is None:
        sink.write(handle, ROWS)
    else:
        with pytest.raises(PrepareRejectedError):
            sink.write(handle, pa.RecordBatch.from_pydict({"value": ["4", "5"], **refused}))
    sink.discard(handle)
    world.becomes(branch, "CompleteAbort")
    assert world.values() == []


def test_partitions_of_a_topic_that_is_new_to_the_task(
    sink: KafkaSink, branch: BranchId, world: World, fresh_topic: Callable[..., str]
) -> None:
    """Rows that name a topic other than the sink's, and a partition of it, land there."""
    other = fresh_topic(2)
    columns = {"value": ["1", "2", "3"], "topic": [None, other, other]}
    places = pa.array([0, 0, 1], pa.int32())
    rows = pa.RecordBatch.from_pydict({**columns, "partition": places})
    sink.commit(prepare(sink, branch, rows))
    world.sees("1")
    eventually(lambda: len(world.messages(other)) == 2, "all rows visible")
    found = {message.value(): message.partition() for message in world.messages(other)}
    assert found == {b"2": 0, b"3": 1}


def test_task_that_ends_long_before_its_rows_would_be_sent(
    make_sink: Callable[..., KafkaSink],
    branch: BranchId,
    world: World,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It does not wait for `linger.ms`, which is most of the transaction timeout here."""
    sink = make_sink(world.topic, config={"linger.ms": 50_000}, transaction_timeout_s=60)
    sink.validate(ROWS.schema)
    committable = prepare(sink, branch)
    sink.vote(branch, [committable])
    assert not caplog.messages, "the write did not come near the timeout"
    sink.commit(committable)
    world.sees("1", "2", "3")


@pytest.mark.parametrize(
    "column",
    [
        {},
        {"partition": pa.array([0], pa.int32())},
        {"timestamp": pa.array([dt.datetime(2026, 1, 1, tzinfo=dt.UTC)], INSTANT)},
        {"headers": pa.array([[{"key": "h", "value": b"x"}]], HEADERS)},
    ],
    ids=lambda column: "".join(column) or "value",
)
def test_more_rows_than_the_queue_holds(
    make_sink: Callable[..., KafkaSink],
    branch: BranchId,
    world: World,
    column: dict[str, pa.Array],
) -> None:
    """Writing waits for room; every row arrives once and in order."""
    sink = make_sink(world.topic, config={"queue.buffering.max.messages": 1000})
    texts = [f"{i:05}" for i in range(20_000)]
    rows = pa.RecordBatch.from_pydict({"value": texts})
    for name, value in column.items():
        rows = rows.append_column(name, pa.concat_arrays([value] * len(texts)))
    sink.commit(prepare(sink, branch, rows))
    eventually(lambda: len(world.messages()) == len(texts), "all rows visible")
    assert [m.value() for m in world.messages()] == [text.encode() for text in texts]


def test_rows_whose_memory_is_used_again(sink: KafkaSink, branch: BranchId, world: World) -> None:
    """`write` copies the rows: they are sent unchanged even if the batch's memory changes."""
    offsets, memory = pa.py_buffer(struct.pack("<4i", 0, 2, 4, 6)), bytearray(b"112233")
    values = pa.Array.from_buffers(pa.binary(), 3, [None, offsets, pa.py_buffer(memory)])
    handle = sink.beginTransaction(branch)
    sink.write(handle, pa.RecordBatch.from_pydict({"value": values}))
    memory[:] = b"xxxxxx"
    sink.commit(sink.preCommit(handle))
    world.sees("11", "22", "33")


def test_row_whose_delivery_nobody_reports(
    sink: KafkaSink, branch: BranchId, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not count as delivered: the task is rejected, with both counts."""
    handle = sink.beginTransaction(branch)
    monkeypatch.setattr(handle._reports, "on_delivered", lambda *_: None)
    with pytest.raises(PrepareRejectedError, match=r"3 record\(s\) .* delivery of 0"):
        write_and_prepare(sink, handle, ROWS)
    sink.discard(handle)
    assert world.values() == []


# -- orphans ---------------------------------------------------------------------------------------


def test_write_that_comes_near_the_timeout_is_told(
    sink: KafkaSink, branch: BranchId, caplog: pytest.LogCaptureFixture
) -> None:
    committable = prepare(sink, branch)
    assert sink.vote(branch, [committable]) == [committable]
    assert not caplog.records
    long_ago = replace(KafkaBranch.of(committable), began_at=time.time() - 600)
    sink.vote(branch, [committable, long_ago.committable(branch)])
    (told,) = caplog.messages
    assert "took 600 s of the 900 s" in told
    sink.abort(committable)


# -- rows ------------------------------------------------------------------------------------------


def test_every_kind_of_row(
    make_sink: Callable[..., KafkaSink],
    branch: BranchId,
    world: World,
    fresh_topic: Callable[..., str],
) -> None:
    """Nulls, headers, timestamps, Unicode, partitions and topics arrive unchanged."""
    other = fresh_topic(3)
    when = dt.datetime(2026, 2, 3, 4, 5, 6, 789_000, tzinfo=dt.UTC)
    rows = pa.RecordBatch.from_pydict(
        {
            "value": pa.array(["grüße €", None, ""], pa.string()),
            "key": pa.array([None, "ключ", ""], pa.string()),
            "topic": pa.array([None, other, other], pa.string()),
            "partition": pa.array([None, 2, 1], pa.int32()),
            "headers": pa.array(
                [[{"key": "é", "value": b"\x00\xff"}, {"key": "n", "value": None}], None, []],
                HEADERS,
            ),
            "timestamp": pa.array([when, when, None], pa.timestamp("us", tz="UTC")),
        }
    )
    sink = make_sink(world.topic)
    sink.validate(rows.schema)
    before_ms = time.time() * 1000
    sink.commit(prepare(sink, branch, rows))
    eventually(lambda: len(world.messages(other)) == 2, "both rows of the other topic")
    (first,) = world.messages()
    assert (first.key(), first.value()) == (None, "grüße €".encode())
    assert first.headers() == [("é", b"\x00\xff"), ("n", None)]
    assert first.timestamp()[1] == round(when.timestamp() * 1000)
    by_partition = {m.partition(): m for m in world.messages(other)}
    assert (by_partition[2].key(), by_partition[2].value()) == ("ключ".encode(), None)
    assert by_partition[2].headers() is None
    assert (by_partition[1].key(), by_partition[1].value()) == (b"", b"")
    assert before_ms - 60_000 < by_partition[1].timestamp()[1] < before_ms + 60_000


@pytest.mark.parametrize("at_most", [producer.MARKERS, 1])
def test_topics_come_from_the_rows_alone(
    make_sink: Callable[..., KafkaSink],
    branch: BranchId,
    world: World,
    fresh_topic: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    at_most: int,
) -> None:
    """Without a topic of its own the sink puts a marker in each topic, up to a limit."""
    monkeypatch.setattr(producer, "MARKERS", at_most)
    topics = [fresh_topic(2), fresh_topic(1)]
    rows = pa.RecordBatch.from_pydict({"value": ["1", "2"], "topic": topics})
    sink = make_sink(None)
    sink.validate(rows.schema)
    committable = prepare(sink, branch, rows)
    assert committable.payload["marker_topics"] == sorted(topics)[:at_most]
    sink.commit(committable)
    for topic, value in zip(topics, [b"1", b"2"], strict=True):
        eventually(lambda t=topic, v=value: world.values(t) == [v], f"{topic} visible")


JAVA_MURMUR2 = {
    b"kafka": 0xD067CF64,
    b"giberish123456789": 0x8F552B0C,
    b"1234": 0x9FC97B14,
    b"234": 0xE7C009CA,
    b"34": 0x873930DA,
    b"4": 0x5A4B5CA1,
}
"""Hashes by Kafka's Java client."""


def test_keys_land_where_java_puts_them(
    make_sink: Callable[..., KafkaSink],
    branch: BranchId,
    world: World,
    fresh_topic: Callable[..., str],
) -> None:
    """The partition is Java's murmur2 of the key, for known hashes and for many more keys."""
    assert {key: murmur2(key) & 0xFFFFFFFF for key in JAVA_MURMUR2} == JAVA_MURMUR2
    topic = fresh_topic(7)
    keys = [*JAVA_MURMUR2, *(f"ключ-{i}".encode() for i in range(200))]
    rows = pa.RecordBatch.from_pydict({"key": pa.array(keys), "value": pa.array(keys)})
    sink = make_sink(topic)
    sink.commit(prepare(sink, branch, rows))
    eventually(lambda: len(world.messages(topic)) == len(keys), "all rows visible")
    assert {m.key(): m.partition() for m in world.messages(topic)} == {
        key: (murmur2(key) & 0x7FFFFFFF) % 7 for key in keys
    }


def test_keys_of_every_kind_land_where_sparks_own_sink_puts_them(
    spark: SparkSession,
    make_sink: Callable[..., KafkaSink],
    owner: Owner,
    world: World,
    fresh_topic: Callable[..., str],
) -> None:
    """Empty and binary keys too, sent in bulk or one by one; null keys stay null.

    With a null in the column `partition`, the key determines the partition.
    """
    keys = [None, b"", b"\0", b"\xff\xfe\0", *(bytes([i, 255 - i]) for i in range(50))]
    frame = spark.createDataFrame([(key, b"v") for key in keys], "key binary, value binary")
    native = written_by_spark(frame, world, fresh_topic)

    def placed(topic: str) -> list[tuple[str, int | None]]:
        """Every key and its partition; that of a null key is random."""
        found: list[Message] = []

        def all_visible() -> bool:
            found[:] = world.messages(topic)
            return len(found) == len(keys)

        eventually(all_visible, "all rows visible")
        places = ((m.key(), m.partition()) for m in found)
        return sorted((repr(key), None if key is None else place) for key, place in places)

    plain = pa.RecordBatch.from_pydict({"key": keys, "value": [b"v"] * len(keys)})
    times = pa.array([dt.datetime(2026, 1, 2, tzinfo=dt.UTC)] * len(keys))
    timed = plain.append_column("timestamp", times.cast(pa.timestamp("us", tz="UTC")))
    free = plain.append_column("partition", pa.nulls(len(keys), pa.int32()))
    expected = placed(native)
    for attempt, rows in enumerate((plain, timed, free)):
        ours = fresh_topic(5)
        sink = make_sink(ours)
        sink.validate(rows.schema)
        sink.commit(prepare(sink, BranchId(owner, 7, 1, "kafka", 0, attempt), rows))
        assert placed(ours) == expected


def test_from_spark_executors(
    spark: SparkSession,
    make_sink: Callable[..., KafkaSink],
    owner: Owner,
    world: World,
    fresh_topic: Callable[..., str],
) -> None:
    """Arrow batches of real Spark columns, and the same placement as Spark's own Kafka sink."""
    ours = fresh_topic(5)
    frame = spark.range(300).selectExpr(
        "cast(id % 40 as string) as key",
        "to_json(struct(id)) as value",
        "array(named_struct('key', 'id', 'value', cast(cast(id as string) as binary))) as headers",
    )
    native = written_by_spark(frame, world, fresh_topic, includeHeaders="true")
    sink = make_sink(ours)
    with_time = frame.selectExpr("*", "timestamp'2026-01-02 03:04:05Z' as timestamp")
    sink.validate(pa.schema(with_time.limit(1).toArrow().schema))

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        handle = sink.beginTransaction(
            BranchId(owner, 0, 1, "kafka", 0, context.taskAttemptId() % 65536)
        )
        for batch in batches:
            sink.write(handle, batch)
        summary = json.dumps(sink.preCommit(handle).to_json())
        yield pa.RecordBatch.from_pydict({"committable": [summary]})

    rows = with_time.mapInArrow(write, "committable string").collect()
    assert world.values(ours) == []
    for row in rows:
        sink.commit(Committable.from_json(json.loads(row["committable"])))
    eventually(lambda: len(world.messages(ours)) == 300, "all rows visible")

    def content(topic: str) -> list[tuple[Any, ...]]:
        found = world.messages(topic)
        return sorted((m.partition(), m.key(), m.value(), str(m.headers())) for m in found)

    assert content(ours) == content(native)
    assert {m.timestamp()[1] for m in world.messages(ours)} == {1767323045000}


# -- validate --------------------------------------------------------------------------------------


def test_unknown_topic(make_sink: Callable[..., KafkaSink], fresh_name: Callable[[], str]) -> None:
    """Refused, with its name and the command that creates it, and not created by the check."""
    name = fresh_name()
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=f"(?s){name}.*kafka-topics.sh.*--create"):
            make_sink(name).validate(VALUE)


def test_executors_learn_how_many_brokers_there_are(sink: KafkaSink) -> None:
    sink.validate(VALUE)
    assert sink._seen is not None
    assert sink._seen.brokers == 1


def test_brokers_that_do_not_answer(make_sink: Callable[..., KafkaSink]) -> None:
    """Unavailable, in bounded time, naming the setting and the next step: they may be starting."""
    sink = make_sink("orders", bootstrap_servers="127.0.0.1:1")
    sink._patience_s = 0.3
    with pytest.raises(SinkUnavailableError, match=r"(?s)127\.0\.0\.1:1.*brokers up"):
        sink.validate(VALUE)
    assert not [t for t in threading.enumerate() if t.name.startswith("kafka-io-sparkonce")]


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"no.such.setting": 1}, "no.such.setting"),
        ({"batch.num.messages": "many"}, "batch.num.messages"),
        ({"max.in.flight": 100}, "max.in.flight"),
        ({"linger.ms": object()}, "librdkafka"),
    ],
)
def test_setting_that_librdkafka_refuses(
    make_sink: Callable[..., KafkaSink], topic: str, config: dict[str, object], word: str
) -> None:
    """Found on the driver, before any task runs."""
    with pytest.raises(ConfigurationError, match=word):
        make_sink(topic, config=config).validate(VALUE)


def test_executor_that_reaches_another_cluster(
    sink: KafkaSink, branch: BranchId, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same address means another cluster there: rejected, naming both clusters."""
    assert sink._seen is not None
    real = sink._seen.cluster_id
    monkeypatch.setattr(sink, "_seen", type(sink._seen)("elsewhere", 60_000, None))
    with pytest.raises(PrepareRejectedError, match=f"elsewhere on the driver and {real}"):
        sink.beginTransaction(branch)


def test_executor_whose_brokers_do_not_answer(
    branch: BranchId, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rejected, naming the address."""
    monkeypatch.setattr("sparkonce.sinks.kafka.writing.producer.CONNECT_TIMEOUT_S", 0.2)
    with pytest.raises(PrepareRejectedError, match=r"127\.0\.0\.1:1"):
        KafkaSink("t", bootstrap_servers="127.0.0.1:1").beginTransaction(branch)


def test_sink_used_after_close_and_after_pickling(
    sink: KafkaSink, branch: BranchId, world: World
) -> None:
    """Both connect again on their own; what `validate` saw travels."""
    committable = prepare(pickle.loads(pickle.dumps(sink)), branch)  # noqa: S301 - our own bytes
    sink.close()
    sink.commit(committable)
    world.sees("1", "2", "3")
    sink.close()
    sink.close()
