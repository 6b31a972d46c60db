"""A topic and its transactions, examined from outside, and a branch's way through the sink."""

from __future__ import annotations

import time
from collections.abc import Callable

import pyarrow as pa
from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, NewTopic
from kafka import errors
from kafka.admin import KafkaAdminClient

from sparkonce.model import BranchId, Committable, Owner
from sparkonce.sinks import KafkaSink
from sparkonce.sinks.kafka.finishing.finisher import Finisher
from sparkonce.sinks.kafka.rows.messages import messages_by_topic
from sparkonce.sinks.kafka.writing.librdkafka import TransactionalProducer
from sparkonce.sinks.kafka.writing.producer import OpenTransaction
from sparkonce.testing.services import KafkaServer

DEADLINE_S = 60.0
ROWS = pa.RecordBatch.from_pydict({"key": ["a", "b", "c"], "value": ["1", "2", "3"]})
VALUE = pa.schema([("value", pa.string())])


def eventually(condition: Callable[[], bool], what: str | Callable[[], str]) -> None:
    """Wait for a state of the world, not for a time."""
    until = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until, (
            f"never came true: {what if isinstance(what, str) else what()}"
        )
        time.sleep(0.02)


class World:
    """The topic and the coordinator, examined by clients that share nothing with the sink."""

    def __init__(self, server: KafkaServer, topic: str) -> None:
        self.server = server
        self.topic = topic
        self._consumer = Consumer(
            {
                "bootstrap.servers": server.bootstrap_servers,
                "group.id": "world",
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "enable.auto.commit": False,
                "fetch.wait.max.ms": 10,
                "log_level": 0,
            }
        )

    def messages(self, topic: str | None = None) -> list[Message]:
        """What a consumer of committed records can read now."""
        partitions = self.leaders(topic or self.topic)
        self._consumer.assign(
            [TopicPartition(topic or self.topic, p, OFFSET_BEGINNING) for p in partitions]
        )
        found, ends = [], 0
        until = time.monotonic() + DEADLINE_S
        while ends < len(partitions):
            assert time.monotonic() < until, "the topic cannot be read to its end"
            message = self._consumer.poll(1)
            if message is None:
                continue
            if message.error() is None:
                found.append(message)
            elif message.error().code() == KafkaError._PARTITION_EOF:
                ends += 1
        self._consumer.unassign()
        return found

    def leaders(self, topic: str) -> dict[int, int]:
        metadata = self._consumer.list_topics(topic, timeout=30)
        return {p.id: p.leader for p in metadata.topics[topic].partitions.values()}

    def values(self, topic: str | None = None) -> list[bytes | None]:
        return sorted((m.value() for m in self.messages(topic)), key=lambda v: v or b"")

    def sees(self, *values: str) -> None:
        """Wait until exactly these values are visible: control records arrive after a moment."""
        wanted = sorted(value.encode() for value in values)
        seen: list[list[bytes | None]] = [[]]

        def all_visible() -> bool:
            seen[0] = self.values()
            return seen[0] == wanted

        eventually(all_visible, lambda: f"{wanted} visible, saw {seen[0]}")

    def state(self, branch: BranchId) -> str:
        with KafkaAdminClient(bootstrap_servers=self.server.bootstrap_servers) as admin:
            try:
                return str(admin.describe_transactions([branch.name])[branch.name].state.value)
            except errors.TransactionalIdNotFoundError:
                return "unknown"

    def becomes(self, branch: BranchId, state: str) -> None:
        eventually(lambda: self.state(branch) == state, f"{branch} is {state}")

    def close(self) -> None:
        self._consumer.close()


def send(producer: TransactionalProducer, topic: str, value: bytes) -> None:
    """Send one more row, as a task that continues."""
    ((_, messages),) = messages_by_topic(pa.RecordBatch.from_pydict({"value": [value]}), topic)
    assert producer.send(topic, messages) == 1


def write_and_prepare(
    sink: KafkaSink, handle: OpenTransaction, rows: pa.RecordBatch
) -> Committable:
    sink.write(handle, rows)
    return sink.preCommit(handle)


def prepare(sink: KafkaSink, branch: BranchId, rows: pa.RecordBatch = ROWS) -> Committable:
    return write_and_prepare(sink, sink.beginTransaction(branch), rows)


def committed_state(sink: KafkaSink) -> str:
    """Empty if EndTxn does not fence, since `commit` then initialises the name again."""
    return "CompleteCommit" if sink._finisher.end_fences() else "Empty"


def prepare_three(sink: KafkaSink, owner: Owner) -> list[Committable]:
    return [prepare(sink, BranchId(owner, 7, 1, "kafka", 0, i), ROWS.slice(i, 1)) for i in range(3)]


def fenced(finisher: Finisher, branch: BranchId) -> bool:
    """Whether the transactional id could be initialised; the abort that this causes takes time."""
    try:
        finisher.fence(branch.name)
    except errors.ConcurrentTransactionsError:
        return False
    return True


def made(admin: AdminClient, topic: str, partitions: int = 1) -> bool:
    """Whether it could be created; the broker refuses while it deletes an old one."""
    try:
        admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(30)
    except KafkaException:
        return False
    return True
