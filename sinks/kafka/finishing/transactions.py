"""Questions to the coordinators: end, describe and list transactions, and read their markers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from kafka import errors
from kafka.protocol.admin.transactions import DescribeTransactionsRequest
from kafka.protocol.metadata import CoordinatorType
from kafka.protocol.producer.transaction import EndTxnRequest, InitProducerIdRequest

from sparkonce.sinks.kafka.branch import KafkaBranch
from sparkonce.sinks.kafka.connecting.settings import KafkaSettings
from sparkonce.sinks.kafka.finishing.cluster import OWN_EPOCH_VERSION
from sparkonce.sinks.kafka.finishing.questions import Partitions, Questions, raise_for, send
from sparkonce.sinks.kafka.finishing.together import (
    FENCING_VERSION,
    ask_features,
    commit_together,
    lets_fence,
    markers_request,
)

_FENCED_TIMEOUT_MS: Final = 1000
"""Nobody writes under a fenced id. Short, since brokers refuse a timeout above their limit."""

OFFSETS_TOPIC: Final = "__consumer_offsets"


@dataclass(frozen=True, slots=True)
class TransactionState:
    """What the coordinator reports about a transactional id.

    Attributes:
        state: "Ongoing", "PrepareCommit", "CompleteCommit", … in Kafka's spelling.
        producer_id: the producer that holds the id now.
        producer_epoch: its epoch.
        timeout_ms: the broker aborts an open transaction after this time.
        started_at: Unix time in seconds; negative when no transaction is open.
        partitions: the partitions that hold its rows, by topic; empty once it has ended.
    """

    state: str
    producer_id: int
    producer_epoch: int
    timeout_ms: int
    started_at: float
    partitions: Partitions

    def branch(self, transactional_id: str, cluster_id: str = "") -> KafkaBranch:
        """The branch, as far as an abort needs it."""
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


class TransactionQuestions(Questions):
    """About transactions. Tests set a lower `end_version`, the highest version of EndTxn to use."""

    def __init__(self, settings: KafkaSettings, end_version: int = FENCING_VERSION) -> None:
        super().__init__(settings)
        self._end_version = end_version

    def end(
        self, transactional_id: str, producer_id: int, producer_epoch: int, *, commit: bool
    ) -> bool:
        """Send EndTxn; returns whether that also fenced the producer.

        Idempotent on the broker: the same call again gets the same answer.

        Raises:
            kafka.errors.KafkaError: the coordinator refuses, or does not respond: then the
                transaction may or may not have ended.
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
            response = await send(admin, request, node)
            raise_for(response.error_code)
            return bool(response.API_VERSION >= FENCING_VERSION)

        return self._connection.ask(ask, forget=[transactional_id])

    def commit_together(self, branches: Sequence[KafkaBranch]) -> set[str]:
        """Commit branches of a healthy cluster; returns the ids that are proven committed.

        The other branches may be committed or not.

        Raises:
            kafka.errors.KafkaError: a request failed; nothing is known about any branch.
        """

        async def ask(admin: Any) -> set[str]:
            can_fence = self._known_version(admin) >= FENCING_VERSION
            return await commit_together(admin, branches) if can_fence else set()

        return self._connection.ask(ask, forget=[branch.transactional_id for branch in branches])

    def end_fences(self) -> bool:
        """Whether `end` also fences the producer on these brokers."""

        async def ask(admin: Any) -> bool:
            return await self._version_to_end(admin) >= FENCING_VERSION

        return self._connection.ask(ask)

    async def _version_to_end(self, admin: Any) -> int:
        """The highest version of EndTxn that the cluster lets clients use.

        The brokers may support a higher version. Until the operator finishes the upgrade to Kafka 4
        they refuse that version, and may leave the transaction in a state that no request ends. The
        operator may revert the upgrade at any time, so each call asks.
        """
        highest = self._known_version(admin)
        if highest >= FENCING_VERSION and not await lets_fence(ask_features(admin)):
            highest = FENCING_VERSION - 1
        return highest

    def _known_version(self, admin: Any) -> int:
        known = admin._manager.broker_version_data.api_version(EndTxnRequest)  # noqa: SLF001
        return min(int(known), self._end_version)

    def fence(self, transactional_id: str, producer_id: int = -1, producer_epoch: int = -1) -> None:
        """Initialise the transactional id again, so that its producer can no longer write.

        The brokers abort an open transaction, with markers that also fence the producer in its
        partitions. If a producer is given and another one holds the id, the brokers refuse. For an
        open transaction they compare only the producer id, which a later epoch shares.

        Raises:
            kafka.errors.ConcurrentTransactionsError: the open transaction is being aborted; call
                again.
        """

        async def ask(admin: Any) -> None:
            node = await _coordinator(admin, transactional_id)
            request = InitProducerIdRequest(
                transactional_id=transactional_id,
                transaction_timeout_ms=_FENCED_TIMEOUT_MS,
                producer_id=producer_id,
                producer_epoch=producer_epoch,
                min_version=OWN_EPOCH_VERSION,
                max_version=4,
            )
            raise_for((await send(admin, request, node)).error_code)

        self._connection.ask(ask, forget=[transactional_id])

    def describe(self, transactional_ids: Collection[str]) -> dict[str, TransactionState]:
        """What the coordinators report about each id; ids that they do not know are omitted."""

        async def ask(admin: Any) -> dict[str, TransactionState]:
            by_node = defaultdict(list)
            for transactional_id in transactional_ids:
                by_node[await _coordinator(admin, transactional_id)].append(transactional_id)
            found = {}
            for node, ids in by_node.items():
                request = DescribeTransactionsRequest(transactional_ids=ids)
                for row in (await send(admin, request, node)).transaction_states:
                    if row.error_code == errors.TransactionalIdNotFoundError.errno:
                        continue
                    raise_for(row.error_code)
                    found[row.transactional_id] = _state(row)
            return found

        return self._connection.ask(ask, forget=transactional_ids)

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

    def markers(self, group: str, topics: Sequence[str]) -> list[tuple[int, str]]:
        """Each offset and metadata that `group` has committed for partition 0 of `topics`.

        Raises:
            kafka.errors.UnstableOffsetCommitError: not decided yet: a transaction that would change
                a marker is open or about to end.
        """

        async def ask(admin: Any) -> list[tuple[int, str]]:
            node = await admin._find_coordinator_id(group, CoordinatorType.GROUP)  # noqa: SLF001
            (answer,) = (await send(admin, markers_request({group: topics}), node)).groups
            raise_for(answer.error_code)
            partitions = [found for topic in answer.topics for found in topic.partitions]
            for found in partitions:
                raise_for(found.error_code)
            return [
                # confluent-kafka stores the C string with its final NUL.
                (found.committed_offset, (found.metadata or "").rstrip("\0"))
                for found in partitions
                if found.committed_offset >= 0
            ]

        return self._connection.ask(ask, forget=[group])


async def _coordinator(admin: Any, transactional_id: str) -> Any:
    return await admin._find_coordinator_id(  # noqa: SLF001
        transactional_id, CoordinatorType.TRANSACTION
    )


def _state(row: Any) -> TransactionState:
    rows: Mapping[str, Sequence[int]] = {
        topic.topic: list(topic.partitions) for topic in row.topics if topic.topic != OFFSETS_TOPIC
    }
    return TransactionState(
        state=row.transaction_state,
        producer_id=row.producer_id,
        producer_epoch=row.producer_epoch,
        timeout_ms=row.transaction_timeout_ms,
        started_at=row.transaction_start_time_ms / 1000,
        partitions=rows,
    )
