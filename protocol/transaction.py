"""The protocol on one page: what happens to a batch, from its rows to their visibility.

    deliver   the batch before ─► find ─► write ─► vote ─► DECIDE ─► commit ─► complete ─► sweep
                                            └─ any failure: ─┘ └─ any failure: the next start
                                               abort              continues from the log
              a replay of a complete batch is read to its end (drain) and not written
    recover   for each unfinished record: decide or abandon it; commit what is decided; then sweep

The point of no return is the write of DECIDED to the log. A decided batch never becomes undecided:
each of its branches is committed, in this process or a later one. Three deciders write it:

    setting                     decider          `decide` writes      DECIDED follows
    commit="immediate"          Immediate        DECIDED              at once
    commit="after_checkpoint"   AfterCheckpoint  PREPARED             when Spark's commit log has
                                                                      the batch: `commit_pending`
                                                                      by a thread of the run, or
                                                                      `recover` after a crash
    "immediate", and the log    WithTheLog       rows and COMPLETE    in the same transaction
    is in the only sink's                        in one transaction
    database

PREPARED protects its branches from every sweep until Spark's checkpoint shows whether the batch is
decided or abandoned.

Invariants (docs/explanation/invariants.md has their reasons, and the tests that hold them):

* I1: all branches of a batch end the same way, unless an operator rules otherwise;
* I2: only what a decision names is committed, and a decision names only what is prepared;
* I3: a decision changes only by an amendment that replaces what is proven lost, or what an operator
  has ruled to be rewritten;
* I4: a second commit of a branch changes nothing visible;
* I5: batch N+1 is not written while N is undecided;
* I6: an older driver writes nothing to the log, and harms no branch of a newer one;
* I7: nothing of an aborted attempt ever becomes visible;
* I8: when faults stop, every branch ends: none is left open or prepared.
"""

from __future__ import annotations

import logging

from sparkonce.errors import (
    FencedError,
    ProtocolError,
    SparkOnceError,
)
from sparkonce.protocol.amending import lost_for_good, rewrite_lost
from sparkonce.protocol.committing import commit_branches
from sparkonce.protocol.deciders import Decider, decide_prepared
from sparkonce.protocol.decisions import Fate, fate_of_prepared
from sparkonce.protocol.forgetting import forget_old
from sparkonce.protocol.keys import key_of
from sparkonce.protocol.lease import Lease
from sparkonce.protocol.pipeline import Batch
from sparkonce.protocol.preparing import aborting_on_failure, prepare
from sparkonce.protocol.rewriting import Lost, Rewrite, replay_difference
from sparkonce.protocol.sweeping import sweep, sweeping_when_fenced
from sparkonce.steps import step
from sparkonce.txn_log.identity import check_offsets
from sparkonce.txn_log.record import State, TransactionRecord

logger = logging.getLogger("sparkonce")

_MOST_REWRITES = 3


def deliver(batch: Batch, lease: Lease, decider: Decider) -> None:
    """Take one batch through the protocol.

    When it returns, the batch is complete, or, with commit="after_checkpoint", `decider.pending`.

    Raises:
        SinkError: the query fails; see `sparkonce.errors`. The next start continues from the log.
        FencedError: a newer driver holds the pipeline.
    """
    delivering = step("deliver", batch=batch.batch_id, pipeline=lease.name)
    with delivering, sweeping_when_fenced(lease):
        commit_previous(batch, lease, decider)  # I5
        record = find(batch, lease)
        is_replay = record is not None
        if record is None:
            write_began = lease.pipeline.moment()
            with aborting_on_failure(lease):  # presumed abort: nothing is written
                prepared = prepare(batch, lease, decider.vote)
            # The log may have the record: nothing is aborted before it has been read again.
            record = decider.decide(prepared, lease, write_began=write_began)
        if record.state is State.DECIDED:
            record = commit_or_rewrite(record, batch, lease)
            record = complete(record, lease)
        if record.state.is_finished:
            clean_up(record, lease)
        if is_replay:
            drain(record, batch)


def recover(lease: Lease) -> None:
    """Finish what earlier drivers decided, and abort what they left undecided.

    Lost branches of the batch that Spark is about to replay are left to `deliver`, which can
    rewrite them. An operator's command may have no checkpoint to read: then no prepared batch is
    decided or abandoned.

    Raises:
        PreparedBranchLostError: branches of a batch are lost that Spark does not replay.
        SinkError: an outcome is unknown, or the target refuses a branch.
        FencedError: a newer driver holds the pipeline.
    """
    committed = lease.pipeline.checkpoint.committed()
    with step("look", pipeline=lease.name) as looking:
        unfinished = looking.result = lease.pipeline.ask_log(
            lambda: lease.pipeline.log.unfinished(lease.pipeline.name), looking
        )
    with step("recover", pipeline=lease.name):
        problems = [finish(record, committed, lease) for record in unfinished]
    sweep(lease)  # also after a problem: an orphan's lock may be what blocks a commit
    for problem in problems:
        if problem is not None:
            raise problem


