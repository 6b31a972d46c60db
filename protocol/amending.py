"""Rewrite what is proven lost from Spark's replay, and amend the decision: the one way it changes.

lost branches ─► their rows written again, under names of their own ─► compared ─► vote ─► AMEND
                      └───── any failure before the amendment: presumed abort, as before a
                             decision: no record names the new branches
"""

from __future__ import annotations

import logging

from sparkonce.errors import PreparedBranchLostError, PrepareRejectedError, settle_command
from sparkonce.protocol.lease import Lease
from sparkonce.protocol.pipeline import Batch
from sparkonce.protocol.preparing import aborting_on_failure, check_safe, vote, write
from sparkonce.protocol.rewriting import Lost, Rewrite, cannot_redo
from sparkonce.sinks import verbs
from sparkonce.steps import step
from sparkonce.txn_log.record import TransactionRecord

logger = logging.getLogger("sparkonce")


def rewrite_lost(
    record: TransactionRecord, lost: Lost, batch: Batch, lease: Lease
) -> TransactionRecord:
    """Rewrite the lost branches and amend the decision; returns the record that the log holds.

    Raises:
        PreparedBranchLostError: they cannot be rewritten, or the replay holds other rows than the
            batch had.
    """
    rewrite = _plan(record, lost, lease)
    logger.warning("%s: rewriting what is lost: %s", record.id, rewrite)
    try:
        with (
            aborting_on_failure(lease),
            step("rewrite", batch=batch.batch_id, pipeline=lease.name),
        ):
            amended = _rewritten(rewrite, record, lost, batch, lease)
    except PrepareRejectedError:  # elsewhere it means that the whole batch is aborted
        logger.error(  # noqa: TRY400 - raised
            "%s stays decided: its lost branches could not be rewritten now. The next start tries "
            "again; or %s",
            record.id,
            settle_command(lost[0][0].branch_id),
        )
        raise
    with step("amend", batch=batch.batch_id, pipeline=lease.name) as amending:
        standing = lease.pipeline.ask_log(lambda: _amend(amended, lease), amending)
        amending.result = standing
    return standing


def lost_for_good(
    record: TransactionRecord, lost: Lost, why: str, lease: Lease
) -> PreparedBranchLostError:
    """The error where lost branches cannot be rewritten: it asks for an operator's ruling.

    Raises:
        FencedError: a newer driver, or an operator's command, holds the pipeline, and may have
            ended them.
    """
    error = cannot_redo(record, lost, why)
    lease.raise_if_fenced(error)
    return error


def _plan(record: TransactionRecord, lost: Lost, lease: Lease) -> Rewrite:
    rewrite = Rewrite.of(record, [committable for committable, _ in lost])
    if rewrite is None:
        why = "other branches that hold the sink's rows are committed"
        raise lost_for_good(record, lost, why, lease)
    if not rewrite.partitions.keys() <= lease.pipeline.sinks.keys():
        raise lost_for_good(record, lost, "the sink was removed from the pipeline", lease)
    return rewrite


def _rewritten(
    rewrite: Rewrite,
    record: TransactionRecord,
    lost: Lost,
    batch: Batch,
    lease: Lease,
) -> TransactionRecord:
    write_began = lease.pipeline.moment()
    written = write(batch, lease, rewrite)
    if difference := rewrite.difference(record, written):
        raise cannot_redo(record, lost, f"Spark's replay differs: {difference}")
    # In two phases, whatever the pipeline's decider: the batch is decided already.
    voted = vote(batch.batch_id, written, lease, verbs.vote, write_pass=rewrite.write_pass)
    branches = (c for share in voted.values() for c in share.committables)
    check_safe(record.id, branches, now=lease.pipeline.moment(), write_began=write_began)
    return rewrite.amend(record, voted, [committable for committable, _ in lost])


def _amend(amended: TransactionRecord, lease: Lease) -> TransactionRecord:
    lease.check_not_overtaken(amended.id)
    return lease.pipeline.log.amend(amended, lease.token)
