"""The protocol on a world in memory: every crash point, every verb that fails (I1 to I8)."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Never
from unittest.mock import Mock

import pytest

from sparkonce import failpoints
from sparkonce.errors import (
    BatchInterruptedError,
    CommitUnresolvedError,
    ConfigurationError,
    DecisionUnknownError,
    FencedError,
    LogUnavailableError,
    PreparedBranchLostError,
    PrepareRejectedError,
    ProtocolError,
    SinkUnavailableError,
)
from sparkonce.failpoints import InjectedError
from sparkonce.model import BranchId, Committable, Owner
from sparkonce.protocol import forgetting
from sparkonce.protocol.driver import Driver
from sparkonce.protocol.pipeline import CommitPolicy, Patience
from sparkonce.sinks.capabilities import CommitsMany, ForgetsProofs
from sparkonce.sinks.verbs import commit_each
from sparkonce.steps import POINTS
from sparkonce.storage import LocalFolder
from sparkonce.txn_log import base as log_base
from sparkonce.txn_log.document import DocumentLog
from sparkonce.txn_log.folder import FolderPlace
from sparkonce.txn_log.record import Incarnation, Share, State, TransactionRecord
from sparkonce.txn_log.sqlite import SqliteLog
from tests.support.world import (
    QUERY_ID,
    Crash,
    Handle,
    MemoryBatch,
    MemoryCheckpoint,
    MemoryEntrance,
    MemorySink,
    Process,
    World,
    at_point,
)

BATCHES = [[[1, 2], [3]], [[], []], [[4], []], [[5, 6], [7, 8]]]

FINISHES = ("finish.before",)
ABANDONS = ("abandon.before", "abandon.after")
IN_RECOVERY = {*FINISHES, *ABANDONS}
AFTER_A_LOSS = {"rewrite.before", "amend.before", "amend.after"}
WAITING = {"hold.before", "hold.after"}

POLICIES: tuple[CommitPolicy, ...] = ("immediate", "after_checkpoint")


def steps(policy: CommitPolicy) -> list[str]:
    """The points that an undisturbed run reaches."""
    never = IN_RECOVERY | AFTER_A_LOSS | (WAITING if policy == "immediate" else set())
    return [point for point in POINTS if point not in never]


EVERY_STEP = [(policy, point) for policy in POLICIES for point in steps(policy)]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, BATCHES)


def raise_injected() -> None:
    raise InjectedError


def crash_at(world: World, point: str, *, nth: int = 1) -> None:
    """Start the query in a process that crashes the `nth` time it reaches the point."""
    process = Process()
    with at_point(point, process.crash, nth=nth) as fault, pytest.raises(Crash):
        world.start(process)
    assert fault.fired


def fail_at(world: World, point: str) -> None:
    """Start the query, and let it fail at the point."""
    with at_point(point, raise_injected) as fault, pytest.raises(InjectedError):
        world.start(Process())
    assert fault.fired


def raising(verb: str, *errors: Exception) -> Callable[[str], None]:
    """For `World.on_call`: raise one error at each call of the verb, until none is left."""
    left = iter(errors)

    def act(called: str) -> None:
        if called == verb and (error := next(left, None)):
            raise error

    return act


def always_raising(verb: str, text: str) -> Callable[[str], None]:
    """For `World.on_call`: raise a ConnectionError at every call of the verb."""

    def act(called: str) -> None:
        if called == verb:
            raise ConnectionError(text)

    return act


def test_undisturbed_run_delivers_every_row_once(world: World) -> None:
    """Each batch is written once, the empty one is decided too, and none is drained."""
    world.start(Process())
    world.check()
    assert world.spark.drained == []
    history = world.history()
    assert [r.id.batch_id for r in history] == [3, 2, 1, 0]
    assert {r.state for r in history} == {State.COMPLETE}


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize(("policy", "point"), EVERY_STEP)
def test_driver_crashes_at(world: World, policy: CommitPolicy, point: str, nth: int) -> None:
    """After a crash at any point the next driver continues, and every row is visible once."""
    world.commit = policy
    process = Process()
    with at_point(point, process.crash, nth=nth) as fault:
        while not fault.fired:
            # begin and recover come once per start, so those faults need more starts to fire.
            try:
                world.start(process)
            except Crash:
                break
            world.spark.batches = [*world.spark.batches, [[100 + world.spark.runs]]]
    assert fault.fired
    world.start(Process())
    world.check()


@pytest.mark.parametrize("second", list(POINTS))
@pytest.mark.parametrize(
    ("policy", "first", "recovery"),
    [
        ("immediate", "decide.before", ()),
        ("immediate", "decide.after", FINISHES),
        ("immediate", "commit.after", FINISHES),
        ("after_checkpoint", "hold.after", ABANDONS),
        ("after_checkpoint", "deliver.after", ABANDONS),
        ("after_checkpoint", "decide.before", FINISHES),
        ("after_checkpoint", "commit.after", FINISHES),
    ],
)
def test_driver_crashes_and_its_successor_crashes_in_recovery(
    world: World, policy: CommitPolicy, first: str, recovery: Sequence[str], second: str
) -> None:
    """A crash during recovery changes nothing: the third driver delivers every row once."""
    world.commit = policy
    for point in (first, second):
        process = Process()
        with at_point(point, process.crash) as fault, contextlib.suppress(Crash):
            world.start(process)
        assert fault.fired is (point in {*steps(policy), *recovery})
    world.start(Process())
    world.check()


@pytest.mark.parametrize(
    ("policy", "point"), [step for step in EVERY_STEP if not step[1].startswith("recover")]
)
def test_error_at(world: World, policy: CommitPolicy, point: str) -> None:
    """An error fails the query; the next start delivers every row once."""
    world.commit = policy
    with at_point(point, raise_injected) as fault:
        with pytest.raises((InjectedError, CommitUnresolvedError, PrepareRejectedError)):
            world.start(Process())
    assert fault.fired
    world.start(Process())
    world.check()


def test_error_before_the_decision_aborts_at_once(world: World) -> None:
    """The branches are aborted when the query fails, so no reader waits for a restart."""
    fail_at(world, "vote.after")
    assert world.prepared() == world.visible() == [0, 0]


def test_error_after_the_decision_aborts_nothing(world: World) -> None:
    """After the decision only the log says which branches are committed (I2, I3)."""
    fail_at(world, "decide.after")
    assert world.prepared() == [2, 2]
    assert len(SqliteLog(world.path).unfinished("orders")) == 1


def test_replayed_complete_batch_is_drained_and_not_written(world: World) -> None:
    """A batch without commits/N is read to its end, so that Spark's own state advances."""
    world.start(Process())
    world.spark.committed -= 1
    world.start(Process())
    assert world.spark.drained == [3]
    world.check()