def remaining(batch: Batch, lease: Lease) -> Rewrite | None:
    """What is left to write of a batch, for a caller that must know it before `deliver`.

    Returns:
        None: the whole batch. Otherwise the lost partitions, by sink. There are none if nothing is
        lost, or if the loss cannot be repaired; then `deliver` raises.

    Raises:
        SinkError: see `deliver`.
        FencedError: a newer driver holds the pipeline.
    """
    record = find(batch, lease)
    if record is None:
        return None
    lost: Lost = ()
    if record.state is State.DECIDED:
        lost = commit_branches(record, lease, is_replayed=True)
    rewrite = Rewrite.of(record, [committable for committable, _ in lost])
    return rewrite or Rewrite(record.revision + 1, {})


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
            record = commit_or_rewrite(record, None, lease)
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
        looking.result = record
    if record is None:
        return None
    check_offsets(record, batch.offsets, lease.pipeline.checkpoint.location)
    if record.state is State.PREPARED and record.token < lease.token:
        record = decide_or_abandon(record, lease)  # recovery left it: Spark had not begun it
        sweep(lease)
    if record.state is State.PREPARED or record.token > lease.token:
        # Spark has begun the batch here, so nothing older was left prepared.
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

    def fate() -> Fate:
        committed = checkpoint.committed()
        has_begun = committed is not None and checkpoint.has_offsets(batch_id)
        return fate_of_prepared(batch_id, committed=committed, has_begun=has_begun)

    def abandon() -> TransactionRecord:
        if fate() is not Fate.ABANDON:
            return record  # a paused driver's Spark may have committed the batch meanwhile
        return lease.pipeline.log.abandon(record, lease.token)

    found = fate()
    if found is Fate.ABANDON:
        with step("abandon", batch=batch_id, pipeline=lease.name) as abandoning:
            standing = abandoning.result = lease.pipeline.ask_log(abandon, abandoning)
        if standing.state is not State.PREPARED:
            logger.info("%s was prepared, and nobody decided it: %s", record.id, standing.state)
            return standing
        found = fate()
    if found is Fate.DECIDE:
        return decide_prepared(record, lease)
    logger.warning(
        "%s is prepared, and is left so: %s cannot be read, or has not begun it",
        record.id,
        checkpoint.location,
    )
    return record


def commit_or_rewrite(
    record: TransactionRecord, batch: Batch | None, lease: Lease
) -> TransactionRecord:
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
        if not lost or batch is None:
            break
        record = rewrite_lost(record, lost, batch, lease)
        lost = commit_branches(record, lease, is_replayed=is_replayed)
    if lost:
        why = _no_replay(record) if batch is None else "each time they were lost again"
        raise lost_for_good(record, lost, why, lease)
    return record


def complete(record: TransactionRecord, lease: Lease) -> TransactionRecord:
    """Note that every branch is committed."""
    with step("complete", batch=record.id.batch_id, pipeline=lease.name) as completing:
        done = completing.result = lease.pipeline.ask_log(
            lambda: lease.pipeline.log.complete(record, lease.token), completing
        )
    return done


def clean_up(done: TransactionRecord, lease: Lease) -> None:
    """Abort the losers of a finished batch, and drop old records now and then."""
    sweep(lease)
    forget_old(done, lease)


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

    Raises:
        FencedError: a newer driver finishes it.
    """
    replay = None if committed is None else lease.transaction_id(committed + 1)
    try:
        record = decide_or_abandon(record, lease)
        if record.state is not State.DECIDED:
            return None
        with step("finish", batch=record.id.batch_id, pipeline=lease.name):
            logger.info("%s was decided and is not finished: committing it", record.id)
            lost = commit_branches(record, lease, is_replayed=record.id == replay)
            if not lost:
                complete(record, lease)
    except FencedError:
        raise
    except SparkOnceError as error:
        return error
    # `deliver` rewrites what is lost, if Spark replays the batch. Without a checkpoint nobody knows
    # whether it does; but what was PREPARED is decided only when Spark has moved past it.
    is_replay_possible = record.id == replay or (
        replay is None and State.PREPARED not in record.times
    )
    if lost and not is_replay_possible:
        return lost_for_good(record, lost, _no_replay(record), lease)
    return None


def _no_replay(record: TransactionRecord) -> str:
    key = key_of(record)
    if key is None:
        return "Spark does not replay the batch any more"
    return f"only the job with key {key!r} could do that; run it again first"
