"""How the Kafka sink proves an outcome: many combinations of answers, from a scripted finisher."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
from kafka import errors

from sparkonce.errors import (
    CommitUnresolvedError,
    PreparedBranchLostError,
    PrepareRejectedError,
    ProtocolError,
    SinkError,
)
from sparkonce.finding import Level
from sparkonce.model import BranchId, Committable, Owner
from sparkonce.protocol.rulings import End, end_for_rewrite, end_ruled
from sparkonce.sinks import KafkaSink
from sparkonce.sinks.kafka.branch import KafkaBranch
from sparkonce.sinks.kafka.diagnosis import diagnose
from sparkonce.sinks.kafka.finishing.cluster import TopicInfo
from sparkonce.sinks.kafka.finishing.outcome import Outcome
from sparkonce.sinks.kafka.finishing.transactions import TransactionState

BRANCH = BranchId(Owner("0" * 16, "1-2"), 7, 3, "kafka", 0, 42)
OURS = (7, str(BRANCH))
RETENTION = "offsets.retention.minutes"
REFUSALS = [
    errors.InvalidTxnStateError,
    errors.ProducerFencedError,
    errors.InvalidProducerEpochError,
    errors.InvalidProducerIdMappingError,
]


@dataclass
class PaperFinisher:
    """Gives scripted answers, raises scripted errors, and keeps a list of the questions."""

    ends: list[object] = field(default_factory=lambda: [True])
    state: TransactionState | type[errors.KafkaError] | None = None
    marks: list[object] = field(default_factory=lambda: [None])
    others: list[object] = field(default_factory=list)
    cluster: str = "cluster"
    fences: bool = True
    fenced: TransactionState | None = None
    config: dict[str, list[int]] | type[errors.KafkaError] = field(default_factory=dict)
    gone: frozenset[str] = frozenset()
    open: list[object] = field(default_factory=lambda: [False])
    asked: list[str] = field(default_factory=list)
    offsets: list[int] = field(default_factory=lambda: [1])
    refused: dict[str, list[int]] = field(default_factory=dict)
    holder: int = 5
    shut: list[object] = field(default_factory=lambda: [{}])
    looks: int = 0

    @staticmethod
    def _next(answers: list[object]) -> object:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, type):
            raise answer
        return answer

    def end_fences(self) -> bool:
        return self.fences

    def end(self, *identity: object, commit: bool) -> object:
        self.asked.append(f"end {identity[1]}/{identity[2]} {'commit' if commit else 'abort'}")
        return self._next(self.ends)

    def commit_together(self, branches: list[KafkaBranch]) -> set[str]:
        return set()

    def nodes(self) -> list[int]:
        return [1]

    def ongoing(self, prefix: str, node: int) -> list[str]:
        return [BRANCH.name]

    def describe(self, names: list[str]) -> dict[str, TransactionState]:
        self.asked.append("describe")
        found = self._next([self.state])
        return {} if found is None else dict.fromkeys(names, found)  # type: ignore[arg-type]

    def markers(self, group: str, topics: list[str]) -> list[object]:
        assert (group, topics[:1]) == (BRANCH.name, ["orders"])
        self.asked.append("marker")
        return [each for each in [self._next(self.marks), *self.others] if each is not None]

    def open_partitions(self, partitions: object, producer_id: int) -> dict[str, list[int]]:
        assert (partitions, producer_id) == ({"orders": [0, 2]}, self.holder)
        return {"orders": [2]} if self._next(self.open) else {}

    def closed(self, branches: list[KafkaBranch]) -> object:
        assert {branch.transactional_id for branch in branches} == {BRANCH.name}
        self.looks += 1
        return self._next(self.shut)

    def offsets_partition(self, group: str) -> dict[str, list[int]]:
        assert group == BRANCH.name
        return {"offsets": self.offsets}

    def write_markers(
        self,
        name: str,
        partitions: dict[str, list[int]],
        producer_id: int,
        producer_epoch: int,
        *,
        commit: bool,
    ) -> dict[str, list[int]]:
        assert name == BRANCH.name
        kind = "" if commit else "abort "
        self.asked.append(f"write {kind}markers {producer_id}/{producer_epoch} {partitions}")
        return self.refused

    def topic(self, name: str) -> TopicInfo:
        return TopicInfo(3 if name in self.gone else 0, None)

    def cluster_id(self) -> str:
        return self.cluster

    def broker_config(self, names: list[str]) -> dict[str, list[int]]:
        config = self._next([self.config])
        return {name: config[name] for name in names if name in config}  # type: ignore[index,operator]

    def fence(self, name: str, *identity: int) -> None:
        assert name == BRANCH.name
        self.asked.append(" ".join(["fence", *("/".join(map(str, identity)),) * bool(identity)]))
        if self.fenced:
            self.state = self.fenced
            raise errors.ConcurrentTransactionsError

    def close(self) -> None:
        self.asked.append("close")


def committable(age_s: float = 10.0, **changes: object) -> Committable:
    prepared = KafkaBranch(
        BRANCH.name, 5, 0, {"orders": [0, 2]}, "cluster", ["orders"], time.time() - age_s, 900_000
    )
    return replace(prepared, **changes).committable(BRANCH)  # type: ignore[arg-type]


def outcome(finisher: PaperFinisher, patience_s: float = 0.05) -> Outcome:
    return Outcome(finisher, "kafka topic orders at here", patience_s)  # type: ignore[arg-type]


def state(name: str, producer_id: int = 5, epoch: int = 1) -> TransactionState:
    return TransactionState(name, producer_id, epoch, 900_000, -1.0, {"orders": [0, 2]})


# -- commit ----------------------------------------------------------------------------------------


def test_plain_commit() -> None:
    """EndTxn succeeds, and every partition has its marker."""
    finisher = PaperFinisher(marks=[OURS])
    outcome(finisher).commit(committable())
    assert finisher.asked == ["end 5/0 commit", "marker"]


def test_markers_on_their_way() -> None:
    """`commit` returns when the last partition has its marker; we write none."""
    finisher = PaperFinisher(
        marks=[errors.UnstableOffsetCommitError, OURS],
        open=[True, True, False],
        state=state("PrepareCommit"),
    )
    outcome(finisher, 5).commit(committable())
    assert finisher.asked.count("marker") == 3
    assert not [question for question in finisher.asked if "write" in question]


@pytest.mark.parametrize(
    ("finisher", "missing"),
    [
        (
            PaperFinisher(marks=[OURS], open=[True, True, False], state=state("CompleteCommit")),
            {"orders": [2]},
        ),
        (
            PaperFinisher(
                marks=[errors.UnstableOffsetCommitError, errors.UnstableOffsetCommitError, OURS],
                state=state("CompleteCommit"),
            ),
            {"offsets": [1]},
        ),
        (
            PaperFinisher(
                marks=[errors.UnstableOffsetCommitError, errors.UnstableOffsetCommitError, OURS],
                open=[True, True, False],
                state=state("CompleteCommit"),
            ),
            {"orders": [2], "offsets": [1]},
        ),
    ],
)
def test_markers_that_the_broker_left_out(
    finisher: PaperFinisher, missing: dict[str, list[int]]
) -> None:
    """A marker is missing after the coordinator called it complete: we write only that one."""
    outcome(finisher, 5).commit(committable())
    written = [question for question in finisher.asked if "write" in question]
    assert written == [f"write markers 5/1 {missing}"]


@pytest.mark.parametrize("epoch", [1, 2])
def test_markers_that_a_broker_without_fencing_left_out(epoch: int) -> None:
    """There fencing makes the coordinator forget the commit, so it is proven first."""
    fenced = state("Empty", epoch=epoch)
    finisher = PaperFinisher(
        ends=[False], fences=False, marks=[OURS], open=[True, True, False], state=fenced
    )
    outcome(finisher, 5).commit(committable())
    changes = [asked for asked in finisher.asked if asked not in {"describe", "marker"}]
    assert changes == [f"write markers 5/{epoch} {{'orders': [2]}}"]


@pytest.mark.parametrize(
    "found",
    [
        None,
        state("PrepareCommit"),
        state("CompleteAbort"),
        state("Empty", epoch=0),
        state("CompleteCommit", epoch=0),  # not fenced: what is open may be a zombie's
        state("CompleteCommit", epoch=2),
        state("CompleteCommit", producer_id=9),
    ],
)
def test_missing_markers_that_are_not_ours_to_write(found: TransactionState | None) -> None:
    """Unless the coordinator calls this branch complete: unresolved, and nothing is written."""
    finisher = PaperFinisher(marks=[OURS], open=[True], state=found)
    with pytest.raises(CommitUnresolvedError, match="not yet visible"):
        outcome(finisher).commit(committable())
    assert not [question for question in finisher.asked if "write" in question]


def test_missing_marker_that_we_have_no_right_to_write() -> None:
    """We have no right to see where the broker keeps the proof: unresolved, naming the rights."""
    unstable = errors.UnstableOffsetCommitError
    finisher = PaperFinisher(marks=[unstable], offsets=[], state=state("CompleteCommit"))
    with pytest.raises(CommitUnresolvedError, match=r"Describe on .*offsets.*ClusterAction"):
        outcome(finisher).commit(committable())
    assert not [question for question in finisher.asked if "write" in question]


def test_missing_marker_that_a_partition_refuses() -> None:
    """It remembers a later coordinator: unresolved, naming the right that reveals its epoch."""
    finisher = PaperFinisher(open=[True], refused={"orders": [2]}, state=state("CompleteCommit"))
    with pytest.raises(
        CommitUnresolvedError, match=r"orders.*\[2\].*Describe.*__transaction_state"
    ):
        outcome(finisher).commit(committable())


def test_missing_marker_that_comes_while_we_write_it() -> None:
    """The partition refuses our marker because it has the coordinator's: committed."""
    finisher = PaperFinisher(
        marks=[OURS],
        open=[True, True, False],
        refused={"orders": [2]},
        state=state("CompleteCommit"),
    )
    outcome(finisher, 5).commit(committable())


