"""Batch jobs: `df.write.format("sparkonce")`, each under a key that its user gives.

    key "2026-11-26" ─► the log: which batch has this key?
                          ├─ none       the next number: write it
                          ├─ decided    finish it, and rewrite what is lost
                          └─ complete   write nothing

All jobs of a pipeline are batches of one query without a checkpoint. The key stands where the
source offsets of a stream stand (`sparkonce.protocol.keys`), so the identity guard compares it like
those. One job of a pipeline runs at a time: a second one fences the first.

Unlike a stream's writer, a batch writer is pickled to its commit too, so the ticket goes with it.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparkonce.errors import ConfigurationError, FencedError
from sparkonce.once import once
from sparkonce.protocol.driver import Driver
from sparkonce.protocol.keys import offsets_of, query_of
from sparkonce.protocol.lease import Lease, NoEntrance
from sparkonce.protocol.pipeline import Pipeline, targets_of
from sparkonce.protocol.processes import spark_driver
from sparkonce.spark_hooks.data_source.committing import written
from sparkonce.spark_hooks.data_source.job import Job, layout_of
from sparkonce.spark_hooks.data_source.tasks import Prepared, TaskWriter, Ticket
from sparkonce.spark_hooks.data_source.written_batch import WrittenBatch
from sparkonce.spark_hooks.query import RunId
from sparkonce.txn_log.claim import Claim
from sparkonce.txn_log.record import Head

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

logger = logging.getLogger("sparkonce")


@dataclass(frozen=True)
class JobCheckpoint:
    """What stands for Spark's checkpoint: the log shows how far the jobs are.

    Attributes:
        batch_id: of this job.
    """

    batch_id: int

    @property
    def location(self) -> str:
        return "the batch job"

    def committed(self) -> int:
        return self.batch_id - 1

    def has_offsets(self, batch_id: int) -> bool:
        return batch_id <= self.batch_id


def plan_keyed(job_name: str, key: str, schema: StructType) -> TaskWriter | None:
    """Claim the pipeline for the job with this key, and say what its tasks write.

    Args:
        job_name: the JOB; see `sparkonce.spark_hooks.jobs.load_job`.
        key: of the job; the rows of one key are written once.
        schema: of the rows.

    Returns:
        None when the job is complete already.

    Raises:
        ConfigurationError: a setting cannot work.
        SinkError: what an earlier job decided cannot be finished now.
        FencedError: another job has begun meanwhile.
    """
    job = once(Job, job_name)
    layout = layout_of(schema, job.settings.sinks)
    log, name = job.log_of_batches, job.settings.name
    run = RunId(query_of(name), str(uuid.uuid4()))
    head = log.head(name)  # before the history is read: see `Claim.seen_run`
    _check_is_of_batches(head, run.query_id, name)
    known = log.history(name, job.settings.retain, run.query_id)  # the newest first
    record = next((record for record in known if record.offsets == offsets_of(key)), None)
    if record is not None and record.state.is_finished:
        told = "pipeline %r: key %r is complete (batch %d): nothing is written"
        logger.warning(told, name, key, record.id.batch_id)
        return None
    newest = known[0].id.batch_id if known else -1
    batch_id = newest + 1 if record is None else record.id.batch_id
    pipeline = job.pipeline_of_batches(JobCheckpoint(batch_id))
    # What is decided must not wait for a sink that cannot be written now.
    if not log.unfinished(name):
        job.validate(schema)
    seen_run = "" if head is None else head.run_id
    claim = _claim(pipeline, run, batch_id, key, seen_run=seen_run, had_token=False)
    driver = Driver.start(pipeline, claim, NoEntrance())
    driver.recover()
    rewrite = driver.remaining(WrittenBatch(batch_id, offsets_of(key)))
    ticket = Ticket(
        batch_id, run, driver.incarnation, None, rewrite, targets_of(job.settings.sinks)
    )
    job.validate(schema)
    return TaskWriter(ticket, job.writer(layout, ticket))


def commit_keyed(
    job_name: str,
    key: str,
    schema: StructType,
    planned: TaskWriter,
    messages: Sequence[Prepared | None],
) -> None:
    """Vote, decide and commit what the tasks have prepared.

    Raises:
        SinkError: the job fails; run it again with the same key, which continues from the log.
        FencedError: another job has begun.
    """
    job = once(Job, job_name)
    ticket = planned.ticket
    driver = Driver(Lease(_pipeline(job, ticket), ticket.incarnation, NoEntrance()))
    job.validate(schema)
    driver.deliver(written(job, messages, ticket, offsets_of(key)))


def abort_keyed(job_name: str, key: str, planned: TaskWriter) -> None:
    """Abort what no decision names, with a token of its own: see `Driver.abort`."""
    ticket = planned.ticket
    pipeline = _pipeline(once(Job, job_name), ticket)
    run, batch_id = ticket.run, ticket.batch_id
    claim = _claim(pipeline, run, batch_id, key, seen_run=run.run_id, had_token=True)
    try:
        Driver.abort(pipeline, claim, NoEntrance())
    except FencedError as error:
        logger.info("job with key %r: the next one sweeps what is left: %s", key, error)


def _pipeline(job: Job, ticket: Ticket) -> Pipeline:
    return job.pipeline_of_batches(JobCheckpoint(ticket.batch_id))


def _claim(
    pipeline: Pipeline, run: RunId, batch_id: int, key: str, *, seen_run: str, had_token: bool
) -> Claim:
    return Claim(
        pipeline=pipeline.name,
        query_id=run.query_id,
        run_id=run.run_id,
        driver=spark_driver(),
        sinks=targets_of(pipeline.all_sinks.values()),
        batch_id=batch_id,
        offsets={batch_id: offsets_of(key)},
        seen_run=seen_run,
        had_token=had_token,
    )


def _check_is_of_batches(head: Head | None, query_id: str, name: str) -> None:
    if head is not None and head.query_id != query_id:
        raise ConfigurationError(
            f"the pipeline {name!r} belongs to the streaming query {head.query_id}: give the batch "
            "job a pipeline of its own, with another name"
        )
