"""The transaction log: the one place that records what holds.

    TransactionLog          what callers use; it knows no sink and no Spark
        │  one rule of `rules` for each write
        ▼
    _write(step)            a backend: SQLite, Postgres, documents in an object store or a folder

All writes of one pipeline are totally ordered, and each is conditional on the fencing token in the
same step. If a driver checked its token first and wrote in a second step, it could pause in between
and write after a newer driver had taken over (I6). A decision changes only by an amendment, which
takes lost branches out (I3).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

from sparkonce.errors import ConfigurationError, LogCorruptError
from sparkonce.finding import Finding, Level
from sparkonce.model import Owner, TransactionId
from sparkonce.txn_log import rules
from sparkonce.txn_log.claim import Claim
from sparkonce.txn_log.record import Head, Incarnation, State, TransactionRecord
from sparkonce.txn_log.rules import Store
from sparkonce.txn_log.settlement import Settlement

__all__ = ["ResultT", "Store", "TransactionLog", "no_log"]

ResultT = TypeVar("ResultT")

_HIGHEST_BATCH: Final = 2**63 - 1
"""The highest number that a column of a database can hold."""


class TransactionLog(ABC):
    """Durable record of the decisions of any number of pipelines.

    Every method may be called from any thread, also in a forked child. It may raise
    `LogUnavailableError` (nothing was written; try again) and `LogCorruptError` (an operator
    restores the log). A method that writes may also raise `DecisionUnknownError` (the write may
    have landed; call the method again, it is idempotent) and `FencedError` (a newer incarnation
    holds the token; nothing was written).
    """

    # -- what a backend implements -----------------------------------------------------------------

    @property
    @abstractmethod
    def log_id(self) -> str:
        """The log's random id: 16 hex digits, created with the log."""

    @property
    @abstractmethod
    def address(self) -> str:
        """Where the log is, resolved, without secrets; ``checkpoint:FOLDER`` for a log in a folder.

        The identity guard compares that folder with the checkpoint.
        """

    @abstractmethod
    def close(self) -> None:
        """Free connections. The log can be used again afterwards."""

    @abstractmethod
    def _read(self, question: Callable[[Store], ResultT]) -> ResultT:
        """Answer `question` from one consistent view."""

    @abstractmethod
    def _write(self, step: Callable[[Store], ResultT]) -> ResultT:
        """Run `step` as one durable, atomic step, ordered among all writes of its pipeline.

        An error from `step` undoes it. `step` may run again if another writer was faster.
        """

    # -- what a backend may override ---------------------------------------------------------------

    def diagnose(self) -> Iterable[Finding]:
        """What `sparkonce doctor` reports about the log. Nothing is written."""
        return [Finding(Level.OK, f"{self.address} responds")]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.address}>"

    # -- reading -----------------------------------------------------------------------------------

    def pipelines(self) -> Sequence[str]:
        """The names of all pipelines, sorted."""
        return self._read(lambda store: store.pipelines())

    def head(self, pipeline: str) -> Head | None:
        """The head of the pipeline; None if the name is new."""
        return self._read(lambda store: store.head(pipeline))

    def find(self, transaction_id: TransactionId) -> TransactionRecord | None:
        """The record of the batch; None if the batch is not known."""
        if not 0 <= transaction_id.batch_id <= _HIGHEST_BATCH:
            return None
        return self._read(lambda store: store.find(transaction_id))

    def newest(self, pipeline: str, query_id: str) -> TransactionRecord | None:
        """The record of the query's highest batch, in any state."""
        return self._read(lambda store: store.newest(pipeline, query_id))

    def unfinished(self, pipeline: str) -> Sequence[TransactionRecord]:
        """Prepared and decided transactions that are not known to be committed, oldest first."""
        return self._read(lambda store: store.unfinished(pipeline))

    def history(
        self,
        pipeline: str,
        limit: int = 100,
        query_id: str | None = None,
        before: int | None = None,
    ) -> Sequence[TransactionRecord]:
        """The `limit` records of the highest batches, highest first.

        Args:
            pipeline: its name.
            limit: the number of records at most.
            query_id: only the records of this query; default: of all queries that had the name.
                The batches of each query begin with 0.
            before: only batches with a lower number, to read a long history page by page. With
                `query_id`, the cost depends on `limit` and not on the length of the history.
        """
        return self._read(lambda store: store.history(pipeline, limit, query_id, before))

    def id_of(self, pipeline: str) -> str:
        """The log id in the names of the pipeline's branches and in its checkpoint.

        It is `log_id`; for a pipeline that was moved here, the id of the log in which it began.
        """
        return rules.id_of(self.head(pipeline), self.log_id)

    def namesake(self, pipeline: str, query_id: str) -> str | None:
        """Another pipeline that is, or was, bound to the query; None if all is well.

        Two such pipelines would collide: names in external systems contain the log's id and the
        query's id, and not the pipeline's name.
        """
        for other in self.pipelines():
            try:
                head = self.head(other)
            except LogCorruptError:  # the start of that pipeline reports it
                continue
            if (
                other != pipeline
                and head is not None
                and query_id in {head.query_id, *head.retired}
                and rules.id_of(head, self.log_id) == self.id_of(pipeline)
            ):
                return other
        return None

    def check_token(self, incarnation: Incarnation) -> None:
        """Return if no newer incarnation owns the pipeline.

        The check only explains who is newer. It protects nothing: each write checks the token
        itself.

        Raises:
            FencedError: a newer incarnation owns it.
        """
        self._read(
            lambda store: rules.require_token(store, incarnation.pipeline, incarnation.token)
        )

    # -- writing -----------------------------------------------------------------------------------

    def begin(self, claim: Claim) -> Incarnation:
        """Admit a driver and give it the next fencing token, in one conditional write.

        A call that raised `DecisionUnknownError` may have taken a token. Call `begin` again with
        the same claim; it takes the next one.

        Raises:
            ConfigurationError: the identity guard refuses, or the pipeline was moved to another
                log; nothing was written, no driver is fenced.
            FencedError: another run has taken a token since this run looked at the log or held a
                token itself.
        """
        head, fenced = self._write(
            lambda store: rules.begin(
                store, claim, log_id=self.log_id, address=self.address, now=time.time()
            )
        )
        log_id = rules.id_of(head, self.log_id)
        return Incarnation(
            claim.pipeline,
            Owner(log_id, claim.query_id),
            head.token,
            tuple(Owner(log_id, query_id) for query_id in head.retired),
            None if fenced is None else fenced.run_id,
        )

    def prepare(self, record: TransactionRecord) -> TransactionRecord:
        """Record that every branch of `record` is prepared and waits for Spark's checkpoint.

        Returns:
            The record that holds: the given one, or the one that was there before.

        Raises:
            ProtocolError: another batch is prepared and not decided, or a batch was skipped.
        """
        return self._write(
            lambda store: rules.first(store, record.moved(State.PREPARED, time.time()))
        )

    def decide(self, record: TransactionRecord, token: int | None = None) -> TransactionRecord:
        """Make the decision durable: the point of no return.

        Args:
            record: a new one, or one that is prepared.
            token: of the incarnation that decides; default: the one that prepared the record.

        Returns:
            The record that holds: the given one, decided, or the one that was decided before.

        Raises:
            ProtocolError: the batch was abandoned, or a batch was skipped.
        """
        return self._write(lambda store: rules.decide(store, record, token, time.time()))

    def abandon(self, record: TransactionRecord, token: int) -> TransactionRecord:
        """Record that a prepared batch will never be decided; its branches may be aborted now.

        Returns:
            The record that holds: abandoned, or the one that was decided or prepared since.
        """
        return self._write(lambda store: rules.abandon(store, record, token, time.time()))

    def amend(self, record: TransactionRecord, token: int) -> TransactionRecord:
        """Replace a decided record by one whose lost branches were rewritten.

        This is the only way in which a decision may change (I3). `record` is
        `TransactionRecord.amended` of the record that is in the log.

        Returns:
            The record that holds.

        Raises:
            ProtocolError: the log has another record than the one that was amended.
        """
        return self._write(lambda store: rules.amend(store, record, token))

    def settle(
        self, transaction_id: TransactionId, settlements: Sequence[Settlement], token: int
    ) -> TransactionRecord:
        """Record an operator's rulings on branches of a decided record; the next start obeys them.

        Returns:
            The record that holds.

        Raises:
            ProtocolError: the batch is not decided, or is finished, or has no such branch.
        """
        return self._write(lambda store: rules.settle(store, transaction_id, settlements, token))

    def complete(self, record: TransactionRecord, token: int) -> TransactionRecord:
        """Record that every branch of a decided record is committed, or settled by an operator.

        Raises:
            ProtocolError: the record is not decided.
        """
        return self._write(lambda store: rules.complete(store, record, token, time.time()))

    def forget(self, record: TransactionRecord, token: int, *, retain: int) -> None:
        """Drop complete records of the query that are `retain` or more batches below `record`.

        The highest complete record is always kept (I3), and so is every settled one.
        """
        self._write(lambda store: rules.forget(store, record, token, retain))


def no_log(address: str) -> ConfigurationError:
    """The error for a log that must exist and does not."""
    return ConfigurationError(
        f"there is no transaction log at {address}: check the address; a query's first start "
        "creates its log"
    )