def test_proof_on_its_way_to_where_we_may_not_look() -> None:
    """Without the rights to repair, a commit whose markers arrive late still succeeds."""
    marks: list[object] = [errors.UnstableOffsetCommitError, OURS]
    finisher = PaperFinisher(marks=marks, offsets=[], state=state("PrepareCommit"))
    outcome(finisher, 5).commit(committable())


@pytest.mark.parametrize(
    "transient",
    [
        errors.ConcurrentTransactionsError,
        errors.NotCoordinatorError,
        errors.CoordinatorNotAvailableError,
        errors.CoordinatorLoadInProgressError,
        errors.KafkaConnectionError,
        errors.RequestTimedOutError,
        errors.NodeNotReadyError,
    ],
)
def test_commit_while_the_coordinator_moves(transient: type[errors.KafkaError]) -> None:
    """The same question is asked again, within one call."""
    finisher = PaperFinisher(ends=[transient, True])
    outcome(finisher, 5).commit(committable())
    assert finisher.asked == ["end 5/0 commit", "end 5/0 commit", "marker"]


@pytest.mark.parametrize("refusal", REFUSALS)
def test_refused_and_the_marker_is_ours(refusal: type[errors.KafkaError]) -> None:
    """An earlier commit landed and its response was lost: `commit` returns."""
    finisher = PaperFinisher(ends=[refusal], marks=[OURS], state=state("CompleteCommit"))
    outcome(finisher).commit(committable())


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize(
    ("found", "story"),
    [
        (state("CompleteAbort"), "another process aborted"),
        (state("Empty", epoch=2), "another producer"),
        (state("Ongoing", epoch=2), "another producer"),
        (state("CompleteAbort", producer_id=9, epoch=0), "another producer"),
    ],
)
def test_refused_and_no_marker(
    refusal: type[errors.KafkaError], found: TransactionState, story: str
) -> None:
    """Proven lost: first the refusal, then the absent proof; the error names both."""
    finisher = PaperFinisher(ends=[refusal], state=found)
    with pytest.raises(PreparedBranchLostError) as lost:
        outcome(finisher).commit(committable())
    assert finisher.asked == ["end 5/0 commit", "describe", "marker"]
    for word in ("batch 7", "'kafka'", BRANCH.name, story, "max.timeout"):
        assert word in str(lost.value)
    assert lost.value.branch_id == BRANCH


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize("age_s", [-5.0, 0.1, 6 * 86400])
def test_forgotten_before_its_time(refusal: type[errors.KafkaError], age_s: float) -> None:
    """A driver that slept for 8 days with its clock: the proof may have expired with the id."""
    finisher = PaperFinisher(ends=[refusal], state=None)
    words = r"no longer know.*168 h .transactional\.id\.expiration\.ms.*clock.*settle"
    with pytest.raises(CommitUnresolvedError, match=words):
        outcome(finisher).commit(committable(age_s=age_s))
    assert finisher.asked == ["end 5/0 commit", "describe", "marker"]


