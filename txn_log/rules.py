"""The rules of the log: what each write requires, and which record holds after it.

    begin ──► token                       (one conditional write: identity guard, binding, token)

    (nothing) ──decide──────────────────► DECIDED ──complete──► COMPLETE  (one_phase: at once)
        │                                  ▲  └─amend─┘
        └──prepare──► PREPARED ──decide────┘  └─settle─┘ (an operator) ──complete──► SETTLED
                         └────abandon───► ABANDONED ──prepare, decide (Spark's replay)──► …

Each function is one step: it reads and writes a `Store`, and nothing else. A log runs the step
atomically, so the fencing token is checked in the same step as the write (I6). An error from a
rule undoes the step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from sparkonce.errors import ConfigurationError, FencedError, ProtocolError, SparkOnceError
from sparkonce.model import TransactionId
from sparkonce.txn_log.claim import Claim, Known
from sparkonce.txn_log.identity import admit, next_batch, repartitioned
from sparkonce.txn_log.places import how_to_follow
from sparkonce.txn_log.record import Head, State, TransactionRecord
from sparkonce.txn_log.settlement import Settlement


class Store(Protocol):
    """What one atomic step of the log can read and write in a backend."""

    def pipelines(self) -> Sequence[str]:
        """The names of all pipelines, sorted."""

    def head(self, pipeline: str) -> Head | None: ...

    def find(self, transaction_id: TransactionId) -> TransactionRecord | None: ...

    def newest(self, pipeline: str, query_id: str) -> TransactionRecord | None:
        """The record of the query's highest batch, in any state."""

    def unfinished(self, pipeline: str) -> Sequence[TransactionRecord]:
        """Records whose state `is_unfinished`, lowest batch first."""

    def history(
        self, pipeline: str, limit: int, query_id: str | None = None, before: int | None = None
    ) -> Sequence[TransactionRecord]:
        """Records in any state, highest batch first; of one query, or of all; below a batch."""

    def put_head(self, head: Head) -> None: ...

    def put(self, record: TransactionRecord) -> None:
        """Insert the record, or replace the one with its id."""

    def forget(self, pipeline: str, query_id: str, below: int) -> None:
        """Drop the query's records of batches below `below` whose state is COMPLETE."""


# -- the driver ------------------------------------------------------------------------------------


def begin(
    store: Store, claim: Claim, *, log_id: str, address: str, now: float
) -> tuple[Head, Head | None]:
    """Admit a driver and give it the next token; return the new head and the one before it."""
    near = [
        store.find(TransactionId(claim.pipeline, claim.query_id, batch_id))
        for batch_id in (claim.batch_id - 1, claim.batch_id)
    ]
    before = store.head(claim.pipeline)
    require_here(before, ConfigurationError)
    known = Known(
        log_id=id_of(before, log_id),
        log=address,
        head=before,
        newest=store.newest(claim.pipeline, claim.query_id),
        records={record.id.batch_id: record for record in near if record is not None},
        unfinished=store.unfinished(claim.pipeline),
    )
    head = admit(claim, known, now)
    for batch_id in repartitioned(claim, known):
        store.put(_without_rows(claim, batch_id, head.token, now))
    store.put_head(head)
    return head, before


def _without_rows(claim: Claim, batch_id: int, token: int, now: float) -> TransactionRecord:
    """The record of a batch in which Spark has only repartitioned its state."""
    return TransactionRecord(
        TransactionId(claim.pipeline, claim.query_id, batch_id),
        token,
        State.COMPLETE,
        tuple(claim.offsets[claim.batch_id - 1]),
        {},
        {State.DECIDED: now, State.COMPLETE: now},
    )


def require_token(store: Store, pipeline: str, token: int) -> Head:
    """The head, if no newer driver has taken a token.

    Raises:
        FencedError: a newer driver has taken one, or the pipeline was moved to another log.
    """
    head = store.head(pipeline)
    require_here(head, FencedError)
    if head is None or head.token != token:
        newer = "the log does not know the pipeline" if head is None else _holder(head)
        fix = "Let the newer driver run, or stop it and start again."
        if head is not None and head.is_of_operator:
            fix = "That was an operator's command: start the query again."
        raise FencedError(
            f"this driver holds token {token} of pipeline {pipeline!r}, but {newer}. "
            f"This driver writes nothing more. {fix}"
        )
    return head


# -- records ---------------------------------------------------------------------------------------


def first(store: Store, record: TransactionRecord) -> TransactionRecord:
    """Store the first record of a batch, or of its replay after the batch was abandoned."""
    head = require_token(store, record.id.pipeline, record.token)
    stored = store.find(record.id)
    if stored is not None and stored.state is not State.ABANDONED:
        return stored
    undecided = [
        other for other in store.unfinished(record.id.pipeline) if other.state is State.PREPARED
    ]
    if undecided:
        raise ProtocolError(f"{record.id} cannot begin while {undecided[0].id} is undecided")
    expected = next_batch(store.newest(record.id.pipeline, record.id.query_id), head)
    if record.id.batch_id != expected:
        raise ProtocolError(
            f"{record.id} is out of order: the next batch of the log is {expected}. Call "
            "ExactlyOnce for every batch of the query, in order. If the log was restored to an "
            "earlier time, start the query again: the error of the start names the next step"
        )
    store.put(record)
    return record


