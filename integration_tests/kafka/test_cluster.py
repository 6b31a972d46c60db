"""The Kafka sink on three brokers that die, or stop being leader or coordinator, while it works.

Every topic has three replicas, and a write needs two of them. After each fault other clients check
that the committed rows are the source's rows, once each, that no transaction of ours is open, and
that no reader is blocked in any partition, including those of consumers' offsets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from confluent_kafka import IsolationLevel, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec
from kafka import errors
from kafka import structs as kafka_python
from kafka.admin import KafkaAdminClient

from integration_tests.support.kafka import (
    DEADLINE_S,
    World,
    eventually,
    fenced,
    prepare,
    write_and_prepare,
)
from sparkonce.errors import CommitUnresolvedError, PrepareRejectedError, SinkError
from sparkonce.model import BranchId, Owner
from sparkonce.sinks import KafkaSink
from sparkonce.sinks.kafka.connecting import client
from sparkonce.sinks.kafka.finishing import together, transactions
from sparkonce.sinks.kafka.finishing.finisher import Finisher
from sparkonce.testing.services import KafkaCluster, ServiceError, start_kafka_cluster
from sparkonce.testing.services.java import java

PARTITIONS = 6
PREFERRED = 0  # the kind of election in which the first replica becomes the leader
OFFSETS, TRANSACTIONS = "__consumer_offsets", "__transaction_state"


def rows(*values: str) -> pa.RecordBatch:
    """Each value in every partition."""
    return pa.RecordBatch.from_pydict(
        {
            "value": [f"{value}/{p}" for value in values for p in range(PARTITIONS)],
            "partition": pa.array([*range(PARTITIONS)] * len(values), pa.int32()),
        }
    )


def texts(*batches: pa.RecordBatch) -> list[str]:
    return [text for batch in batches for text in batch.column("value").to_pylist()]


def asking(cluster: KafkaCluster) -> KafkaAdminClient:
    """A client that leaks no sockets while a broker is down."""
    scheme = client._ClosingSocket.SCHEMES[0]
    return KafkaAdminClient(bootstrap_servers=cluster.bootstrap_servers, proxy_url=f"{scheme}://")


class ClusterWorld(World):
    """The cluster, examined and changed by clients that share nothing with the sink."""

    def __init__(self, cluster: KafkaCluster, topic: str) -> None:
        super().__init__(cluster, topic)  # type: ignore[arg-type] # only its address is used
        self.cluster = cluster
        self.admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})

    def leaders(self, topic: str | None = None) -> dict[int, int]:
        found = self.admin.list_topics(topic or self.topic, timeout=30)
        return {n: p.leader for n, p in found.topics[topic or self.topic].partitions.items()}

    def coordinator(self, branch: BranchId) -> int:
        with asking(self.cluster) as admin:
            return int(admin.describe_transactions([branch.name])[branch.name].coordinator_id)

    def open_transactions(self, owner: Owner) -> list[str]:
        with asking(self.cluster) as admin:
            return [
                f"{row.transactional_id}: {row.state}"
                for rows in admin.list_transactions().values()
                for row in rows
                if row.transactional_id.startswith(owner.prefix)
                and str(row.state.value) not in {"Empty", "CompleteCommit", "CompleteAbort"}
            ]

    def held_back(self) -> dict[TopicPartition, int]:
        """Partitions in which a reader of committed records cannot reach the end."""
        every = [TopicPartition(t, p) for t in (self.topic, OFFSETS) for p in self.leaders(t)]

        def ends(level: IsolationLevel) -> dict[Any, int]:
            asked = dict.fromkeys(every, OffsetSpec.latest())
            found = self.admin.list_offsets(asked, isolation_level=level)
            return {tp: future.result(30).offset for tp, future in found.items()}

        stable, last = ends(IsolationLevel.READ_COMMITTED), ends(IsolationLevel.READ_UNCOMMITTED)
        return {tp: last[tp] - stable[tp] for tp in every if stable[tp] < last[tp]}

    def is_settled(self, owner: Owner, *written: pa.RecordBatch) -> None:
        """Wait until exactly these rows are visible and nothing of ours is left open."""
        self.sees(*texts(*written))
        eventually(lambda: not self.open_transactions(owner), "no open transaction")
        eventually(lambda: not self.held_back(), lambda: f"readers held back: {self.held_back()}")

    def move_leader(self, topic: str, partition: int, node: int) -> None:
        """Make another replica the leader, with all brokers alive."""
        tp = kafka_python.TopicPartition(topic, partition)
        order = [node, *(each for each in self.cluster.brokers if each != node)]
        with asking(self.cluster) as admin:
            assert admin.alter_partition_reassignments({tp: order}) == {tp: None}
            eventually(lambda: not admin.list_partition_reassignments([tp]), "reassigned")
            admin.elect_leaders(PREFERRED, {topic: [partition]}, raise_errors=False)
        eventually(lambda: self.leaders(topic)[partition] == node, f"{node} leads {tp}")

    def elect_preferred_leaders(self) -> None:
        """A broker that was slow for a while leads nothing until then."""
        with asking(self.cluster) as admin:
            admin.elect_leaders(PREFERRED, raise_errors=False)

    def is_led_by_all(self) -> bool:
        """Whether each broker leads some partitions of the transactions; if not, ask for it."""
        if set(self.leaders(TRANSACTIONS).values()) == {*self.cluster.brokers}:
            return True
        self.elect_preferred_leaders()
        return False

    def is_whole(self) -> bool:
        """Whether every replica of every partition is in sync."""
        topics = self.admin.list_topics(timeout=30).topics.values()
        parts = [p for topic in topics for p in topic.partitions.values()]
        return all(set(p.isrs) == set(p.replicas) and p.leader > 0 for p in parts)


HALF_UPGRADED = "half upgraded"


@pytest.fixture(scope="module", params=["of one version"])
def cluster(request: pytest.FixtureRequest) -> Iterator[KafkaCluster]:
    try:
        java()
    except ServiceError as error:
        pytest.skip(f"kafka: {error}")
    mixed: dict[str, Any] = {
        "versions": {2: "3.9", 3: "3.9"},
        "format_flags": ("--release-version", "3.9"),
    }
    with start_kafka_cluster(
        {"auto.create.topics.enable": "false"},
        **(mixed if request.param == HALF_UPGRADED else {}),
    ) as cluster:
        yield cluster


@pytest.fixture
def kafka(cluster: KafkaCluster) -> KafkaCluster:
    """All brokers are up and in sync, and each leads its share of partitions."""
    cluster.start()
    world = ClusterWorld(cluster, "")
    eventually(world.is_whole, "every replica in sync")
    world.elect_preferred_leaders()
    world.close()
    return cluster


@pytest.fixture
def topic(fresh_topic: Callable[..., str]) -> str:
    return fresh_topic(PARTITIONS)


@pytest.fixture
def world(kafka: KafkaCluster, topic: str) -> Iterator[ClusterWorld]:
    world = ClusterWorld(kafka, topic)
    yield world
    world.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a call must last longer than the election of new leaders."""
    monkeypatch.setattr("sparkonce.sinks.kafka.sink.PATIENCE_S", DEADLINE_S)


