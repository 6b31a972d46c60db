"""What the tasks of one batch get from its plan, and what they return for its commit.

plan ─► TaskWriter(Ticket, PartitionWriter) ─► each task ─► Prepared(Ticket, summary) ─► commit
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage

from sparkonce.errors import ConfigurationError
from sparkonce.model import ATTEMPT_BOUND
from sparkonce.protocol.rewriting import Rewrite
from sparkonce.sinks.arrow_types import in_zone
from sparkonce.spark_hooks.binding import Entry
from sparkonce.spark_hooks.partition_writer import PartitionWriter
from sparkonce.spark_hooks.query import RunId
from sparkonce.txn_log.record import Incarnation

if TYPE_CHECKING:
    import pyarrow as pa

ZONE = "UTC"
"""The time zone of the instants that the sinks get: no session is there to ask for another one."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """What the plan of a batch knows, and its commit, in another process, must know.

    Attributes:
        batch_id: the micro-batch.
        run: the query, and the id under which the plan's process claimed the pipeline.
        incarnation: with the fencing token that the plan took.
        entry: the plan's entry in the checkpoint; None in a batch job, which has none.
        rewrite: which part of the batch the tasks write; None when they write all of it.
        targets: by name, of the sinks that the tasks write into.
    """

    batch_id: int
    run: RunId
    incarnation: Incarnation
    entry: Entry | None
    rewrite: Rewrite | None
    targets: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Prepared(WriterCommitMessage):  # type: ignore[misc]
    """What one task has prepared: a `PartitionSummary`, encoded, and the ticket of its batch."""

    ticket: Ticket
    summary: str


@dataclass(frozen=True, slots=True)
class TaskWriter:
    """Writes one partition into all sinks; pickled to the tasks."""

    ticket: Ticket
    writer: PartitionWriter

    def write(self, batches: Iterator[pa.RecordBatch]) -> Prepared:
        """Write and prepare the rows of this task.

        Raises:
            ConfigurationError: the task runs another batch than the one that was planned.
            PrepareRejectedError: a sink refused the rows, or could not be reached.
        """
        context = TaskContext.get()
        if context is None:
            raise RuntimeError("TaskWriter runs inside a Spark task only")
        if self.ticket.entry is not None:
            self._check_is_planned(context)
        attempt = context.taskAttemptId() % ATTEMPT_BOUND
        summary = self.writer.write(_in_zone(batches), context.partitionId(), attempt)
        return Prepared(self.ticket, summary.encode())

    def _check_is_planned(self, context: TaskContext) -> None:
        batch = context.getLocalProperty("streaming.sql.batchId")
        query = context.getLocalProperty("sql.streaming.queryId")
        if (query, batch) != (self.ticket.run.query_id, str(self.ticket.batch_id)):
            raise ConfigurationError(
                f"Spark runs batch {batch} of query {query}, and the folder of the option "
                f"checkpointLocation shows batch {self.ticket.batch_id} of query "
                f"{self.ticket.run.query_id}: let it be the query's own checkpoint, and leave "
                "asynchronous progress tracking off"
            )


def _in_zone(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows with their instants in `ZONE`, as the sinks' schemas were checked."""
    for batch in batches:
        schema = in_zone(batch.schema, ZONE)
        yield batch if schema.equals(batch.schema) else batch.cast(schema)
