"""Plans a batch, in a Python process on the driver, before its tasks run.

Spark has written the batch's offsets and not yet started its tasks, so this is where the pipeline
is claimed, where what an earlier driver left is finished, and where a replay is recognised.

A token is kept from batch to batch while the same process plans one batch after the other. Spark
may plan the next one in another process, which takes a token of its own; so does every replay.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparkonce.errors import LogError
from sparkonce.once import once
from sparkonce.protocol.driver import Driver
from sparkonce.protocol.lease import Lease
from sparkonce.protocol.pipeline import targets_of
from sparkonce.spark_hooks.data_source.job import Job, layout_of
from sparkonce.spark_hooks.data_source.planned_query import Entered, PlannedQuery
from sparkonce.spark_hooks.data_source.tasks import TaskWriter, Ticket
from sparkonce.spark_hooks.data_source.written_batch import WrittenBatch

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


@dataclass
class Holder:
    """What this process has planned last for a pipeline and a checkpoint."""

    job: str
    checkpoint: str
    last: Ticket | None = None


def plan(job_name: str, checkpoint: str, schema: StructType) -> TaskWriter:
    """Claim the pipeline for the batch that Spark is planning, and say what its tasks write.

    Args:
        job_name: the JOB; see `sparkonce.spark_hooks.jobs.load_job`.
        checkpoint: location of the query's checkpoint.
        schema: of the rows.

    Raises:
        ConfigurationError: a setting cannot work, or the identity guard refuses the start.
        SinkError: what an earlier driver decided cannot be finished now.
        FencedError: another driver holds the pipeline.
    """
    job = once(Job, job_name)
    layout = layout_of(schema, job.settings.sinks)
    holder = once(Holder, job_name, checkpoint)
    last, holder.last = holder.last, None  # a plan that fails is followed by one with a new token
    ticket = _next_ticket(last, job, checkpoint)
    if ticket is None:
        ticket = _new_ticket(job, checkpoint, schema)
    job.validate(schema)
    holder.last = ticket
    return TaskWriter(ticket, job.writer(layout, ticket))


def _next_ticket(last: Ticket | None, job: Job, checkpoint: str) -> Ticket | None:
    """A ticket with the token of the last one; None unless it is the very next batch's."""
    if last is None:
        return None
    query = PlannedQuery(checkpoint, last.run.run_id)
    query.entry = last.entry
    if query.run != last.run:
        return None  # another query's checkpoint, which may have no log yet
    batch_id = query.planned_batch()
    lease = Lease(job.pipeline(query), last.incarnation, Entered(query))
    if not lease.may_serve(batch_id, last=last.batch_id):
        return None
    return Ticket(batch_id, last.run, last.incarnation, last.entry, None, last.targets)


def _new_ticket(job: Job, checkpoint: str, schema: StructType) -> Ticket:
    """Take a token, recover, and find out what is left to write of the batch."""
    settings = job.settings
    query = PlannedQuery(checkpoint, str(uuid.uuid4()))
    pipeline = job.pipeline(query, create=True)
    head = pipeline.log.head(pipeline.name)  # before the checkpoint is read: see `Claim.seen_run`
    batch_id = query.planned_batch()
    # What is decided must not wait for a sink that cannot be written now.
    if not pipeline.log.unfinished(pipeline.name):
        job.validate(schema)
    seen_run = "" if head is None else head.run_id
    entrance = job.look(pipeline, query, batch_id, seen_run=seen_run, had_token=False)
    driver = Driver.start(pipeline, entrance.claim, entrance)
    entrance.log_start(settings, driver)
    driver.recover()
    if query.entry is None:
        raise LogError(f"{query.checkpoint} has no entry of this driver")
    remaining = driver.remaining(WrittenBatch(batch_id, query.offsets_of_running(batch_id)))
    return Ticket(
        batch_id, query.run, driver.incarnation, query.entry, remaining, targets_of(settings.sinks)
    )