# -- a broker dies, or leaders move ----------------------------------------------------------------


def test_broker_killed_between_prepare_and_commit(
    sink: KafkaSink, owner: Owner, world: ClusterWorld
) -> None:
    """It coordinates branches and leads partitions: other brokers take over, and all verbs work."""
    written = [rows(str(i)) for i in range(6)]
    branches = [BranchId(owner, 7, 1, "kafka", 0, i) for i in range(6)]
    prepared = [prepare(sink, b, r) for b, r in zip(branches, written, strict=True)]
    killed = world.coordinator(branches[0])
    assert killed in world.leaders().values()
    world.cluster.brokers[killed].kill()
    sink.commit(prepared[0])
    sink.abort(prepared[1])
    sink.abort(branches[2])
    assert sink.commit_many(prepared[3:]) == [None] * 3
    assert killed not in {world.coordinator(each) for each in branches}
    assert killed not in world.leaders().values()
    world.is_settled(owner, written[0], *written[3:])


def test_leader_killed_while_rows_are_written(
    sink: KafkaSink, branch: BranchId, world: ClusterWorld
) -> None:
    """Acknowledged rows are kept, and rows in flight are sent to the next leader."""
    written = [rows("acknowledged"), rows(*(f"late-{i}" for i in range(1000)))]
    handle = sink.beginTransaction(branch)
    sink.write(handle, written[0])
    assert handle._producer is not None
    assert handle._producer.flush(60) == 0
    killed = world.leaders()[0]
    world.cluster.brokers[killed].kill()
    sink.write(handle, written[1])
    sink.commit(sink.preCommit(handle))
    assert world.leaders()[0] != killed
    world.is_settled(branch.owner, *written)


