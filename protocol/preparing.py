"""Before the decision: every sink writes and votes, and any failure aborts the batch.

write on the executors ─► one vote for each sink ─► a record of what is prepared
  │   ▲    └────── any failure: presumed abort: sweep, nothing is written to the log
  └───┘ executors were lost: sweep, and write again
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from sparkonce.errors import BatchInterruptedError, FencedError, PrepareRejectedError, ProtocolError
from sparkonce.model import ATTEMPT_BOUND, DRIVER_ATTEMPT, BranchId, Committable, TransactionId
from sparkonce.protocol.lease import Lease
from sparkonce.protocol.pipeline import Batch
from sparkonce.protocol.rewriting import Rewrite
from sparkonce.protocol.sweeping import sweep
from sparkonce.sinks.base import AnySink
from sparkonce.sinks.committables import check_committable
from sparkonce.steps import step
from sparkonce.txn_log.record import Share, State, TransactionRecord

logger = logging.getLogger("sparkonce")

_MOST_WRITES = 6

Vote: TypeAlias = Callable[[AnySink, BranchId, Sequence[Committable]], Sequence[Committable]]
"""How a sink is asked to vote: its branch for the batch, and what its tasks have prepared."""


def prepare(batch: Batch, lease: Lease, ask: Vote) -> TransactionRecord:
    """Write the batch and let every sink vote; returns the record that a decider may write."""
    shares = vote(batch.batch_id, write(batch, lease), lease, ask)
    return TransactionRecord(
        id=lease.transaction_id(batch.batch_id),
        token=lease.token,
        state=State.DECIDED,  # of no meaning yet: the log sets it with the write
        offsets=batch.offsets,
        shares=shares,
    )


def write(batch: Batch, lease: Lease, rewrite: Rewrite | None = None) -> Mapping[str, Share]:
    """Write the batch on the executors; once more, after a sweep, each time some of them are lost.

    Tasks of an interrupted write may still prepare. Spark gives no task attempt's number twice, so
    such branches have names of their own: no decision names them, and the next sweep aborts them.

    Raises:
        BatchInterruptedError: executors were lost each time.
    """
    for left in reversed(range(_MOST_WRITES)):
        try:
            with step("tasks", batch=batch.batch_id, pipeline=lease.name):
                return batch.write(lease.incarnation, rewrite)
        except BatchInterruptedError as error:
            if not left:
                raise
            logger.warning("%s. It is written again; at most %d more times", error, left)
            sweep(lease)
    raise AssertionError("a write ends with a result or an error")


@contextlib.contextmanager
def aborting_on_failure(lease: Lease) -> Iterator[None]:
    """Around what comes before a decision: presumed abort.

    No decision says commit, so nothing has to be written. Tasks that still run may prepare later;
    the next incarnation finds their branches.
    """
    try:
        yield
    except FencedError:
        raise  # `sweeping_when_fenced` decides whether a fenced driver may sweep
    except BaseException as error:
        sweep(lease)
        lease.raise_if_fenced(error)
        raise


def vote(
    batch_id: int,
    shares: Mapping[str, Share],
    lease: Lease,
    ask: Vote,
    *,
    write_pass: int = 0,
) -> dict[str, Share]:
    """Let each sink vote over its share of the batch; returns what a decision must name."""
    voted = {}
    for name, share in shares.items():
        sink = lease.pipeline.sinks[name]
        branch_id = BranchId(
            owner=lease.owner,
            batch_id=batch_id,
            token=lease.token,
            sink=name,
            write_pass=write_pass,
            attempt=DRIVER_ATTEMPT,
        )
        with step("vote", batch=batch_id, sink=sink, pipeline=lease.name):
            prepared = [
                check_committable(sink, committable, branch_id)
                for committable in _ask(ask, sink, branch_id, share.committables, lease)
            ]
        voted[name] = replace(share, committables=tuple(prepared))
    _check_names(batch_id, voted)
    return voted


def _ask(
    ask: Vote,
    sink: AnySink,
    branch_id: BranchId,
    committables: Sequence[Committable],
    lease: Lease,
) -> Sequence[Committable]:
    """Let a sink vote; once more where a fenced driver's left-over branch may have been in the way.

    Such a driver may have prepared after this one swept, and then hold locks.
    """
    try:
        return ask(sink, branch_id, committables)
    except PrepareRejectedError as error:
        if not sweep(lease, tokens=range(lease.token)):
            raise
        logger.warning("%r votes once more, after a sweep: %s", sink, error)
        return ask(sink, branch_id, committables)


def check_safe(
    transaction_id: TransactionId,
    committables: Iterable[Committable],
    *,
    now: float,
    write_began: float,
) -> None:
    """Refuse branches that their servers may have dropped already; times are Unix time in seconds.

    Raises:
        PrepareRejectedError: a branch's `safe_until` has passed.
    """
    for committable in committables:
        if committable.safe_until is None or committable.safe_until > now:
            continue
        ahead_s = write_began - committable.safe_until  # a sink goes by the executor's clock
        why = (
            "which is before its write began: the clocks of the executor and of the "
            f"driver are at least {ahead_s:.0f} s apart. Correct them"
            if ahead_s > 0
            else f"because writing the batch took {now - write_began:.0f} s by the "
            "driver's clock. Make the batches smaller, or the server's transaction timeout "
            "longer; if that is far longer already, the executor's clock is behind the "
            "driver's: correct them"
        )
        raise PrepareRejectedError(
            f"{transaction_id}: the sink {committable.branch_id.sink!r} prepared a branch "
            f"that its server may have dropped {now - committable.safe_until:.0f} s ago, {why}",
            committable.branch_id,
        )


def _check_names(batch_id: int, shares: Mapping[str, Share]) -> None:
    names = [c.branch_id.name for share in shares.values() for c in share.committables]
    if len(set(names)) != len(names):
        raise ProtocolError(
            f"batch {batch_id}: two branches have one name. Either a sink returned one "
            f"twice, or more than {ATTEMPT_BOUND:,} tasks ran in this Spark application while "
            "the batch was written: then give it fewer tasks, with coalesce() or writers=, or "
            "an application of its own"
        )
