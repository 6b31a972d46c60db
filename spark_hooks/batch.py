"""A micro-batch of Spark, as the protocol sees it.

    DataFrame ─► each sink's columns, and a hash of each row ─► mapInArrow(PartitionWriter)
              ◄─ one summary per partition: committables, rows, fingerprints

Sinks with the same `writers` share a pass. A sink with a `transform`, or with rows that are dealt
out by their columns, gets a pass of its own.

If the batch is expected to be small, the driver collects its rows and runs the same
`PartitionWriter` over them (`sparkonce.spark_hooks.small_batches`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from pyspark import StorageLevel, cloudpickle

from sparkonce.errors import ProtocolError
from sparkonce.model import attempt_of_small_batch
from sparkonce.observing import Telemetry, by_sink_and_step
from sparkonce.protocol.rewriting import Rewrite
from sparkonce.sinks.base import AnySink
from sparkonce.sinks.spark_sql import quoted
from sparkonce.spark_hooks.fingerprint import ALGORITHM
from sparkonce.spark_hooks.interruptions import noticed
from sparkonce.spark_hooks.partition_writer import (
    SUMMARY_SCHEMA,
    PartitionSummary,
    PartitionWriter,
    as_sent,
    shares_of,
)
from sparkonce.spark_hooks.probing import check_executors, has_executors, warn_of_room
from sparkonce.spark_hooks.record_batches import TREE_PATTERNS, RecordBatches
from sparkonce.spark_hooks.running_query import RunningQuery
from sparkonce.spark_hooks.shaping import Shapes, arrow_schema, schema_json, shaped
from sparkonce.spark_hooks.small_batches import NotSmallError, SmallBatches
from sparkonce.spark_hooks.validating import validate_sinks
from sparkonce.storage.hadoop import java_class
from sparkonce.txn_log.record import Fingerprint, Incarnation, Share

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

logger = logging.getLogger("sparkonce")

_ROW_NUMBER: Final = f"monotonically_increasing_id() & {(1 << 33) - 1}"
"""SQL: the number of a row in its partition, from 0."""

_OBSERVED: Final = re.compile(r"^\W*CollectMetrics\b", re.MULTILINE)
"""The node that `observe` adds to a plan."""

SHUFFLE_CHECKS: Final = (
    "spark.sql.shuffle.orderIndependentChecksum.enabled",
    "spark.sql.shuffle.orderIndependentChecksum.enableFullRetryOnMismatch",
)
"""With both, Spark never mixes two computations of one shuffle. Spark 4.2 and later enable both by
default; 4.1 has them, disabled; 4.0 does not have them."""


@dataclass(frozen=True)
class Learned:
    """What a run learns from its batches for the next ones."""

    small: SmallBatches
    record_batches: RecordBatches = field(default_factory=RecordBatches)
    shapes: Shapes = field(default_factory=Shapes)


class SparkBatch:
    """A micro-batch as the protocol sees it; see `sparkonce.protocol.pipeline.Batch`.

    Attributes:
        schemas: of the rows that each sink gets, once they are validated.
    """

    def __init__(
        self,
        df: DataFrame,
        batch_id: int,
        sinks: Sequence[AnySink],
        query: RunningQuery,
        learned: Learned,
        *,
        telemetry: Telemetry | None = None,
    ) -> None:
        self.batch_id = batch_id
        self.offsets = query.offsets_of_running(batch_id)
        self._df = df
        self._sinks = sinks
        self._query = query
        self._small = learned.small
        self._record_batches = learned.record_batches
        self._shapes = learned.shapes
        self._telemetry = telemetry
        self.schemas: dict[str, pa.Schema] = {}

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """The schema of the rows, and of those that each transform= makes of them, as JSON."""
        return tuple(schema_json(df) for df, _ in self._frames)

    @cached_property
    def _frames(self) -> list[tuple[DataFrame, list[AnySink]]]:
        """What the sinks of each pass get; only to be looked at, since it is no snapshot."""
        passes = _passes(self._sinks)
        transforms = [together[0].transform for together in passes]
        frames = [self._df if each is None else each(self._df) for each in transforms]
        return list(zip(frames, passes, strict=True))

    def validate(self) -> None:
        """Let every sink check its settings, its server and its schema, before any data moves."""
        schemas = self.schemas
        for df, together in self._frames:
            schemas.update({sink.name: arrow_schema(shaped(df, sink)) for sink in together})
            self._shapes.with_hashes(df, together)  # raises what Spark cannot analyse

        validate_sinks(self._sinks, schemas)
        if has_executors(self._df.sparkSession):
            check_executors(self._df.sparkSession, self._sinks)
            warn_of_room(self._df.sparkSession, self._sinks)

    def write(
        self, incarnation: Incarnation, rewrite: Rewrite | None = None
    ) -> Mapping[str, Share]:
        sinks = [s for s in self._sinks if rewrite is None or s.name in rewrite.partitions]
        passes = _passes(sinks)
        # Several passes must see the same rows, and a transform that Spark can prune must not
        # starve a stateful query.
        needs_snapshot = len(passes) > 1 or any(s.transform for s in sinks)
        shares: dict[str, Share] = {}
        with (
            noticed(self.batch_id),
            _snapshot(self._df) if needs_snapshot else nullcontext(self._df) as rows,
        ):
            for together in passes:
                transform = together[0].transform
                df = rows if transform is None else transform(rows)
                shares |= self._write_pass(df, together, incarnation, rewrite)
        if rewrite is None:
            self._small.note(shares.values())
        return shares

    def _may_mix(self, sink: AnySink) -> bool:
        """Whether a row may reach two tasks, or none, where a random value decides its task.

        Spark recomputes the part of the shuffle that a lost executor held, after other tasks have
        read their share of the first computation.
        """
        if not sink.distribute_by:
            return False
        conf = self._df.sparkSession.conf
        # Spark 4.0 does not have them. `get` with a default would hide Spark's own.
        return not all(conf.isModifiable(s) and conf.get(s) == "true" for s in SHUFFLE_CHECKS)

    def drain(self) -> Mapping[str, Fingerprint]:
        sinks = [sink for sink in self._sinks if sink.transform is None]
        if sinks and self._query.is_deterministic:
            rows, shapes = self._shapes.with_hashes(self._df, sinks)
            if _is_repeatable(rows):
                return self._contents(sinks, rows, shapes)
        self._consume()
        return {}

    def _contents(
        self, sinks: Sequence[AnySink], rows: DataFrame, shapes: list[int] | None
    ) -> dict[str, Fingerprint]:
        """Read all rows, and sum the hashes of what each sink would get."""
        hashes = [rows.columns[-1]] if shapes is None else rows.columns[len(set(shapes)) :]
        # As decimals, which do not overflow; the tasks' sums are taken modulo 2^64.
        sums = [f"sum(CAST({quoted(name)} AS DECIMAL(38, 0)))" for name in hashes]
        (row,) = rows.selectExpr("count(1)", *sums).collect()
        number, *totals = (int(value or 0) for value in row)
        found = [Fingerprint(ALGORITHM, number, total % 2**64) for total in totals]
        which = [0] * len(sinks) if shapes is None else shapes
        return {sink.name: found[shape] for sink, shape in zip(sinks, which, strict=True)}

    def _consume(self) -> None:
        execution: Any = self._df._jdf.queryExecution()  # noqa: SLF001
        if _OBSERVED.search(execution.analyzed().treeString()):  # Spark 4.0 knows no pattern for it
            self._df.count()  # else a user's `Observation` waits for a query for ever
        else:  # not the format "noop", which accepts no INTERVAL column
            execution.toRdd().count()

    def _write_pass(
        self,
        df: DataFrame,
        sinks: Sequence[AnySink],
        incarnation: Incarnation,
        rewrite: Rewrite | None,
    ) -> dict[str, Share]:
        summaries: Sequence[PartitionSummary] | None = None
        # A batch that turns out large is computed twice, which would write its state twice.
        if rewrite is None and self._small.is_next and not self._query.is_stateful:
            summaries = self._write_here(df, sinks, incarnation)
        if summaries is None:
            summaries = self._write_on_executors(df, sinks, incarnation, rewrite)
        self._record_batches.note(summaries)
        if self._telemetry is not None:
            seconds = by_sink_and_step(summary.seconds for summary in summaries)
            self._telemetry.tasks_ended(incarnation.pipeline, seconds)
        return shares_of(sinks, summaries)

    def _write_here(
        self, df: DataFrame, sinks: Sequence[AnySink], incarnation: Incarnation
    ) -> Sequence[PartitionSummary] | None:
        """Let the driver write the rows as one partition; None where it could not.

        Each partition returns at most one row too many; spark.driver.maxResultSize bounds the sum.
        """
        most = self._small.most_rows
        # Counted after `select=`, which may make few rows of many: what is written counts.
        rows, shapes = self._shapes.with_hashes(df, sinks)
        rows = rows.where(f"{_ROW_NUMBER} <= {most}")

        def collected() -> Iterator[pa.RecordBatch]:
            table = rows.toArrow()
            if table.num_rows > most:
                raise NotSmallError(f"it has more than {most} rows")
            yield from table.cast(arrow_schema(rows)).to_batches()

        # Pickled copies, as an executor gets them.
        copies = cloudpickle.loads(cloudpickle.dumps([as_sent(sink) for sink in sinks]))
        try:
            # The branches are begun while Spark computes the rows.
            writer = PartitionWriter(copies, incarnation, self.batch_id, shapes, is_eager=True)
            return [writer.write(collected(), 0, attempt_of_small_batch(self.batch_id))]
        except Exception as error:
            for copy in copies:
                copy.close()  # it may have opened a connection to abort
            if self._query.is_stopping:
                raise
            # Not raised: Spark runs a task that fails again, too.
            level = logging.INFO if isinstance(error, NotSmallError) else logging.WARNING
            logger.log(
                level,
                "batch %d: the driver could not write it as a small batch: %s. The executors write "
                "it now; driver_rows=0 leaves all batches to them",
                self.batch_id,
                error,
            )
            self._small.forget()
            return None

    def _write_on_executors(
        self,
        df: DataFrame,
        sinks: Sequence[AnySink],
        incarnation: Incarnation,
        rewrite: Rewrite | None,
    ) -> Sequence[PartitionSummary]:
        df, shapes = self._shapes.with_hashes(df, sinks)
        observer = None
        if self._telemetry is not None:
            observer = self._telemetry.for_tasks(incarnation.pipeline, self.batch_id)
        writer = PartitionWriter(
            sinks, incarnation, self.batch_id, shapes, rewrite, observer=observer
        )
        # After `transform` and `select`, which may fill the columns of `distribute_by` at random.
        with _snapshot(df) if self._may_mix(sinks[0]) else nullcontext(df) as made:
            rows = made
            if sinks[0].writers is not None:
                prefix = "" if shapes is None else "shape0."
                keys = (f"{prefix}{quoted(name)}" for name in sinks[0].distribute_by or ())
                # A fixed number keeps adaptive execution from changing the partitions.
                rows = made.repartition(sinks[0].writers, *keys)
            # As Arrow: `collect` takes longer to return a few rows than the tasks take to write.
            with self._record_batches.unmeasured(rows, self._query):
                returned = rows.mapInArrow(writer, SUMMARY_SCHEMA).toArrow()
        summaries = [PartitionSummary.decode(text) for text in returned.column(0).to_pylist()]
        partitions = {summary.partition for summary in summaries}
        if len(partitions) != len(summaries):
            raise ProtocolError(f"batch {self.batch_id}: Spark returned a partition twice")
        return summaries


def _passes(sinks: Sequence[AnySink]) -> list[list[AnySink]]:
    """The sinks, grouped by the pass that they share."""
    passes: dict[object, list[AnySink]] = {}
    for sink in sinks:
        has_own_pass = sink.transform or sink.distribute_by
        passes.setdefault(sink.name if has_own_pass else sink.writers, []).append(sink)
    return list(passes.values())


@contextmanager
def _snapshot(df: DataFrame) -> Iterator[DataFrame]:
    """The rows as they are now, kept on the executors until the block ends.

    Not with `persist`: Spark recomputes what a lost executor held. Spark's own clean-up would keep
    the rows for up to half an hour longer.
    """
    context = df.sparkSession.sparkContext
    # Serialized, so that Spark 4.3 and later can checksum what it keeps: where two attempts at a
    # partition made different rows, all passes read those of one attempt.
    rows = df.localCheckpoint(eager=True, storageLevel=StorageLevel.MEMORY_AND_DISK)
    try:
        yield rows
    finally:
        if context._jsc is not None:  # noqa: SLF001 - Spark has not been stopped meanwhile
            plan: Any = rows._jdf.queryExecution().logical()  # noqa: SLF001
            # Not `unpersist`, which warns that the rows cannot be computed again.
            context._jsc.sc().unpersistRDD(plan.rdd().id(), False)  # noqa: SLF001


def _is_repeatable(rows: DataFrame) -> bool:
    """Whether another computation of these rows gives the same ones, without chance or a clock."""
    plan: Any = rows._jdf.queryExecution().analyzed()  # noqa: SLF001
    patterns = java_class(rows.sparkSession._jvm, TREE_PATTERNS)  # noqa: SLF001
    return plan.deterministic() and not plan.containsPattern(patterns.CURRENT_LIKE())
