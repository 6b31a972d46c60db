"""An operator's word in the protocol: the only thing above proof, and what it cannot undo."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import ClassVar

import pytest

from sparkonce.errors import (
    CommitRejectedError,
    CommitUnresolvedError,
    ConfigurationError,
    FencedError,
    PreparedBranchLostError,
    SparkOnceError,
)
from sparkonce.model import Committable
from sparkonce.protocol.lease import Lease, NoEntrance
from sparkonce.protocol.operating import claim_again
from sparkonce.protocol.pipeline import CommitPolicy
from sparkonce.protocol.rulings import End, end_ruled
from sparkonce.protocol.transaction import recover
from sparkonce.sinks.capabilities import AbortsDecided
from sparkonce.spark_hooks.checkpoint import UnknownCheckpoint
from sparkonce.txn_log.record import State, TransactionRecord
from sparkonce.txn_log.settlement import Ruling, Settlement
from sparkonce.txn_log.sqlite import SqliteLog
from tests.support.world import Crash, MemorySink, Process, Store, World, at_point

BATCHES = [[[1, 2], [3]], [[4], [5]]]
LEFT = "left"
GIVEN_UP = [Ruling.COMMITTED, Ruling.ABORTED]


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Batch 0 is decided and nothing is committed; the driver is gone."""
    world = World(tmp_path, BATCHES)
    crash_at(world, "decide.after")
    return world


def crash_at(world: World, point: str) -> None:
    process = Process()
    with at_point(point, process.crash) as fault, pytest.raises(Crash):
        world.start(process)
    assert fault.fired


def branches(world: World, sink: str = LEFT) -> tuple[Committable, ...]:
    return newest(world).shares[sink].committables


def newest(world: World) -> TransactionRecord:
    log = SqliteLog(world.path)
    (record,) = [r for r in log.history("orders") if r.id.batch_id == 0]
    log.close()
    return record


def lose(world: World, branch: Committable) -> None:
    del world.stores[LEFT].prepared[str(branch.branch_id)]


def settle(world: World, ruling: Ruling, *chosen: Committable) -> None:
    """As the command does: with a token of its own."""
    log = SqliteLog(world.path)
    head = log.head("orders")
    assert head is not None
    token = log.begin(claim_again(log, head, head.sinks)).token
    words = [
        Settlement(str(branch.branch_id), ruling, "ann@host", "why", 1.0, token)
        for branch in chosen
    ]
    log.settle(newest(world).id, words, token)
    log.close()


def ends(world: World, branch: Committable) -> End:
    """As the command does behind its word, where it reaches the sink."""
    sink = branch.branch_id.sink
    return end_ruled(MemorySink(world.stores[sink], Process(), sink), branch, "memory").how


def fail_commit(
    world: World,
    error: type[Exception],
    times: int = 10**6,
    then: Callable[[], None] = lambda: None,
) -> None:
    """The left sink cannot say what became of its branches; `then` is done in its last failure."""
    left = [times]
    gate = Lock()

    def fail(verb: str) -> None:
        with gate:
            if verb == "commit" and left[0] > 0:
                left[0] -= 1
                if left[0] == 0:
                    then()
                raise error("no answer")

    def prepare(sinks: object) -> None:
        for sink in world.sinks:
            if sink.name == LEFT:
                sink.fail = fail

    world.prepare_sinks = prepare


@pytest.mark.parametrize("ruling", GIVEN_UP)
def test_lost_branch_that_is_settled_keeps_nothing_back(world: World, ruling: Ruling) -> None:
    """All other branches are committed, the query goes on, and the batch ends as settled."""
    lost, kept = branches(world)
    lose(world, lost)
    world.spark.batches = [[[9], [9]], *BATCHES[1:]]  # so that no replay can help
    with pytest.raises(
        PreparedBranchLostError, match=r"sparkonce settle JOB 0 --branch t\d+\.left"
    ):
        world.start(Process())
    settle(world, ruling, lost)
    world.start(Process())
    assert str(kept.branch_id) in world.stores[LEFT].visible
    assert world.stores["right"].rows() == {1: 1, 2: 1, 3: 1, 4: 1, 5: 1}
    assert world.stores[LEFT].rows() == {3: 1, 4: 1, 5: 1}
    record = newest(world)
    assert record.state is State.SETTLED
    assert [(s.ruling, s.who, s.why) for s in record.settled] == [(ruling, "ann@host", "why")]
    assert not any(store.prepared for store in world.stores.values())


@pytest.mark.parametrize("ruling", GIVEN_UP)
def test_branch_that_stands_is_ended_before_the_batch_is_finished(
    world: World, ruling: Ruling
) -> None:
    """An older driver that wakes up cannot commit it any more (I7)."""
    (branch, _) = branches(world)
    settle(world, ruling, branch)
    with at_point("complete.before", lambda: ended.append(standing(world))):
        ended: list[bool] = []
        world.start(Process())
    assert ended == [False]
    zombie = MemorySink(world.stores[LEFT], Process(), LEFT)
    with pytest.raises(PreparedBranchLostError):
        zombie.commit(branch)


