"""The requests that describe, list and end a transaction from outside its producer.

Every method is one question to the brokers and either gives their answer or raises the
`kafka.errors` class of what went wrong; `outcome` decides what an answer proves.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

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
from kafka.protocol.producer.transaction import (
    AddOffsetsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    WriteTxnMarkersRequest,
)

from sparkonce.sinks.kafka.branch import KafkaBranch
from sparkonce.sinks.kafka.client import Connection, refresh
from sparkonce.sinks.kafka.open_partitions import (
    ENDS_ARE_KNOWN_VERSION,
    GONE,
    open_in_each,
    open_producers,
)
from sparkonce.sinks.kafka.settings import KafkaSettings
from sparkonce.sinks.kafka.together import (
    FENCING_VERSION,
    STABLE_OFFSETS_VERSION,
    ask_features,
    commit_together,
    lets_fence,
    offsets_wanted,
)

_FENCED_TIMEOUT_MS: Final = 1000
"""Of an id that nobody writes under: a broker refuses what is longer than it now allows."""

_NOT_SAID: Final = 31
"""The one bit that a broker sets which was not asked for operations."""

_OLD_MARKER: Final = errors.TransactionCoordinatorFencedError.errno

_LEADER_EPOCHS_VERSION: Final = 7
"""Of Metadata; every broker since Kafka 2.1 has it."""

_OWN_EPOCH_VERSION: Final = 3
"""Of InitProducerId: from it on (Kafka 2.5) it says which producer is to be fenced."""

_NEEDED: Final = (
    (ListTransactionsRequest, 0),  # orphans
    (DescribeTransactionsRequest, 0),  # whose a transaction is
    (DescribeProducersRequest, 0),  # whether its partitions have their marker
    (ListOffsetsRequest, ENDS_ARE_KNOWN_VERSION),  # the same, asked for cheaply
    (MetadataRequest, _LEADER_EPOCHS_VERSION),  # who leads these partitions
    (OffsetFetchRequest, STABLE_OFFSETS_VERSION),  # the proof of a commit
    (InitProducerIdRequest, _OWN_EPOCH_VERSION),  # to fence before Kafka 4.0
)
"""The requests without which nothing can be finished, beside those that writing takes, and the
version that is the least for each; for what it is used."""

_OFFSETS_TOPIC: Final = "__consumer_offsets"
STATE_TOPIC: Final = "__transaction_state"
"""In which the coordinators keep what they know of transactions."""

Partitions: TypeAlias = "Mapping[str, Sequence[int]]"
"""Partition numbers by topic."""


@dataclass(frozen=True, slots=True)
class TransactionState:
    """What the coordinator says of a transactional id.

    Attributes:
        state: "Ongoing", "PrepareCommit", "CompleteCommit", … as Kafka spells it.
        producer_id: that holds the id now.
        producer_epoch: with it.
        timeout_ms: after which an open transaction is aborted.
        started_at: Unix time in seconds; negative when no transaction is open.
        partitions: that hold its rows, by topic; none when it has ended.
    """

    state: str
    producer_id: int
    producer_epoch: int
    timeout_ms: int
    started_at: float
    partitions: Partitions

    def branch(self, transactional_id: str, cluster_id: str = "") -> KafkaBranch:
        """What can be aborted of it."""
        return KafkaBranch(
            transactional_id=transactional_id,
            producer_id=self.producer_id,
            producer_epoch=self.producer_epoch,
            partitions=self.partitions,
            cluster_id=cluster_id,
            marker_topics=sorted(self.partitions),
            began_at=self.started_at,
            timeout_ms=self.timeout_ms,
        )


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """What `Finisher.topic` saw.

    Attributes:
        error: Kafka's error code of the topic; 0 when it exists.
        operations: what we may do, as `ACLOperation`s; None when the broker does not say.
    """

    error: int
    operations: frozenset[int] | None


class Finisher:
    """One process's connection to the transaction coordinators. Safe to use from several threads.

    Args:
        settings: address and security.
        end_version: the highest version of EndTxn to use; a lower one is for tests.
    """

    def __init__(self, settings: KafkaSettings, end_version: int = FENCING_VERSION) -> None:
        self._connection = Connection(settings)
        self._end_version = end_version

    def close(self) -> None:
        """Close the connections; the next question opens new ones."""
        self._connection.close()

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
                max_version=await self._version_to_end(admin),
            )
            response = await admin._manager.send(request, node_id=node)  # noqa: SLF001
            _raise_for(response.error_code)
            return bool(response.API_VERSION >= FENCING_VERSION)

        return self._connection.ask(ask, forget=[transactional_id])

    def commit_together(self, branches: Sequence[KafkaBranch]) -> set[str]:
        """Commit branches in a healthy cluster; those not among the answer may be committed or not.

        Raises:
            kafka.errors.KafkaError: of whatever request failed; nothing is known of any branch.
        """

        async def ask(admin: Any) -> set[str]:
            knows = self._known_version(admin) >= FENCING_VERSION
            return await commit_together(admin, branches) if knows else set()

        return self._connection.ask(ask, forget=[branch.transactional_id for branch in branches])

    def end_fences(self) -> bool:
        """Whether `end` also fences the producer on these brokers."""

        async def ask(admin: Any) -> bool:
            return await self._version_to_end(admin) >= FENCING_VERSION

        return self._connection.ask(ask)

    async def _version_to_end(self, admin: Any) -> int:
        """The highest version of EndTxn that the cluster lets clients use.

        That its brokers know it is not enough: until the operator finishes the upgrade to Kafka 4,
        they refuse it, and may leave the transaction behind in a state that no request ends. He may
        take it back at any time, so it is asked for each time.
        """
        highest = self._known_version(admin)
        if highest >= FENCING_VERSION and not await lets_fence(ask_features(admin)):
            highest = FENCING_VERSION - 1
        return highest

    def _known_version(self, admin: Any) -> int:
        return min(_version(admin, EndTxnRequest), self._end_version)

    def fence(self, transactional_id: str, producer_id: int = -1, producer_epoch: int = -1) -> None:
        """Initialise the transactional id again, so that its producer can write no more.

        What is open is aborted, with markers that fence the producer in its partitions, too. Where
        a producer is given and another holds the id it is refused; but of what is open the brokers
        look at the producer id only, which a younger epoch has as well.

        Raises:
            kafka.errors.ConcurrentTransactionsError: what was open is being aborted: ask again.
        """

        async def ask(admin: Any) -> None:
            node = await _coordinator(admin, transactional_id)
            request = InitProducerIdRequest(
                transactional_id=transactional_id,
                transaction_timeout_ms=_FENCED_TIMEOUT_MS,
                producer_id=producer_id,
                producer_epoch=producer_epoch,
                min_version=_OWN_EPOCH_VERSION,
                max_version=4,
            )
            response = await admin._manager.send(request, node_id=node)  # noqa: SLF001
            _raise_for(response.error_code)

        self._connection.ask(ask, forget=[transactional_id])

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
                        partitions={
                            topic.topic: list(topic.partitions)
                            for topic in row.topics
                            if topic.topic != _OFFSETS_TOPIC
                        },
                    )
            return found

        return self._connection.ask(ask, forget=transactional_ids)

    def markers(self, group: str, topics: Sequence[str]) -> list[tuple[int, str]]:
        """Each offset and metadata that `group` has committed for partition 0 of `topics`.

        Raises:
            kafka.errors.UnstableOffsetCommitError: a transaction that would change it is open or
                about to end: not decided yet.
        """

        async def ask(admin: Any) -> list[tuple[int, str]]:
            node = await admin._find_coordinator_id(group, CoordinatorType.GROUP)  # noqa: SLF001
            request = OffsetFetchRequest(
                groups=[offsets_wanted(group, topics)],
                require_stable=True,  # without it an undecided marker reads as the old one
                min_version=STABLE_OFFSETS_VERSION,
                max_version=STABLE_OFFSETS_VERSION,
            )
            response = await admin._manager.send(request, node_id=node)  # noqa: SLF001
            (answer,) = response.groups
            _raise_for(answer.error_code)
            partitions = [found for topic in answer.topics for found in topic.partitions]
            for found in partitions:
                _raise_for(found.error_code)
            return [
                # confluent-kafka stores the C string with its end.
                (found.committed_offset, (found.metadata or "").rstrip("\0"))
                for found in partitions
                if found.committed_offset >= 0
            ]

        return self._connection.ask(ask, forget=[group])

    def nodes(self) -> list[int]:
        """The brokers that the cluster has now, by node id."""

        async def ask(admin: Any) -> list[int]:
            await refresh(admin)
            return [broker.node_id for broker in admin._manager.cluster.brokers()]  # noqa: SLF001

        return self._connection.ask(ask)

    def ongoing(self, prefix: str, node: int) -> list[str]:
        """The open transactions that one broker coordinates and whose ids start with `prefix`."""

        async def ask(admin: Any) -> list[str]:
            list_on = partial(
                admin._async_list_transactions,  # noqa: SLF001
                broker_ids=[node],
                state_filters=["Ongoing"],
            )
            try:
                listed = await list_on(transactional_id_pattern=re.escape(prefix) + ".*")
            except errors.UnsupportedVersionError:
                listed = await list_on()  # this broker is older than Kafka 4.1
            return [
                row.transactional_id
                for row in listed[node]
                if row.transactional_id.startswith(prefix)
            ]

        return self._connection.ask(ask)

    def cluster_id(self) -> str:
        """The id of the cluster that answers now."""

        async def ask(admin: Any) -> str:
            response = await admin._manager.send(MetadataRequest(topics=[]))  # noqa: SLF001
            return str(response.cluster_id)

        return self._connection.ask(ask)

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

        return self._connection.ask(ask)

    def broker_config(self, names: Sequence[str]) -> Mapping[str, Sequence[int]]:
        """Numbers among the settings, as each broker has them; none that we may not read.

        They differ where each broker has its own file, or while a change is rolled out; and of what
        a broker coordinates, its own one counts.

        Raises:
            kafka.errors.KafkaError: one of the brokers does not answer.
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
        """Settings of a topic; empty when we may not read them."""

        async def ask(admin: Any) -> Mapping[str, str]:
            (found,) = await _config(admin, ConfigResourceType.TOPIC, [topic], names)
            return found

        return self._connection.ask(ask)

    def try_rights(self, name: str) -> None:
        """Find out whether we may write as a transactional id and commit offsets as a group.

        The question is that of a producer for its marker, for a transaction that nobody has: the
        brokers look at the rights first, and then refuse it. Nothing is changed.

        Args:
            name: of both, that no producer uses.

        Raises:
            kafka.errors.AuthorizationError: the class says which right is missing.
        """

        async def ask(admin: Any) -> None:
            node = await _coordinator(admin, name)
            request = AddOffsetsToTxnRequest(
                transactional_id=name, producer_id=0, producer_epoch=0, group_id=name, max_version=3
            )
            response = await admin._manager.send(request, node_id=node)  # noqa: SLF001
            if response.error_code != errors.InvalidProducerIdMappingError.errno:
                _raise_for(response.error_code)

        self._connection.ask(ask, forget=[name])

    def unsupported(self) -> str | None:
        """The first request that these brokers are too old for; None when they know all."""

        async def ask(admin: Any) -> str | None:
            for request, least in _NEEDED:
                try:
                    admin._manager.broker_version_data.api_version(request, least)  # noqa: SLF001
                except errors.IncompatibleBrokerVersion:
                    return f"version {least} of {request.__name__}"
            return None

        return self._connection.ask(ask)

    # -- markers of single partitions --------------------------------------------------------------

    def open_partitions(self, partitions: Partitions, producer_id: int) -> dict[str, list[int]]:
        """Those of `partitions` in which `producer_id` has a transaction without its marker yet.

        Partitions that are gone are left out.

        Raises:
            TopicAuthorizationFailedError: one may not be looked at.
        """

        async def ask(admin: Any) -> dict[str, list[int]]:
            found: dict[str, list[int]] = defaultdict(list)
            still_open = await open_producers(admin, await _by_leader(admin, partitions))
            for topic, number, producer in sorted(still_open):
                if producer == producer_id:
                    found[topic].append(number)
            return found

        return self._connection.ask(ask)

    def closed(self, branches: Sequence[KafkaBranch]) -> dict[str, dict[str, list[int]]]:
        """The partitions in which branches are not open (any more), by transactional id and topic.

        Left out are branches that are open wherever they wrote, and topics that are gone.

        Raises:
            TopicAuthorizationFailedError: one may not be looked at.
        """

        async def ask(admin: Any) -> dict[str, dict[str, list[int]]]:
            written: dict[str, set[int]] = defaultdict(set)
            for branch in branches:
                for topic, numbers in branch.partitions.items():
                    written[topic].update(numbers)
            existing = await _metadata(admin, written)
            producers = await open_in_each(
                admin, _led(existing, {topic: sorted(n) for topic, n in written.items()})
            )
            found: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
            for branch in branches:
                for topic in filter(existing.__contains__, branch.partitions):
                    for number in branch.partitions[topic]:
                        there = producers.get((topic, number))
                        # Gone with its topic just now; or made anew with fewer of them.
                        is_lost = there is None and number not in existing[topic]
                        if is_lost or (there is not None and _is_closed(branch, there)):
                            found[branch.transactional_id][topic].append(number)
            return {name: dict(topics) for name, topics in found.items()}

        return self._connection.ask(ask)

    def offsets_partition(self, group: str) -> dict[str, list[int]]:
        """The partition in which Kafka keeps the offsets of `group`; none where it is hidden."""

        async def ask(admin: Any) -> dict[str, list[int]]:
            place = await _place(admin, _OFFSETS_TOPIC, group)
            return {_OFFSETS_TOPIC: [] if place is None else [place.partition_index]}

        return self._connection.ask(ask)

    def write_markers(
        self,
        transactional_id: str,
        partitions: Partitions,
        producer_id: int,
        producer_epoch: int,
        *,
        commit: bool,
    ) -> dict[str, list[int]]:
        """Write the markers that the coordinator has left out.

        Only for a transaction that the coordinator itself calls committed, or aborted, and only
        where it is still open.

        Returns:
            Those of `partitions` that remember a younger coordinator and so refuse the marker; or
            it has written the marker meanwhile.
        """

        async def ask(admin: Any) -> dict[str, list[int]]:
            marker = WriteTxnMarkersRequest.WritableTxnMarker
            place = await _place(admin, STATE_TOPIC, transactional_id)
            if place is not None:
                _raise_for(place.error_code)
            refused: dict[str, list[int]] = defaultdict(list)
            for node, topics in (await _by_leader(admin, partitions)).items():
                request = WriteTxnMarkersRequest(
                    markers=[
                        marker(
                            producer_id=producer_id,
                            producer_epoch=producer_epoch,
                            transaction_result=commit,
                            topics=[
                                marker.WritableTxnMarkerTopic(name=n, partition_indexes=p)
                                for n, p in topics.items()
                            ],
                            # As the coordinator's own: partitions remember the last one.
                            coordinator_epoch=0 if place is None else place.leader_epoch,
                        )
                    ]
                )
                response = await admin._manager.send(request, node_id=node)  # noqa: SLF001
                for result in response.markers:
                    for topic in result.topics:
                        for partition in topic.partitions:
                            if partition.error_code == _OLD_MARKER:
                                refused[topic.name].append(partition.partition_index)
                            else:
                                _raise_for(partition.error_code)
            return dict(refused)

        return self._connection.ask(ask)


