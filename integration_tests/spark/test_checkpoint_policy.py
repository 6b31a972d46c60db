"""commit="after_checkpoint" under real streaming queries: when the last batch becomes visible."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from integration_tests.support.spark import Job, fail_at, ids
from sparkonce import ExactlyOnce, failpoints
from sparkonce.errors import (
    ConfigurationError,
    DecisionUnknownError,
    LogError,
    LogUnavailableError,
    ProtocolError,
)
from sparkonce.protocol.operating import claim_again, head_of
from sparkonce.protocol.pipeline import Pipeline
from sparkonce.spark_hooks import checkpoint, lifecycle, run
from sparkonce.spark_hooks.query import RunId
from sparkonce.spark_hooks.run import Run
from sparkonce.spark_hooks.running_query import RunningQuery
from sparkonce.testing.quick_spark import submit_args
from sparkonce.txn_log import open_log
from sparkonce.txn_log.record import State
from sparkonce.txn_log.sqlite import SqliteLog

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming import StreamingQuery

DEADLINE_S = 60.0


@pytest.fixture
def job(spark: SparkSession, tmp_path: Path) -> Job:
    return Job(spark, tmp_path)


def wait_for(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < deadline, "the state was not reached"
        time.sleep(0.02)


def checkpoint_pipeline(job: Job, **settings: Any) -> ExactlyOnce:
    return job.pipeline(commit="after_checkpoint", **settings)


def slow_pipeline(job: Job, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> ExactlyOnce:
    """One whose last batch is still pending when the next thing happens."""
    pipeline = checkpoint_pipeline(job, **settings)
    make_run = pipeline._serving.run_of

    def slow(query: RunningQuery) -> Run:
        run = make_run(query)
        monkeypatch.setattr(run, "commit_soon", lambda *_: None)
        return run

    monkeypatch.setattr(pipeline._serving, "run_of", slow)
    return pipeline


def states(pipeline: ExactlyOnce) -> list[State]:
    return [record.state for record in pipeline.log.history("orders")]


def test_batch_becomes_visible_when_spark_has_committed_it(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At foreachBatch's return a batch is prepared, when the next one is written it is visible."""
    for value in (1, 2, 3):
        job.add(*ids(value))
    pipeline = checkpoint_pipeline(job)
    seen: list[tuple[str, object, Counter[Any]]] = []

    def note(point: str, where: Any) -> None:
        if point in {"hold.after", "vote.before"}:
            seen.append((point, where["batch"], job.visible()))

    monkeypatch.setattr(failpoints, "handler", note)
    job.run(pipeline)
    pipeline.close()
    assert seen == [
        ("vote.before", 0, Counter()),
        ("hold.after", 0, Counter()),
        ("vote.before", 1, Counter([1])),
        ("hold.after", 1, Counter([1])),
        ("vote.before", 2, Counter([1, 2])),
        ("hold.after", 2, Counter([1, 2])),
    ]
    assert job.visible() == Counter([1, 2, 3])
    assert states(pipeline) == [State.COMPLETE] * 3


def test_last_batch_is_committed_without_a_word_of_the_user(job: Job) -> None:
    """A thread watches Spark's commit log; nobody has to close anything while the driver lives."""
    job.add(*ids(1, 2))
    pipeline = checkpoint_pipeline(job)
    job.run(pipeline)
    wait_for(lambda: states(pipeline) == [State.COMPLETE])
    assert job.visible() == Counter([1, 2])


@pytest.mark.parametrize("way", ["awaitTermination", "close", "with"])
def test_last_batch_is_visible_after(job: Job, way: str) -> None:
    """Each of these returns when the last batch is committed."""
    job.add(*ids(1))
    job.add(*ids(2))
    pipeline = checkpoint_pipeline(job)
    if way == "awaitTermination":
        query = job.start(pipeline)
        assert pipeline.awaitTermination(query)
    elif way == "close":
        job.run(pipeline)
        pipeline.close()
    else:
        with pipeline:
            job.run(pipeline)
    assert job.visible() == Counter([1, 2])


