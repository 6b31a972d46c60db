"""Questions to the partitions' leaders: where a branch is open, and the markers that end it.

A control marker ends a transaction in one partition. The coordinator writes it; `write_markers`
writes those that the coordinator has left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from kafka import errors
from kafka.protocol.metadata import MetadataRequest
from kafka.protocol.producer.transaction import WriteTxnMarkersRequest

from sparkonce.sinks.kafka.branch import KafkaBranch
from sparkonce.sinks.kafka.finishing.cluster import LEADER_EPOCHS_VERSION
from sparkonce.sinks.kafka.finishing.open_partitions import GONE, open_in_each, open_producers
from sparkonce.sinks.kafka.finishing.questions import Partitions, Questions, raise_for, send
from sparkonce.sinks.kafka.finishing.transactions import OFFSETS_TOPIC

STATE_TOPIC: Final = "__transaction_state"
"""The topic in which the coordinators keep the state of transactions."""

_OLD_MARKER: Final = errors.TransactionCoordinatorFencedError.errno


class PartitionQuestions(Questions):
    def open_partitions(self, partitions: Partitions, producer_id: int) -> dict[str, list[int]]:
        """The `partitions` in which `producer_id` has a transaction without its marker.

        Deleted partitions are omitted.

        Raises:
            TopicAuthorizationFailedError: we may not look at one of them.
        """

        async def ask(admin: Any) -> dict[str, list[int]]:
            found: dict[str, list[int]] = defaultdict(list)
            by_leader = _led(await _metadata(admin, partitions), partitions)
            for topic, number, producer in sorted(await open_producers(admin, by_leader)):
                if producer == producer_id:
                    found[topic].append(number)
            return found

        return self._connection.ask(ask)

    def closed(self, branches: Sequence[KafkaBranch]) -> dict[str, dict[str, list[int]]]:
        """The partitions in which branches are no longer open, by transactional id and topic.

        Branches that are open wherever they wrote are omitted, and so are deleted topics.

        Raises:
            TopicAuthorizationFailedError: we may not look at one of the topics.
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
            found = {
                branch.transactional_id: _closed(branch, existing, producers) for branch in branches
            }
            return {name: topics for name, topics in found.items() if topics}

        return self._connection.ask(ask)

    def offsets_partition(self, group: str) -> dict[str, list[int]]:
        """The partition that holds the offsets of `group`; none where we may not see it."""

        async def ask(admin: Any) -> dict[str, list[int]]:
            place = await home_partition(admin, OFFSETS_TOPIC, group)
            return {OFFSETS_TOPIC: [] if place is None else [place.partition_index]}

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

        Only for a transaction that the coordinator itself reports as committed or aborted, and only
        in partitions where it is still open.

        Returns:
            The `partitions` that refuse the marker: they remember a later coordinator, or have
            received the marker in the meantime.
        """

        async def ask(admin: Any) -> dict[str, list[int]]:
            place = await home_partition(admin, STATE_TOPIC, transactional_id)
            if place is not None:
                raise_for(place.error_code)
            # The coordinator's own epoch: partitions refuse one that is lower than the last.
            epoch = 0 if place is None else place.leader_epoch
            refused: dict[str, list[int]] = defaultdict(list)
            by_leader = _led(await _metadata(admin, partitions), partitions)
            for node, topics in by_leader.items():
                request = _markers(topics, producer_id, producer_epoch, epoch, commit=commit)
                _take_refusals(await send(admin, request, node), refused)
            return dict(refused)

        return self._connection.ask(ask)


def _markers(
    topics: Partitions, producer_id: int, producer_epoch: int, epoch: int, *, commit: bool
) -> Any:
    marker = WriteTxnMarkersRequest.WritableTxnMarker
    wanted = [
        marker.WritableTxnMarkerTopic(name=name, partition_indexes=numbers)
        for name, numbers in topics.items()
    ]
    return WriteTxnMarkersRequest(
        markers=[
            marker(
                producer_id=producer_id,
                producer_epoch=producer_epoch,
                transaction_result=commit,
                topics=wanted,
                coordinator_epoch=epoch,
            )
        ]
    )


def _take_refusals(response: Any, refused: dict[str, list[int]]) -> None:
    for result in response.markers:
        for topic in result.topics:
            for partition in topic.partitions:
                if partition.error_code == _OLD_MARKER:
                    refused[topic.name].append(partition.partition_index)
                else:
                    raise_for(partition.error_code)


def _closed(
    branch: KafkaBranch,
    existing: Mapping[str, Mapping[int, Any]],
    producers: Mapping[tuple[str, int], Mapping[int, bool]],
) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for topic in filter(existing.__contains__, branch.partitions):
        for number in branch.partitions[topic]:
            there = producers.get((topic, number))
            # The topic was deleted just now, or recreated with fewer partitions.
            is_lost = there is None and number not in existing[topic]
            if is_lost or (there is not None and _is_closed(branch, there)):
                found[topic].append(number)
    return dict(found)


def _is_closed(branch: KafkaBranch, producers: Mapping[int, bool]) -> bool:
    """Whether the branch was ended in a partition, given its open producers (`open_in_each`)."""
    was_ended = producers.get(branch.producer_id)
    # Epoch 0 has no earlier transaction: the marker ended this one while its task was writing.
    return was_ended is None or (was_ended and branch.producer_epoch == 0)


async def _metadata(admin: Any, topics: Collection[str]) -> dict[str, dict[int, Any]]:
    """The metadata of each partition, by topic; deleted topics are omitted."""
    wanted = MetadataRequest.MetadataRequestTopic
    request = MetadataRequest(
        topics=[wanted(name=name) for name in topics],
        allow_auto_topic_creation=False,
        min_version=LEADER_EPOCHS_VERSION,
    )
    found = {}
    for topic in (await send(admin, request)).topics:
        if topic.error_code == GONE:
            continue
        raise_for(topic.error_code)
        found[topic.name] = {p.partition_index: p for p in topic.partitions}
    return found


async def home_partition(admin: Any, topic: str, name: str) -> Any | None:
    """The partition in which Kafka keeps the state of a name; None where we may not see it."""
    try:
        partitions = (await _metadata(admin, [topic])).get(topic, {})
    except errors.TopicAuthorizationFailedError:
        return None
    return partitions[abs(_java_hash(name)) % len(partitions)] if partitions else None


def _led(
    found: Mapping[str, Mapping[int, Any]], partitions: Partitions
) -> dict[int, dict[str, list[int]]]:
    """The partitions that still exist, by the node of their leader and by topic."""
    by_leader: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for topic, numbers in partitions.items():
        for number in numbers:
            partition = found.get(topic, {}).get(number)
            if partition is not None:
                raise_for(partition.error_code)
                by_leader[partition.leader_id][topic].append(number)
    return by_leader


def _java_hash(text: str) -> int:
    """Java's String.hashCode of an ASCII string, by which Kafka places names."""
    value = 0
    for code in text.encode("ascii"):
        value = (31 * value + code) & 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value