def test_leaders_move_while_rows_are_written_and_after_prepare(
    sink: KafkaSink, owner: Owner, world: ClusterWorld
) -> None:
    """Leaders of data, transactions and offsets move: no request goes to the former leaders."""
    before, branch = (BranchId(owner, 7, 1, "kafka", 0, i) for i in range(2))
    written = [rows("before"), rows("first"), rows("second")]
    sink.commit(prepare(sink, before, written[0]))  # now the sink knows the leaders
    ((_, (ours,)),) = sink._finisher.offsets_partition(branch.name).items()

    def move_all() -> None:
        for topic, partition in ((world.topic, 0), (TRANSACTIONS, ours), (OFFSETS, ours)):
            world.move_leader(topic, partition, world.leaders(topic)[partition] % 3 + 1)

    handle = sink.beginTransaction(branch)
    sink.write(handle, written[1])
    assert handle._producer is not None
    assert handle._producer.flush(60) == 0
    move_all()
    sink.write(handle, written[2])
    prepared = sink.preCommit(handle)
    move_all()
    sink.commit(prepared)
    world.is_settled(owner, *written)


def told(sink: KafkaSink) -> str:
    """What doctor finds."""
    return "\n".join(finding.what for finding in sink.diagnose())


@pytest.mark.parametrize("down", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
def test_one_broker_stays_down(
    make_sink: Callable[..., KafkaSink], owner: Owner, world: ClusterWorld, down: int
) -> None:
    """Every verb works, also if the broker was down before the sink connected."""
    world.cluster.brokers[down].kill()
    sink = make_sink(world.topic)
    written = [rows(str(i)) for i in range(5)]
    sink.validate(written[0].schema)
    eventually(lambda: f"are down: {down}" in told(sink), lambda: told(sink))
    assert f"topic {world.topic}: min.insync.replicas=2" in told(sink)
    branches = [BranchId(owner, 7, 1, "kafka", 0, i) for i in range(5)]
    prepared = [prepare(sink, b, r) for b, r in zip(branches, written, strict=True)]
    sink.commit(prepared[0])
    assert sink.commit_many(prepared[1:3]) == [None] * 2
    sink.abort(prepared[3])
    (found,) = sink.find_branches(owner)
    assert found.branch_id.name == branches[4].name
    sink.abort(found)
    assert list(sink.find_branches(owner)) == []
    world.is_settled(owner, *written[:3])


# -- too few brokers -------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_brokers_down(
    make_sink: Callable[..., KafkaSink], owner: Owner, world: ClusterWorld
) -> None:
    """With too few brokers no outcome is claimed; later the prepared branch is committed once."""
    sink, hasty = make_sink(world.topic), make_sink(world.topic, transaction_timeout_s=4)
    for each in (sink, hasty):
        each.validate(rows("1").schema)
    kept, dropped, late, new = (BranchId(owner, 7, 1, "kafka", 0, i) for i in range(4))
    prepared, unwanted = prepare(sink, kept, rows("kept")), prepare(sink, dropped, rows("no"))
    handle = hasty.beginTransaction(late)
    hasty.write(handle, rows("early"))
    for node in (2, 3):
        world.cluster.brokers[node].kill()
    eventually(lambda: {*world.leaders().values()} == {1}, "only the last broker leads")
    eventually(lambda: "are down: 2, 3" in told(sink), lambda: told(sink))
    assert f"{world.topic} has 1 in-sync replica, and min.insync.replicas=2" in told(sink)
    sink._patience_s = 0.5
    with pytest.raises(
        CommitUnresolvedError, match="asked for 0.5 s.*(min.insync.replicas|REQUEST_TIMED_OUT)"
    ):
        sink.commit(prepared)
    with pytest.raises(SinkError, match="cannot be aborted.*min.insync.replicas"):
        sink.abort(unwanted)
    waits = f"(?s){world.topic}.*(min.insync.replicas|could not flush.*Connection refused)"
    with pytest.raises(PrepareRejectedError, match=waits):
        write_and_prepare(hasty, handle, rows("late"))
    hasty.discard(handle)
    with pytest.raises(PrepareRejectedError, match=f"(?s){world.topic}.*min.insync.replicas"):
        hasty.beginTransaction(new)
    assert world.values() == []
    world.cluster.start()
    sink._patience_s = DEADLINE_S
    sink.commit(prepared)
    for found in sink.find_branches(owner):
        sink.abort(found)
    world.is_settled(owner, rows("kept"))


