"""The executor's half: one Kafka transaction per task, flushed, marked and left open.

    open ─► write* ─► flush ─► gate ─► marker ─► producer id ─► drop the producer, keep the
                                                                 transaction

1. Exactly one transaction per `Producer`. Two would share producer id and epoch, and a late commit
   of the first would commit the second (I2).
2. The gate: `flush` returns 0 also when a message failed for good, and EndTxn from outside would
   then commit the rest. So as many deliveries are counted as rows, and sending the marker, the last
   request, fails when librdkafka holds the transaction for broken.
3. The marker is an offset committed inside the transaction, in a group of its own: whoever reads it
   later knows whether this transaction committed, long after the coordinator forgot it. Kafka drops
   it with the topic that it is for, so each topic of the rows has one.
4. Dropping the last reference to the producer leaves the transaction open.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import KafkaError, KafkaException

from sparkonce.errors import PrepareRejectedError, ProtocolError
from sparkonce.model import BranchId
from sparkonce.sinks.kafka.access import GROUPS_RIGHT, TOPIC_RIGHTS, TRANSACTIONS_RIGHT
from sparkonce.sinks.kafka.branch import TIMEOUT, KafkaBranch
from sparkonce.sinks.kafka.librdkafka import TransactionalProducer
from sparkonce.sinks.kafka.messages import Messages, messages_by_topic
from sparkonce.sinks.kafka.oauth import TokenCallback
from sparkonce.sinks.kafka.rows import RowError

if TYPE_CHECKING:
    import pyarrow as pa

CONNECT_TIMEOUT_S: Final = 30.0
INIT_TIMEOUT_S: Final = 60.0
ABORT_TIMEOUT_S: Final = 5.0

STATISTICS_INTERVAL_MS: Final = 10
"""How often librdkafka says its producer id, for which a prepare may have to wait."""

MARKERS: Final = 100
"""At most; all of them are one message, which must not grow too large for Kafka."""

_QUEUE_FULL_WAIT_S: Final = 0.01
_POLL_S: Final = 0.25
_LOOK_EVERY_S: Final = 2.0
"""How often a transaction that waits looks whether its topics are still there."""

_NOT_AT_FAULT: Final = frozenset(
    {
        KafkaError._PURGE_QUEUE,  # noqa: SLF001 - librdkafka's names
        KafkaError._PURGE_INFLIGHT,  # noqa: SLF001
        KafkaError._INVALID_DIFFERENT_RECORD,  # noqa: SLF001
        KafkaError.INVALID_PRODUCER_EPOCH,
    }
)
"""What librdkafka says of messages whose transaction something else has broken, or whose batch."""

_UNEXPLAINED: Final = frozenset(
    {KafkaError._TRANSPORT, KafkaError._TIMED_OUT}  # noqa: SLF001 - librdkafka's names
)
"""What librdkafka says of a broker that it could not connect to; `on_error` has the reason."""


@dataclass(frozen=True, slots=True)
class _Identity:
    producer_id: int
    producer_epoch: int


_NOBODY: Final = _Identity(-1, -1)


class Reports:
    """What librdkafka tells. Holds no producer, so that no cycle keeps one."""

    def __init__(self) -> None:
        self.delivered = 0
        self.partitions: dict[str, set[int]] = {}
        self.failed = 0
        self.first_failure: str | None = None
        self.first_purged: str | None = None
        self.last_error: str | None = None
        self.statistics: str | None = None

    def on_delivered(self, topic: str, partition: int, count: int) -> None:
        self.delivered += count
        self.partitions.setdefault(topic, set()).add(partition)

    def on_failure(self, error: KafkaError, topic: str, partition: int) -> None:
        self.failed += 1
        told = f"topic {topic!r}, partition {partition}: {error.str()}{_advice(error)}"
        if error.code() in _NOT_AT_FAULT:
            self.first_purged = self.first_purged or told
        else:
            self.first_failure = self.first_failure or told

    def on_statistics(self, statistics: str) -> None:
        self.statistics = statistics

    def on_error(self, error: KafkaError) -> None:
        if error.code() != KafkaError._ALL_BROKERS_DOWN:  # noqa: SLF001 - it follows the reason
            self.last_error = error.str()

    def newest(self) -> dict[str, Any]:
        """The newest statistics that nobody has read yet; empty when there are none."""
        text, self.statistics = self.statistics, None
        told: dict[str, Any] = {} if text is None else json.loads(text)
        return told


def _is_broken(told: dict[str, Any]) -> bool:
    return told.get("eos", {}).get("txn_state") in {"AbortableError", "FatalError"}


def _identity(told: dict[str, Any]) -> _Identity | None:
    """Who writes, once the statistics are those of an open transaction."""
    eos = told.get("eos", {})
    if (eos.get("idemp_state"), eos.get("txn_state")) != ("Assigned", "InTransaction"):
        return None
    identity = _Identity(int(eos["producer_id"]), int(eos["producer_epoch"]))
    return identity if identity.producer_id >= 0 else None


class OpenTransaction:
    """One open Kafka transaction, from its beginning until it is prepared or given up.

    Args:
        branch_id: names the transaction.
        config: librdkafka's settings, without callbacks.
        topic: for rows that name none.
        cluster_id: the cluster that the driver saw; None when nobody has looked.
        proof_kept_s: see `KafkaBranch`.

    Raises:
        PrepareRejectedError: the brokers cannot be reached, or refuse a transaction.
    """

    def __init__(
        self,
        branch_id: BranchId,
        config: dict[str, object],
        *,
        topic: str | None,
        cluster_id: str | None,
        proof_kept_s: float | None = None,
    ) -> None:
        self.branch_id = branch_id
        self._topic = topic
        self._topics: set[str] = set()
        self._rows = 0
        self._look_at = time.monotonic() + _LOOK_EVERY_S
        self._reports = Reports()
        self._proof_kept_s = proof_kept_s
        self._servers = config["bootstrap.servers"]
        self._token = config.get("oauth_cb")
        self._timeout_ms = int(str(config["transaction.timeout.ms"]))
        self._start_clock()
        self._producer: TransactionalProducer | None = None
        try:
            producer = TransactionalProducer(
                {**config, "statistics.interval.ms": STATISTICS_INTERVAL_MS}, self._reports
            )
            self._cluster_id = self._connect(producer, cluster_id)
            producer.init_transactions(self._at_most(INIT_TIMEOUT_S))
            producer.begin_transaction()
        except KafkaException as error:
            raise self._rejected("the transaction cannot begin", error) from error
        self._producer = producer

    def write(self, batch: pa.RecordBatch) -> None:
        """Queue the rows; wait while the queue is full.

        Raises:
            PrepareRejectedError: naming the topic and the reason.
        """
        if not self._topics:  # only now does the broker's clock start
            self._start_clock()
        try:
            for topic, messages in messages_by_topic(batch, self._topic):
                self._topics.add(topic)
                self._send(topic, messages)
            self._live.poll(0)
        except RowError as error:
            raise PrepareRejectedError(
                f"Kafka cannot hold a row: {error}", self.branch_id
            ) from error
        except KafkaException as error:
            raise self._rejected("rows cannot be written", error) from error
        self._gate()

    def idle(self) -> None:
        """Take what librdkafka has to tell: its statistics pile up where nobody does."""
        with contextlib.suppress(KafkaException):  # `write` and `prepare` meet them again
            self._live.poll(0)

    def prepare(self) -> KafkaBranch:
        """Flush, check, mark; leave the transaction open and free the producer.

        Raises:
            PrepareRejectedError: a row was not delivered, or the transaction is broken. The
                producer is kept, for `abandon`.
        """
        identity = _NOBODY
        try:
            self._flush()
            self._gate()
            self._check_delivered()
            if self._marker_topics:
                self._mark()
                identity = self._identity()
        except KafkaException as error:
            raise self._rejected("the transaction cannot be prepared", error) from error
        self._gate()
        self._producer = None
        return KafkaBranch(
            transactional_id=self.branch_id.name,
            producer_id=identity.producer_id,
            producer_epoch=identity.producer_epoch,
            partitions={t: sorted(p) for t, p in self._reports.partitions.items()},
            cluster_id=self._cluster_id,
            marker_topics=self._marker_topics,
            began_at=self._began_at,
            timeout_ms=self._timeout_ms,
            proof_kept_s=self._proof_kept_s,
        )

    def abandon(self) -> None:
        """Abort the transaction as well as it can be done soon; never raises.

        librdkafka sends no EndTxn while its first partition is still being added, so a transaction
        may open just after it; the sweep finds that one.
        """
        producer, self._producer = self._producer, None
        if producer is not None:
            with contextlib.suppress(KafkaException):
                producer.abort_transaction(ABORT_TIMEOUT_S)

    # -- steps -----------------------------------------------------------------------------------

    def _start_clock(self) -> None:
        self._began_at = time.time()
        self._deadline = time.monotonic() + self._timeout_ms / 1000

    @property
    def _live(self) -> TransactionalProducer:
        if self._producer is None:
            raise ProtocolError(f"{self.branch_id}: the transaction was prepared or discarded")
        return self._producer

    def _connect(self, producer: TransactionalProducer, expected: str | None) -> str:
        # Without a known coordinator's address init_transactions loses a timer tick of half a
        # second. The first answer comes from the bootstrap connection, the second from a broker.
        # Naming the topic keeps them small; without one librdkafka asks for every topic.
        for _ in range(2):
            try:
                found, _ = producer.look(self._topic, self._at_most(CONNECT_TIMEOUT_S))
            except KafkaException:
                producer.poll(0)  # brings the reason to `on_error`
                raise
        cluster_id = str(found)
        if expected is not None and cluster_id != expected:
            raise PrepareRejectedError(
                f"bootstrap_servers={self._servers!r} is the Kafka cluster {expected} on the "
                f"driver and {cluster_id} on this executor; give an address that means the same "
                "cluster everywhere",
                self.branch_id,
            )
        return cluster_id

    def _send(self, topic: str, messages: Messages) -> None:
        queued = 0
        while True:
            queued = self._live.send(topic, messages, queued)
            if queued == len(messages):
                break
            self._wait_for_room()
        self._rows += queued

    def _wait_for_room(self) -> None:
        self._live.poll(_QUEUE_FULL_WAIT_S)
        self._check_sound("wait for room in the queue")

    def _flush(self) -> None:
        while self._live.flush(_POLL_S) > 0:
            self._check_sound("flush")

    def _gate(self) -> None:
        if self._reports.failed and self._reports.first_failure is None:
            # Purged, since the transaction is broken; its next request raises the reason.
            try:
                self._mark()
            except KafkaException as error:
                raise self._rejected("rows were not delivered", error) from error
        if self._reports.failed:
            raise PrepareRejectedError(
                f"{self._reports.failed} record(s) were not delivered; the first: "
                f"{self._reports.first_failure or self._reports.first_purged}",
                self.branch_id,
            )

    def _check_delivered(self) -> None:
        """Every row was acknowledged, by count: what librdkafka forgot to report is no row."""
        if self._reports.delivered != self._rows:
            raise PrepareRejectedError(
                f"{self._where}: {self._rows} record(s) were written, and librdkafka reported the "
                f"delivery of {self._reports.delivered}",
                self.branch_id,
            )

    def _check_sound(self, doing: str, told: dict[str, Any] | None = None) -> None:
        self._gate()
        if _is_broken(self._reports.newest() if told is None else told):
            # Messages of a broken transaction wait in the queue until it times out. The next
            # transactional request raises the reason.
            self._mark()
        self._in_time(doing)
        self._check_topics()

    def _check_topics(self) -> None:
        """Refuse to wait for a topic that is gone; librdkafka would do so for minutes."""
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + _LOOK_EVERY_S
        for topic in self._topics:
            with contextlib.suppress(KafkaException):  # no answer: that is what we wait for
                _, failed = self._live.look(topic, _POLL_S)
                found = failed.get(topic)
                if found is not None and found.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                    raise PrepareRejectedError(
                        f"{self._where}: the topic {topic!r} is gone{_advice(found)}",
                        self.branch_id,
                    )

    @property
    def _marker_topics(self) -> list[str]:
        return sorted(self._topics)[:MARKERS] or ([] if self._topic is None else [self._topic])

    def _mark(self) -> None:
        offset = -1 if self.branch_id.batch_id is None else self.branch_id.batch_id
        while True:
            try:
                self._live.send_offsets(
                    self.branch_id.name,
                    offset,
                    str(self.branch_id),
                    self._marker_topics,
                    self._at_most(60),
                )
            except KafkaException as error:
                if not error.args[0].retriable():
                    raise
                self._in_time("send the marker")
                self._live.poll(_QUEUE_FULL_WAIT_S)
            else:
                return

    def _identity(self) -> _Identity:
        """Who writes, by statistics of this transaction, however old.

        An open transaction keeps its producer id and epoch; one that broke since has refused the
        marker.
        """
        while (identity := _identity(told := self._reports.newest())) is None:
            self._check_sound("learn the producer id", told)
            self._live.poll(_POLL_S)
        return identity

    # -- helpers ---------------------------------------------------------------------------------

    def _at_most(self, seconds: float) -> float:
        return max(0.1, min(seconds, self._deadline - time.monotonic()))

    def _in_time(self, doing: str) -> None:
        if time.monotonic() > self._deadline:
            last = f"; the last error was: {self._reports.last_error}" * bool(
                self._reports.last_error
            )
            raise PrepareRejectedError(
                f"{self._where}: could not {doing} within the transaction timeout of "
                f"{self._timeout_ms} ms{last}. Make the batches smaller, or "
                f"{TIMEOUT} longer",
                self.branch_id,
            )

    @property
    def _where(self) -> str:
        topic = self._topic or min(self._topics, default=None)
        return f"Kafka at {self._servers}" + (f", topic {topic!r}" if topic else "")

    def _rejected(self, what: str, error: KafkaException) -> PrepareRejectedError:
        if self._producer is not None:
            with contextlib.suppress(KafkaException):
                self._producer.poll(0)  # a failed delivery is the reason, if there is one
        told: KafkaError = error.args[0]
        if told.code() == KafkaError._FATAL and self._producer is not None:  # noqa: SLF001
            told = self._producer.fatal_error() or told
        reason = f"{told.str()}{_advice(told)}"
        if self._reports.first_failure is not None:
            reason = self._reports.first_failure
        elif isinstance(self._token, TokenCallback) and self._token.failure is not None:
            reason = self._token.failure  # which librdkafka takes for a timeout
        elif told.code() in _UNEXPLAINED and self._reports.last_error:
            reason = f"{reason} ({self._reports.last_error})"
        return PrepareRejectedError(f"{self._where}: {what}: {reason}", self.branch_id)


_TOO_FAR: Final = (
    "further away than its message.timestamp.before.max.ms or message.timestamp.after.max.ms"
)
_ADVICE: Final = {
    KafkaError.MSG_SIZE_TOO_LARGE: (
        ". Raise max.message.bytes of the topic and config={'message.max.bytes': …} of the sink; "
        "or, where rows fit and batches of them do not, set config={'batch.size': …} below it"
    ),
    KafkaError.INVALID_RECORD: (  # also of timestamps, where several are wrong
        ". A topic with cleanup.policy=compact takes no row without a key, and none takes a "
        f"timestamp that is {_TOO_FAR}"
    ),
    KafkaError.INVALID_TIMESTAMP: f". A row's timestamp is {_TOO_FAR}",
    KafkaError.OFFSET_METADATA_TOO_LARGE: (
        ". The marker, which proves a commit, has no room: raise offset.metadata.max.bytes of the "
        "brokers (4096 by default)"
    ),
    KafkaError.UNKNOWN_TOPIC_OR_PART: ". Create the topic",
    KafkaError._UNKNOWN_TOPIC: ". Create the topic",  # noqa: SLF001 - librdkafka's name
    KafkaError._UNKNOWN_PARTITION: ". The topic has fewer partitions",  # noqa: SLF001
    KafkaError.INVALID_TRANSACTION_TIMEOUT: (
        ". Set transaction_timeout_ms= to the broker's transaction.max.timeout.ms or less"
    ),
    KafkaError._MSG_TIMED_OUT: (  # noqa: SLF001 - librdkafka's name
        ". It waited for the partition's leader, or for as many replicas as the topic's "
        "min.insync.replicas; are the brokers up?"
    ),
    KafkaError.COORDINATOR_NOT_AVAILABLE: (
        ". It waited for the broker that coordinates transactions, or for as many replicas as "
        "min.insync.replicas of __transaction_state; are the brokers up?"
    ),
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: f". Allow {TRANSACTIONS_RIGHT}",
    KafkaError.GROUP_AUTHORIZATION_FAILED: f". Allow {GROUPS_RIGHT}",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: f". Allow {TOPIC_RIGHTS}",
}


def _advice(error: KafkaError) -> str:
    return _ADVICE.get(error.code(), "")
