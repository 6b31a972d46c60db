"""One open Kafka transaction per task: flushed, marked and left open.

    open ─► write* ─► flush ─► gate ─► marker ─► producer id ─► drop the producer, keep the
                                                                 transaction

1. One transaction per producer. Two would share producer id and epoch, so a late commit of the
   first would commit the second (I2).
2. The gate. `flush` also returns 0 when a message failed permanently, and an EndTxn from outside
   would then commit the rest. So deliveries are counted and compared with the rows, and the marker,
   the last request, fails when librdkafka considers the transaction broken.
3. The marker is an offset that the transaction commits, in a consumer group of its own. A later
   reader of the marker knows that the transaction committed, long after the coordinator has
   forgotten it. Kafka deletes a marker with its topic, so each topic of the rows gets one.
4. Dropping the last reference to the producer leaves the transaction open.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import KafkaError, KafkaException

from sparkonce.errors import PrepareRejectedError, ProtocolError
from sparkonce.model import BranchId
from sparkonce.sinks.kafka.branch import TIMEOUT, KafkaBranch
from sparkonce.sinks.kafka.connecting.oauth import TokenCallback
from sparkonce.sinks.kafka.connecting.outage import Outage
from sparkonce.sinks.kafka.rows.conventions import RowError
from sparkonce.sinks.kafka.rows.messages import Messages, messages_by_topic
from sparkonce.sinks.kafka.writing.advice import advice
from sparkonce.sinks.kafka.writing.librdkafka import TransactionalProducer
from sparkonce.sinks.kafka.writing.reports import (
    NOBODY,
    Identity,
    Reports,
    identity_in,
    is_broken,
)

if TYPE_CHECKING:
    import pyarrow as pa

CONNECT_TIMEOUT_S: Final = 30.0
INIT_TIMEOUT_S: Final = 60.0
ABORT_TIMEOUT_S: Final = 5.0

STATISTICS_INTERVAL_MS: Final = 10
"""How often librdkafka reports its producer id, for which `prepare` may have to wait."""

MARKERS: Final = 100
"""The largest number of markers; they share one message, whose size Kafka limits."""

_QUEUE_FULL_WAIT_S: Final = 0.01
_POLL_S: Final = 0.25
_LOOK_EVERY_S: Final = 2.0
"""How often a transaction that waits checks that its topics still exist."""


class OpenTransaction:
    """One open Kafka transaction, from its beginning until it is prepared or abandoned.

    `cluster_id` is the cluster that the driver saw; None without validation.

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
        self._servers = str(config["bootstrap.servers"])
        self._reports = Reports(Outage(self._servers))
        self._proof_kept_s = proof_kept_s
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
        if not self._topics:  # the broker's clock starts with the first row
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
        """Take librdkafka's events, such as statistics, which would pile up otherwise."""
        with contextlib.suppress(KafkaException):  # `write` or `prepare` will raise it again
            self._live.poll(0)

    def prepare(self) -> KafkaBranch:
        """Flush, check, mark; leave the transaction open and free the producer.

        Raises:
            PrepareRejectedError: a row was not delivered, or the transaction is broken. The
                producer is kept, for `abandon`.
        """
        identity = NOBODY
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
        """Abort the transaction if that succeeds soon; never raises.

        librdkafka sends no EndTxn while the first partition is still being added, so the
        transaction may open just after this call; the sweep finds it.
        """
        producer, self._producer = self._producer, None
        if producer is not None:
            with contextlib.suppress(KafkaException):
                producer.abort_transaction(ABORT_TIMEOUT_S)

    # -- beginning and writing -------------------------------------------------------------------

    def _start_clock(self) -> None:
        self._began_at = time.time()
        self._deadline = time.monotonic() + self._timeout_ms / 1000

    @property
    def _live(self) -> TransactionalProducer:
        if self._producer is None:
            raise ProtocolError(f"{self.branch_id}: the transaction was prepared or discarded")
        return self._producer

    def _connect(self, producer: TransactionalProducer, expected: str | None) -> str:
        # Unless librdkafka knows a broker's address, init_transactions waits for a timer of half a
        # second. The first response comes from the bootstrap connection, the second from a broker.
        # Naming a topic keeps the responses small; otherwise they hold every topic.
        for _ in range(2):
            try:
                found, _ = producer.look(self._topic, self._at_most(CONNECT_TIMEOUT_S))
            except KafkaException:
                producer.poll(0)  # reports the reason to `on_error`
                raise
        self._reports.on_response()
        _check_cluster(str(found), expected, self._servers, self.branch_id)
        return str(found)

    def _send(self, topic: str, messages: Messages) -> None:
        queued = 0
        while (queued := self._live.send(topic, messages, queued)) < len(messages):
            self._live.poll(_QUEUE_FULL_WAIT_S)
            self._check_sound("wait for room in the queue")
        self._rows += queued

    def _flush(self) -> None:
        while self._live.flush(_POLL_S) > 0:
            self._check_sound("flush")

    # -- the gate --------------------------------------------------------------------------------

    def _gate(self) -> None:
        if self._reports.failed and self._reports.first_failure is None:
            # Purged because the transaction is broken; its next request raises the reason.
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
        """Compare counts: a row whose delivery was not reported counts as not delivered."""
        if self._reports.delivered != self._rows:
            raise PrepareRejectedError(
                f"{self._where}: {self._rows} record(s) were written, and librdkafka reported the "
                f"delivery of {self._reports.delivered}",
                self.branch_id,
            )

    def _check_sound(self, doing: str, statistics: dict[str, Any] | None = None) -> None:
        self._gate()
        if is_broken(self._reports.newest() if statistics is None else statistics):
            # The messages of a broken transaction would wait in the queue until it times out. The
            # next transactional request raises the reason.
            self._mark()
        self._in_time(doing)
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _LOOK_EVERY_S
            deleted = _deleted(self._live, self._topics)
            if deleted is not None:
                raise PrepareRejectedError(f"{self._where}: {deleted}", self.branch_id)

    # -- marker and identity ---------------------------------------------------------------------

    @property
    def _marker_topics(self) -> list[str]:
        return sorted(self._topics)[:MARKERS] or ([] if self._topic is None else [self._topic])

    def _mark(self) -> None:
        batch_id, name, proof = self.branch_id.batch_id, self.branch_id.name, str(self.branch_id)
        offset = -1 if batch_id is None else batch_id
        while True:
            try:
                self._live.send_offsets(name, offset, proof, self._marker_topics, self._at_most(60))
            except KafkaException as error:
                if not error.args[0].retriable():
                    raise
                self._in_time("send the marker")
                self._live.poll(_QUEUE_FULL_WAIT_S)
            else:
                return

    def _identity(self) -> Identity:
        """The producer's identity, from any statistics of this transaction.

        An open transaction keeps its producer id and epoch. If it has broken since those
        statistics, it has refused the marker.
        """
        while (identity := identity_in(statistics := self._reports.newest())) is None:
            self._check_sound("learn the producer id", statistics)
            self._live.poll(_POLL_S)
        return identity

    # -- time and errors -------------------------------------------------------------------------

    def _at_most(self, seconds: float) -> float:
        return max(0.1, min(seconds, self._deadline - time.monotonic()))

    def _in_time(self, doing: str) -> None:
        if time.monotonic() > self._deadline:
            last = self._reports.last_error
            raise PrepareRejectedError(
                f"{self._where}: could not {doing} within the transaction timeout of "
                f"{self._timeout_ms / 1000:g} s{f'; the last error was: {last}' if last else ''}. "
                f"Make the batches smaller, or {TIMEOUT} longer",
                self.branch_id,
            )

    @property
    def _where(self) -> str:
        topic = self._topic or min(self._topics, default=None)
        return f"Kafka at {self._servers}" + (f", topic {topic!r}" if topic else "")

    def _rejected(self, what: str, error: KafkaException) -> PrepareRejectedError:
        if self._producer is not None:
            with contextlib.suppress(KafkaException):
                self._producer.poll(0)  # reports the reason, if it is a failed delivery
        found: KafkaError = error.args[0]
        if found.code() == KafkaError._FATAL and self._producer is not None:  # noqa: SLF001
            found = self._producer.fatal_error() or found
        token = self._token.failure if isinstance(self._token, TokenCallback) else None
        reason = self._reports.reason(found, token)
        return PrepareRejectedError(f"{self._where}: {what}: {reason}", self.branch_id)


def _deleted(producer: TransactionalProducer, topics: Iterable[str]) -> str | None:
    """The topic that no longer exists, for an error; librdkafka would wait for it for minutes."""
    for topic in topics:
        with contextlib.suppress(KafkaException):  # no response, which the task waits for anyway
            _, failed = producer.look(topic, _POLL_S)
            found = failed.get(topic)
            if found is not None and found.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                return f"the topic {topic!r} no longer exists{advice(found)}"
    return None


def _check_cluster(found: str, expected: str | None, servers: str, branch_id: BranchId) -> None:
    if expected is not None and found != expected:
        raise PrepareRejectedError(
            f"bootstrap_servers={servers!r} is the Kafka cluster {expected} on the driver and "
            f"{found} on this executor; give an address that means the same cluster everywhere",
            branch_id,
        )
