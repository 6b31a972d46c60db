"""Abort the branches under the pipeline's names that no unfinished record needs (I6, I8).

    the log's unfinished records ─► the names that they need
    every sink ─► the pipeline's branches ─► minus those names, minus younger tokens ─► abort
                                                  └─ of a complete record, and the sink lists only
                                                     what is not committed: commit again; what its
                                                     tasks left is aborted after that

Branches that a driver with this very token is writing would be among them, so a sweep runs only
while the driver is writing no batch. What cannot be swept now is swept after the next batch: a
failure here fails nothing.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from sparkonce.errors import FencedError
from sparkonce.model import DRIVER_ATTEMPT, BranchId, Committable, Owner, TransactionId
from sparkonce.protocol.lease import Lease
from sparkonce.protocol.pipeline import Pipeline
from sparkonce.sinks import verbs
from sparkonce.sinks.base import AnySink
from sparkonce.steps import step
from sparkonce.txn_log.base import TransactionLog
from sparkonce.txn_log.record import TransactionRecord
from sparkonce.words import counted

logger = logging.getLogger("sparkonce")


def sweep(lease: Lease, *, tokens: range | None = None) -> int:
    """Abort every orphan of the pipeline.

    Args:
        lease: of this driver.
        tokens: of the branches to abort; default: this driver's own and all older ones.

    Returns:
        How many branches were aborted.
    """
    aborted: list[int] = []
    with _best_effort(lease.pipeline, lease.pipeline.log.address):
        with step("look", pipeline=lease.name) as looking:
            unfinished = looking.result = lease.pipeline.log.unfinished(lease.pipeline.name)
        named = named_by(unfinished)
        wanted = range(lease.token + 1) if tokens is None else tokens

        def sweep_sink(sink: AnySink) -> None:
            entered = step("sweep", sink=sink, pipeline=lease.name)
            with _best_effort(lease.pipeline, repr(sink)), entered:
                entered.result = number = _abort_orphans(sink, lease, named, wanted)
                aborted.append(number)

        lease.pipeline.patience.together(sweep_sink, lease.pipeline.all_sinks.values())
    return sum(aborted)


@contextlib.contextmanager
def sweeping_when_fenced(lease: Lease) -> Iterator[None]:
    """Let a fenced driver abort whatever it prepared that nobody has decided, before it stops.

    Otherwise a prepared transaction would hold locks that its successor waits for, until the
    successor's next sweep. It does so only if this log says that a newer token holds the pipeline:
    where drivers use copies of a log, another driver may have branches of the same names.
    """
    try:
        yield
    except FencedError:
        if lease.fenced() is not None:
            sweep(lease, tokens=range(lease.token, lease.token + 1))
        raise


def named_by(unfinished: Iterable[TransactionRecord]) -> set[str]:
    """Names that no sweep may touch, including those of a task's part."""
    return {name for record in unfinished for name in record.branch_names()}


def find_orphans(
    sink: AnySink,
    owners: Iterable[Owner],
    *,
    tokens: range,
    named: Collection[str],
    others: Collection[str],
    failures: list[Exception],
) -> Iterator[Committable]:
    """Branches in the sink that no unfinished record names.

    Args:
        sink: where to look.
        owners: this query, and those that had the pipeline's name before.
        tokens: branches with other tokens are left out; a younger driver's must be.
        named: see `named_by`; read after the token was taken.
        others: names of the pipeline's sinks; a branch of another one is left to that sink.
        failures: gets an error for each owner whose branches could not be listed.
    """
    for owner in owners:
        for found in _found(sink, owner, failures):
            branch_id = found.branch_id
            of_other_sink = branch_id.sink != sink.name and branch_id.sink in others
            if of_other_sink or branch_id.token not in tokens or branch_id.name in named:
                continue
            yield found


def _found(sink: AnySink, owner: Owner, failures: list[Exception]) -> Iterator[Committable]:
    try:
        yield from verbs.find_branches(sink, owner)
    except Exception as error:  # noqa: BLE001 - the caller logs it
        failures.append(error)


