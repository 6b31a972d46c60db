"""The transaction log: the one place that says what holds.

    begin ──► token                       (one conditional write: identity guard, binding, token)

    (nothing) ──decide──────────────────► DECIDED ──complete──► COMPLETE  (one_phase: at once)
        │                                  ▲  └─amend─┘
        └──prepare──► PREPARED ──decide────┘  └─settle─┘ (an operator) ──complete──► SETTLED
                         └────abandon───► ABANDONED ──prepare, decide (Spark's replay)──► …

All writes of one pipeline are totally ordered, and each is conditional on the fencing token in the
same step: checking the token and then writing would let a paused driver write after a newer one
has taken over (I6). A decision changes only by an amendment, which takes lost branches out (I3).

The rules are written here, once. A backend gives them a `Store` to work on: its `_write` runs such
a rule as one atomic, ordered and durable step. A log knows no sink and no Spark.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from sparkonce.errors import (
    ConfigurationError,
    FencedError,
    LogCorruptError,
    ProtocolError,
    SparkOnceError,
)
from sparkonce.model import Owner, TransactionId
from sparkonce.txn_log.identity import Claim, Known, admit, next_batch
from sparkonce.txn_log.record import Head, Incarnation, State, TransactionRecord
from sparkonce.txn_log.settlement import Settlement

ResultT = TypeVar("ResultT")


class Store(Protocol):
    """What a backend shows to one atomic step of the log, and takes from it."""

    def pipelines(self) -> Sequence[str]:
        """The names of all pipelines, sorted."""

    def head(self, pipeline: str) -> Head | None: ...

    def find(self, transaction_id: TransactionId) -> TransactionRecord | None: ...

    def newest(self, pipeline: str, query_id: str) -> TransactionRecord | None:
        """The record of the query's highest batch, in whatever state."""

    def unfinished(self, pipeline: str) -> Sequence[TransactionRecord]:
        """Records whose state `is_unfinished`, lowest batch first."""

    def history(
        self, pipeline: str, limit: int, query_id: str | None = None
    ) -> Sequence[TransactionRecord]:
        """Records of every state, highest batch first; of one query, or of all."""

    def put_head(self, head: Head) -> None: ...

    def put(self, record: TransactionRecord) -> None:
        """Insert the record, or replace the one with its id."""

    def forget(self, pipeline: str, query_id: str, below: int) -> None:
        """Drop the query's records of batches below `below` whose state is COMPLETE."""


