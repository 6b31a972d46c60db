"""``writeStream.format("sparkonce")`` under a real query: each of its processes fails or dies."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark import StatusTracker, TaskContext, cloudpickle
from pyspark import __version__ as version
from pyspark.errors import StreamingQueryException

from integration_tests.support.format_job import FormatJob, shaped_for
from integration_tests.support.spark import ids
from sparkonce import ExactlyOnce, shaped
from sparkonce.errors import ConfigurationError
from sparkonce.model import Committable
from sparkonce.protocol.operating import claim_again, head_of
from sparkonce.sinks import FileSink, SqliteSink
from sparkonce.spark_hooks import shaping
from sparkonce.spark_hooks.data_source.shaped import hash_names
from sparkonce.testing.crash import Arm
from sparkonce.txn_log import open_log
from sparkonce.txn_log.record import State, TransactionRecord

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

pytestmark = pytest.mark.skipif(version < "4.1", reason="Spark 4.0 gives a data source no Arrow")


@pytest.fixture
def job(spark: SparkSession, tmp_path: Path) -> FormatJob:
    return FormatJob(spark, tmp_path)


def records(job: FormatJob) -> list[TransactionRecord]:
    with closing(open_log(job.log)) as log:
        return sorted(log.history("orders"), key=lambda record: record.id.batch_id)


def in_two(df: DataFrame) -> DataFrame:
    return df.repartition(2, "id")


def test_rows_of_every_batch_arrive_once_in_every_sink(job: FormatJob) -> None:
    """Also where tasks have no rows; the process that plans the batches keeps its token."""
    for first in (0, 10, 20):
        job.add(*ids(*range(first, first + 3)))
    job.add()
    right = job.sink_folder("right")
    job.write(job.publish([FileSink(job.out), FileSink(right, name="right")]), in_two)
    assert job.visible() == job.visible(right) == Counter([0, 1, 2, 10, 11, 12, 20, 21, 22])
    assert {record.state for record in records(job)} == {State.COMPLETE}
    assert [record.id.batch_id for record in records(job)] == [0, 1, 2, 3]
    assert len({record.token for record in records(job)}) == 1
    assert not job.left_over(job.out, right)


def test_each_sink_gets_the_columns_that_it_selects(job: FormatJob) -> None:
    """`shaped` makes them in the query, and the sinks get no other column."""
    job.add(*ids(1, 2))
    right = job.sink_folder("right")
    sinks = [FileSink(job.out), FileSink(right, name="right", select=["id * 2 AS twice"])]
    job.write(job.publish(sinks), shaped_for(*sinks))
    assert job.visible() == Counter([1, 2])
    assert job.visible(right, "twice") == Counter([2, 4])
    (record,) = records(job)
    assert {part.content.algorithm for part in record.shares["right"].parts} != {"rows"}


def test_source_that_is_read_twice_gets_ahead_of_another(job: FormatJob) -> None:
    """Three offsets and two folders: a counter is not looked up in the folder of another source."""
    others = job.sink_folder("others")
    for value in (100, 101):
        (others / f"{value}.json").write_text(f'{{"id": {value}}}')
    job.add(*ids(1))

    def shape(rows: DataFrame) -> DataFrame:
        reader = job.spark.readStream.schema(rows.schema).option("maxFilesPerTrigger", 1)
        other = reader.json(str(others))
        return other.union(other).union(rows)

    job.write(job.publish([FileSink(job.out)]), shape)
    assert job.visible() == Counter([1, 100, 100, 101, 101])
    assert [json.loads(offset)["logOffset"] for offset in records(job)[1].offsets] == [1, 1, 0]


@pytest.mark.parametrize("others", [["id"], ["id + 1 AS id"], None])
def test_rows_that_are_shaped_for_other_sinks_are_refused(
    job: FormatJob, others: list[str] | None
) -> None:
    """Else a sink would get the columns of another one, which may have the same names."""
    job.add(*ids(1, 2))
    right = job.sink_folder("right")
    sinks = [
        FileSink(job.out, select=["id"]),
        FileSink(right, name="right", select=["id * 2 AS id"]),
    ]
    changed = (
        [sinks[1], sinks[0]]
        if others is None
        else [sinks[0], FileSink(right, name="right", select=others)]
    )
    with pytest.raises(Exception, match="was called with other sinks"):
        job.write(job.publish(sinks), shaped_for(*changed))
    assert job.visible() == job.visible(right) == Counter()


@pytest.mark.parametrize("name", ["twice", "`a b`"])
def test_one_sink_gets_the_columns_that_it_selects(job: FormatJob, name: str) -> None:
    """Alone, it gets them plain or in a struct, by their names."""
    job.add(*ids(1, 2))
    sinks = [FileSink(job.out, select=[f"id * 2 AS {name}"])]
    job.write(job.publish(sinks), shaped_for(*sinks))
    assert job.visible(column=name.strip("`")) == Counter([2, 4])


@pytest.mark.parametrize(
    ("select", "is_one_pass"),
    [
        ("id * 2 AS `a b`", True),
        ("row_number() OVER (PARTITION BY id ORDER BY at) AS n", True),
        ("count(*) AS n", False),
        ("sum(count(*)) OVER () AS n", False),
        ("explode(array(id, id)) AS n", False),
        ("window(at, '2 seconds', '1 second').start AS n", False),
        ("window(nullif(at, at), '1 second').start AS n", False),
    ],
)
@pytest.mark.parametrize("has_jvm", [True, False])
def test_select_is_checked_without_a_jvm_too(
    job: FormatJob, monkeypatch: pytest.MonkeyPatch, select: str, is_one_pass: bool, has_jvm: bool
) -> None:
    """As over Spark Connect, where only the explained plan shows that a select makes other rows."""
    monkeypatch.setattr(shaping, "has_jvm", lambda df: has_jvm)
    rows = job.spark.createDataFrame([(1, None)], "id long, at timestamp")
    sinks = [FileSink(job.out), FileSink(job.out, name="other", select=[select])]
    if is_one_pass:
        assert shaped(rows, sinks).columns == ["shape0", "shape1", *hash_names(sinks)]
        return
    with pytest.raises(ConfigurationError, match="other: select="):
        shaped(rows, sinks)


def test_schema_of_the_query_evolves(job: FormatJob) -> None:
    """A start with another column: the file sink takes it, a table without it refuses the start."""
    table = SqliteSink(job.folder / "shop.db", table="orders")
    pipeline = job.publish([FileSink(job.out), table])
    job.add(*ids(1))
    job.write(pipeline, lambda df: df.select("id"))
    job.add(*ids(2))
    with pytest.raises(StreamingQueryException, match=r"has no column \['day'\]"):
        job.write(pipeline, lambda df: df.selectExpr("id", "date(at) AS day"))
    assert job.visible() == Counter([1])
    with closing(sqlite3.connect(job.folder / "shop.db")) as shop:
        shop.execute("ALTER TABLE orders ADD COLUMN day TEXT")
        job.write(pipeline, lambda df: df.selectExpr("id", "date(at) AS day"))
        assert job.visible() == Counter([1, 2])
        assert shop.execute("SELECT id, day FROM orders").fetchall() == [
            (1, None),
            (2, "2026-01-01"),
        ]


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        (lambda df: df.dropDuplicates(["id"]), {1: 1, 2: 1, 3: 1}),
        (lambda df: df.withWatermark("at", "1 hour").dropDuplicates(["id"]), {1: 1, 2: 1, 3: 1}),
    ],
    ids=["keys", "watermark"],
)
def test_stateful_query_stays_right_over_replays(
    job: FormatJob, shape: Callable[[DataFrame], DataFrame], rows: dict[int, int]
) -> None:
    """Each batch is decided and replayed; the replay is read to its end, so that state moves on."""
    pipeline = job.publish()
    for batch in ([1, 2], [2, 3], [1, 3]):
        job.add(*ids(*batch))
        job.write(pipeline, shape)
        job.forget_commit()
    job.write(pipeline, shape)
    assert job.visible() == Counter(rows)


def test_every_start_takes_a_token_of_its_own(job: FormatJob) -> None:
    """Also in one JVM; a batch that is complete is read and not written again."""
    pipeline = job.publish()
    job.add(*ids(1, 2))
    job.write(pipeline)
    job.forget_commit()
    job.write(pipeline)
    job.add(*ids(3))
    job.write(pipeline)
    assert job.visible() == Counter([1, 2, 3])
    first, second = (record.token for record in records(job))
    assert first < second
    assert not job.left_over()


class FailingSink(FileSink):
    """Its second task fails once the file `fail` is in its folder's parent."""

    def preCommit(self, handle: Any) -> Committable:
        context = TaskContext.get()
        assert context is not None
        if context.partitionId() == 1:
            while not (self._folder.parent / "fail").exists():
                time.sleep(0.02)
            raise OSError("the disk is full")
        return super().preCommit(handle)


