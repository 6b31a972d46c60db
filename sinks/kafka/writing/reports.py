"""What librdkafka reports about one transaction: deliveries, statistics, errors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from confluent_kafka import KafkaError

from sparkonce.sinks.kafka.connecting.outage import Outage
from sparkonce.sinks.kafka.writing.advice import advice

_NOT_AT_FAULT: Final = frozenset(
    {
        KafkaError._PURGE_QUEUE,  # noqa: SLF001 - librdkafka's names
        KafkaError._PURGE_INFLIGHT,  # noqa: SLF001
        KafkaError._INVALID_DIFFERENT_RECORD,  # noqa: SLF001
        KafkaError.INVALID_PRODUCER_EPOCH,
    }
)
"""The errors of messages that failed because something else broke their transaction or batch."""

_DISTRUST: Final = frozenset(
    {KafkaError._SSL, KafkaError._AUTHENTICATION}  # noqa: SLF001 - librdkafka's names
)

_UNEXPLAINED: Final = frozenset(
    {KafkaError._TRANSPORT, KafkaError._TIMED_OUT}  # noqa: SLF001 - librdkafka's names
)
"""Errors about a broker that could not be reached; only `on_error` gets their reason."""


@dataclass(frozen=True, slots=True)
class Identity:
    producer_id: int
    producer_epoch: int


NOBODY: Final = Identity(-1, -1)
"""The identity of a transaction without rows."""


class Reports:
    """The listener of one producer. It does not refer to the producer: a cycle would keep it.

    Attributes:
        delivered: how many rows the brokers acknowledged.
        partitions: the partitions that acknowledged rows, by topic.
        failed: how many rows failed.
        first_failure: the first reason why a row failed, apart from those of `first_purged`.
        first_purged: the first reason of a row whose transaction or batch something else broke.
        last_error: the last error of the client itself, such as a refused connection.
        is_distrusted: whether that error is about trust, so that waiting does not help.
        statistics: the newest statistics that were not read yet.
    """

    def __init__(self, outage: Outage | None = None) -> None:
        self._outage = outage
        self.delivered = 0
        self.partitions: dict[str, set[int]] = {}
        self.failed = 0
        self.first_failure: str | None = None
        self.first_purged: str | None = None
        self.last_error: str | None = None
        self.is_distrusted = False
        self.statistics: str | None = None

    def on_delivered(self, topic: str, partition: int, count: int) -> None:
        self.delivered += count
        self.partitions.setdefault(topic, set()).add(partition)
        self.on_response()

    def on_response(self) -> None:
        if self._outage is not None:
            self._outage.ends()

    def on_failure(self, error: KafkaError, topic: str, partition: int) -> None:
        self.failed += 1
        reason = f"topic {topic!r}, partition {partition}: {error.str()}{advice(error)}"
        if error.code() in _NOT_AT_FAULT:
            self.first_purged = self.first_purged or reason
        else:
            self.first_failure = self.first_failure or reason

    def on_statistics(self, statistics: str) -> None:
        self.statistics = statistics

    def on_error(self, error: KafkaError) -> None:
        if error.code() != KafkaError._ALL_BROKERS_DOWN:  # noqa: SLF001 - it follows the reason
            self.last_error = error.str()
            self.is_distrusted = error.code() in _DISTRUST
        elif self._outage is not None:
            self._outage.begins(self.last_error or error.str())

    def reason(self, error: KafkaError, token_failure: str | None) -> str:
        """Why a request failed, in the words of the report that explains it best.

        `token_failure` is why there is no token, which librdkafka reports as a timeout.
        """
        if self.first_failure is not None:
            return self.first_failure
        if token_failure is not None:
            return token_failure
        reason = f"{error.str()}{advice(error)}"
        if error.code() in _UNEXPLAINED and self.last_error:
            return f"{reason} ({self.last_error})"
        return reason

    def newest(self) -> dict[str, Any]:
        """The newest statistics that were not read yet; empty if there are none."""
        text, self.statistics = self.statistics, None
        statistics: dict[str, Any] = {} if text is None else json.loads(text)
        return statistics


def is_broken(statistics: dict[str, Any]) -> bool:
    """Whether the transaction can only be aborted."""
    return statistics.get("eos", {}).get("txn_state") in {"AbortableError", "FatalError"}


def identity_in(statistics: dict[str, Any]) -> Identity | None:
    """The producer's identity, once the statistics are those of an open transaction."""
    eos = statistics.get("eos", {})
    if (eos.get("idemp_state"), eos.get("txn_state")) != ("Assigned", "InTransaction"):
        return None
    identity = Identity(int(eos["producer_id"]), int(eos["producer_epoch"]))
    return identity if identity.producer_id >= 0 else None
