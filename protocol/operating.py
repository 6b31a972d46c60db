"""What an operator does without Spark: look, recover, sweep, settle.

claim_again ─► a token of the operator's own, which fences a driver that still runs
                 └─► Driver.recover | sweep, or TransactionLog.settle ─► end_branches
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from sparkonce.errors import ConfigurationError
from sparkonce.model import BranchId, Committable, Owner
from sparkonce.parallel import at_once
from sparkonce.protocol.driver import Driver
from sparkonce.protocol.lease import NoEntrance
from sparkonce.protocol.pipeline import Checkpoint, Pipeline, targets_of
from sparkonce.protocol.processes import is_running, this_driver
from sparkonce.protocol.rulings import Ended, end_ruled
from sparkonce.protocol.sweeping import complete_batches, find_orphans, named_by
from sparkonce.sinks.base import AnySink
from sparkonce.sinks.verbs import lists_uncommitted_only
from sparkonce.steps import step
from sparkonce.txn_log.base import TransactionLog
from sparkonce.txn_log.claim import Claim
from sparkonce.txn_log.identity import next_batch
from sparkonce.txn_log.places import place_of_log
from sparkonce.txn_log.record import OPERATOR, Head, TransactionRecord
from sparkonce.txn_log.rules import require_here


class Orphan(NamedTuple):
    """A branch that no unfinished record names.

    Attributes:
        sink: the sink that holds it.
        branch: what `abort` needs.
        may_be_written: whether it may still be being written: the driver that holds the token
            made it, and is not known to be gone.
        is_committed: whether a complete batch names it: its server went back in time, and a sweep
            commits it again.
    """

    sink: AnySink
    branch: Committable
    may_be_written: bool
    is_committed: bool


def head_of(log: TransactionLog, pipeline: str) -> Head:
    """Who holds the pipeline.

    Raises:
        ConfigurationError: the log does not know it.
    """
    head = log.head(pipeline)
    if head is None:
        names = ", ".join(map(repr, log.pipelines()))
        known = f"its pipelines are {names}" if names else "it has none yet"
        raise ConfigurationError(f"{log.address} has no pipeline {pipeline!r}: {known}")
    return head


def head_here(log: TransactionLog, pipeline: str) -> Head:
    """Like `head_of`, for a command that would change something.

    Raises:
        ConfigurationError: the log does not know the pipeline, or it was moved to another log.
    """
    head = head_of(log, pipeline)
    require_here(head, ConfigurationError)
    return head


def claim_again(
    log: TransactionLog, head: Head, sinks: Mapping[str, str], adopt: tuple[str, ...] = ()
) -> Claim:
    """The claim of an operator, who continues from what the log holds and has seen no batch.

    Args:
        log: the transaction log.
        head: what the operator saw in it; a driver that begins after that is not fenced.
        sinks: targets by sink name.
        adopt: see `ExactlyOnce`.
    """
    return Claim(
        pipeline=head.pipeline,
        query_id=head.query_id,
        run_id=f"{OPERATOR}{uuid.uuid4()}",
        driver=this_driver(),
        sinks=sinks,
        batch_id=next_batch(log.newest(head.pipeline, head.query_id), head),
        checkpoint=place_of_log(log.address) or head.checkpoint,  # a log inside it shows where
        adopt=adopt,
        seen_run=head.run_id,
    )


class Job(Protocol):
    """A pipeline, as an operator's command has it: not running here."""

    @property
    def name(self) -> str:
        """The pipeline's name."""

    @property
    def log(self) -> TransactionLog: ...

    @property
    def all_sinks(self) -> tuple[AnySink, ...]:
        """The sinks, and those that were removed."""

    @property
    def adopt(self) -> tuple[str, ...]:
        """What lets a start pass the identity guard."""

    def pipeline(self, checkpoint: Checkpoint) -> Pipeline:
        """The pipeline's settings, over this checkpoint."""


def take_over(job: Job, checkpoint: Checkpoint) -> Driver:
    """A driver with a token of its own; the driver that held the one before is fenced."""
    head = head_of(job.log, job.name)
    claim = claim_again(job.log, head, targets_of(job.all_sinks), job.adopt)
    return Driver.start(job.pipeline(checkpoint), claim, NoEntrance())


def look_for_orphans(job: Job, failures: dict[str, Exception]) -> list[Orphan]:
    """Branches in the pipeline's name that no record needs; changes nothing and fences nobody.

    `failures` gets, by sink name, why a sink could not be asked.
    """
    head = head_of(job.log, job.name)
    log_id = job.log.id_of(job.name)
    owners = [Owner(log_id, query) for query in (head.query_id, *head.retired)]
    others = {sink.name for sink in job.all_sinks}
    found: list[tuple[AnySink, Committable]] = []
    for sink in job.all_sinks:
        failed: list[Exception] = []
        orphans = find_orphans(
            sink, owners, tokens=range(head.token + 1), named=(), others=others, failures=failed
        )
        with step("list", sink=sink, pipeline=job.name):
            found += [(sink, branch) for branch in orphans]
        if failed:
            failures[sink.name] = failed[0]
    # After the sinks were asked: what was decided meanwhile is no orphan.
    named = named_by(job.log.unfinished(job.name))
    may_write = is_running(head.driver) is not False
    complete = complete_batches(job.log, job.name)
    return [
        Orphan(
            sink,
            branch,
            may_be_written=may_write and branch.branch_id.token == head.token,
            is_committed=lists_uncommitted_only(sink) and _is_named(complete, branch.branch_id),
        )
        for sink, branch in found
        if branch.branch_id.name not in named
    ]


def _is_named(complete: Callable[[BranchId], Committable | None], branch_id: BranchId) -> bool:
    """Whether a complete batch names this branch itself."""
    named = complete(branch_id)
    return named is not None and named.branch_id == branch_id


def end_branches(
    job: Job, record: TransactionRecord, branches: Sequence[Committable]
) -> list[Ended]:
    """End branches that are settled as committed or aborted; returns what each has come to.

    Called after the ruling is recorded. A driver that still runs must not show them in addition to
    rows that are entered manually.
    """
    sinks = {sink.name: sink for sink in job.all_sinks}

    def end(committable: Committable) -> Ended:
        name = committable.branch_id.sink
        return end_ruled(sinks.get(name), committable, record.shares[name].target)

    return at_once(end, branches)