def standing(world: World) -> bool:
    return any(".a1." in name for name in world.stores[LEFT].prepared)


@pytest.mark.parametrize("error", [CommitUnresolvedError, CommitRejectedError])
def test_branch_that_is_redone_is_ended_and_written_again(
    world: World, error: type[Exception]
) -> None:
    """Its sink cannot say what became of it: the word stands in for the proof, once."""
    chosen = branches(world)
    fail_commit(world, error)
    with pytest.raises(error):
        world.start(Process())
    settle(world, Ruling.REDO, *chosen)
    fail_commit(world, error, times=2)
    world.start(Process())
    world.prepare_sinks = lambda sinks: None
    world.start(Process())
    world.check()
    record = newest(world)
    assert (record.state, record.revision) == (State.SETTLED, 1)
    assert record.lost == chosen
    assert {c.branch_id.write_pass for c in record.shares[LEFT].committables} == {1}


def test_branch_that_no_replay_writes_again_is_not_ended(world: World) -> None:
    """It could still be committed; ended, its rows would have to be put in by hand."""
    chosen = branches(world)
    settle(world, Ruling.REDO, *chosen)
    world.spark.committed = 0  # an operator has copied commits/0, or the policy was another
    fail_commit(world, CommitUnresolvedError)
    with pytest.raises(CommitUnresolvedError, match="no answer"):
        world.start(Process())
    assert standing(world)
    world.prepare_sinks = lambda sinks: None
    world.start(Process())
    world.check()


def test_branch_whose_commit_is_proven_is_not_redone(world: World) -> None:
    """Proof, where there is one, stands above the word: nothing is written twice (I4)."""
    chosen = branches(world)
    settle(world, Ruling.REDO, *chosen)
    for branch in chosen:
        MemorySink(world.stores[LEFT], Process(), LEFT).commit(branch)
    world.start(Process())
    world.check()
    record = newest(world)
    assert (record.state, record.revision) == (State.SETTLED, 0)


def test_commit_whose_answer_is_lost_is_not_redone(world: World) -> None:
    """The word is older than the commit, so it stands in for no proof of that: rows came twice."""

    class LosesItsAnswer(MemorySink):
        def commit(self, committable: Committable) -> None:
            if committable in chosen and len(asked) < 8:
                asked.append(committable)
                with contextlib.suppress(PreparedBranchLostError):
                    if len(asked) <= len(chosen):
                        super().commit(committable)
                raise CommitUnresolvedError("no answer", committable.branch_id)
            super().commit(committable)

    chosen, asked = branches(world), list[Committable]()
    settle(world, Ruling.REDO, *chosen)

    def prepare(sinks: Sequence[MemorySink]) -> None:
        sinks[0].__class__ = LosesItsAnswer

    world.prepare_sinks = prepare
    world.start(Process())
    assert asked
    world.check()


@pytest.mark.parametrize("error", [CommitUnresolvedError, CommitRejectedError])
def test_branch_that_was_visible_all_along_is_not_redone(
    world: World, error: type[SparkOnceError]
) -> None:
    """An abort undoes no commit, and says nothing: behind it the sink is asked once more (I4)."""

    class AwayAtFirst(MemorySink):
        """Its server is back when it is asked to abort."""

        def commit(self, committable: Committable) -> None:
            if committable in chosen and self.calls[-1:] != ["abort"]:
                raise error("no answer")
            super().commit(committable)

    chosen = branches(world)
    settle(world, Ruling.REDO, *chosen)
    for branch in chosen:
        MemorySink(world.stores[LEFT], Process(), LEFT).commit(branch)

    def prepare(sinks: Sequence[MemorySink]) -> None:
        sinks[0].__class__ = AwayAtFirst

    world.prepare_sinks = prepare
    world.start(Process())
    world.check()
    record = newest(world)
    assert (record.state, record.revision) == (State.SETTLED, 0)


def test_branch_of_which_something_stands_is_not_redone(world: World) -> None:
    """Its sink says so after it has ended the rest: nothing is written again (I4)."""

    class HalfVisible(MemorySink, AbortsDecided):
        def abort_decided(self, committable: Committable) -> None:
            self.abort(committable)
            raise CommitRejectedError("one of its files stands", committable.branch_id)

    chosen = branches(world)
    settle(world, Ruling.REDO, *chosen)
    fail_commit(world, CommitUnresolvedError)
    fail = world.prepare_sinks

    def prepare(sinks: Sequence[MemorySink]) -> None:
        fail(sinks)
        sinks[0].__class__ = HalfVisible

    world.prepare_sinks = prepare
    with pytest.raises(CommitUnresolvedError, match="one of its files stands"):
        world.start(Process())
    record = newest(world)
    assert (record.state, record.revision) == (State.DECIDED, 0)
    assert not world.stores[LEFT].visible


