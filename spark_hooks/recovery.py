"""What an operator does without Spark: look, recover, sweep, settle.

claim_again ─► a token of the operator's own, which fences a driver that still runs
                 └─► Coordinator.recover | sweep, or TransactionLog.settle ─► end_branches
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from sparkonce.errors import ConfigurationError, LogUnavailableError
from sparkonce.model import Committable, Owner
from sparkonce.sinks.base import AnySink, at_once
from sparkonce.spark_hooks.checkpoint import (
    CheckpointFiles,
    UnknownCheckpoint,
    open_checkpoint,
)
from sparkonce.spark_hooks.drivers import is_running, this_driver
from sparkonce.spark_hooks.orphans import find_orphans, named_by
from sparkonce.spark_hooks.ruled import Ended, end_ruled
from sparkonce.spark_hooks.waiting import waiting_for
from sparkonce.txn_log.base import TransactionLog
from sparkonce.txn_log.identity import Claim, next_batch
from sparkonce.txn_log.record import Head, TransactionRecord

if TYPE_CHECKING:
    from sparkonce.spark_hooks.coordinator import Checkpoint, Coordinator
    from sparkonce.spark_hooks.exactly_once import ExactlyOnce


_OPERATOR: Final = "operator "
"""What the run id of an operator's command begins with; that of Spark is a UUID."""


class Orphan(NamedTuple):
    """A branch that no unfinished record names.

    Attributes:
        sink: where it stands.
        branch: what `abort` needs.
        may_be_written: whether the driver that holds the token made it and is not known to be
            gone: it may be writing it right now.
    """

    sink: AnySink
    branch: Committable
    may_be_written: bool


def head_of(log: TransactionLog, pipeline: str) -> Head:
    """Who holds the pipeline.

    Raises:
        ConfigurationError: the log does not know it.
    """
    head = log.head(pipeline)
    if head is None:
        known = ", ".join(map(repr, log.pipelines())) or "none"
        raise ConfigurationError(
            f"{log.address} does not know the pipeline {pipeline!r}; it has {known}"
        )
    return head


def claim_again(log: TransactionLog, head: Head, sinks: Mapping[str, str]) -> Claim:
    """The claim of an operator, who goes on where the log stands and has seen no batch."""
    return Claim(
        pipeline=head.pipeline,
        query_id=head.query_id,
        run_id=f"{_OPERATOR}{uuid.uuid4()}",
        driver=this_driver(),
        sinks=sinks,
        batch_id=next_batch(log.newest(head.pipeline, head.query_id), head),
        checkpoint=head.checkpoint,
    )


def is_held_by_operator(head: Head) -> bool:
    """Whether a command of an operator's took the token; the driver before it is fenced."""
    return head.run_id.startswith(_OPERATOR)


def find_checkpoint(head: Head, location: str | None = None) -> CheckpointFiles | UnknownCheckpoint:
    """The query's checkpoint, where it can be read without Spark.

    Args:
        head: tells where the last run had it; it is looked for on local disks only.
        location: where it is now; a JVM is started for what is on no local disk.

    Raises:
        ConfigurationError: it is not at `location`.
        LogUnavailableError: it cannot be read there now.
    """
    if location is not None:
        return open_checkpoint(location, head.query_id, start_jvm=True)
    try:
        return open_checkpoint(head.checkpoint, head.query_id)
    except (ConfigurationError, LogUnavailableError):
        return UnknownCheckpoint(head.checkpoint or "(the log does not say where)")


def take_over(job: ExactlyOnce, checkpoint: Checkpoint) -> Coordinator:
    """A coordinator that holds a token of its own; whoever held the one before is fenced."""
    head = head_of(job.log, job.name)
    sinks = {sink.name: sink.target for sink in job.all_sinks}
    return job.coordinator(claim_again(job.log, head, sinks), checkpoint)


def look_for_orphans(job: ExactlyOnce, failures: dict[str, Exception]) -> list[Orphan]:
    """What stands in the pipeline's name; nothing is changed and nobody is fenced.

    Args:
        job: the pipeline.
        failures: gets, by sink name, why a sink could not be asked.
    """
    head = head_of(job.log, job.name)
    log_id = job.log.id_of(job.name)
    owners = [Owner(log_id, query) for query in (head.query_id, *head.retired)]
    others = {sink.name for sink in job.all_sinks}
    found: list[tuple[AnySink, Committable]] = []
    for sink in job.all_sinks:
        failed: list[Exception] = []
        orphans = find_orphans(
            sink, owners, token=head.token, named=(), others=others, failures=failed
        )
        with waiting_for(f"list what stands in {sink!r}"):
            found += [(sink, branch) for branch in orphans]
        if failed:
            failures[sink.name] = failed[0]
    # After the sinks were asked: what was decided meanwhile is no orphan.
    named = named_by(job.log.unfinished(job.name))
    may_write = is_running(head.driver) is not False
    return [
        Orphan(sink, branch, may_write and branch.branch_id.token == head.token)
        for sink, branch in found
        if branch.branch_id.name not in named
    ]


def end_branches(
    job: ExactlyOnce, record: TransactionRecord, branches: Sequence[Committable]
) -> list[Ended]:
    """What has become of branches that are settled as committed or aborted, in their order.

    Called behind the word: a driver that still runs must not show beside what is put in by hand.
    """
    sinks = {sink.name: sink for sink in job.all_sinks}

    def end(committable: Committable) -> Ended:
        name = committable.branch_id.sink
        return end_ruled(sinks.get(name), committable, record.shares[name].target)

    return at_once(end, branches)
