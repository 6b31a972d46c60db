"""After a refused EndTxn: committed, lost, or unknown. Nothing is assumed.

    refused ──► describe ──► read the marker ──► names the branch ──────► committed
                                            ├──► cannot tell ───────────► CommitUnresolvedError
                                            └──► does not, and never will ► PreparedBranchLostError

The proof depends on the order. Once EndTxn was refused permanently, nothing can commit under this
producer id and epoch any more. So a marker that is read *after* the refusal and does not name the
branch never will. Two more things must hold: the same cluster responds, and the marker would still
be kept if it had been written (7 days by default; the shortest time that a broker reports now, or
reported when the query began). The branch's age comes from the driver's clock, which may have
stopped while its machine was suspended; an id that is forgotten before its time reveals that.

The situations after a refusal:

1. Another attempt of ours committed the branch, and its response was lost: the marker names it.
2. The broker timed it out, another process aborted it, or a later producer took its name: the
   marker does not name it and never will.
3. The transaction has just been ended, and its markers are on their way: the read reports
   "unstable" and is repeated.
4. Another cluster responds at this address, the marker has expired or was deleted with all topics
   of the branch, or the id is forgotten before its time: unknown.
5. The broker that responds is no longer the coordinator and has not noticed: unknown.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kafka import errors

from sparkonce.errors import PreparedBranchLostError, settle_command
from sparkonce.model import BranchId
from sparkonce.sinks.kafka.branch import TIMEOUT, KafkaBranch
from sparkonce.sinks.kafka.connecting.refused import PREFIX, in_words
from sparkonce.sinks.kafka.finishing.asking import Asking
from sparkonce.sinks.kafka.finishing.finisher import Finisher
from sparkonce.sinks.kafka.finishing.partitions import STATE_TOPIC
from sparkonce.sinks.kafka.finishing.questions import Partitions
from sparkonce.sinks.kafka.finishing.states import (
    BEHIND,
    COMMITTED,
    is_behind,
    is_open,
    may_be_fenced_by_us,
    story,
    torn_story,
)
from sparkonce.sinks.kafka.finishing.transactions import TransactionState

RETENTION_S: Final = 7 * 24 * 3600.0
"""How long Kafka keeps proofs and transactional ids, if the broker does not report it."""

_RETENTION: Final = "offsets.retention.minutes"
_IDS_KEPT: Final = "transactional.id.expiration.ms"
_SAFE_SHARE: Final = 0.9
"""After this share of the retention an absent marker no longer proves anything."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A branch whose EndTxn was refused, and the state and markers that were read afterwards.

    `torn` holds the partitions that made us abort the branch before; None when it was whole.
    """

    branch_id: BranchId
    branch: KafkaBranch
    error: errors.KafkaError
    torn: Partitions | None
    state: TransactionState | None
    markers: Sequence[tuple[int, str]]


class Proof:
    def __init__(self, asking: Asking) -> None:
        self._asking = asking

    def prove(
        self,
        branch_id: BranchId,
        branch: KafkaBranch,
        refusal: errors.KafkaError,
        torn: Partitions | None,
    ) -> None:
        """Return if the branch is committed; raise if not. See the module's docstring.

        Raises:
            CommitUnresolvedError: it is unknown whether it is committed.
            PreparedBranchLostError: it was never committed and never will be.
        """
        state = self._asking(lambda: self._asking.describe(branch.transactional_id))
        markers = self._asking(lambda: self._asking.markers(branch))
        self._check_cluster(branch_id, branch)
        if names(markers, branch_id):
            return
        refused = Refusal(branch_id, branch, refusal, torn, state, markers)
        why = next(self._doubts(refused), None)
        if why is not None:
            raise self._asking.unresolved(branch_id, why)
        raise self._lost(refused)

    def is_marked(self, branch_id: BranchId, branch: KafkaBranch) -> bool:
        """Whether the marker already proves the commit."""

        def read() -> list[tuple[int, str]]:
            try:
                return self._asking.markers(branch)
            except errors.UnstableOffsetCommitError:  # still open
                return []

        if not names(self._asking(read), branch_id):
            return False
        self._check_cluster(branch_id, branch)
        return True

    def _check_cluster(self, branch_id: BranchId, branch: KafkaBranch) -> None:
        """Raise if another cluster responds: it may have copied the markers before the rows."""
        cluster_id = self._asking(self._asking.finisher.cluster_id)
        if cluster_id != branch.cluster_id:
            raise self._asking.unresolved(
                branch_id,
                f"the cluster there is {cluster_id}, and the branch was prepared on "
                f"{branch.cluster_id}; point bootstrap_servers at that one or, if it is gone for "
                f"good, {settle_command(branch_id)}",
            )

    def _doubts(self, refused: Refusal) -> Iterator[str]:
        """Why the absent marker proves nothing, each reason with the next step."""
        branch, state = refused.branch, refused.state
        settle, reported = settle_command(refused.branch_id), story(branch, state)
        yield from self._doubts_of_the_marker(refused, settle, reported)
        if state is not None and (state.state in COMMITTED or is_open(branch, state)):
            yield f"EndTxn was refused ({in_words(refused.error)}), yet {reported}"
        if state is not None and is_behind(branch, state):
            yield (
                f"{BEHIND}; if that persists, the brokers have lost the end of {STATE_TOPIC}: "
                f"check the topic, then {settle} ({reported})"
            )
        if state is not None and may_be_fenced_by_us(branch, state):
            yield (
                "its producer was fenced, as it is after a commit, but there is no proof of a "
                f"commit; if the topic {_quoted(branch.marker_topics)} was recreated, the proof "
                f"was deleted with the old topic. Check the topics, then {settle} ({reported})"
            )
        yield from self._doubts_of_time(refused, settle, reported)

    def _doubts_of_the_marker(self, refused: Refusal, settle: str, reported: str) -> Iterator[str]:
        newest = max((batch_id for batch_id, _ in refused.markers), default=0)
        if newest > (refused.branch_id.batch_id or 0):
            yield (
                f"batch {newest} has used its transactional id since, so this branch ended "
                f"before that; check the topic, then {settle} ({reported})"
            )
        topics = refused.branch.marker_topics
        if self._asking(lambda: all(map(self._asking.is_deleted, topics))):
            yield (
                f"the topic {_quoted(topics)} was deleted together with the proof; check the "
                f"other topics of the batch, then {settle} ({reported})"
            )

    def _doubts_of_time(self, refused: Refusal, settle: str, reported: str) -> Iterator[str]:
        finisher, branch = self._asking.finisher, refused.branch
        age_s = time.time() - branch.began_at
        kept_s = self._asking(lambda: proof_kept_s(finisher))
        kept_s = min(kept_s, branch.proof_kept_s or kept_s)
        if age_s > kept_s * _SAFE_SHARE:
            yield (
                f"it is {age_s / 3600:.0f} h old, and Kafka keeps the proof for "
                f"{kept_s / 3600:.0f} h; check the topic, then {settle} ({reported})"
            )
        ids_kept_s = self._asking(lambda: _ids_kept_s(finisher))
        if refused.state is None and age_s < ids_kept_s:
            yield (
                f"{reported}, though they keep ids for {ids_kept_s / 3600:.0f} h ({_IDS_KEPT}), "
                f"and it began {age_s:.0f} s ago by the driver's clock. Is that clock right? Did "
                f"they lose {STATE_TOPIC}? A proof of its commit may be gone as well: check the "
                f"topic, then {settle}"
            )

    def _lost(self, refused: Refusal) -> PreparedBranchLostError:
        branch_id, branch = refused.branch_id, refused.branch
        reported, keep = (
            story(branch, refused.state),
            f"make {TIMEOUT} longer than the driver may be down",
        )
        if refused.torn is not None:
            reported = f"{torn_story(refused.torn)}, so all of it was aborted"
            keep = f"end what starts with {PREFIX!r} only by `sparkonce orphans JOB --abort`"
        return PreparedBranchLostError(
            f"batch {branch_id.batch_id} of the sink {branch_id.sink!r}: the prepared transaction "
            f"{branch.transactional_id!r} in {self._asking.target} is gone and was never "
            f"committed: {reported} (EndTxn: {in_words(refused.error)}). To prevent this, {keep}",
            branch_id,
        )


def names(markers: Sequence[tuple[int, str]], branch_id: BranchId) -> bool:
    """Whether one of the visible markers names the branch.

    One is enough: a topic that was deleted or recreated has lost its marker.
    """
    return any(text == str(branch_id) for _, text in markers)


def proof_kept_s(finisher: Finisher) -> float:
    """How long every broker keeps a proof, in seconds; any of them may hold it."""
    values = finisher.broker_config([_RETENTION]).get(_RETENTION)
    return min(values) * 60.0 if values else RETENTION_S


def _ids_kept_s(finisher: Finisher) -> float:
    """The longest time of all brokers; an id forgotten earlier may mean that a clock is wrong."""
    values = finisher.broker_config([_IDS_KEPT]).get(_IDS_KEPT)
    return max(values) / 1000 if values else RETENTION_S


def _quoted(topics: Sequence[str]) -> str:
    return ", ".join(map(repr, topics))