def test_replay_of_a_complete_batch_with_other_rows_is_reported(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """After a change of code and a rolled-back checkpoint, the new rows are written nowhere."""
    world.start(Process())
    world.spark.committed -= 1
    world.spark.batches = [*world.spark.batches[:3], [[5, 6], [7, 9]]]
    world.start(Process())
    reports = [r.getMessage() for r in caplog.records if "its replay differs" in r.getMessage()]
    assert len(reports) == 2
    assert "batch 3 of pipeline 'orders'" in reports[0]
    assert "sink 'left', the replay has other values in its 4 rows" in reports[0]
    world.spark.committed -= 1
    world.spark.batches = [*world.spark.batches[:3], [[5, 6], [7]]]
    world.start(Process())
    assert "sink 'right', it had 4 rows, and the replay has 3" in caplog.text


def test_replay_of_the_same_rows_is_not_reported(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.start(Process())
    for batch in (3, 1):  # the second one is empty
        world.spark.committed = batch - 1
        world.start(Process())
    assert "differs" not in caplog.text


def test_commit_with_a_lost_answer_is_repeated(world: World) -> None:
    """The commit succeeded and its answer was lost: the second call changes nothing (I4)."""
    world.on_call(raising("after commit", ConnectionError("the answer is lost")), "left")
    world.start(Process())
    world.check()


@pytest.mark.parametrize("receiver", ["the process", "another thread than the main one"])
def test_ctrl_c_ends_the_repeats_of_a_commit(world: World, receiver: str) -> None:
    """The calls that have begun end, and no other begins: it was repeated for 600 s.

    The kernel may give the signal to any thread, and Python handles it in the main one.
    """
    calls: list[int] = []

    def unreachable(verb: str) -> None:
        if verb == "commit":
            calls.append(1)
            if len(calls) == 3:
                if receiver == "the process":
                    os.kill(os.getpid(), signal.SIGINT)
                else:
                    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            raise ConnectionError("down")

    world.on_call(unreachable, "right")
    world.commit_timeout_s = 30.0
    driver = world.driver(process := Process())
    # A shell ignores the signal for what it starts in the background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            driver.deliver(world.batch(process))
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(calls) < 20  # two branches; 40 in 30 s
    world.prepare_sinks = lambda sinks: None
    world.start(Process())
    world.check()


def test_commit_that_stays_unresolved_fails_the_query_and_the_next_start_carries_on(
    world: World,
) -> None:
    """After commit_timeout_s the query fails with CommitUnresolvedError; nothing is aborted."""
    world.on_call(always_raising("commit", "down"), "right")
    with pytest.raises(CommitUnresolvedError, match="right.*down"):
        world.start(Process())
    assert len(world.stores["right"].prepared) == 2
    assert len(world.stores["left"].visible) == 2
    world.prepare_sinks = lambda sinks: None
    world.start(Process())
    world.check()


@pytest.mark.parametrize("away_for", [3, 10**6])
def test_log_that_is_away_puts_the_repeat_of_a_commit_off(
    world: World, monkeypatch: pytest.MonkeyPatch, away_for: int
) -> None:
    """An operator may have ruled meanwhile, so no commit is retried until the log is reachable."""
    world.commit_timeout_s = 60.0 if away_for == 3 else 0.2
    calls: list[str] = []
    check_token = SqliteLog.check_token

    def unreachable(self: SqliteLog, incarnation: Incarnation) -> None:
        calls.append("check")
        if calls.count("check") <= away_for:
            raise LogUnavailableError("unreachable; nothing was written")
        check_token(self, incarnation)

    def fail_once(verb: str) -> None:
        if verb == "commit":
            calls.append(verb)
            if calls == ["commit"]:
                raise ConnectionError("down")

    monkeypatch.setattr(SqliteLog, "check_token", unreachable)
    world.on_call(fail_once, "left")
    world.spark.batches = [[[1]], [[2]]]
    if away_for == 3:
        world.start(Process())
        assert calls == ["commit", *["check"] * 4, "commit", "commit"], "of two batches"
    else:
        with pytest.raises(
            CommitUnresolvedError, match="down; not tried again until the log.*unreachable; nothing"
        ):
            world.start(Process())
        assert set(calls[1:]) == {"check"}
        assert len(world.stores["left"].prepared) == 1
        world.start(Process())
    world.check()


def test_only_branches_of_unknown_outcome_are_committed_again(world: World) -> None:
    """commit_many returns an outcome for each branch; only unresolved ones are retried."""
    asked: list[list[str]] = []

    class Batching(MemorySink, CommitsMany):
        def commit_many(self, committables: Any) -> Any:
            asked.append([str(c.branch_id) for c in committables])
            if len(asked) == 1:
                return [*commit_each(self, committables[:1]), CommitUnresolvedError("no answer")]
            return commit_each(self, committables)

    world.kinds["left"] = Batching
    driver = world.driver(process := Process())
    counted = {"commit.before": 0, "commit.after": 0}

    def count(point: str, where: Any) -> None:
        if point in counted and where["sink"] == "left":
            counted[point] += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failpoints, "handler", count)
        driver.deliver(world.batch(process))
    assert [len(names) for names in asked] == [2, 1]
    assert asked[1] == asked[0][1:]
    assert counted == {"commit.before": 1, "commit.after": 1}
    assert world.stores["left"].rows() == {1: 1, 2: 1, 3: 1}


def test_sink_whose_commit_of_a_batch_raises_is_asked_again(world: World) -> None:
    """An error that `commit_many` raises leaves the outcome of every branch unknown."""
    asked: list[int] = []

    class Raising(MemorySink, CommitsMany):
        def commit_many(self, committables: Any) -> Any:
            asked.append(len(committables))
            outcomes = commit_each(self, committables)
            if len(asked) == 1:
                raise ConnectionError("the answer is lost")
            return outcomes

    world.kinds["left"] = Raising
    driver = world.driver(process := Process())
    driver.deliver(world.batch(process))
    assert asked == [2, 2]
    assert world.stores["left"].rows() == {1: 1, 2: 1, 3: 1}


def test_batch_is_published_when_all_sinks_have_committed(world: World) -> None:
    """Its rows are then visible in every store; an unresolved publication is retried."""
    lose_answer = raising("after publish", CommitUnresolvedError("the answer is lost"))

    def look(verb: str) -> None:
        if verb == "publish":
            rows = [store.rows() for store in world.stores.values()]
            assert rows[0] == rows[1]
            assert world.history()[0].state is State.DECIDED
        lose_answer(verb)

    world.commit_timeout_s = 30.0
    world.on_call(look, "left", "right")
    world.start(Process())
    world.check()
    # They publish in parallel: either may be the one that is retried.
    assert sorted(sink.calls.count("publish") for sink in world.sinks) == [4, 5]


def lose(world: World, store: str, *numbers: int) -> None:
    """Drop these prepared branches of the store, as a server does after a timeout."""
    prepared = world.stores[store].prepared
    for name in [list(prepared)[n] for n in numbers]:
        del prepared[name]


def test_batch_is_written_again_when_executors_are_lost(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """What the interrupted writes have prepared is aborted before the next write."""
    world.spark.interruptions = 2
    prepared: list[int] = []
    original = MemoryBatch.write

    def write(batch: MemoryBatch, *arguments: Any) -> Mapping[str, Share]:
        prepared.extend(world.prepared())
        return original(batch, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryBatch, "write", write)
        world.start(Process())
    world.check()
    assert prepared[:6] == [0] * 6
    assert caplog.text.count("batch 0 was interrupted. It is written again") == 2


def test_batch_that_is_interrupted_each_time_is_in_no_sink(world: World) -> None:
    world.spark.interruptions = 1_000
    with pytest.raises(BatchInterruptedError):
        world.start(Process())
    assert world.prepared() == world.visible() == [0, 0]
    assert not world.history()
    world.spark.interruptions = 0
    world.start(Process())
    world.check()


def test_rewrite_is_repeated_when_executors_are_lost(world: World) -> None:
    crash_at(world, "decide.after")
    lose(world, "left", 0)
    world.spark.interruptions = 1
    world.start(Process())
    world.check()
    assert world.history()[-1].revision == 1


@pytest.mark.parametrize("numbers", [[0], [1], [0, 1]])
def test_lost_branch_is_written_again_from_the_replay(world: World, numbers: list[int]) -> None:
    """Only lost branches are rewritten; the decision is amended and lists them (I3)."""
    crash_at(world, "decide.after")
    lose(world, "left", *numbers)
    world.start(Process())
    world.check()
    amended = world.history()[-1]
    assert (amended.revision, len(amended.lost)) == (1, len(numbers))
    assert {c.branch_id.write_pass for c in amended.shares["right"].committables} == {0}
    passes = sorted(c.branch_id.write_pass for c in amended.shares["left"].committables)
    assert passes == [0] * (2 - len(numbers)) + [1] * len(numbers)
    assert amended.shares["left"].rows == 3


def test_branch_written_again_that_is_too_old_is_not_named(world: World) -> None:
    """Its server may have dropped it already: the decision stays unchanged (I3)."""

    class SlowAgain(MemorySink):
        def preCommit(self, handle: Handle) -> Committable:
            done = super().preCommit(handle)
            is_again = handle.branch_id.write_pass > 0
            return Committable(done.branch_id, safe_until=time.time() if is_again else None)

    crash_at(world, "decide.after")
    lose(world, "left", 0)
    world.kinds["left"] = SlowAgain
    with pytest.raises(PrepareRejectedError, match=r"'left' prepared a branch .* may have dropped"):
        world.start(Process())
    (record,) = world.history()
    assert (record.state, record.revision, record.lost) == (State.DECIDED, 0, ())
    assert world.prepared() == [0, 0]
    world.kinds.clear()
    world.start(Process())
    world.check()


@pytest.mark.parametrize("store", ["left", "right"])
@pytest.mark.parametrize("point", [*sorted(AFTER_A_LOSS), *steps("immediate")])
def test_driver_crashes_while_it_writes_lost_branches_again(
    world: World, point: str, store: str
) -> None:
    """A crash anywhere in a rewrite duplicates no row."""
    crash_at(world, "decide.after")
    lose(world, store, 0)
    crash_at(world, point)
    world.start(Process())
    world.check()


def test_branch_that_is_lost_twice_is_written_twice_more(world: World) -> None:
    crash_at(world, "decide.after")
    lose(world, "left", 0)
    crash_at(world, "amend.after")
    rewritten = [name for name in world.stores["left"].prepared if ".p1." in name]
    del world.stores["left"].prepared[rewritten[0]]
    world.start(Process())
    world.check()
    assert world.history()[-1].revision == 2


def test_branch_lost_between_decision_and_commit_is_written_again_at_once(world: World) -> None:
    """The running driver still has the batch, so no restart is needed."""
    with at_point("decide.after", lambda: lose(world, "right", 0)) as fault:
        world.start(Process())
    assert fault.fired
    world.check()


def test_sink_that_is_lost_whole_takes_a_replay_with_other_partitions(world: World) -> None:
    """The sums over all partitions are compared, so the replay may have other partitions."""
    crash_at(world, "decide.after")
    lose(world, "left", 0, 1)
    world.spark.batches = [[[3], [], [2], [1]], *BATCHES[1:]]
    world.start(Process())
    world.check()


@pytest.mark.parametrize(
    ("replay", "difference"),
    [
        ([[1, 99], [3]], "partition 0: the replay has other values in its 2 rows"),
        ([[1], [3, 2]], "partition 0: it had 2 rows, and the replay has 1"),
        ([[], [3]], "partition 0: one of the two has no rows"),
    ],
)
def test_replay_with_other_rows_is_never_taken_for_the_lost_ones(
    world: World, replay: list[list[int]], difference: str
) -> None:
    """Each start stops with an error that names the branch, its rows and possible causes."""
    crash_at(world, "decide.after")
    lose(world, "left", 0)
    world.spark.batches = [replay, *BATCHES[1:]]
    message = rf"batch 0 .*\(2 rows\).*'left', {difference}.*writers=.*start once as before"
    for _ in range(2):
        with pytest.raises(PreparedBranchLostError, match=message):
            world.start(Process())
        assert not any(".p1." in name for name in world.stores["left"].prepared)
    assert world.stores["right"].rows() == {1: 1, 2: 1, 3: 1}
    assert len(SqliteLog(world.path).unfinished("orders")) == 1
    assert world.spark.committed == -1


def test_loss_that_spark_does_not_replay_stops_the_pipeline(world: World) -> None:
    """With commit="after_checkpoint" Spark does not replay it: an operator must settle it."""
    world.commit = "after_checkpoint"
    crash_at(world, "decide.before")
    lose(world, "left", 0)
    for _ in range(2):
        with pytest.raises(PreparedBranchLostError, match="does not replay the batch any more"):
            world.start(Process())
    assert world.spark.committed == 0


def test_loss_of_what_was_prepared_is_told_where_the_checkpoint_cannot_be_read(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was decided after Spark's commit, so no start replays it: the error says that."""
    world.commit = "after_checkpoint"
    crash_at(world, "decide.after")
    lose(world, "left", 0)
    driver = world.driver(Process())
    monkeypatch.setattr(MemoryCheckpoint, "committed", lambda self: None)
    with pytest.raises(PreparedBranchLostError, match="does not replay the batch any more"):
        driver.recover()


def test_batch_waits_for_sparks_checkpoint(world: World) -> None:
    """It is prepared and logged when `deliver` returns, and visible once commits/N exists."""
    world.commit = "after_checkpoint"
    driver = world.driver(process := Process())
    driver.recover()
    driver.deliver(world.batch(process))
    assert world.prepared() == [2, 2]
    assert not driver.commit_pending()
    assert world.visible() == [0, 0]
    world.spark.committed = 0
    assert driver.commit_pending()
    assert world.visible() == [2, 2]
    assert [r.state for r in world.history()] == [State.COMPLETE]


def test_run_that_ends_while_it_waits_for_a_token_takes_none(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a stopped run would fence its successor as soon as the log is reachable again."""

    def unreachable(self: SqliteLog, claim: object) -> None:
        ended.append(claim)
        raise LogUnavailableError("unreachable; nothing was written")

    def may_repeat() -> None:
        if ended:
            raise ProtocolError("the run was stopped")

    ended: list[object] = []
    monkeypatch.setattr(SqliteLog, "begin", unreachable)
    with pytest.raises(ProtocolError, match="stopped"):
        world.driver(Process(), may_repeat=may_repeat)
    assert len(ended) == 1


@pytest.mark.parametrize(
    "point",
    [
        "decide.before",
        "decide.after",
        "commit.before",
        "commit.after",
        "complete.before",
        "complete.after",
    ],
)
def test_settling_that_is_interrupted_goes_on(world: World, point: str) -> None:
    """Spark does not replay the batch, so after Ctrl-C in `close` the next call finishes it."""
    world.commit = "after_checkpoint"
    driver = world.driver(process := Process())
    driver.deliver(world.batch(process))
    world.spark.committed = 0

    def interrupt() -> None:
        raise KeyboardInterrupt

    with at_point(point, interrupt) as fault, pytest.raises(KeyboardInterrupt):
        driver.commit_pending()
    assert fault.fired
    assert driver.commit_pending()
    assert world.visible() == [2, 2]
    if point == "complete.after":
        assert [sink.calls.count("commit") for sink in world.sinks] == [2, 2]
    assert [r.state for r in world.history()] == [State.COMPLETE]


def test_next_batch_is_refused_while_one_is_undecided(world: World) -> None:
    """Batch N+1 begins only when Spark's commit log has N (I5)."""
    world.commit = "after_checkpoint"
    driver = world.driver(process := Process())
    driver.deliver(world.batch(process))
    world.spark.committed = 0
    batch = world.batch(process)
    world.spark.committed = -1
    with pytest.raises(ProtocolError, match="has no batch 0 yet"):
        driver.deliver(batch)


def test_prepared_batch_that_spark_did_not_commit_is_abandoned_before_it_is_aborted(
    world: World,
) -> None:
    """Else an older driver could still decide branches that are aborted already."""
    world.commit = "after_checkpoint"
    crash_at(world, "hold.after")
    fail_at(world, "abandon.after")
    assert [r.state for r in world.history()] == [State.ABANDONED]
    assert world.prepared() == [2, 2]
    world.start(Process())
    world.check()


@pytest.mark.parametrize(("committed", "state"), [(0, State.COMPLETE), (None, State.PREPARED)])
def test_batch_that_spark_commits_while_the_log_is_unreachable_is_not_abandoned(
    world: World, monkeypatch: pytest.MonkeyPatch, committed: int | None, state: State
) -> None:
    """A paused driver's Spark goes on meanwhile: of an abandoned batch it would replay nothing.

    Where its commit log cannot be read by then, nobody can know.
    """
    world.commit = "after_checkpoint"
    crash_at(world, "hold.after")
    driver = world.driver(Process())
    abandon, away = SqliteLog.abandon, [True, False]

    def unreachable(self: SqliteLog, record: TransactionRecord, token: int) -> TransactionRecord:
        if away.pop(0):
            world.spark.committed = committed
            raise LogUnavailableError("unreachable; nothing was written")
        return abandon(self, record, token)

    with monkeypatch.context() as patch:
        patch.setattr(SqliteLog, "abandon", unreachable)
        driver.recover()
    assert [r.state for r in world.history()] == [state]
    world.spark.committed = 0
    world.start(Process())
    world.check()


def test_checkpoint_that_has_not_begun_the_batch_abandons_nothing(world: World) -> None:
    """It may be an older copy: Spark may have committed the batch in the other one."""
    world.commit = "after_checkpoint"
    crash_at(world, "hold.after")
    world.spark.begun = -1
    driver = world.driver(process := Process())
    driver.recover()
    assert [r.state for r in world.history()] == [State.PREPARED]
    assert world.prepared() == [2, 2]
    driver.deliver(world.batch(process))  # Spark recreates it here, with the same offsets
    assert world.prepared() == [2, 2]
    world.start(Process())
    world.check()


def test_recovery_that_fails_sweeps_all_the_same(world: World) -> None:
    """Left-over branches may hold the locks that a commit waits for at every start."""
    crash_at(world, "decide.after")
    world.stores["left"].prepared.clear()
    crash_at(world, "amend.before")
    assert world.stores["left"].prepared  # rewritten, and named by no record
    world.on_call(always_raising("commit", "down"), "right")
    with pytest.raises(CommitUnresolvedError, match="down"):
        world.start(Process())
    assert not world.stores["left"].prepared
    world.prepare_sinks = lambda sinks: None
    world.start(Process())
    world.check()


def test_error_of_a_publication_is_repeated(world: World) -> None:
    """Whatever error a sink raises, only a retry shows the outcome."""
    world.on_call(raising("publish", ConnectionError("reset")), "left")
    world.start(Process())
    assert [sink.calls.count("publish") for sink in world.sinks] == [5, 4]
    world.check()


def test_commit_that_finds_its_target_unavailable_is_repeated(world: World) -> None:
    """A sink may say so with the error that `validate` raises: nothing was refused for good."""
    unavailable = SinkUnavailableError("the server is starting")
    world.on_call(raising("commit", unavailable, unavailable, unavailable), "left")
    world.start(Process())
    world.check()


def test_zombie_that_wakes_up_behind_an_abandonment_is_fenced(world: World) -> None:
    """It commits nothing of a batch that a newer driver abandoned and replayed meanwhile."""
    world.commit = "after_checkpoint"
    old = world.driver(process := Process())
    old.deliver(world.batch(process))
    world.start(Process())
    with pytest.raises(FencedError, match="took token"):
        old.commit_pending()
    world.check()


def test_checkpoint_that_is_gone_before_it_settles_a_batch(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was readable a moment ago: prepared branches are left unchanged."""
    world.commit = "after_checkpoint"
    crash_at(world, "hold.after")
    looks = iter([-1, None])
    driver = world.driver(Process())
    with monkeypatch.context() as patch:
        patch.setattr(MemoryCheckpoint, "committed", lambda self: next(looks))
        driver.recover()
    assert next(looks, "all") == "all"
    assert all(store.prepared for store in world.stores.values())
    world.start(Process())
    world.check()


@pytest.mark.parametrize("commit", ["immediate", "after_checkpoint"])
def test_checkpoint_that_cannot_be_read_before_the_decision(
    world: World, commit: CommitPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is decided, so the prepared branches are aborted."""
    world.commit = commit
    driver = world.driver(process := Process())
    monkeypatch.setattr(MemoryEntrance, "is_newest_entry", lambda self: bool(1 / 0))
    with pytest.raises(PrepareRejectedError, match="cannot be read: ZeroDivisionError"):
        driver.deliver(world.batch(process))
    monkeypatch.undo()
    assert world.prepared() == [0, 0]
    world.start(Process())
    world.check()


@pytest.mark.parametrize("has_committed", [True, False])
@pytest.mark.parametrize("commit", ["immediate", "after_checkpoint"])
@pytest.mark.parametrize("log", ["copy", "older copy", "copy with equal tokens", "another"])
def test_driver_that_wakes_behind_one_with_another_copy_of_the_log(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    commit: CommitPolicy,
    log: str,
    has_committed: bool,
) -> None:
    """The other driver has entered the checkpoint that both share; no token of the log fences.

    Nor does any token show whose branches are left over, so this driver aborts none.
    """
    clock = SimpleNamespace(time=lambda: 0.0)  # the log counts its tokens, as with a clock behind
    monkeypatch.setattr(log_base, "time", clock)
    world.commit = commit
    world.start(Process())
    world.spark.batches = [*world.spark.batches, [[91, 92], [93]]]
    other = with_another_log(world, tmp_path)
    if log == "older copy":
        copy_log(world, other)
    for _ in range(2):
        world.driver(Process())
    if log == "copy with equal tokens":
        copy_log(world, other)
    old = world.driver(process := Process())
    old.recover()
    begun: list[Driver] = []

    def go_on_elsewhere() -> None:
        changes: dict[str, Any] = {}
        if log == "copy":
            copy_log(world, other)
        if log == "another":
            changes["checkpoint_log_id"] = old.incarnation.owner.log_id
            changes["adopt"] = (old.incarnation.owner.log_id,)
        driver = Process()
        begun.append(other.driver(driver, **changes))
        assert (begun[0].lease.token == old.lease.token) is (log == "copy with equal tokens")
        begun[0].recover()
        begun[0].deliver(other.batch(driver))
        if has_committed:
            other.spark.committed += 1

    with at_point("vote.before", go_on_elsewhere) as fault:
        with pytest.raises(FencedError, match="another driver has continued"):
            old.deliver(world.batch(process))
    assert fault.fired
    other.spark.committed = len(world.spark.batches) - 1
    begun[0].commit_pending()
    begun[0].sweep()
    for store in world.stores.values():
        assert store.rows() == world.source()
    if log == "copy":  # else its branches are of a younger token, or of another log
        world.check()


def with_another_log(world: World, tmp_path: Path) -> World:
    """The same sinks and checkpoint, with an empty log."""
    (tmp_path / "other").mkdir()
    other = World(tmp_path / "other", [], world.commit)
    other.stores, other.spark = world.stores, world.spark
    return other


def copy_log(world: World, other: World) -> None:
    with (
        contextlib.closing(sqlite3.connect(world.path)) as source,
        contextlib.closing(sqlite3.connect(other.path)) as target,
    ):
        source.backup(target)


@pytest.mark.parametrize("log_is_away", [False, True])
def test_driver_that_wakes_with_its_batch_prepared_behind_one_with_a_copy_of_the_log(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_is_away: bool
) -> None:
    """The commit that it finds in Spark's checkpoint is the other driver's, and so are the rows.

    The checkpoint proves that, so the driver does not retry while its log is unreachable.
    """
    world.commit = "after_checkpoint"
    old = world.driver(process := Process())
    copy_log(world, other := with_another_log(world, tmp_path))
    old.deliver(world.batch(process))
    other.start(Process())
    if log_is_away:
        unreachable = LogUnavailableError("unreachable")
        monkeypatch.setattr(old.lease.pipeline.log, "check_token", Mock(side_effect=unreachable))
    with pytest.raises(FencedError, match="another driver has continued"):
        old.commit_pending()
    for store in world.stores.values():
        assert store.rows() == world.source()


@pytest.mark.parametrize("commit", ["immediate", "after_checkpoint"])
def test_driver_that_begins_late_behind_one_with_a_copy_of_the_log(
    world: World, tmp_path: Path, commit: CommitPolicy
) -> None:
    """It paused between Spark's call and its token: it enters last, and may not deliver."""
    world.commit = commit
    world.start(Process())
    rows = world.source()
    world.spark.batches = [*world.spark.batches, [[91, 92], [93]]]
    late = world.claim()
    copy_log(world, other := with_another_log(world, tmp_path))
    other.start(Process())
    changes = {"batch_id": late.batch_id, "offsets": late.offsets}
    old = world.driver(process := Process(), **changes)
    old.recover()
    batch = MemoryBatch(world.spark, late.batch_id, world.sinks, process)
    with pytest.raises(FencedError, match="another driver has continued"):
        old.deliver(batch)
    assert world.source() != rows
    for store in world.stores.values():
        assert store.rows() == world.source()


def test_older_driver_whose_branches_were_swept_says_that_it_is_fenced(world: World) -> None:
    """Its sinks only report that a branch is gone; the log knows that a newer driver swept it."""
    old = world.driver(process := Process())

    def sweep_and_complain() -> None:
        world.start(Process())
        raise InjectedError

    with (
        at_point("vote.before", sweep_and_complain) as fault,
        pytest.raises(FencedError, match="took token") as raised,
    ):
        old.deliver(world.batch(process))
    assert fault.fired
    assert isinstance(raised.value.__cause__, InjectedError)
    world.check()


def test_batch_that_is_abandoned_and_passed_by_spark_is_refused(world: World) -> None:
    """A zombie's Spark wrote commits/N of an aborted batch: no start passes over the gap."""
    world.commit = "after_checkpoint"
    crash_at(world, "hold.after")
    crash_at(world, "abandon.after")
    world.spark.committed = 0
    with pytest.raises(ConfigurationError, match="it was abandoned and aborted"):
        world.start(Process())


@pytest.mark.parametrize("adopt", [(), ("batch 0",), ("batch 1",)])
def test_frozen_driver_whose_spark_passes_an_abandoned_batch(
    world: World, adopt: tuple[str, ...]
) -> None:
    """Only a replay delivers the batch, so no setting lets a start pass over it (I5)."""
    world.commit = "after_checkpoint"
    frozen = world.driver(old := Process())
    frozen.deliver(world.batch(old))
    # it has abandoned and aborted batch 0, and writes it again
    crash_at(world, "vote.before")
    world.spark.committed = 0  # the frozen driver resumes, and its Spark commits the batch
    with pytest.raises(FencedError):
        frozen.deliver(world.batch(old))
    with pytest.raises(ConfigurationError, match="Delete commits/0"):
        world.driver(Process(), adopt=adopt)
    world.spark.committed = -1
    world.start(Process())
    world.check()


def test_policy_may_change_between_starts(world: World) -> None:
    """The record of an unfinished batch decides what a start does, whatever the policy is now."""
    world.commit = "after_checkpoint"
    crash_at(world, "decide.before")
    world.commit = "immediate"
    crash_at(world, "decide.after", nth=2)
    world.commit = "after_checkpoint"
    world.start(Process())
    world.check()


def test_failing_vote_aborts_the_batch_in_every_sink(world: World) -> None:
    """If one sink's vote fails, no sink shows a row, and nothing stays prepared (I1)."""

    class Refusing(MemorySink):
        def vote(self, branch_id, committables) -> Never:  # type: ignore[no-untyped-def]  # noqa: ANN001
            raise PrepareRejectedError("unique key violated", branch_id)

    world.kinds["right"] = Refusing
    with pytest.raises(PrepareRejectedError, match="unique key"):
        world.start(Process())
    assert world.prepared() == world.visible() == [0, 0]


def test_fenced_driver_ends_what_it_prepared(world: World) -> None:
    """Its branches hold no locks that its successor waits for; the successor's branches stay."""
    older = world.driver(process := Process())
    older.recover()
    younger: list[Driver] = []

    def take_over() -> None:
        younger.append(world.driver(Process()))
        younger[0].recover()  # its sweep comes before what the older one prepares next

    batch = world.batch(process)
    with at_point("open.after", take_over) as fault, pytest.raises(FencedError, match="took token"):
        older.deliver(batch)
    assert fault.fired
    assert world.prepared() == [0, 0]
    younger[0].deliver(world.batch(process))
    assert world.stores["left"].rows() == {1: 1, 2: 1, 3: 1}


def test_vote_that_a_left_over_branch_is_in_the_way_of(world: World) -> None:
    """A zombie prepared a branch after this driver's sweep, and was killed.

    The driver aborts that branch, which frees its locks, and repeats the vote once, over its own
    prepared branches.
    """
    left_over = BranchId(Owner("0" * 16, QUERY_ID), 0, 1, "left", 0, 7)
    asked: list[int] = []

    class Locked(MemorySink):
        def vote(self, branch_id: BranchId, committables: Sequence[Committable]) -> Any:
            asked.append(len(committables))
            assert all(str(c.branch_id) in self.store.prepared for c in committables)
            if any(".t1." in name for name in self.store.prepared):
                raise PrepareRejectedError("lock timeout", branch_id)
            return super().vote(branch_id, committables)

    world.driver(Process())
    world.kinds["left"] = Locked
    driver = world.driver(process := Process())
    driver.recover()
    left_over = replace(left_over, owner=driver.lease.owner)
    world.stores["left"].prepared[str(left_over)] = [99]
    driver.deliver(world.batch(process))
    assert asked == [2, 2]
    assert world.stores["left"].rows() == {1: 1, 2: 1, 3: 1}
    assert not world.stores["left"].prepared


def test_two_branches_of_one_name_abort_the_batch(world: World) -> None:
    """A record identifies branches by their names, so one of the two would be lost (I1)."""

    class Twice(MemorySink):
        def vote(
            self, branch_id: BranchId, committables: Sequence[Committable]
        ) -> Sequence[Committable]:
            return [*super().vote(branch_id, committables), committables[0]]

    world.kinds["left"] = Twice
    driver = world.driver(process := Process())
    with pytest.raises(ProtocolError, match="batch 0: two branches have one name"):
        driver.deliver(world.batch(process))
    assert world.prepared() == world.visible() == [0, 0]
    assert not world.history()


def test_branch_too_old_to_decide_is_aborted(world: World) -> None:
    """A committable past its safe_until would be lost after the decision, so it is refused."""

    class Slow(MemorySink):
        def preCommit(self, handle: Handle) -> Committable:
            done = super().preCommit(handle)
            return Committable(done.branch_id, safe_until=time.time())

    world.kinds["left"] = Slow
    driver = world.driver(process := Process())
    with pytest.raises(PrepareRejectedError, match="smaller"):
        driver.deliver(world.batch(process))
    assert world.prepared() == [0, 0]


@pytest.mark.parametrize(
    ("safe_until", "message"),
    [
        (970.0, r"took 30 s by the driver's clock.*smaller.*executor's clock is behind"),
        (1000.0, r"took 30 s by the driver's clock.*smaller.*executor's clock is behind"),
        (880.0, r"before its write began.*clocks.*executor.*driver.*at least 90 s apart"),
    ],
)
def test_branch_of_an_executor_whose_clock_is_behind(
    world: World, safe_until: float, message: str
) -> None:
    """It is refused, and the error distinguishes wrong clocks from a batch that took too long."""
    now = [970.0]

    class Behind(MemorySink):
        def preCommit(self, handle: Handle) -> Committable:
            now[0] = 1000.0
            return Committable(super().preCommit(handle).branch_id, safe_until=safe_until)

    world.clock = lambda: now[0]
    world.kinds["left"] = Behind
    driver = world.driver(process := Process())
    with pytest.raises(PrepareRejectedError, match=message) as rejected:
        driver.deliver(world.batch(process))
    assert ("smaller" in str(rejected.value)) is ("smaller" in message)


@pytest.mark.parametrize("policy", ["immediate", "after_checkpoint"])
def test_clock_that_is_set_back_after_the_write(world: World, policy: CommitPolicy) -> None:
    """By that clock the branch is still safe, but its server may have dropped it: not decided."""
    world.commit, unix, steady = policy, [100_000.0], [500.0]
    world.clock, world.steady = lambda: unix[0], lambda: steady[0]

    class Kept(MemorySink):
        def preCommit(self, handle: Handle) -> Committable:
            return Committable(super().preCommit(handle).branch_id, safe_until=unix[0] + 900)

    def set_back() -> None:
        unix[0] -= 86_400
        steady[0] += 901

    world.kinds["left"] = Kept
    point = "decide.before" if policy == "immediate" else "hold.before"
    driver = world.driver(process := Process())
    with (
        at_point(point, set_back) as fault,
        pytest.raises(PrepareRejectedError, match=r"dropped 1 s ago.*took 901 s.*smaller"),
    ):
        driver.deliver(world.batch(process))
    assert fault.fired
    assert world.prepared() == [0, 0]
    world.start(Process())
    world.check()


@pytest.mark.parametrize(
    ("leap_s", "is_before", "words"),
    [
        (1_200.0, False, "jumped forward by 1200 s while the batch was written. Start"),
        (-86_400.0, True, "jumped back by 86400 s while the batch was written. Start"),
        (-86_400.0, False, None),
        (1_200.0, True, None),
        (30.0, False, None),
    ],
)
def test_clock_jumps_while_a_batch_is_written(
    world: World, leap_s: float, words: str | None, *, is_before: bool
) -> None:
    """Refused where it is not known until when a branch is kept: the error names the jump."""
    unix, steady = [100_000.0], [500.0]
    world.clock, world.steady = lambda: unix[0], lambda: steady[0]

    class Kept(MemorySink):
        def preCommit(self, handle: Handle) -> Committable:
            unix[0] += leap_s if is_before else 0.0
            done = Committable(super().preCommit(handle).branch_id, safe_until=unix[0] + 900)
            unix[0] += 0.0 if is_before else leap_s
            return done

    world.kinds["left"] = Kept
    world.stores.pop("right")
    world.spark.batches = [[[1]]]
    driver = world.driver(process := Process())
    if words is None:
        driver.deliver(world.batch(process))
    else:
        with pytest.raises(PrepareRejectedError, match=words):
            driver.deliver(world.batch(process))
        assert world.prepared() == [0]


def test_paused_driver_is_fenced_and_harms_nothing(world: World) -> None:
    """A driver paused before its decision resumes after a newer one began: FencedError (I6)."""
    driver = world.driver(old := Process())
    batch = world.batch(old)
    with at_point("decide.before", lambda: world.start(Process())) as fault:
        with pytest.raises(FencedError, match="took token"):
            driver.deliver(batch)
    assert fault.fired
    # The newer driver swept the old one's branches; the newer one's rows are visible once.
    world.check()


@pytest.mark.parametrize("point", ["commit.before", "commit.after", "complete.before"])
def test_driver_paused_after_its_decision_harms_nothing(world: World, point: str) -> None:
    """It may still commit decided branches; then the log refuses it."""
    driver = world.driver(old := Process())
    batch = world.batch(old)
    with at_point(point, lambda: world.start(Process())) as fault, pytest.raises(FencedError):
        driver.deliver(batch)
    assert fault.fired
    world.check()


def test_driver_paused_before_it_looks_does_not_drain_what_another_decided(world: World) -> None:
    """A newer driver decided it and died: the older one must not let Spark move on."""
    driver = world.driver(old := Process())
    batch = world.batch(old)
    crash_at(world, "decide.after")
    with pytest.raises(FencedError, match="by another driver"):
        driver.deliver(batch)
    assert world.spark.drained == []
    world.start(Process())
    world.check()


def test_driver_paused_before_it_looks_leaves_what_another_has_prepared(world: World) -> None:
    """The driver with the newest token decides or abandons it; the older one does not drain it."""
    world.commit = "after_checkpoint"
    driver = world.driver(old := Process())
    batch = world.batch(old)
    crash_at(world, "hold.after")
    with pytest.raises(FencedError, match=r"prepared by another driver \(token"):
        driver.deliver(batch)
    assert world.spark.drained == []
    assert world.prepared() == [2, 2]
    assert [r.state for r in world.history()] == [State.PREPARED]
    world.start(Process())
    world.check()


def test_log_that_is_away_too_long_lets_the_batch_be_aborted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safe_until is checked before each try to decide, not only before the first."""
    now = [10.0]

    class Perishable(MemorySink):
        def preCommit(self, handle: Handle) -> Committable:
            return Committable(super().preCommit(handle).branch_id, safe_until=20.0)

    world.clock = lambda: now[0]
    world.kinds["left"] = Perishable
    driver = world.driver(process := Process())

    def unreachable(self: SqliteLog, record: object) -> None:
        now[0] += 15.0
        raise LogUnavailableError("unreachable; nothing was written")

    monkeypatch.setattr(SqliteLog, "decide", unreachable)
    with pytest.raises(PrepareRejectedError, match="smaller"):
        driver.deliver(world.batch(process))
    assert world.prepared() == [0, 0]


def test_branches_that_expire_first_are_committed_first(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow sink must not let another one's prepared branch time out."""
    order: list[str] = []

    class Expiring(MemorySink):
        def preCommit(self, handle: Handle) -> Committable:
            return Committable(super().preCommit(handle).branch_id, safe_until=9e9)

    world.kinds["right"] = Expiring
    driver = world.driver(process := Process())
    together = Patience.together

    def noting(action: Any, items: Any, interrupted: Any = None) -> None:
        work = list(items)
        order.extend(c.branch_id.sink for group in work if isinstance(group, list) for c in group)
        together(action, work, interrupted=interrupted)

    monkeypatch.setattr(Patience, "together", staticmethod(noting))
    driver.deliver(world.batch(process))
    assert order == ["right", "right", "left", "left"]


class Forgetting(MemorySink, ForgetsProofs):
    def forget_proofs(self, owner: Owner, below: int) -> None:
        self._called("forget_proofs")
        kept = [record.id.batch_id for record in SqliteLog(self.path).history("orders")]
        assert min(kept) >= below, "a proof went before its record"
        self.forgotten.append(below)

    path: ClassVar[Path]
    forgotten: ClassVar[list[int]]


def test_proofs_go_after_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log keeps ten; a sink that fails harms nothing."""
    monkeypatch.setattr(forgetting, "EVERY_BATCHES", 1)
    world = World(tmp_path, [[[1]] for _ in range(13)])
    world.kinds["left"] = world.kinds["right"] = Forgetting
    monkeypatch.setattr(Forgetting, "path", world.path, raising=False)
    monkeypatch.setattr(Forgetting, "forgotten", forgotten := [], raising=False)
    world.on_call(always_raising("forget_proofs", "down"), "right")
    world.start(Process())
    assert forgotten == [1, 2, 3]
    world.check()


def test_branch_that_cannot_be_aborted_keeps_no_other_alive(world: World) -> None:
    """The sweep continues after a branch that its server refuses to abort."""
    world.start(Process())
    owner = Owner(SqliteLog(world.path).log_id, QUERY_ID)
    store = world.stores["left"]
    branches = [BranchId(owner, 7, 1, "left", 0, n) for n in (1, 2)]
    for branch_id in branches:
        store.prepared[str(branch_id)] = [0]
    world.on_call(raising("abort", PermissionError("not yours")), "left")
    world.start(Process())
    assert set(store.prepared) == {str(branches[0])}


def test_owner_that_cannot_be_listed_keeps_no_older_one_alive(world: World) -> None:
    """Orphans of a replaced checkpoint are aborted although those of the new one are unknown."""
    world.start(Process())
    old = Owner(SqliteLog(world.path).log_id, QUERY_ID)
    orphan = BranchId(old, 7, 1, "left", 0, 1)
    world.stores["left"].prepared[str(orphan)] = [0]
    world.on_call(raising("find_branches", ConnectionError("no answer")), "left")
    fresh = {"query_id": QUERY_ID.replace("1", "a"), "replaces": QUERY_ID, "batch_id": 0}
    nothing = {"offsets": {}, "checkpoint_log_id": None, "checkpoint_pipeline": None}
    world.spark.committed = -1
    world.driver(Process(), **fresh, **nothing).recover()
    assert world.sinks[0].calls.count("find_branches") > 1
    assert str(orphan) not in world.stores["left"].prepared


def test_sweep_leaves_younger_foreign_and_decided_branches_alone(world: World) -> None:
    """It aborts only branches of this query, with a token up to this one, that no record names."""
    world.start(Process())
    log = SqliteLog(world.path)
    owner = Owner(log.log_id, QUERY_ID)
    store = world.stores["left"]
    mine = BranchId(owner, 7, 1, "left", 0, 1)
    others = [
        BranchId(owner, 7, 10**9, "left", 0, 1),  # a younger driver's
        BranchId(owner, 7, 1, "right", 0, 1),  # of the other sink: that one sweeps it
        BranchId(Owner(log.log_id, QUERY_ID.replace("1", "a")), 7, 1, "left", 0, 1),
        BranchId(Owner("0" * 16, QUERY_ID), 7, 1, "left", 0, 1),
    ]
    removed = BranchId(owner, 7, 1, "gone", 0, 1)  # of a sink that the pipeline no longer has
    for branch_id in (mine, removed, *others):
        store.prepared[str(branch_id)] = [0]
    world.start(Process())
    assert set(store.prepared) == {str(branch_id) for branch_id in others}


def test_batch_that_is_known_with_other_offsets_is_refused(world: World) -> None:
    """A rolled-back checkpoint has other offsets for a delivered batch."""
    world.start(Process())
    world.spark.committed = 1
    head = SqliteLog(world.path).head("orders")
    with pytest.raises(ConfigurationError, match="rolled back"):
        world.driver(Process(), offsets={2: ('{"upTo":99}',)})
    assert SqliteLog(world.path).head("orders") == head


def test_abandoned_batch_may_come_with_other_offsets(world: World) -> None:
    """Its files were deleted from the checkpoint, and Spark recreated it: every row arrives."""
    world.commit = "after_checkpoint"
    fail_at(world, "deliver.after")
    process = Process()
    world.driver(process).recover()  # abandons it
    recreated = ('{"upTo":99}',)
    driver = world.driver(process, offsets={0: recreated})
    driver.recover()
    batch = world.batch(process)
    batch.offsets = recreated
    driver.deliver(batch)
    assert driver.pending is not None


def test_second_replayed_batch_with_other_offsets_is_refused(world: World) -> None:
    """Every replayed batch is compared, not only the first of an incarnation."""
    world.start(Process())
    world.spark.committed = 1
    process = Process()
    driver = world.driver(process)
    driver.deliver(world.batch(process))
    world.spark.committed = 2
    batch = world.batch(process)
    batch.offsets = ('{"upTo":99}',)
    with pytest.raises(ConfigurationError, match="rolled back"):
        driver.deliver(batch)


def test_sweep_leaves_branches_of_an_unfinished_decision_alone(world: World) -> None:
    """A branch that a record names is never an orphan, whichever driver sweeps."""
    fail_at(world, "decide.after")
    driver = world.driver(Process())
    driver.sweep()
    assert world.prepared() == [2, 2]


def test_log_that_turns_empty_under_a_driver_aborts_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that vanishes is unreachable, not empty: its decided branches are no orphans (I1)."""
    monkeypatch.setattr(
        "tests.support.world.SqliteLog",
        lambda _: DocumentLog(FolderPlace(LocalFolder(tmp_path / "log"))),
    )
    fail_at(world, "decide.after")
    driver = world.driver(Process())
    (tmp_path / "log" / "orders").rename(tmp_path / "elsewhere")
    with pytest.raises(LogUnavailableError, match="was there"):
        driver.recover()
    driver.sweep()
    assert world.prepared() == [2, 2]
    (tmp_path / "elsewhere").rename(tmp_path / "log" / "orders")
    world.start(Process())
    assert all(store.rows() == world.source() for store in world.stores.values())


def test_decision_whose_answer_is_lost_stands(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """decide succeeded and raised: deciding again finds the record, and the batch continues."""
    driver = world.driver(process := Process())
    decide = SqliteLog.decide
    calls = []

    def lose_answer(self, record):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        calls.append(record)
        standing = decide(self, record)
        if len(calls) == 1:
            raise DecisionUnknownError("the answer is lost")
        return standing

    monkeypatch.setattr(SqliteLog, "decide", lose_answer)
    driver.deliver(world.batch(process))
    assert len(calls) == 2
    assert world.stores["left"].rows() == {1: 1, 2: 1, 3: 1}


def test_decision_whose_answer_is_lost_with_the_log_stays_unknown(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error must not report that nothing was decided, since the decision is recorded."""
    driver = world.driver(process := Process())
    decide = SqliteLog.decide
    errors = iter([DecisionUnknownError("the answer is lost")])

    def lose_answer(self: SqliteLog, record: TransactionRecord) -> None:
        decide(self, record)
        raise next(errors, LogUnavailableError("unreachable; nothing was written"))

    with monkeypatch.context() as patched:
        patched.setattr(SqliteLog, "decide", lose_answer)
        with pytest.raises(DecisionUnknownError, match=r"the answer is lost; and now: unreachable"):
            driver.deliver(world.batch(process))
    assert world.prepared() == [2, 2]
    world.start(Process())
    assert all(store.rows() == world.source() for store in world.stores.values())


@pytest.mark.parametrize("commit", ["immediate", "after_checkpoint"])
def test_unknown_decision_is_not_sent_again_behind_a_driver_with_a_copy_of_the_log(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit: CommitPolicy
) -> None:
    """The first request was lost; the other driver's sweep could not list what is prepared here."""
    world.commit, world.commit_timeout_s = commit, 30.0
    old = world.driver(process := Process())
    other = with_another_log(world, tmp_path)
    copy_log(world, other)
    verb = "decide" if commit == "immediate" else "prepare"
    write, errors = getattr(SqliteLog, verb), iter([DecisionUnknownError("the answer is lost")])

    def go_on_elsewhere() -> None:
        begun = other.driver(elsewhere := Process())
        with monkeypatch.context() as patched:
            patched.setattr(MemorySink, "find_branches", lambda self, owner: bool(1 / 0))
            begun.recover()
            begun.deliver(other.batch(elsewhere))
            other.spark.committed += 1
            begun.commit_pending()

    def lose_request(self: SqliteLog, record: TransactionRecord) -> TransactionRecord:
        for error in errors:
            go_on_elsewhere()
            raise error
        written: TransactionRecord = write(self, record)
        return written

    monkeypatch.setattr(SqliteLog, verb, lose_request)
    with pytest.raises(FencedError, match="another driver has continued"):
        old.deliver(world.batch(process))
    assert [len(store.prepared) for store in world.stores.values()] == [2, 2], "left to a sweep"
    assert all(store.rows() == {1: 1, 2: 1, 3: 1} for store in world.stores.values())


@pytest.mark.parametrize("is_complete", [True, False])
def test_branch_of_a_complete_batch_on_a_server_that_went_back_in_time(
    world: World, caplog: pytest.LogCaptureFixture, is_complete: bool
) -> None:
    """It is prepared there again: its rows are committed again, and not swept."""

    class Listing(MemorySink):
        lists_uncommitted_only: ClassVar[bool] = True

    world.kinds["left"] = Listing
    driver = world.driver(process := Process())
    driver.deliver(world.batch(process))
    store, rows = world.stores["left"], world.stores["left"].rows()
    name = next(iter(store.visible))
    if is_complete:
        store.prepared[name] = store.visible.pop(name)
    else:  # a left-over of an abandoned attempt
        store.prepared[name.replace(".p0.", ".p9.")] = [7]
    driver.sweep()
    assert not store.prepared
    assert store.rows() == rows
    assert ("went back in time" in caplog.text) is is_complete


def test_branch_of_a_batch_that_a_rewind_took_back_is_swept(world: World) -> None:
    """Its server went back in time; its rows must not come again."""

    class Listing(MemorySink):
        lists_uncommitted_only: ClassVar[bool] = True

    world.kinds["left"] = Listing
    driver = world.driver(process := Process())
    driver.deliver(world.batch(process))
    log = driver.lease.pipeline.log
    head = log.head("orders")
    assert head is not None
    rewound = replace(head, rewound={head.query_id: -1})
    log._write(lambda store: store.put_head(rewound))
    store = world.stores["left"]
    name = next(iter(store.visible))
    store.prepared[name] = store.visible.pop(name)
    driver.sweep()
    assert not store.prepared
    assert name not in store.visible


def test_branch_that_cannot_be_committed_again_keeps_no_orphan(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """It is left for the next sweep. An orphan, which may hold locks, is aborted all the same."""

    class Listing(MemorySink):
        lists_uncommitted_only: ClassVar[bool] = True

    world.kinds["left"] = Listing
    driver = world.driver(process := Process())
    driver.deliver(world.batch(process))
    store, rows = world.stores["left"], world.stores["left"].rows()
    name = next(iter(store.visible))
    store.prepared[name] = store.visible.pop(name)  # the server went back in time
    store.prepared[name.replace(".p0.", ".p9.")] = [7]  # an orphan
    (left,) = [sink for sink in world.sinks if sink.name == "left"]
    left.fail = always_raising("commit", "no route to host")
    driver.sweep()
    assert list(store.prepared) == [name]
    assert "no route to host" in caplog.text
    left.fail = lambda verb: None
    driver.sweep()
    assert store.rows() == rows


@pytest.mark.parametrize("verb", ["find_branches", "abort"])
def test_sweep_that_fails_is_one_line(
    world: World, caplog: pytest.LogCaptureFixture, verb: str
) -> None:
    """The warning has the reason; the traceback is logged at DEBUG."""
    caplog.set_level("DEBUG", "sparkonce")
    crash_at(world, "decide.before")
    world.on_call(always_raising(verb, "no route to host"), "left")
    world.start(Process())
    assert {record.levelname for record in caplog.records if record.exc_info} == {"DEBUG"}
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any("no route to host" in line for line in warned)


def test_each_sink_that_cannot_be_swept_is_told(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning for each names the pipeline, the sink and the reason."""

    def refuse(verb: str, name: str) -> None:
        if verb == "find_branches":
            raise ConnectionError(f"no route to {name}")

    def prepare(sinks: list[MemorySink]) -> None:
        for sink in sinks:
            sink.fail = functools.partial(refuse, name=sink.name)

    world.prepare_sinks = prepare
    world.driver(Process()).sweep()
    for name in ("left", "right"):
        warning = f"pipeline 'orders', <MemorySink '{name}' -> memory>: .*no route to {name}"
        assert any(re.match(warning, line) for line in caplog.messages)


def test_few_frames_lie_between_the_page_and_a_sinks_commit(world: World) -> None:
    """At most eight frames of sparkonce, so that the traceback of a commit stays readable."""
    stacks: list[list[str]] = []

    class Looking(MemorySink):
        def commit(self, committable: Committable) -> None:
            files = [frame.filename for frame in inspect.stack()[1:]]
            page = next((n for n, f in enumerate(files) if f.endswith("/transaction.py")), None)
            if page is not None:  # else in a thread of a pool
                stacks.append([f for f in files[:page] if "/sparkonce/" in f])
            super().commit(committable)

    world.stores.pop("right")
    world.kinds["left"] = Looking
    driver = world.driver(process := Process())
    world.spark.batches = [[[1]]]
    driver.deliver(world.batch(process))
    (between,) = stacks
    assert len(between) <= 8, between
    assert any(frame.endswith("committing.py") for frame in between)