def _has_returned(jobs: StatusTracker, run_id: str) -> bool:
    """Whether one task of two has returned what it prepared, and the other one still runs."""
    stages = [jobs.getStageInfo(n) for n in jobs.getActiveStageIds()]
    return bool(jobs.getJobIdsForGroup(run_id)) and any(
        stage is not None and stage.numTasks == 2 and stage.numCompletedTasks == 1
        for stage in stages
    )


def test_task_that_fails_aborts_what_the_others_have_prepared(job: FormatJob) -> None:
    """Spark calls `abort` with what the tasks that succeeded have returned."""
    job.add(*ids(*range(10)))
    right = job.sink_folder("right")
    query = job.begin(job.publish([FileSink(job.out), FailingSink(right, name="right")]), in_two)
    waiting, jobs = threading.Event(), job.spark.sparkContext.statusTracker()
    while not _has_returned(jobs, str(query.runId)):
        assert query.isActive, query.exception()
        waiting.wait(0.05)
    (job.folder / "fail").touch()
    with pytest.raises(Exception, match="the disk is full"):
        query.awaitTermination()
    assert job.visible() == job.visible(right) == Counter()
    assert not job.left_over(job.out, right)
    assert not records(job)
    job.write(job.publish([FileSink(job.out), FileSink(right, name="right")]), in_two)
    assert job.visible() == job.visible(right) == Counter(range(10))


