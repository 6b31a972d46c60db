"""Questions about the cluster: its brokers, its topics, its settings, and our rights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kafka import errors
from kafka.admin import ConfigResource, ConfigResourceType
from kafka.protocol.admin.transactions import (
    DescribeProducersRequest,
    DescribeTransactionsRequest,
    ListTransactionsRequest,
)
from kafka.protocol.consumer.group import OffsetFetchRequest
from kafka.protocol.consumer.offsets import ListOffsetsRequest
from kafka.protocol.metadata import CoordinatorType, MetadataRequest
from kafka.protocol.producer.transaction import AddOffsetsToTxnRequest, InitProducerIdRequest

from sparkonce.sinks.kafka.connecting.connection import refresh
from sparkonce.sinks.kafka.finishing.open_partitions import ENDS_ARE_KNOWN_VERSION
from sparkonce.sinks.kafka.finishing.questions import Questions, raise_for, send
from sparkonce.sinks.kafka.finishing.together import STABLE_OFFSETS_VERSION

LEADER_EPOCHS_VERSION: Final = 7
"""The version of Metadata with leader epochs; every broker since Kafka 2.1 supports it."""

OWN_EPOCH_VERSION: Final = 3
"""From this version of InitProducerId on (Kafka 2.5) the request names the producer to fence."""

_NOT_ANSWERED: Final = 31
"""The only bit that is set if the broker did not report the operations."""

_NEEDED: Final = (
    (ListTransactionsRequest, 0),  # orphans
    (DescribeTransactionsRequest, 0),  # the producer that holds a transaction
    (DescribeProducersRequest, 0),  # whether its partitions have their marker
    (ListOffsetsRequest, ENDS_ARE_KNOWN_VERSION),  # the same, asked for cheaply
    (MetadataRequest, LEADER_EPOCHS_VERSION),  # the leaders of these partitions
    (OffsetFetchRequest, STABLE_OFFSETS_VERSION),  # the proof of a commit
    (InitProducerIdRequest, OWN_EPOCH_VERSION),  # to fence before Kafka 4.0
)
"""The requests that only finishing needs, with the lowest version of each."""


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """What `ClusterQuestions.topic` saw.

    Attributes:
        error: Kafka's error code for the topic; 0 if it exists.
        operations: the operations that we may perform, as `ACLOperation`s; None if the broker did
            not report them.
        down: brokers that hold replicas of it, and that the cluster does not list now.
        in_sync: how many replicas are in sync on listed brokers, in the partition with the fewest.
    """

    error: int
    operations: frozenset[int] | None
    down: frozenset[int] = frozenset()
    in_sync: int = 0


class ClusterQuestions(Questions):
    def cluster_id(self) -> str:
        """The id of the cluster that responds now."""

        async def ask(admin: Any) -> str:
            return str((await send(admin, MetadataRequest(topics=[]))).cluster_id)

        return self._connection.ask(ask)

    def nodes(self) -> list[int]:
        """The node ids of the brokers that the cluster has now."""

        async def ask(admin: Any) -> list[int]:
            await refresh(admin)
            return [broker.node_id for broker in admin._manager.cluster.brokers()]  # noqa: SLF001

        return self._connection.ask(ask)

    def topic(self, name: str) -> TopicInfo:
        """Whether the topic exists, and what we may do with it. Never creates it."""

        async def ask(admin: Any) -> TopicInfo:
            request = MetadataRequest(
                topics=[MetadataRequest.MetadataRequestTopic(name=name)],
                allow_auto_topic_creation=False,
                include_topic_authorized_operations=True,
            )
            response = await send(admin, request)
            (found,) = response.topics
            allowed = frozenset(found.authorized_operations or {_NOT_ANSWERED})
            listed = {broker.node_id for broker in response.brokers}
            return TopicInfo(
                error=found.error_code,
                operations=None if _NOT_ANSWERED in allowed else allowed,
                down=frozenset(n for p in found.partitions for n in p.replica_nodes) - listed,
                in_sync=min((len(listed & {*p.isr_nodes}) for p in found.partitions), default=0),
            )

        return self._connection.ask(ask)

    def broker_config(self, names: Sequence[str]) -> Mapping[str, Sequence[int]]:
        """Numeric settings with the value of each broker; empty where we may not read them.

        The values differ if each broker has its own file, or while a change is rolled out. A broker
        uses its own value for what it coordinates.

        Raises:
            kafka.errors.KafkaError: one of the brokers does not respond.
        """

        async def ask(admin: Any) -> Mapping[str, Sequence[int]]:
            await refresh(admin)
            nodes = [str(broker.node_id) for broker in admin._manager.cluster.brokers()]  # noqa: SLF001
            found: dict[str, list[int]] = defaultdict(list)
            for settings in await _config(admin, ConfigResourceType.BROKER, nodes, names):
                for name, value in settings.items():
                    found[name].append(int(value))
            return dict(found)

        return self._connection.ask(ask)

    def topic_config(self, topic: str, names: Sequence[str]) -> Mapping[str, str]:
        """Settings of a topic; empty where we may not read them."""

        async def ask(admin: Any) -> Mapping[str, str]:
            (found,) = await _config(admin, ConfigResourceType.TOPIC, [topic], names)
            return found

        return self._connection.ask(ask)

    def try_rights(self, name: str) -> None:
        """Check that we may write as a transactional id and commit offsets as a group.

        The request is that of a producer for its marker, for a transaction that does not exist. The
        brokers first check the rights and then refuse it, so nothing changes. `name` is both the
        transactional id and the group; no producer uses it.

        Raises:
            kafka.errors.AuthorizationError: its class shows which right is missing.
        """

        async def ask(admin: Any) -> None:
            node = await admin._find_coordinator_id(name, CoordinatorType.TRANSACTION)  # noqa: SLF001
            request = AddOffsetsToTxnRequest(
                transactional_id=name, producer_id=0, producer_epoch=0, group_id=name, max_version=3
            )
            response = await send(admin, request, node)
            if response.error_code != errors.InvalidProducerIdMappingError.errno:
                raise_for(response.error_code)

        self._connection.ask(ask, forget=[name])

    def unsupported(self) -> str | None:
        """The first request that these brokers do not support; None when they support all."""

        async def ask(admin: Any) -> str | None:
            for request, least in _NEEDED:
                try:
                    admin._manager.broker_version_data.api_version(request, least)  # noqa: SLF001
                except errors.IncompatibleBrokerVersion:
                    return f"version {least} of {request.__name__}"
            return None

        return self._connection.ask(ask)


async def _config(
    admin: Any, kind: ConfigResourceType, resources: Sequence[str], names: Sequence[str]
) -> list[Mapping[str, str]]:
    wanted = [ConfigResource(kind, each, configs=dict.fromkeys(names)) for each in resources]
    answers = await admin._async_describe_configs(  # noqa: SLF001
        wanted, config_filter="all", flat=True
    )
    return [
        {key: entry["value"] for key, entry in found.items() if entry["value"] is not None}
        for found in answers
    ]