@contextlib.contextmanager
def _best_effort(pipeline: Pipeline, where: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        logger.warning(
            "pipeline %r, %s: orphans could not be aborted now; the next sweep tries again: %s",
            pipeline.name,
            where,
            error,
        )
        logger.debug("why orphans could not be aborted", exc_info=True)


def _abort_orphans(sink: AnySink, lease: Lease, named: Collection[str], tokens: range) -> int:
    failures: list[Exception] = []
    orphans = list(
        find_orphans(
            sink,
            (lease.owner, *lease.incarnation.retired),
            tokens=tokens,
            named=named,
            others=lease.pipeline.all_sinks.keys(),
            failures=failures,
        )
    )
    if verbs.lists_uncommitted_only(sink):
        orphans = _without_committed(sink, orphans, lease.pipeline)
    errors = verbs.abort_many(sink, orphans) if orphans else ()
    for found, error in zip(orphans, errors, strict=True):
        if error is not None:
            logger.warning("%s could not be aborted now: %s", found.branch_id, error)
            logger.debug("why %s could not be aborted", found.branch_id, exc_info=error)
    if aborted := sum(error is None for error in errors):
        logger.info("%r: aborted %s", sink, counted(aborted, "left-over branch"))
    if failures:
        raise failures[0]
    return aborted


def _without_committed(
    sink: AnySink, found: Sequence[Committable], pipeline: Pipeline
) -> list[Committable]:
    """Commit again what a complete batch names, and return the others: the orphans.

    Such a branch is listed where a standby was promoted that had not received the commit, or where
    an older backup was restored. An abort would destroy the last copy of its rows. A task's branch,
    whose rows are in the driver's branch too, is an orphan once that one is committed.
    """
    orphans: list[Committable] = []
    outcomes: dict[BranchId, Exception | None] = {}  # many tasks may have left something
    complete = complete_batches(pipeline.log, pipeline.name)
    for branch in found:
        named = complete(branch.branch_id)
        if named is None:
            orphans.append(branch)
            continue
        if named.branch_id not in outcomes:
            outcomes[named.branch_id] = verbs.outcome_of_commit(sink, named)
        if error := outcomes[named.branch_id]:
            logger.error("%s is left to the next sweep: %s", named.branch_id, error)
        elif named.branch_id != branch.branch_id:
            orphans.append(branch)
        else:
            logger.error(
                "batch %d of pipeline %r is complete, and %s was found prepared in %r: its server "
                "went back in time (a standby was promoted that lacked some of it, or a backup was "
                "restored). It is committed again; check the later batches there",
                named.branch_id.batch_id,
                pipeline.name,
                named.branch_id,
                sink,
            )
    return orphans


def complete_batches(
    log: TransactionLog, pipeline: str
) -> Callable[[BranchId], Committable | None]:
    """A look-up: the branch as the record of a complete batch names it, or None.

    For a task's branch whose rows the vote moved into a branch of the driver's, it is the driver's.
    """
    find_head = functools.cache(log.head)

    @functools.cache  # a batch may have left many branches
    def find(batch: TransactionId) -> TransactionRecord | None:
        record = log.find(batch)
        head = None if record is None else find_head(pipeline)
        return None if head is not None and head.is_rewound(batch) else record

    def look_up(branch_id: BranchId) -> Committable | None:
        if branch_id.batch_id is None:
            return None
        record = find(TransactionId(pipeline, branch_id.owner.query_id, branch_id.batch_id))
        return None if record is None else _committed_as(record, branch_id)

    return look_up


def _committed_as(record: TransactionRecord, branch_id: BranchId) -> Committable | None:
    """The branch as a finished record names it; None where it names none, or it was ruled out."""
    if not record.state.is_finished:
        return None
    for share in record.shares.values():
        parts = {part.branch for part in share.parts}
        for committable in share.committables:
            is_part = committable.branch_id.attempt == DRIVER_ATTEMPT and branch_id.name in parts
            is_it = committable.branch_id == branch_id or is_part
            if is_it and not record.is_ruled_out(committable):
                return committable
    return None
