"""What the driver checks before a query's first batch, and what it learns for the executors.

    settings ──► kafka-python connects ──► requests, topic, rights, limits ──► librdkafka connects
                                                                                       │
                             Seen travels to the executors with the sink ◄─────────────┘

A wrong setting or a missing right is a `ConfigurationError`. If the brokers do not respond within
our patience, or are still loading their state, it is a `SinkUnavailableError`: the caller tries
again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from confluent_kafka import KafkaException
from kafka import errors
from kafka.admin import ACLOperation

from sparkonce.errors import ConfigurationError, SinkUnavailableError
from sparkonce.sinks.kafka.connecting.connection import Patience, is_transient
from sparkonce.sinks.kafka.connecting.refused import (
    PREFIX,
    RefusedError,
    in_words,
    missing_right,
)
from sparkonce.sinks.kafka.connecting.settings import KafkaSettings
from sparkonce.sinks.kafka.finishing.finisher import Finisher
from sparkonce.sinks.kafka.finishing.proof import proof_kept_s
from sparkonce.sinks.kafka.writing.librdkafka import TransactionalProducer
from sparkonce.sinks.kafka.writing.reports import Reports

DEFAULT_TIMEOUT_MS: Final = 900_000
"""Kafka's default of transaction.max.timeout.ms, where the broker does not report it."""

NEW_TOPIC_S: Final = 2.0
"""How long it may take after the creation of a topic until every broker knows it."""

RIGHTS_NAME: Final = f"{PREFIX}validate"
"""A transactional id and a group for checking rights; no producer uses them."""

_MAX_TIMEOUT: Final = "transaction.max.timeout.ms"


@dataclass(frozen=True, slots=True)
class Seen:
    """What the driver learned about the cluster; it travels to the executors with the sink.

    Attributes:
        cluster_id: the cluster; None without validation.
        timeout_ms: the timeout of transactions.
        max_message_bytes: the topic's limit; None where we may not read it.
        brokers: the number of brokers; None without validation.
        proof_kept_s: how long the brokers keep the proof of a commit; None without validation.
    """

    cluster_id: str | None
    timeout_ms: int
    max_message_bytes: int | None
    brokers: int | None = None
    proof_kept_s: float | None = None


@dataclass(frozen=True, slots=True)
class Validation:
    """The checks of one sink. `timeout_ms` is its own transaction timeout, if it has one."""

    finisher: Finisher
    settings: KafkaSettings
    topic: str | None
    timeout_ms: int | None
    where: str
    patience_s: float

    def run(self) -> Seen:
        """Check with both clients.

        Raises:
            ConfigurationError: naming the setting, the topic or the right, and the next step.
            SinkUnavailableError: the brokers do not respond now.
        """
        try:
            seen = Patience(self.patience_s)(self.look)
            self._check_producer(seen)
        except (errors.KafkaError, OSError) as error:
            self.finisher.close()
            raise self._explained(error) from error
        return seen

    def look(self) -> Seen:
        """Check with the client that finishes transactions.

        Raises:
            ConfigurationError: see `run`.
            kafka.errors.KafkaError: the brokers' refusal, or no response.
        """
        unsupported = self.finisher.unsupported()
        if unsupported is not None:
            raise ConfigurationError(
                f"{self.where}: the brokers do not support {unsupported}; use Kafka 3.0 or newer, "
                "or a server that is compatible with it"
            )
        if self.topic is not None:
            self._check_topic(self.topic)
        self.finisher.try_rights(RIGHTS_NAME)
        return Seen(
            self.finisher.cluster_id(),
            self._timeout(),
            self._max_message_bytes(),
            len(self.finisher.nodes()),
            proof_kept_s(self.finisher),
        )

    def _explained(self, error: Exception) -> ConfigurationError | SinkUnavailableError:
        if isinstance(error, RefusedError):
            return ConfigurationError(f"{self.where}: {error}")
        if isinstance(error, errors.AuthorizationError):
            return ConfigurationError(
                f"{self.where}: the sink needs {missing_right(error) or error}, which is not "
                "allowed; add the ACL (see docs/howto/kafka-security.md)"
            )
        kind = SinkUnavailableError if is_transient(error) else ConfigurationError
        return kind(
            f"bootstrap_servers={self.settings.bootstrap_servers!r}: no response within "
            f"{self.patience_s:g} s ({in_words(error)}). Is the address "
            "right, are the brokers up, and do the security settings in config= fit them?"
        )

    def _check_topic(self, topic: str) -> None:
        unknown = errors.UnknownTopicOrPartitionError.errno
        found = self.finisher.topic(topic)
        until = time.monotonic() + min(self.patience_s, NEW_TOPIC_S)
        while found.error == unknown and time.monotonic() < until:
            time.sleep(0.05)
            found = self.finisher.topic(topic)
        if found.error == unknown:
            raise ConfigurationError(
                f"{self.where}: there is no topic {topic!r}. Create it: kafka-topics.sh "
                f"--bootstrap-server {self.settings.bootstrap_servers} --create --topic {topic} "
                "--partitions 6"
            )
        if found.error:
            raise errors.for_code(found.error)
        needed = ACLOperation.READ, ACLOperation.WRITE  # either implies Describe
        allowed = frozenset(needed) if found.operations is None else found.operations
        missing = [operation.name.title() for operation in needed if operation not in allowed]
        if missing:
            raise ConfigurationError(
                f"{self.where}: the sink needs {' and '.join(missing)} on the topic, which is not "
                "allowed (Read is for the marker that proves a commit); add the ACL (see "
                "docs/howto/kafka-security.md)"
            )

    def _timeout(self) -> int:
        values = self.finisher.broker_config([_MAX_TIMEOUT]).get(_MAX_TIMEOUT)
        allowed = min(values) if values else None
        if self.timeout_ms is None:
            return DEFAULT_TIMEOUT_MS if allowed is None else allowed
        if allowed is not None and self.timeout_ms > allowed:
            raise ConfigurationError(
                f"transaction_timeout_s={self.timeout_ms / 1000:.15g} is longer than the brokers "
                f"allow ({_MAX_TIMEOUT}={allowed}); make it shorter, or raise theirs"
            )
        return self.timeout_ms

    def _max_message_bytes(self) -> int | None:
        if self.topic is None:
            return None
        limit = self.finisher.topic_config(self.topic, ["max.message.bytes"])
        return int(limit["max.message.bytes"]) if limit else None

    def _check_producer(self, seen: Seen) -> None:
        """Let librdkafka connect too: it reads settings differently, above all those of TLS."""
        config = self.settings.for_producer(
            RIGHTS_NAME, seen.timeout_ms, seen.max_message_bytes, seen.brokers
        )
        reports = Reports()
        try:
            producer = TransactionalProducer({**config, "log_level": 0}, reports)
        except KafkaException as error:
            reason = self.settings.without_secrets(error.args[0].str())
            raise ConfigurationError(
                f"config: librdkafka refuses it: {reason}"
            ) from None  # the cause could show a secret
        try:
            producer.look(self.topic, self.patience_s)
        except KafkaException as error:
            producer.poll(0)  # brings the reason to `reports`
            reason = self.settings.without_secrets(reports.last_error or error.args[0].str())
            if not reports.is_distrusted:
                self.finisher.cluster_id()  # raises if the brokers are unreachable for all
            raise ConfigurationError(
                f"{self.where}: the client that finishes transactions can connect, but "
                f"librdkafka, which writes, cannot: {reason}"
            ) from None
