"""`KafkaSink`: every Spark task is one Kafka transaction, and the driver ends them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final

from confluent_kafka import KafkaException, Producer
from kafka import errors
from kafka.admin import ACLOperation

from sparkonce.errors import ConfigurationError, SinkError, SparkOnceError
from sparkonce.model import BranchId, Committable, Owner
from sparkonce.sinks.base import Transform, TwoPhaseCommitSink
from sparkonce.sinks.kafka.branch import KafkaBranch
from sparkonce.sinks.kafka.client import Patience
from sparkonce.sinks.kafka.finisher import Finisher
from sparkonce.sinks.kafka.outcome import PATIENCE_S, Outcome
from sparkonce.sinks.kafka.producer import OpenTransaction
from sparkonce.sinks.kafka.rows import check_schema
from sparkonce.sinks.kafka.settings import KafkaSettings, check_topic_name

if TYPE_CHECKING:
    import pyarrow as pa

DEFAULT_TIMEOUT_MS: Final = 900_000
"""Kafka's default of transaction.max.timeout.ms, for where the broker does not say."""

MIN_TIMEOUT_MS: Final = 1_000

NEW_TOPIC_S: Final = 2.0
"""How long a topic may take from its creation until every broker knows it."""

_MAX_TIMEOUT: Final = "transaction.max.timeout.ms"


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the driver learned of the cluster; it travels to the executors with the sink."""

    cluster_id: str | None
    timeout_ms: int
    max_message_bytes: int | None
    brokers: int | None = None


class KafkaSink(TwoPhaseCommitSink[OpenTransaction]):
    """Writes rows to Kafka topics; visible to consumers with ``isolation.level=read_committed``.

    The rows have the columns that Spark's own Kafka sink knows: `value`, and optionally `key`,
    `topic`, `partition`, `headers` and `timestamp`. Keys land in the same partition as with Java.

    A prepared transaction lives as long as its timeout allows: the broker's
    ``transaction.max.timeout.ms``, 15 minutes by default. A driver that is down for longer finds
    the branch gone, and it is written again from Spark's replay.

    Needs Kafka 3.0; from Kafka 4.0 on the broker itself keeps a zombie executor out. With ACLs:
    Read, Write and Describe on the topics, Write and Describe on transactional ids and Read on
    groups that start with ``sparkonce.``, and best also DescribeConfigs on the cluster and topic.

    Args:
        topic: for rows that name none in a column `topic`.
        bootstrap_servers: ``host:port,host:port``.
        config: further librdkafka settings, for security among others. What also concerns the
            client on the driver is given to it: PLAINTEXT, SSL, SASL with PLAIN or SCRAM.
        transaction_timeout_ms: after which the broker aborts what nobody commits; default: the
            longest that it allows.
        name: see `TwoPhaseCommitSink`.
        select: see `TwoPhaseCommitSink`.
        transform: see `TwoPhaseCommitSink`.

    Raises:
        ConfigurationError: a setting is wrong, breaks exactly-once, or cannot reach the client
            that commits.
    """

    kind: ClassVar[str] = "kafka"

    def __init__(
        self,
        topic: str | None = None,
        *,
        bootstrap_servers: str,
        config: Mapping[str, object] = MappingProxyType({}),
        transaction_timeout_ms: int | None = None,
        name: str | None = None,
        select: Sequence[str] | None = None,
        transform: Transform | None = None,
    ) -> None:
        super().__init__(name=name, select=select, transform=transform)
        if topic is not None:
            check_topic_name(topic)
        if transaction_timeout_ms is not None and transaction_timeout_ms < MIN_TIMEOUT_MS:
            raise ConfigurationError(
                f"transaction_timeout_ms={transaction_timeout_ms}: give {MIN_TIMEOUT_MS} or more"
            )
        self._topic = topic
        self._settings = KafkaSettings(bootstrap_servers, dict(config))
        self._timeout_ms = transaction_timeout_ms
        self._patience_s = PATIENCE_S
        self._seen: _Seen | None = None
        self._finisher = Finisher(self._settings)

    # -- on the executors --------------------------------------------------------------------------

    def beginTransaction(self, branch_id: BranchId) -> OpenTransaction:
        seen = self._seen or _Seen(None, self._timeout_ms or DEFAULT_TIMEOUT_MS, None)
        config = self._settings.for_producer(
            branch_id.name, seen.timeout_ms, seen.max_message_bytes, seen.brokers
        )
        return OpenTransaction(branch_id, config, topic=self._topic, cluster_id=seen.cluster_id)

    def write(self, handle: OpenTransaction, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            handle.write(batch)

    def preCommit(self, handle: OpenTransaction) -> Committable:
        return handle.prepare().committable(handle.branch_id)

    def discard(self, handle: OpenTransaction) -> None:
        handle.abandon()

    # -- in any process ----------------------------------------------------------------------------

    def commit(self, committable: Committable) -> None:
        self._outcome.commit(committable)

    def commitBatch(self, committables: Sequence[Committable]) -> Sequence[SparkOnceError | None]:
        proven = self._outcome.commit_together(committables) if len(committables) > 1 else set()
        left = [c for c in committables if c.branch_id.name not in proven]
        errors_left = iter(super().commitBatch(left))
        return [None if c.branch_id.name in proven else next(errors_left) for c in committables]

    def abort(self, branch: BranchId | Committable) -> None:
        self._outcome.abort(branch)

    def find_branches(self, owner: Owner) -> Iterable[Committable]:
        """List the owner's open transactions; those that are already ending are left out.

        Raises:
            SinkError: some could not be listed; after those that could.
        """
        patience, failures = Patience(self._patience_s), list[errors.KafkaError]()
        names: set[str] = set()
        try:
            patience(lambda: self._list_into(names, owner))
        except errors.KafkaError as error:
            failures.append(error)
        for name in sorted(names):
            try:
                found = patience(partial(self._find, name, owner))
            except errors.KafkaError as error:
                failures.append(error)
                continue
            if found is not None:
                yield found
        if failures:
            self._finisher.close()
            raise SinkError(
                f"{self.where}: open transactions cannot be listed, or not all of them: "
                f"{failures[0]}"
            ) from failures[0]

    def _list_into(self, names: set[str], owner: Owner) -> None:
        """Ask every broker for the open transactions that it coordinates, also if one fails.

        Asked again, the cluster may have fewer brokers, and others coordinate what was theirs.
        """
        failure: errors.KafkaError | None = None
        for node in self._finisher.nodes():
            try:
                names.update(self._finisher.ongoing(owner.prefix, node))
            except errors.KafkaError as error:
                failure = error
        if failure is not None:
            raise failure

    def _find(self, transactional_id: str, owner: Owner) -> Committable | None:
        branch_id = BranchId.from_name(transactional_id)
        if branch_id is None or branch_id.owner != owner:
            return None
        state = self._finisher.describe([transactional_id]).get(transactional_id)
        if state is None or state.state != "Ongoing":
            return None
        return KafkaBranch(
            transactional_id=transactional_id,
            producer_id=state.producer_id,
            producer_epoch=state.producer_epoch,
            partitions={},
            cluster_id=self._finisher.cluster_id(),
            marker_topic=None,
            began_at=state.started_at,
            timeout_ms=state.timeout_ms,
        ).committable(branch_id)

    # -- on the driver -----------------------------------------------------------------------------

    def validate(self, schema: pa.Schema) -> None:
        check_schema(schema, self._topic)
        try:
            self._seen = Patience(self._patience_s)(self._look)
        except errors.KafkaError as error:
            self._finisher.close()
            raise ConfigurationError(
                f"bootstrap_servers={self._settings.bootstrap_servers!r}: no answer within "
                f"{self._patience_s:.0f} s ({type(error).__name__}: {error}). Is the address "
                "right, are the brokers up, and do the security settings in config= fit them?"
            ) from error
        self._check_producer_config(self._seen)

    def _look(self) -> _Seen:
        unsupported = self._finisher.unsupported()
        if unsupported is not None:
            raise ConfigurationError(
                f"{self.where}: the brokers do not know {unsupported}; Kafka 3.0 is needed"
            )
        if self._topic is not None:
            self._check_topic(self._topic)
        return _Seen(
            self._finisher.cluster_id(),
            self._resolve_timeout(),
            self._max_message_bytes(),
            len(self._finisher.nodes()),
        )

    def _check_topic(self, topic: str) -> None:
        found = self._finisher.topic(topic)
        until = time.monotonic() + min(self._patience_s, NEW_TOPIC_S)
        while found.error == errors.UnknownTopicOrPartitionError.errno and (
            time.monotonic() < until
        ):
            time.sleep(0.05)
            found = self._finisher.topic(topic)
        if found.error == errors.UnknownTopicOrPartitionError.errno:
            raise ConfigurationError(
                f"{self.where}: there is no topic {topic!r}. Create it: kafka-topics.sh "
                f"--bootstrap-server {self._settings.bootstrap_servers} --create --topic {topic} "
                "--partitions 6"
            )
        if found.error == errors.TopicAuthorizationFailedError.errno:
            raise ConfigurationError(f"{self.where}: no right to see the topic; allow Describe")
        if found.error:
            raise errors.for_code(found.error)
        needed = ACLOperation.READ, ACLOperation.WRITE, ACLOperation.DESCRIBE
        allowed = frozenset(needed) if found.operations is None else found.operations
        missing = [operation.name.title() for operation in needed if operation not in allowed]
        if missing:
            raise ConfigurationError(
                f"{self.where}: {' and '.join(missing)} on the topic is not allowed; it is "
                "needed (Read for the marker that proves a commit)"
            )

    def _resolve_timeout(self) -> int:
        allowed = self._finisher.broker_config([_MAX_TIMEOUT]).get(_MAX_TIMEOUT)
        if self._timeout_ms is None:
            return DEFAULT_TIMEOUT_MS if allowed is None else int(allowed)
        if allowed is not None and self._timeout_ms > int(allowed):
            raise ConfigurationError(
                f"transaction_timeout_ms={self._timeout_ms} is longer than the brokers allow "
                f"({_MAX_TIMEOUT}={allowed}); make it shorter, or theirs longer"
            )
        return self._timeout_ms

    def _max_message_bytes(self) -> int | None:
        if self._topic is None:
            return None
        limit = self._finisher.topic_config(self._topic, ["max.message.bytes"])
        return int(limit["max.message.bytes"]) if limit else None

    def _check_producer_config(self, seen: _Seen) -> None:
        config = self._settings.for_producer(
            "sparkonce.", seen.timeout_ms, seen.max_message_bytes, seen.brokers
        )
        try:
            Producer({**config, "log_level": 0})
        except (KafkaException, TypeError, ValueError) as error:
            said = error.args[0].str() if isinstance(error, KafkaException) else str(error)
            raise ConfigurationError(
                f"config: librdkafka refuses it: {self._settings.without_secrets(said)}"
            ) from None  # the cause could show a secret

    def close(self) -> None:
        self._finisher.close()

    @property
    def target(self) -> str:
        return "kafka " + ("topics of its rows" if self._topic is None else f"topic {self._topic}")

    @property
    def where(self) -> str:
        return f"{self.target} at {self._settings.bootstrap_servers}"

    @property
    def _outcome(self) -> Outcome:
        return Outcome(self._finisher, self.where, self._patience_s)

    # Connections and locks stay in their process; settings and what `validate` saw travel.

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        del state["_finisher"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._finisher = Finisher(self._settings)
