"""The requests that describe, list and end a transaction from outside its producer.

    one KafkaAdminClient per process (its own I/O thread) ◄── any number of our threads

Every method is one question to the brokers and either gives their answer or raises the
`kafka.errors` class of what went wrong; `outcome` decides what an answer proves.

confluent-kafka has none of these requests, so kafka-python sends them. EndTxn itself is private
there: `_manager` and `_find_coordinator_id` are the two names used, and the version is pinned.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from kafka import errors
from kafka.admin import ConfigResource, ConfigResourceType, KafkaAdminClient
from kafka.net.compat import KafkaNetClient
from kafka.net.inet import KafkaNetSocket
from kafka.protocol.admin.transactions import DescribeTransactionsRequest, ListTransactionsRequest
from kafka.protocol.consumer.group import OffsetFetchRequest
from kafka.protocol.metadata import CoordinatorType, MetadataRequest
from kafka.protocol.producer.transaction import EndTxnRequest, InitProducerIdRequest
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_exponential

from sparkonce.sinks.kafka.settings import KafkaSettings

REQUEST_TIMEOUT_MS: Final = 5_000
FENCING_VERSION: Final = 5
"""From this version of EndTxn on (Kafka 4.0) the broker fences the producer as it ends."""

STABLE_OFFSETS_VERSION: Final = 8
_NOT_SAID: Final = 31
"""The one bit that a broker sets which was not asked for operations."""

LIST_BY_PATTERN_VERSION: Final = 2

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class TransactionState:
    """What the coordinator says of a transactional id.

    Attributes:
        state: "Ongoing", "PrepareCommit", "CompleteCommit", … as Kafka spells it.
        producer_id: that holds the id now.
        producer_epoch: with it.
        timeout_ms: after which an open transaction is aborted.
        started_at: Unix time in seconds; negative when no transaction is open.
    """

    state: str
    producer_id: int
    producer_epoch: int
    timeout_ms: int
    started_at: float


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """What `Finisher.topic` saw.

    Attributes:
        error: Kafka's error code of the topic; 0 when it exists.
        operations: what we may do, as `ACLOperation`s; None when the broker does not say.
    """

    error: int
    operations: frozenset[int] | None


def is_transient(error: BaseException) -> bool:
    """Whether asking again can give another answer: no connection, or a coordinator on the move."""
    return isinstance(
        error,
        (
            errors.RetriableError,
            errors.UnknownBrokerIdError,
            errors.UnknownError,
            errors.BrokerNotAvailableError,
            OSError,
        ),
    )


class Patience:
    """Asks again, with backoff, while an error is transient and `seconds` have not passed.

    One patience is shared by all questions of one call, so that the call ends in time.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._until = time.monotonic() + seconds

    def __call__(self, question: Callable[[], ResultT]) -> ResultT:
        """The answer to `question`, or its last error; it is asked once at least."""
        retrying = Retrying(
            retry=retry_if_exception(is_transient),
            wait=wait_exponential(multiplier=0.004, max=0.25),
            stop=stop_after_delay(max(0.0, self._until - time.monotonic())),
            reraise=True,
        )
        return retrying(question)