@pytest.mark.parametrize("point", ["vote.before", "decide.before"])
def test_commit_that_fails_before_the_decision_aborts(job: FormatJob, point: str) -> None:
    """Nothing is visible or left over, and the replay delivers the rows."""
    job.add(*ids(1, 2, 3))
    arm = job.points.arm(point, action="error")
    with pytest.raises(Exception, match="armed at"):
        job.write(job.publish(), in_two)
    assert job.points.hits(arm)
    assert job.visible() == Counter()
    assert not job.left_over()
    job.points.disarm()
    job.write(job.publish(), in_two)
    assert job.visible() == Counter([1, 2, 3])


@pytest.mark.parametrize("point", ["decide.after", "commit.before"])
def test_abort_after_a_decision_aborts_nothing(job: FormatJob, point: str) -> None:
    """Spark calls `abort` after a `commit` that raised, and it goes by the log."""
    job.add(*ids(1, 2, 3))
    arm = job.points.arm(point, action="error")
    with pytest.raises(Exception, match="armed at"):
        job.write(job.publish(), in_two)
    assert job.points.hits(arm)
    (decided,) = records(job)
    assert decided.state is State.DECIDED
    assert len(job.left_over()) == 2, "the prepared files"
    job.points.disarm()
    job.write(job.publish())
    assert job.visible() == Counter([1, 2, 3])
    (record,) = records(job)
    assert record.state is State.COMPLETE
    assert (record.revision, record.token) == (0, decided.token)


@pytest.mark.parametrize(
    "point",
    ["begin.after", "recover.after", "vote.after", "decide.before", "decide.after", "commit.after"],
)
def test_process_of_the_driver_is_killed_alone(job: FormatJob, point: str) -> None:
    """The JVM lives on and fails the query; the next start continues from the log."""
    job.add(*ids(1, 2, 3))
    job.add(*ids(4, 5))
    arm = job.points.arm(point)
    query = job.begin(job.publish(), in_two)
    os.kill(_pid_at(job, arm, query), signal.SIGKILL)
    with pytest.raises(Exception, match="STREAM_FAILED"):
        query.awaitTermination()
    job.points.disarm()
    job.write(job.publish(), in_two)
    assert job.visible() == Counter([1, 2, 3, 4, 5])
    assert {record.state for record in records(job)} == {State.COMPLETE}
    assert not job.left_over()


@pytest.mark.parametrize(
    ("point", "state"), [("decide.before", None), ("commit.before", State.DECIDED)]
)
def test_paused_commit_finds_that_it_is_fenced(
    job: FormatJob, point: str, state: State | None
) -> None:
    """It decides nothing more; what it had decided stays so."""
    job.add(*ids(1, 2, 3))
    arm = job.points.arm(point)
    query = job.begin(job.publish(), in_two)
    _pid_at(job, arm, query)
    with closing(open_log(job.log)) as log:
        head = head_of(log, "orders")
        log.begin(claim_again(log, head, head.sinks))
    job.points.disarm()
    with pytest.raises(Exception, match="FencedError"):
        query.awaitTermination()
    assert [record.state for record in records(job)] == ([state] if state else [])
    job.write(job.publish(), in_two)
    assert job.visible() == Counter([1, 2, 3])
    assert not job.left_over()


def test_lost_branch_is_rewritten_from_the_replay(job: FormatJob) -> None:
    """The plan sees what is lost, and only that partition of that sink is written again."""
    job.add(*ids(1, 2, 3, 4))
    right = job.sink_folder("right")
    sinks = [FileSink(job.out), FileSink(right, name="right")]
    _decide_and_lose_one(job, sinks, shaped_for(*sinks))
    job.write(job.publish(sinks), lambda df: shaped_for(*sinks)(in_two(df)))
    assert job.visible() == job.visible(right) == Counter([1, 2, 3, 4])
    (record,) = records(job)
    assert (record.revision, [c.branch_id.sink for c in record.lost]) == (1, ["file"])