def test_forgotten_in_its_time() -> None:
    """If ids are kept for a shorter time than proofs, an absent proof still counts: lost.

    Before the broker that keeps ids longest would have forgotten it, it is unresolved.
    """
    finisher = PaperFinisher(
        ends=[errors.InvalidProducerIdMappingError],
        config={"transactional.id.expiration.ms": [1, 60000]},
    )
    with pytest.raises(PreparedBranchLostError, match="no longer know"):
        outcome(finisher).commit(committable(age_s=61))
    with pytest.raises(CommitUnresolvedError, match="clock"):
        outcome(finisher).commit(committable(age_s=59))


def test_fenced_as_after_a_commit_and_no_proof() -> None:
    """The topic may have been recreated without the marker: not called lost."""
    finisher = PaperFinisher(ends=[errors.ProducerFencedError], state=state("Empty", epoch=1))
    with pytest.raises(CommitUnresolvedError, match="was fenced, as it is after a commit"):
        outcome(finisher).commit(committable())


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize(
    "found", [state("Empty", epoch=3), state("Empty", epoch=2), state("CompleteAbort", epoch=2)]
)
def test_answer_from_before_the_branch(
    refusal: type[errors.KafkaError], found: TransactionState
) -> None:
    """A former coordinator that was paused has not noticed yet that it was replaced."""
    prepared = committable(producer_epoch=3)
    with pytest.raises(CommitUnresolvedError, match="has not seen it.* settle") as unresolved:
        outcome(PaperFinisher(ends=[refusal], state=found)).commit(prepared)
    assert "another producer" not in str(unresolved.value)
    with pytest.raises(SinkError, match="has not seen it"):
        outcome(PaperFinisher(ends=[refusal], state=found)).abort_decided(prepared)


def test_timed_out() -> None:
    """The error names the timeout and its length."""
    finisher = PaperFinisher(ends=[errors.InvalidTxnStateError], state=state("CompleteAbort"))
    with pytest.raises(PreparedBranchLostError, match="timed out.* after 900 s"):
        outcome(finisher).commit(committable(age_s=1000))


def test_older_marker_under_the_same_name() -> None:
    """A marker of an earlier batch proves nothing for this one: lost."""
    finisher = PaperFinisher(
        ends=[errors.InvalidTxnStateError],
        marks=[(3, "another branch")],
        state=state("CompleteAbort"),
    )
    with pytest.raises(PreparedBranchLostError):
        outcome(finisher).commit(committable())


@pytest.mark.parametrize("gone", [frozenset(), frozenset({"orders"})], ids=["made anew", "deleted"])
def test_proof_in_another_topic(gone: frozenset[str]) -> None:
    """One marker that names the branch proves the commit, whatever happened to the other topic."""
    finisher = PaperFinisher(
        ends=[errors.InvalidProducerIdMappingError], others=[(3, "earlier"), OURS], gone=gone
    )
    outcome(finisher).commit(committable(marker_topics=["orders", "refunds", "stock"]))


