"""The protocol on a world in memory: every crash point, every verb that fails (I1 to I8)."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Never, cast
from unittest.mock import Mock

import pytest

from sparkonce import failpoints
from sparkonce.errors import (
    CommitUnresolvedError,
    ConfigurationError,
    DecisionUnknownError,
    FencedError,
    LogUnavailableError,
    PreparedBranchLostError,
    PrepareRejectedError,
    ProtocolError,
)
from sparkonce.failpoints import InjectedError
from sparkonce.model import BranchId, Committable, Owner
from sparkonce.protocol.driver import Driver
from sparkonce.protocol.pipeline import CommitPolicy, Patience
from sparkonce.sinks.base import AnySink
from sparkonce.sinks.capabilities import CommitsMany
from sparkonce.sinks.verbs import commit_each
from sparkonce.steps import POINTS
from sparkonce.storage import LocalFolder
from sparkonce.txn_log.document import DocumentLog
from sparkonce.txn_log.folder import FolderPlace
from sparkonce.txn_log.record import Incarnation, State, TransactionRecord
from sparkonce.txn_log.sqlite import SqliteLog
from tests.world import (
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


def test_undisturbed_run_delivers_every_row_once(world: World) -> None:
    """Without faults each batch is written once, the empty one is decided too, none is drained."""
    world.start(Process())
    world.check()
    assert world.spark.drained == []
    history = SqliteLog(world.path).history("orders")
    assert [r.id.batch_id for r in history] == [3, 2, 1, 0]
    assert {r.state for r in history} == {State.COMPLETE}


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize(("policy", "point"), EVERY_STEP)
def test_driver_crashes_at(world: World, policy: CommitPolicy, point: str, nth: int) -> None:
    """After a crash at any point the next driver goes on, and every row is visible once."""
    world.commit = policy
    process = Process()
    with at_point(point, process.crash, nth=nth) as fault:
        while not fault.fired:
            # begin and recover come once per start: those faults need more starts to fire.
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
    """A crash during recovery is one crash more, no new situation."""
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
    """What was prepared is gone when the query fails, so no reader waits for a restart."""
    with at_point("vote.after", raise_injected), pytest.raises(InjectedError):
        world.start(Process())
    assert not any(store.prepared or store.visible for store in world.stores.values())


def test_error_after_the_decision_aborts_nothing(world: World) -> None:
    """From the decision on the log alone says what holds (I2, I3)."""
    with at_point("decide.after", raise_injected), pytest.raises(InjectedError):
        world.start(Process())
    assert all(len(store.prepared) == 2 for store in world.stores.values())
    assert len(SqliteLog(world.path).unfinished("orders")) == 1


def test_replayed_complete_batch_is_drained_and_not_written(world: World) -> None:
    """A batch whose commits/N is missing is read to its end, so that Spark's state moves on."""
    world.start(Process())
    world.spark.committed -= 1
    world.start(Process())
    assert world.spark.drained == [3]
    world.check()


