"""The records, and who sends them.

    Sender ─► input topic ─► engine ─► output topic, or folder ─► Reader (see `readers`)

A record's value is `{"id": 7, "made": 1790000000.123, "pad": "…"}`, 112 bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from confluent_kafka import KafkaError, Producer
from confluent_kafka.admin import AdminClient, NewTopic

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