def test_proof_in_no_topic_that_is_left() -> None:
    """One topic still exists, and so would its marker: lost. A later marker proves nothing."""
    finisher = PaperFinisher(
        ends=[errors.InvalidTxnStateError], state=state("CompleteAbort"), gone=frozenset({"orders"})
    )
    branch = committable(marker_topics=["orders", "refunds"])
    with pytest.raises(PreparedBranchLostError):
        outcome(finisher).commit(branch)
    finisher.others = [(8, "a later branch")]
    with pytest.raises(CommitUnresolvedError, match="batch 8 has used"):
        outcome(finisher).commit(branch)
    finisher.others, finisher.gone = [], frozenset({"orders", "refunds"})
    with pytest.raises(CommitUnresolvedError, match="'orders', 'refunds' was deleted"):
        outcome(finisher).commit(branch)


def test_marker_not_stable_yet() -> None:
    """The transaction has ended and its markers are on their way: the read is repeated."""
    finisher = PaperFinisher(
        ends=[errors.ProducerFencedError],
        state=state("PrepareCommit"),
        marks=[errors.UnstableOffsetCommitError, errors.UnstableOffsetCommitError, OURS],
    )
    outcome(finisher, 5).commit(committable())


@pytest.mark.parametrize(
    ("finisher", "words"),
    [
        (PaperFinisher(ends=[errors.KafkaConnectionError]), "asked for 0.05 s"),
        (
            PaperFinisher(ends=[errors.TransactionalIdAuthorizationFailedError]),
            "TRANSACTIONAL_ID_AUTHORIZATION_FAILED",
        ),
        (
            PaperFinisher(
                ends=[errors.ProducerFencedError], marks=[errors.UnstableOffsetCommitError]
            ),
            "UNSTABLE_OFFSET_COMMIT",
        ),
        (
            PaperFinisher(ends=[errors.InvalidProducerIdMappingError], cluster="another"),
            "another.*prepared on cluster",
        ),
        (
            PaperFinisher(ends=[errors.ProducerFencedError], marks=[(8, "a later branch")]),
            "batch 8 has used its transactional id",
        ),
        (
            PaperFinisher(ends=[errors.InvalidTxnStateError], state=state("CompleteCommit")),
            "yet.*CompleteCommit",
        ),
        (
            PaperFinisher(ends=[errors.InvalidTxnStateError], state=state("Ongoing", epoch=0)),
            "yet.*Ongoing",
        ),
        (
            PaperFinisher(
                ends=[errors.InvalidTxnStateError], config={"offsets.retention.minutes": [0]}
            ),
            "keeps the proof for 0 h",
        ),
        (
            PaperFinisher(ends=[errors.ProducerFencedError], gone=frozenset({"orders"})),
            "the topic 'orders' was deleted together with the proof",
        ),
    ],
)
def test_not_proven(finisher: PaperFinisher, words: str) -> None:
    """Neither commit nor loss can be proven: unresolved, with what was awaited or seen."""
    with pytest.raises(CommitUnresolvedError, match=words) as unresolved:
        outcome(finisher).commit(committable())
    assert unresolved.value.branch_id == BRANCH


def test_proof_is_older_than_kafka_keeps_it() -> None:
    """Near the end of 7 days an absent marker proves nothing: an operator rules, it is not lost."""
    finisher = PaperFinisher(ends=[errors.InvalidProducerIdMappingError])
    with pytest.raises(CommitUnresolvedError, match="operator|settle"):
        outcome(finisher).commit(committable(age_s=6.9 * 86400))


@pytest.mark.parametrize(
    ("config", "recorded_s"),
    [({RETENTION: [10080, 60, 10080]}, None), ({RETENTION: [10080]}, 3600.0), ({}, 3600.0)],
    ids=["another broker", "raised since", "not told now"],
)
def test_proof_is_older_than_one_broker_keeps_it(
    config: dict[str, list[int]], recorded_s: float | None
) -> None:
    """The broker with the shortest retention, now or at the start, may have held the proof."""
    finisher = PaperFinisher(
        ends=[errors.InvalidTxnStateError], state=state("CompleteAbort"), config=config
    )
    with pytest.raises(CommitUnresolvedError, match="keeps the proof for 1 h"):
        outcome(finisher).commit(committable(age_s=3300, proof_kept_s=recorded_s))
    with pytest.raises(PreparedBranchLostError):
        outcome(finisher).commit(committable(age_s=3200, proof_kept_s=recorded_s))


def test_retention_that_one_broker_does_not_tell() -> None:
    """An unknown retention may be the shortest one: unresolved."""
    finisher = PaperFinisher(
        ends=[errors.InvalidTxnStateError],
        state=state("CompleteAbort"),
        config=errors.KafkaConnectionError,
    )
    with pytest.raises(CommitUnresolvedError, match="KafkaConnectionError"):
        outcome(finisher).commit(committable())


def test_topic_deleted_under_a_commit(caplog: pytest.LogCaptureFixture) -> None:
    """EndTxn's success decides; a warning reports that the rows were deleted with their topic."""
    outcome(PaperFinisher(gone=frozenset({"orders"}))).commit(committable())
    assert f"{BRANCH.name} is committed, but the topic 'orders' was deleted" in caplog.text


