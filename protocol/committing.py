"""After the decision: commit every branch, and repeat the commit until its outcome is proven.

a decided record ─► its branches, sink by sink, several at a time
                        ├─ committed
                        ├─ unknown      asked again, while this driver holds the lease
                        ├─ proven lost  returned: rewritten from the replay, if there is one
                        └─ refused      an operator settles it
all committed ─► each sink publishes the batch to its readers

From the page to a sink: `commit_or_rewrite` ─► `commit_branches` ─► `_commit_sink`, one for each
sink at the same time ─► `verbs.commit_many` ─► the sink's own `commit_many`, or its
`commit` for each branch.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event

from sparkonce.errors import (
    CommitUnresolvedError,
    LogUnavailableError,
    PreparedBranchLostError,
    SparkOnceError,
)
from sparkonce.model import BranchId, Committable, CommittedBatch
from sparkonce.protocol.lease import Lease
from sparkonce.protocol.rewriting import Lost
from sparkonce.protocol.rulings import End, ask_again_by_ruling, end_ruled
from sparkonce.sinks import verbs
from sparkonce.sinks.base import AnySink
from sparkonce.steps import step
from sparkonce.txn_log.record import Share, TransactionRecord
from sparkonce.txn_log.settlement import Ruling

logger = logging.getLogger("sparkonce")


@dataclass
class _Commit:
    """The commit of one record, while it runs."""

    record: TransactionRecord
    lease: Lease
    deadline: float
    is_replayed: bool
    interrupted: Event = field(default_factory=Event)
    lost: list[tuple[Committable, PreparedBranchLostError]] = field(default_factory=list)
    visible: set[BranchId] = field(default_factory=set)
    """Branches that are visible, though an operator ruled otherwise."""

    def attempts(self, what: step) -> Iterator[AbstractContextManager[object]]:
        """A block for each try, while the outcome is unknown, until the deadline or Ctrl-C."""
        patience = self.lease.pipeline.patience
        return patience.attempts(
            what, CommitUnresolvedError, deadline=self.deadline, interrupted=self.interrupted
        )

    def must_be_rewritten(self, committable: Committable) -> bool:
        """Whether an operator has ruled so, and Spark replays the batch."""
        return self.is_replayed and self.record.ruling(committable) is Ruling.REDO

    def step(self, name: str, sink: AnySink | None) -> step:
        record = self.record
        return step(name, batch=record.id.batch_id, sink=sink, pipeline=record.id.pipeline)


def commit_branches(record: TransactionRecord, lease: Lease, *, is_replayed: bool) -> Lost:
    """Commit every branch of a decided record, and publish the batch when none is lost.

    Args:
        record: the batch.
        lease: of this driver.
        is_replayed: whether Spark replays the batch: only then may a branch be ended by an
            operator's ruling, to be rewritten.

    Returns:
        What is proven lost.

    Raises:
        SinkError: an outcome is not known, or the target refuses the branch.
        FencedError: a newer driver holds the pipeline.
    """
    deadline = time.monotonic() + lease.pipeline.commit_timeout_s
    running = _Commit(record, lease, deadline, is_replayed)
    # What its server drops first comes first, so that no slow sink lets it expire.
    in_order = sorted(record.committables(), key=lambda c: c.safe_until or math.inf)
    ruled_out = [c for c in in_order if record.is_ruled_out(c)]
    unsure = _end_ruled(running, ruled_out)
    by_sink: dict[str, list[Committable]] = {}
    for committable in in_order:
        if not record.is_ruled_out(committable):
            by_sink.setdefault(committable.branch_id.sink, []).append(committable)
    lease.pipeline.patience.together(
        partial(_commit_sink, running), by_sink.values(), interrupted=running.interrupted
    )
    if not running.lost:
        _end_ruled(running, unsure)  # its server may be reachable now; `publish` is called once
        _publish(running)
    return running.lost


def _commit_sink(running: _Commit, branches: Sequence[Committable]) -> None:
    """Commit one sink's branches; repeat those whose outcome is unknown.

    Raises:
        SinkError: an outcome stayed unknown until the deadline, or the target refuses a branch.
        FencedError: a newer driver holds the pipeline, and commits what is left.
    """
    sink = running.lease.pipeline.all_sinks[branches[0].branch_id.sink]
    left, refused = list(branches), list[SparkOnceError]()
    while_owner = _WhileOwner(running.lease)
    with running.step("commit", sink) as committing:
        for attempt in running.attempts(committing):
            with attempt, while_owner:
                redo = [c for c in left if running.must_be_rewritten(c)]  # an operator's ruling
                usual = [c for c in left if c not in redo]
                with _unresolved(sink, "commit_many", left[0].branch_id):
                    outcomes = [(c, ask_again_by_ruling(sink, c)) for c in redo]
                    found = verbs.commit_many(sink, usual) if usual else ()
                outcomes += zip(usual, found, strict=True)
                left = [c for c, error in outcomes if isinstance(error, CommitUnresolvedError)]
                _note(running, outcomes, refused)
        committing.result = sum(c.branch_id.sink == sink.name for c, _ in running.lost)
        if refused:
            raise refused[0]


def _note(
    running: _Commit,
    outcomes: Sequence[tuple[Committable, SparkOnceError | None]],
    refused: list[SparkOnceError],
) -> None:
    """Note what is lost and what is refused; raise the first outcome that is not known."""
    for committable, error in outcomes:
        if isinstance(error, PreparedBranchLostError):
            logger.warning("%s is lost: %s", committable.branch_id, error)
            running.lost.append((committable, error))
        elif error is not None and not isinstance(error, CommitUnresolvedError):
            # Logged at once: the others may take long, and the query fails after them.
            logger.error("%s is not committed: %s", committable.branch_id, error)
            refused.append(error)
    for _, error in outcomes:
        if isinstance(error, CommitUnresolvedError):
            raise error


class _WhileOwner:
    """Wraps each try: it is repeated only while nobody has taken over.

    During an outage an operator may rule on what is repeated here, and a ruling takes a token. So
    the log is asked before each repeat; the first try relies on the log's latest answer. While the
    log is unreachable, the repeat is put off until the deadline. Waiting may lose a branch, but
    that loss is proven and reported. Committing could silently double rows that somebody has
    entered manually since.
    """

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._unknown: CommitUnresolvedError | None = None

    def __enter__(self) -> None:
        if self._unknown is not None:
            _check_again(self._lease, self._unknown)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, CommitUnresolvedError):
            self._unknown = error


def _check_again(lease: Lease, unknown: CommitUnresolvedError) -> None:
    try:
        lease.check()
    except LogUnavailableError as unreachable:
        raise CommitUnresolvedError(
            f"{unknown}; not tried again until the log can say who owns the pipeline: "
            f"{unreachable}",
            unknown.branch_id,
        ) from unreachable


def _end_ruled(running: _Commit, branches: Sequence[Committable]) -> list[Committable]:
    """End the branches that an operator ruled out, so that no older driver can commit them.

    Returns:
        Those that may still exist. Best effort: their server may be gone for good.
    """
    record, unsure = running.record, list[Committable]()

    def end(committable: Committable) -> None:
        branch_id, ruling = committable.branch_id, record.ruling(committable)
        logger.warning("%s: settled by an operator: %s", branch_id, ruling)
        sink = running.lease.pipeline.all_sinks.get(branch_id.sink)
        with running.step("end", sink):
            ended = end_ruled(sink, committable, record.shares[branch_id.sink].target)
        if ended.how is End.VISIBLE:
            running.visible.add(branch_id)
            logger.error(
                "%s is committed, and settled as %s: its rows are visible, and twice if they were "
                "entered manually too",
                branch_id,
                ruling,
            )
        elif ended.how is End.UNKNOWN:
            unsure.append(committable)
            logger.warning("%s is not proven to have ended: %s", branch_id, ended.why)

    running.lease.pipeline.patience.together(end, branches)
    return unsure


def _publish(running: _Commit) -> None:
    """Let each sink show its readers that the batch is whole."""
    record, pipeline = running.record, running.lease.pipeline
    owner = replace(running.lease.owner, query_id=record.id.query_id)

    def publish(item: tuple[str, Share]) -> None:
        name, share = item
        sink = pipeline.all_sinks[name]
        batch = CommittedBatch(
            pipeline=record.id.pipeline,
            owner=owner,
            batch_id=record.id.batch_id,
            revision=record.revision,
            offsets=record.offsets,
            # What an operator has ruled out was not committed: readers must not look for it.
            committables=tuple(
                c
                for c in share.committables
                if not record.is_ruled_out(c) or c.branch_id in running.visible
            ),
        )

        while_owner = _WhileOwner(running.lease)
        with running.step("publish", sink) as publishing:
            for attempt in running.attempts(publishing):
                with attempt, while_owner, _unresolved(sink, "publish"):
                    verbs.publish(sink, batch)

    # The start refuses a pipeline that lacks a sink with unfinished branches.
    there = [(n, s) for n, s in record.shares.items() if n in pipeline.all_sinks]
    pipeline.patience.together(publish, there, interrupted=running.interrupted)


@contextlib.contextmanager
def _unresolved(sink: AnySink, verb: str, branch_id: BranchId | None = None) -> Iterator[None]:
    """See `verbs.outcome_of_error`."""
    try:
        yield
    except Exception as error:
        outcome = verbs.outcome_of_error(sink, verb, error, branch_id)
        if outcome is error:
            raise
        raise outcome from error
