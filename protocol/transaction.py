"""The protocol on one page: what happens to a batch, from its rows to their visibility.

    deliver   previous ─► find ─► write ─► vote ─► DECIDE ─► commit ─► complete ─► sweep ─► drain
                                   └── any failure: abort ──┘   └── any failure: only the log says
                                                                     what holds
    recover   for each unfinished record: decide or abandon it, commit it; then sweep
    pending   the batch that waits for Spark's checkpoint: decide, commit, complete, sweep

A batch moves left to right and never back. The point of no return is the write of DECIDED: before
it is sent every failure aborts, after it nothing does. commit="immediate" sends it in
`Decider.decide`, "after_checkpoint" in `commit_pending` or `recover`. Where rows and record share
one transaction, its COMMIT is the decision.

Invariants (docs/explanation/invariants.md has all of them):

* I1, I2: only what a decision names is committed, and all of it;
* I3: a decision changes only by an amendment that replaces what is proven lost, or what an operator
  has ruled to be rewritten;
* I5: batch N+1 is not written while N is undecided;
* I6: nothing is aborted that belongs to a younger incarnation or that an unfinished record names.
"""

from __future__ import annotations

import logging

from sparkonce.errors import (
    DecisionUnknownError,
    FencedError,
    LogUnavailableError,
    ProtocolError,
    SparkOnceError,
)
from sparkonce.protocol.amending import rewrite_lost
from sparkonce.protocol.committing import commit_branches
from sparkonce.protocol.deciders import Decider, decide_prepared
from sparkonce.protocol.decisions import Move, next_move
from sparkonce.protocol.lease import Lease
from sparkonce.protocol.pipeline import Batch
from sparkonce.protocol.preparing import aborting_on_failure, prepare
from sparkonce.protocol.rewriting import cannot_redo, replay_difference
from sparkonce.protocol.sweeping import sweep, sweeping_when_fenced
from sparkonce.steps import step
from sparkonce.txn_log.identity import check_offsets
from sparkonce.txn_log.record import State, TransactionRecord

logger = logging.getLogger("sparkonce")

_FORGET_EVERY_BATCHES = 64
_MOST_REWRITES = 3
_NO_REPLAY = "Spark does not replay the batch any more"


def deliver(batch: Batch, lease: Lease, decider: Decider) -> None:
    """Take one batch through the protocol.

    When it returns, the batch is complete, or, with commit="after_checkpoint", `decider.pending`.

    Raises:
        SinkError: see `sparkonce.errors`; Spark's replay of the batch continues from there.
        FencedError: a newer driver holds the pipeline.
    """
    delivering = step("deliver", batch=batch.batch_id, pipeline=lease.name)
    with delivering, sweeping_when_fenced(lease):
        commit_previous(batch, lease, decider)  # I5: the batch before is decided first
        record = find(batch, lease)
        is_replay = record is not None
        if record is None:
            write_began = lease.pipeline.clock()
            with aborting_on_failure(lease):  # presumed abort: nothing is written
                prepared = prepare(batch, lease, decider.vote)
            # From here on only the log says what holds: nothing more is aborted.
            record = decider.decide(prepared, lease, write_began=write_began)
        if record.state is State.DECIDED:
            record = commit(record, batch, lease)  # until every branch is proven committed
            record = complete(record, lease)
        if record.state.is_finished:
            clean_up(record, lease)
        if is_replay:
            drain(record, batch)


def recover(lease: Lease) -> None:
    """Finish what earlier drivers decided, and abort what they left undecided.

    Lost branches of the batch that Spark is about to replay are left to `deliver`. If the
    checkpoint cannot be read, no lost branch is rewritten and no prepared batch is decided.

    Raises:
        PreparedBranchLostError: branches of a batch are lost that Spark does not replay.
    """
    committed = lease.pipeline.checkpoint.committed()
    with step("look", pipeline=lease.name) as looking:
        unfinished = lease.pipeline.ask_log(
            lambda: lease.pipeline.log.unfinished(lease.pipeline.name), looking
        )
    problems: list[SparkOnceError] = []
    with step("recover", pipeline=lease.name):
        for found in unfinished:
            problem = finish(found, committed, lease)
            problems += [] if problem is None else [problem]  # others must not expire meanwhile
    if not any(isinstance(problem, FencedError) for problem in problems):
        sweep(lease)  # what is left over may be what a commit waits for
    if problems:
        raise problems[0]


def commit_pending(lease: Lease, decider: Decider) -> bool:
    """Decide and commit the pending batch if Spark's checkpoint has reached it.

    Returns:
        Whether nothing is pending any more.

    Raises:
        SinkError: see `deliver`.
        FencedError: a newer driver finishes it.
    """
    record = decider.decide_pending(lease)
    if record is not None:
        if record.state is State.DECIDED:
            record = commit(record, None, lease)
            clean_up(complete(record, lease), lease)
        decider.pending = None  # not before: after an interrupt (Ctrl-C) the next call continues
    return decider.pending is None


# -- the parts of the page, in its order ----------------------------------------------------------


def commit_previous(batch: Batch, lease: Lease, decider: Decider) -> None:
    """Commit the batch before this one, which Spark's commit log must have by now."""
    if not commit_pending(lease, decider):
        pending = -1 if decider.pending is None else decider.pending.id.batch_id
        raise ProtocolError(
            f"batch {batch.batch_id} begins, but the commit log of "
            f"{lease.pipeline.checkpoint.location} has no batch {pending} yet"
        )


