"""Waits until a branch that ended has its markers in every partition, and writes missing ones.

    open nowhere, proof stable ───────────────────► done
    open, and its coordinator calls it complete ──► write the markers that are missing
    open, and its coordinator is still ending it ─► ask again

EndTxn's response means that the coordinator has logged the end. It writes the markers, which make
the rows visible, afterwards. A broker that is killed in between and restarted may drop its
markers ("Couldn't find leader endpoint for partitions …, these partitions are likely deleted
already and hence can be skipped"; seen with Kafka 4.3.1 in one of 20 to 60 kills) and call the
transaction complete. Its rows then stay invisible forever and block every reader after them.

So `commit` and `abort` examine the partitions, and write the markers that a complete transaction
lacks: no sweep lists a transaction that its coordinator calls complete. They do so only once the
producer is fenced; otherwise the open transaction could be a new one of a zombie.
"""

from __future__ import annotations

import logging

from kafka import errors

from sparkonce.sinks.kafka.branch import KafkaBranch
from sparkonce.sinks.kafka.finishing.asking import Asking
from sparkonce.sinks.kafka.finishing.partitions import STATE_TOPIC
from sparkonce.sinks.kafka.finishing.questions import Partitions
from sparkonce.sinks.kafka.finishing.states import is_complete, is_ending, story

logger = logging.getLogger("sparkonce")


class MarkersPendingError(errors.RetriableError):  # type: ignore[misc] # kafka-python is untyped
    """The transaction has ended, and its markers are not yet in every partition."""


class MarkersMissingError(errors.KafkaError):  # type: ignore[misc] # kafka-python is untyped
    """The transaction has ended, and a partition is open, perhaps by another transaction."""


class Visibility:
    """The partitions of branches that have ended."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking

    def await_committed(self, branch: KafkaBranch) -> None:
        """Return when the committed branch has its markers; warn if a topic of it was deleted."""
        self.complete(branch, commit=True)
        for topic in branch.partitions:
            if self._asking.is_deleted(topic):
                logger.warning(
                    "%s is committed, but the topic %r was deleted together with its rows",
                    branch.transactional_id,
                    topic,
                )

    def complete(self, branch: KafkaBranch, *, commit: bool) -> None:
        """Return when every partition of the ended branch has its marker; write missing ones.

        A marker is missing if it is absent *after* the coordinator called the transaction complete:
        the coordinator no longer sends it.

        Raises:
            MarkersPendingError: ask again.
            MarkersMissingError: after an abort: the coordinator does not confirm that the open
                partitions belong to the branch.
        """
        if not self._open_partitions(branch):
            return
        ended = "committed" if commit else "aborted"
        state = self._asking.describe(branch.transactional_id)
        if state is not None and is_complete(branch, state, commit=commit):
            self._write_missing(branch, state.producer_epoch, ended, commit=commit)
        elif not (commit or is_ending(state)) and self._open_partitions(branch):
            raise MarkersMissingError(f"aborted, and open in a partition: {story(branch, state)}")
        raise MarkersPendingError(f"{ended}, and not yet visible in every partition")

    def _write_missing(self, branch: KafkaBranch, epoch: int, ended: str, *, commit: bool) -> None:
        missing = self._open_partitions(branch)
        known = {topic: numbers for topic, numbers in missing.items() if numbers}
        if known:
            logger.warning(
                "%s is %s, and the broker has left out its markers in %s: writing them",
                branch.transactional_id,
                ended,
                known,
            )
            refused = self._asking.finisher.write_markers(
                branch.transactional_id, known, branch.producer_id, epoch, commit=commit
            )
            if refused:
                raise MarkersPendingError(
                    f"{ended}, and {refused} refuse the markers that the broker has left out "
                    "(TRANSACTION_COORDINATOR_FENCED: they remember a later coordinator); to let "
                    f"the sink find its epoch, allow Describe on the topic {STATE_TOPIC}"
                )
        if hidden := missing.keys() - known.keys():
            topic = min(hidden)
            raise MarkersPendingError(
                f"{ended}, and the broker has left out its markers in {topic}; to let the sink "
                f"write them, allow Describe on the topic {topic} and ClusterAction on the cluster"
            )

    def _open_partitions(self, branch: KafkaBranch) -> Partitions:
        """The partitions in which the branch is still open, including that of its proof."""
        finisher = self._asking.finisher
        found = finisher.open_partitions(branch.partitions, branch.producer_id)
        try:
            self._asking.markers(branch)
        except errors.UnstableOffsetCommitError:
            found.update(finisher.offsets_partition(branch.transactional_id))
        return found
