"""`ExactlyOnce.stop` and `held`: a query ends, or pauses, between two batches."""

from __future__ import annotations

import random
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException

from integration_tests.support.spark import Job, ids
from sparkonce import ExactlyOnce, failpoints
from sparkonce.errors import CommitUnresolvedError, ProtocolError
from sparkonce.model import Committable, Owner
from sparkonce.protocol.pipeline import CommitPolicy
from sparkonce.sinks import FileSink, SqliteSink
from sparkonce.spark_hooks import gate
from sparkonce.spark_hooks.run import Run
from sparkonce.spark_hooks.running_query import RunningQuery
from sparkonce.txn_log.record import State

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

DEADLINE_S = 60.0
POLICIES: list[CommitPolicy] = ["immediate", "after_checkpoint"]


@pytest.fixture
def job(spark: SparkSession, tmp_path: Path) -> Job:
    """File N has the row N, and is batch N."""
    return Job(spark, tmp_path)


class Moment:
    """A fail point that holds the driver in one batch until the test lets it go on."""

    def __init__(self, point: str = "", batch: int = 1, sink: str | None = None) -> None:
        self.point, self.batch, self.sink = point, batch, sink
        self.reached, self.released = threading.Event(), threading.Event()
        self.now = -1

    def __call__(self, point: str, where: Any) -> None:
        at = (point, where.get("batch"))
        if at != (self.point, self.batch) or self.sink not in {None, where.get("sink")}:
            return
        if not self.reached.is_set():
            self.reached.set()
            assert self.released.wait(DEADLINE_S)

    def around(self, pipeline: ExactlyOnce) -> Callable[[DataFrame, int], None]:
        """A function of the user's own, with a moment before the call and one after it."""

        def deliver(df: DataFrame, batch_id: int) -> None:
            self.now = batch_id
            self("call", {"batch": batch_id})
            pipeline(df, batch_id)
            self("return", {"batch": batch_id})

        return deliver

    def in_transform(self, df: DataFrame) -> DataFrame:
        self("write", {"batch": self.now})
        return df


def pipeline_of(job: Job, moment: Moment | None = None, **settings: Any) -> ExactlyOnce:
    transform = None if moment is None else moment.in_transform
    sinks = [
        FileSink(job.out, transform=transform),
        SqliteSink(job.folder / "rows.db", "orders", select=["id"]),
    ]
    pipeline = job.pipeline(sinks=sinks, **settings)
    # The driver writes every batch, which is quicker.
    pipeline._serving.settings = replace(pipeline.settings, small_batches_first=0)
    return pipeline


@contextmanager
def running(
    job: Job, deliver: Callable[[DataFrame, int], None], **trigger: Any
) -> Iterator[StreamingQuery]:
    query = (
        job.rows()
        .writeStream.foreachBatch(deliver)
        .option("checkpointLocation", str(job.folder / job.checkpoint))
        .trigger(**(trigger or {"processingTime": "0 seconds"}))
        .start()
    )
    try:
        yield query
    finally:
        query.stop()