async def _metadata(admin: Any, topics: Collection[str]) -> dict[str, dict[int, Any]]:
    """What is known of each partition, by topic; topics that are gone are left out."""
    wanted = MetadataRequest.MetadataRequestTopic
    request = MetadataRequest(
        topics=[wanted(name=name) for name in topics],
        allow_auto_topic_creation=False,
        min_version=_LEADER_EPOCHS_VERSION,
    )
    response = await admin._manager.send(request)  # noqa: SLF001
    found = {}
    for topic in response.topics:
        if topic.error_code == GONE:
            continue
        _raise_for(topic.error_code)
        found[topic.name] = {p.partition_index: p for p in topic.partitions}
    return found


async def _place(admin: Any, topic: str, name: str) -> Any | None:
    """The partition in which Kafka keeps what belongs to a name; None where the topic is hidden."""
    try:
        partitions = (await _metadata(admin, [topic])).get(topic, {})
    except errors.TopicAuthorizationFailedError:
        return None
    return partitions[abs(_java_hash(name)) % len(partitions)] if partitions else None


async def _by_leader(admin: Any, partitions: Partitions) -> dict[int, dict[str, list[int]]]:
    return _led(await _metadata(admin, partitions), partitions)


def _led(
    found: Mapping[str, Mapping[int, Any]], partitions: Partitions
) -> dict[int, dict[str, list[int]]]:
    by_leader: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for topic, numbers in partitions.items():
        for number in numbers:
            partition = found.get(topic, {}).get(number)
            if partition is not None:
                _raise_for(partition.error_code)
                by_leader[partition.leader_id][topic].append(number)
    return by_leader


def _is_closed(branch: KafkaBranch, producers: Mapping[int, bool]) -> bool:
    """Whether it was ended in a partition, of whose open producers `open_in_each` tells."""
    was_ended = producers.get(branch.producer_id)
    # A producer's first transaction that has had a marker was ended while its task was writing on.
    return was_ended is None or (was_ended and branch.producer_epoch == 0)


def _java_hash(text: str) -> int:
    """Java's String.hashCode of an ASCII string; Kafka places names by it."""
    value = 0
    for code in text.encode("ascii"):
        value = (31 * value + code) & 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


async def _coordinator(admin: Any, transactional_id: str) -> Any:
    return await admin._find_coordinator_id(  # noqa: SLF001
        transactional_id, CoordinatorType.TRANSACTION
    )


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


def _version(admin: Any, request: Any) -> int:
    return int(admin._manager.broker_version_data.api_version(request))  # noqa: SLF001


def _raise_for(code: int) -> None:
    if code:
        raise errors.for_code(code)