# -- lost responses --------------------------------------------------------------------------------


def test_coordinator_killed_when_it_had_answered(
    sink: KafkaSink, branch: BranchId, world: ClusterWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit is decided and its response is lost: the next coordinator gives the same one."""
    prepared = prepare(sink, branch, rows("1"))
    real, killed = Finisher.end, []

    def lose_the_first_answer(self: Finisher, *args: Any, **kwargs: Any) -> bool:
        answer = real(self, *args, **kwargs)
        if not killed:
            killed.append(world.coordinator(branch))
            world.cluster.brokers[killed[0]].kill()
            raise errors.KafkaConnectionError("the answer was lost")
        return answer

    monkeypatch.setattr(Finisher, "end", lose_the_first_answer)
    sink.commit(prepared)
    assert killed
    assert world.coordinator(branch) != killed[0]
    world.is_settled(branch.owner, rows("1"))


@contextlib.contextmanager
def frozen(world: ClusterWorld, node: int) -> Iterator[None]:
    """A broker that keeps its connections open and does not respond."""
    pid = world.cluster.brokers[node].runtime.pid  # type: ignore[attr-defined] # a local process
    process = psutil.Process(pid)
    process.suspend()
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def test_coordinator_killed_before_it_could_answer(
    sink: KafkaSink, branch: BranchId, world: ClusterWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EndTxn was sent but never read: the sink asks the next coordinator, which commits."""
    prepared = prepare(sink, branch, rows("1"))
    old = world.coordinator(branch)
    sink._finisher.describe([branch.name])  # opens a connection to the coordinator
    asked = []

    async def first_the_old_one(admin: Any, name: str) -> Any:
        asked.append(name)
        return old if len(asked) == 1 else await real(admin, name)

    async def newest(*_: Any) -> int:
        return together.FENCING_VERSION

    real = transactions._coordinator
    monkeypatch.setattr(transactions, "_coordinator", first_the_old_one)
    monkeypatch.setattr(Finisher, "_version_to_end", newest)
    sink.vote(branch, [prepared])  # so that EndTxn is its first request
    admin, _ = sink._finisher._connection._connected()
    connection = admin._manager._conns[old]
    with frozen(world, old), ThreadPoolExecutor(1) as pool:
        committing = pool.submit(sink.commit, prepared)
        eventually(lambda: len(connection.in_flight_requests) > 0, "EndTxn is on its way")
        assert asked == [branch.name]
        world.cluster.brokers[old].kill()
        committing.result(DEADLINE_S)
    assert len(asked) > 1
    world.is_settled(branch.owner, rows("1"))


# -- many branches ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("when", "count"),
    [
        ("before EndTxn", 12),
        pytest.param("before EndTxn", 60, marks=pytest.mark.slow),
        pytest.param("after EndTxn", 60, marks=pytest.mark.slow),
    ],
)
def test_broker_killed_while_a_batch_is_committed(
    sink: KafkaSink,
    owner: Owner,
    world: ClusterWorld,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
    count: int,
) -> None:
    """Several brokers coordinate the branches; each branch is committed once."""
    branches = [BranchId(owner, 7, 1, "kafka", 0, i) for i in range(count)]
    written = [rows(str(i)) for i in range(count)]
    prepared = [prepare(sink, branches[0], written[0])]
    eventually(world.is_led_by_all, "each broker coordinates some transactions")
    with ThreadPoolExecutor(6) as pool:
        prepared += pool.map(lambda b, r: prepare(sink, b, r), branches[1:], written[1:])
    coordinators = {world.coordinator(each) for each in branches[:12]}
    assert len(coordinators) > 1, coordinators
    real, ended = together._end, []

    async def kill(*args: Any) -> set[str]:
        if when == "before EndTxn":
            world.cluster.brokers[2].kill()
            ended.append(None)
        answer = await real(*args)
        if when == "after EndTxn":
            world.cluster.brokers[2].kill()
            ended.append(len(answer))
        return answer

    monkeypatch.setattr(together, "_end", kill)
    assert sink.commit_many(prepared) == [None] * count
    assert ended == [None if when == "before EndTxn" else count]
    world.is_settled(owner, *written)