def wait_for(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < deadline, "the state was not reached"
        time.sleep(0.01)


def in_thread(action: Callable[[], None]) -> Future[None]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(action)
    pool.shutdown(wait=False)
    return future


def is_closed(pipeline: ExactlyOnce) -> bool:
    return pipeline._gate._last < 1_000


def committed(job: Job) -> int:
    paths = (job.folder / job.checkpoint / "commits").glob("[0-9]*")  # Spark 4.1 makes it later
    return max((int(path.name) for path in paths), default=-1)


def rows(job: Job) -> tuple[Counter[Any], Counter[Any]]:
    with closing(sqlite3.connect(job.folder / "rows.db")) as db:
        return job.visible(), Counter(value for (value,) in db.execute("SELECT id FROM orders"))


def assert_clean(job: Job, pipeline: ExactlyOnce, query: StreamingQuery) -> int:
    """Sinks, log and Spark have the same batches, and nothing else; returns the last one."""
    last = committed(job)
    assert not query.isActive
    assert query.exception() is None
    records = pipeline.log.history("orders")
    assert [(record.id.batch_id, record.state) for record in records] == [
        (batch_id, State.COMPLETE) for batch_id in range(last, -1, -1)
    ]
    # A batch may have several files after a restart.
    assert rows(job) == (Counter(range(sum(r.shares["file"].rows for r in records))),) * 2
    owner = Owner(pipeline.log.id_of("orders"), str(query.id))
    assert [branch for sink in pipeline.sinks for branch in sink.find_branches(owner)] == []
    return last


def assert_continues(job: Job, pipeline: ExactlyOnce) -> None:
    """The same object continues with the next batch, or another one under the other policy."""
    if pipeline.settings.commit == "after_checkpoint":
        pipeline = pipeline_of(job, commit="after_checkpoint")
    job.add(*ids(job.files))
    with pipeline:
        query = job.run(pipeline)
    assert_clean(job, pipeline, query)
    assert rows(job) == (Counter(range(job.files)),) * 2


MOMENTS = [
    Moment("write"),
    Moment("vote.before"),
    Moment("decide.before"),
    Moment("hold.after"),
    Moment("decide.after"),
    Moment("commit.before", sink="sqlite"),
    Moment("complete.before"),
    Moment("deliver.after"),
    Moment("return"),
]


@pytest.mark.parametrize("commit", POLICIES)
@pytest.mark.parametrize("at", MOMENTS, ids=lambda moment: moment.point)
def test_stop_at(
    job: Job, monkeypatch: pytest.MonkeyPatch, at: Moment, commit: CommitPolicy
) -> None:
    """The batch is finished in every sink and in Spark, and the next one does not begin."""
    if (at.point, commit) == ("hold.after", "immediate"):
        pytest.skip("nothing is held before its decision")
    moment = Moment(at.point, at.batch, at.sink)
    for n in range(6):
        job.add(*ids(n))
    pipeline = pipeline_of(job, moment, commit=commit)
    monkeypatch.setattr(failpoints, "handler", moment)
    with running(job, moment.around(pipeline)) as query:
        assert moment.reached.wait(DEADLINE_S)
        stopped = in_thread(lambda: pipeline.stop(query, DEADLINE_S))
        wait_for(lambda: is_closed(pipeline))
        # Spark must come to its next batch, or to its commit log, before the query is stopped.
        with pytest.raises(TimeoutError):
            stopped.result(0.1)
        moment.released.set()
        stopped.result(DEADLINE_S)
        assert query.status["message"] == "Stopped"
        # A checkpoint policy's decision on batch 1 may be made in the call for batch 2.
        assert assert_clean(job, pipeline, query) in {1, 2}
    assert not is_closed(pipeline)
    assert_continues(job, pipeline)


def test_stop_waits_for_the_decision(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark has committed the batch, and the thread that decides it has not looked yet."""
    looks = threading.Event()
    commit_soon = Run.commit_soon

    def late(run: Run, batch_id: int) -> None:
        assert looks.wait(DEADLINE_S)
        commit_soon(run, batch_id)

    monkeypatch.setattr(Run, "commit_soon", late)
    job.add(*ids(0))
    pipeline = pipeline_of(job, commit="after_checkpoint")
    with running(job, pipeline) as query:
        wait_for(lambda: committed(job) == 0)
        with pytest.raises(TimeoutError, match="is prepared, not complete"):
            pipeline.stop(query, 0.05)
        looks.set()
        pipeline.stop(query)
        assert assert_clean(job, pipeline, query) == 0


@pytest.mark.parametrize("commit", POLICIES)
def test_stop_between_two_batches(job: Job, commit: CommitPolicy) -> None:
    """Spark has begun the batch, and the user's function has not called the pipeline yet."""
    moment = Moment("call")
    for n in range(3):
        job.add(*ids(n))
    pipeline = pipeline_of(job, commit=commit)
    with running(job, moment.around(pipeline)) as query:
        assert moment.reached.wait(DEADLINE_S)
        stopped = in_thread(lambda: pipeline.stop(query, DEADLINE_S))
        wait_for(lambda: not query.isActive)  # Spark waits for the batch
        moment.released.set()
        stopped.result(DEADLINE_S)
        assert query.status["message"] == "Stopped"
        assert assert_clean(job, pipeline, query) == 0
    assert_continues(job, pipeline)


@pytest.mark.parametrize("commit", POLICIES)
@pytest.mark.parametrize("trigger", [{"processingTime": "0 seconds"}, {"processingTime": "1 hour"}])
def test_stop_when_idle(job: Job, trigger: dict[str, Any], commit: CommitPolicy) -> None:
    job.add(*ids(0))
    pipeline = pipeline_of(job, commit=commit)
    with running(job, pipeline, **trigger) as query:
        wait_for(lambda: committed(job) == 0)
        pipeline.stop(query)
        assert query.status["message"] == "Stopped"
        assert assert_clean(job, pipeline, query) == 0
        pipeline.stop(query)  # which has ended
    assert_continues(job, pipeline)


@pytest.mark.parametrize("commit", POLICIES)
@pytest.mark.parametrize("trigger", ["availableNow", "once"])
def test_stop_of_a_query_that_ends_by_itself(job: Job, trigger: str, commit: CommitPolicy) -> None:
    for n in range(4):
        job.add(*ids(n))
    moment, pipeline = Moment("return", batch=0), pipeline_of(job, commit=commit)
    with running(job, moment.around(pipeline), **{trigger: True}) as query:
        assert moment.reached.wait(DEADLINE_S)
        stopped = in_thread(lambda: pipeline.stop(query))
        wait_for(lambda: is_closed(pipeline))
        moment.released.set()
        stopped.result(DEADLINE_S)
        assert assert_clean(job, pipeline, query) == 0
    assert_continues(job, pipeline)


@pytest.mark.parametrize("commit", POLICIES)
def test_stop_before_the_first_batch(job: Job, commit: CommitPolicy) -> None:
    moment, pipeline = Moment("call", batch=0), pipeline_of(job, commit=commit)
    job.add(*ids(0))
    with running(job, moment.around(pipeline)) as query:
        assert moment.reached.wait(DEADLINE_S)
        stopped = in_thread(lambda: pipeline.stop(query))
        wait_for(lambda: not query.isActive)
        moment.released.set()
        stopped.result(DEADLINE_S)
        assert (query.exception(), pipeline.log.head("orders")) == (None, None)
    assert_continues(job, pipeline)


@pytest.mark.parametrize("commit", POLICIES)
def test_held_query_continues(job: Job, commit: CommitPolicy) -> None:
    """A call waits at the gate, without the object's lock, and then delivers its batch."""
    job.add(*ids(0))
    pipeline = pipeline_of(job, commit=commit)
    with running(job, pipeline) as query:
        wait_for(lambda: committed(job) == 0)
        for n in (1, 2):
            with pipeline.held(query):
                job.add(*ids(n))
                wait_for(lambda: pipeline._gate.waiting is not None)
                with pipeline.held(query):  # again, in the same thread
                    assert pipeline._serving.lock.acquire(timeout=0)
                    pipeline._serving.lock.release()
                assert is_closed(pipeline)
                assert (pipeline._gate.waiting, committed(job)) == (n, n - 1)
            wait_for(lambda n=n: committed(job) == n)  # type: ignore[misc]
        with pipeline.held(query):
            job.add(*ids(3))
            wait_for(lambda: pipeline._gate.waiting == 3)
            pipeline.stop(query)
        # Spark has recognised its interrupt, and did not fail while it looked for it.
        assert query.status["message"] == "Stopped"
        assert assert_clean(job, pipeline, query) == 2
    assert_continues(job, pipeline)


def test_stop_lets_a_replay_pass(job: Job) -> None:
    """The sinks have its batch already: only the replay makes Spark agree with them."""
    for n in range(2):
        job.add(*ids(n))
    pipeline = pipeline_of(job)
    job.run(pipeline)
    job.forget_commit()
    moment = Moment("call")
    job.add(*ids(2))
    with running(job, moment.around(pipeline)) as query:
        assert moment.reached.wait(DEADLINE_S)
        stopped = in_thread(lambda: pipeline.stop(query, DEADLINE_S))
        wait_for(lambda: is_closed(pipeline))
        moment.released.set()
        stopped.result(DEADLINE_S)
        assert assert_clean(job, pipeline, query) == 1
    assert_continues(job, pipeline)


@pytest.mark.parametrize("commit", POLICIES)
def test_timeout_lets_the_query_continue(
    job: Job, monkeypatch: pytest.MonkeyPatch, commit: CommitPolicy
) -> None:
    moment = Moment("vote.before", batch=0)
    for n in range(3):
        job.add(*ids(n))
    pipeline = pipeline_of(job, commit=commit)
    monkeypatch.setattr(failpoints, "handler", moment)
    with running(job, pipeline) as query:
        assert moment.reached.wait(DEADLINE_S)
        with pytest.raises(TimeoutError, match="a batch is being delivered"):
            pipeline.stop(query, 0.05)
        moment.released.set()
        wait_for(lambda: committed(job) == 2)
        pipeline.stop(query, DEADLINE_S)
        assert assert_clean(job, pipeline, query) == 2


def test_ctrl_c_lets_the_query_continue(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    moment, pipeline = Moment("vote.before", batch=0), pipeline_of(job)
    for n in range(2):
        job.add(*ids(n))
    monkeypatch.setattr(failpoints, "handler", moment)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with running(job, pipeline) as query:
        assert moment.reached.wait(DEADLINE_S)
        with monkeypatch.context() as patch:
            patch.setattr(gate.Gate, "_what_runs", interrupt)
            with pytest.raises(KeyboardInterrupt):
                pipeline.stop(query)
        moment.released.set()
        wait_for(lambda: committed(job) == 1)
        pipeline.stop(query)
        assert assert_clean(job, pipeline, query) == 1


@pytest.mark.parametrize("commit", POLICIES)
def test_batch_fails_while_stop_waits(
    job: Job, monkeypatch: pytest.MonkeyPatch, commit: CommitPolicy
) -> None:
    """`stop` lets the query end by itself, and raises what it failed with, at once and again."""
    moment, returns = Moment("vote.before"), threading.Event()
    for n in range(3):
        job.add(*ids(n))
    pipeline = pipeline_of(job, commit=commit)

    def fail(point: str, where: Any) -> None:
        moment(point, where)
        if moment.released.is_set() and point == "vote.after":
            raise failpoints.InjectedError(point)

    def deliver(df: DataFrame, batch_id: int) -> None:
        try:
            pipeline(df, batch_id)
        except failpoints.InjectedError:
            assert returns.wait(DEADLINE_S)
            raise

    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "handler", fail)
        with running(job, deliver) as query:
            assert moment.reached.wait(DEADLINE_S)
            stopped = in_thread(lambda: pipeline.stop(query))
            wait_for(lambda: is_closed(pipeline))
            moment.released.set()
            wait_for(lambda: pipeline._gate._failed == 1)
            with pytest.raises(TimeoutError):
                stopped.result(1)
            assert query.isActive
            returns.set()
            for stop in (lambda: stopped.result(DEADLINE_S), lambda: pipeline.stop(query)):
                with pytest.raises(StreamingQueryException, match=r"vote\.after"):
                    stop()
    assert_continues(job, pipeline)


def test_commit_that_stays_unresolved(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """`stop` waits for it; with a timeout the query continues, and so do the tries to commit."""
    resolved, tried = threading.Event(), threading.Event()
    commit = SqliteSink.commit

    def lose(sink: SqliteSink, committable: Committable) -> None:
        if not resolved.is_set():
            tried.set()
            raise CommitUnresolvedError("no response")
        commit(sink, committable)

    monkeypatch.setattr(SqliteSink, "commit", lose)
    job.add(*ids(0))
    pipeline = pipeline_of(job, commit="after_checkpoint")
    with running(job, pipeline) as query:
        assert tried.wait(DEADLINE_S)
        with pytest.raises(TimeoutError, match="a batch is being committed"):
            pipeline.stop(query, 0.2)
        assert query.isActive
        stopped = in_thread(lambda: pipeline.stop(query))
        wait_for(lambda: is_closed(pipeline))
        resolved.set()
        stopped.result(DEADLINE_S)
        assert assert_clean(job, pipeline, query) == 0


def test_stop_from_two_threads(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    moment, pipeline = Moment("vote.before"), pipeline_of(job)
    for n in range(4):
        job.add(*ids(n))
    monkeypatch.setattr(failpoints, "handler", moment)
    with running(job, pipeline) as query:
        assert moment.reached.wait(DEADLINE_S)
        stops = [in_thread(lambda: pipeline.stop(query)) for _ in range(2)]
        wait_for(lambda: is_closed(pipeline))
        with pytest.raises(TimeoutError, match="another thread holds the query"):
            pipeline.stop(query, 0.05)
        moment.released.set()
        for stopped in stops:
            stopped.result(DEADLINE_S)
        assert assert_clean(job, pipeline, query) == 1


def test_stop_in_foreach_batch_is_refused(job: Job) -> None:
    """Before the call and inside of it; another thread may stop the query."""
    refusals: list[str] = []
    started, stops = threading.Event(), list[Future[None]]()
    queries: list[StreamingQuery] = []

    def stop(df: DataFrame) -> DataFrame:
        assert started.wait(DEADLINE_S)
        with pytest.raises(ProtocolError, match="in its query's own foreachBatch") as refusal:
            pipeline.stop(queries[0])
        refusals.append(str(refusal.value))
        return df

    def deliver(df: DataFrame, batch_id: int) -> None:
        pipeline(stop(df), batch_id)
        if batch_id == 1:
            stops.append(in_thread(lambda: pipeline.stop(queries[0])))

    for n in range(2):
        job.add(*ids(n))
    pipeline = pipeline_of(job)
    pipeline.sinks[0].transform = stop  # type: ignore[misc]
    with running(job, deliver) as query:
        queries.append(query)
        started.set()
        wait_for(lambda: bool(stops))
        stops[0].result(DEADLINE_S)
        assert assert_clean(job, pipeline, query) == 1
    assert len(refusals) >= 4


def test_queries_of_others_are_refused(job: Job, spark: SparkSession, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    other = Job(spark, folder)
    job.add(*ids(0))
    other.add(*ids(0))
    pipeline = pipeline_of(job)
    theirs = ExactlyOnce("theirs", sinks=[FileSink(other.out)])
    twin = pipeline_of(job)
    first = job.run(pipeline)
    with running(job, pipeline) as query, running(other, theirs) as their_query:
        wait_for(lambda: committed(other) == 0)
        with pytest.raises(ProtocolError, match="serves the query"):
            pipeline.stop(their_query)
        with pytest.raises(ProtocolError, match="belongs to pipeline 'theirs'"):
            twin.stop(their_query)
        with pytest.raises(ProtocolError, match="was started again"):
            pipeline.stop(first)
        job.add(*ids(1))
        wait_for(lambda: committed(job) == 1)
        with pytest.raises(ProtocolError, match="another ExactlyOnce object"):
            twin.stop(query)
        assert query.isActive
        assert their_query.isActive
        theirs.stop(their_query)
        pipeline.stop(query)
        assert assert_clean(job, pipeline, query) == 1


def test_call_of_another_query_that_is_refused_does_not_hold_up_a_stop(
    job: Job, spark: SparkSession, tmp_path: Path
) -> None:
    """Its batch has a higher number than any of the query that is served."""
    folder = tmp_path / "other"
    folder.mkdir()
    other = Job(spark, folder)
    for n in range(2):
        other.add(*ids(n))
    other.run(lambda df, batch_id: None)  # type: ignore[arg-type]
    job.add(*ids(0))
    pipeline = pipeline_of(job)
    with running(job, pipeline) as query:
        wait_for(lambda: committed(job) == 0)
        other.add(*ids(2))
        with pytest.raises(StreamingQueryException, match="make an ExactlyOnce for each query"):
            other.run(pipeline)
        pipeline.stop(query, DEADLINE_S)
        assert assert_clean(job, pipeline, query) == 0


def test_query_that_ended_within_a_batch(job: Job) -> None:
    """Something else stopped it, and the sinks have a batch that Spark has not."""
    job.add(*ids(0))
    pipeline = pipeline_of(job)
    query = job.run(pipeline)
    pipeline.stop(query)
    job.forget_commit()
    with pytest.raises(ProtocolError, match="commit log does not have batch 0"):
        pipeline.stop(query)


def test_function_that_catches_sparks_interrupt(job: Job) -> None:
    """Spark interrupts only once; a call that comes later must not wait for ever."""
    moment, pipeline = Moment("call"), pipeline_of(job)
    caught: list[Exception] = []

    def deliver(df: DataFrame, batch_id: int) -> None:
        moment("call", {"batch": batch_id})
        try:
            df.sparkSession.sparkContext._jvm.java.lang.Thread.sleep(1)
        except Exception as error:  # noqa: BLE001 - as careless users write it
            caught.append(error)
        pipeline(df, batch_id)

    for n in range(2):
        job.add(*ids(n))
    with running(job, deliver) as query:
        assert moment.reached.wait(DEADLINE_S)
        stopped = in_thread(lambda: pipeline.stop(query))
        wait_for(lambda: RunningQuery.of(query).is_stopping)
        thread = query._jsq.streamingQuery().queryExecutionThread()
        wait_for(thread.isInterrupted)
        moment.released.set()
        stopped.result(DEADLINE_S)
        assert len(caught) == 1
        assert query.status["message"] == "Stopped"
        assert assert_clean(job, pipeline, query) == 0


@pytest.mark.slow
def test_sixty_stops_of_fresh_queries(spark: SparkSession, tmp_path: Path) -> None:
    """Spark refuses a checkpoint in which it was interrupted while it wrote its first offsets."""
    for n in range(60):
        folder = tmp_path / str(n)
        folder.mkdir()
        job = Job(spark, folder)
        job.add(*ids(0))
        pipeline = pipeline_of(job)
        with running(job, pipeline) as query:
            time.sleep(random.random() * 0.25)  # noqa: S311 - any moment will do
            pipeline.stop(query, DEADLINE_S)
        offsets = folder / job.checkpoint / "offsets"
        left = {path.name for path in offsets.iterdir()} if offsets.exists() else set()
        assert not left or "0" in left, f"stop {n}"
        pipeline.close()


@pytest.mark.slow
@pytest.mark.parametrize("commit", POLICIES)
def test_twenty_stops_at_random_moments(job: Job, commit: CommitPolicy) -> None:
    seed = random.randrange(1 << 32)  # noqa: S311 - a seed is printed, not kept secret
    print(f"seed {seed}")
    chance = random.Random(seed)  # noqa: S311 - see there
    pipeline = pipeline_of(job, commit=commit)
    for _ in range(20):
        for _ in range(chance.randrange(8)):
            job.add(*ids(job.files))
        with running(job, pipeline) as query:
            time.sleep(chance.random() * 1.5)
            pipeline.stop(query, DEADLINE_S)
            # Where its interrupt was not recognised, Spark leaves it at "Processing new data".
            message = query.status["message"]
            assert message == "Stopped" or message.startswith("Initializing")
            assert query.exception() is None
            if pipeline.log.head("orders") is not None:
                assert_clean(job, pipeline, query)
        if chance.random() < 0.3:
            pipeline = pipeline_of(job, commit=commit)
    assert_continues(job, pipeline)