class Finisher:
    """One process's connection to the transaction coordinators. Safe to use from several threads.

    Args:
        settings: address and security.
        end_version: the highest version of EndTxn to use; a lower one is for tests.
    """

    def __init__(self, settings: KafkaSettings, end_version: int = FENCING_VERSION) -> None:
        self._settings = settings
        self._end_version = end_version
        self._lock = threading.Lock()
        self._admin: Any = None
        self._owner_pid = os.getpid()

    # -- questions -------------------------------------------------------------------------------

    def end(
        self, transactional_id: str, producer_id: int, producer_epoch: int, *, commit: bool
    ) -> bool:
        """Send EndTxn; returns whether the answer also fenced the producer.

        Idempotent on the broker: the same call again gives the same answer.

        Raises:
            kafka.errors.KafkaError: the coordinator's refusal, or no answer: then it may or may
                not have ended.
        """

        async def ask(admin: Any) -> bool:
            node = await _coordinator(admin, transactional_id)
            request = EndTxnRequest(
                transactional_id=transactional_id,
                producer_id=producer_id,
                producer_epoch=producer_epoch,
                committed=commit,
                max_version=self._end_version,
            )
            response = await admin._manager.send(request, node_id=node)  # noqa: SLF001
            _raise_for(response.error_code)
            return bool(response.API_VERSION >= FENCING_VERSION)

        return self._ask(ask, forget=[transactional_id])

    def end_fences(self) -> bool:
        """Whether `end` also fences the producer on these brokers."""

        async def ask(admin: Any) -> bool:
            return min(_version(admin, EndTxnRequest), self._end_version) >= FENCING_VERSION

        return self._ask(ask)

    def fence(self, transactional_id: str, timeout_ms: int) -> None:
        """Initialise the transactional id again, so that its producer can write no more."""

        async def ask(admin: Any) -> None:
            node = await _coordinator(admin, transactional_id)
            request = InitProducerIdRequest(
                transactional_id=transactional_id,
                transaction_timeout_ms=timeout_ms,
                producer_id=-1,
                producer_epoch=-1,
                max_version=4,
            )
            response = await admin._manager.send(request, node_id=node)  # noqa: SLF001
            _raise_for(response.error_code)

        self._ask(ask, forget=[transactional_id])

    def describe(self, transactional_ids: Collection[str]) -> dict[str, TransactionState]:
        """What the coordinators say of each id; ids that they do not know are left out."""

        async def ask(admin: Any) -> dict[str, TransactionState]:
            by_node = defaultdict(list)
            for transactional_id in transactional_ids:
                by_node[await _coordinator(admin, transactional_id)].append(transactional_id)
            found = {}
            for node, ids in by_node.items():
                request = DescribeTransactionsRequest(transactional_ids=ids)
                response = await admin._manager.send(request, node_id=node)  # noqa: SLF001
                for row in response.transaction_states:
                    if row.error_code == errors.TransactionalIdNotFoundError.errno:
                        continue
                    _raise_for(row.error_code)
                    found[row.transactional_id] = TransactionState(
                        state=row.transaction_state,
                        producer_id=row.producer_id,
                        producer_epoch=row.producer_epoch,
                        timeout_ms=row.transaction_timeout_ms,
                        started_at=row.transaction_start_time_ms / 1000,
                    )
            return found

        return self._ask(ask, forget=transactional_ids)

    def marker(self, group: str, topic: str) -> tuple[int, str] | None:
        """The offset and metadata that `group` has committed for partition 0 of `topic`.

        Raises:
            kafka.errors.UnstableOffsetCommitError: a transaction that would change it is open or
                about to end: not decided yet.
        """

        async def ask(admin: Any) -> tuple[int, str] | None:
            node = await admin._find_coordinator_id(group, CoordinatorType.GROUP)  # noqa: SLF001
            wanted = OffsetFetchRequest.OffsetFetchRequestGroup
            topics = [wanted.OffsetFetchRequestTopics(name=topic, partition_indexes=[0])]
            request = OffsetFetchRequest(
                groups=[wanted(group_id=group, topics=topics)],
                require_stable=True,  # without it an undecided marker reads as the old one
                min_version=STABLE_OFFSETS_VERSION,
                max_version=STABLE_OFFSETS_VERSION,
            )
            response = await admin._manager.send(request, node_id=node)  # noqa: SLF001
            (answer,) = response.groups
            _raise_for(answer.error_code)
            for found in answer.topics:
                for partition in found.partitions:
                    _raise_for(partition.error_code)
                    if partition.committed_offset >= 0:
                        # confluent-kafka stores the C string with its end.
                        text = (partition.metadata or "").rstrip("\0")
                        return partition.committed_offset, text
            return None

        return self._ask(ask, forget=[group])

    def ongoing(self, prefix: str) -> list[str]:
        """The open transactions of the cluster whose ids start with `prefix`."""

        async def ask(admin: Any) -> list[str]:
            pattern = {}
            if _version(admin, ListTransactionsRequest) >= LIST_BY_PATTERN_VERSION:
                pattern["transactional_id_pattern"] = re.escape(prefix) + ".*"
            listed = await admin._async_list_transactions(  # noqa: SLF001
                state_filters=["Ongoing"], **pattern
            )
            return [
                row.transactional_id
                for rows in listed.values()
                for row in rows
                if row.transactional_id.startswith(prefix)
            ]

        return self._ask(ask)

    def cluster_id(self) -> str:
        """The id of the cluster that answers now."""

        async def ask(admin: Any) -> str:
            response = await admin._manager.send(MetadataRequest(topics=[]))  # noqa: SLF001
            return str(response.cluster_id)

        return self._ask(ask)

    def topic(self, name: str) -> TopicInfo:
        """Whether the topic exists, and what we may do with it. Never makes it."""

        async def ask(admin: Any) -> TopicInfo:
            request = MetadataRequest(
                topics=[MetadataRequest.MetadataRequestTopic(name=name)],
                allow_auto_topic_creation=False,
                include_topic_authorized_operations=True,
            )
            response = await admin._manager.send(request)  # noqa: SLF001
            (found,) = response.topics
            allowed = frozenset(found.authorized_operations or {_NOT_SAID})
            return TopicInfo(found.error_code, None if _NOT_SAID in allowed else allowed)

        return self._ask(ask)

    def broker_config(self, names: Sequence[str]) -> Mapping[str, str]:
        """Settings of one broker; empty when we may not read them."""

        async def ask(admin: Any) -> Mapping[str, str]:
            broker = admin._manager.cluster.brokers()[0]  # noqa: SLF001
            return await _config(admin, ConfigResourceType.BROKER, str(broker.node_id), names)

        return self._ask(ask)

    def topic_config(self, topic: str, names: Sequence[str]) -> Mapping[str, str]:
        """Settings of a topic; empty when we may not read them."""

        async def ask(admin: Any) -> Mapping[str, str]:
            return await _config(admin, ConfigResourceType.TOPIC, topic, names)

        return self._ask(ask)

    def unsupported(self) -> str | None:
        """The first request that these brokers are too old for; None when they know all."""

        async def ask(admin: Any) -> str | None:
            for request, least in (
                (DescribeTransactionsRequest, 0),
                (ListTransactionsRequest, 0),
                (OffsetFetchRequest, STABLE_OFFSETS_VERSION),
            ):
                try:
                    if _version(admin, request) < least:
                        return str(request.__name__)
                except errors.IncompatibleBrokerVersion:
                    return str(request.__name__)
            return None

        return self._ask(ask)

    # -- the connection --------------------------------------------------------------------------

    def close(self) -> None:
        """Close the connections; the next question opens new ones."""
        with self._lock:
            admin, self._admin = self._admin, None
        if admin is not None and self._owner_pid == os.getpid():
            admin.close()

    def _ask(
        self,
        question: Callable[[Any], Awaitable[ResultT]],
        forget: Collection[str] = (),
    ) -> ResultT:
        admin = self._connected()
        try:
            result: ResultT = admin._manager.run(question, admin)  # noqa: SLF001
        except RuntimeError as error:  # another thread has closed the client meanwhile
            raise errors.KafkaConnectionError(str(error)) from error
        finally:
            # Coordinators move, and kafka-python would keep every id it has ever seen.
            cached = admin._manager.cluster._coordinators  # noqa: SLF001
            for name in forget:
                cached.pop((CoordinatorType.TRANSACTION, name), None)
                cached.pop((CoordinatorType.GROUP, name), None)
        return result

    def _connected(self) -> Any:
        deadline = time.monotonic() + REQUEST_TIMEOUT_MS / 1000
        if not self._lock.acquire(timeout=REQUEST_TIMEOUT_MS / 1000):
            raise errors.KafkaConnectionError("another thread is still connecting")
        try:
            if self._owner_pid != os.getpid():
                # The I/O thread did not survive the fork; its sockets belong to the parent.
                self._admin, self._owner_pid = None, os.getpid()
            if self._admin is None:
                left_ms = max(1, int((deadline - time.monotonic()) * 1000))
                self._admin = _connect(self._settings, left_ms)
            return self._admin
        finally:
            self._lock.release()


