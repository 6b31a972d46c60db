"""The commit of several branches at once: one request per broker for all that the broker knows.

    find the coordinators ─► EndTxn each ─► no partition open, marker stable? ─► committed
    may EndTxn fence?                       (asked again for a short time)

This path is for a healthy cluster. `outcome` commits every branch that this path does not prove to
be committed, whatever the reason: a second EndTxn changes nothing.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from kafka.protocol.consumer.group import OffsetFetchRequest
from kafka.protocol.metadata import (
    ApiVersionsRequest,
    CoordinatorType,
    FindCoordinatorRequest,
    MetadataRequest,
)
from kafka.protocol.producer.transaction import EndTxnRequest

from sparkonce.sinks.kafka.branch import KafkaBranch
from sparkonce.sinks.kafka.finishing.open_partitions import open_producers
from sparkonce.sinks.kafka.finishing.questions import raise_for, send

FENCING_VERSION: Final = 5
"""From this version of EndTxn on (Kafka 4.0 with its features finalized) the broker also fences."""

_FEATURE: Final = "transaction.version"
_FENCING_LEVEL: Final = 2

STABLE_OFFSETS_VERSION: Final = 8
MANY_KEYS_VERSION: Final = 4
"""The versions of OffsetFetch and FindCoordinator; every broker since Kafka 3.0 supports both."""

PATIENCE_S: Final = 0.2
_COORDINATORS: Final = (CoordinatorType.GROUP, CoordinatorType.TRANSACTION)
_FIRST_WAIT_S: Final = 0.002


async def commit_together(admin: Any, branches: Sequence[KafkaBranch]) -> set[str]:
    """Send EndTxn for each, wait briefly, and return the ids that are proven committed."""
    # All requests are in flight before the first response is awaited.
    lookups = [_ask_coordinators(admin, branches, kind) for kind in _COORDINATORS]
    metadata, features = _ask_leaders(admin, branches), ask_features(admin)
    groups, coordinators = [await _coordinators(admin, *lookup) for lookup in lookups]
    if not await lets_fence(features):
        return set()
    ended = await _end(admin, branches, coordinators)
    left = [branch for branch in branches if branch.transactional_id in ended]
    leaders = {
        (topic.name, partition.partition_index): partition.leader_id
        for topic in (await metadata).topics
        for partition in topic.partitions
    }
    proven: set[str] = set()
    until, wait_s = time.monotonic() + PATIENCE_S, _FIRST_WAIT_S
    while left:
        visible = await _visible(admin, left, groups, leaders)
        proven |= visible
        left = [branch for branch in left if branch.transactional_id not in visible]
        if time.monotonic() > until:
            break
        if left:
            await admin._manager._net.sleep(wait_s)  # noqa: SLF001
            wait_s *= 2
    return proven


def ask_features(admin: Any) -> Any:
    """Send the request whose response `lets_fence` reads."""
    config = admin._manager.config  # noqa: SLF001
    names = {name: config[name] for name in ("client_software_name", "client_software_version")}
    return send(admin, ApiVersionsRequest(**names, min_version=3))


async def lets_fence(answer: Any) -> bool:
    """Whether the cluster lets clients use the EndTxn that fences.

    Raises:
        KafkaError: the broker does not report it.
    """
    reply = await answer
    raise_for(reply.error_code)
    levels = {feature.name: feature.max_version_level for feature in reply.finalized_features or ()}
    return bool(levels.get(_FEATURE, 0) >= _FENCING_LEVEL)


def _ask_coordinators(admin: Any, branches: Sequence[KafkaBranch], kind: Any) -> tuple[Any, Any]:
    names = [branch.transactional_id for branch in branches]
    request = FindCoordinatorRequest(
        key_type=kind.value, coordinator_keys=names, min_version=MANY_KEYS_VERSION
    )
    return kind, send(admin, request)


async def _coordinators(admin: Any, kind: Any, answer: Any) -> dict[str, int]:
    """The node of each name's coordinator."""
    add = admin._manager.cluster.add_coordinator  # noqa: SLF001
    return {
        found.key: add(found, kind, found.key, synthesize_node_id=False)
        for found in (await answer).coordinators
    }


async def _end(
    admin: Any, branches: Sequence[KafkaBranch], coordinators: dict[str, int]
) -> set[str]:
    """The transactional ids that are committed now, and whose producers are fenced."""
    sent = [
        send(
            admin,
            EndTxnRequest(
                transactional_id=branch.transactional_id,
                producer_id=branch.producer_id,
                producer_epoch=branch.producer_epoch,
                committed=True,
                min_version=FENCING_VERSION,
                max_version=FENCING_VERSION,
            ),
            coordinators[branch.transactional_id],
        )
        for branch in branches
    ]
    ended = set()
    for branch, answer in zip(branches, sent, strict=True):
        if (await answer).error_code == 0:
            ended.add(branch.transactional_id)
    return ended


def _ask_leaders(admin: Any, branches: Sequence[KafkaBranch]) -> Any:
    wanted = MetadataRequest.MetadataRequestTopic
    topics = {topic for branch in branches for topic in branch.partitions}
    request = MetadataRequest(
        topics=[wanted(name=name) for name in sorted(topics)], allow_auto_topic_creation=False
    )
    return send(admin, request)


async def _visible(
    admin: Any,
    branches: Sequence[KafkaBranch],
    groups: dict[str, int],
    leaders: dict[tuple[str, int], int],
) -> set[str]:
    """The transactional ids whose partitions are all closed and whose marker is stable."""
    markers = _ask_markers(admin, branches, groups)
    still_open = await open_producers(admin, _by_leader(branches, leaders))
    stable = set()
    for answer in markers:
        for group in (await answer).groups:
            codes = {group.error_code} | {p.error_code for t in group.topics for p in t.partitions}
            if codes == {0}:
                stable.add(group.group_id)
    return {
        branch.transactional_id
        for branch in branches
        if branch.transactional_id in stable
        and not any(
            (topic, number, branch.producer_id) in still_open
            for topic, numbers in branch.partitions.items()
            for number in numbers
        )
    }


def _by_leader(
    branches: Sequence[KafkaBranch], leaders: dict[tuple[str, int], int]
) -> dict[int, dict[str, list[int]]]:
    found: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    written = {
        (t, n) for branch in branches for t, numbers in branch.partitions.items() for n in numbers
    }
    for topic, number in sorted(written):
        found[leaders[topic, number]][topic].append(number)
    return found


def markers_request(topics_by_group: Mapping[str, Sequence[str]]) -> Any:
    """The request for the markers of branches, each in the topics of its own group."""
    group = OffsetFetchRequest.OffsetFetchRequestGroup
    return OffsetFetchRequest(
        groups=[
            group(
                group_id=name,
                topics=[
                    group.OffsetFetchRequestTopics(name=topic, partition_indexes=[0])
                    for topic in topics
                ],
            )
            for name, topics in topics_by_group.items()
        ],
        require_stable=True,  # otherwise an undecided marker reads as the previous one
        min_version=STABLE_OFFSETS_VERSION,
        max_version=STABLE_OFFSETS_VERSION,
    )


def _ask_markers(
    admin: Any, branches: Collection[KafkaBranch], groups: dict[str, int]
) -> list[Any]:
    by_node: dict[int, dict[str, Sequence[str]]] = defaultdict(dict)
    for branch in branches:
        node = groups[branch.transactional_id]
        by_node[node][branch.transactional_id] = branch.marker_topics
    return [send(admin, markers_request(wanted), node) for node, wanted in by_node.items()]