def test_last_word_counts(world: World) -> None:
    """Until the batch is finished an operator may think again; all words are kept."""
    lost, _ = branches(world)
    lose(world, lost)
    settle(world, Ruling.ABORTED, lost)
    settle(world, Ruling.REDO, lost)
    world.start(Process())
    world.check()
    assert [s.ruling for s in newest(world).settled] == [Ruling.ABORTED, Ruling.REDO]


@pytest.mark.parametrize("policy", ["immediate", "after_checkpoint"])
@pytest.mark.parametrize("point", ["decide.after", "commit.before"])
@pytest.mark.parametrize("ruling", GIVEN_UP)
def test_driver_that_ran_on_is_fenced_by_the_word(
    tmp_path: Path, policy: CommitPolicy, point: str, ruling: Ruling
) -> None:
    """It stood before its first commit: what is ruled on has ended, and never shows (I6, I7)."""
    world = World(tmp_path, BATCHES, policy)

    def rule() -> None:
        chosen = branches(world)
        settle(world, ruling, *chosen)
        assert [ends(world, branch) for branch in chosen] == [End.ENDED, End.ENDED]

    told = "operator's command: start the query again"
    with at_point(point, rule), pytest.raises(FencedError, match=told):
        world.start(Process())
    assert newest(world).state is State.DECIDED
    assert not world.stores[LEFT].visible
    world.start(Process())
    is_as_ruled(world)


@pytest.mark.parametrize("ruling", GIVEN_UP)
def test_driver_that_resumes_in_its_recovery_reports_no_loss(
    tmp_path: Path, ruling: Ruling
) -> None:
    """Spark has moved on, so the branch looks lost for good: but an operator has ended it.

    The error of a loss would ask for a ruling, and for the rows to be entered, a second time.
    """
    world = World(tmp_path, BATCHES, "after_checkpoint")
    crash_at(world, "commit.before")

    def rule() -> None:
        chosen = branches(world)
        settle(world, ruling, *chosen)
        assert [ends(world, branch) for branch in chosen] == [End.ENDED, End.ENDED]

    with at_point("commit.before", rule) as fault, pytest.raises(FencedError):
        world.start(Process())
    assert fault.fired
    world.start(Process())
    is_as_ruled(world)


@pytest.mark.parametrize("policy", ["immediate", "after_checkpoint"])
@pytest.mark.parametrize("ruling", GIVEN_UP)
def test_driver_that_repeats_a_commit_is_stopped_by_the_word(
    tmp_path: Path, policy: CommitPolicy, ruling: Ruling
) -> None:
    """The sink was away for both, and comes back to the driver first: it shows nothing (I6, I7)."""
    world = World(tmp_path, BATCHES, policy)
    world.commit_timeout_s = 60.0
    fail_commit(world, ConnectionError, 2, lambda: settle(world, ruling, *branches(world)))
    with pytest.raises(FencedError):
        world.start(Process())
    assert len(world.stores[LEFT].prepared) == 2
    assert not world.stores[LEFT].visible
    assert newest(world).state is State.DECIDED
    world.prepare_sinks = lambda sinks: None
    world.start(Process())
    is_as_ruled(world)


def is_as_ruled(world: World) -> None:
    """Batch 0 shows in the right sink alone, and nothing is left over."""
    assert newest(world).state is State.SETTLED
    assert world.stores[LEFT].rows() == {4: 1, 5: 1}
    assert world.stores["right"].rows() == {1: 1, 2: 1, 3: 1, 4: 1, 5: 1}
    assert not any(store.prepared for store in world.stores.values())


@pytest.mark.parametrize("ruling", GIVEN_UP)
def test_ruled_branch_that_is_visible_after_all_is_told(
    world: World, ruling: Ruling, caplog: pytest.LogCaptureFixture
) -> None:
    """No abort takes its rows back, so whoever put them in by hand has to hear of it."""
    (branch, _) = branches(world)
    settle(world, ruling, branch)
    MemorySink(world.stores[LEFT], Process(), LEFT).commit(branch)
    assert ends(world, branch) is End.VISIBLE
    world.start(Process())
    (told,) = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert f"{branch.branch_id} is committed" in told
    assert f"settled as {ruling}" in told
    assert str(branch.branch_id) in world.stores[LEFT].published[0]  # to readers of manifests, too


