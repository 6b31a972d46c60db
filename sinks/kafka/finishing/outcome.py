"""Commit and abort from any process; an unknown outcome is resolved by proof, never assumed.

    EndTxn ──► decided ──► every partition has its marker (`visibility`) ──► committed
           ├─► no response within our patience ────────────────────────────► CommitUnresolvedError
           └─► refused permanently ──► `proof`: committed, lost, or unknown

Why EndTxn's success decides: producer id and epoch belong to one producer, which opens one
transaction, and a name is not used again before its batch is complete.

That success does not cover three cases: an administrator has ended the transaction in single
partitions (`kafka-transactions.sh abort`), or a topic was recreated, or it lost its last records.
The coordinator does not know, and the rest would become visible. So a branch that is not fresh is
examined first: if its coordinator calls it open, it must be open in each partition that holds its
rows. If it is not, all of it is aborted, and EndTxn, which is refused now, leads to the proof that
it is lost. Rows that were deleted (with their topic, by DeleteRecords or by the retention: the
partition still calls them open) are no loss: somebody deleted them on purpose.

The zombie of brokers before Kafka 4.0. EndTxn below version 5 leaves the producer's epoch
unchanged, so an executor that was believed dead may open another transaction under the same epoch,
which a second EndTxn would commit. So on these brokers the marker is read before any EndTxn, which
makes a second `commit` harmless, and the transactional id is initialised again once the branch is
committed, which fences the zombie. If the driver crashes between the two, the zombie's transaction
stays open until `find_branches` lists it or the broker times it out; its rows are never visible.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Sequence
from typing import Final

from kafka import errors

from sparkonce.errors import ProtocolError
from sparkonce.model import BranchId, Committable
from sparkonce.sinks.kafka.branch import KafkaBranch
from sparkonce.sinks.kafka.connecting.refused import in_words
from sparkonce.sinks.kafka.finishing.abort import Abort
from sparkonce.sinks.kafka.finishing.asking import REFUSED, UNKNOWN, Asking
from sparkonce.sinks.kafka.finishing.finisher import Finisher
from sparkonce.sinks.kafka.finishing.proof import Proof
from sparkonce.sinks.kafka.finishing.questions import Partitions
from sparkonce.sinks.kafka.finishing.states import is_fenced, is_open, torn_story
from sparkonce.sinks.kafka.finishing.visibility import Visibility

logger = logging.getLogger("sparkonce")

PATIENCE_S: Final = 10.0

TOGETHER: Final = 100
"""The most branches that are committed together, so that the responses arrive in time."""


class Outcome:
    """Ends transactions through a `Finisher`, and proves how they ended.

    For `patience_s` from now on, in all calls together, questions are repeated before an outcome is
    reported as unknown. The transactional ids in `fresh` are not examined (see `FreshBranches`).
    """

    def __init__(
        self,
        finisher: Finisher,
        target: str,
        patience_s: float = PATIENCE_S,
        fresh: Collection[str] = (),
    ) -> None:
        self._finisher = finisher
        self._fresh = fresh
        self._asking = Asking(finisher, target, patience_s)
        self._visibility = Visibility(self._asking)
        self._proof = Proof(self._asking)
        self._abort = Abort(self._asking, self._visibility)

    def abort(self, branch: BranchId | Committable) -> None:
        """See `Abort.branch`."""
        self._abort.branch(branch)

    def abort_decided(self, committable: Committable) -> None:
        """See `Abort.decided`."""
        self._abort.decided(committable)

    def commit(self, committable: Committable) -> None:
        """See `TwoPhaseCommitSink.commit`."""
        branch_id, branch = committable.branch_id, KafkaBranch.of(committable)
        if branch_id.batch_id is None:
            raise ProtocolError(
                f"{branch_id}: this branch was found in Kafka and no record prepared it; it can "
                "only be aborted"
            )
        if not branch.marker_topics:
            return
        known = UNKNOWN
        try:
            self._decide(branch_id, branch)
            known = "it is committed, and not known to be visible,"
            self._asking(lambda: self._visibility.await_committed(branch))
        except errors.KafkaError as error:
            reason = self._asking.hang_up(error)
            raise self._asking.unresolved(branch_id, reason, known) from error

    def commit_together(self, committables: Sequence[Committable]) -> set[str]:
        """Commit as much as a healthy cluster allows with few requests.

        Returns:
            The names of the branches that are proven committed. Call `commit` for the others.
        """
        branches = [
            branch
            for branch in map(KafkaBranch.of, committables)
            if branch.marker_topics and branch.producer_id >= 0
        ]
        proven: set[str] = set()
        try:
            for start in range(0, len(branches), TOGETHER):
                part = branches[start : start + TOGETHER]
                torn = self._torn(part)
                whole = [branch for branch in part if branch.transactional_id not in torn]
                proven |= self._finisher.commit_together(whole)
        except (errors.KafkaError, KeyError) as error:  # KeyError: a partition without a leader
            logger.debug("branches are committed one by one: %s", error)
        return proven

    def _decide(self, branch_id: BranchId, branch: KafkaBranch) -> None:
        """Return when the branch is committed permanently, and its producer is fenced."""
        fencing = self._asking(self._finisher.end_fences)
        if not fencing and self._proof.is_marked(branch_id, branch):
            self._fence(branch)
            return
        torn = self._asking(lambda: self._torn([branch])).get(branch.transactional_id)
        if torn is not None:
            logger.warning(
                "%s: %s; all of it is aborted", branch.transactional_id, torn_story(torn)
            )
            with contextlib.suppress(*REFUSED):  # it has ended by now: EndTxn shows how
                self._abort.transaction(branch)
        try:
            fenced = self._asking(lambda: self._asking.end(branch, commit=True))
        except REFUSED as refusal:
            self._proof.prove(branch_id, branch, refusal, torn)
            fenced = fencing
        if not fenced:
            self._fence(branch)

    def _torn(self, branches: Sequence[KafkaBranch]) -> dict[str, Partitions]:
        """The partitions, by transactional id, in which an open branch is no longer open."""
        examined = [branch for branch in branches if branch.transactional_id not in self._fresh]
        closed = self._finisher.closed(examined) if examined else {}
        # Asked afterwards: if its coordinator calls it open now, it had sent no marker before.
        states = self._finisher.describe(closed) if closed else {}
        return {
            name: closed[name]
            for branch in examined
            if (name := branch.transactional_id) in states and is_open(branch, states[name])
        }

    def _fence(self, branch: KafkaBranch) -> None:
        def fence() -> None:
            # Each initialisation takes an epoch, so one whose response was lost is not repeated.
            state = self._asking.describe(branch.transactional_id)
            if state is None or not is_fenced(branch, state):
                self._finisher.fence(branch.transactional_id)

        try:
            self._asking(fence)
        except errors.KafkaError as error:
            # The branch is committed anyway; see the zombie in the module's docstring.
            logger.warning("%s could not be fenced: %s", branch.transactional_id, in_words(error))
