"""The identity guard: is this start allowed to write under this pipeline's name?

A log and a checkpoint are tied both ways: the log binds the pipeline's name to the checkpoint's
query id, and the checkpoint holds the log's id. Every record keeps the source offsets of its
batch. So a start is refused when going on would deliver rows again or skip some, before it has
taken a token: a refused start must not fence the healthy driver.

`admit` is a pure function. A log calls it inside the conditional write that takes the token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from sparkonce.errors import ConfigurationError, FencedError
from sparkonce.txn_log.record import Head, State, TransactionRecord

_IF_LOST = (
    "If that one is lost, a new checkpoint has to begin behind what is delivered: run `sparkonce "
    "recover JOB`, which delivers what is decided; then `sparkonce log list JOB` names the last "
    "batch that is complete or settled, and `sparkonce log show JOB BATCH` its source offsets. "
    "From an earlier place on, what is delivered would be written again."
)


@dataclass(frozen=True, slots=True)
class Claim:
    """What a starting driver says of itself and of Spark's checkpoint.

    Attributes:
        pipeline: the pipeline's name.
        query_id: of the checkpoint.
        run_id: of this run of the query.
        driver: host and process, for messages.
        sinks: targets by sink name, those that get no more rows among them.
        batch_id: the batch that Spark is about to run.
        offsets: what the checkpoint shows for `batch_id` and, where it is still there, for the
            batch before.
        checkpoint: the checkpoint's location, for messages.
        checkpoint_log_id: the log id found in the checkpoint, if any.
        checkpoint_pipeline: the pipeline name found in the checkpoint, if any.
        replaces: the query id that this one takes over from.
        adopt: take over a checkpoint that ran without a log (True), or with the log that has
            this id, which is lost; or, where this log knows the query, go on at this batch
            ("batch 12") behind batches that it has no record of. It says nothing of any other
            start, so that it may stay in the settings.
        goes_on: whether this run has had a token before; it is given none behind another's.
        has_begun: whether Spark has planned the batch in this checkpoint.
        namesake: another pipeline of the log with the same query id; see
            `TransactionLog.namesake`.
    """

    pipeline: str
    query_id: str
    run_id: str
    driver: str
    sinks: Mapping[str, str]
    batch_id: int
    offsets: Mapping[int, Sequence[str]] = field(default_factory=dict)
    checkpoint: str = ""
    checkpoint_log_id: str | None = None
    checkpoint_pipeline: str | None = None
    replaces: str | None = None
    adopt: bool | str = False
    goes_on: bool = False
    has_begun: bool = True
    namesake: str | None = None


@dataclass(frozen=True, slots=True)
class Known:
    """What the log knows when a driver claims the pipeline.

    Attributes:
        log_id: the log's random id, or that of the log in which the pipeline began.
        log: the log's resolved address, for messages.
        head: of the pipeline; None when the name is new.
        newest: the record of the claimed query's highest batch, in whatever state.
        records: those of the claimed batch and of the batch before, by batch id, where known.
        unfinished: prepared and decided transactions of the pipeline that are not complete.
    """

    log_id: str
    log: str
    head: Head | None
    newest: TransactionRecord | None
    records: Mapping[int, TransactionRecord]
    unfinished: Sequence[TransactionRecord]


def admit(claim: Claim, known: Known, now: float) -> Head:
    """Return the pipeline's next head, with a new token.

    Raises:
        ConfigurationError: this start would lose or repeat rows; it names the way out.
        FencedError: another run has followed the one that asks to go on.
    """
    head = known.head
    if claim.goes_on and (head is None or head.run_id != claim.run_id):
        by = "nobody that the log knows" if head is None else f"{head.driver} (run {head.run_id})"
        raise FencedError(
            f"pipeline {claim.pipeline!r} was taken over by {by} while the run {claim.run_id} "
            "stood still: let that one go on, or stop it and start this query again"
        )
    _check_checkpoint_knows_this_log(claim, known)
    _check_sinks_can_finish(claim, known)
    if head is None or head.query_id != claim.query_id:
        _check_new_query(claim, known)
    else:
        _check_batch_continues(claim, known, head)
    first_batch = claim.batch_id
    retired: tuple[str, ...] = ()
    if head is not None and head.query_id == claim.query_id:
        expected = next_batch(known.newest, head)
        first_batch = claim.batch_id if claim.batch_id > expected else head.first_batch
        retired = head.retired
    elif head is not None:
        retired = tuple(q for q in (*head.retired, head.query_id) if q != claim.query_id)
    fresh = Head(
        claim.pipeline, claim.query_id, 0, claim.run_id, claim.driver, now, first_batch=first_batch
    )
    return replace(
        fresh,
        token=1 if head is None else head.token + 1,
        sinks={**({} if head is None else head.sinks), **claim.sinks},
        retired=retired,
        log_id=None if head is None else head.log_id,
        checkpoint=claim.checkpoint or ("" if head is None else head.checkpoint),
    )


def check_offsets(record: TransactionRecord, shown: Sequence[str], checkpoint: str) -> None:
    """Refuse a batch whose number is known with other source offsets.

    Of one that was abandoned nothing is delivered: Spark may make it anew, with other rows.

    Raises:
        ConfigurationError: the checkpoint was rolled back or copied.
    """
    if record.state is State.ABANDONED or tuple(shown) == record.offsets:
        return
    made_anew = (
        " If Spark made that batch anew here, since its files were deleted, abort what is prepared "
        "of it: sparkonce recover JOB --checkpoint LOCATION"
    )
    raise ConfigurationError(
        f"{record.id} was made with source offsets {list(record.offsets)}, but the checkpoint "
        f"{checkpoint} now shows {list(shown)} for it: the checkpoint was rolled back, or copied "
        "from another run. Rows would be lost or written twice. Start with the checkpoint that "
        f"wrote batch {record.id.batch_id}. {_IF_LOST}"
        f"{made_anew if record.state is State.PREPARED else ''}"
    )


def _check_checkpoint_knows_this_log(claim: Claim, known: Known) -> None:
    if claim.checkpoint_log_id not in {None, known.log_id, claim.adopt}:
        raise ConfigurationError(
            f"the checkpoint {claim.checkpoint} belongs to the transaction log with id "
            f"{claim.checkpoint_log_id}, but log= is {known.log} with id {known.log_id}. Without "
            "its own log, batches that are already delivered would be written again: point log= "
            "to the first one (a relative path depends on the working directory), or pass "
            f'adopt="{claim.checkpoint_log_id}" when it is lost and {_you_know(claim)}.'
        )
    if claim.checkpoint_pipeline not in {None, claim.pipeline}:
        raise ConfigurationError(
            f"the checkpoint {claim.checkpoint} belongs to the pipeline "
            f"{claim.checkpoint_pipeline!r}, not to {claim.pipeline!r}: keep the old name; a query "
            "has one pipeline, whose sinks get rows of their own by transform=. With a fresh "
            "checkpoint, what the source still has would be written again under the new one."
        )


def _check_sinks_can_finish(claim: Claim, known: Known) -> None:
    for record in known.unfinished:
        for name, share in record.shares.items():
            standing = [c for c in share.committables if not record.is_ruled_out(c)]
            if standing and claim.sinks.get(name) != share.target:
                now = claim.sinks.get(name, "not among the pipeline's sinks")
                raise ConfigurationError(
                    f"{record.id} is {record.state} and not finished, and the sink {name!r} holds "
                    f"prepared branches of it in {share.target}; now it is {now}. Start once with "
                    "the old sinks and let it finish, or pass the old sink in removed=[…]."
                )


def check_is_no_copy(claim: Claim) -> None:
    """Refuse the checkpoint of another pipeline, or a copy of it.

    Raises:
        ConfigurationError: the claim has a namesake.
    """
    if claim.namesake is not None:
        raise ConfigurationError(
            f"the checkpoint {claim.checkpoint} has the query id of the pipeline "
            f"{claim.namesake!r}, so that it is a copy of that one's or the same. What the two "
            "prepare would have the same names in every system, and each would overwrite or abort "
            f"what the other has. Give {claim.pipeline!r} a new checkpoint, which begins behind "
            "what is delivered; or, if both are to go on from copies of an old one, a transaction "
            f"log of its own. If {claim.namesake!r} never delivered anything, start under that name"
        )


def _check_new_query(claim: Claim, known: Known) -> None:
    head = known.head
    check_is_no_copy(claim)
    if head is not None and claim.replaces != head.query_id:
        raise ConfigurationError(
            f"the pipeline {claim.pipeline!r} is bound to the checkpoint of query {head.query_id}, "
            f"but {claim.checkpoint} is of query {claim.query_id}. A fresh checkpoint reads its "
            "sources from the start, so rows that are already delivered would be written again. "
            f"Use the old checkpoint. {_IF_LOST} Then pass "
            f'replaces="{head.query_id}". Another name is for a job with targets of its own.'
        )
    for record in known.unfinished:
        if record.state is State.PREPARED:
            raise ConfigurationError(
                f"{record.id} is prepared, and only its own checkpoint can say whether it commits: "
                "start once with that checkpoint, then with the new one, or settle it without "
                "Spark: sparkonce recover JOB --checkpoint LOCATION; or, if that checkpoint is "
                f"lost, with --abandon {record.id.batch_id}: it is in no sink then, and the new "
                "one has to read its rows"
            )
    if head is not None and known.newest is not None:  # it had the name before
        _check_batch_continues(claim, known, replace(head, first_batch=0))
        return
    now = (
        f"the checkpoint {claim.checkpoint} is at batch {claim.batch_id}, and the transaction log "
        f"{known.log} has no record of its batches"
    )
    by_batch = f"batch {claim.batch_id}"
    is_lost = head is None and claim.checkpoint_log_id == known.log_id
    if is_lost and claim.adopt != by_batch:  # adopt=True may stand in the settings
        raise ConfigurationError(
            f"{now}, though it ran with this log: its records are lost. Restore the log from a "
            "copy that has the newest batch (docs/operations.md, LogCorruptError), or pass "
            f'adopt="batch {claim.batch_id}" if {_you_know(claim)}.'
        )
    is_meant = claim.adopt in (True, by_batch, claim.checkpoint_log_id) and bool(claim.adopt)
    if claim.batch_id > 0 and not is_meant:
        raise ConfigurationError(
            f"{now}. If it ran with another log, point log= to that one; if it ran without "
            f'sparkonce until now, pass adopt="{by_batch}" if {_you_know(claim)} '
            "(docs/operations.md, Moving a running query here)."
        )


def next_batch(newest: TransactionRecord | None, head: Head) -> int:
    """The batch that comes after all that the log knows of the query."""
    if newest is None:
        return head.first_batch
    follows = newest.id.batch_id + (newest.state is not State.ABANDONED)
    return max(head.first_batch, follows)


def _check_batch_continues(claim: Claim, known: Known, head: Head) -> None:
    _check_has_begun(claim, known)
    expected = next_batch(known.newest, head)
    if claim.batch_id > expected:
        _check_gap(claim, known, expected)
    if claim.batch_id < expected and claim.batch_id not in known.records:
        raise ConfigurationError(
            f"the checkpoint {claim.checkpoint} is at batch {claim.batch_id}, but the transaction "
            f"log {known.log} has delivered up to batch {expected - 1} and no longer remembers "
            f"batch {claim.batch_id}: the checkpoint was rolled back too far. Start with the "
            f"newest checkpoint. {_IF_LOST}"
        )
    for batch_id, record in known.records.items():
        if batch_id in claim.offsets:
            check_offsets(record, claim.offsets[batch_id], claim.checkpoint)


def _check_has_begun(claim: Claim, known: Known) -> None:
    """Refuse a checkpoint that is older than what is prepared: only a newer one settles that."""
    for record in known.unfinished:
        batch_id = record.id.batch_id
        if record.state is not State.PREPARED or batch_id < claim.batch_id:
            continue
        if batch_id > claim.batch_id or not claim.has_begun:
            raise ConfigurationError(
                f"{record.id} is prepared, and the checkpoint {claim.checkpoint}, which is at "
                f"batch {claim.batch_id}, has not begun it: it was rolled back, copied before, or "
                "lost its last files in a power cut. "
                "Only the checkpoint that has begun it says whether it commits: start with that "
                "one. If it is lost, abort what is prepared, and Spark makes the batch anew: "
                f"sparkonce recover JOB --abandon {batch_id}"
            )


def _check_gap(claim: Claim, known: Known, expected: int) -> None:
    """Refuse to go on behind batches of the query that are not decided here.

    adopt=True is not asked: left in the settings, it would let every later gap pass.
    """
    gap = (
        f"the checkpoint {claim.checkpoint} is at batch {claim.batch_id}, but the next batch of "
        f"the transaction log {known.log} is {expected}: "
    )
    newest = known.newest
    if newest is not None and newest.state is State.ABANDONED and newest.id.batch_id == expected:
        raise ConfigurationError(
            f"{gap}it was abandoned and aborted, and another driver's Spark has moved on past it: "
            "its rows are in no sink, so adopt= does not help. Delete "
            f"{_files_behind(expected)} from the checkpoint, so that it is replayed."
        )
    is_of_lost_log = claim.checkpoint_log_id not in {None, known.log_id}  # that adopt= names
    if not is_of_lost_log and claim.adopt != f"batch {claim.batch_id}":
        raise ConfigurationError(
            f"{gap}the ones between ran without it, or the function returned without calling the "
            "pipeline, as with `if df.isEmpty(): return` (call it for each batch, empty ones too). "
            "Point log= to the log that was in use, or pass "
            f'adopt="batch {claim.batch_id}" if {_you_know(claim)}. If the log and its targets '
            f"were restored to an earlier time, and nothing of batch {expected} and the later ones "
            f"is in any sink, delete {_files_behind(expected)} from the checkpoint, so that Spark "
            "makes them anew."
        )


def _files_behind(batch_id: int) -> str:
    """What of a checkpoint has to go for Spark to run the batch, and all later ones, again.

    Without its offsets Spark makes a later batch with other rows, and an old snapshot of a version
    that it writes again would stand in the place of the new state.
    """
    return (
        f"commits/{batch_id} and all later files of commits/, the files after offsets/{batch_id} "
        "of offsets/ and, of a query with state, each N.delta, N.snapshot, N.changelog and N.zip "
        f"below state/ with N above {batch_id}"
    )


def _you_know(claim: Claim) -> str:
    return (
        f"you know that every batch below {claim.batch_id} is complete in every sink, and that "
        f"nothing of batch {claim.batch_id}, which Spark runs next, is in any"
    )
