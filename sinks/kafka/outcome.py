"""Commit and abort from any process; an unknown outcome is settled by proof, never assumed.

    EndTxn ──► decided ──► every partition has its marker ───────► committed
           ├─► no answer within our patience ────────────────────► CommitUnresolvedError
           └─► refused for good ──► describe ──► marker, stable
                                                   ├ is ours ────► committed
                                                   ├ is not ─────► PreparedBranchLostError
                                                   └ cannot tell ► CommitUnresolvedError

The order carries the proof: once EndTxn was refused for good, nothing can commit under this
producer id and epoch any more, so a marker that is read *after* that and does not name the branch
never will. Two more things must hold: the same cluster answers, and the marker would still be kept
if it had been written (7 days by default; the shortest that a broker says now, or said when the
query began). How old a branch is, the driver's clock says, which may have stood still with a
suspended machine; an id that is forgotten before its time gives it away.

Why EndTxn's yes decides by itself: producer id and epoch belong to one producer, which opens one
transaction, and a name is not used again before its batch is complete.

What that yes does not cover: an admin has ended the transaction in single partitions
(`kafka-transactions.sh abort`), or a topic was made anew, or has lost its end. The coordinator does
not know, and the rest would become visible alone. So a branch that is not fresh is looked at first:
what its coordinator calls open has to be open in each partition that holds its rows. If not, all of
it is aborted, and EndTxn, refused now, leads to the proof that it is lost. Rows that went with
their topic, or were deleted (DeleteRecords, retention: the partition still calls them open), are no
loss of ours: whoever deletes them wants them away.

Why that is not the end: EndTxn answers when the coordinator has logged the commit; the markers that
make the rows visible are written after it. A broker that is killed in between and starts again may
give its markers up ("Couldn't find leader endpoint for partitions …, these partitions are likely
deleted already and hence can be skipped"; seen with Kafka 4.3.1, once in 20 to 60 kills) and call
the transaction complete: its rows stay invisible for ever and block every reader behind them. So
`commit` looks at the partitions, and writes the markers that a complete commit still lacks. It does
so only after the producer is fenced, since else an open transaction could be a zombie's new one.
`abort` does the same for its own markers: no sweep lists a transaction that its coordinator calls
complete.

The zombie of brokers before Kafka 4.0. EndTxn below version 5 leaves the producer's epoch as it is,
so an executor that was thought dead may open another transaction under the same epoch, and a second
EndTxn would commit that one. So there the marker is read before any EndTxn, which makes a second
`commit` harmless, and the transactional id is initialised again once the branch is committed, which
fences the zombie. Between the two, a crash of the driver leaves the zombie's transaction open until
`find_branches` shows it or the broker times it out; its rows are never visible.

For the same reason an abort there does not send EndTxn. A loser that is still writing would go on
under its epoch, and a partition that does not ask whether a transaction is open (all before Kafka
3.6) would take rows that belong to none: nothing ends them, and readers wait there for ever. So the
id is initialised again in the name of the producer that was seen, which aborts what is open with
markers of the next epoch. The brokers look at the producer id only, so whether the epoch is ours is
asked just before.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Sequence
from typing import Final

from kafka import errors

from sparkonce.errors import (
    CommitRejectedError,
    CommitUnresolvedError,
    PreparedBranchLostError,
    ProtocolError,
    SinkError,
    settle_command,
)
from sparkonce.model import BranchId, Committable
from sparkonce.sinks.kafka.access import PREFIX, missing_right
from sparkonce.sinks.kafka.branch import TIMEOUT, KafkaBranch
from sparkonce.sinks.kafka.client import Patience
from sparkonce.sinks.kafka.finisher import STATE_TOPIC, Finisher, Partitions, TransactionState

logger = logging.getLogger("sparkonce")

PATIENCE_S: Final = 10.0
RETENTION_S: Final = 7 * 24 * 3600.0
"""How long Kafka keeps proofs and transactional ids, for where the broker does not say."""

TOGETHER: Final = 100
"""Branches that are committed with one question, so that it is answered within its timeout."""

_RETENTION: Final = "offsets.retention.minutes"
_IDS_KEPT: Final = "transactional.id.expiration.ms"

_REFUSED_FOR_GOOD: Final = (
    errors.InvalidTxnStateError,  # ended: aborted, timed out, or committed by an older EndTxn
    errors.ProducerFencedError,  # a later epoch holds the id: timed out, or initialised again
    errors.InvalidProducerEpochError,  # the same, from older brokers
    errors.InvalidProducerIdMappingError,  # the id is forgotten, or has another producer id
)
_BEHIND: Final = "the broker that answers as its coordinator has not seen it, as after a move"
_UNKNOWN: Final = "it is unknown whether it is committed"
_COMMITTED: Final = frozenset({"PrepareCommit", "CompleteCommit"})
_ABORTED: Final = frozenset({"PrepareAbort", "CompleteAbort"})


class MarkersPendingError(errors.RetriableError):  # type: ignore[misc] # kafka-python is untyped
    """The commit is decided, and its markers are on their way to the partitions."""


class MarkersMissingError(errors.KafkaError):  # type: ignore[misc] # kafka-python is untyped
    """The transaction has ended, and a partition of it is open to whom we do not know."""


class Outcome:
    """Ends transactions through a `Finisher`, and proves how they ended.

    Args:
        finisher: asks the brokers.
        target: of the sink, for messages.
        patience_s: how long, from now on, it asks again before it says that an outcome is unknown;
            all that is asked of it shares that. When it is over each question is asked once.
        fresh: transactional ids that were prepared so lately that nobody has aborted them by hand.
    """

    def __init__(
        self,
        finisher: Finisher,
        target: str,
        patience_s: float = PATIENCE_S,
        fresh: Collection[str] = (),
    ) -> None:
        self._finisher = finisher
        self._target = target
        self._fresh = fresh
        self._patience = Patience(patience_s)

    # -- commit ----------------------------------------------------------------------------------

    def commit(self, committable: Committable) -> None:
        """See `TwoPhaseCommitSink.commit`."""
        branch_id, branch = committable.branch_id, KafkaBranch.of(committable)
        if branch_id.batch_id is None:
            raise ProtocolError(f"{branch_id}: found in Kafka, prepared by nobody we know of")
        if not branch.marker_topics:
            return
        known = _UNKNOWN
        try:
            self._decide(branch_id, branch)
            known = "it is committed, and not known to be visible,"
            self._patience(lambda: self._make_visible(branch))
        except errors.KafkaError as error:
            raise self._unresolved(branch_id, self._hang_up(error), known) from error

    def commit_together(self, committables: Sequence[Committable]) -> set[str]:
        """Commit what a healthy cluster lets us commit with few requests.

        Returns:
            The names of the branches that are proven committed; `commit` has the others.
        """
        branches = [
            branch
            for branch in map(KafkaBranch.of, committables)
            if branch.marker_topics and branch.producer_id >= 0
        ]
        proven: set[str] = set()
        try:
            for start in range(0, len(branches), TOGETHER):
                some = branches[start : start + TOGETHER]
                torn = self._torn(some)
                whole = [branch for branch in some if branch.transactional_id not in torn]
                proven |= self._finisher.commit_together(whole)
        except (errors.KafkaError, KeyError) as error:  # KeyError: a partition without a leader
            logger.debug("branches are committed one by one: %s", error)
        return proven

    def _decide(self, branch_id: BranchId, branch: KafkaBranch) -> None:
        """Return when the branch is committed for ever, and its producer is fenced."""
        fencing = self._patience(self._finisher.end_fences)
        if not fencing and self._is_marked(branch_id, branch):
            self._fence(branch)
            return
        torn = self._patience(lambda: self._torn([branch])).get(branch.transactional_id)
        if torn is not None:
            logger.warning(
                "%s: %s; all of it is aborted", branch.transactional_id, _what_tore(torn)
            )
            with contextlib.suppress(*_REFUSED_FOR_GOOD):  # it has ended meanwhile: EndTxn tells
                self._abort(branch)
        try:
            fenced = self._patience(lambda: self._end(branch, commit=True))
        except _REFUSED_FOR_GOOD as refusal:
            self._settle(branch_id, branch, refusal, torn)
            fenced = fencing
        if not fenced:
            self._fence(branch)

    def _torn(self, branches: Sequence[KafkaBranch]) -> dict[str, Partitions]:
        """The partitions, by transactional id, in which an open branch is not open any more."""
        looked_at = [branch for branch in branches if branch.transactional_id not in self._fresh]
        closed = self._finisher.closed(looked_at) if looked_at else {}
        # Asked behind it: what its coordinator calls open now has had no marker from it before.
        states = self._finisher.describe(closed) if closed else {}
        return {
            name: closed[name]
            for branch in looked_at
            if (name := branch.transactional_id) in states and _is_open(branch, states[name])
        }

    def _make_visible(self, branch: KafkaBranch) -> None:
        self._write_missing(branch, commit=True)
        for topic in branch.partitions:
            if self._is_gone(topic):
                logger.warning(
                    "%s is committed, but the topic %r was deleted, and its rows with it",
                    branch.transactional_id,
                    topic,
                )

    def _write_missing(self, branch: KafkaBranch, *, commit: bool) -> None:
        """Return when every partition of the ended branch has its marker; write missing ones.

        A marker is missing when it is not there *after* the coordinator called the transaction
        complete: it will not send it any more.

        Raises:
            MarkersPendingError: ask again.
            MarkersMissingError: of an abort: the coordinator does not say that these are its.
        """
        if not self._unmarked(branch):
            return
        ended = "committed" if commit else "aborted"
        state = self._describe(branch.transactional_id)
        if state is not None and _is_complete(branch, state, commit=commit):
            missing = self._unmarked(branch)
            seen = {topic: numbers for topic, numbers in missing.items() if numbers}
            if seen:
                logger.warning(
                    "%s is %s and the broker has left out its markers in %s: writing them",
                    branch.transactional_id,
                    ended,
                    seen,
                )
                refused = self._finisher.write_markers(
                    branch.transactional_id,
                    seen,
                    branch.producer_id,
                    state.producer_epoch,
                    commit=commit,
                )
                if refused:
                    raise MarkersPendingError(
                        f"{ended}, and {refused} refuse the markers that the broker has left "
                        "out (TRANSACTION_COORDINATOR_FENCED: they know a younger coordinator); to "
                        f"let it be found, allow Describe on the topic {STATE_TOPIC}"
                    )
            if hidden := missing.keys() - seen.keys():
                topic = min(hidden)
                raise MarkersPendingError(
                    f"{ended}, and the broker has left out its markers in {topic}; to let them "
                    f"be written, allow Describe on the topic {topic} and ClusterAction on the "
                    "cluster"
                )
        elif not (commit or _is_ending(state)) and self._unmarked(branch):
            raise MarkersMissingError(f"aborted, and open in a partition: {_story(branch, state)}")
        raise MarkersPendingError(f"{ended}, and not yet visible in every partition")

    def _unmarked(self, branch: KafkaBranch) -> Partitions:
        """The partitions in which the branch is still open, that of its proof among them."""
        missing = self._finisher.open_partitions(branch.partitions, branch.producer_id)
        try:
            self._markers(branch)
        except errors.UnstableOffsetCommitError:
            missing.update(self._finisher.offsets_partition(branch.transactional_id))
        return missing

    def _fence(self, branch: KafkaBranch) -> None:
        def fence() -> None:
            # Each initialisation takes an epoch: one whose answer was lost is not repeated.
            state = self._describe(branch.transactional_id)
            if state is None or not _is_fenced(branch, state):
                self._finisher.fence(branch.transactional_id)

        try:
            self._patience(fence)
        except errors.KafkaError as error:
            # Committed all the same; see the zombie in this module's head.
            logger.warning("%s could not be fenced: %s", branch.transactional_id, _text(error))

    def _settle(
        self,
        branch_id: BranchId,
        branch: KafkaBranch,
        refusal: errors.KafkaError,
        torn: Partitions | None,
    ) -> None:
        """EndTxn was refused for good: return if the branch is committed, raise what holds if not.

        1. Another attempt of ours committed it and its answer was lost: the marker names it.
        2. The broker timed it out, somebody aborted it, or a younger producer took its name: the
           marker does not name it and never will.
        3. The markers of an end that was just decided are still on their way: the read says
           "unstable", and is repeated.
        4. Another cluster answers at this address, the marker has outlived its time, or went with
           all topics of the branch, or the id is forgotten before its time: unknown.
        5. A broker answers that is not the coordinator any more, and has not noticed: unknown.
        """
        state = self._patience(lambda: self._describe(branch.transactional_id))
        markers = self._patience(lambda: self._markers(branch))
        self._check_cluster(branch_id, branch)
        if _prove(markers, branch_id):
            return
        story = _story(branch, state)
        newest = max((batch_id for batch_id, _ in markers), default=0)
        if newest > (branch_id.batch_id or 0):
            raise self._unresolved(
                branch_id,
                f"batch {newest} has used its transactional id since, so this branch ended "
                f"before that; check the topic, then {settle_command(branch_id)} ({story})",
            )
        proof_in = ", ".join(map(repr, branch.marker_topics))
        if self._patience(lambda: all(map(self._is_gone, branch.marker_topics))):
            raise self._unresolved(
                branch_id,
                f"the topic {proof_in} was deleted, and the proof with it; check the "
                f"other topics of the batch, then {settle_command(branch_id)} ({story})",
            )
        if state is not None and (state.state in _COMMITTED or _is_open(branch, state)):
            raise self._unresolved(branch_id, f"EndTxn was refused ({_text(refusal)}), yet {story}")
        if state is not None and _is_behind(branch, state):
            raise self._unresolved(
                branch_id,
                f"{_BEHIND}; if it stays so, the brokers have lost the end of {STATE_TOPIC}: check "
                f"the topic, then {settle_command(branch_id)} ({story})",
            )
        if state is not None and _may_be_fenced(branch, state):
            raise self._unresolved(
                branch_id,
                "its producer was fenced, as it is after a commit, and the proof of one is not "
                f"there; if the topic {proof_in} was made anew, it went with the old "
                f"one. Check the topics, then {settle_command(branch_id)} ({story})",
            )
        age_s = time.time() - branch.began_at
        kept_s = self._patience(lambda: proof_kept_s(self._finisher))
        kept_s = min(kept_s, branch.proof_kept_s or kept_s)
        if age_s > kept_s * 0.9:
            raise self._unresolved(
                branch_id,
                f"it is {age_s / 3600:.0f} h old and Kafka keeps the proof for "
                f"{kept_s / 3600:.0f} h; check the topic and settle the batch in the transaction "
                f"log ({story})",
            )
        ids_kept_s = self._patience(self._ids_kept_s)
        if state is None and age_s < ids_kept_s:
            raise self._unresolved(
                branch_id,
                f"{story}, though they keep ids for {ids_kept_s / 3600:.0f} h ({_IDS_KEPT}), and "
                f"it began {age_s:.0f} s ago by the driver's clock. Is that clock right? Did they "
                f"lose {STATE_TOPIC}? A proof of its commit may be gone as well: check the topic, "
                f"then {settle_command(branch_id)}",
            )
        keep = f"make {TIMEOUT} longer than the driver may be down"
        if torn is not None:
            story = f"{_what_tore(torn)}, so all of it was aborted"
            keep = f"end what begins with {PREFIX!r} by `sparkonce orphans JOB --abort` only"
        raise PreparedBranchLostError(
            f"batch {branch_id.batch_id} of the sink {branch_id.sink!r}: the prepared transaction "
            f"{branch.transactional_id!r} in {self._target} is gone and was never committed: "
            f"{story} (EndTxn: {_text(refusal)}). To keep it from happening, {keep}",
            branch_id,
        )

    # -- abort -----------------------------------------------------------------------------------

    def abort(self, branch: BranchId | Committable) -> None:
        """See `TwoPhaseCommitSink.abort`.

        Raises:
            SinkError: the brokers gave no answer; the transaction may still be open.
        """
        branch_id = branch.branch_id if isinstance(branch, Committable) else branch
        try:
            if isinstance(branch, Committable):
                self._abort_known(branch)
            else:
                with contextlib.suppress(*_REFUSED_FOR_GOOD):  # it has ended meanwhile
                    self._abort_by_name(branch)
        except errors.KafkaError as error:
            told = f"{branch_id} cannot be aborted in {self._target}: {self._hang_up(error)}"
            raise SinkError(told, branch_id) from error

    def _abort_known(self, committable: Committable) -> None:
        branch = KafkaBranch.of(committable)
        try:
            self._abort(branch)
        except _REFUSED_FOR_GOOD as refusal:
            # Committed, aborted or taken over already, and whatever is open now is not this branch:
            # if the broker that says so is its coordinator still.
            state = self._patience(lambda: self._describe(branch.transactional_id))
            if state is not None and (_is_open(branch, state) or _is_behind(branch, state)):
                raise SinkError(
                    f"{committable.branch_id} cannot be aborted in {self._target}: {_BEHIND} "
                    f"({_story(branch, state)}; EndTxn: {_text(refusal)})",
                    committable.branch_id,
                ) from refusal

    def abort_decided(self, committable: Committable) -> None:
        """See `TwoPhaseCommitSink.abort_decided`.

        The brokers refuse the abort of what is committed, and of what is long gone, too: so they
        are asked which it is. Where they answer and no proof is left the branch counts as aborted.

        Raises:
            CommitRejectedError: it is committed.
            SinkError: the brokers gave no answer.
        """
        self.abort(committable)
        branch_id, branch = committable.branch_id, KafkaBranch.of(committable)
        told = f"no answer whether {branch_id} was committed in {self._target}: "
        try:
            state = self._patience(lambda: self._describe(branch.transactional_id))
            is_committed = state is not None and _has_ended(branch, state, _COMMITTED)
            if not is_committed:
                markers = self._patience(lambda: self._markers(branch))
                is_committed = _prove(markers, branch_id)
        except errors.KafkaError as error:
            raise SinkError(told + self._hang_up(error), branch_id) from error
        if state is not None and not is_committed and _is_behind(branch, state):
            raise SinkError(f"{told}{_BEHIND} ({_story(branch, state)})", branch_id)
        if is_committed:
            raise CommitRejectedError(
                f"{branch_id} is committed in {self._target} ({_story(branch, state)}), so that "
                "its rows would be there twice. What keeps them from being visible is in the error "
                "of its commit, which is asked for at each start; or, if they are there, "
                f"{settle_command(branch_id, 'committed')}",
                branch_id,
            )

    def _abort(self, branch: KafkaBranch) -> None:
        if branch.producer_id < 0:
            return
        try:
            if self._patience(self._finisher.end_fences):
                self._patience(lambda: self._end(branch, commit=False))
            elif not self._patience(lambda: self._abort_fencing(branch)):
                return
        except errors.ConcurrentTransactionsError:  # it has begun, and there is no time to wait
            logger.warning("%s is being aborted, and may hold readers up", branch.transactional_id)
            return
        try:
            self._patience(lambda: self._write_missing(branch, commit=False))
        except errors.KafkaError as error:
            logger.warning(
                "%s is aborted, and may hold readers up: %s", branch.transactional_id, _text(error)
            )

    def _abort_fencing(self, branch: KafkaBranch) -> bool:
        """Abort what is open of the branch, where EndTxn would let its producer write on.

        Returns:
            Whether it is aborted; not when it ended otherwise, or another holds its name.
        """
        name = branch.transactional_id
        state = self._describe(name)
        if state is not None and (_is_open(branch, state) or _is_behind(branch, state)):
            # The answer is "ask again" when it is being aborted; it has ended by itself otherwise.
            # Of a coordinator that has not seen it, only one that lost its state can carry it out.
            self._finisher.fence(name, branch.producer_id, branch.producer_epoch)
            return False
        return state is not None and _has_ended(branch, state, _ABORTED)

    def _abort_by_name(self, branch_id: BranchId) -> None:
        state = self._patience(lambda: self._describe(branch_id.name))
        if state is not None and state.state == "Ongoing":
            self._abort(state.branch(branch_id.name))

    # -- helpers ---------------------------------------------------------------------------------

    def _hang_up(self, error: errors.KafkaError) -> str:
        """Let the next call start with fresh connections; tells what was asked in vain."""
        self._finisher.close()
        return f"asked for {self._patience.seconds:g} s, last answer: {_text(error)}"

    def _end(self, branch: KafkaBranch, *, commit: bool) -> bool:
        return self._finisher.end(
            branch.transactional_id, branch.producer_id, branch.producer_epoch, commit=commit
        )

    def _markers(self, branch: KafkaBranch) -> list[tuple[int, str]]:
        if not branch.marker_topics:
            return []
        return self._finisher.markers(branch.transactional_id, branch.marker_topics)

    def _is_gone(self, topic: str) -> bool:
        return bool(self._finisher.topic(topic).error == errors.UnknownTopicOrPartitionError.errno)

    def _is_marked(self, branch_id: BranchId, branch: KafkaBranch) -> bool:
        def read() -> list[tuple[int, str]]:
            try:
                return self._markers(branch)
            except errors.UnstableOffsetCommitError:  # open still
                return []

        if not _prove(self._patience(read), branch_id):
            return False
        self._check_cluster(branch_id, branch)
        return True

    def _check_cluster(self, branch_id: BranchId, branch: KafkaBranch) -> None:
        """Raise where another cluster answers: its proofs may be copies that came before rows."""
        cluster_id = self._patience(self._finisher.cluster_id)
        if cluster_id != branch.cluster_id:
            raise self._unresolved(
                branch_id,
                f"the cluster there is {cluster_id}, and the branch was prepared on "
                f"{branch.cluster_id}; point bootstrap_servers at that one",
            )

    def _describe(self, transactional_id: str) -> TransactionState | None:
        return self._finisher.describe([transactional_id]).get(transactional_id)

    def _ids_kept_s(self) -> float:
        """The longest of all brokers: an id that is forgotten earlier may mean a wrong clock."""
        values = self._finisher.broker_config([_IDS_KEPT]).get(_IDS_KEPT)
        return max(values) / 1000 if values else RETENTION_S

    def _unresolved(
        self, branch_id: BranchId, why: str, known: str = _UNKNOWN
    ) -> CommitUnresolvedError:
        return CommitUnresolvedError(f"{branch_id}: {known} in {self._target}: {why}", branch_id)


def proof_kept_s(finisher: Finisher) -> float:
    """How long every broker keeps a proof; any of them may be the one that has it."""
    values = finisher.broker_config([_RETENTION]).get(_RETENTION)
    return min(values) * 60.0 if values else RETENTION_S


def _prove(markers: Sequence[tuple[int, str]], branch_id: BranchId) -> bool:
    """Whether one of the markers that are visible is that of the branch.

    One is enough: a topic that was deleted, or made anew, has taken its own with it.
    """
    return any(text == str(branch_id) for _, text in markers)


def _is_complete(branch: KafkaBranch, state: TransactionState, *, commit: bool) -> bool:
    """Of an ended branch: its producer is fenced, so what is open in a partition is the branch.

    EndTxn that fences leaves CompleteCommit or CompleteAbort; `_fence`, where it does not, leaves
    Empty behind a commit.
    """
    if commit and _is_fenced(branch, state):
        return True
    held = (state.producer_id, state.producer_epoch)
    ours = (branch.producer_id, branch.producer_epoch + 1)
    return held == ours and state.state == ("CompleteCommit" if commit else "CompleteAbort")


def _is_ending(state: TransactionState | None) -> bool:
    return state is not None and state.state == "PrepareAbort"


def _has_ended(branch: KafkaBranch, state: TransactionState, ends: Collection[str]) -> bool:
    """An end that fences leaves the next epoch behind, one that does not our own."""
    is_ours = state.producer_id == branch.producer_id and state.producer_epoch in {
        branch.producer_epoch,
        branch.producer_epoch + 1,
    }
    return state.state in ends and is_ours


def _is_open(branch: KafkaBranch, state: TransactionState) -> bool:
    held = (state.producer_id, state.producer_epoch)
    return state.state == "Ongoing" and held == (branch.producer_id, branch.producer_epoch)


def _is_behind(branch: KafkaBranch, state: TransactionState) -> bool:
    """Whether this is from before the branch was prepared, as its coordinator would not say.

    Epochs only grow, and our own one is empty only until the first partition is written.
    """
    if state.producer_id != branch.producer_id:
        return False
    is_empty = state.state == "Empty" and state.producer_epoch == branch.producer_epoch
    return is_empty or state.producer_epoch < branch.producer_epoch


def _may_be_fenced(branch: KafkaBranch, state: TransactionState) -> bool:
    """Whether `_fence` may have left this behind, as it does after a commit."""
    return _is_fenced(branch, state) and state.producer_epoch == branch.producer_epoch + 1


def _is_fenced(branch: KafkaBranch, state: TransactionState) -> bool:
    """Whether the id was initialised behind the branch, by whomever."""
    is_younger = state.producer_epoch > branch.producer_epoch
    return state.state == "Empty" and state.producer_id == branch.producer_id and is_younger


def _story(branch: KafkaBranch, state: TransactionState | None) -> str:
    """What the coordinator's state says about the end of a branch, for people."""
    if state is None:
        return "the brokers do not know its transactional id any more"
    now = (
        f"{state.state} with producer id {state.producer_id}, epoch {state.producer_epoch}; ours "
        f"were {branch.producer_id}, {branch.producer_epoch}"
    )
    if _is_behind(branch, state):
        return f"the brokers say {now}"
    age_s = time.time() - branch.began_at
    if state.producer_id != branch.producer_id or state.state in {"Empty", "Ongoing"}:
        return f"another producer has taken its transactional id ({now})"
    if state.state in {"PrepareAbort", "CompleteAbort", "PrepareEpochFence"}:
        if age_s > branch.timeout_ms / 1000:
            return (
                f"it timed out: the broker aborts it after {branch.timeout_ms / 1000:g} s, and it "
                f"began {age_s:.0f} s ago ({now})"
            )
        return f"somebody aborted it ({now})"
    return f"the brokers say {now}"


def _what_tore(torn: Partitions) -> str:
    return (
        f"its rows in {dict(torn)} were gone before it was committed: aborted there by hand "
        "(kafka-transactions.sh), or the topic was made anew, or has lost its end"
    )


def _text(error: errors.KafkaError) -> str:
    name = getattr(error, "message", None) or type(error).__name__
    said = " ".join(str(arg) for arg in error.args)
    right = missing_right(error)
    advice = "" if right is None else f" (allow {right})"
    if isinstance(error, errors.CoordinatorNotAvailableError):
        said += (
            "the broker that coordinates the transaction is not up, or fewer replicas than "
            "min.insync.replicas of __transaction_state"
        )
    return f"{name}: {said}{advice}" if said else f"{name}{advice}"