class _ClosingSocket(KafkaNetSocket):  # type: ignore[misc] # kafka-python has no types for it
    """Closes what cannot connect; kafka-python leaves it to the garbage collector.

    A driver that waits for its brokers tries several times a second.
    """

    SCHEMES = ("sparkonce-direct",)

    async def sock_connect(self, net: Any, sock: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().sock_connect(net, sock, *args, **kwargs)
        except BaseException:
            sock.close()
            raise


def _connect(settings: KafkaSettings, timeout_ms: int) -> Any:
    """A new client. One that cannot connect is closed, which kafka-python leaves undone."""
    made: list[Any] = []

    def net_client(**config: object) -> Any:
        made.append(KafkaNetClient(**config))
        return made[-1]

    try:
        return KafkaAdminClient(
            **settings.for_admin(),
            client_id=str(settings.config.get("client.id", "sparkonce")),
            request_timeout_ms=REQUEST_TIMEOUT_MS,
            bootstrap_timeout_ms=timeout_ms,
            reconnect_backoff_ms=20,
            reconnect_backoff_max_ms=500,
            kafka_client=net_client,
            proxy_url=f"{_ClosingSocket.SCHEMES[0]}://",
        )
    except BaseException:
        for client in made:
            client.close()
        raise


async def _coordinator(admin: Any, transactional_id: str) -> Any:
    return await admin._find_coordinator_id(  # noqa: SLF001
        transactional_id, CoordinatorType.TRANSACTION
    )


async def _config(
    admin: Any, kind: ConfigResourceType, name: str, names: Sequence[str]
) -> Mapping[str, str]:
    resource = ConfigResource(kind, name, configs=dict.fromkeys(names))
    (found,) = await admin._async_describe_configs(  # noqa: SLF001
        [resource], config_filter="all", flat=True
    )
    return {key: entry["value"] for key, entry in found.items() if entry["value"] is not None}


def _version(admin: Any, request: Any) -> int:
    return int(admin._manager.broker_version_data.api_version(request))  # noqa: SLF001


def _raise_for(code: int) -> None:
    if code:
        raise errors.for_code(code)
