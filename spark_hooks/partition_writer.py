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
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple, Self, cast

import pyarrow as pa
from pyspark import TaskContext

from sparkonce.errors import PrepareRejectedError, SparkOnceError
from sparkonce.failpoints import reach
from sparkonce.model import ATTEMPT_BOUND, BranchId, Committable
from sparkonce.sinks.base import AnySink
from sparkonce.spark_hooks.fingerprint import fingerprint
from sparkonce.spark_hooks.rewrite import Rewrite
from sparkonce.txn_log.record import Fingerprint, Incarnation, Part

logger = logging.getLogger("sparkonce")

SUMMARY_SCHEMA = "summary string"
"""Spark's schema of the rows that a `PartitionWriter` returns."""


@dataclass(frozen=True, slots=True)
class PartitionSummary:
    """What one task wrote.

    Attributes:
        partition: Spark's partition id.
        parts: by sink name; none when the partition had no rows.
        committables: one per sink; none when the partition had no rows.
    """

    partition: int
    parts: Mapping[str, Part]
    committables: tuple[Committable, ...]

    def encode(self) -> str:
        return json.dumps(
            {
                "partition": self.partition,
                "parts": {name: part.to_json() for name, part in self.parts.items()},
                "committables": [c.to_json() for c in self.committables],
            }
        )

    @classmethod
    def decode(cls, text: str) -> Self:
        value = json.loads(text)
        parts = {name: Part.from_json(part) for name, part in value["parts"].items()}
        committables = tuple(Committable.from_json(c) for c in value["committables"])
        return cls(value["partition"], parts, committables)


class PartitionWriter:
    """A function for ``DataFrame.mapInArrow`` that writes a partition into all `sinks`.

    The last column of the rows, or where there are lanes the last of each lane's, is the hash of
    each row (see `sparkonce.spark_hooks.fingerprint`); sinks do not get it.

    Args:
        sinks: pickled to the executors.
        incarnation: whose names the branches carry.
        batch_id: the micro-batch.
        lanes: for each sink the number of the struct column that holds its columns; as many
            columns of hashes follow. None where the rows themselves are every sink's.
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
        sinks = [sink for sink in self._sinks if self._wants(sink, partition)]
        if not sinks:
            for _ in batches:  # to the end: a stateful query commits its state there
                pass
            return PartitionSummary(partition, {}, ())
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
                    rows = self._split(batch)
                    _at_once(pool, [branch.writer(rows[branch.sink.name]) for branch in branches])
                    reach("write.batch", batch=self._batch_id, partition=partition)
                _at_once(pool, [branch.prepare for branch in branches])
            except BaseException:
                _at_once(pool, [branch.give_up for branch in branches])
                raise
        return PartitionSummary(
            partition,
            {branch.sink.name: branch.part(partition) for branch in branches},
            tuple(b.committable for b in branches if b.committable is not None),
        )

    def _split(self, batch: pa.RecordBatch) -> dict[str, _Rows]:
        """Each sink's rows, by its name."""
        if self._lanes is None:
            rows = batch.remove_column(batch.num_columns - 1)
            shared = _Rows(rows, fingerprint(batch.column(batch.num_columns - 1)))
            return {sink.name: shared for sink in self._sinks}
        middle = batch.num_columns // 2
        lanes = [
            _Rows(
                pa.RecordBatch.from_struct_array(cast("pa.StructArray", rows)), fingerprint(hashes)
            )
            for rows, hashes in zip(batch.columns[:middle], batch.columns[middle:], strict=True)
        ]
        return {s.name: lanes[lane] for s, lane in zip(self._sinks, self._lanes, strict=True)}

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


class _Rows(NamedTuple):
    """A record batch for one sink, and what is in it."""

    batch: pa.RecordBatch
    content: Fingerprint


class _Branch:
    """One sink's verbs in this task, in order, with errors that name the branch."""

    def __init__(self, sink: AnySink, branch_id: BranchId) -> None:
        self.sink = sink
        self.branch_id = branch_id
        self.committable: Committable | None = None
        self._handle: Any = None
        self._open = False
        self._bytes = 0
        self._contents: list[Fingerprint] = []

    def begin(self) -> None:
        self._handle = self._named(lambda: self.sink.beginTransaction(self.branch_id))
        self._open = True

    def writer(self, rows: _Rows) -> Callable[[], None]:
        def write() -> None:
            self._named(lambda: self.sink.write(self._handle, rows.batch))
            self._bytes += rows.batch.nbytes
            self._contents.append(rows.content)

        return write

    def prepare(self) -> None:
        where = {"batch": self.branch_id.batch_id, "sink": self.sink.name}
        reach("precommit.before", **where)
        self.committable = self._named(lambda: self.sink.preCommit(self._handle))
        self._open = False
        reach("precommit.after", **where)

    def part(self, partition: int) -> Part:
        content = reduce(operator.add, self._contents)
        return Part(partition, self.branch_id.name, self._bytes, content)

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