# -- brokers with different settings ---------------------------------------------------------------


@contextlib.contextmanager
def restarted(world: ClusterWorld, node: int, setting: str) -> Iterator[None]:
    """Restart a broker with a setting of its own, as in the middle of a rolling change."""
    broker = world.cluster.brokers[node]
    command_line = psutil.Process(broker.runtime.pid).cmdline()  # type: ignore[attr-defined]
    properties = Path(command_line[-1])
    before = properties.read_text()
    properties.write_text(f"{before}{setting}\n")
    broker.kill()
    broker.start()
    yield
    properties.write_text(before)
    broker.kill()
    broker.start()


def test_brokers_in_the_middle_of_a_change(sink: KafkaSink, world: ClusterWorld) -> None:
    """The shortest time of all brokers applies, since any of them may coordinate a branch."""
    with (
        restarted(world, 1, "offsets.retention.minutes=60"),
        restarted(world, 2, "transaction.max.timeout.ms=600000"),
    ):
        eventually(lambda: len(sink._finisher.nodes()) == 3, "all are back")
        sink.validate(rows("1").schema)
        assert sink._seen is not None
        assert sink._seen.timeout_ms == 600_000
        assert sink._seen.proof_kept_s == 3600.0


# -- what a client remembers -----------------------------------------------------------------------


def test_broker_that_came_later(
    sink: KafkaSink, make_sink: Callable[..., KafkaSink], owner: Owner, world: ClusterWorld
) -> None:
    """Clients that connected while it was down find its orphans and commit on its partitions."""
    finder = make_sink(world.topic)
    world.cluster.brokers[3].kill()
    eventually(lambda: 3 not in world.leaders().values(), "it leads nothing")
    eventually(lambda: len(sink._finisher.nodes()) == 2, "the others know that it is down")
    sink.close()
    assert list(finder.find_branches(owner)) == []
    sink.commit(prepare(sink, BranchId(owner, 6, 1, "kafka", 0, 0), rows("before")))
    world.cluster.brokers[3].start()
    eventually(world.is_whole, "every replica in sync")
    kept, orphan = (BranchId(owner, 7, 1, "kafka", 0, i) for i in (1, 2))
    # A lookup of a coordinator also returns its address, which the sink that commits must not see.
    for branch, node in ((kept, 1), (orphan, 3)):
        ((_, (ours,)),) = sink._finisher.offsets_partition(branch.name).items()
        world.move_leader(TRANSACTIONS, ours, node)
        world.move_leader(OFFSETS, ours, node)
    world.move_leader(world.topic, 0, 3)
    prepared = prepare(sink, kept, rows("after"))
    prepare(sink, orphan, rows("orphan"))
    assert [world.coordinator(each) for each in (kept, orphan)] == [1, 3]
    found = {each.branch_id.name: each for each in finder.find_branches(owner)}
    assert set(found) == {kept.name, orphan.name}
    finder.abort(found[orphan.name])
    sink.commit(prepared)
    world.is_settled(owner, rows("before"), rows("after"))


