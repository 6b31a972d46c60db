"""A small world for the protocol: external systems in memory, and a Spark of a few lines.

A `Process` is one driver. When it crashes, every later call of it raises `Crash` too, so its
clean-up code cannot touch the world. The protocol, the partition writer and the SQLite log are the
real ones.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from sparkonce import failpoints
from sparkonce.errors import BatchInterruptedError, PreparedBranchLostError
from sparkonce.model import BranchId, Committable, CommittedBatch, Owner
from sparkonce.protocol.driver import Driver
from sparkonce.protocol.pipeline import CommitPolicy, Patience, Pipeline, by_name
from sparkonce.protocol.rewriting import Rewrite
from sparkonce.sinks.base import AnySink, TwoPhaseCommitSink
from sparkonce.sinks.capabilities import FindsBranches, Publishes, Votes
from sparkonce.spark_hooks.fingerprint import fingerprint
from sparkonce.spark_hooks.partition_writer import PartitionSummary, PartitionWriter, shares_of
from sparkonce.txn_log.base import TransactionLog
from sparkonce.txn_log.claim import Claim
from sparkonce.txn_log.record import Fingerprint, Incarnation, Share, TransactionRecord
from sparkonce.txn_log.sqlite import SqliteLog

QUERY_ID = "11111111-2222-3333-4444-555555555555"


class Crash(BaseException):
    """The process is gone."""


@dataclass
class Store:
    """An external system: prepared branches, visible branches, and published batches."""

    prepared: dict[str, list[int]] = field(default_factory=dict)
    visible: dict[str, list[int]] = field(default_factory=dict)
    published: dict[int, list[str]] = field(default_factory=dict)

    def rows(self) -> Counter[int]:
        return Counter(row for rows in self.visible.values() for row in rows)


@dataclass
class Process:
    """One driver process; `crash` ends it in the middle of a call."""

    alive: bool = True

    def crash(self) -> None:
        self.alive = False
        raise Crash

    def check(self) -> None:
        if not self.alive:
            raise Crash


@dataclass
class Handle:
    branch_id: BranchId
    rows: list[int] = field(default_factory=list)


class QuietSink(TwoPhaseCommitSink[Handle], Votes, FindsBranches):
    """Prepares into and commits within a `Store`; publishes nothing."""

    kind = "memory"

    def __init__(self, store: Store, process: Process, name: str) -> None:
        super().__init__(name=name)
        self.store = store
        self.process = process
        self.calls: list[str] = []
        self.fail: Callable[[str], None] = lambda verb: None

    def _called(self, verb: str) -> None:
        self.process.check()
        self.calls.append(verb)
        self.fail(verb)

    def beginTransaction(self, branch_id: BranchId) -> Handle:
        self._called("beginTransaction")
        return Handle(branch_id)

    def write(self, handle: Handle, batch: pa.RecordBatch) -> None:
        self._called("write")
        handle.rows += batch["id"].to_pylist()

    def preCommit(self, handle: Handle) -> Committable:
        self._called("preCommit")
        self.store.prepared[str(handle.branch_id)] = handle.rows
        return Committable(handle.branch_id)

    def discard(self, handle: Handle) -> None:
        self._called("discard")

    def vote(
        self, branch_id: BranchId, committables: Sequence[Committable]
    ) -> Sequence[Committable]:
        self._called("vote")
        return committables

    def commit(self, committable: Committable) -> None:
        self._called("commit")
        name = str(committable.branch_id)
        if name in self.store.prepared:
            self.store.visible[name] = self.store.prepared.pop(name)
        elif name not in self.store.visible:
            raise PreparedBranchLostError(f"{name} is gone", committable.branch_id)
        self.fail("after commit")

    def abort(self, branch: BranchId | Committable) -> None:
        self._called("abort")
        branch_id = branch.branch_id if isinstance(branch, Committable) else branch
        self.store.prepared.pop(str(branch_id), None)

    def find_branches(self, owner: Owner) -> Iterable[Committable]:
        self._called("find_branches")
        found = [BranchId.from_name(name) for name in self.store.prepared]
        return [Committable(b) for b in found if b is not None and b.owner == owner]


class MemorySink(QuietSink, Publishes):
    """A `QuietSink` that publishes each batch in its `Store`."""

    def publish(self, batch: CommittedBatch) -> None:
        self._called("publish")
        names = [str(committable.branch_id) for committable in batch.committables]
        assert set(names) <= self.store.visible.keys(), "published before it was committed"
        self.store.published[batch.batch_id] = names
        self.fail("after publish")


def hashed(ids: Sequence[int]) -> pa.RecordBatch:
    """Rows with the column of hashes that the partition writer expects as the last one."""
    hashes = [row_hash(row) for row in ids]
    return pa.record_batch({"id": pa.array(ids, pa.int64()), "hash": pa.array(hashes, pa.int64())})


@cache
def row_hash(row: int) -> int:
    """Not linear: else the sums of rows 1 and 4 and of rows 2 and 3 would be equal."""
    return int.from_bytes(blake2b(str(row).encode(), digest_size=8).digest()) >> 1


class MemoryBatch:
    """A micro-batch: partitions of rows, which the real partition writer writes."""

    def __init__(
        self, spark: MemorySpark, batch_id: int, sinks: Sequence[AnySink], process: Process
    ) -> None:
        self.batch_id = batch_id
        self.offsets = (f'{{"upTo":{batch_id}}}',)
        self._spark = spark
        self._sinks = sinks
        self._process = process

    def write(
        self, incarnation: Incarnation, rewrite: Rewrite | None = None
    ) -> Mapping[str, Share]:
        sinks = [s for s in self._sinks if rewrite is None or s.name in rewrite.partitions]
        writer = PartitionWriter(sinks, incarnation, self.batch_id, None, rewrite)
        summaries: list[PartitionSummary] = []
        for partition, rows in enumerate(self._spark.batches[self.batch_id]):
            self._process.check()
            record_batches = [hashed(rows)] if rows else []
            self._spark.attempts += 1
            summaries.append(writer.write(iter(record_batches), partition, self._spark.attempts))
            if self._spark.interruptions:
                self._spark.interruptions -= 1
                raise BatchInterruptedError(f"batch {self.batch_id} was interrupted")
        return shares_of(sinks, summaries)

    def drain(self) -> Mapping[str, Fingerprint]:
        self._process.check()
        self._spark.drained.append(self.batch_id)
        ids = [row for rows in self._spark.batches[self.batch_id] for row in rows]
        content = fingerprint(hashed(ids)["hash"])
        return {sink.name: content for sink in self._sinks}


@dataclass
class MemorySpark:
    """Replays the first batch that Spark has not committed."""

    batches: Sequence[Sequence[Sequence[int]]]
    committed: int = -1
    begun: int = -1
    runs: int = 0
    attempts: int = 0
    drained: list[int] = field(default_factory=list)
    interruptions: int = 0
    driver: object = None


@dataclass
class MemoryCheckpoint:
    """Spark's checkpoint as the protocol reads it."""

    spark: MemorySpark
    location: str = "memory:/checkpoint"

    def committed(self) -> int:
        return self.spark.committed

    def has_offsets(self, batch_id: int) -> bool:
        return batch_id <= self.spark.begun