def decide(
    store: Store, record: TransactionRecord, token: int | None, now: float
) -> TransactionRecord:
    """Decide a new record, or one that is prepared."""
    decided = record.moved(State.DECIDED, now)
    if record.state is not State.PREPARED:
        return first(store, decided)
    require_token(store, record.id.pipeline, record.token if token is None else token)
    stored = store.find(record.id)
    if stored is None or stored.state is State.ABANDONED:
        raise ProtocolError(f"{record.id} cannot be decided: it was abandoned")
    if stored.state is not State.PREPARED:
        return stored
    store.put(decided)
    return decided


def abandon(store: Store, record: TransactionRecord, token: int, now: float) -> TransactionRecord:
    """Abandon a prepared record, unless it was since decided or prepared again."""
    require_token(store, record.id.pipeline, token)
    stored = store.find(record.id)
    if stored is None or stored.state is not State.PREPARED:
        return stored or record.moved(State.ABANDONED, now)
    if stored.token != record.token:  # the replay was prepared before this call arrived
        return stored
    abandoned = stored.moved(State.ABANDONED, now)
    store.put(abandoned)
    return abandoned


def amend(store: Store, record: TransactionRecord, token: int) -> TransactionRecord:
    """Replace a decided record by its next revision."""
    require_token(store, record.id.pipeline, token)
    stored = store.find(record.id)
    if stored == record:
        return record
    if (
        stored is None
        or stored.state is not State.DECIDED
        or stored.revision != record.revision - 1
    ):
        raise ProtocolError(f"{record.id} cannot be amended: the log has {stored}")
    store.put(record)
    return record


def settle(
    store: Store, transaction_id: TransactionId, settlements: Sequence[Settlement], token: int
) -> TransactionRecord:
    """Add an operator's rulings to a decided record."""
    require_token(store, transaction_id.pipeline, token)
    stored = store.find(transaction_id)
    if stored is None or stored.state is not State.DECIDED:
        state = "not known" if stored is None else stored.state.value
        raise ProtocolError(
            f"{transaction_id} is {state}: only what is decided and unfinished can be settled"
        )
    named = {str(committable.branch_id) for committable in stored.committables()}
    unknown = [s.branch for s in settlements if s.branch not in named]
    if unknown:
        raise ProtocolError(f"{transaction_id} has no branch {unknown[0]}")
    fresh = tuple(s for s in settlements if s not in stored.settled)
    settled = replace(stored, settled=(*stored.settled, *fresh))
    store.put(settled)
    return settled


def complete(store: Store, record: TransactionRecord, token: int, now: float) -> TransactionRecord:
    """Record that a decided batch is finished."""
    require_token(store, record.id.pipeline, token)
    stored = store.find(record.id)
    if stored is not None and stored.state.is_finished:
        return stored
    if stored is None or stored.state is not State.DECIDED:
        raise ProtocolError(
            f"{record.id} cannot be complete: it was never decided, as far as this log knows. If "
            "the log was restored to an earlier time, or a standby without its newest changes took "
            "over, start the query again: the error of the start names the next step"
        )
    # The log never shows an operator's ruling as a proof, and never forgets it.
    state = State.SETTLED if stored.settled else State.COMPLETE
    done = stored.moved(state, now)
    store.put(done)
    return done


def one_phase(store: Store, record: TransactionRecord, now: float) -> TransactionRecord:
    """Store the first record of a batch as decided and complete."""
    done = record.moved(State.DECIDED, now).moved(State.COMPLETE, now)
    stored = first(store, done)
    if stored is not done:
        raise ProtocolError(f"{record.id} is already {stored.state}")
    return done


def forget(store: Store, record: TransactionRecord, token: int, retain: int) -> None:
    """Drop complete records that are `retain` or more batches below `record`."""
    require_token(store, record.id.pipeline, token)
    below = min(record.id.batch_id, record.id.batch_id - retain + 1)
    store.forget(record.id.pipeline, record.id.query_id, below)


# -- shared by several rules -----------------------------------------------------------------------


def id_of(head: Head | None, log_id: str) -> str:
    """The log id in the names of a pipeline's branches."""
    return log_id if head is None or head.log_id is None else head.log_id


def require_here(head: Head | None, refusal: type[SparkOnceError]) -> None:
    """Raise `refusal` if the pipeline is in another log, or on its way to this one."""
    if head is None or head.moved_to is None:
        return
    if head.token == 0:
        raise refusal(
            f"the move of pipeline {head.pipeline!r} from {head.moved_to} to here was cut off: "
            "run the same `sparkonce log copy` again, or pass the old log as log= to stay there"
        )
    raise refusal(
        f"pipeline {head.pipeline!r} was moved to the transaction log {head.moved_to}, and this "
        f"log takes no more writes for it: {how_to_follow(head.moved_to)}"
    )


def _holder(head: Head) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(head.started_at))
    return f"{head.driver} took token {head.token} at {when} UTC (run {head.run_id})"