def test_broker_that_lists_nothing(
    sink: KafkaSink, owner: Owner, world: ClusterWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orphans of the other brokers are aborted; the error reports that some may be missing."""
    branches = [BranchId(owner, 7, 1, "kafka", 0, i) for i in range(6)]
    for each in branches:
        prepare(sink, each, rows("1"))
    hidden = {each.name for each in branches if world.coordinator(each) == 1}
    assert 0 < len(hidden) < len(branches)
    real, freed = Finisher.ongoing, []

    def all_but_one(self: Finisher, prefix: str, node: int) -> list[str]:
        if node == 1:
            raise errors.KafkaConnectionError("no answer")
        return real(self, prefix, node)

    sink._patience_s = 0.5
    with monkeypatch.context() as patch:
        patch.setattr(Finisher, "ongoing", all_but_one)
        with pytest.raises(SinkError, match="listed completely: .*no answer"):  # noqa: PT012
            for found in sink.find_branches(owner):
                sink.abort(found)
                freed.append(found.branch_id.name)
    assert set(freed) == {each.name for each in branches} - hidden
    sink._patience_s = DEADLINE_S
    for found in sink.find_branches(owner):
        sink.abort(found)
        hidden.remove(found.branch_id.name)
    assert not hidden
    world.is_settled(owner)


# -- the topic is deleted --------------------------------------------------------------------------


def delete(world: ClusterWorld) -> None:
    world.admin.delete_topics([world.topic])[world.topic].result(30)

    def is_gone() -> bool:
        return all(
            world.topic
            not in AdminClient({"bootstrap.servers": broker.bootstrap_servers})
            .list_topics(timeout=30)
            .topics
            for broker in world.cluster.brokers.values()
        )

    eventually(is_gone, "the topic is gone")


def test_topic_deleted_before_rows_are_written(
    sink: KafkaSink, owner: Owner, world: ClusterWorld
) -> None:
    """At any stage of the transaction: rejected, naming the topic and the next step."""
    opened = sink.beginTransaction(BranchId(owner, 7, 1, "kafka", 0, 0))
    started = sink.beginTransaction(BranchId(owner, 7, 1, "kafka", 0, 1))
    sink.write(started, rows("1"))
    assert started._producer is not None
    assert started._producer.flush(60) == 0
    delete(world)
    for handle in (opened, started):
        assert handle._producer is not None
        with pytest.raises(PrepareRejectedError, match=f"(?s){world.topic}.*Create the topic"):
            write_and_prepare(sink, handle, rows("2"))
        sink.discard(handle)
    for found in sink.find_branches(owner):
        sink.abort(found)
    eventually(lambda: not world.open_transactions(owner), "no open transaction")


def test_topic_deleted_after_prepare(
    sink: KafkaSink, owner: Owner, world: ClusterWorld, caplog: pytest.LogCaptureFixture
) -> None:
    """The rows are gone with the topic, but the transactions end; a warning reports it."""
    branches = [BranchId(owner, 7, 1, "kafka", 0, i) for i in range(4)]
    prepared = [prepare(sink, each, rows("1")) for each in branches]
    delete(world)
    sink.commit(prepared[0])
    sink.abort(prepared[1])
    assert sink.commit_many(prepared[2:]) == [None, None]
    warned = [branch for branch in branches if f"{branch.name} is committed, but" in caplog.text]
    assert warned == [branches[0], *branches[2:]]
    assert f"the topic {world.topic!r} was deleted" in caplog.text
    eventually(lambda: not world.open_transactions(owner), "no open transaction")


def test_proof_deleted_with_its_topic(
    sink: KafkaSink, branch: BranchId, world: ClusterWorld
) -> None:
    """A later producer took the branch's name: without the marker the commit is unresolved."""
    prepared = prepare(sink, branch, rows("1"))
    sink.commit(prepared)
    eventually(lambda: fenced(sink._finisher, branch), "initialised again")
    sink.commit(prepared)
    delete(world)
    eventually(lambda: not sink._finisher.markers(branch.name, [world.topic]), "no proof")
    with pytest.raises(CommitUnresolvedError, match=f"topic {world.topic!r} was deleted"):
        sink.commit(prepared)


# -- versions --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [HALF_UPGRADED], indirect=True)
def test_half_upgraded_cluster(
    make_sink: Callable[..., KafkaSink], owner: Owner, world: ClusterWorld
) -> None:
    """Every verb works on all brokers, no matter which one reports its versions to the client."""
    kept = []
    for node, broker in world.cluster.brokers.items():
        sink = make_sink(world.topic, bootstrap_servers=broker.bootstrap_servers)
        sink.validate(rows("1").schema)
        branches = [BranchId(owner, node, 1, "kafka", 0, 10 * node + i) for i in range(9)]
        written = [rows(f"{node}-{i}") for i in range(9)]
        prepared = [prepare(sink, b, r) for b, r in zip(branches, written, strict=True)]
        assert {world.coordinator(each) for each in branches} == {1, 2, 3}
        for each in prepared[:3]:
            sink.commit(each)
            sink.commit(each)
        assert sink.commit_many(prepared[3:6]) == [None] * 3
        for each in prepared[6:8]:
            sink.abort(each)
        (orphan,) = sink.find_branches(owner)
        sink.abort(orphan)
        kept += written[:6]
    world.is_settled(owner, *kept)