class MemoryEntrance:
    """The checkpoint as a driver enters it; no other driver entered since this one looked."""

    def __init__(self, spark: MemorySpark, may_repeat: Callable[[], None]) -> None:
        self._spark = spark
        self._may_repeat = may_repeat

    def check_may_begin(self, *, is_first_try: bool) -> None:
        if not is_first_try:
            self._may_repeat()

    def enter(self, incarnation: Incarnation) -> bool:
        del incarnation
        self._spark.driver = self
        return True

    def is_newest_entry(self) -> bool:
        return self._spark.driver is self


class World:
    """Two stores, a log on disk, and a streaming query over them.

    Attributes:
        prepare_sinks: changes the sinks of each new driver.
        kinds: by name, the sinks that are no plain `MemorySink`.
    """

    def __init__(
        self,
        folder: Path,
        batches: Sequence[Sequence[Sequence[int]]],
        commit: CommitPolicy = "immediate",
    ) -> None:
        self.path = folder / "log.db"
        self.commit = commit
        self.commit_timeout_s = 0.2
        self.clock: Callable[[], float] = time.time
        self.steady: Callable[[], float] | None = None  # None: no clock is ever set
        self.stores = {"left": Store(), "right": Store()}
        self.spark = MemorySpark(batches)
        self.sinks: list[Any] = []  # those of the last driver
        self.prepare_sinks: Callable[[Sequence[MemorySink]], None] = lambda sinks: None
        self.kinds: dict[str, type[MemorySink]] = {}

    def on_call(self, act: Callable[[str], None], *names: str) -> None:
        """Let the sinks of these names, in later drivers, call `act` with each verb."""

        def prepare(sinks: Sequence[MemorySink]) -> None:
            for sink in sinks:
                if sink.name in names:
                    sink.fail = act

        self.prepare_sinks = prepare

    def history(self) -> Sequence[TransactionRecord]:
        """The records of the log, the newest first."""
        return SqliteLog(self.path).history("orders")

    def prepared(self) -> list[int]:
        """The number of prepared branches in each store."""
        return [len(store.prepared) for store in self.stores.values()]

    def visible(self) -> list[int]:
        """The number of visible branches in each store."""
        return [len(store.visible) for store in self.stores.values()]

    def source(self) -> Counter[int]:
        return Counter(row for batch in self.spark.batches for part in batch for row in part)

    def claim(self, **changes: Any) -> Claim:
        batch_id = self.spark.committed + 1
        values: dict[str, Any] = {
            "pipeline": "orders",
            "query_id": QUERY_ID,
            "run_id": str(self.spark.runs),
            "driver": "test:1",
            "sinks": dict.fromkeys(self.stores, "memory"),
            "batch_id": batch_id,
            "offsets": {batch_id: (f'{{"upTo":{batch_id}}}',)},
        }
        return Claim(**{**values, **changes})

    def driver(
        self, process: Process, may_repeat: Callable[[], None] = lambda: None, **changes: Any
    ) -> Driver:
        self.sinks = [
            self.kinds.get(name, MemorySink)(store, process, name)
            for name, store in self.stores.items()
        ]
        self.prepare_sinks(self.sinks)
        pipeline = self.pipeline(self.sinks, SqliteLog(self.path))
        return Driver.start(pipeline, self.claim(**changes), MemoryEntrance(self.spark, may_repeat))

    def pipeline(self, sinks: Sequence[AnySink], log: TransactionLog) -> Pipeline:
        return Pipeline(
            name="orders",
            sinks=by_name(sinks),
            log=log,
            checkpoint=MemoryCheckpoint(self.spark),
            commit=self.commit,
            commit_timeout_s=self.commit_timeout_s,
            retain=10,
            patience=Patience(self.commit_timeout_s),
            clock=self.clock,
            steady=self.steady or self.clock,
        )

    def batch(self, process: Process) -> MemoryBatch:
        self.spark.begun = max(self.spark.begun, self.spark.committed + 1)
        return MemoryBatch(self.spark, self.spark.committed + 1, self.sinks, process)

    def start(self, process: Process) -> None:
        """Run the query to its end, or until it fails or crashes."""
        self.spark.runs += 1
        driver = self.driver(process)
        driver.recover()
        while self.spark.committed + 1 < len(self.spark.batches):
            driver.deliver(self.batch(process))
            process.check()
            self.spark.committed += 1
        driver.commit_pending()

    def check(self) -> None:
        """Assert that every row is visible and published once in every store, and nothing else."""
        for name, store in self.stores.items():
            assert store.rows() == self.source(), name
            published = [branch for some in store.published.values() for branch in some]
            assert sorted(published) == sorted(store.visible), name
            assert sorted(store.published) == list(range(len(self.spark.batches))), name
            assert not store.prepared, name
        log = SqliteLog(self.path)
        assert not log.unfinished("orders")
        log.close()


class at_point:  # noqa: N801 - reads as a phrase in a with statement
    """Call `action` the `nth` time that the protocol reaches `point`; then `fired` is true."""

    def __init__(self, point: str, action: Callable[[], None], *, nth: int = 1) -> None:
        self._point = point
        self._action = action
        self._left = nth
        self.fired = False

    def _handle(self, point: str, where: Mapping[str, object]) -> None:
        del where
        if point == self._point and not self.fired:
            self._left -= 1
            if self._left == 0:
                self.fired = True
                self._action()

    def __enter__(self) -> Self:
        self._before = failpoints.handler
        failpoints.handler = self._handle
        return self

    def __exit__(self, *_: object) -> None:
        failpoints.handler = self._before
