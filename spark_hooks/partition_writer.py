"""What runs in each Spark task: one pass over the rows, every sink at once.

    Arrow record batches ──► sink 1: begin ─► write* ─► preCommit ─┐
                         ──► sink 2: begin ─► write* ─► preCommit ─┼─► one summary row to the driver
                         ──► sink 3: begin ─► write* ─► preCommit ─┘

Each sink has a thread of its own and does not wait for the others. The rows wait for the slowest
sink, so none gets more than one record batch ahead. The task raises the first error of any sink.

A task without rows opens no branch, or discards the branch that it began early. A task that fails
frees its handles and aborts what it prepared, if it can; the driver sweeps what remains.
"""

from __future__ import annotations

import contextlib
import gc
import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from typing import Self, cast

import pyarrow as pa
from pyspark import TaskContext, cloudpickle
from pyspark.sql.types import StringType, StructField, StructType

import sparkonce.watching  # noqa: F401 - logs what a task waits for
from sparkonce import __version__
from sparkonce.errors import ConfigurationError
from sparkonce.model import ATTEMPT_BOUND, BranchId, Committable
from sparkonce.once import once
from sparkonce.protocol.rewriting import Rewrite
from sparkonce.sinks.arrow_types import plain
from sparkonce.sinks.base import AnySink
from sparkonce.spark_hooks.fingerprint import fingerprint
from sparkonce.spark_hooks.lanes import Branch, Lane, Rows
from sparkonce.txn_log.record import Fingerprint, Incarnation, Part, Share

SUMMARY_SCHEMA = StructType([StructField("summary", StringType())])
"""The schema of what a `PartitionWriter` returns. Spark would parse a string for each batch."""


@dataclass(frozen=True, slots=True)
class PartitionSummary:
    """What one task wrote.

    Attributes:
        partition: Spark's partition id.
        parts: by sink name; none when the partition had no rows.
        committables: one per sink; none when the partition had no rows.
        row_bytes: mean size of a row, in bytes of Arrow memory, in the record batch with the
            widest rows.
        seconds: by sink name, how long each step of its branch took.
    """

    partition: int
    parts: Mapping[str, Part]
    committables: tuple[Committable, ...]
    row_bytes: float = 0.0
    seconds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def encode(self) -> str:
        return json.dumps(
            {
                "partition": self.partition,
                "parts": {name: part.to_json() for name, part in self.parts.items()},
                "committables": [c.to_json() for c in self.committables],
                "row_bytes": self.row_bytes,
                "seconds": self.seconds,
            }
        )

    @classmethod
    def decode(cls, text: str) -> Self:
        value = json.loads(text)
        parts = {name: Part.from_json(part) for name, part in value["parts"].items()}
        committables = tuple(Committable.from_json(c) for c in value["committables"])
        return cls(value["partition"], parts, committables, value["row_bytes"], value["seconds"])


def shares_of(sinks: Sequence[AnySink], summaries: Sequence[PartitionSummary]) -> dict[str, Share]:
    """Each sink's share of the batch, by its name."""
    committables = [c for summary in summaries for c in summary.committables]
    return {
        sink.name: Share(
            sink.target,
            tuple(s.parts[sink.name] for s in summaries if sink.name in s.parts),
            tuple(c for c in committables if c.branch_id.sink == sink.name),
        )
        for sink in sinks
    }


def as_sent(sink: AnySink) -> AnySink:
    """The sink for the executors, without the functions that only the driver calls.

    A `transform` may hold a DataFrame, which does not pickle, and `columns` may hold the sink.
    """
    if sink.transform is None:
        return sink
    sent = copy(sink)
    sent.transform = sent.columns = None
    return sent