def test_last_batch_whose_commit_is_interrupted(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in `close`: Spark does not replay the batch, so the next `close` commits it."""
    job.add(*ids(1, 2))
    pipeline = slow_pipeline(job, monkeypatch)
    job.run(pipeline)

    def interrupt(point: str, where: object) -> None:
        if point == "commit.before":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "handler", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pipeline.close()
    assert (states(pipeline), job.visible()) == ([State.DECIDED], Counter())
    pipeline.close()
    assert (states(pipeline), job.visible()) == ([State.COMPLETE], Counter([1, 2]))


@pytest.mark.parametrize("held_at", ["begin.before", "hold.before"])
def test_wait_with_a_timeout_goes_past_a_long_batch(
    job: Job, monkeypatch: pytest.MonkeyPatch, held_at: str
) -> None:
    """Else nobody could stop a batch of an hour from the loop that waits for it.

    The first batch has no token for some seconds.
    """
    job.add(*ids(1))
    waited, is_held = threading.Event(), threading.Event()
    in_time: list[bool] = []

    def hold(point: str, where: object) -> None:
        if point == held_at:
            is_held.set()
            in_time.append(waited.wait(30))

    monkeypatch.setattr(failpoints, "handler", hold)
    pipeline = checkpoint_pipeline(job)
    query = job.start(pipeline)
    assert is_held.wait(60)
    assert not pipeline.awaitTermination(query, 0.01)
    waited.set()
    assert pipeline.awaitTermination(query)
    assert in_time == [True]
    assert job.visible() == Counter([1])


def fail_once_at(point: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fail when the point is reached for the first time; it stands in the list from then on."""
    failed: list[str] = []

    def fail_once(reached: str, where: object) -> None:
        if reached == point and not failed:
            failed.append(reached)
            raise failpoints.InjectedError(reached)

    monkeypatch.setattr(failpoints, "handler", fail_once)
    return failed


def leave_undecided(job: Job, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    """A run that ends, as a crash ends it, between Spark's commits/N and our decision."""
    pipeline = checkpoint_pipeline(job, **settings)
    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "handler", fail_at("decide.before"))
        with pytest.raises(failpoints.InjectedError):
            pipeline.awaitTermination(job.start(pipeline))
    assert states(pipeline) == [State.PREPARED]
    assert job.visible() == Counter()


FAULTS = ["answer of begin", "answer and log", "answer and read", "entry"]


@pytest.mark.parametrize("fault", FAULTS)
def test_idle_start_recovers_though_an_answer_is_lost(
    job: Job, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """It holds the token that it has taken: no other object recovers what is left."""
    job.add(*ids(1, 2))
    leave_undecided(job, monkeypatch)
    fired: list[LogError] = []

    def lose(call: Callable[..., Any], error: LogError, *, lands: bool) -> Callable[..., Any]:
        def called(*given: Any) -> Any:
            if error in fired:
                return call(*given)
            fired.append(error)
            if lands:
                call(*given)
            raise error

        return called

    pipeline = checkpoint_pipeline(job)
    if fault == "answer and read":  # of the look whether another object holds the token
        losing = lose(SqliteLog.find, LogUnavailableError("it fails over"), lands=False)
        monkeypatch.setattr(SqliteLog, "find", losing)
    if fault == "answer and log":  # no other try reaches it
        monkeypatch.setattr(Pipeline, "ask_log", lambda _, ask, *_given: ask())
    if fault != "entry":
        losing = lose(SqliteLog.begin, DecisionUnknownError("no answer"), lands=True)
        monkeypatch.setattr(SqliteLog, "begin", losing)
    else:
        losing = lose(checkpoint.enter, LogUnavailableError("it fails over"), lands=False)
        monkeypatch.setattr(checkpoint, "enter", losing)
    with idle(job, pipeline):
        wait_for(lambda: states(pipeline) == [State.COMPLETE])
    assert len(fired) == (2 if fault == "answer and read" else 1)
    assert job.visible() == Counter([1, 2])


@pytest.mark.parametrize(
    "way",
    [
        "listener",
        "awaitTermination",
        "next batch",
        "listener of commit='immediate'",
        "awaitTermination of commit='immediate'",
    ],
)
def test_start_commits_what_the_last_run_left_undecided(
    job: Job, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Also when there is no new data, so that foreachBatch is never called."""
    job.add(*ids(1, 2))
    leave_undecided(job, monkeypatch)
    pipeline = job.pipeline() if "immediate" in way else checkpoint_pipeline(job)
    if way == "next batch":
        job.add(*ids(3))
        job.run(pipeline)
        pipeline.close()
        assert job.visible() == Counter([1, 2, 3])
        return
    if "awaitTermination" in way:
        pipeline.awaitTermination(job.start(pipeline))
    else:
        job.run(pipeline)
        wait_for(lambda: states(pipeline) == [State.COMPLETE])
    assert job.visible() == Counter([1, 2])
    assert states(pipeline) == [State.COMPLETE]


def test_pipeline_that_was_made_before_the_session(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It hears of no start, which its first batch says and ends: one without data calls nobody."""
    with monkeypatch.context() as patch:
        patch.setattr(SparkSession, "getActiveSession", lambda: None)
        patch.setattr(SparkSession, "_instantiatedSession", None)
        pipeline = checkpoint_pipeline(job)
    for value in (1, 2):
        job.add(*ids(value))
        job.run(pipeline)
    pipeline.close()
    (told,) = [r.getMessage() for r in caplog.records if "the SparkSession" in r.getMessage()]
    assert "end its queries with pipeline.awaitTermination(query)" in told
    assert job.visible() == Counter([1, 2])
    assert pipeline._starts.listener is not None


def test_pipeline_of_another_session_than_its_query(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Spark tells a listener of its own session's starts only."""
    job = Job(spark.newSession(), tmp_path)
    job.add(*ids(1))
    with checkpoint_pipeline(job) as pipeline:
        job.run(pipeline)
    (told,) = [r.getMessage() for r in caplog.records if "hears of a start" in r.getMessage()]
    assert "was created in another SparkSession than its query" in told
    caplog.clear()
    (tmp_path / "own").mkdir()
    job = Job(spark, tmp_path / "own")
    job.add(*ids(1))
    with checkpoint_pipeline(job) as pipeline:
        job.run(pipeline)
    assert not [r for r in caplog.records if "hears of a start" in r.getMessage()]


def test_recovery_that_fails_at_the_start_is_tried_again(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listener's try fails: awaitTermination does not pass over what is undecided."""
    job.add(*ids(1, 2))
    leave_undecided(job, monkeypatch)
    pipeline = checkpoint_pipeline(job)
    tried = fail_once_at("finish.before", monkeypatch)
    query = job.start(pipeline)
    wait_for(lambda: bool(tried))
    pipeline.awaitTermination(query)
    assert states(pipeline) == [State.COMPLETE]
    assert job.visible() == Counter([1, 2])


def test_recovery_that_fails_behind_the_querys_end_is_tried_again(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listener has turned to the run and is at it: awaitTermination waits for what it does."""
    job.add(*ids(1, 2))
    leave_undecided(job, monkeypatch)
    pipeline = checkpoint_pipeline(job)
    queries: list[StreamingQuery] = []
    failed: list[str] = []

    def fail_late(point: str, where: object) -> None:
        if point == "finish.before" and not failed:
            failed.append(point)
            wait_for(lambda: bool(queries) and not queries[0].isActive)
            raise failpoints.InjectedError(point)

    monkeypatch.setattr(failpoints, "handler", fail_late)
    queries.append(job.start(pipeline))
    wait_for(lambda: bool(failed))
    pipeline.awaitTermination(queries[0])
    assert states(pipeline) == [State.COMPLETE]
    assert job.visible() == Counter([1, 2])


@contextlib.contextmanager
def idle(job: Job, deliver: Callable[[DataFrame, int], None]) -> Iterator[StreamingQuery]:
    """A query that goes on when it has processed all files."""
    checkpoint = str(job.folder / job.checkpoint)
    stream = job.rows().writeStream.foreachBatch(deliver).option("checkpointLocation", checkpoint)
    query = stream.trigger(processingTime="0 seconds").start()
    try:
        yield query
    finally:
        query.stop()


def test_idle_pipeline_commits_its_last_batch_after_a_failure(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else would for a weekend, while servers time out what is prepared."""
    job.add(*ids(1, 2))
    pipeline = checkpoint_pipeline(job)
    failed = fail_once_at("decide.after", monkeypatch)
    with idle(job, pipeline) as query:
        wait_for(lambda: states(pipeline) == [State.COMPLETE])
        assert query.isActive
        assert job.visible() == Counter([1, 2])
        job.add(*ids(3))
        wait_for(lambda: states(pipeline) == [State.COMPLETE] * 2)
    assert (failed, starts(pipeline)) == (["decide.after"], 2)
    assert job.visible() == Counter([1, 2, 3])


def test_batch_that_spark_has_not_reached_outlives_a_failure(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new incarnation would abandon it, and Spark commit it in the next moment."""
    job.add(*ids(1, 2))
    pipeline = checkpoint_pipeline(job)
    prepared, looked = threading.Event(), list[int]()
    committed = RunningQuery.committed

    def unreadable_at_first(self: RunningQuery) -> int:
        if not prepared.is_set():
            return committed(self)
        looked.append(committed(self))
        if len(looked) == 1:
            raise OSError("the checkpoint's file system fails over")
        return looked[-1]

    def note(point: str, where: object) -> None:
        if point == "hold.after":
            prepared.set()

    def deliver(df: DataFrame, batch_id: int) -> None:
        pipeline(df, batch_id)
        wait_for(lambda: len(looked) > 1)  # after the failure, and before Spark's commits/0

    monkeypatch.setattr(failpoints, "handler", note)
    monkeypatch.setattr(RunningQuery, "committed", unreadable_at_first)
    with idle(job, deliver) as query:
        wait_for(lambda: states(pipeline) == [State.COMPLETE])
        assert query.isActive
    assert (looked[:2], starts(pipeline)) == ([-1, -1], 2)
    assert job.visible() == Counter([1, 2])


def test_idle_start_is_recovered_after_a_failure(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """No batch and no awaitTermination comes to try it again."""
    job.add(*ids(1, 2))
    leave_undecided(job, monkeypatch)
    pipeline = checkpoint_pipeline(job)
    failed = fail_once_at("finish.before", monkeypatch)
    with idle(job, pipeline) as query:
        wait_for(lambda: states(pipeline) == [State.COMPLETE])
        assert query.isActive
    assert failed
    assert job.visible() == Counter([1, 2])


def test_next_batch_mends_a_failure_of_the_commit_before_it(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A blip in the thread that commits ends no query that has another batch to deliver."""
    for value in (1, 2):
        job.add(*ids(value))
    monkeypatch.setattr(run, "while_active", lambda query, action, what: action())
    failed = fail_once_at("decide.before", monkeypatch)
    pipeline = checkpoint_pipeline(job)

    def deliver(df: DataFrame, batch_id: int) -> None:
        if batch_id == 1:
            wait_for(lambda: (r := pipeline._serving.run) is not None and r.failure is not None)
        pipeline(df, batch_id)

    job.run(deliver)  # type: ignore[arg-type]
    pipeline.close()
    assert failed
    assert states(pipeline) == [State.COMPLETE] * 2
    assert job.visible() == Counter([1, 2])


def test_wait_goes_past_a_log_that_is_unreachable_for_a_moment(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The query itself needs nothing of the log, and must not end with the program."""
    job.add(*ids(1))
    pipeline = checkpoint_pipeline(job)
    job.run(pipeline)
    pipeline.close()
    pipeline = checkpoint_pipeline(job)
    away = LogUnavailableError("it fails over")
    text = "its start was not recovered yet: it fails over"
    with idle(job, pipeline) as query:
        with monkeypatch.context() as patch:
            patch.setattr(SqliteLog, "unfinished", Mock(side_effect=away))
            # The listener may be at work, for which a wait does not wait.
            wait_for(lambda: not pipeline.awaitTermination(query, 0.01) and text in caplog.text)
        assert query.isActive
        assert not pipeline.awaitTermination(query, 0.01)


def test_failure_that_time_does_not_mend_is_not_tried_again(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator has to: the next batch, or the query's end, says so."""
    job.add(*ids(1, 2))
    pipeline, failed = checkpoint_pipeline(job), list[str]()

    def fail(point: str, where: object) -> None:
        if point == "decide.before":
            failed.append(point)
            raise ProtocolError(point)

    monkeypatch.setattr(failpoints, "handler", fail)
    with idle(job, pipeline) as query:
        wait_for(lambda: (run := pipeline._serving.run) is not None and run.failure is not None)
        job.add(*ids(3))
        with pytest.raises(Exception, match=r"decide\.before"):
            query.awaitTermination()
    assert failed == ["decide.before"]


def test_batch_that_spark_did_not_commit_is_abandoned_and_replayed(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt's rows are aborted; the replay's rows are delivered, other ones or not."""
    job.add(*ids(1, 2))

    pipeline = checkpoint_pipeline(job)
    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "handler", fail_at("deliver.after"))
        with pytest.raises(Exception, match=r"deliver\.after"):
            job.run(pipeline)
    (first,) = pipeline.log.history("orders")
    assert first.state is State.PREPARED
    pipeline = checkpoint_pipeline(job)
    job.run(pipeline, lambda df: df.selectExpr("id + 10 AS id"))
    pipeline.close()
    assert job.visible() == Counter([11, 12])
    (record,) = pipeline.log.history("orders")
    assert record.state is State.COMPLETE
    assert record.token > first.token


def test_batches_without_data_are_settled_too(job: Job) -> None:
    """A watermark that moves on makes Spark run a batch without rows; it flushes the window."""
    job.add(*ids(1, 2))
    job.add(*ids(50))
    pipeline = checkpoint_pipeline(job)

    from pyspark.sql.functions import window

    def per_ten_seconds(df: DataFrame) -> DataFrame:
        return (
            df.withWatermark("at", "1 second")
            .groupBy(window("at", "10 seconds"))
            .count()
            .selectExpr("count AS id")
        )

    job.run(pipeline, per_ten_seconds)
    pipeline.close()
    assert any(record.shares["file"].rows == 0 for record in pipeline.log.history("orders"))
    assert set(states(pipeline)) == {State.COMPLETE}


Look = Callable[["StreamingQuery"], object]


def run_and_look(
    job: Job, deliver: Callable[[DataFrame, int], None], look: Look
) -> tuple[StreamingQuery, int]:
    """Process all files, and look at each moment at which Spark has not yet committed a batch.

    Every batch is prepared, and foreachBatch about to return, when another thread looks.
    """
    started: Future[StreamingQuery] = Future()
    looks = 0

    def deliver_and_look(df: DataFrame, batch_id: int) -> None:
        nonlocal looks
        deliver(df, batch_id)
        with ThreadPoolExecutor(1) as other:
            other.submit(look, started.result(DEADLINE_S)).result(DEADLINE_S)
        looks += 1

    query = job.start(deliver_and_look)  # type: ignore[arg-type]
    started.set_result(query)
    query.awaitTermination()
    return query, looks


def token(pipeline: ExactlyOnce) -> int:
    return head_of(pipeline.log, "orders").token


def starts(pipeline: ExactlyOnce) -> int:
    """How many drivers have begun since one of them completed a batch."""
    return head_of(pipeline.log, "orders").starts


def test_awaiting_a_query_whose_batches_are_a_job_group_of_the_users(job: Job) -> None:
    """Spark names its own job group by the run; the user's name is not taken for another run."""
    for value in (1, 2, 3):
        job.add(*ids(value))
    pipeline = checkpoint_pipeline(job)

    def deliver(df: DataFrame, batch_id: int) -> None:
        job.spark.sparkContext.setJobGroup("orders", f"orders, batch {batch_id}")
        pipeline(df, batch_id)

    query, looks = run_and_look(job, deliver, lambda q: pipeline.awaitTermination(q, 0.01))
    pipeline.awaitTermination(query)
    assert looks == 3
    assert len({record.token for record in pipeline.log.history("orders")}) == 1
    assert job.visible() == Counter([1, 2, 3])


@pytest.mark.parametrize("who", ["the same object", "another object", "a late listener"])
def test_awaiting_a_run_that_was_followed_by_another(job: Job, who: str) -> None:
    """Somebody still polls the first run when the second one's batch waits for Spark."""
    job.add(*ids(1))
    pipeline = checkpoint_pipeline(job)
    first = job.run(pipeline)
    pipeline.close()
    for value in (2, 3):
        job.add(*ids(value))
    waiting = checkpoint_pipeline(job) if who == "another object" else pipeline
    tokens: list[int] = []

    def look(_query: StreamingQuery) -> None:
        tokens.append(token(pipeline))
        if who == "a late listener":
            waiting._starts.on_start(RunningQuery.of(first))
        else:
            waiting._serving.recover_at_start(RunningQuery.of(first))

    query, looks = run_and_look(job, pipeline, look)
    pipeline.awaitTermination(query)
    assert looks == 2
    assert set(tokens) == {token(pipeline)}
    assert job.visible() == Counter([1, 2, 3])


def test_awaiting_a_query_with_another_object_than_it_calls(job: Job) -> None:
    """A cell of a notebook ran again: the new object leaves the query to the one that serves it.

    It still returns only when the last batch is committed; by then the query has ended, so it may
    commit the batch itself.
    """
    for value in (1, 2, 3):
        job.add(*ids(value))
    pipeline = checkpoint_pipeline(job)
    again: list[ExactlyOnce] = []

    def look(query: StreamingQuery) -> None:
        again.append(checkpoint_pipeline(job))
        again[-1].awaitTermination(query, 0.01)

    query, looks = run_and_look(job, pipeline, look)
    again[-1].awaitTermination(query)
    assert states(pipeline) == [State.COMPLETE] * 3
    assert looks == 3
    assert job.visible() == Counter([1, 2, 3])


def test_start_that_is_recovered_late_fences_no_batch(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older object hears of the start and is paused; the new one has prepared a batch by then.

    A token for the older one would abandon that batch, which Spark is about to commit.
    """
    job.add(*ids(1))
    older = checkpoint_pipeline(job)
    job.run(older)
    older.close()
    job.add(*ids(2))
    pipeline = checkpoint_pipeline(job)
    resumed = threading.Event()
    begun: list[str] = []

    def pause_older(query: RunningQuery) -> None:
        begun.append("older")
        resumed.wait(DEADLINE_S)
        recover_at_start(query)

    def note(point: str, where: Any) -> None:
        if point == "hold.after":
            begun.append("held")
            resumed.set()
            wait_for(lambda: not older_thread_runs())

    def older_thread_runs() -> bool:
        return any(t.name == "older" and t.is_alive() for t in threading.enumerate())

    recover_at_start = older._serving.recover_at_start
    query = job.start(pipeline)
    running = RunningQuery.of(query)
    thread = threading.Thread(target=lambda: pause_older(running), name="older")
    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "handler", note)
        thread.start()
        query.awaitTermination()
    pipeline.awaitTermination(query)
    resumed.set()
    thread.join()
    assert states(pipeline) == [State.COMPLETE] * 2
    assert job.visible() == Counter([1, 2])


@pytest.fixture
def other_job(spark: SparkSession, tmp_path: Path) -> Job:
    """A query with a checkpoint of its own, into a folder of its own."""
    folder = tmp_path / "other"
    folder.mkdir()
    return Job(spark, folder)


def test_pipelines_of_one_name_in_two_checkpoints(job: Job, other_job: Job) -> None:
    """With their logs inside: the newer one's listener hears the start of the older one's query."""
    for value in (1, 2, 3):
        job.add(*ids(value))
    pipeline = checkpoint_pipeline(job, log="checkpoint")
    newer = checkpoint_pipeline(other_job, log="checkpoint", sinks=pipeline.sinks)

    def look(query: StreamingQuery) -> None:
        newer._starts.on_start(RunningQuery.of(query))

    query, looks = run_and_look(job, pipeline, look)
    pipeline.awaitTermination(query)
    assert (looks, states(pipeline)) == (3, [State.COMPLETE] * 3)
    assert job.visible() == Counter([1, 2, 3])


def states_in(job: Job) -> list[State]:
    log = open_log(f"checkpoint:{job.folder / job.checkpoint}")
    return [record.state for record in log.history("orders")]


def test_object_serves_one_query(job: Job, other_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another query is refused, and loses the object nothing that it has prepared."""
    job.add(*ids(1, 2))
    other_job.add(*ids(3))
    pipeline = slow_pipeline(job, monkeypatch, log="checkpoint")
    job.run(pipeline)
    assert states_in(job) == [State.PREPARED]
    with pytest.raises(StreamingQueryException, match="make an ExactlyOnce for each query"):
        other_job.run(pipeline)
    pipeline.close()
    assert states_in(job) == [State.COMPLETE]
    job.add(*ids(4))
    job.run(pipeline)
    pipeline.close()
    assert job.visible() == Counter([1, 2, 4])


def test_start_of_a_pipeline_is_recovered_by_its_own_object(
    job: Job, other_job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No new data, and a newer object of the name serves another checkpoint."""
    pipeline = checkpoint_pipeline(job, log="checkpoint")
    newer = checkpoint_pipeline(other_job, log="checkpoint")
    job.add(*ids(1, 2))
    other_job.add(*ids(3))
    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "handler", fail_at("decide.before"))
        with pytest.raises(failpoints.InjectedError):
            pipeline.awaitTermination(job.start(pipeline))
    newer.awaitTermination(other_job.start(newer))
    job.run(pipeline)
    wait_for(lambda: states(pipeline) == [State.COMPLETE])
    assert job.visible() == Counter([1, 2])
    assert other_job.visible() == Counter([3])


def test_object_whose_start_had_no_data_knows_its_checkpoint(
    job: Job, other_job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers for no other one's start, whose last batch would stay prepared."""
    for each, value in ((job, 1), (other_job, 2)):
        each.add(*ids(value))
        leave_undecided(each, monkeypatch, log="checkpoint")
    pipeline = checkpoint_pipeline(job, log="checkpoint")
    newer = checkpoint_pipeline(other_job, log="checkpoint")
    other_job.run(newer)
    wait_for(lambda: states_in(other_job) == [State.COMPLETE])
    job.run(pipeline)
    wait_for(lambda: states_in(job) == [State.COMPLETE])
    assert (job.visible(), other_job.visible()) == (Counter([1]), Counter([2]))


def test_object_that_was_followed_by_another_has_nothing_to_settle(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would say that its last batch is not committed, of one that is."""
    job.add(*ids(1))
    pipeline = slow_pipeline(job, monkeypatch)
    job.run(pipeline)
    newer = checkpoint_pipeline(job)
    newer.awaitTermination(job.start(newer))
    assert states(newer) == [State.COMPLETE]
    pipeline.close()


def take_over_elsewhere(pipeline: ExactlyOnce) -> None:
    head = head_of(pipeline.log, "orders")
    targets = {sink.name: sink.target for sink in pipeline.sinks}
    pipeline.log.begin(claim_again(pipeline.log, head, targets))


def test_failure_behind_which_another_driver_took_over_is_not_tried_again(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """To begin anew would fence that one, and abandon what it has prepared."""
    job.add(*ids(1))
    pipeline = checkpoint_pipeline(job)

    def lose(point: str, where: object) -> None:
        if point == "decide.before":
            take_over_elsewhere(pipeline)
            raise failpoints.InjectedError(point)

    monkeypatch.setattr(failpoints, "handler", lose)
    with idle(job, pipeline):
        wait_for(lambda: "was taken over by" in caplog.text)
    assert starts(pipeline) == 2


def test_start_behind_which_another_driver_took_over_is_not_tried_again(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The machine slept between two tries: what the other one has prepared would be abandoned."""
    job.add(*ids(1))
    leave_undecided(job, monkeypatch)
    pipeline = checkpoint_pipeline(job)
    before = starts(pipeline)

    def lose(point: str, where: object) -> None:
        if point == "finish.before" and starts(pipeline) == before + 1:
            take_over_elsewhere(pipeline)
            raise failpoints.InjectedError(point)

    monkeypatch.setattr(failpoints, "handler", lose)
    with idle(job, pipeline):
        wait_for(lambda: "was taken over by" in caplog.text)
    assert starts(pipeline) == before + 2


def test_exit_waits_for_no_batch_that_runs(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lifecycle, "_EXIT_WAIT_S", 0.01)
    pipeline = checkpoint_pipeline(job)
    with ThreadPoolExecutor(1) as pool, pipeline._serving.lock:
        pool.submit(pipeline._serving.commit_at_exit).result()
    assert "still being delivered" in caplog.text


def test_query_that_is_being_stopped_is_active_until_its_batch_ends(job: Job) -> None:
    """Spark may still write commits/N, and the sinks are still in use."""
    job.add(*ids(1))
    seen: list[tuple[RunningQuery, bool, bool]] = []
    begun = threading.Event()

    def deliver(df: DataFrame, batch_id: int) -> None:
        running = RunningQuery.calling(df)
        begun.set()
        wait_for(lambda: running.is_stopping)
        seen.append((running, running.is_stopping, running.is_active))

    with idle(job, deliver) as query:
        begun.wait()
        query.stop()
    ((running, was_stopping, was_active),) = seen
    assert (was_stopping, was_active) == (True, True)
    assert not running.is_active


def test_run_that_is_not_the_active_one_is_not_found(job: Job) -> None:
    """Neither one that has ended nor one to come passes for the run that Spark has."""
    job.add(*ids(1))
    found: list[str] = []

    def look(query: StreamingQuery) -> None:
        for run_id in ("another", str(query.runId)):
            with contextlib.suppress(ConfigurationError):
                found.append(RunningQuery.find(job.spark, RunId(str(query.id), run_id)).run.run_id)

    query, _ = run_and_look(job, checkpoint_pipeline(job), look)
    assert found == [str(query.runId)]


SCRIPT = """
import os, sys
os.environ["PYSPARK_PYTHON"] = sys.executable
from pyspark.sql import SparkSession
from sparkonce import ExactlyOnce
from sparkonce.sinks import FileSink

spark = (SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
         .config("spark.driver.bindAddress", "127.0.0.1")
         .config("spark.driver.host", "127.0.0.1").getOrCreate())
folder = sys.argv[1]
orders = ExactlyOnce("orders", sinks=[FileSink(folder + "/out")], commit="after_checkpoint",
                     log="sqlite:///" + folder + "/txn.db")
query = (spark.readStream.schema("id long, at timestamp").json(folder + "/in")
         .writeStream.foreachBatch(orders).option("checkpointLocation", folder + "/ckpt")
         .trigger(availableNow=True).start())
query.awaitTermination()
"""


def test_script_that_ends_right_after_its_query_has_its_last_batch_committed(job: Job) -> None:
    """The interpreter's exit is the last chance, and it is taken."""
    job.add(*ids(1, 2, 3))
    subprocess.run(
        [sys.executable, "-c", SCRIPT, str(job.folder)],
        check=True,
        timeout=DEADLINE_S * 3,
        env={**os.environ, "PYSPARK_SUBMIT_ARGS": submit_args()},
    )
    assert job.visible() == Counter([1, 2, 3])
    assert states(job.pipeline()) == [State.COMPLETE]


def test_unknown_policy_is_named(job: Job) -> None:
    with pytest.raises(ConfigurationError, match='expected "immediate" or "after_checkpoint"'):
        job.pipeline(commit="late")