def test_nothing_was_written() -> None:
    """A branch without rows and without a topic of its own has nothing to commit or abort."""
    finisher = PaperFinisher()
    empty = committable(marker_topics=[], producer_id=-1, producer_epoch=-1)
    outcome(finisher).commit(empty)
    outcome(finisher).abort(empty)
    assert finisher.asked == []


def test_commit_of_what_was_only_found() -> None:
    """A branch from `find_branches` is not a decision."""
    with pytest.raises(ProtocolError):
        outcome(PaperFinisher()).commit(
            Committable(replace(BRANCH, batch_id=None), committable().payload)
        )


def test_proof_on_another_cluster() -> None:
    """A mirror may have the offset that is the proof before the topic's last rows: unresolved."""
    finisher = PaperFinisher(
        ends=[errors.InvalidProducerIdMappingError], marks=[OURS], cluster="mirror"
    )
    with pytest.raises(CommitUnresolvedError, match="mirror.*prepared on cluster"):
        outcome(finisher).commit(committable())


# -- aborted manually ------------------------------------------------------------------------------

TORN: dict[str, dict[str, list[int]]] = {BRANCH.name: {"orders": [2]}}


def test_branch_of_which_a_part_was_aborted_by_hand(caplog: pytest.LogCaptureFixture) -> None:
    """EndTxn would succeed: all of it is aborted first, and then it is proven lost."""
    finisher = PaperFinisher(
        ends=[True, errors.InvalidTxnStateError], shut=[TORN], state=state("Ongoing", epoch=0)
    )
    real = finisher.end

    def end(*identity: object, commit: bool) -> object:
        finisher.state = state("CompleteAbort")
        return real(*identity, commit=commit)

    finisher.end = end  # type: ignore[method-assign]
    words = r"\{'orders': \[2\]\}.*manually.*`sparkonce orphans JOB"
    with pytest.raises(PreparedBranchLostError, match=words):
        outcome(finisher).commit(committable())
    assert finisher.asked == [
        *("describe", "end 5/0 abort", "marker"),
        *("end 5/0 commit", "describe", "marker"),
    ]
    assert f"{BRANCH.name}: its rows in {TORN[BRANCH.name]} were gone" in caplog.text


@pytest.mark.parametrize(
    "found",
    [
        None,
        state("PrepareCommit", epoch=0),
        state("CompleteCommit"),
        state("Ongoing"),
        state("Ongoing", producer_id=9, epoch=0),
    ],
)
def test_branch_that_ended_is_not_called_torn(found: TransactionState | None) -> None:
    """The coordinator closed it, or does not know it: EndTxn decides."""
    finisher = PaperFinisher(marks=[OURS], shut=[TORN], state=found)
    outcome(finisher).commit(committable())
    assert finisher.asked == ["describe", "end 5/0 commit", "marker"]


def test_torn_branch_that_somebody_commits_meanwhile() -> None:
    """Only its abort is refused: EndTxn decides."""
    finisher = PaperFinisher(
        ends=[errors.InvalidTxnStateError, True],
        marks=[OURS],
        shut=[TORN],
        state=state("Ongoing", epoch=0),
    )
    outcome(finisher).commit(committable())
    assert finisher.asked == ["describe", "end 5/0 abort", "end 5/0 commit", "marker"]


def test_partition_that_cannot_be_looked_at() -> None:
    """Nothing is sent: rows that were aborted there would be lost silently."""
    finisher = PaperFinisher(shut=[errors.LeaderNotAvailableError])
    with pytest.raises(CommitUnresolvedError, match="LEADER_NOT_AVAILABLE"):
        outcome(finisher).commit(committable())
    assert finisher.asked == ["close"]


@pytest.mark.parametrize(
    ("age_s", "driver_s", "looks"),
    [(10.0, 0.0, 0), (31.0, 0.0, 2), (10.0, 31.0, 2), (-31.0, 0.0, 2), (10.0, None, 2)],
    ids=["fresh", "old", "its driver waited", "clocks apart", "another driver"],
)
def test_who_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, age_s: float, driver_s: float | None, looks: int
) -> None:
    """All branches except those that this process just received from its tasks, by both clocks."""
    finisher = PaperFinisher(marks=[OURS])
    sink, branch = sink_of(finisher), committable(age_s)
    if driver_s is not None:
        sink.vote(BRANCH, [branch])
        later = time.monotonic() + driver_s
        clocks = SimpleNamespace(time=time.time, monotonic=lambda: later)
        monkeypatch.setattr("sparkonce.sinks.kafka.finishing.fresh.time", clocks)
    assert sink.commit_many([branch]) == [None]
    assert (
        finisher.looks == looks
    )  # together, and one by one since the scripted finisher commits none together


# -- brokers before Kafka 4.0 ----------------------------------------------------------------------


def test_old_broker_first_commit() -> None:
    """EndTxn does not fence there, so the id is initialised again after it."""
    finisher = PaperFinisher(
        ends=[False], fences=False, marks=[errors.UnstableOffsetCommitError, OURS]
    )
    outcome(finisher).commit(committable())
    assert finisher.asked == ["marker", "end 5/0 commit", "describe", "fence", "marker"]


@pytest.mark.parametrize("aborting", ["PrepareAbort", "CompleteAbort"])
@pytest.mark.parametrize("branch", [committable(), BRANCH])
def test_old_broker_abort(branch: BranchId | Committable, aborting: str) -> None:
    """EndTxn would let a loser go on writing; markers of the next epoch do not."""
    finisher = PaperFinisher(fences=False, state=state("Ongoing", epoch=0), fenced=state(aborting))
    outcome(finisher, 5).abort(branch)
    assert [asked for asked in finisher.asked if asked != "describe"] == ["fence 5/0", "marker"]