def find(batch: Batch, lease: Lease) -> TransactionRecord | None:
    """What the log holds of the batch; None when it has to be written.

    What an earlier driver has prepared of it is decided or abandoned first.

    Raises:
        ConfigurationError: the batch had other source offsets.
        FencedError: another driver has written it since this one began.
    """
    transaction_id = lease.transaction_id(batch.batch_id)
    with step("look", batch=batch.batch_id, pipeline=lease.name) as looking:
        record = lease.pipeline.ask_log(lambda: lease.pipeline.log.find(transaction_id), looking)
    if record is None:
        return None
    check_offsets(record, batch.offsets, lease.pipeline.checkpoint.location)
    if record.state is State.PREPARED and record.token < lease.token:
        record = decide_or_abandon(record, lease)  # recovery left it: Spark had not begun it
        sweep(lease)
    if record.state is State.PREPARED or record.token > lease.token:
        # Nothing older is undecided any more: another driver has prepared it since.
        raise FencedError(
            f"{record.id} is {record.state} by another driver (token {record.token}) since this "
            f"one (token {lease.token}) began: let that one run, or stop it and start again"
        )
    return None if record.state is State.ABANDONED else record


def decide_or_abandon(record: TransactionRecord, lease: Lease) -> TransactionRecord:
    """Decide or abandon what an earlier driver prepared: Spark's checkpoint says which."""
    if record.state is not State.PREPARED:
        return record
    batch_id, checkpoint = record.id.batch_id, lease.pipeline.checkpoint
    committed = checkpoint.committed()
    has_begun = committed is not None and checkpoint.has_offsets(batch_id)
    move = next_move(record.state, batch_id=batch_id, committed=committed, has_begun=has_begun)
    if move is Move.DECIDE:
        if not lease.is_last():  # the commits/N that is seen there is another driver's
            raise lease.overtaken(batch_id)
        return decide_prepared(record, lease)
    if move is Move.LEAVE:
        logger.warning(
            "%s is prepared, and is left so: %s cannot be read, or has not begun it",
            record.id,
            checkpoint.location,
        )
        return record
    with step("abandon", batch=batch_id, pipeline=lease.name) as abandoning:
        standing = lease.pipeline.ask_log(
            lambda: lease.pipeline.log.abandon(record, lease.token), abandoning
        )
    logger.info("%s was prepared and Spark did not commit it: it is replayed", record.id)
    return standing


def commit(record: TransactionRecord, batch: Batch | None, lease: Lease) -> TransactionRecord:
    """Commit every branch; what is proven lost is rewritten from the replay, and amended.

    Args:
        record: the decision.
        batch: Spark's replay; None where there is none.
        lease: of this driver.

    Returns:
        The decision as it is at the end.

    Raises:
        PreparedBranchLostError: branches are lost and cannot be rewritten.
    """
    is_replayed = batch is not None
    lost = commit_branches(record, lease, is_replayed=is_replayed)
    for _ in range(_MOST_REWRITES):
        if lost and batch is not None:
            record = rewrite_lost(record, lost, batch, lease)
            lost = commit_branches(record, lease, is_replayed=is_replayed)
    if lost:
        why = _NO_REPLAY if batch is None else "each time they were lost again"
        error = cannot_redo(record, lost, why)
        lease.raise_if_fenced(error)  # an operator may have ended them
        raise error
    return record


def complete(record: TransactionRecord, lease: Lease) -> TransactionRecord:
    """Note that every branch is committed."""
    with step("complete", batch=record.id.batch_id, pipeline=lease.name) as completing:
        return lease.pipeline.ask_log(
            lambda: lease.pipeline.log.complete(record, lease.token), completing
        )


def clean_up(done: TransactionRecord, lease: Lease) -> None:
    """Abort the losers of a finished batch, and drop old records now and then."""
    sweep(lease)
    if done.id.batch_id % _FORGET_EVERY_BATCHES == 0:
        try:
            lease.pipeline.log.forget(done, lease.token, retain=lease.pipeline.retain)
        except (LogUnavailableError, DecisionUnknownError):
            logger.warning("old records could not be dropped now; tried later", exc_info=True)


def drain(record: TransactionRecord, batch: Batch) -> None:
    """Read the replay of a finished batch to its end, so that Spark's own state moves on.

    A replay that holds other rows is reported: the query, or its settings, changed since.
    """
    logger.info("%s is complete: its replay is read to the end, not written", record.id)
    with step("drain", batch=batch.batch_id, pipeline=record.id.pipeline):
        contents = batch.drain()
    for name, content in contents.items():
        if difference := replay_difference(record, name, content):
            logger.error(
                "%s is complete, and its replay differs: sink %r, %s. Nothing of the replay is "
                "written. If the query was changed and should deliver its new output from here on, "
                "it needs a new checkpoint and targets of its own; if the checkpoint was rolled "
                "back, the batches up to here keep what they delivered",
                record.id,
                name,
                difference,
            )


def finish(record: TransactionRecord, committed: int | None, lease: Lease) -> SparkOnceError | None:
    """Decide or abandon what an earlier driver prepared, and commit what is decided.

    Returns:
        Why it is not complete; None when it is, or when Spark's replay continues with it.
    """
    replay = None if committed is None else lease.transaction_id(committed + 1)
    try:
        record = decide_or_abandon(record, lease)
        if record.state is not State.DECIDED:
            return None
        logger.info("%s was decided and is not finished: committing it", record.id)
        with step("finish", batch=record.id.batch_id, pipeline=lease.name):
            lost = commit_branches(record, lease, is_replayed=record.id == replay)
            if not lost:
                complete(record, lease)
    except SparkOnceError as error:
        return error
    # Spark's replay of the batch, if one comes, rewrites what is lost.
    if lost and record.id != replay and (replay is not None or State.PREPARED in record.times):
        return cannot_redo(record, lost, _NO_REPLAY)
    return None
