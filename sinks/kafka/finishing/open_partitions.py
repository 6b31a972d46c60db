"""Which producers have an open transaction in which partitions, found as cheaply as possible.

    last stable offset ≥ end of the partition? ── yes ─► nothing in it is open
                                               └─ no ──► DescribeProducers: whose transaction it is

DescribeProducers lists every producer that a partition remembers, for a day after its last write:
megabytes where many tasks write. So it is sent only to partitions where something is open. The
first question never hides an open transaction: acknowledged rows lie before the end of their
partition, whenever the end is read, and the last stable offset never passes an open transaction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from kafka import errors
from kafka.protocol.admin.transactions import DescribeProducersRequest
from kafka.protocol.consumer.offsets import ListOffsetsRequest

ByNode: TypeAlias = "Mapping[int, Mapping[str, Sequence[int]]]"
"""Partition numbers by topic, by the node of their leader."""

GONE: Final = errors.UnknownTopicOrPartitionError.errno
"""The error of a partition that was deleted together with its rows."""

_LATEST: Final = -1
_READ_UNCOMMITTED, _READ_COMMITTED = 0, 1
ENDS_ARE_KNOWN_VERSION: Final = 5
"""From this version on (Kafka 2.2) a new leader reports that it does not know the end yet."""


async def open_producers(admin: Any, partitions: ByNode) -> set[tuple[str, int, int]]:
    """Topic, partition and producer id of each open transaction there.

    Raises:
        KafkaError: a partition cannot be examined.
    """
    found = await open_in_each(admin, await _unstable(admin, partitions))
    return {(*place, producer) for place, producers in found.items() for producer in producers}


async def open_in_each(admin: Any, partitions: ByNode) -> dict[tuple[str, int], dict[int, bool]]:
    """The producer ids of the open transactions, by topic and partition.

    The value is whether a marker has ended an earlier transaction of that producer there. Deleted
    partitions are omitted. A transaction is listed even if all rows of its partition were deleted,
    so that nothing in it is unstable.

    Raises:
        KafkaError: a partition cannot be examined.
    """
    wanted = DescribeProducersRequest.TopicRequest
    answers = [
        admin._manager.send(  # noqa: SLF001
            DescribeProducersRequest(
                topics=[wanted(name=n, partition_indexes=sorted(p)) for n, p in topics.items()]
            ),
            node_id=node,
        )
        for node, topics in partitions.items()
    ]
    found = {}
    for answer in answers:
        for topic in (await answer).topics:
            for partition in topic.partitions:
                if partition.error_code == GONE:
                    continue
                if partition.error_code:
                    raise errors.for_code(partition.error_code)
                found[topic.name, partition.partition_index] = {
                    producer.producer_id: producer.coordinator_epoch >= 0
                    for producer in partition.active_producers
                    if producer.current_txn_start_offset >= 0
                }
    return found


async def _unstable(admin: Any, partitions: ByNode) -> ByNode:
    """The partitions in which a transaction is open, or may be open."""
    asked = [
        (
            node,
            [_ask_ends(admin, node, topics, how) for how in (_READ_UNCOMMITTED, _READ_COMMITTED)],
        )
        for node, topics in partitions.items()
    ]
    unstable: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for node, answers in asked:
        ends, stable = [_by_partition(await answer) for answer in answers]
        for (topic, number), (code, end) in ends.items():
            stable_code, stable_end = stable[topic, number]
            is_known = (code, stable_code) == (0, 0)
            if code != GONE and not (is_known and stable_end >= end):
                unstable[node][topic].append(number)
    return unstable


def _ask_ends(admin: Any, node: int, topics: Mapping[str, Sequence[int]], isolation: int) -> Any:
    topic = ListOffsetsRequest.ListOffsetsTopic
    partition = topic.ListOffsetsPartition
    request = ListOffsetsRequest(
        replica_id=-1,
        isolation_level=isolation,
        topics=[
            topic(
                name=name,
                partitions=[
                    partition(partition_index=n, current_leader_epoch=-1, timestamp=_LATEST)
                    for n in sorted(numbers)
                ],
            )
            for name, numbers in topics.items()
        ],
        min_version=ENDS_ARE_KNOWN_VERSION,
    )
    return admin._manager.send(request, node_id=node)  # noqa: SLF001


def _by_partition(answer: Any) -> dict[tuple[str, int], tuple[int, int]]:
    return {
        (topic.name, partition.partition_index): (partition.error_code, partition.offset)
        for topic in answer.topics
        for partition in topic.partitions
    }
