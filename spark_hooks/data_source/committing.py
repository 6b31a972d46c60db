"""Commits or aborts a batch, in a Python process on the driver, after its tasks have run.

Spark calls `commit` before it writes commits/N, so a batch whose commit fails is replayed. It calls
`abort` after a task has failed, and also after a `commit` that has raised. So an abort goes by the
log, like any sweep: what a decision names is left alone, and nothing is decided after it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sparkonce.errors import FencedError, PrepareRejectedError, ProtocolError
from sparkonce.once import once
from sparkonce.protocol.driver import Driver
from sparkonce.protocol.lease import Lease
from sparkonce.sinks.base import AnySink
from sparkonce.spark_hooks.data_source.job import Job
from sparkonce.spark_hooks.data_source.planned_query import Entered, PlannedQuery
from sparkonce.spark_hooks.data_source.tasks import Prepared, Ticket
from sparkonce.spark_hooks.data_source.written_batch import WrittenBatch, check_targets
from sparkonce.spark_hooks.partition_writer import PartitionSummary

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

logger = logging.getLogger("sparkonce")


def commit(
    job_name: str,
    checkpoint: str,
    schema: StructType,
    messages: Sequence[Prepared | None],
    batch_id: int,
) -> None:
    """Vote, decide and commit what the tasks have prepared.

    Args:
        job_name: the JOB; see `sparkonce.spark_hooks.jobs.load_job`.
        checkpoint: location of the query's checkpoint.
        schema: of the rows.
        messages: what the tasks returned.
        batch_id: the micro-batch.

    Raises:
        SinkError: the query fails; the next start continues from the log.
        FencedError: a newer driver holds the pipeline.
    """
    ticket = _ticket_of(messages)
    if ticket is None or ticket.batch_id != batch_id:
        raise ProtocolError(f"Spark commits batch {batch_id} with what belongs to {ticket}")
    job = once(Job, job_name)
    query = _query_of(checkpoint, ticket)
    driver = Driver(Lease(job.pipeline(query), ticket.incarnation, Entered(query)))
    job.validate(schema)
    driver.deliver(written(job, messages, ticket, query.offsets_of_running(batch_id)))


def abort(
    job_name: str, checkpoint: str, messages: Sequence[Prepared | None], batch_id: int
) -> None:
    """Abort what no decision names.

    The process that was committing the batch may still run, or have sent a decision that has not
    reached the log yet. So this takes a token of its own, as the same run: see `Driver.abort`.

    Where no task has returned anything there is no token to act with. Each task that failed has
    aborted what it prepared, if it could; the rest is swept when Spark plans the batch again.
    """
    ticket = _ticket_of(messages)
    if ticket is None:
        logger.info("batch %d: no task has returned; its replay sweeps what is left", batch_id)
        return
    job, query = once(Job, job_name), _query_of(checkpoint, ticket)
    pipeline = job.pipeline(query)
    entrance = job.look(pipeline, query, batch_id, seen_run=ticket.run.run_id, had_token=True)
    try:
        Driver.abort(pipeline, entrance.claim, entrance)
    except FencedError as error:
        logger.info("batch %d: its replay sweeps what is left: %s", batch_id, error)


def written(
    job: Job, messages: Sequence[Prepared | None], ticket: Ticket, offsets: tuple[str, ...]
) -> WrittenBatch:
    """The batch that the tasks have written.

    Raises:
        PrepareRejectedError: the plan had other sinks, or more tasks wrote into a sink than it may
            have.
    """
    check_targets(ticket, job.settings.sinks)
    summaries = [PartitionSummary.decode(m.summary) for m in messages if m is not None]
    _check_writers(job.settings.sinks, summaries, ticket.batch_id)
    return WrittenBatch(ticket.batch_id, offsets, job.settings.sinks, ticket, summaries)


def _ticket_of(messages: Sequence[Prepared | None]) -> Ticket | None:
    """The ticket that all tasks have returned; None where none has."""
    found = [message.ticket for message in messages if message is not None]
    if any(ticket != found[0] for ticket in found):
        raise ProtocolError(f"Spark returned the work of several plans: {found}")
    return found[0] if found else None


def _query_of(checkpoint: str, ticket: Ticket) -> PlannedQuery:
    """The query, with the entry of the process that planned the batch."""
    query = PlannedQuery(checkpoint, ticket.run.run_id)
    query.entry = ticket.entry
    return query


def _check_writers(
    sinks: Sequence[AnySink], summaries: Sequence[PartitionSummary], batch_id: int
) -> None:
    """Refuse more tasks than a sink may have: this format cannot deal the rows out again."""
    for sink in sinks:
        tasks = sum(sink.name in summary.parts for summary in summaries)
        if sink.writers is not None and tasks > sink.writers:
            raise PrepareRejectedError(
                f"batch {batch_id}: {tasks} tasks wrote into the sink {sink.name!r}, which has "
                f"writers={sink.writers}: write df.coalesce({sink.writers}) in place of df"
            )
