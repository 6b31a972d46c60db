"""Ends what must not be committed, without ever undoing a commit.

    EndTxn fences (Kafka 4.0) ──► EndTxn(abort) by the branch's own producer id and epoch
    it does not               ──► still ours? ──► initialise its id again, which aborts and fences

Before Kafka 4.0 an abort sends no EndTxn, since EndTxn leaves the epoch unchanged. A loser that is
still writing would continue under that epoch. A partition that does not check whether a transaction
is open (all before Kafka 3.6) would accept rows that belong to no transaction: nothing ends them,
and readers wait there forever. Initialising the id aborts what is open, with markers of the next
epoch. For that request the brokers compare only the producer id, so the epoch is read just before.
"""

from __future__ import annotations

import contextlib
import logging

from kafka import errors

from sparkonce.errors import CommitRejectedError, SinkError, settle_command
from sparkonce.model import BranchId, Committable
from sparkonce.sinks.kafka.branch import KafkaBranch
from sparkonce.sinks.kafka.connecting.refused import in_words
from sparkonce.sinks.kafka.finishing.asking import REFUSED, Asking
from sparkonce.sinks.kafka.finishing.proof import names
from sparkonce.sinks.kafka.finishing.states import (
    ABORTED,
    BEHIND,
    COMMITTED,
    has_ended,
    is_behind,
    is_open,
    story,
)
from sparkonce.sinks.kafka.finishing.transactions import TransactionState
from sparkonce.sinks.kafka.finishing.visibility import Visibility

logger = logging.getLogger("sparkonce")


class Abort:
    def __init__(self, asking: Asking, visibility: Visibility) -> None:
        self._asking = asking
        self._visibility = visibility

    def branch(self, branch: BranchId | Committable) -> None:
        """See `TwoPhaseCommitSink.abort`.

        Raises:
            SinkError: the brokers did not respond; the transaction may still be open.
        """
        branch_id = branch.branch_id if isinstance(branch, Committable) else branch
        try:
            if isinstance(branch, Committable):
                self._known(branch)
            else:
                with contextlib.suppress(*REFUSED):  # it has ended by now
                    self._by_name(branch)
        except errors.KafkaError as error:
            reason = self._asking.hang_up(error)
            raise SinkError(self._cannot(branch_id, reason), branch_id) from error

    def decided(self, committable: Committable) -> None:
        """See `TwoPhaseCommitSink.abort_decided`.

        The brokers refuse to abort a branch that is committed, and also one that ended long ago. So
        they are asked which it is. If they answer and no proof is left, the branch counts as
        aborted.

        Raises:
            CommitRejectedError: it is committed.
            SinkError: the brokers did not respond.
        """
        self.branch(committable)
        branch_id, branch = committable.branch_id, KafkaBranch.of(committable)
        unknown = f"no answer whether {branch_id} was committed in {self._asking.target}: "
        try:
            state = self._asking(lambda: self._asking.describe(branch.transactional_id))
            is_committed = state is not None and has_ended(branch, state, COMMITTED)
            if not is_committed:
                markers = self._asking(lambda: self._asking.markers(branch))
                is_committed = names(markers, branch_id)
        except errors.KafkaError as error:
            raise SinkError(unknown + self._asking.hang_up(error), branch_id) from error
        if state is not None and not is_committed and is_behind(branch, state):
            raise SinkError(f"{unknown}{BEHIND} ({story(branch, state)})", branch_id)
        if is_committed:
            raise CommitRejectedError(
                f"{branch_id} is committed in {self._asking.target} ({story(branch, state)}), so "
                "writing it again would duplicate its rows. If the rows are not visible, the error "
                "of its commit says why; each start commits it again. If they are visible, "
                f"{settle_command(branch_id, 'committed')}",
                branch_id,
            )

    def transaction(self, branch: KafkaBranch) -> None:
        """Abort the branch's transaction, if it is open.

        Raises:
            kafka.errors.KafkaError: the brokers refuse EndTxn, or do not respond.
        """
        if branch.producer_id < 0:
            return
        try:
            if self._asking(self._asking.finisher.end_fences):
                self._asking(lambda: self._asking.end(branch, commit=False))
            elif not self._asking(lambda: self._fenced(branch)):
                return
        except errors.ConcurrentTransactionsError:  # the abort has begun; there is no time to wait
            logger.warning("%s is being aborted, and may hold readers up", branch.transactional_id)
            return
        try:
            self._asking(lambda: self._visibility.complete(branch, commit=False))
        except errors.KafkaError as error:
            logger.warning(
                "%s is aborted, and may hold readers up: %s",
                branch.transactional_id,
                in_words(error),
            )

    def _known(self, committable: Committable) -> None:
        branch = KafkaBranch.of(committable)
        try:
            self.transaction(branch)
        except REFUSED as refusal:
            # The branch was committed, aborted or taken over, and anything open now is another
            # transaction. That holds only if the broker that refused is still its coordinator.
            state = self._asking(lambda: self._asking.describe(branch.transactional_id))
            if state is not None and (is_open(branch, state) or is_behind(branch, state)):
                reason = f"{BEHIND} ({story(branch, state)}; EndTxn: {in_words(refusal)})"
                branch_id = committable.branch_id
                raise SinkError(self._cannot(branch_id, reason), branch_id) from refusal

    def _by_name(self, branch_id: BranchId) -> None:
        state = self._asking(lambda: self._asking.describe(branch_id.name))
        if state is not None and state.state == "Ongoing":
            self.transaction(state.branch(branch_id.name))

    def _fenced(self, branch: KafkaBranch) -> bool:
        """Abort the open branch where EndTxn would let its producer go on writing.

        Returns:
            Whether it is aborted; False if it ended otherwise or another producer holds its name.
        """
        name = branch.transactional_id
        state: TransactionState | None = self._asking.describe(name)
        if state is not None and (is_open(branch, state) or is_behind(branch, state)):
            # While the brokers abort it they respond "ask again"; success means that it has ended.
            # A coordinator that has not seen the branch can obey only if it lost its state.
            self._asking.finisher.fence(name, branch.producer_id, branch.producer_epoch)
            return False
        return state is not None and has_ended(branch, state, ABORTED)

    def _cannot(self, branch_id: BranchId, reason: str) -> str:
        return f"{branch_id} cannot be aborted in {self._asking.target}: {reason}"
