"""The records, who sends them, and who reads what becomes visible.

    Sender ─► input topic ─► engine ─► output topic ─► Reader (read_committed)

A record's value is `{"id": 7, "made": 1790000000.123, "pad": "…"}`, 112 bytes. The reader notes
when it first sees each id, and how often.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from confluent_kafka import (
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec

PARTITIONS: Final = 2
_BYTES: Final = 112
_TICK_S: Final = 0.01
_HEAD: Final = len('{"id": ')


def make_topics(servers: str, *names: str) -> None:
    """Create topics whose records carry the time at which the broker appended them."""
    config = {"message.timestamp.type": "LogAppendTime"}
    topics = [NewTopic(name, num_partitions=PARTITIONS, config=config) for name in names]
    admin = AdminClient({"bootstrap.servers": servers})
    for made in admin.create_topics(topics).values():
        made.result(30)


def value(number: int, made_s: float) -> bytes:
    head = f'{{"id": {number}, "made": {made_s:.6f}, "pad": "'
    return f'{head}{"x" * (_BYTES - len(head) - 2)}"}}'.encode()


def id_of(value: bytes) -> int:
    return int(value[_HEAD : value.index(b",")])


class Sender:
    """Sends records 0, 1, 2, … to the input topic."""

    def __init__(self, servers: str, topic: str) -> None:
        settings = {
            "linger.ms": 5,
            "queue.buffering.max.messages": 10**6,
            "enable.idempotence": True,
        }
        self._producer = Producer({"bootstrap.servers": servers, **settings})
        self._topic = topic
        self.sent = 0
        self.made_s: list[float] = []
        self._errors: list[KafkaError] = []

    def send(self, count: int) -> None:
        now_s = time.time()
        for number in range(self.sent, self.sent + count):
            while True:
                try:
                    self._producer.produce(
                        self._topic,
                        value(number, now_s),
                        partition=number % PARTITIONS,
                        on_delivery=self._note,
                    )
                    break
                except BufferError:
                    self._producer.poll(0.1)
            self.made_s.append(now_s)
        self.sent += count
        self._producer.poll(0)

    def _note(self, error: KafkaError | None, _: object) -> None:
        if error is not None:
            self._errors.append(error)

    def flush(self) -> None:
        left = self._producer.flush(120)
        if left or self._errors:
            raise RuntimeError(f"{left} records were not sent: {self._errors[:1]}")

    def send_at(self, rate: int, until: Callable[[], bool]) -> None:
        """Send `rate` records a second until `until` says so."""
        began, first = time.monotonic(), self.sent
        while not until():
            due = first + int((time.monotonic() - began) * rate)
            self.send(max(due - self.sent, 0))
            time.sleep(_TICK_S)
        self.flush()


@dataclass
class Seen:
    """What readers have seen.

    Attributes:
        at_s: when each id was seen first, in Unix time.
        again: how often ids were seen once more.
        began_ms: the broker's time of the first record.
        last_s: when a new id was seen last.
    """

    at_s: dict[int, float] = field(default_factory=dict)
    again: dict[int, int] = field(default_factory=dict)
    began_ms: int = 2**62
    last_s: float = 0.0


class Reader:
    """Reads the output topic with read_committed in a thread."""

    def __init__(self, servers: str, topic: str) -> None:
        self.seen = Seen()
        self._servers = servers
        self._failure: Exception | None = None
        self._consumer = Consumer(
            {
                "bootstrap.servers": servers,
                "group.id": f"reader-{topic}",
                "isolation.level": "read_committed",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "fetch.wait.max.ms": 10,
            }
        )
        self._places = [TopicPartition(topic, n, 0) for n in range(PARTITIONS)]
        self._consumer.assign(self._places)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                first = self._consumer.poll(0.02)  # `consume` would wait for more
                if first is not None:
                    self._note([first, *self._consumer.consume(9_999, 0)])
        except Exception as error:  # noqa: BLE001 - `check` raises it
            self._failure = error

    def _note(self, messages: Sequence[Message]) -> None:
        seen, now_s = self.seen, time.time()
        for message in messages:
            if message.error():
                raise KafkaException(message.error())
            number = id_of(message.value())
            if number in seen.at_s:
                seen.again[number] = seen.again.get(number, 0) + 1
            else:
                seen.at_s[number] = seen.last_s = now_s
            seen.began_ms = min(seen.began_ms, message.timestamp()[1])

    def check(self) -> None:
        """Raise what has ended the reading, if anything has."""
        if self._failure is not None:
            raise self._failure

    def hides_any(self) -> bool:
        """Whether an open transaction holds back records that are there."""
        admin = AdminClient({"bootstrap.servers": self._servers})
        wanted = {place: OffsetSpec.latest() for place in self._places}
        ends = []
        for level in (IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED):
            found = admin.list_offsets(wanted, isolation_level=level)
            ends.append({key.partition: each.result(30).offset for key, each in found.items()})
        return ends[0] != ends[1]

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._consumer.close()


@contextmanager
def reading(servers: str, topic: str) -> Iterator[Reader]:
    reader = Reader(servers, topic)
    try:
        yield reader
    finally:
        reader.close()


@dataclass(frozen=True)
class Latency:
    """Milliseconds from the making of a record until a reader sees it."""

    p50: float
    p99: float
    most: float

    @classmethod
    def of(cls, made_s: list[float], seen: Seen, *, after_s: float) -> Latency:
        """Of the records that were made at `after_s` or later."""
        took = [
            1000 * (seen.at_s[n] - at_s)
            for n, at_s in enumerate(made_s)
            if at_s >= after_s and n in seen.at_s
        ]
        cuts = statistics.quantiles(took, n=100)
        return cls(cuts[49], cuts[98], max(took))
