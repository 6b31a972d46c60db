"""What identifies an open, flushed and marked transaction, and how it stands in a committable."""

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
    "transaction_timeout_ms= of the sink (without it, transaction.max.timeout.ms of the brokers)"
)
"""Which setting ends a transaction that nobody commits, for messages."""


@dataclass(frozen=True, slots=True)
class KafkaBranch:
    """A transaction that any process can end.

    Attributes:
        transactional_id: the branch's name.
        producer_id: as the broker gave it; -1 when no row was written and so nothing is open.
        producer_epoch: with `producer_id` it belongs to this one transaction.
        partitions: that hold its rows, by topic.
        cluster_id: the cluster that holds the transaction.
        marker_topics: whose partitions 0 carry the marker, each as good as the others; none when
            nothing was written.
        began_at: Unix time in seconds before the transaction could begin.
        timeout_ms: after which the broker aborts it.
        proof_kept_s: how long the brokers said that they keep the proof, when the query began; None
            where nobody has asked.
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
        """The lasting form, safe until shortly before the broker may abort the transaction.

        The margin also covers clocks of executor and driver that differ a little.
        """
        timeout_s = self.timeout_ms / 1000
        return Committable(
            branch_id=branch_id,
            payload=asdict(self),
            version=PAYLOAD_VERSION,
            safe_until=self.began_at + timeout_s - min(MAX_MARGIN_S, timeout_s / 10),
        )

    @classmethod
    def of(cls, committable: Committable) -> Self:
        """Read the payload of a committable.

        Raises:
            ConfigurationError: a newer sparkonce wrote it.
            ProtocolError: it is not one of this sink.
        """
        check_version(committable, PAYLOAD_VERSION)
        payload: dict[str, Any] = {**committable.payload}
        if "marker_topic" in payload:  # version 1: there was only one
            topic = payload.pop("marker_topic")
            payload["marker_topics"] = [] if topic is None else [topic]
        try:
            return cls(**payload)
        except TypeError as error:
            raise ProtocolError(
                f"{committable.branch_id}: not a committable of a Kafka sink: {error}"
            ) from error
