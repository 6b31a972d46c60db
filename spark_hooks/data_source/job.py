"""The pipeline that the options give, in one of Spark's Python processes on the driver."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import pyarrow as pa

from sparkonce.errors import ConfigurationError
from sparkonce.protocol.pipeline import Checkpoint, Pipeline
from sparkonce.protocol.processes import spark_driver
from sparkonce.sinks.base import AnySink
from sparkonce.spark_hooks.data_source.planned_query import PlannedQuery
from sparkonce.spark_hooks.data_source.shaped import HASH, hash_names
from sparkonce.spark_hooks.data_source.tasks import ZONE, Ticket
from sparkonce.spark_hooks.entering import CheckpointEntrance
from sparkonce.spark_hooks.exactly_once import ExactlyOnce
from sparkonce.spark_hooks.jobs import load_job
from sparkonce.spark_hooks.partition_writer import PartitionWriter
from sparkonce.spark_hooks.settings import Settings
from sparkonce.spark_hooks.shaping import arrow_schema_of, distinct_shapes
from sparkonce.spark_hooks.validating import patiently, validate_sinks
from sparkonce.txn_log import TransactionLog

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

logger = logging.getLogger("sparkonce")

_TO_FIND_IT: Final = (
    "set PYTHONPATH where the Spark driver or the Connect server starts, and restart it"
)


class Layout(NamedTuple):
    """How the rows come.

    Attributes:
        shapes: the number of each sink's struct column; None where all get the same columns.
        is_hashed: whether they come with their hashes, as `sparkonce.shaped` makes them.
        schemas: of what each sink gets, by its name.
    """

    shapes: list[int] | None
    is_hashed: bool
    schemas: dict[str, pa.Schema]


class Job:
    """A pipeline, as its module or its JSON has it; see `sparkonce.spark_hooks.jobs.load_job`.

    Raises:
        ConfigurationError: it cannot be imported or made, or has a setting that needs foreachBatch.
    """

    def __init__(self, name: str) -> None:
        self._job: ExactlyOnce = load_job(name, create=True, to_find_it=_TO_FIND_IT)
        self._validated_for = ""
        _refuse_what_needs_foreach_batch(self.settings)
        if self.settings.telemetry is not None:
            logger.warning("telemetry= follows foreachBatch only: this query sends nothing")

    @property
    def settings(self) -> Settings:
        return self._job.settings

    def pipeline(self, query: PlannedQuery, *, create: bool = False) -> Pipeline:
        """The pipeline over the query's checkpoint, with its log open.

        Args:
            query: the query.
            create: check the place of a log inside the checkpoint, and make the log if it does not
                exist. Only a plan that takes a token asks for it: it is this query's start.
        """
        self._job.open_log_in(query.checkpoint, create=create, by_boto3=True)
        return self._job.pipeline(query)

    def look(
        self,
        pipeline: Pipeline,
        query: PlannedQuery,
        batch_id: int,
        *,
        seen_run: str,
        had_token: bool,
    ) -> CheckpointEntrance:
        """Look at the log and the checkpoint, for a claim; see `CheckpointEntrance.look`."""
        return CheckpointEntrance.look(
            pipeline,
            query,
            batch_id,
            replaces=self.settings.replaces,
            adopt=self.settings.adopt,
            had_token=had_token,
            seen_run=seen_run,
            has_batch=True,
            driver=spark_driver(),
        )

    @property
    def log_of_batches(self) -> TransactionLog:
        """The log of batch jobs, which have no checkpoint of Spark's.

        Raises:
            ConfigurationError: the log would be in that.
        """
        if self.settings.is_log_in_checkpoint:
            raise ConfigurationError(
                f"pipeline {self.settings.name!r}: a batch job has no checkpoint to hold the "
                'transaction log: pass log=, such as "postgresql://…"'
            )
        return self._job.log

    def pipeline_of_batches(self, checkpoint: Checkpoint) -> Pipeline:
        """The pipeline of batch jobs, over what stands for a checkpoint."""
        return self._job.pipeline(checkpoint)

    def writer(self, layout: Layout, ticket: Ticket) -> PartitionWriter:
        """What the tasks write with."""
        return PartitionWriter(
            self.settings.sinks,
            ticket.incarnation,
            ticket.batch_id,
            layout.shapes,
            ticket.rewrite,
            is_hashed=layout.is_hashed,
        )

    def validate(self, schema: StructType) -> None:
        """Let each sink check its settings, its server and its columns, unless it has for these.

        Raises:
            SinkError: see `sparkonce.sinks.base.TwoPhaseCommitSink.validate`.
        """
        if (key := schema.json()) == self._validated_for:
            return
        sinks = self.settings.sinks
        schemas = layout_of(schema, sinks).schemas
        patiently(lambda: validate_sinks(sinks, schemas), self.settings.name, lambda: True)
        self._validated_for = key


def layout_of(schema: StructType, sinks: Sequence[AnySink]) -> Layout:
    """How rows with this schema come.

    Raises:
        ConfigurationError: a sink needs columns that only `sparkonce.shaped` makes.
    """
    arrow = arrow_schema_of(schema, ZONE)
    shapes = distinct_shapes(sinks)
    hashes = hash_names(sinks)
    _check_is_shaped_for(hashes, schema)
    if schema.names == [*(f"shape{n}" for n in range(len(shapes))), *hashes]:
        of_shapes = (cast("pa.StructType", arrow.field(n).type) for n in range(len(shapes)))
        structs = [pa.schema(list(struct)) for struct in of_shapes]
        which = [list(shapes).index((sink.select, sink.columns)) for sink in sinks]
        of_sinks = zip(sinks, which, strict=True)
        return Layout(which, is_hashed=True, schemas={s.name: structs[n] for s, n in of_sinks})
    if schema.names[-1:] == hashes:
        same = arrow.remove(len(arrow) - 1)
        return Layout(None, is_hashed=True, schemas={sink.name: same for sink in sinks})
    _refuse_shapes(sinks)
    return Layout(None, is_hashed=False, schemas={sink.name: arrow for sink in sinks})


def _check_is_shaped_for(hashes: Sequence[str], schema: StructType) -> None:
    found = [name for name in schema.names if name.startswith(HASH)]
    if found and found != hashes:
        raise ConfigurationError(
            "sparkonce.shaped was called with other sinks than the pipeline has, or in another "
            "order, or with another select=: pass it the pipeline's own"
        )


def _refuse_shapes(sinks: Sequence[AnySink]) -> None:
    """Refuse sinks whose columns Spark has to make, where nobody has asked it to."""
    for sink in sinks:
        if sink.select is not None or sink.columns is not None:
            raise ConfigurationError(
                f"the sink {sink.name!r} makes its columns with SQL, which this format cannot run: "
                "write sparkonce.shaped(df, sinks) in place of df, with the pipeline's sinks in "
                "their order; or make the columns in the query"
            )


def _refuse_what_needs_foreach_batch(settings: Settings) -> None:
    why = None
    if settings.commit != "immediate":
        why = (
            f"commit={settings.commit!r} needs a process that watches Spark's checkpoint after "
            'the batch: use commit="immediate"'
        )
    for sink in settings.sinks:
        if sink.transform is not None:
            why = (
                f"transform= of the sink {sink.name!r} needs a second pass over the batch: "
                "write a query of its own for it"
            )
        elif sink.distribute_by:
            why = (
                f"the sink {sink.name!r} shuffles its rows by {list(sink.distribute_by)}, which "
                'is a second pass over the batch: with PostgresSink use load="staged"'
            )
    if why is not None:
        raise ConfigurationError(f'pipeline {settings.name!r} in format("sparkonce"): {why}')