def test_replay_of_a_complete_batch_with_other_rows_is_reported(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """The code was changed, and the checkpoint rolled back: the new output goes nowhere."""
    world.start(Process())
    world.spark.committed -= 1
    world.spark.batches = [*world.spark.batches[:3], [[5, 6], [7, 9]]]
    world.start(Process())
    told = [r.getMessage() for r in caplog.records if "its replay differs" in r.getMessage()]
    assert len(told) == 2
    assert "batch 3 of pipeline 'orders'" in told[0]
    assert "sink 'left', the 4 rows of the replay have other values" in told[0]
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
    """The commit landed, its answer did not: the second call changes nothing (I4)."""
    answers = iter([ConnectionError("the answer is lost"), None])

    def lose_one(verb: str) -> None:
        if verb == "after commit" and (error := next(answers, None)):
            raise error

    def prepare(sinks: list[MemorySink]) -> None:
        sinks[0].fail = lose_one

    world.prepare_sinks = prepare  # type: ignore[assignment]
    world.start(Process())
    world.check()


def test_commit_that_stays_unresolved_fails_the_query_and_the_next_start_carries_on(
    world: World,
) -> None:
    """After commit_timeout_s the query fails with CommitUnresolvedError; nothing is aborted."""

    def refuse(verb: str) -> None:
        if verb == "commit":
            raise ConnectionError("down")

    def prepare(sinks: list[MemorySink]) -> None:
        sinks[1].fail = refuse

    world.prepare_sinks = prepare  # type: ignore[assignment]
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
    """Nobody knows then whether an operator has ruled on it; by itself it fails no commit."""
    world.commit_timeout_s = 60.0 if away_for == 3 else 0.2
    calls: list[str] = []
    check_token = SqliteLog.check_token

    def away(self: SqliteLog, incarnation: Incarnation) -> None:
        calls.append("check")
        if calls.count("check") <= away_for:
            raise LogUnavailableError("away; nothing was written")
        check_token(self, incarnation)

    def fail_once(verb: str) -> None:
        if verb == "commit":
            calls.append(verb)
            if calls == ["commit"]:
                raise ConnectionError("down")

    def prepare(sinks: Sequence[MemorySink]) -> None:
        sinks[0].fail = fail_once

    monkeypatch.setattr(SqliteLog, "check_token", away)
    monkeypatch.setattr(world, "prepare_sinks", prepare)
    world.spark.batches = [[[1]], [[2]]]
    if away_for == 3:
        world.start(Process())
        assert calls == ["commit", *["check"] * 4, "commit", "commit"], "of two batches"
    else:
        with pytest.raises(
            CommitUnresolvedError, match="down; not tried again until the log.*away"
        ):
            world.start(Process())
        assert set(calls[1:]) == {"check"}
        assert len(world.stores["left"].prepared) == 1
        world.start(Process())
    world.check()


def test_only_branches_of_unknown_outcome_are_committed_again(world: World) -> None:
    """commit_many says for each branch how it ended; the others are not asked for twice."""
    asked: list[list[str]] = []

    class Batching(MemorySink, CommitsMany):
        def commit_many(self, committables: Any) -> Any:
            asked.append([str(c.branch_id) for c in committables])
            if len(asked) == 1:
                return [*commit_each(self, committables[:1]), CommitUnresolvedError("away")]
            return commit_each(self, committables)

    process = Process()
    driver = world.driver(process)
    put_sink(world, driver, Batching(world.stores["left"], process, "left"))
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
    """An error that the sink does not name says nothing about any branch's outcome."""
    asked: list[int] = []

    class Raising(MemorySink, CommitsMany):
        def commit_many(self, committables: Any) -> Any:
            asked.append(len(committables))
            outcomes = commit_each(self, committables)
            if len(asked) == 1:
                raise ConnectionError("the answer is lost")
            return outcomes

    process = Process()
    driver = world.driver(process)
    put_sink(world, driver, Raising(world.stores["left"], process, "left"))
    driver.deliver(world.batch(process))
    assert asked == [2, 2]
    assert world.stores["left"].rows() == {1: 1, 2: 1, 3: 1}


def crash_after_deciding(world: World) -> None:
    process = Process()
    with at_point("decide.after", process.crash) as fault, pytest.raises(Crash):
        world.start(process)
    assert fault.fired


def test_batch_is_published_when_all_sinks_have_committed(world: World) -> None:
    """Its rows are then visible in every store; a failure that may pass is tried again."""
    answers = iter([CommitUnresolvedError("the answer is lost"), None])

    def look(verb: str) -> None:
        if verb == "publish":
            rows = [store.rows() for store in world.stores.values()]
            assert rows[0] == rows[1]
            assert SqliteLog(world.path).history("orders")[0].state is State.DECIDED
        if verb == "after publish" and (error := next(answers, None)) is not None:
            raise error

    def watch(sinks: Sequence[MemorySink]) -> None:
        for sink in sinks:
            sink.fail = look

    world.prepare_sinks = watch
    world.start(Process())
    world.check()
    # They publish beside each other: either may be the one that is tried again.
    assert sorted(sink.calls.count("publish") for sink in world.sinks) == [4, 5]


def lose(world: World, store: str, *numbers: int) -> None:
    """Drop these of the store's prepared branches, as a server does that times them out."""
    prepared = world.stores[store].prepared
    for name in [list(prepared)[n] for n in numbers]:
        del prepared[name]


@pytest.mark.parametrize("numbers", [[0], [1], [0, 1]])
def test_lost_branch_is_written_again_from_the_replay(world: World, numbers: list[int]) -> None:
    """Only what is lost is written again; the decision is amended and says so (I3)."""
    crash_after_deciding(world)
    lose(world, "left", *numbers)
    world.start(Process())
    world.check()
    redone = SqliteLog(world.path).history("orders")[-1]
    assert (redone.revision, len(redone.lost)) == (1, len(numbers))
    assert {c.branch_id.write_pass for c in redone.shares["right"].committables} == {0}
    passes = sorted(c.branch_id.write_pass for c in redone.shares["left"].committables)
    assert passes == [0] * (2 - len(numbers)) + [1] * len(numbers)
    assert redone.shares["left"].rows == 3


def test_branch_written_again_that_is_too_old_is_not_named(world: World) -> None:
    """Its server may have dropped it already: the decision stands as it was (I3)."""

    class SlowAgain(MemorySink):
        def preCommit(self, handle: Handle) -> Committable:
            done = super().preCommit(handle)
            is_again = handle.branch_id.write_pass > 0
            return Committable(done.branch_id, safe_until=time.time() if is_again else None)

    def slow(sinks: Sequence[MemorySink]) -> None:
        sinks[0].__class__ = SlowAgain

    crash_after_deciding(world)
    lose(world, "left", 0)
    world.prepare_sinks = slow
    with pytest.raises(PrepareRejectedError, match=r"'left' prepared a branch .* may drop"):
        world.start(Process())
    (record,) = SqliteLog(world.path).history("orders")
    assert (record.state, record.revision, record.lost) == (State.DECIDED, 0, ())
    assert not any(store.prepared for store in world.stores.values())
    world.prepare_sinks = lambda sinks: None
    world.start(Process())
    world.check()


@pytest.mark.parametrize("store", ["left", "right"])
@pytest.mark.parametrize("point", [*sorted(AFTER_A_LOSS), *steps("immediate")])
def test_driver_crashes_while_it_writes_lost_branches_again(
    world: World, point: str, store: str
) -> None:
    """A second crash anywhere in between writes nothing twice."""
    crash_after_deciding(world)
    lose(world, store, 0)
    process = Process()
    with at_point(point, process.crash) as fault, pytest.raises(Crash):
        world.start(process)
    assert fault.fired
    world.start(Process())
    world.check()


def test_branch_that_is_lost_twice_is_written_twice_more(world: World) -> None:
    crash_after_deciding(world)
    lose(world, "left", 0)
    process = Process()
    with at_point("amend.after", process.crash), pytest.raises(Crash):
        world.start(process)
    rewritten = [name for name in world.stores["left"].prepared if ".p1." in name]
    del world.stores["left"].prepared[rewritten[0]]
    world.start(Process())
    world.check()
    assert SqliteLog(world.path).history("orders")[-1].revision == 2


def test_branch_lost_between_decision_and_commit_is_written_again_at_once(world: World) -> None:
    """No restart is needed while Spark's replay is in hand."""
    with at_point("decide.after", lambda: lose(world, "right", 0)) as fault:
        world.start(Process())
    assert fault.fired
    world.check()


def test_sink_that_is_lost_whole_takes_a_replay_with_other_partitions(world: World) -> None:
    """The sums over all partitions are compared, so it does not matter how Spark cuts the batch."""
    crash_after_deciding(world)
    lose(world, "left", 0, 1)
    world.spark.batches = [[[3], [], [2], [1]], *BATCHES[1:]]
    world.start(Process())
    world.check()


@pytest.mark.parametrize(
    ("replay", "told"),
    [
        ([[1, 99], [3]], "partition 0: the 2 rows of the replay have other values"),
        ([[1], [3, 2]], "partition 0: it had 2 rows, and the replay has 1"),
        ([[], [3]], "partition 0: one of the two has no rows"),
    ],
)
def test_replay_with_other_rows_is_never_taken_for_the_lost_ones(
    world: World, replay: list[list[int]], told: str
) -> None:
    """The error names branch, rows and what may be the cause; each start says it, none goes on."""
    crash_after_deciding(world)
    lose(world, "left", 0)
    world.spark.batches = [replay, *BATCHES[1:]]
    told = rf"batch 0 .*\(2 rows\).*'left', {told}.*writers=.*start once as before"
    for _ in range(2):
        with pytest.raises(PreparedBranchLostError, match=told):
            world.start(Process())
        assert not any(".p1." in name for name in world.stores["left"].prepared)
    assert world.stores["right"].rows() == {1: 1, 2: 1, 3: 1}
    assert len(SqliteLog(world.path).unfinished("orders")) == 1
    assert world.spark.committed == -1


def test_loss_that_spark_does_not_replay_stops_the_pipeline(world: World) -> None:
    """With commit="after_checkpoint" Spark has moved on: an operator settles, no batch follows."""
    world.commit = "after_checkpoint"
    process = Process()
    with at_point("decide.before", process.crash) as fault, pytest.raises(Crash):
        world.start(process)
    assert fault.fired
    lose(world, "left", 0)
    for _ in range(2):
        with pytest.raises(PreparedBranchLostError, match="does not replay the batch any more"):
            world.start(Process())
    assert world.spark.committed == 0


def test_loss_of_what_was_prepared_is_told_where_the_checkpoint_cannot_be_read(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As to an operator: it was decided behind Spark's commit, so no start replays it."""
    world.commit = "after_checkpoint"
    process = Process()
    with at_point("decide.after", process.crash), pytest.raises(Crash):
        world.start(process)
    lose(world, "left", 0)
    driver = world.driver(Process())
    monkeypatch.setattr(MemoryCheckpoint, "committed", lambda self: None)
    with pytest.raises(PreparedBranchLostError, match="does not replay the batch any more"):
        driver.recover()


def test_batch_waits_for_sparks_checkpoint(world: World) -> None:
    """Prepared and logged when run returns, and visible once commits/N is there."""
    world.commit = "after_checkpoint"
    driver = world.driver(process := Process())
    driver.recover()
    driver.deliver(world.batch(process))
    assert [len(store.prepared) for store in world.stores.values()] == [2, 2]
    assert not driver.commit_pending()
    assert not any(store.visible for store in world.stores.values())
    world.spark.committed = 0
    assert driver.commit_pending()
    assert [len(store.visible) for store in world.stores.values()] == [2, 2]
    assert [r.state for r in SqliteLog(world.path).history("orders")] == [State.COMPLETE]


def test_run_that_ends_while_it_waits_for_a_token_takes_none(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped, and followed by another one, it would fence that as soon as the log is back."""

    def away(self: SqliteLog, claim: object) -> None:
        ended.append(claim)
        raise LogUnavailableError("away; nothing was written")

    def may_repeat() -> None:
        if ended:
            raise ProtocolError("the run was stopped")

    ended: list[object] = []
    monkeypatch.setattr(SqliteLog, "begin", away)
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
    """By Ctrl-C in `close`, say: Spark replays the batch no more, so who settles next ends it."""
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
    assert [len(store.visible) for store in world.stores.values()] == [2, 2]
    if point == "complete.after":
        assert [sink.calls.count("commit") for sink in world.sinks] == [2, 2]
    assert [r.state for r in SqliteLog(world.path).history("orders")] == [State.COMPLETE]


def test_next_batch_is_refused_while_one_is_undecided(world: World) -> None:
    """Batch N+1 begins only when N's commit log entry is there (I5)."""
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
    """The log says so first: else an older driver could still decide what is aborted already."""
    world.commit = "after_checkpoint"
    process = Process()
    with at_point("hold.after", process.crash), pytest.raises(Crash):
        world.start(process)
    with at_point("abandon.after", raise_injected) as fault, pytest.raises(InjectedError):
        world.start(Process())
    assert fault.fired
    assert [r.state for r in SqliteLog(world.path).history("orders")] == [State.ABANDONED]
    assert [len(store.prepared) for store in world.stores.values()] == [2, 2]
    world.start(Process())
    world.check()


def test_checkpoint_that_has_not_begun_the_batch_abandons_nothing(world: World) -> None:
    """An older copy of it: Spark may have committed the batch in the other one."""
    world.commit = "after_checkpoint"
    process = Process()
    with at_point("hold.after", process.crash), pytest.raises(Crash):
        world.start(process)
    world.spark.begun = -1
    driver = world.driver(process := Process())
    driver.recover()
    assert [r.state for r in SqliteLog(world.path).history("orders")] == [State.PREPARED]
    assert [len(store.prepared) for store in world.stores.values()] == [2, 2]
    driver.deliver(world.batch(process))  # Spark makes it anew here, with the same offsets
    assert [len(store.prepared) for store in world.stores.values()] == [2, 2]
    world.start(Process())
    world.check()


def test_recovery_that_fails_sweeps_all_the_same(world: World) -> None:
    """What is left over may hold the very locks for which a commit waits, start after start."""
    process = Process()
    with at_point("decide.after", process.crash), pytest.raises(Crash):
        world.start(process)
    world.stores["left"].prepared.clear()
    process = Process()
    with at_point("amend.before", process.crash), pytest.raises(Crash):
        world.start(process)
    assert world.stores["left"].prepared  # written again, and named by no record

    def away(verb: str) -> None:
        if verb == "commit":
            raise CommitUnresolvedError("away", None)

    def prepare(sinks: Sequence[MemorySink]) -> None:
        sinks[1].fail = away

    world.prepare_sinks = prepare
    with pytest.raises(CommitUnresolvedError, match="away"):
        world.start(Process())
    assert not world.stores["left"].prepared
    world.prepare_sinks = lambda sinks: None
    world.start(Process())
    world.check()


def test_error_of_a_publication_is_repeated(world: World) -> None:
    """Whatever a sink raises: nothing but a repeat tells what came of it."""
    failed: list[str] = []

    def fail(verb: str) -> None:
        if verb == "publish" and not failed:
            failed.append(verb)
            raise ConnectionError("reset")

    def prepare(sinks: Sequence[MemorySink]) -> None:
        sinks[0].fail = fail

    world.prepare_sinks = prepare
    world.start(Process())
    assert failed
    world.check()


def test_zombie_that_wakes_up_behind_an_abandonment_is_fenced(world: World) -> None:
    """It prepared, slept, and a newer driver abandoned and replayed the batch: it commits none."""
    world.commit = "after_checkpoint"
    old = world.driver(process := Process())
    old.deliver(world.batch(process))
    world.start(Process())
    with pytest.raises(FencedError, match="took token 2"):
        old.commit_pending()
    world.check()


def test_checkpoint_that_is_gone_before_it_settles_a_batch(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was there a moment ago: what is prepared is left as it is."""
    world.commit = "after_checkpoint"
    process = Process()
    with at_point("hold.after", process.crash), pytest.raises(Crash):
        world.start(process)
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
    """Nothing is decided, and so nothing stands."""
    world.commit = commit
    driver = world.driver(process := Process())
    monkeypatch.setattr(MemoryEntrance, "is_last", lambda self: bool(1 / 0))
    with pytest.raises(PrepareRejectedError, match="cannot be read: ZeroDivisionError"):
        driver.deliver(world.batch(process))
    monkeypatch.undo()
    assert not any(store.prepared for store in world.stores.values())
    world.start(Process())
    world.check()


@pytest.mark.parametrize("has_committed", [True, False])
@pytest.mark.parametrize("commit", ["immediate", "after_checkpoint"])
@pytest.mark.parametrize("log", ["copy", "older copy", "another"])
def test_driver_that_wakes_behind_one_with_another_copy_of_the_log(
    world: World, tmp_path: Path, commit: CommitPolicy, log: str, has_committed: bool
) -> None:
    """No token of its log fences it; the checkpoint, which both share, the other has entered.

    Nor does any token say whose branches are left over, so that it aborts none.
    """
    world.commit = commit
    world.start(Process())
    world.spark.batches = [*world.spark.batches, [[91, 92], [93]]]
    (tmp_path / "copy").mkdir()
    other = World(tmp_path / "copy", [], commit)
    other.stores, other.spark = world.stores, world.spark

    def copy() -> None:
        with (
            contextlib.closing(sqlite3.connect(world.path)) as source,
            contextlib.closing(sqlite3.connect(other.path)) as target,
        ):
            source.backup(target)

    if log == "older copy":
        copy()
    for _ in range(3):
        old = world.driver(process := Process())
    old.recover()
    begun: list[Driver] = []

    def go_on_elsewhere() -> None:
        changes: dict[str, Any] = {}
        if log == "copy":
            copy()
        if log == "another":
            changes["checkpoint_log_id"] = old.incarnation.owner.log_id
            changes["adopt"] = (old.incarnation.owner.log_id,)
        driver = Process()
        begun.append(other.driver(driver, **changes))
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


def with_a_copy_of_the_log(world: World, tmp_path: Path) -> World:
    """The same sinks and checkpoint."""
    (tmp_path / "copy").mkdir()
    other = World(tmp_path / "copy", [], world.commit)
    other.stores, other.spark = world.stores, world.spark
    with (
        contextlib.closing(sqlite3.connect(world.path)) as source,
        contextlib.closing(sqlite3.connect(other.path)) as target,
    ):
        source.backup(target)
    return other


@pytest.mark.parametrize("log_is_away", [False, True])
def test_driver_that_wakes_with_its_batch_prepared_behind_one_with_a_copy_of_the_log(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_is_away: bool
) -> None:
    """The commit that it finds in Spark's checkpoint is the other's, and so are the rows.

    That is no question of its log, so nobody asks again where that one does not answer.
    """
    world.commit = "after_checkpoint"
    old = world.driver(process := Process())
    other = with_a_copy_of_the_log(world, tmp_path)
    old.deliver(world.batch(process))
    other.start(Process())
    if log_is_away:
        away = LogUnavailableError("away")
        monkeypatch.setattr(old.lease.pipeline.log, "check_token", Mock(side_effect=away))
    with pytest.raises(FencedError, match="another driver has continued"):
        old.commit_pending()
    for store in world.stores.values():
        assert store.rows() == world.source()


@pytest.mark.parametrize("commit", ["immediate", "after_checkpoint"])
def test_driver_that_begins_late_behind_one_with_a_copy_of_the_log(
    world: World, tmp_path: Path, commit: CommitPolicy
) -> None:
    """It slept between Spark's call and its token: it is the last to enter, but not to deliver."""
    world.commit = commit
    world.start(Process())
    rows = world.source()
    world.spark.batches = [*world.spark.batches, [[91, 92], [93]]]
    late = world.claim()
    other = with_a_copy_of_the_log(world, tmp_path)
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
    """Its sinks can only say that something is gone; the log knows who took it away."""
    old = world.driver(process := Process())

    def sweep_and_complain() -> None:
        world.start(Process())
        raise InjectedError

    with (
        at_point("vote.before", sweep_and_complain) as fault,
        pytest.raises(FencedError, match="took token 2") as raised,
    ):
        old.deliver(world.batch(process))
    assert fault.fired
    assert isinstance(raised.value.__cause__, InjectedError)
    world.check()


def test_batch_that_is_abandoned_and_passed_by_spark_is_refused(world: World) -> None:
    """A zombie's Spark wrote commits/N of an aborted batch: no start goes on over the gap."""
    world.commit = "after_checkpoint"
    process = Process()
    with at_point("hold.after", process.crash), pytest.raises(Crash):
        world.start(process)
    process = Process()
    with at_point("abandon.after", process.crash), pytest.raises(Crash):
        world.start(process)
    world.spark.committed = 0
    with pytest.raises(ConfigurationError, match="it was abandoned and aborted"):
        world.start(Process())


@pytest.mark.parametrize("adopt", [(), ("batch 0",), ("batch 1",)])
def test_frozen_driver_whose_spark_passes_an_abandoned_batch(
    world: World, adopt: tuple[str, ...]
) -> None:
    """Nobody delivers it unless it is replayed, so no setting lets a start go on behind it (I5)."""
    world.commit = "after_checkpoint"
    frozen = world.driver(old := Process())
    frozen.deliver(world.batch(old))
    process = Process()
    with at_point("vote.before", process.crash) as fault, pytest.raises(Crash):
        world.start(process)  # it has abandoned and aborted batch 0, and writes it again
    assert fault.fired
    world.spark.committed = 0  # the frozen driver wakes up, and its Spark goes on
    with pytest.raises(FencedError):
        frozen.deliver(world.batch(old))
    with pytest.raises(ConfigurationError, match="Delete commits/0"):
        world.driver(Process(), adopt=adopt)
    world.spark.committed = -1
    world.start(Process())
    world.check()


def test_policy_may_change_between_starts(world: World) -> None:
    """What a start finds is settled by its record, whatever the policy is now."""
    world.commit = "after_checkpoint"
    process = Process()
    with at_point("decide.before", process.crash), pytest.raises(Crash):
        world.start(process)
    world.commit = "immediate"
    process = Process()
    with at_point("decide.after", process.crash, nth=2), pytest.raises(Crash):
        world.start(process)
    world.commit = "after_checkpoint"
    world.start(Process())
    world.check()


def test_failing_vote_aborts_the_batch_in_every_sink(world: World) -> None:
    """vote of one sink says no: no sink shows a row, and nothing stays prepared (I1)."""

    class Refusing(MemorySink):
        def vote(self, branch_id, committables) -> Never:  # type: ignore[no-untyped-def]  # noqa: ANN001
            raise PrepareRejectedError("unique key violated", branch_id)

    def driver(process: Process) -> Driver:
        original = World.driver(world, process)
        refusing = Refusing(world.stores["right"], process, "right")
        put_sink(world, original, refusing)
        return original

    world.driver = driver  # type: ignore[method-assign,assignment]
    with pytest.raises(PrepareRejectedError, match="unique key"):
        world.start(Process())
    assert not any(store.prepared or store.visible for store in world.stores.values())


def test_fenced_driver_ends_what_it_prepared(world: World) -> None:
    """Nothing of it holds locks that its successor waits for; the successor's stays."""
    older = world.driver(process := Process())
    older.recover()
    younger: list[Driver] = []

    def take_over() -> None:
        younger.append(world.driver(Process()))
        younger[0].recover()  # its sweep comes before what the older one prepares next

    batch = world.batch(process)
    with at_point("open.after", take_over) as fault, pytest.raises(FencedError, match="token 2"):
        older.deliver(batch)
    assert fault.fired
    assert not any(store.prepared for store in world.stores.values())
    younger[0].deliver(world.batch(process))
    assert world.stores["left"].rows() == {1: 1, 2: 1, 3: 1}


def test_vote_that_a_left_over_branch_is_in_the_way_of(world: World) -> None:
    """A zombie prepared after this driver swept, and was killed: its locks are freed, and the vote
    is repeated once, over the branches that this driver has prepared."""
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
    driver = world.driver(process := Process())
    driver.recover()
    put_sink(world, driver, Locked(world.stores["left"], process, "left"))
    left_over = replace(left_over, owner=driver.lease.owner)
    world.stores["left"].prepared[str(left_over)] = [99]
    driver.deliver(world.batch(process))
    assert asked == [2, 2]
    assert world.stores["left"].rows() == {1: 1, 2: 1, 3: 1}
    assert not world.stores["left"].prepared


def test_two_branches_of_one_name_abort_the_batch(world: World) -> None:
    """A record knows branches by their names: one of the two would be no more (I1)."""

    class Twice(MemorySink):
        def vote(
            self, branch_id: BranchId, committables: Sequence[Committable]
        ) -> Sequence[Committable]:
            return [*super().vote(branch_id, committables), committables[0]]

    process = Process()
    driver = world.driver(process)
    put_sink(world, driver, Twice(world.stores["left"], process, "left"))
    with pytest.raises(ProtocolError, match="batch 0: two branches have one name"):
        driver.deliver(world.batch(process))
    assert not any(store.prepared or store.visible for store in world.stores.values())
    assert not SqliteLog(world.path).history("orders")


def put_sink(world: World, driver: Driver, sink: MemorySink) -> None:
    """In place of the sink `left`, on the driver and on the executors."""
    cast("dict[str, AnySink]", driver.lease.pipeline.sinks)[sink.name] = sink
    world.sinks[list(world.stores).index(sink.name)] = sink


def test_branch_too_old_to_decide_is_aborted(world: World) -> None:
    """A committable past its safe_until would be lost after the decision, so it is refused."""

    class Slow(MemorySink):
        def preCommit(self, handle: Handle) -> Committable:
            done = super().preCommit(handle)
            return Committable(done.branch_id, safe_until=time.time())

    process = Process()
    driver = world.driver(process)
    put_sink(world, driver, Slow(world.stores["left"], process, "left"))
    with pytest.raises(PrepareRejectedError, match="smaller"):
        driver.deliver(world.batch(process))
    assert not any(store.prepared for store in world.stores.values())


@pytest.mark.parametrize(
    ("safe_until", "words"),
    [
        (970.0, r"took 30 s by the driver's clock.*smaller.*executor's clock is behind"),
        (1000.0, r"took 30 s by the driver's clock.*smaller.*executor's clock is behind"),
        (880.0, r"before its write began.*clocks.*executor.*driver.*at least 90 s apart"),
    ],
)
def test_branch_of_an_executor_whose_clock_is_behind(
    world: World, safe_until: float, words: str
) -> None:
    """It is refused, and the error tells the clocks from a batch that took too long."""
    now = [970.0]

    class Behind(MemorySink):
        def preCommit(self, handle: Handle) -> Committable:
            now[0] = 1000.0
            return Committable(super().preCommit(handle).branch_id, safe_until=safe_until)

    process = Process()
    world.clock = lambda: now[0]
    driver = world.driver(process)
    put_sink(world, driver, Behind(world.stores["left"], process, "left"))
    with pytest.raises(PrepareRejectedError, match=words) as rejected:
        driver.deliver(world.batch(process))
    assert ("smaller" in str(rejected.value)) is ("smaller" in words)


def test_paused_driver_is_fenced_and_harms_nothing(world: World) -> None:
    """A driver paused before its decision wakes up behind a newer one: FencedError (I6)."""
    old = Process()
    driver = world.driver(old)
    batch = world.batch(old)

    def newer_driver_takes_over() -> None:
        world.start(Process())

    with at_point("decide.before", newer_driver_takes_over) as fault:
        with pytest.raises(FencedError, match="took token 2"):
            driver.deliver(batch)
    assert fault.fired
    # What the old driver had prepared was swept by the newer one; its own rows are visible once.
    world.check()


@pytest.mark.parametrize("point", ["commit.before", "commit.after", "complete.before"])
def test_driver_paused_after_its_decision_harms_nothing(world: World, point: str) -> None:
    """It may still commit what was decided; then the log refuses it."""
    driver = world.driver(old := Process())
    batch = world.batch(old)
    with at_point(point, lambda: world.start(Process())) as fault, pytest.raises(FencedError):
        driver.deliver(batch)
    assert fault.fired
    world.check()


def test_driver_paused_before_it_looks_does_not_drain_what_another_decided(world: World) -> None:
    """Decided by a newer driver that then died: the older one must not let Spark move on."""
    old = Process()
    driver = world.driver(old)
    batch = world.batch(old)
    newer = Process()
    with at_point("decide.after", newer.crash), pytest.raises(Crash):
        world.start(newer)
    with pytest.raises(FencedError, match="token 2"):
        driver.deliver(batch)
    assert world.spark.drained == []
    world.start(Process())
    world.check()


def test_driver_paused_before_it_looks_leaves_what_another_has_prepared(world: World) -> None:
    """It is neither decided nor complete: who holds the token settles it, and nobody drains it."""
    world.commit = "after_checkpoint"
    driver = world.driver(old := Process())
    batch = world.batch(old)
    with at_point("hold.after", (newer := Process()).crash) as fault, pytest.raises(Crash):
        world.start(newer)
    assert fault.fired
    with pytest.raises(FencedError, match=r"prepared by another driver \(token 2\)"):
        driver.deliver(batch)
    assert world.spark.drained == []
    assert [len(store.prepared) for store in world.stores.values()] == [2, 2]
    assert [r.state for r in SqliteLog(world.path).history("orders")] == [State.PREPARED]
    world.start(Process())
    world.check()


def test_log_that_is_away_too_long_lets_the_batch_be_aborted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safe_until is looked at before each try to decide, not only before the first."""
    now = [10.0]

    class Perishable(MemorySink):
        def preCommit(self, handle: Handle) -> Committable:
            return Committable(super().preCommit(handle).branch_id, safe_until=20.0)

    process = Process()
    world.clock = lambda: now[0]
    driver = world.driver(process)
    put_sink(world, driver, Perishable(world.stores["left"], process, "left"))

    def away(self: SqliteLog, record: object) -> None:
        now[0] += 15.0
        raise LogUnavailableError("away; nothing was written")

    monkeypatch.setattr(SqliteLog, "decide", away)
    with pytest.raises(PrepareRejectedError, match="smaller"):
        driver.deliver(world.batch(process))
    assert not any(store.prepared for store in world.stores.values())


def test_branches_that_expire_first_are_committed_first(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow sink must not let another one's prepared branch time out."""
    order: list[str] = []

    class Noting(MemorySink):
        def preCommit(self, handle: Handle) -> Committable:
            until = {"left": None, "right": 9e9}[self.name]
            return Committable(super().preCommit(handle).branch_id, safe_until=until)

    process = Process()
    driver = world.driver(process)
    for name, store in world.stores.items():
        put_sink(world, driver, Noting(store, process, name))
    together = Patience.together

    def noting(action: Any, items: Any) -> None:
        work = list(items)
        order.extend(c.branch_id.sink for group in work if isinstance(group, list) for c in group)
        together(action, work)

    monkeypatch.setattr(Patience, "together", staticmethod(noting))
    driver.deliver(world.batch(process))
    assert order == ["right", "right", "left", "left"]


def test_branch_that_cannot_be_aborted_keeps_no_other_alive(world: World) -> None:
    """The sweep goes on behind a branch that its server refuses to abort."""
    process = Process()
    world.start(process)
    owner = Owner(SqliteLog(world.path).log_id, QUERY_ID)
    store = world.stores["left"]
    branches = [BranchId(owner, 7, 1, "left", 0, n) for n in (1, 2)]
    for branch_id in branches:
        store.prepared[str(branch_id)] = [0]
    refusals = iter([PermissionError("not yours")])

    def refuse_one(verb: str) -> None:
        if verb == "abort" and (error := next(refusals, None)):
            raise error

    def prepare(sinks: list[MemorySink]) -> None:
        sinks[0].fail = refuse_one

    world.prepare_sinks = prepare  # type: ignore[assignment]
    world.start(Process())
    assert set(store.prepared) == {str(branches[0])}


def test_owner_that_cannot_be_listed_keeps_no_older_one_alive(world: World) -> None:
    """A checkpoint that was replaced: its orphans go although ours cannot be listed now."""
    world.start(Process())
    old = Owner(SqliteLog(world.path).log_id, QUERY_ID)
    orphan = BranchId(old, 7, 1, "left", 0, 1)
    world.stores["left"].prepared[str(orphan)] = [0]
    answers = iter([ConnectionError("no answer")])

    def fail_once(verb: str) -> None:
        if verb == "find_branches" and (error := next(answers, None)):
            raise error

    def prepare(sinks: list[MemorySink]) -> None:
        sinks[0].fail = fail_once

    world.prepare_sinks = prepare  # type: ignore[assignment]
    fresh = {"query_id": QUERY_ID.replace("1", "a"), "replaces": QUERY_ID, "batch_id": 0}
    nothing = {"offsets": {}, "checkpoint_log_id": None, "checkpoint_pipeline": None}
    world.spark.committed = -1
    world.driver(Process(), **fresh, **nothing).recover()
    assert next(answers, None) is None
    assert str(orphan) not in world.stores["left"].prepared


def test_sweep_leaves_younger_foreign_and_decided_branches_alone(world: World) -> None:
    """Only branches of this query, with a token not above ours, that no record names, go."""
    process = Process()
    world.start(process)
    log = SqliteLog(world.path)
    owner = Owner(log.log_id, QUERY_ID)
    store = world.stores["left"]
    mine = BranchId(owner, 7, 1, "left", 0, 1)
    others = [
        BranchId(owner, 7, 99, "left", 0, 1),  # a younger driver's
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
    """A rolled-back checkpoint shows other offsets for a batch that was delivered."""
    world.start(Process())
    world.spark.committed = 1
    with pytest.raises(ConfigurationError, match="rolled back"):
        world.driver(Process(), offsets={2: ('{"upTo":99}',)})
    assert SqliteLog(world.path).head("orders").token == 1  # type: ignore[union-attr]


def test_abandoned_batch_may_come_with_other_offsets(world: World) -> None:
    """Its files were deleted from the checkpoint, and Spark has made it anew: all of it arrives."""
    world.commit = "after_checkpoint"
    with at_point("deliver.after", raise_injected), pytest.raises(InjectedError):
        world.start(Process())
    process = Process()
    world.driver(process).recover()  # abandons it
    made_anew = ('{"upTo":99}',)
    driver = world.driver(process, offsets={0: made_anew})
    driver.recover()
    batch = world.batch(process)
    batch.offsets = made_anew
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
    """A branch that a record names is never an orphan, whoever sweeps."""
    with at_point("decide.after", raise_injected), pytest.raises(InjectedError):
        world.start(Process())
    driver = world.driver(Process())
    driver.sweep()
    assert all(len(store.prepared) == 2 for store in world.stores.values())


def test_log_that_turns_empty_under_a_driver_aborts_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that was there a moment ago is away, not empty: what it decided is no orphan (I1)."""
    monkeypatch.setattr(
        "tests.world.SqliteLog", lambda _: DocumentLog(FolderPlace(LocalFolder(tmp_path / "log")))
    )
    with at_point("decide.after", raise_injected), pytest.raises(InjectedError):
        world.start(Process())
    driver = world.driver(Process())
    (tmp_path / "log" / "orders").rename(tmp_path / "elsewhere")
    with pytest.raises(LogUnavailableError, match="was there"):
        driver.recover()
    driver.sweep()
    assert all(len(store.prepared) == 2 for store in world.stores.values())
    (tmp_path / "elsewhere").rename(tmp_path / "log" / "orders")
    world.start(Process())
    assert all(store.rows() == world.source() for store in world.stores.values())


def test_decision_whose_answer_is_lost_stands(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """decide landed and raised: deciding again finds the record, and the batch goes on."""
    process = Process()
    driver = world.driver(process)
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
    """It is not said that nothing was decided, since the decision stands."""
    process = Process()
    driver = world.driver(process)
    decide = SqliteLog.decide
    errors = iter([DecisionUnknownError("the answer is lost")])

    def lose_answer(self: SqliteLog, record: TransactionRecord) -> None:
        decide(self, record)
        raise next(errors, LogUnavailableError("away; nothing was written"))

    with monkeypatch.context() as patched:
        patched.setattr(SqliteLog, "decide", lose_answer)
        with pytest.raises(DecisionUnknownError, match=r"the answer is lost; and now: away"):
            driver.deliver(world.batch(process))
    assert all(len(store.prepared) == 2 for store in world.stores.values())
    world.start(Process())
    assert all(store.rows() == world.source() for store in world.stores.values())


@pytest.mark.parametrize("is_complete", [True, False])
def test_branch_of_a_complete_batch_on_a_server_that_went_back_in_time(
    world: World, caplog: pytest.LogCaptureFixture, is_complete: bool
) -> None:
    """It is prepared there once more: its rows are committed again, and not swept."""

    class Listing(MemorySink):
        lists_uncommitted_only: ClassVar[bool] = True

    process = Process()
    driver = world.driver(process)
    put_sink(world, driver, Listing(world.stores["left"], process, "left"))
    driver.deliver(world.batch(process))
    store, rows = world.stores["left"], world.stores["left"].rows()
    name = next(iter(store.visible))
    if is_complete:
        store.prepared[name] = store.visible.pop(name)
    else:  # a left-over of an attempt that was given up
        store.prepared[name.replace(".p0.", ".p9.")] = [7]
    driver.sweep()
    assert not store.prepared
    assert store.rows() == rows
    assert ("went back in time" in caplog.text) is is_complete


@pytest.mark.parametrize("verb", ["find_branches", "abort"])
def test_sweep_that_fails_is_one_line(
    world: World, caplog: pytest.LogCaptureFixture, verb: str
) -> None:
    """With the reason; its traceback is for who asks for it."""
    caplog.set_level("DEBUG", "sparkonce")
    with at_point("decide.before", (crashed := Process()).crash), contextlib.suppress(Crash):
        world.start(crashed)

    def refuse(called: str) -> None:
        if called == verb:
            raise ConnectionError("no route to host")

    def prepare(sinks: list[MemorySink]) -> None:
        sinks[0].fail = refuse

    world.prepare_sinks = prepare
    world.start(Process())
    told = [record for record in caplog.records if record.exc_info]
    assert {record.levelname for record in told} == {"DEBUG"}
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any("no route to host" in line for line in warned)


def test_each_sink_that_cannot_be_swept_is_told(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Its name and the pipeline's, and why: one server's error says nothing of another's."""

    def refuse(verb: str, name: str) -> None:
        if verb == "find_branches":
            raise ConnectionError(f"no route to {name}")

    def prepare(sinks: list[MemorySink]) -> None:
        for sink in sinks:
            sink.fail = functools.partial(refuse, name=sink.name)

    world.prepare_sinks = prepare
    world.driver(Process()).sweep()
    for name in ("left", "right"):
        told = f"pipeline 'orders', <MemorySink '{name}' -> memory>: .*no route to {name}"
        assert any(re.match(told, line) for line in caplog.messages)


def test_few_frames_lie_between_the_page_and_a_sinks_commit(world: World) -> None:
    """At most eight of ours, so that a traceback of a commit can be read."""
    stacks: list[list[str]] = []

    class Looking(MemorySink):
        def commit(self, committable: Committable) -> None:
            files = [frame.filename for frame in inspect.stack()[1:]]
            page = next((n for n, f in enumerate(files) if f.endswith("/transaction.py")), None)
            if page is not None:  # else in a thread of a pool
                stacks.append([f for f in files[:page] if "/sparkonce/" in f])
            super().commit(committable)

    world.stores.pop("right")
    driver = world.driver(process := Process())
    put_sink(world, driver, Looking(world.stores["left"], process, "left"))
    world.spark.batches = [[[1]]]
    driver.deliver(world.batch(process))
    (between,) = stacks
    assert len(between) <= 8, between
    assert any(frame.endswith("committing.py") for frame in between)