def test_ruled_branch_that_cannot_be_ended_is_not_asked_to_commit(world: World) -> None:
    """Behind an abort that failed, a commit would show it."""
    (branch, _) = branches(world)
    sink = MemorySink(world.stores[LEFT], Process(), LEFT)

    def away(verb: str) -> None:
        raise ConnectionError("no answer")

    sink.fail = away
    ended = end_ruled(sink, branch, "memory")
    assert (ended.how, ended.why, sink.calls) == (End.UNKNOWN, "no answer", ["abort"])


def test_ruled_branch_of_another_target_is_not_called_ended(world: World) -> None:
    """What is absent where the sink writes now proves nothing of where the branch stood."""
    (branch, _) = branches(world)
    sink = MemorySink(Store(), Process(), LEFT)
    ended = end_ruled(sink, branch, "elsewhere")
    assert (ended.how, sink.calls) == (End.UNKNOWN, ["abort"])
    assert "elsewhere" in end_ruled(None, branch, "elsewhere").why

    def foreign(verb: str) -> None:
        raise KeyError("files")

    sink.fail = foreign
    why = end_ruled(sink, branch, "elsewhere").why
    assert why == "it was in elsewhere, and the sink has memory now: 'files'"


@pytest.mark.parametrize("ruling", GIVEN_UP)
def test_ruled_branch_on_a_server_that_went_back_in_time(
    world: World, caplog: pytest.LogCaptureFixture, ruling: Ruling
) -> None:
    """A backup has all of the batch prepared again: the word holds, the others are committed."""

    class Listing(MemorySink):
        lists_uncommitted_only: ClassVar[bool] = True

    def listing(sinks: Sequence[MemorySink]) -> None:
        sinks[0].__class__ = Listing

    world.prepare_sinks = listing
    ruled, kept = branches(world)
    store, backup = world.stores[LEFT], dict(world.stores[LEFT].prepared)
    settle(world, ruling, ruled)
    world.start(Process())
    is_settled(world)
    for name, rows in backup.items():
        store.visible.pop(name, None)
        store.prepared[name] = rows
    world.start(Process())
    is_settled(world)
    told = [r.getMessage() for r in caplog.records if "went back in time" in r.getMessage()]
    assert [str(kept.branch_id) in line for line in told] == [True]


def is_settled(world: World) -> None:
    """Of batch 0 the left sink shows the branch that was not ruled on, and nothing is left over."""
    assert newest(world).state is State.SETTLED
    assert world.stores[LEFT].rows() == {3: 1, 4: 1, 5: 1}
    assert world.stores["right"].rows() == {1: 1, 2: 1, 3: 1, 4: 1, 5: 1}
    assert not any(store.prepared for store in world.stores.values())


@pytest.mark.parametrize("point", ["commit.before", "complete.before", "complete.after"])
def test_driver_crashes_while_it_goes_by_the_word(world: World, point: str) -> None:
    """A second start does the same."""
    lost, _ = branches(world)
    lose(world, lost)
    settle(world, Ruling.ABORTED, lost)
    crash_at(world, point)
    world.start(Process())
    assert world.stores["right"].rows() == {1: 1, 2: 1, 3: 1, 4: 1, 5: 1}
    assert world.stores[LEFT].rows() == {3: 1, 4: 1, 5: 1}
    assert newest(world).state is State.SETTLED


def test_sink_that_is_gone_for_good_keeps_no_start_back(world: World) -> None:
    """Once all of its branches are settled, the guard asks for it no more."""
    log = SqliteLog(world.path)
    claim = world.claim(sinks={"right": "memory"})
    with pytest.raises(ConfigurationError, match="branches of the sink 'left' in memory"):
        log.begin(claim)
    settle(world, Ruling.ABORTED, *branches(world))
    log.begin(claim)


def test_recovery_without_the_checkpoint_decides_nothing(tmp_path: Path) -> None:
    """What is decided is finished; what is prepared stays, for only Spark knows; no orphan is."""
    world = World(tmp_path, BATCHES, commit="after_checkpoint")
    crash_at(world, "hold.after")
    recover_blind(world)
    assert newest(world).state is State.PREPARED
    assert all(len(store.prepared) == 2 for store in world.stores.values())
    world.start(Process())
    world.check()


def test_recovery_without_the_checkpoint_commits_what_is_decided(world: World) -> None:
    """And leaves a loss to Spark's replay."""
    lose(world, branches(world)[0])
    recover_blind(world)
    assert newest(world).state is State.DECIDED
    assert world.stores["right"].rows() == {1: 1, 2: 1, 3: 1}
    world.start(Process())
    world.check()


def recover_blind(world: World) -> None:
    log = SqliteLog(world.path)
    head = log.head("orders")
    assert head is not None
    claim = claim_again(log, head, head.sinks)
    driver = world.driver(Process(), batch_id=claim.batch_id, offsets={})
    pipeline = replace(driver.lease.pipeline, checkpoint=UnknownCheckpoint("hdfs:/ckpt"))
    recover(Lease(pipeline, driver.incarnation, NoEntrance()))
