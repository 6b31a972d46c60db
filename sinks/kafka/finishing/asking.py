"""Questions about one branch, repeated within one patience, and errors in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from kafka import errors

from sparkonce.errors import CommitUnresolvedError
from sparkonce.model import BranchId
from sparkonce.sinks.kafka.branch import KafkaBranch
from sparkonce.sinks.kafka.connecting.connection import Patience
from sparkonce.sinks.kafka.connecting.refused import in_words
from sparkonce.sinks.kafka.finishing.finisher import Finisher
from sparkonce.sinks.kafka.finishing.transactions import TransactionState

REFUSED: Final = (
    errors.InvalidTxnStateError,  # it ended: aborted, timed out, or committed by an older EndTxn
    errors.ProducerFencedError,  # a later epoch holds the id: timed out, or initialised again
    errors.InvalidProducerEpochError,  # the same, from older brokers
    errors.InvalidProducerIdMappingError,  # the id is forgotten, or has another producer id
)
"""The permanent refusals of an EndTxn."""

UNKNOWN: Final = "it is unknown whether it is committed"

ResultT = TypeVar("ResultT")


class Asking:
    """What commit, abort and proof share: the brokers, the patience, and the sink's target.

    For `patience_s` from now on, questions are repeated while their failure is transient.
    Afterwards each question is asked once.
    """

    def __init__(self, finisher: Finisher, target: str, patience_s: float) -> None:
        self.finisher = finisher
        self.target = target
        self._patience = Patience(patience_s)

    def __call__(self, question: Callable[[], ResultT]) -> ResultT:
        """The answer to `question`, asked again while its failure is transient."""
        return self._patience(question)

    def hang_up(self, error: errors.KafkaError) -> str:
        """Close the connections, for the next call to open new ones; returns the last answer."""
        self.finisher.close()
        return f"asked for {self._patience.seconds:g} s, last answer: {in_words(error)}"

    def end(self, branch: KafkaBranch, *, commit: bool) -> bool:
        """Send EndTxn for the branch; see `Finisher.end`."""
        return self.finisher.end(
            branch.transactional_id, branch.producer_id, branch.producer_epoch, commit=commit
        )

    def describe(self, transactional_id: str) -> TransactionState | None:
        """What the coordinator reports about the id; None when it does not know the id."""
        return self.finisher.describe([transactional_id]).get(transactional_id)

    def markers(self, branch: KafkaBranch) -> list[tuple[int, str]]:
        """The branch's markers that are visible; see `Finisher.markers`."""
        if not branch.marker_topics:
            return []
        return self.finisher.markers(branch.transactional_id, branch.marker_topics)

    def is_deleted(self, topic: str) -> bool:
        """Whether there is no such topic."""
        return bool(self.finisher.topic(topic).error == errors.UnknownTopicOrPartitionError.errno)

    def unresolved(
        self, branch_id: BranchId, why: str, known: str = UNKNOWN
    ) -> CommitUnresolvedError:
        return CommitUnresolvedError(f"{branch_id}: {known} in {self.target}: {why}", branch_id)
