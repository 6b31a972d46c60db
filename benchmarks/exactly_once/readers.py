"""Readers of an engine's output: they see what is committed, and note when, and how often.

TopicReader     a Kafka topic, with read_committed
FolderReader    a folder of files, Parquet or lines, as Spark reads it: without hidden names, and by
                `_spark_metadata` if it is there
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import pyarrow.parquet as pq
from benchmarks.exactly_once.workload import PARTITIONS, id_of
from confluent_kafka import Consumer, IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

_POLL_S: Final = 0.02
_HIDDEN: Final = ("_", ".")
_SPARK_METADATA: Final = "_spark_metadata"


@dataclass
class Seen:
    """What a reader has seen.

    Attributes:
        at_s: when each id was seen first, in Unix time.
        again: how often ids were seen once more.
        began_s: when the engine began to write.
        last_s: when a new id was seen last.
    """

    at_s: dict[int, float] = field(default_factory=dict)
    again: dict[int, int] = field(default_factory=dict)
    began_s: float = float("inf")
    last_s: float = 0.0

    def note(self, numbers: Iterable[int]) -> None:
        now_s = time.time()
        for number in numbers:
            if number in self.at_s:
                self.again[number] = self.again.get(number, 0) + 1
            else:
                self.at_s[number] = self.last_s = now_s


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


class Reader(ABC):
    """Reads in a thread."""

    def __init__(self) -> None:
        self.seen = Seen()
        self._failure: Exception | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                self._read()
        except Exception as error:  # noqa: BLE001 - `check` raises it
            self._failure = error

    @abstractmethod
    def _read(self) -> None:
        """Note what is new; wait a moment if nothing is."""

    @abstractmethod
    def hides_any(self) -> bool:
        """Whether records are there that readers do not see yet."""

    def check(self) -> None:
        """Raise what has ended the reading, if anything has."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


class TopicReader(Reader):
    """Reads a topic."""

    def __init__(self, servers: str, topic: str) -> None:
        self._servers = servers
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
        super().__init__()

    def _read(self) -> None:
        first = self._consumer.poll(_POLL_S)  # `consume` would wait for more
        if first is None:
            return
        messages = [first, *self._consumer.consume(9_999, 0)]
        if errors := [error for message in messages if (error := message.error())]:
            raise KafkaException(errors[0])
        began_s = min(message.timestamp()[1] for message in messages) / 1000
        self.seen.began_s = min(self.seen.began_s, began_s)
        self.seen.note(id_of(message.value()) for message in messages)

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
        super().close()
        self._consumer.close()


class FolderReader(Reader):
    """Reads each file of a folder once, also in subfolders."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files_read: set[Path] = set()
        self._batches_read: set[Path] = set()
        super().__init__()

    def _read(self) -> None:
        if self.seen.began_s == float("inf") and any(_is_filled(p) for p in _files(self._folder)):
            self.seen.began_s = time.time()
        new = [path for path in self._visible() if path not in self._files_read]
        for path in new:
            self._files_read.add(path)
            self.seen.note(map(id_of, _values(path)))
        if not new:
            time.sleep(_POLL_S)

    def _visible(self) -> Iterator[Path]:
        log = self._folder / _SPARK_METADATA
        if log.is_dir():
            yield from self._named_in(log)
            return
        for path in _files(self._folder):
            names = path.relative_to(self._folder).parts
            if not any(name.startswith(_HIDDEN) for name in names) and _is_filled(path):
                yield path

    def _named_in(self, log: Path) -> Iterator[Path]:
        """The files that new batches in the log of Spark's file sink name."""
        for batch in log.iterdir():
            if batch.name.startswith(_HIDDEN) or batch in self._batches_read:
                continue
            self._batches_read.add(batch)
            for line in batch.read_text().splitlines()[1:]:  # the first is the log's version
                yield Path(unquote(urlsplit(json.loads(line)["path"]).path))

    def hides_any(self) -> bool:
        return False  # nothing but the engine makes a file visible


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _is_filled(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:  # renamed meanwhile
        return False


def _values(path: Path) -> list[bytes]:
    if path.suffix == ".parquet":
        values: list[bytes] = pq.read_table(path, columns=["value"])["value"].to_pylist()
        return values
    return path.read_bytes().splitlines()