def test_lost_branch_whose_rows_were_not_hashed_is_an_operators(job: FormatJob) -> None:
    """Rows that are only counted cannot be proven equal."""
    job.add(*ids(1, 2, 3, 4))
    sinks = [FileSink(job.out)]
    _decide_and_lose_one(job, sinks, lambda df: df)
    for _ in range(2):
        with pytest.raises(Exception, match=r"PreparedBranchLostError.*sparkonce\.shaped"):
            job.write(job.publish(sinks), in_two)
    assert [record.state for record in records(job)] == [State.DECIDED]


def _decide_and_lose_one(job: FormatJob, sinks: list[Any], shape: Any) -> None:
    arm = job.points.arm("decide.after", action="error")
    with pytest.raises(Exception, match=r"armed at decide"):
        job.write(job.publish(sinks), lambda df: shape(in_two(df)))
    assert job.points.hits(arm)
    job.points.disarm()
    first, *rest = sorted(job.left_over())
    assert rest
    first.unlink()


def _pid_at(job: FormatJob, arm: Arm, query: StreamingQuery) -> int:
    """The process that is paused at the point."""
    waiting = threading.Event()
    while not (hits := job.points.hits(arm)):
        assert query.isActive, query.exception()
        waiting.wait(0.05)
    return hits[0].pid


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"commit": "after_checkpoint"}, 'use commit="immediate"'),
        ({"sinks": [lambda out: FileSink(out, transform=lambda df: df)]}, "a second pass"),
        ({"sinks": [lambda out: FileSink(out, select=["id"])]}, r"sparkonce\.shaped\(df, sinks\)"),
        ({"sinks": [lambda out: FileSink(out, writers=1)]}, r"df\.coalesce\(1\)"),
        ({"sinks": [lambda out: FileSink(out / "missing")]}, "create it"),
    ],
    ids=["after_checkpoint", "transform", "select", "writers", "folder"],
)
def test_what_cannot_work_is_refused_with_a_way_out(
    job: FormatJob, settings: dict[str, Any], told: str
) -> None:
    """Before any row is visible."""
    job.add(*ids(1, 2, 3, 4))
    made = {**settings}
    if "sinks" in made:
        made["sinks"] = [make(job.out) for make in made["sinks"]]
    with pytest.raises(Exception, match=told):
        job.write(job.publish(**made), in_two)
    assert job.visible() == Counter()


def test_options_that_are_missing_are_named(job: FormatJob) -> None:
    job.add(*ids(1))
    writer = job.rows().writeStream.format("sparkonce").trigger(availableNow=True)
    place = str(job.folder / "ckpt")
    with pytest.raises(Exception, match=r'option\("pipeline", "module:attribute"\)'):
        writer.option("checkpointLocation", place).start().awaitTermination()
    job.spark.conf.set("spark.sql.streaming.checkpointLocation", place)
    try:
        writer = job.rows().writeStream.format("sparkonce").option("pipeline", job.publish())
        with pytest.raises(Exception, match="on the query itself"):
            writer.trigger(availableNow=True).start().awaitTermination()
    finally:
        job.spark.conf.unset("spark.sql.streaming.checkpointLocation")


def test_checkpoint_of_foreach_batch_continues_here_and_back(job: FormatJob) -> None:
    """The two fronts share the log's records, the identity guard and the sinks' names."""
    job.add(*ids(1))
    job.run(job.pipeline())
    job.add(*ids(2))
    job.write(job.publish())
    job.add(*ids(3))
    job.run(job.pipeline())
    assert job.visible() == Counter([1, 2, 3])
    first, second, third = (record.token for record in records(job))
    assert first < second < third


def test_fresh_checkpoint_under_an_old_name_is_refused(job: FormatJob) -> None:
    """As a full refresh of a declarative pipeline makes it: its batches begin at 0 again."""
    job.add(*ids(1))
    job.write(job.publish())
    job.checkpoint = "other"
    with pytest.raises(Exception, match="replaces="):
        job.write(job.publish())
    assert job.visible() == Counter([1])


def test_object_that_is_sent_to_a_server_says_what_to_use(job: FormatJob) -> None:
    """foreachBatch over Spark Connect pickles what it is given."""
    with pytest.raises(ConfigurationError, match=r'format\("sparkonce"\)'):
        cloudpickle.dumps(job.pipeline())
    assert isinstance(job.pipeline(), ExactlyOnce)
