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
from sparkonce.protocol.pipeline import Batch, Moment
from sparkonce.protocol.rewriting import Rewrite
from sparkonce.protocol.sweeping import sweep
from sparkonce.sinks.base import AnySink
from sparkonce.sinks.committables import check_committable
from sparkonce.steps import step
from sparkonce.txn_log.record import Share, State, TransactionRecord

logger = logging.getLogger("sparkonce")

_MOST_WRITES = 6
_LEAP_S = 60.0
"""More than what corrections of a clock that is kept right add up to while a batch is written."""

Vote: TypeAlias = Callable[[AnySink, BranchId, Sequence[Committable]], Sequence[Committable]]
"""How a sink is asked to vote: its branch for the batch, and what its tasks have prepared."""


def prepare(batch: Batch, lease: Lease, ask: Vote) -> TransactionRecord:
    """Write the batch and let every sink vote; returns the record that a decider may write."""
    shares = vote(batch.batch_id, write(batch, lease), lease, ask)
    return TransactionRecord(
        id=lease.transaction_id(batch.batch_id),
        token=lease.token,
        state=State.DECIDED,  # not decided yet: to a log, PREPARED is a record that it has
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
    now: Moment,
    write_began: Moment,
) -> None:
    """Refuse branches that their servers may have dropped already.

    The longer time of the two clocks counts: one may have been set back meanwhile, and where the
    other is no `CLOCK_BOOTTIME`, it stops while the machine is suspended.

    Raises:
        PrepareRejectedError: a branch's `safe_until` has passed.
    """
    by_clock_s = now.unix_s - write_began.unix_s
    steady_s = now.steady_s - write_began.steady_s
    passed_s = max(by_clock_s, steady_s)
    for committable in committables:
        if committable.safe_until is None:
            continue
        kept_s = committable.safe_until - write_began.unix_s
        if kept_s <= passed_s:
            raise PrepareRejectedError(
                f"{transaction_id}: the sink {committable.branch_id.sink!r} prepared a branch that "
                f"its server may have dropped {passed_s - kept_s:.0f} s ago, "
                f"{_why_dropped(kept_s, by_clock_s, steady_s)}",
                committable.branch_id,
            )


def _why_dropped(kept_s: float, by_clock_s: float, steady_s: float) -> str:
    """Why a branch that was kept for `kept_s` after the write began may be gone."""
    leap_s = by_clock_s - steady_s
    if abs(leap_s) > _LEAP_S and not 0 <= kept_s <= steady_s:
        return (
            f"because the driver's clock jumped {'forward' if leap_s > 0 else 'back'} by "
            f"{abs(leap_s):.0f} s while the batch was written. Start the query again, which "
            "writes the batch once more"
        )
    if kept_s < 0:  # a sink goes by the executor's clock
        return (
            "which is before its write began: the clocks of the executor and of the driver are at "
            f"least {-kept_s:.0f} s apart. Correct them"
        )
    return (
        f"because writing the batch took {max(by_clock_s, steady_s):.0f} s by the driver's clock. "
        "Make the batches smaller, or the server's transaction timeout longer; if that is far "
        "longer already, the executor's clock is behind the driver's: correct them"
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
