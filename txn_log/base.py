"""The transaction log: the one place that says what holds.

    begin ──► token          (one conditional write: identity guard, binding, token)
    decide ──► DECIDED       the point of no return
    complete ──► COMPLETE    every branch is known to be committed

All writes of one pipeline are totally ordered, and each is conditional on the fencing token in the
same step: checking the token and then writing would let a paused driver write after a newer one
has taken over (I6). A record, once decided, changes only from DECIDED to COMPLETE (I3).

A log knows no sink and no Spark.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from sparkonce.model import TransactionId
from sparkonce.txn_log.identity import Claim
from sparkonce.txn_log.record import Head, Incarnation, TransactionRecord


class TransactionLog(ABC):
    """Durable record of the decisions of any number of pipelines.

    Every method may be called from any thread, and may raise `LogUnavailableError` (nothing was
    written; try again) and `LogCorruptError` (an operator restores the log).
    """

    @property
    @abstractmethod
    def log_id(self) -> str:
        """The log's random id: 16 hex digits, made once when the log is created."""

    @property
    @abstractmethod
    def address(self) -> str:
        """Where the log is, resolved, without secrets; for messages."""

    @abstractmethod
    def begin(self, claim: Claim) -> Incarnation:
        """Admit a driver and give it the next fencing token, in one conditional write.

        Raises:
            ConfigurationError: the identity guard refuses; nothing was written, nobody is fenced.
            DecisionUnknownError: a token may have been taken; call `begin` again for a new one.
        """

    @abstractmethod
    def head(self, pipeline: str) -> Head | None:
        """Who holds the pipeline; None when the name is new."""

    @abstractmethod
    def find(self, transaction_id: TransactionId) -> TransactionRecord | None:
        """The record that stands; None when the batch is not decided."""

    @abstractmethod
    def decide(self, record: TransactionRecord) -> TransactionRecord:
        """Make the decision durable, if `record.token` is still the highest.

        Returns:
            The record that stands: the given one, or the one that was decided before.

        Raises:
            FencedError: a newer incarnation has taken the token; nothing was written.
            DecisionUnknownError: the record may stand or not; `find` tells.
        """

    @abstractmethod
    def complete(self, record: TransactionRecord, token: int) -> TransactionRecord:
        """Note that every branch of a decided record is committed. Idempotent.

        Raises:
            FencedError: a newer incarnation has taken the token; nothing was written.
            DecisionUnknownError: the note may stand or not; call `complete` again.
        """

    @abstractmethod
    def unfinished(self, pipeline: str) -> Sequence[TransactionRecord]:
        """Decided transactions with branches that are not known to be committed, oldest first."""

    @abstractmethod
    def history(self, pipeline: str, limit: int = 100) -> Sequence[TransactionRecord]:
        """The newest `limit` records of the pipeline, newest first."""

    @abstractmethod
    def forget(self, record: TransactionRecord, token: int, *, retain: int) -> None:
        """Drop complete records of the query that are `retain` or more batches below `record`.

        The highest complete record is always kept (I3).

        Raises:
            FencedError: a newer incarnation has taken the token; nothing was dropped.
        """

    @abstractmethod
    def close(self) -> None:
        """Free connections. The log can be used again after it."""