@pytest.mark.parametrize("epoch", [0, 1])
def test_old_broker_abort_whose_markers_the_broker_left_out(epoch: int) -> None:
    """A second abort writes them too; where its producer is not fenced it writes none."""
    finisher = PaperFinisher(
        fences=False, open=[True, True, False], state=state("CompleteAbort", epoch=epoch)
    )
    outcome(finisher, 5).abort(committable())
    written = [question for question in finisher.asked if "write" in question]
    assert written == ["write abort markers 5/1 {'orders': [2]}"] * epoch


@pytest.mark.parametrize(
    "found",
    [
        None,
        state("Empty"),
        state("Ongoing"),  # a younger epoch, which the brokers would not tell apart
        state("Ongoing", producer_id=9, epoch=0),
        state("PrepareCommit", epoch=0),
        state("CompleteCommit", epoch=0),
        state("CompleteAbort", epoch=2),
    ],
)
def test_old_broker_abort_of_what_is_not_open(found: TransactionState | None) -> None:
    """Committed, or another producer's: not touched."""
    finisher = PaperFinisher(fences=False, state=found)
    outcome(finisher).abort(committable())
    assert finisher.asked == ["describe"]


def test_old_broker_abort_of_what_ends_meanwhile() -> None:
    """Nothing was open any more: we do not claim to have aborted it."""
    finisher = PaperFinisher(fences=False, state=state("Ongoing", epoch=0))
    outcome(finisher).abort(committable())
    assert finisher.asked == ["describe", "fence 5/0"]


def test_old_broker_abort_of_what_the_brokers_forgot() -> None:
    """They lost all records after the id's first: it is fenced, and can be rewritten."""
    finisher = PaperFinisher(fences=False, state=state("Empty", epoch=0))
    outcome(finisher).abort(committable())
    assert finisher.asked == ["describe", "fence 5/0"]


def test_old_broker_abort_without_time_to_wait(caplog: pytest.LogCaptureFixture) -> None:
    """The first response to a successful abort is "ask again": a warning, and no failure."""
    finisher = PaperFinisher(
        fences=False, state=state("Ongoing", epoch=0), fenced=state("PrepareAbort")
    )
    outcome(finisher, 0).abort(committable())
    assert finisher.asked == ["describe", "fence 5/0"]
    assert "is being aborted" in caplog.text


def test_old_broker_branch_of_which_a_part_was_aborted_by_hand() -> None:
    """The next epoch aborts it there; the rest is the same."""
    finisher = PaperFinisher(
        ends=[errors.ProducerFencedError],
        fences=False,
        shut=[TORN],
        state=state("Ongoing", epoch=0),
        fenced=state("CompleteAbort"),
    )
    with pytest.raises(PreparedBranchLostError, match="manually"):
        outcome(finisher, 5).commit(committable())
    sent = [asked for asked in finisher.asked if asked not in {"describe", "marker"}]
    assert sent == ["fence 5/0", "end 5/0 commit"]


def test_old_broker_proof_on_another_cluster() -> None:
    """Nothing is fenced, and nothing is called committed."""
    finisher = PaperFinisher(fences=False, marks=[OURS], cluster="mirror")
    with pytest.raises(CommitUnresolvedError, match="mirror.*prepared on cluster"):
        outcome(finisher).commit(committable())
    assert finisher.asked == ["marker"]


def test_old_broker_second_commit() -> None:
    """EndTxn could commit a zombie's transaction, so it is not sent once the marker is ours."""
    finisher = PaperFinisher(fences=False, marks=[OURS], state=state("CompleteCommit", epoch=0))
    outcome(finisher).commit(committable())
    assert finisher.asked == ["marker", "describe", "fence", "marker"]


def test_old_broker_commit_that_is_fenced_already() -> None:
    """Fencing it again would take another epoch, under which nobody recognises the commit."""
    finisher = PaperFinisher(fences=False, marks=[OURS], state=state("Empty", epoch=1))
    outcome(finisher).commit(committable())
    assert finisher.asked == ["marker", "describe", "marker"]


# -- abort -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [True, *REFUSALS])
def test_abort_by_identity(answer: object) -> None:
    """It uses the producer id and epoch that it holds; a refusal means that nothing is open."""
    finisher = PaperFinisher(ends=[answer])
    outcome(finisher).abort(committable())
    assert finisher.asked == ["end 5/0 abort", "marker" if answer is True else "describe"]


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize(
    "found", [state("Ongoing", epoch=3), state("Empty", epoch=3), state("CompleteAbort", epoch=2)]
)
def test_abort_refused_by_a_broker_that_does_not_know(
    refusal: type[errors.KafkaError], found: TransactionState
) -> None:
    """It is a former coordinator: no commit is sent that the new one might carry out."""
    finisher = PaperFinisher(ends=[refusal, True], state=found)
    prepared = committable(producer_epoch=3)
    with pytest.raises(SinkError, match="has not seen it"):
        outcome(finisher).abort(prepared)
    finisher.ends = [refusal, True]
    sink = sink_of(finisher)
    assert end_ruled(sink, prepared, sink.target).how is End.UNKNOWN
    assert "end 5/3 commit" not in finisher.asked