class TransactionLog(ABC):
    """Durable record of the decisions of any number of pipelines.

    Every method may be called from any thread, also in a child that was forked. It may raise
    `LogUnavailableError` (nothing was written; try again) and `LogCorruptError` (an operator
    restores the log). Every method that writes may raise `DecisionUnknownError` (it may have been
    written: call it again, it is idempotent) and `FencedError` (a newer incarnation holds the
    token; nothing was written).
    """

    # -- what a backend gives ----------------------------------------------------------------------

    @property
    @abstractmethod
    def log_id(self) -> str:
        """The log's random id: 16 hex digits, made once when the log is created."""

    @property
    @abstractmethod
    def address(self) -> str:
        """Where the log is, resolved, without secrets; for messages."""

    @abstractmethod
    def close(self) -> None:
        """Free connections. The log can be used again after it."""

    @abstractmethod
    def _read(self, question: Callable[[Store], ResultT]) -> ResultT:
        """Answer `question` from one consistent view."""

    @abstractmethod
    def _write(self, step: Callable[[Store], ResultT]) -> ResultT:
        """Run `step` as one atomic step, ordered among all of its pipeline, and durable.

        What `step` raises undoes it. It may be run again when another writer was faster.
        """

    # -- reading -----------------------------------------------------------------------------------

    def pipelines(self) -> Sequence[str]:
        """The names of all pipelines, sorted."""
        return self._read(lambda store: store.pipelines())

    def head(self, pipeline: str) -> Head | None:
        """Who holds the pipeline; None when the name is new."""
        return self._read(lambda store: store.head(pipeline))

    def find(self, transaction_id: TransactionId) -> TransactionRecord | None:
        """The record that stands; None when the batch is not known."""
        return self._read(lambda store: store.find(transaction_id))

    def newest(self, pipeline: str, query_id: str) -> TransactionRecord | None:
        """The record of the query's highest batch, in whatever state."""
        return self._read(lambda store: store.newest(pipeline, query_id))

    def unfinished(self, pipeline: str) -> Sequence[TransactionRecord]:
        """Prepared and decided transactions that are not known to be committed, oldest first."""
        return self._read(lambda store: store.unfinished(pipeline))

    def history(
        self, pipeline: str, limit: int = 100, query_id: str | None = None
    ) -> Sequence[TransactionRecord]:
        """The `limit` records of the highest batches, highest first.

        Args:
            pipeline: its name.
            limit: how many at most.
            query_id: of one query alone; default: of all that had the name, whose batches each
                begin with 0.
        """
        return self._read(lambda store: store.history(pipeline, limit, query_id))

    def id_of(self, pipeline: str) -> str:
        """The log id in the names of the pipeline's branches and in its checkpoint.

        It is `log_id`, or that of the log in which the pipeline began if it was moved here.
        """
        return self._id_of(self.head(pipeline))

    def namesake(self, pipeline: str, query_id: str) -> str | None:
        """Another pipeline that the query has, or had; None as it should be.

        Names in external systems hold the log's id and the query's, and not the pipeline's.
        """
        for other in self.pipelines():
            try:
                head = self.head(other)
            except LogCorruptError:  # told to whoever starts it
                continue
            if (
                other != pipeline
                and head is not None
                and query_id in {head.query_id, *head.retired}
                and self._id_of(head) == self.id_of(pipeline)
            ):
                return other
        return None

    def check_token(self, incarnation: Incarnation) -> None:
        """Return if no newer incarnation owns the pipeline.

        It says who stands in the way, and protects nothing: each write checks the token itself.

        Raises:
            FencedError: a newer one owns it.
        """
        self._read(
            lambda store: self._require_token(store, incarnation.pipeline, incarnation.token)
        )

    # -- writing -----------------------------------------------------------------------------------

    def begin(self, claim: Claim) -> Incarnation:
        """Admit a driver and give it the next fencing token, in one conditional write.

        After a `DecisionUnknownError` a token may have been taken: `begin` again takes a new one.

        Raises:
            ConfigurationError: the identity guard refuses, or the pipeline was moved to another
                log; nothing was written, nobody is fenced.
            FencedError: another run has followed the one that asks to go on.
        """

        def step(store: Store) -> tuple[Head, Head | None]:
            near = [
                store.find(TransactionId(claim.pipeline, claim.query_id, batch_id))
                for batch_id in (claim.batch_id - 1, claim.batch_id)
            ]
            standing = store.head(claim.pipeline)
            _require_here(standing, ConfigurationError)
            known = Known(
                log_id=self._id_of(standing),
                log=self.address,
                head=standing,
                newest=store.newest(claim.pipeline, claim.query_id),
                records={record.id.batch_id: record for record in near if record is not None},
                unfinished=store.unfinished(claim.pipeline),
            )
            head = admit(claim, known, time.time())
            store.put_head(head)
            return head, standing

        head, fenced = self._write(step)
        log_id = self._id_of(head)
        return Incarnation(
            claim.pipeline,
            Owner(log_id, claim.query_id),
            head.token,
            tuple(Owner(log_id, query_id) for query_id in head.retired),
            None if fenced is None else fenced.run_id,
        )

    def prepare(self, record: TransactionRecord) -> TransactionRecord:
        """Note that every branch of `record` is prepared and waits for Spark's checkpoint.

        Returns:
            The record that stands: the given one, or the one that was there before.

        Raises:
            ProtocolError: another batch is prepared and not decided, or a batch was left out.
        """
        return self._write(lambda store: self._first(store, record.moved(State.PREPARED, _now())))

    def decide(self, record: TransactionRecord, token: int | None = None) -> TransactionRecord:
        """Make the decision durable: the point of no return.

        Args:
            record: a new one, or one that is prepared.
            token: of the incarnation that decides; default: the one that prepared the record.

        Returns:
            The record that stands: the given one, decided, or the one that was decided before.

        Raises:
            ProtocolError: the batch was abandoned, or a batch was left out.
        """

        def step(store: Store) -> TransactionRecord:
            decided = record.moved(State.DECIDED, _now())
            if record.state is not State.PREPARED:
                return self._first(store, decided)
            self._require_token(store, record.id.pipeline, record.token if token is None else token)
            standing = store.find(record.id)
            if standing is None or standing.state is State.ABANDONED:
                raise ProtocolError(f"{record.id} cannot be decided: it was abandoned")
            if standing.state is not State.PREPARED:
                return standing
            store.put(decided)
            return decided

        return self._write(step)

    def abandon(self, record: TransactionRecord, token: int) -> TransactionRecord:
        """Note that a prepared record will never be decided; its branches may be aborted now.

        Returns:
            The record that stands: abandoned, or the one that was decided or prepared since.
        """

        def step(store: Store) -> TransactionRecord:
            self._require_token(store, record.id.pipeline, token)
            standing = store.find(record.id)
            if standing is None or standing.state is not State.PREPARED:
                return standing or record.moved(State.ABANDONED, _now())
            if standing.token != record.token:  # this call was under way while the replay prepared
                return standing
            abandoned = standing.moved(State.ABANDONED, _now())
            store.put(abandoned)
            return abandoned

        return self._write(step)

    def amend(self, record: TransactionRecord, token: int) -> TransactionRecord:
        """Put a decided record, of which lost branches were written again, in the old one's place.

        The one way in which a decision may change (I3). `record` is `TransactionRecord.amended`
        of the one that stands.

        Returns:
            The record that stands.

        Raises:
            ProtocolError: what stands is not what was amended.
        """

        def step(store: Store) -> TransactionRecord:
            self._require_token(store, record.id.pipeline, token)
            standing = store.find(record.id)
            if standing == record:
                return record
            if (
                standing is None
                or standing.state is not State.DECIDED
                or standing.revision != record.revision - 1
            ):
                raise ProtocolError(f"{record.id} cannot be amended: what stands is {standing}")
            store.put(record)
            return record

        return self._write(step)

    def settle(
        self, transaction_id: TransactionId, settlements: Sequence[Settlement], token: int
    ) -> TransactionRecord:
        """Note an operator's word on branches of a decided record; the next start honours it.

        Returns:
            The record that stands.

        Raises:
            ProtocolError: the batch is not decided, or is finished, or has no such branch.
        """

        def step(store: Store) -> TransactionRecord:
            self._require_token(store, transaction_id.pipeline, token)
            standing = store.find(transaction_id)
            if standing is None or standing.state is not State.DECIDED:
                state = "not known" if standing is None else standing.state.value
                raise ProtocolError(
                    f"{transaction_id} is {state}: only what is decided and unfinished is settled"
                )
            named = {str(committable.branch_id) for committable in standing.committables()}
            unknown = [s.branch for s in settlements if s.branch not in named]
            if unknown:
                raise ProtocolError(f"{transaction_id} has no branch {unknown[0]}")
            fresh = tuple(s for s in settlements if s not in standing.settled)
            settled = replace(standing, settled=(*standing.settled, *fresh))
            store.put(settled)
            return settled

        return self._write(step)

    def complete(self, record: TransactionRecord, token: int) -> TransactionRecord:
        """Note that every branch of a decided record is committed, or settled by an operator.

        Raises:
            ProtocolError: the record is not decided.
        """

        def step(store: Store) -> TransactionRecord:
            self._require_token(store, record.id.pipeline, token)
            standing = store.find(record.id)
            if standing is not None and standing.state.is_finished:
                return standing
            if standing is None or standing.state is not State.DECIDED:
                raise ProtocolError(f"{record.id} cannot be complete: it was never decided")
            # An operator's word is never shown as a proof, nor forgotten.
            state = State.SETTLED if standing.settled else State.COMPLETE
            done = standing.moved(state, _now())
            store.put(done)
            return done

        return self._write(step)

    def forget(self, record: TransactionRecord, token: int, *, retain: int) -> None:
        """Drop complete records of the query that are `retain` or more batches below `record`.

        The highest complete record is always kept (I3), and so is every settled one.
        """

        def step(store: Store) -> None:
            self._require_token(store, record.id.pipeline, token)
            below = min(record.id.batch_id, record.id.batch_id - retain + 1)
            store.forget(record.id.pipeline, record.id.query_id, below)

        self._write(step)

    # -- rules that several steps share ------------------------------------------------------------

    def _first(self, store: Store, record: TransactionRecord) -> TransactionRecord:
        """Put the first record of a batch, or of its replay after it was abandoned."""
        head = self._require_token(store, record.id.pipeline, record.token)
        standing = store.find(record.id)
        if standing is not None and standing.state is not State.ABANDONED:
            return standing
        undecided = [
            other for other in store.unfinished(record.id.pipeline) if other.state is State.PREPARED
        ]
        if undecided:
            raise ProtocolError(f"{record.id} cannot begin while {undecided[0].id} is undecided")
        expected = next_batch(store.newest(record.id.pipeline, record.id.query_id), head)
        if record.id.batch_id != expected:
            raise ProtocolError(
                f"{record.id} cannot follow: the next batch of the log is {expected}. Call "
                "ExactlyOnce for every batch of the query, in their order; if the log was restored "
                "to an earlier time, start the query again, which says what to do"
            )
        store.put(record)
        return record

    def _one_phase(self, store: Store, record: TransactionRecord) -> TransactionRecord:
        """Put the first record of a batch as complete."""
        now = _now()
        done = record.moved(State.DECIDED, now).moved(State.COMPLETE, now)
        standing = self._first(store, done)
        if standing is not done:
            raise ProtocolError(f"{record.id} is {standing.state} already")
        return done

    def _id_of(self, head: Head | None) -> str:
        return self.log_id if head is None or head.log_id is None else head.log_id

    def _require_token(self, store: Store, pipeline: str, token: int) -> Head:
        head = store.head(pipeline)
        _require_here(head, FencedError)
        if head is None or head.token != token:
            newer = "the log does not know the pipeline" if head is None else _who(head)
            raise FencedError(
                f"this driver holds token {token} of pipeline {pipeline!r}, but {newer}. "
                "It writes nothing more; let the newer driver run, or stop it and start again."
            )
        return head


def no_log(address: str) -> ConfigurationError:
    """What to raise where a log has to be there and is not."""
    return ConfigurationError(
        f"there is no transaction log at {address}: check the address; a query's first start makes "
        "its log"
    )


def _require_here(head: Head | None, refusal: type[SparkOnceError]) -> None:
    if head is not None and head.moved_to is not None:
        if head.token == 0:
            raise refusal(
                f"the move of pipeline {head.pipeline!r} from {head.moved_to} to here was cut off: "
                "run the same `sparkonce log copy` again, or give that one as log= to stay there"
            )
        raise refusal(
            f"pipeline {head.pipeline!r} was moved to the transaction log {head.moved_to}: give "
            "that one as log=; nothing is written here any more"
        )


def _now() -> float:
    return time.time()


def _who(head: Head) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(head.started_at))
    return f"{head.driver} took token {head.token} at {when} UTC (run {head.run_id})"
