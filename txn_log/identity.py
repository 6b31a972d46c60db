"""The identity guard: may this start write under this pipeline's name?

    log  ──binds the name to──►  query id of the checkpoint
         ◄──holds the log's id── checkpoint        each record keeps the source offsets of its batch

`admit` refuses a start that would deliver rows again or skip some. It refuses before the start has
taken a token, because a refused start must not fence the healthy driver. It is a pure function: a
log calls it inside the conditional write that takes the token. `refusals` has the error messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from sparkonce.txn_log import refusals
from sparkonce.txn_log.claim import Claim, Known
from sparkonce.txn_log.places import is_same_place, place_of_log
from sparkonce.txn_log.record import Head, State, TransactionRecord
from sparkonce.txn_log.refusals import CHANGED_STATE, MOVED_FROM

_START_OF_2025: Final = 1_735_689_600
"""In Unix time."""

_FORM: Final = re.compile(
    rf"batch [0-9]+|[0-9a-f]{{16}}|{MOVED_FROM}\S.*|{CHANGED_STATE}", re.DOTALL
)


def adopted(given: object) -> tuple[str, ...]:
    """Check the argument adopt= of `ExactlyOnce`: None, one form, or a sequence of forms.

        "batch 12"              the checkpoint is at batch 12, every lower batch is delivered, and
                                nothing of batch 12
        "0123456789abcdef"      the checkpoint's own log, with this id, is lost; the same holds for
                                the checkpoint's batch
        "moved from /old/ckpt"  the checkpoint was moved with the log inside it, and the old place
                                is never run again
        "changed state"         the state of other aggregates is right for this query too; see
                                `sparkonce.spark_hooks.aggregates`

    Raises:
        ConfigurationError: it has another form.
    """
    if given is None:
        return ()
    forms = [given] if isinstance(given, str) or not isinstance(given, Sequence) else given
    for form in forms:
        if not isinstance(form, str) or not _FORM.fullmatch(form):
            raise refusals.unknown_form(form)
    return tuple(forms)


def admit(claim: Claim, known: Known, now: float) -> Head:
    """Return the pipeline's next head, with a new token.

    Raises:
        ConfigurationError: this start would lose or repeat rows; the error names the next step.
        FencedError: another run holds the token, and this run must not fence it.
    """
    head = known.head
    _check_is_newest(claim, head)
    if head is not None and claim.query_id in head.rewound:
        raise refusals.rewound(claim, head)
    _check_checkpoint_knows_this_log(claim, known)
    _check_is_where_it_was(claim, known)
    if head is not None and head.rewinding_to:
        raise refusals.rewinding(head)
    _check_sinks_can_finish(claim, known)
    if head is None or head.query_id != claim.query_id:
        _check_new_query(claim, known)
    else:
        _check_batch_continues(claim, known, head)
    return _next_head(claim, known, now)


def _next_token(head: Head | None, now: float) -> int:
    """A token above that of the head: the seconds since 2025, if possible.

    So it is also above those of a log that was lost: where an older copy of the log is restored, no
    branch gets the name of another one. Fencing needs no clock: each token is above the one before.

    Args:
        head: of the pipeline; None for a new one.
        now: Unix time in seconds.
    """
    return max(1 if head is None else head.token + 1, int(now) - _START_OF_2025)


def _next_head(claim: Claim, known: Known, now: float) -> Head:
    head = known.head
    first = Head(
        claim.pipeline,
        claim.query_id,
        token=_next_token(head, now),
        run_id=claim.run_id,
        driver=claim.driver,
        started_at=now,
        first_batch=claim.batch_id,
        sinks=dict(claim.sinks),
        checkpoint=claim.checkpoint,
    )
    if head is None:
        return first
    following = replace(
        first,
        sinks={**head.sinks, **claim.sinks},
        starts=1 if has_finished(head, known.records.values()) else head.starts + 1,
        log_id=head.log_id,
        checkpoint=claim.checkpoint or head.checkpoint,
        rewound=head.rewound,
    )
    if head.query_id != claim.query_id:
        retired = tuple(q for q in (*head.retired, head.query_id) if q != claim.query_id)
        return replace(following, retired=retired)
    is_gap = claim.batch_id > next_batch(known.newest, head) and not repartitioned(claim, known)
    first_batch = claim.batch_id if is_gap else head.first_batch
    return replace(following, first_batch=first_batch, retired=head.retired)


def has_finished(head: Head, records: Iterable[TransactionRecord]) -> bool:
    """Whether one of the batches was finished under this token: its holder is in no crash loop.

    A record keeps the token of the driver that wrote it, even if a later driver's recovery finishes
    the batch. Then the time shows who did: it is by the same clock as `started_at`.
    """
    finished = [record for record in records if record.state.is_finished]
    return any(
        r.token == head.token or r.times.get(r.state, 0.0) >= head.started_at for r in finished
    )


def next_batch(newest: TransactionRecord | None, head: Head) -> int:
    """The batch that must follow what the log knows of the query."""
    if newest is None:
        return head.first_batch
    follows = newest.id.batch_id + (newest.state is not State.ABANDONED)
    return max(head.first_batch, follows)


def repartitioned(claim: Claim, known: Known) -> range:
    """Batches that the log does not know, in which Spark has only repartitioned its state.

    The checkpoint proves it, and that nothing was read since the newest batch of the log, if there
    is one: after a restore or a fork there is none yet.
    """
    head, newest, shown = known.head, known.newest, claim.offsets.get(claim.batch_id - 1)
    nothing = range(0)
    if head is None or head.query_id != claim.query_id or shown is None:
        return nothing
    if newest is not None and (newest.state is State.ABANDONED or newest.offsets != tuple(shown)):
        return nothing
    missing = range(next_batch(newest, head), claim.batch_id)
    return missing if len(missing) <= claim.repartitions else nothing


# -- the driver ------------------------------------------------------------------------------------


def _check_is_newest(claim: Claim, head: Head | None) -> None:
    """Refuse a run that was paused while another run took a token: it would fence that run."""
    if claim.had_token and (head is None or head.run_id != claim.run_id):
        raise refusals.overtaken(claim, head)
    if head is None or claim.seen_run is None:
        return
    # Its own run id: an earlier attempt took the token, and the answer was lost.
    if head.run_id not in {claim.seen_run, claim.run_id}:
        raise refusals.late(claim, head)
    may_be_its_own = claim.had_token or claim.is_repeated
    if head.run_id == claim.run_id and not (claim.has_batch or may_be_its_own):
        raise refusals.not_needed(claim, head)


def _check_checkpoint_knows_this_log(claim: Claim, known: Known) -> None:
    if claim.checkpoint_log_id not in {None, known.log_id, *claim.adopt}:
        raise refusals.other_log(claim, known)
    if claim.checkpoint_pipeline not in {None, claim.pipeline}:
        raise refusals.other_name(claim)


def _check_is_where_it_was(claim: Claim, known: Known) -> None:
    """Refuse a copy of a checkpoint that has its log inside.

    The log was copied too, so it can neither fence the driver of the other place nor notice what
    that driver delivers. A log outside the checkpoint serves both places. A head from an older
    version has no location yet.
    """
    place, head = place_of_log(known.log), known.head
    if place is None or head is None or not head.checkpoint:
        return
    if not is_same_place(place, claim.checkpoint):
        return
    moved = [form.removeprefix(MOVED_FROM) for form in claim.adopt if form.startswith(MOVED_FROM)]
    if not any(is_same_place(head.checkpoint, expected) for expected in (place, *moved)):
        raise refusals.copied_or_moved(claim, head)


def _check_sinks_can_finish(claim: Claim, known: Known) -> None:
    for record in known.unfinished:
        for name, share in record.shares.items():
            is_needed = any(not record.is_ruled_out(c) for c in share.committables)
            if is_needed and claim.sinks.get(name) != share.target:
                raise refusals.sink_is_missing(claim, record, name, share)


# -- a query that the pipeline is not bound to -----------------------------------------------------


def check_is_no_copy(claim: Claim) -> None:
    """Refuse the checkpoint of another pipeline, or a copy of it.

    Raises:
        ConfigurationError: the claim has a namesake.
    """
    if claim.namesake is not None:
        raise refusals.namesake(claim)


def _check_new_query(claim: Claim, known: Known) -> None:
    head = known.head
    check_is_no_copy(claim)
    if head is not None and claim.replaces != head.query_id:
        raise refusals.fresh_checkpoint(claim, head)
    for record in known.unfinished:
        if record.state is State.PREPARED:
            raise refusals.prepared_by_replaced(record)
    if head is not None and known.newest is not None:  # the query had the name before
        _check_batch_continues(claim, known, replace(head, first_batch=0))
        return
    by_batch = f"batch {claim.batch_id}" in claim.adopt
    is_lost = head is None and claim.checkpoint_log_id == known.log_id
    if is_lost and not by_batch:
        raise refusals.log_lost_its_records(claim, known)
    if claim.batch_id > 0 and not by_batch and claim.checkpoint_log_id not in claim.adopt:
        raise refusals.ran_without_a_log(claim, known)


# -- the next batch of the query that the pipeline is bound to -------------------------------------


def check_offsets(record: TransactionRecord, shown: Sequence[str], checkpoint: str) -> None:
    """Refuse a batch that the log knows with other source offsets.

    Nothing of an abandoned batch is delivered, so Spark may run it again with other rows.

    Raises:
        ConfigurationError: the checkpoint was rolled back or copied.
    """
    if record.state is State.ABANDONED or tuple(shown) == record.offsets:
        return
    raise refusals.other_offsets(record, tuple(shown), checkpoint)


def _check_batch_continues(claim: Claim, known: Known, head: Head) -> None:
    _check_has_begun(claim, known)
    expected = next_batch(known.newest, head)
    if claim.batch_id > expected:
        _check_gap(claim, known, expected)
    if claim.batch_id < expected and claim.batch_id not in known.records:
        raise refusals.rolled_back_too_far(claim, known, expected)
    for batch_id, record in known.records.items():
        if batch_id in claim.offsets:
            check_offsets(record, claim.offsets[batch_id], claim.checkpoint)


def _check_has_begun(claim: Claim, known: Known) -> None:
    """Refuse a checkpoint older than a prepared batch: only a newer one shows if that commits."""
    for record in known.unfinished:
        batch_id = record.id.batch_id
        if record.state is not State.PREPARED or batch_id < claim.batch_id:
            continue
        if batch_id > claim.batch_id or not claim.has_begun:
            raise refusals.not_begun(claim, record)


def _check_gap(claim: Claim, known: Known, expected: int) -> None:
    """Refuse to skip batches of the query that are not decided here.

    adopt="batch N" admits one gap, the one before batch N; a lost log explains any gap.
    """
    newest = known.newest
    if len(repartitioned(claim, known)) == claim.batch_id - expected:
        return
    if newest is not None and newest.state is State.ABANDONED and newest.id.batch_id == expected:
        raise refusals.abandoned_gap(claim, known, expected)
    is_of_lost_log = claim.checkpoint_log_id not in {None, known.log_id}  # adopt= names it
    if not is_of_lost_log and f"batch {claim.batch_id}" not in claim.adopt:
        raise refusals.gap(claim, known, expected)