@pytest.mark.parametrize(
    ("found", "asked"),
    [
        (None, ["describe"]),
        (state("CompleteCommit"), ["describe"]),
        (state("PrepareCommit"), ["describe"]),
        (state("Ongoing", 9, 4), ["describe", "end 9/4 abort", "marker"]),
    ],
)
def test_abort_by_name(found: TransactionState | None, asked: list[str]) -> None:
    """Only an open transaction is aborted, with the identity that was seen."""
    finisher = PaperFinisher(state=found, holder=9)
    outcome(finisher).abort(BRANCH)
    assert finisher.asked == asked


@pytest.mark.parametrize("branch", [committable, lambda: BRANCH])
def test_abort_without_an_answer(branch: Callable[[], BranchId | Committable]) -> None:
    """It raises; the next sweep tries again."""
    finisher = PaperFinisher(ends=[errors.KafkaConnectionError], state=state("Ongoing", 5, 0))
    with pytest.raises(SinkError, match="cannot be aborted"):
        outcome(finisher).abort(branch())


def test_abort_whose_markers_the_broker_left_out() -> None:
    """Readers would wait there forever: we write the missing ones once the abort is complete."""
    finisher = PaperFinisher(open=[True, True, False], state=state("CompleteAbort"))
    outcome(finisher, 5).abort(committable())
    written = [question for question in finisher.asked if "write" in question]
    assert written == ["write abort markers 5/1 {'orders': [2]}"]


def test_abort_of_an_orphan_whose_markers_the_broker_left_out() -> None:
    """Its partitions are those that the coordinator reported before it ended."""
    finisher = PaperFinisher(open=[True, True, False], state=state("Ongoing", epoch=0))
    sink = sink_of(finisher, patience_s=5.0)
    (found,) = sink.find_branches(BRANCH.owner)
    finisher.state = state("CompleteAbort")
    assert sink.abort_many([found]) == [None]
    assert "write abort markers 5/1 {'orders': [2]}" in finisher.asked


@pytest.mark.parametrize(
    "found", [state("PrepareAbort"), state("CompleteAbort"), state("CompleteAbort", epoch=0)]
)
def test_markers_of_an_abort_on_their_way(
    found: TransactionState, caplog: pytest.LogCaptureFixture
) -> None:
    """We wait for them, write none, and log nothing."""
    finisher = PaperFinisher(open=[True, False], state=found)
    outcome(finisher, 5).abort(committable())
    assert not [question for question in finisher.asked if "write" in question]
    assert not caplog.messages


@pytest.mark.parametrize(
    "found",
    [
        None,
        state("PrepareAbort"),
        state("CompleteCommit"),
        state("Ongoing", epoch=0),
        state("CompleteAbort", epoch=0),  # not fenced: what is open may be a zombie's
        state("CompleteAbort", epoch=2),
        state("CompleteAbort", producer_id=9),
        errors.KafkaConnectionError,
    ],
)
def test_missing_markers_of_an_abort_that_are_not_ours_to_write(
    found: TransactionState | type[errors.KafkaError] | None, caplog: pytest.LogCaptureFixture
) -> None:
    """It is aborted, so the abort returns; a warning reports that readers may wait there."""
    finisher = PaperFinisher(open=[True], state=found)
    outcome(finisher).abort(committable())
    assert not [question for question in finisher.asked if "write" in question]
    assert f"{BRANCH.name} is aborted, and may hold readers up" in caplog.text


# -- many at once ----------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", [KafkaSink.abort_many, KafkaSink.commit_many])
def test_outage_costs_all_branches_together_what_it_costs_one(
    verb: Callable[[KafkaSink, list[Committable]], Sequence[Exception | None]],
) -> None:
    """They share one patience; after it, each remaining branch is asked about once."""
    finisher = PaperFinisher(ends=[errors.CoordinatorNotAvailableError])
    sink = sink_of(finisher, patience_s=0.1)
    branches = [committable(producer_id=number) for number in range(20)]
    outcomes = verb(sink, branches)
    assert [type(outcome) for outcome in outcomes] == [type(outcomes[0])] * 20
    assert isinstance(outcomes[0], SinkError)
    tries = sorted(Counter(asked for asked in finisher.asked if "end" in asked).values())
    assert len(tries) == 20
    assert tries[:4] == [1] * 4


# -- an operator's ruling --------------------------------------------------------------------------


def sink_of(finisher: PaperFinisher, patience_s: float = 0.0) -> KafkaSink:
    """Without patience it asks each question once."""
    sink = KafkaSink("orders", bootstrap_servers="here:1")
    sink._finisher, sink._patience_s = finisher, patience_s  # type: ignore[assignment]
    return sink


@pytest.mark.parametrize(
    ("ahead_s", "timeout_s", "is_refused"),
    [(30.0, 900, False), (1200.0, 900, True), (30.0, 100, True), (8.0, 100, False)],
)
def test_task_whose_clock_is_ahead(ahead_s: float, timeout_s: int, is_refused: bool) -> None:
    """It is unknown when the brokers abort its transaction: not decided, so nothing is lost."""
    times = 10.0, -ahead_s
    sink = sink_of(PaperFinisher())
    branches = [committable(age_s, timeout_ms=1000 * timeout_s) for age_s in times]
    if not is_refused:
        assert sink.vote(BRANCH, branches) == branches
        return
    with pytest.raises(PrepareRejectedError, match="clocks of executors and driver"):
        sink.vote(BRANCH, branches)