class PartitionWriter:
    """A function for ``DataFrame.mapInArrow`` that writes a partition into all `sinks`.

    The last column of the rows is the hash of each row (see `sparkonce.spark_hooks.fingerprint`).
    Sinks with different columns have a struct column for each shape, then a hash column for each
    (see `sparkonce.spark_hooks.shaping`). Sinks do not get the hashes.

    Args:
        sinks: pickled to the executors.
        incarnation: whose names the branches carry.
        batch_id: the micro-batch.
        shapes: for each sink, the number of its struct column; None where all sinks get the same
            columns.
        rewrite: which sinks and partitions to rewrite; default: all are written, for the first
            time.
        is_eager: begin the branches before the first row, while Spark still computes it.
        is_hashed: whether the rows come with their hashes. Without them only rows are counted, and
            a lost branch cannot be rewritten from a replay.
        observer: entered while the task writes; see `sparkonce.observing.Telemetry.for_tasks`.
    """

    def __init__(
        self,
        sinks: Sequence[AnySink],
        incarnation: Incarnation,
        batch_id: int,
        shapes: Sequence[int] | None = None,
        rewrite: Rewrite | None = None,
        *,
        is_eager: bool = False,
        is_hashed: bool = True,
        observer: AbstractContextManager[object] | None = None,
    ) -> None:
        self._sinks = sinks
        self._shapes = shapes
        self._incarnation = incarnation
        self._batch_id = batch_id
        self._rewrite = rewrite
        self._is_eager = is_eager
        self._is_hashed = is_hashed
        self._observer = observer

    def __getstate__(self) -> tuple[str, bytes]:
        state = {**self.__dict__, "_sinks": [as_sent(sink) for sink in self._sinks]}
        return __version__, cloudpickle.dumps(state)

    def __setstate__(self, state: tuple[str, bytes]) -> None:
        """Check the version first: another one may have other fields, and write differently.

        Raises:
            ConfigurationError: the driver has another version than this worker, or a module that
                the worker lacks.
        """
        version, rest = state
        if version != __version__:
            raise ConfigurationError(
                f"the driver runs sparkonce {version}, and a worker on {socket.gethostname()} "
                f"{__version__}: install the driver's on every executor"
            )
        try:
            self.__dict__.update(cloudpickle.loads(rest))
        except ModuleNotFoundError as error:
            raise ConfigurationError(
                f"a worker on {socket.gethostname()} lacks the module {error.name!r}: install "
                "sparkonce with the extras of its sinks ([kafka], [postgres], …) in the executors' "
                "Python too; add a module of your own with --py-files"
            ) from error

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        if context is None:
            raise RuntimeError("PartitionWriter runs inside a Spark task only")
        attempt = context.taskAttemptId() % ATTEMPT_BOUND
        summary = self.write(batches, context.partitionId(), attempt)
        yield pa.RecordBatch.from_pydict({"summary": [summary.encode()]})
        once(_spare_the_collector)

    def write(
        self, batches: Iterator[pa.RecordBatch], partition: int, attempt: int
    ) -> PartitionSummary:
        """Write all rows and prepare.

        Raises:
            PrepareRejectedError: a sink refused the rows, or could not be reached.
        """
        with self._observer or nullcontext():
            return self._write(batches, partition, attempt)

    def _write(
        self, batches: Iterator[pa.RecordBatch], partition: int, attempt: int
    ) -> PartitionSummary:
        sinks = [sink for sink in self._sinks if self._wants(sink, partition)]
        if not sinks:
            for _ in batches:  # read to the end, where a stateful query commits its state
                pass
            return PartitionSummary(partition, {}, ())
        failures: list[BaseException] = []
        widths = [0.0]
        lanes: list[Lane] = []
        with ThreadPoolExecutor(len(sinks), thread_name_prefix="sparkonce") as pool:

            def open_lanes() -> None:
                for sink in sinks:
                    branch = Branch(sink, self._branch_id(sink, attempt), partition)
                    lanes.append(Lane(pool, branch, failures))

            self._feed(_measured(plain(batches), widths), lanes, open_lanes, failures)
            wait(lane.done for lane in lanes)
            if failures:
                for lane in lanes:
                    with contextlib.suppress(RuntimeError):  # no new thread: an old one takes it
                        pool.submit(lane.branch.discard)
        if failures:
            raise failures[0]
        prepared = [(lane.branch, c) for lane in lanes if (c := lane.branch.committable)]
        return PartitionSummary(
            partition,
            {branch.sink.name: branch.part() for branch, _ in prepared},
            tuple(committable for _, committable in prepared),
            max(widths),
            {branch.sink.name: branch.seconds for branch, _ in prepared},
        )

    def _feed(
        self,
        batches: Iterator[pa.RecordBatch],
        lanes: Sequence[Lane],
        open_lanes: Callable[[], None],
        failures: list[BaseException],
    ) -> None:
        """Hand every row to the `lanes`, which are opened at the first one, and end them."""
        try:
            if self._is_eager:
                open_lanes()
            for batch in batches:
                if failures:
                    break
                if batch.num_rows == 0:
                    continue
                if not lanes:
                    open_lanes()
                rows = self._split(batch)
                for lane in lanes:
                    lane.put(rows[lane.branch.sink.name])
        except BaseException as error:  # noqa: BLE001 - the task raises it
            failures.append(error)
        for lane in lanes:
            lane.end()

    def _split(self, batch: pa.RecordBatch) -> dict[str, Rows]:
        """Each sink's rows, by its name."""
        if not self._is_hashed:
            return {s.name: Rows(batch, Fingerprint.counted(batch.num_rows)) for s in self._sinks}
        if self._shapes is None:
            rows = batch.remove_column(batch.num_columns - 1)
            shared = Rows(rows, fingerprint(batch.column(batch.num_columns - 1)))
            return {sink.name: shared for sink in self._sinks}
        middle = batch.num_columns // 2
        shaped = [
            Rows(
                pa.RecordBatch.from_struct_array(cast("pa.StructArray", rows)), fingerprint(hashes)
            )
            for rows, hashes in zip(batch.columns[:middle], batch.columns[middle:], strict=True)
        ]
        return {s.name: shaped[n] for s, n in zip(self._sinks, self._shapes, strict=True)}

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


def _measured(batches: Iterator[pa.RecordBatch], widths: list[float]) -> Iterator[pa.RecordBatch]:
    """Yield the batches, and append the mean bytes of a row of each to `widths`."""
    for batch in batches:
        widths.append(batch.nbytes / max(batch.num_rows, 1))
        yield batch


def _spare_the_collector() -> None:
    """Keep what this worker has loaded out of later garbage collections.

    PySpark collects after every task. To walk the modules of Spark, Arrow and the sinks' clients
    takes longer than a small task, and slows the driver down while it commits.
    """
    gc.collect()
    gc.freeze()
