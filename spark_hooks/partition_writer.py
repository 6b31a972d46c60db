"""What runs in each Spark task: one pass over the rows, every sink at once.

    Arrow record batches ──► sink 1 ─┐
                         ──► sink 2 ─┼─► preCommit each ─► one summary row to the driver
                         ──► sink 3 ─┘

A task without rows opens no branch. A task that fails frees its handles and aborts what it had
prepared, as well as it can: what it cannot reach is an orphan, and the driver sweeps those.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self, cast

import pyarrow as pa
from pyspark import TaskContext

from sparkonce.errors import PrepareRejectedError, SparkOnceError
from sparkonce.failpoints import reach
from sparkonce.model import ATTEMPT_BOUND, BranchId, Committable
from sparkonce.sinks.base import AnySink
from sparkonce.spark_hooks.rewrite import Rewrite
from sparkonce.txn_log.record import Incarnation

logger = logging.getLogger("sparkonce")

SUMMARY_SCHEMA = "summary string"
"""Spark's schema of the rows that a `PartitionWriter` returns."""


@dataclass(frozen=True, slots=True)
class PartitionSummary:
    """What one task wrote.

    Attributes:
        partition: Spark's partition id.
        rows: number of rows.
        bytes: size of the rows as Arrow memory, in bytes.
        committables: one per sink; none when the partition had no rows.
    """

    partition: int
    rows: int
    bytes: int
    committables: tuple[Committable, ...]

    def encode(self) -> str:
        return json.dumps(
            {
                "partition": self.partition,
                "rows": self.rows,
                "bytes": self.bytes,
                "committables": [c.to_json() for c in self.committables],
            }
        )

    @classmethod
    def decode(cls, text: str) -> Self:
        value = json.loads(text)
        committables = tuple(Committable.from_json(c) for c in value["committables"])
        return cls(value["partition"], value["rows"], value["bytes"], committables)


class PartitionWriter:
    """A function for ``DataFrame.mapInArrow`` that writes a partition into all `sinks`.

    Args:
        sinks: pickled to the executors.
        lanes: for each sink the number of the struct column that holds its columns; None where
            the rows themselves are every sink's.
        incarnation: whose names the branches carry.
        batch_id: the micro-batch.
        rewrite: which sinks and partitions to write again; default: all, for the first time.
    """

    def __init__(
        self,
        sinks: Sequence[AnySink],
        incarnation: Incarnation,
        batch_id: int,
        lanes: Sequence[int] | None = None,
        rewrite: Rewrite | None = None,
    ) -> None:
        self._sinks = sinks
        self._lanes = lanes
        self._incarnation = incarnation
        self._batch_id = batch_id
        self._rewrite = rewrite

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        if context is None:
            raise RuntimeError("PartitionWriter runs inside a Spark task only")
        attempt = context.taskAttemptId() % ATTEMPT_BOUND
        summary = self.write(batches, context.partitionId(), attempt)
        yield pa.RecordBatch.from_pydict({"summary": [summary.encode()]})

    def write(
        self, batches: Iterator[pa.RecordBatch], partition: int, attempt: int
    ) -> PartitionSummary:
        """Write all rows and prepare.

        Raises:
            PrepareRejectedError: a sink refused the rows, or could not be reached.
        """
        rows = size = 0
        sinks = [s for s in self._sinks if self._wants(s, partition)]
        if not sinks:
            for _ in batches:  # to the end: a stateful query commits its state there
                pass
            return PartitionSummary(partition, 0, 0, ())
        branches: list[_Branch] = []
        with ThreadPoolExecutor(len(sinks), thread_name_prefix="sparkonce") as pool:
            try:
                for batch in batches:
                    if batch.num_rows == 0:
                        continue
                    if not branches:
                        branches = [_Branch(sink, self._branch_id(sink, attempt)) for sink in sinks]
                        _at_once(pool, [branch.begin for branch in branches])
                        reach("write.first", batch=self._batch_id, partition=partition)
                    _at_once(pool, self._writes(branches, batch))
                    reach("write.batch", batch=self._batch_id, partition=partition)
                    rows += batch.num_rows
                    size += batch.nbytes
                _at_once(pool, [branch.prepare for branch in branches])
            except BaseException:
                _at_once(pool, [branch.give_up for branch in branches])
                raise
        committables = tuple(b.committable for b in branches if b.committable is not None)
        return PartitionSummary(partition, rows, size, committables)

    def _writes(
        self, branches: Sequence[_Branch], batch: pa.RecordBatch
    ) -> list[Callable[[], None]]:
        if self._lanes is None:
            return [branch.writer(batch) for branch in branches]
        lanes = [pa.RecordBatch.from_struct_array(cast("pa.StructArray", c)) for c in batch.columns]
        lane_of = {sink.name: n for sink, n in zip(self._sinks, self._lanes, strict=True)}
        return [branch.writer(lanes[lane_of[branch.sink.name]]) for branch in branches]

    def _wants(self, sink: AnySink, partition: int) -> bool:
        return self._rewrite is None or self._rewrite.wants(sink.name, partition)

    def _branch_id(self, sink: AnySink, attempt: int) -> BranchId:
        return BranchId(
            owner=self._incarnation.owner,
            batch_id=self._batch_id,
            token=self._incarnation.token,
            sink=sink.name,
            write_pass=0 if self._rewrite is None else self._rewrite.write_pass,
            attempt=attempt,
        )


class _Branch:
    """One sink's verbs in this task, in order, with errors that name the branch."""

    def __init__(self, sink: AnySink, branch_id: BranchId) -> None:
        self.sink = sink
        self.branch_id = branch_id
        self.committable: Committable | None = None
        self._handle: Any = None
        self._open = False

    def begin(self) -> None:
        self._handle = self._named(lambda: self.sink.beginTransaction(self.branch_id))
        self._open = True

    def writer(self, batch: pa.RecordBatch) -> Callable[[], None]:
        return lambda: self._named(lambda: self.sink.write(self._handle, batch))

    def prepare(self) -> None:
        where = {"batch": self.branch_id.batch_id, "sink": self.sink.name}
        reach("precommit.before", **where)
        self.committable = self._named(lambda: self.sink.preCommit(self._handle))
        self._open = False
        reach("precommit.after", **where)

    def give_up(self) -> None:
        try:
            if self._open:
                self.sink.discard(self._handle)
            if self.committable is not None:
                self.sink.abort(self.committable)
        except Exception:
            logger.warning("%s is left to the driver's sweep", self.branch_id, exc_info=True)

    def _named(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except SparkOnceError:
            raise
        except Exception as error:
            raise PrepareRejectedError(
                f"{self.sink!r} failed with {type(error).__name__}: {error}", self.branch_id
            ) from error


def _at_once(pool: ThreadPoolExecutor, actions: Sequence[Callable[[], None]]) -> None:
    """Run the actions in parallel; wait for every one, then raise the first error."""
    if len(actions) == 1:
        actions[0]()
        return
    futures: list[Future[None]] = [pool.submit(action) for action in actions]
    for error in [future.exception() for future in futures]:
        if error is not None:
            raise error