def redone(finisher: PaperFinisher, age_s: float = 10.0) -> Exception | None:
    """The outcome of `settle --as redo`: lost means that the branch is rewritten."""
    sink, branch = sink_of(finisher), committable(age_s)
    (first,) = sink.commit_many([branch])
    return end_for_rewrite(sink, branch, first)


@pytest.mark.parametrize(
    ("finisher", "words"),
    [
        (
            PaperFinisher(
                ends=[True, errors.InvalidTxnStateError, True],
                open=[True],
                state=state("CompleteCommit"),
            ),
            "is committed.*CompleteCommit",
        ),
        (
            PaperFinisher(
                ends=[True, errors.InvalidTxnStateError, True],
                open=[errors.LeaderNotAvailableError],
                state=state("CompleteCommit"),
            ),
            "is committed.*CompleteCommit",
        ),
        (
            PaperFinisher(
                ends=[errors.KafkaConnectionError, errors.InvalidTxnStateError],
                state=errors.KafkaConnectionError,
            ),
            "cannot be aborted .* asked for",
        ),
        (
            PaperFinisher(
                ends=[
                    errors.KafkaConnectionError,
                    errors.InvalidProducerIdMappingError,
                    errors.KafkaConnectionError,
                ],
                marks=[OURS],
            ),
            "is committed.*no longer know",
        ),
    ],
    ids=["markers cannot be written", "leader away", "link drops", "marker is ours"],
)
def test_word_does_not_write_again_what_may_be_committed(
    finisher: PaperFinisher, words: str
) -> None:
    """A refused abort and an unresolved commit prove nothing: the brokers are asked again."""
    outcome = redone(finisher)
    assert isinstance(outcome, CommitUnresolvedError)
    assert re.search(words, str(outcome))


@pytest.mark.parametrize(
    ("finisher", "age_s"),
    [
        (PaperFinisher(ends=[errors.ProducerFencedError], gone=frozenset({"orders"})), 10.0),
        (PaperFinisher(ends=[errors.InvalidProducerIdMappingError]), 6.9 * 86400),
        (PaperFinisher(ends=[errors.InvalidProducerIdMappingError]), 10.0),
        (PaperFinisher(ends=[errors.ProducerFencedError], state=state("Empty")), 10.0),
        (PaperFinisher(ends=[errors.InvalidProducerIdMappingError], cluster="another"), 10.0),
        (
            PaperFinisher(
                ends=[errors.InvalidTxnStateError],
                marks=[(8, "a later branch")],
                state=state("CompleteCommit", epoch=3),
            ),
            10.0,
        ),
        (
            PaperFinisher(
                ends=[errors.KafkaConnectionError, True, errors.InvalidTxnStateError],
                state=state("CompleteAbort"),
            ),
            10.0,
        ),
    ],
    ids=[
        "topic deleted",
        "marker expired",
        "forgotten",
        "fenced",
        "another cluster",
        "name used",
        "aborted",
    ],
)
def test_word_stands_where_no_proof_is_to_be_had(finisher: PaperFinisher, age_s: float) -> None:
    """Nothing shows that it is committed, and every server has responded: it is rewritten."""
    assert isinstance(redone(finisher, age_s), PreparedBranchLostError)


def test_branch_given_up_that_is_committed_and_not_visible() -> None:
    """The operator, who might insert its rows manually, learns that they will appear anyway."""
    finisher = PaperFinisher(
        ends=[errors.InvalidTxnStateError, True], open=[True], state=state("CompleteCommit")
    )
    sink = sink_of(finisher)
    how, why = end_ruled(sink, committable(), sink.target)
    assert how is End.UNKNOWN
    assert why.startswith(f"{BRANCH}: it is committed")


# -- the timeout that holds ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own_ms", "setting", "enough"),
    [
        (None, "transaction.max.timeout.ms=900000", "transaction.max.timeout.ms=3600000"),
        (60_000, "transaction_timeout_s=60", "transaction_timeout_s=3600"),
    ],
)
def test_timeout_that_holds_is_judged(own_ms: int | None, setting: str, enough: str) -> None:
    """The sink's own timeout, if it has one: the brokers refuse one that is longer than theirs."""
    allowed = 900_000 if own_ms is None else 7_200_000
    finisher = PaperFinisher(config={"transaction.max.timeout.ms": [allowed]})
    found = list(diagnose(finisher, None, "here", list, own_ms))  # type: ignore[arg-type]
    (judged,) = [one for one in found if "timeout" in one.what]
    assert judged.level is Level.WARNING
    assert judged.what.startswith(f"{setting}: the brokers abort")
    assert f"set {enough} or more" in judged.fix


def test_advice_on_the_timeout_names_the_sinks_own(caplog: pytest.LogCaptureFixture) -> None:
    """After a slow batch and after a loss: raising the brokers' maximum would not help."""
    finisher = PaperFinisher(ends=[errors.InvalidTxnStateError], state=state("CompleteAbort"))
    sink_of(finisher).vote(BRANCH, [committable(age_s=800)])
    (slow,) = caplog.messages
    with pytest.raises(PreparedBranchLostError) as lost:
        outcome(finisher).commit(committable(age_s=901))
    for text in (slow, str(lost.value)):
        assert "transaction_timeout_s= of the sink" in text
