"""An open, flushed and marked transaction: its identity, and its form in a committable.

writing ──► KafkaBranch ──► committable ──► log ──► KafkaBranch ──► finishing
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from sparkonce.errors import ProtocolError
from sparkonce.model import BranchId, Committable
from sparkonce.sinks.committables import check_version

PAYLOAD_VERSION: Final = 2
MAX_MARGIN_S: Final = 60.0
TIMEOUT: Final = (
    "transaction_timeout_s= of the sink (without it, transaction.max.timeout.ms of the brokers)"
)
"""For messages: the setting after which the broker aborts a transaction that nobody commits."""


@dataclass(frozen=True, slots=True)
class KafkaBranch:
    """A transaction that any process can end.

    Attributes:
        transactional_id: the branch's name.
        producer_id: from the broker; -1 when no row was written, so that nothing is open.
        producer_epoch: no other transaction has this `producer_id` and epoch.
        partitions: the partitions that hold its rows, by topic.
        cluster_id: the cluster that holds the transaction.
        marker_topics: the topics whose partition 0 holds the marker; any one marker is proof
            enough. Empty when nothing was written.
        began_at: Unix time in seconds, read before the transaction could begin.
        timeout_ms: the broker aborts the transaction after this time.
        proof_kept_s: how long the brokers kept proofs when the query began; None where they were
            not asked.
    """

    transactional_id: str
    producer_id: int
    producer_epoch: int
    partitions: Mapping[str, Sequence[int]]
    cluster_id: str
    marker_topics: Sequence[str]
    began_at: float
    timeout_ms: int
    proof_kept_s: float | None = None

    def committable(self, branch_id: BranchId) -> Committable:
        """The durable form, safe until shortly before the broker may abort the transaction."""
        return Committable(
            branch_id=branch_id,
            payload=asdict(self),
            version=PAYLOAD_VERSION,
            safe_until=self.began_at + self.timeout_ms / 1000 - self.margin_s,
            text=self.text,
        )

    @property
    def margin_s(self) -> float:
        """By how much the executor's clock may be ahead of the driver's, in seconds."""
        return min(MAX_MARGIN_S, self.timeout_ms / 1000 / 10)

    @property
    def text(self) -> str:
        """The transaction in one line, for people."""
        if self.producer_id < 0:
            return f"transaction {self.transactional_id}, without rows"
        topics = "".join(
            f", topic {topic} partitions {', '.join(map(str, numbers))}"
            for topic, numbers in self.partitions.items()
        )
        producer = f"producer {self.producer_id}/{self.producer_epoch}"
        return f"transaction {self.transactional_id} of {producer}{topics}"

    @classmethod
    def of(cls, committable: Committable) -> Self:
        """Read the payload of a committable.

        Raises:
            ConfigurationError: a newer sparkonce wrote it.
            ProtocolError: another sink wrote it.
        """
        check_version(committable, PAYLOAD_VERSION)
        payload: dict[str, Any] = {**committable.payload}
        if "marker_topic" in payload:  # version 1 had only one
            topic = payload.pop("marker_topic")
            payload["marker_topics"] = [] if topic is None else [topic]
        try:
            return cls(**payload)
        except TypeError as error:
            raise ProtocolError(
                f"{committable.branch_id}: not a committable of a Kafka sink: {error}"
            ) from error
