"""`ExactlyOnce` under a real streaming query, with folders as sinks: starts, replays, shapes."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import shutil
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
import pytest
from pyspark import InheritableThread
from pyspark import __version__ as version
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import Observation
from pyspark.sql.functions import count, lit

from integration_tests.support.spark import Job, fail_at, ids, numbered_by_state
from sparkonce import ExactlyOnce, failpoints
from sparkonce.errors import ConfigurationError, FencedError, ProtocolError, SinkUnavailableError
from sparkonce.protocol.driver import Driver
from sparkonce.protocol.operating import claim_again, head_of
from sparkonce.protocol.pipeline import CommitPolicy
from sparkonce.sinks import FileSink, SqliteSink
from sparkonce.spark_hooks import shaping, validating
from sparkonce.spark_hooks.batch import SHUFFLE_CHECKS, _snapshot
from sparkonce.spark_hooks.query import RunId
from sparkonce.spark_hooks.run import Run
from sparkonce.spark_hooks.running_query import RunningQuery
from sparkonce.spark_hooks.shaping import Shapes
from sparkonce.txn_log import base as log_base
from sparkonce.txn_log.claim import Claim
from sparkonce.txn_log.record import State

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery


@pytest.fixture
def job(spark: SparkSession, tmp_path: Path) -> Job:
    return Job(spark, tmp_path)


class DealingSink(FileSink):
    """Deals rows by a column."""

    distribute_by = ("id",)


@pytest.mark.parametrize("is_checked", [True, False])
def test_rows_that_are_dealt_out_are_computed_once(
    job: Job,
    set_conf: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
    is_checked: bool,
) -> None:
    """What a lost executor had of a shuffle is made anew, and dealt otherwise if by chance.

    A snapshot keeps it from that, which Spark needs only where it does not check by itself.
    """
    if is_checked and not job.spark.conf.isModifiable(SHUFFLE_CHECKS[0]):
        pytest.skip("this version of Spark has no checksums of shuffles")
    for setting in SHUFFLE_CHECKS:  # Spark 4.1 has them, disabled
        set_conf(setting, str(is_checked).lower())
    kind = type(job.spark.range(1))
    snapshot, taken = kind.localCheckpoint, []

    def watched(df: DataFrame, **options: Any) -> DataFrame:
        taken.append(df)
        return snapshot(df, **options)

    def kept() -> set[int]:
        return set(job.spark.sparkContext._jsc.getPersistentRDDs())

    monkeypatch.setattr(kind, "localCheckpoint", watched)
    before = kept()
    job.add(*ids(*range(20)))
    sink = DealingSink(job.out, writers=6, select=["*", "uuid() AS made"])
    job.run(job.pipeline(sinks=[sink]))
    assert len(taken) == (not is_checked)
    assert all("made" in df.columns for df in taken), "select= is evaluated anew behind it"
    assert kept() == before, "the snapshot stays on the executors"
    assert job.visible() == Counter(range(20))


def test_snapshot_is_one_that_spark_seals(spark: SparkSession) -> None:
    """Of two attempts at a partition with other rows each, all passes read the same one's."""
    with _snapshot(spark.range(1)) as rows:
        rdd: Any = rows._jdf.queryExecution().logical().rdd()
        assert not rdd.getStorageLevel().deserialized(), "it has no bytes to sum"
        if version >= "4.3":
            assert rdd.verifyCheckpointChecksums()


@pytest.mark.parametrize("is_alone", [True, False])
def test_one_writer_makes_one_branch_of_a_batch(job: Job, is_alone: bool) -> None:
    """The partitions of a batch come together in one task, also beside a sink with more tasks."""
    job.add(*ids(*range(20)))
    job.add(*ids(*range(20, 40)))
    other = FileSink(job.sink_folder("other"), name="other")
    one = FileSink(job.out, name="one", writers=1)
    pipeline = job.pipeline(sinks=[one] if is_alone else [other, one])
    job.run(pipeline, lambda df: df.repartition(3, "id"))
    assert job.visible() == Counter(range(40))
    assert is_alone or job.visible(job.folder / "other") == Counter(range(40))
    for record in pipeline.log.history("orders"):
        branches = {name: len(share.committables) for name, share in record.shares.items()}
        assert branches == ({"one": 1} if is_alone else {"other": 3, "one": 1})


class SpellingSink(FileSink):
    """Makes its columns of those that `select=` leaves."""

    def columns(self, schema: pa.Schema, rows: str) -> list[str]:
        return [f"{rows}.`{name}` AS `{name}`" for name in schema.names]


@pytest.mark.parametrize(
    ("beside", "settings"), [(FileSink, {}), (DealingSink, {"writers": 2}), (SpellingSink, {})]
)
def test_names_of_a_select_are_the_same_beside_other_sinks(
    job: Job, beside: type[FileSink], settings: dict[str, Any]
) -> None:
    """Also on the driver, which writes the last batches, and of expressions without AS."""
    select = ["CAST(id AS string) -- as text", "id + 1", "at AS `a.t` -- instant", "id * 2 AS id2"]
    folder = job.sink_folder("beside")
    sinks = [
        FileSink(job.out, select=select),
        FileSink(job.sink_folder("whole"), name="whole"),
        beside(folder, name="beside", select=["upper(CAST(id AS string))", *select], **settings),
    ]
    for n in range(5):
        job.add(*ids(n))
    job.run(job.pipeline(sinks=sinks))
    names = ["id", "(id + 1)", "a.t", "id2"]
    assert {tuple(pq.read_schema(f).names) for f in job.out.glob("*.parquet")} == {tuple(names)}
    names = ["upper(CAST(id AS STRING))", *names]
    assert {tuple(pq.read_schema(f).names) for f in folder.glob("*.parquet")} == {tuple(names)}
    assert job.visible() == job.visible(folder) == Counter("01234")


@pytest.mark.parametrize(
    "select", [["id + 1 AS next", "next * 2 AS twice"], ["explode(array(id, id)) AS id"]]
)
def test_select_that_works_alone_only_is_refused_beside_other_sinks(
    job: Job, select: list[str]
) -> None:
    job.add(*ids(1))
    sinks = [FileSink(job.out), FileSink(job.sink_folder("other"), name="other", select=select)]
    pipeline = job.pipeline(sinks=sinks)
    said = refused(job, pipeline)
    assert "other: select=" in said
    assert "transform=" in said
    assert pipeline.log.head("orders") is None
    job.run(job.pipeline(sinks=[FileSink(job.out, select=select)]))


@pytest.mark.parametrize(
    ("select", "beside"),
    [
        (["count(*) AS id"], ["7 AS id"]),
        (["sum(count(*)) OVER () AS id"], ["7 AS id", "current_date() AS day"]),
        (
            ["window(timestamp_seconds(id), '2 seconds', '1 second').start AS at"],
            ["7 AS id", "id AS n"],
        ),
        (
            ["window(timestamp_seconds(nullif(id, 2)), '1 second').start AS at"],
            ["7 AS id", "id AS n"],
        ),
    ],
)
def test_select_that_makes_other_rows_makes_none_for_other_sinks(
    job: Job, select: list[str], beside: list[str]
) -> None:
    """An aggregate makes one row, a window of time several for each, or none for a null."""
    job.add(*ids(1, 2))
    sink = FileSink(job.sink_folder("other"), name="other", select=select)
    said = refused(job, job.pipeline(sinks=[FileSink(job.out, select=beside), sink]))
    assert "other: select=" in said
    assert "transform=" in said
    job.run(job.pipeline(sinks=[FileSink(job.out, select=beside)]))
    assert job.visible() == Counter({7: 2})


def test_variable_does_not_stand_in_for_an_alias(job: Job) -> None:
    """Beside other sinks Spark knows no alias of an entry before, and takes what has its name."""
    sinks = [
        FileSink(job.out),
        FileSink(job.out, name="other", select=["id + 1 AS next", "next * 2 AS twice"]),
        FileSink(job.out, name="variable", select=["next AS n", "sum(id) OVER (ORDER BY id) AS s"]),
    ]
    df = job.spark.range(3)
    job.spark.sql("DECLARE OR REPLACE VARIABLE next = 70L")
    try:
        with pytest.raises(ConfigurationError, match="^other: select= .*transform="):
            Shapes().with_hashes(df, sinks)
        rows, _ = Shapes().with_hashes(df, [sinks[0], sinks[2]])
        assert {row.shape1.n for row in rows.collect()} == {70}
    finally:
        job.spark.sql("DROP TEMPORARY VARIABLE next")


def test_flow_whose_function_calls_shaped(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's own message names no cause that a user knows, and `select=` is not at fault."""

    def refuse(_: DataFrame) -> DataFrame:
        raise AnalysisException("[ATTEMPT_ANALYSIS_IN_PIPELINE_QUERY_FUNCTION] not allowed")

    monkeypatch.setattr(shaping, "_analysed", refuse)
    sinks = [FileSink(job.out), FileSink(job.sink_folder("other"), name="other", select=["id"])]
    with pytest.raises(ConfigurationError, match="call it at the top of the file"):
        Shapes().with_hashes(job.spark.range(1).toDF("id"), sinks)


def test_aggregates_of_several_sinks_share_a_pass(job: Job) -> None:
    job.add(*ids(1, 2, 3))
    other = job.sink_folder("other")
    sinks = [
        FileSink(job.out, select=["count(*) AS id"]),
        FileSink(other, name="other", select=["max(id) + 1 AS id"]),
    ]
    job.run(job.pipeline(sinks=sinks))
    assert (job.visible(), job.visible(other)) == (Counter([3]), Counter([4]))


def test_torn_file_of_the_checkpoint_is_named(job: Job) -> None:
    """Spark names it when it reads it; nothing of ours fails before."""
    job.add(*ids(1))
    job.run(job.pipeline())
    job.forget_commit()
    offsets = job.folder / job.checkpoint / "offsets"
    (offsets / ".0.crc").unlink(missing_ok=True)
    (offsets / "0").write_text("")
    pipeline = job.pipeline()
    query = job.start(pipeline)
    with pytest.raises(StreamingQueryException, match="offsets/0"):
        pipeline.awaitTermination(query)
    assert job.visible() == Counter([1])


def test_rows_of_every_batch_arrive_once_in_every_sink(job: Job) -> None:
    """Sinks with their own columns share one pass; a transform gets a pass of its own."""
    job.add(*ids(1, 2, 3))
    job.add(*ids(4, 5))
    texts, evens = job.sink_folder("texts"), job.sink_folder("evens")
    pipeline = job.pipeline(
        sinks=[
            FileSink(job.out),
            FileSink(texts, name="texts", select=["to_json(struct(id)) AS value"]),
            FileSink(evens, name="evens", transform=lambda df: df.where("id % 2 = 0")),
        ]
    )
    job.run(pipeline)
    assert job.visible() == Counter([1, 2, 3, 4, 5])
    assert job.visible(evens) == Counter([2, 4])
    assert job.visible(texts, "value") == Counter(f'{{"id":{n}}}' for n in range(1, 6))
    newest, *_ = pipeline.log.history("orders")
    assert newest.state is State.COMPLETE
    assert {name: share.rows for name, share in newest.shares.items()} == {
        "file": 2,
        "texts": 2,
        "evens": 1,
    }
    (offset,) = newest.offsets
    assert json.loads(offset).keys() == {"logOffset", "files"}


def test_replayed_batch_is_not_written_again(job: Job) -> None:
    """commits/N is missing, as after a crash: the batch is read to its end and not written."""
    job.add(*ids(1, 2))
    job.run(job.pipeline())
    job.forget_commit()
    job.add(*ids(3))
    job.run(job.pipeline())
    assert job.visible() == Counter([1, 2, 3])
    assert not list((job.out / "_sparkonce").iterdir())


def test_replay_may_have_a_column_that_no_table_has(job: Job) -> None:
    """Spark writes no INTERVAL anywhere, and select= makes text of it."""
    sinks = [FileSink(job.out, select=["id", "string(span) AS span"])]

    def shape(df: DataFrame) -> DataFrame:
        return df.selectExpr("id", "make_interval(0, id) AS span")

    job.add(*ids(1, 2))
    job.run(job.pipeline(sinks=sinks), shape)
    job.forget_commit()
    job.add(*ids(3))
    job.run(job.pipeline(sinks=sinks), shape)
    assert job.visible() == Counter([1, 2, 3])


HDFS = "HDFSBacked"
ROCKSDB = "RocksDB"


@contextmanager
def state_store(spark: SparkSession, provider: str, version: int) -> Iterator[None]:
    package = "org.apache.spark.sql.execution.streaming.state"
    settings = {
        "spark.sql.streaming.stateStore.providerClass": f"{package}.{provider}StateStoreProvider",
        "spark.sql.streaming.stateStore.checkpointFormatVersion": str(version),
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    }
    for key, value in settings.items():
        spark.conf.set(key, value)
    try:
        yield
    finally:
        for key in settings:
            spark.conf.unset(key)


def joined_with_itself(job: Job) -> Callable[[DataFrame], DataFrame]:
    def join(df: DataFrame) -> DataFrame:
        other = job.rows().selectExpr("id AS other", "at AS other_at")
        left, right = df.withWatermark("at", "1 day"), other.withWatermark("other_at", "1 day")
        return left.join(right, left.id == right.other).selectExpr("id")

    return join


STATEFUL = {
    ("aggregate", (HDFS, 1), "after_checkpoint"),
    ("deduplicate", (ROCKSDB, 2), "immediate"),
    ("join", (ROCKSDB, 1), "immediate"),
    ("transformWithState", (ROCKSDB, 2), "after_checkpoint"),
}
"""What is not slow: each shape, store and policy once."""


@pytest.mark.parametrize(
    ("shape", "store", "commit"),
    [
        pytest.param(*case, marks=[] if case in STATEFUL else [pytest.mark.slow])
        for case in itertools.product(
            ["aggregate", "deduplicate", "join", "transformWithState"],
            [(HDFS, 1), (ROCKSDB, 1), (ROCKSDB, 2)],
            ["immediate", "after_checkpoint"],
        )
        if case[:2] != ("transformWithState", (HDFS, 1))  # Spark needs RocksDB for it
    ],
)
def test_stateful_query_stays_right_over_replays(
    job: Job, monkeypatch: pytest.MonkeyPatch, shape: str, store: tuple[str, int], commit: str
) -> None:
    """Batches that fail and are replayed, and that are skipped, leave Spark's state right.

    Skipping the rows of a replay would break the state for good; draining does not.
    """
    shapes: dict[str, Callable[[DataFrame], DataFrame]] = {
        "aggregate": lambda df: df.groupBy((df.id % 2).alias("id")).count(),
        "deduplicate": lambda df: df.dropDuplicates(["id"]),
        "join": joined_with_itself(job),
        "transformWithState": numbered_by_state,
    }
    points = ["vote.after", "decide.after", "deliver.after"]
    mode = "append" if shape == "join" else "update"
    with state_store(job.spark, *store):
        for point in points:
            job.add(*ids(1, 2, 3, 4 + job.files))
            with monkeypatch.context() as patch:
                patch.setattr(failpoints, "handler", fail_at(point))
                with pytest.raises(Exception, match=point.replace(".", r"\.")):
                    with job.pipeline(commit=commit) as pipeline:
                        job.run(pipeline, shapes[shape], mode)
            with job.pipeline(commit=commit) as pipeline:
                job.run(pipeline, shapes[shape], mode)
            job.forget_commit()
        job.add(*ids(1))
        with job.pipeline(commit=commit) as pipeline:
            job.run(pipeline, shapes[shape], mode)
    expected = {
        # The running counts of odd and even: 2 2, then 5 3, then 7 5, and 8 for the single 1.
        "aggregate": Counter([2, 2, 5, 3, 7, 5, 8]),
        "deduplicate": Counter([1, 2, 3, 4, 5, 6]),
        # Pairs of equal ids that a batch adds: n*n after it less those before it.
        "join": Counter({1: 16, 2: 9, 3: 9, 4: 1, 5: 1, 6: 1}),
        # The running number of each id: 1 to 4 for 1, 1 to 3 for 2 and 3, 1 for the others.
        "transformWithState": Counter([1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 1, 1]),
    }
    assert job.visible(column="count" if shape == "aggregate" else "id") == expected[shape]


def test_transform_that_drops_every_row_does_not_starve_a_stateful_query(job: Job) -> None:
    """Spark would prune the whole batch away, and its state with it; the snapshot prevents that."""
    nothing = job.sink_folder("nothing")
    for batch in range(3):
        job.add(*ids(1, 2, 10 + batch))
        job.run(
            job.pipeline(sinks=[FileSink(nothing, transform=lambda df: df.where("1 = 0"))]),
            lambda df: df.dropDuplicates(["id"]),
        )
    assert job.visible(nothing) == Counter()


def test_second_start_in_one_process_is_a_new_incarnation(job: Job) -> None:
    """One ExactlyOnce object may be started again: it takes a new token and recovers."""
    pipeline = job.pipeline()
    for value in (1, 2):
        job.add(*ids(value))
        job.run(pipeline)
    newer, older = (record.token for record in pipeline.log.history("orders"))
    assert newer > older
    assert job.visible() == Counter([1, 2])


def test_failing_batch_is_aborted_and_replayed(job: Job) -> None:
    """A transform fails once: nothing of the batch is visible, and the next start delivers it."""
    job.add(*ids(1, 2, 3))
    broken = job.pipeline(
        sinks=[
            FileSink(job.out),
            FileSink(
                job.sink_folder("bad"),
                name="bad",
                select=["id", "CASE WHEN id = 3 THEN raise_error('no') END AS oops"],
            ),
        ]
    )
    with pytest.raises(Exception, match="no"):
        job.run(broken)
    assert job.visible() == Counter()
    assert not list((job.out / "_sparkonce").iterdir())
    job.run(job.pipeline())
    assert job.visible() == Counter([1, 2, 3])


def test_decided_batch_is_committed_before_the_sinks_are_checked(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sink that cannot be written to now does not let what was decided expire."""

    class Refusing(FileSink):
        def validate(self, schema: pa.Schema) -> None:
            raise ConfigurationError("no rows today")

    job.add(*ids(1, 2))
    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "handler", fail_at("decide.after"))
        with pytest.raises(Exception, match=r"decide\.after"):
            job.run(job.pipeline())
    assert job.visible() == Counter()
    assert "no rows today" in refused(job, job.pipeline(sinks=[Refusing(job.out)]))
    assert job.visible() == Counter([1, 2])


def test_removed_sink_gets_what_was_decided_for_it_and_no_more(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Refused without it while a record names it; with removed= finished, swept, not written."""
    job.add(*ids(1, 2))
    old = job.sink_folder("old")
    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "handler", fail_at("decide.after"))
        with pytest.raises(Exception, match=r"decide\.after"):
            job.run(job.pipeline(sinks=[FileSink(job.out), FileSink(old, name="old")]))
    job.add(*ids(3))
    assert "pass the old sink in removed=" in refused(job, job.pipeline())
    job.run(job.pipeline(removed=[FileSink(old, name="old")]))
    assert job.visible() == Counter([1, 2, 3])
    assert job.visible(old) == Counter([1, 2])
    job.add(*ids(4))
    job.run(job.pipeline())
    gone = f"the sink 'old' of folder {old} is no longer among the pipeline's sinks"
    (told,) = [record for record in caplog.records if gone in record.getMessage()]
    assert told.__dict__["pipeline"] == "orders"
    assert "has folder" not in caplog.text
    job.add(*ids(5))
    elsewhere = job.sink_folder("elsewhere")
    job.run(job.pipeline(sinks=[FileSink(elsewhere, name="file")]))
    assert f"the sink 'file' of folder {job.out} has folder {elsewhere} now: " in caplog.text


@pytest.mark.parametrize("has_follower", [False, True])
def test_fenced_driver_holds_nothing_open(
    job: Job, monkeypatch: pytest.MonkeyPatch, has_follower: bool
) -> None:
    """As an open merge, whose locks nobody else can free while the process lives.

    What a follower in the process writes with is that one's.
    """
    closed: list[str] = []

    def close(sink: FileSink) -> None:
        closed.append(sink.name)
        raise OSError("reset")

    def take_over(point: str, where: object) -> None:
        if point == "decide.before":
            head = head_of(pipeline.log, "orders")
            pipeline.log.begin(claim_again(pipeline.log, head, head.sinks))
            if has_follower:
                for sink in pipeline.sinks:
                    sink.used_by = (head.query_id, head.token + 1)

    job.add(*ids(1))
    pipeline = job.pipeline()
    monkeypatch.setattr(FileSink, "close", close)
    monkeypatch.setattr(failpoints, "handler", take_over)
    with pytest.raises(StreamingQueryException, match="FencedError"):
        job.run(pipeline)
    assert closed == ([] if has_follower else ["file"])


@pytest.mark.parametrize(
    ("commit", "point"),
    [
        ("immediate", "begin.before"),
        ("immediate", "begin.after"),
        ("immediate", "decide.before"),
        ("after_checkpoint", "hold.before"),
        ("after_checkpoint", "deliver.after"),
    ],
)
def test_driver_behind_one_with_a_copy_of_the_log(
    job: Job, monkeypatch: pytest.MonkeyPatch, commit: CommitPolicy, point: str
) -> None:
    """No token fences it; the other has entered the checkpoint, and the batch is the other's."""
    job.add(*ids(1))
    pipeline = job.pipeline(commit=commit)
    pipeline.awaitTermination(job.start(pipeline))
    with (
        closing(sqlite3.connect(job.folder / "txn.db")) as source,
        closing(sqlite3.connect(job.folder / "copy.db")) as target,
    ):
        source.backup(target)
    reached: list[str] = []
    others: list[Run] = []

    def go_on_elsewhere(name: str, where: object) -> None:
        if name == point and not reached:
            reached.append(name)
            other = job.pipeline(commit=commit, log=f"sqlite:///{job.folder}/copy.db")
            assert other.log.log_id == pipeline.log.log_id
            query = RunningQuery.find(job.spark, run_of(pipeline).query.run)
            query.run = RunId(query.run.query_id, "of another process")
            others.append(other._serving.run_of(query))
            others[-1]._start(1)

    monkeypatch.setattr(failpoints, "handler", go_on_elsewhere)
    job.add(*ids(2))
    query = job.start(pipeline)
    with pytest.raises(
        (FencedError, StreamingQueryException), match="another driver has continued"
    ):
        pipeline.awaitTermination(query)
    assert reached
    assert job.visible() == Counter([1])
    assert others[0].query.is_ours()


@pytest.mark.parametrize("commit", ["immediate", "after_checkpoint"])
@pytest.mark.parametrize("by", ["the function", "transform="])
def test_columns_that_change_between_batches_are_validated_again(
    job: Job, by: str, commit: CommitPolicy
) -> None:
    """A sink writes what it found when it was validated: a new column would be left out."""

    def pivoted(df: DataFrame) -> DataFrame:
        kind = "IF(id % 2 = 0, 'even', 'odd') AS kind"
        return df.selectExpr("id", kind).groupBy().pivot("kind").sum("id")

    database = job.folder / "orders.db"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE orders (even INTEGER, odd INTEGER)")
        job.add(*ids(2))
        job.add(*ids(4, 5))
        job.add(*ids(6))
        if by == "transform=":
            sink = SqliteSink(database, "orders", transform=pivoted)
            pipeline = job.pipeline(sinks=[sink], commit=commit)
            query = job.run(pipeline)
        else:
            pipeline = job.pipeline(sinks=[SqliteSink(database, "orders")], commit=commit)
            query = job.run(lambda df, batch_id: pipeline(pivoted(df), batch_id))  # type: ignore[arg-type]
        pipeline.awaitTermination(query)
        found = set(connection.execute("SELECT even, odd FROM orders"))
    assert found == {(2, None), (4, 5), (6, None)}


def test_start_without_data_fences_nobody(job: Job) -> None:
    """Its sinks are not checked, since there is no batch to check them for."""
    job.add(*ids(1))
    pipeline = job.pipeline()
    pipeline.awaitTermination(job.start(pipeline))
    head = pipeline.log.head("orders")
    second = job.pipeline()
    second.awaitTermination(job.start(second))
    assert pipeline.log.head("orders") == head


def test_lost_branch_is_written_again_from_sparks_replay(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the partition that is gone; in the other sink nothing changes."""
    job.add(*ids(1, 2, 3, 4))
    right = job.sink_folder("right")
    sinks = [FileSink(job.out), FileSink(right, name="right")]
    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "handler", fail_at("decide.after"))
        with pytest.raises(Exception, match=r"decide\.after"):
            job.run(job.pipeline(sinks=sinks), lambda df: df.repartition(2, "id"))
    first, *rest = sorted((job.out / "_sparkonce").iterdir())
    assert rest
    first.unlink()
    pipeline = job.pipeline(sinks=sinks)
    job.run(pipeline, lambda df: df.repartition(2, "id"))
    assert job.visible() == job.visible(right) == Counter([1, 2, 3, 4])
    (record,) = pipeline.log.history("orders")
    assert (record.revision, [c.branch_id.sink for c in record.lost]) == (1, ["file"])


def test_replay_with_other_rows_is_not_taken_for_the_lost_ones(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query that was changed meanwhile: equal in number, other in content."""
    job.add(*ids(1, 2, 3, 4))
    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "handler", fail_at("decide.after"))
        with pytest.raises(Exception, match=r"decide\.after"):
            job.run(job.pipeline())
    for hidden in (job.out / "_sparkonce").iterdir():
        hidden.unlink()
    for _ in range(2):
        with pytest.raises(Exception, match="PreparedBranchLostError.*has other values"):
            job.run(job.pipeline(), lambda df: df.selectExpr("id + 1 AS id", "at"))
    assert job.visible() == Counter()
    assert not list((job.out / "_sparkonce").iterdir())
    job.run(job.pipeline())
    assert job.visible() == Counter([1, 2, 3, 4])


def test_collections_after_a_task_do_not_walk_all_modules(job: Job) -> None:
    """PySpark collects after every task, which would cost more than a small batch itself."""

    def count(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in rows:
            pass
        yield pa.RecordBatch.from_pydict({"frozen": [gc.get_freeze_count()]})

    job.add(*ids(1, 2, 3))
    job.run(job.pipeline())
    counted = job.spark.range(2).mapInArrow(count, "frozen long").collect()
    assert max(row.frozen for row in counted) > 10_000


def refused(
    job: Job, pipeline: ExactlyOnce, shape: Callable[[DataFrame], DataFrame] = lambda df: df
) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - Spark wraps the error it got
        job.run(pipeline, shape)
    assert ConfigurationError.__name__ in str(caught.value)
    return str(caught.value)


def test_sink_of_two_pipelines_at_a_time_is_refused(job: Job, tmp_path: Path) -> None:
    """It keeps what `validate` found out, and tasks of the one would go by the other's columns."""
    (tmp_path / "other").mkdir()
    other_job = Job(job.spark, tmp_path / "other")
    job.add(*ids(1))
    other_job.add(*ids(2))
    sink = FileSink(job.out)
    pipeline, other = job.pipeline(sinks=[sink]), other_job.pipeline(sinks=[sink])
    told: list[str] = []

    def deliver(df: DataFrame, batch_id: int) -> None:
        pipeline(df, batch_id)
        try:
            other_job.run(other)
        except Exception as error:  # noqa: BLE001 - looked at below
            told.append(str(error))

    job.run(deliver)  # type: ignore[arg-type]
    assert "is in use by the query" in told[0]
    assert job.visible() == Counter([1])
    other_job.run(other)
    assert job.visible() == Counter([1, 2])


def test_fresh_checkpoint_under_an_old_name_is_refused(job: Job) -> None:
    """It would deliver everything again; replaces= allows it, once."""
    job.add(*ids(1))
    pipeline = job.pipeline()
    job.run(pipeline)
    head = pipeline.log.head("orders")
    assert head is not None
    job.checkpoint = "fresh"
    assert f'replaces=\\"{head.query_id}\\"'.replace("\\", "") in refused(job, job.pipeline())
    assert job.visible() == Counter([1])
    job.run(job.pipeline(replaces=head.query_id))
    assert job.visible() == Counter([1, 1])


@pytest.mark.parametrize("number", [1, 2])
def test_rolled_back_checkpoint_of_a_query_that_was_changed(
    job: Job, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """The batch is complete with the old output: the new one goes nowhere, and that is reported."""
    job.add(*ids(1, 2))
    sinks = [FileSink(job.out)]
    if number == 2:
        sinks.append(FileSink(job.sink_folder("ids"), name="ids", select=["id"]))
    job.run(job.pipeline(sinks=sinks))
    commits = job.folder / job.checkpoint / "commits"
    shutil.rmtree(commits)
    job.run(job.pipeline(sinks=sinks))
    assert "differs" not in caplog.text
    shutil.rmtree(commits)
    job.run(job.pipeline(sinks=sinks), lambda df: df.selectExpr("id + 10 AS id", "at"))
    assert job.visible() == Counter([1, 2])
    told = [r.getMessage() for r in caplog.records if "its replay differs" in r.getMessage()]
    assert len(told) == number
    assert "sink 'file', the replay has other values in its 2 rows" in told[0]


@pytest.mark.parametrize("place", ["select", "function"])
@pytest.mark.parametrize("value", ["uuid()", "rand()", "current_timestamp()"])
def test_replay_is_not_compared_where_each_computation_differs(
    job: Job, caplog: pytest.LogCaptureFixture, place: str, value: str
) -> None:
    """The advice of that error, a new checkpoint, would deliver everything again."""
    caplog.set_level("INFO", "sparkonce")
    job.add(*ids(1, 2))
    select = ["id", f"{value} AS made"] if place == "select" else None

    def deliver(df: DataFrame, batch_id: int) -> None:
        rows = df if select else df.selectExpr("id", f"{value} AS made")
        pipeline(rows, batch_id)

    for _ in range(2):
        pipeline = job.pipeline(sinks=[FileSink(job.out, select=select)])
        job.run(deliver)  # type: ignore[arg-type]
        shutil.rmtree(job.folder / job.checkpoint / "commits")
    assert job.visible() == Counter([1, 2])
    assert "its replay is read to the end" in caplog.text
    assert "differs" not in caplog.text


@pytest.mark.parametrize("batches", [1, 2, 3])
def test_rolled_back_checkpoint_that_met_other_files_is_refused(job: Job, batches: int) -> None:
    """A file source's offsets are counters: only the files tell that the batch is another one.

    Its log of files is compacted every second batch, and deleted behind it.
    """
    key = "spark.sql.streaming.fileSource.log.compactInterval"
    job.spark.conf.set(key, "2")
    try:
        for value in range(batches):
            job.add(*ids(value))
        job.run(job.pipeline())
        copy = job.folder / "copy"
        shutil.copytree(job.folder / job.checkpoint, copy)
        job.add(*ids(10))
        job.run(job.pipeline())
        shutil.rmtree(job.folder / job.checkpoint)
        shutil.copytree(copy, job.folder / job.checkpoint)
        job.run(job.pipeline())  # the same file again: known, and not written
        assert job.visible() == Counter([*range(batches), 10])
        shutil.rmtree(job.folder / job.checkpoint)
        copy.rename(job.folder / job.checkpoint)
        (job.source / f"{batches:05d}.json").unlink()
        job.add(*ids(11))
        assert "rolled back" in refused(job, job.pipeline())
    finally:
        job.spark.conf.unset(key)
    assert job.visible() == Counter([*range(batches), 10])


@pytest.mark.parametrize("version", ["1", "2"])
def test_rolled_back_checkpoint_of_a_query_that_reads_a_source_twice(
    job: Job, version: str
) -> None:
    """That source has two offsets and one folder, so the others' folders have other numbers."""
    others = job.sink_folder("others")
    for value in (100, 101):
        (others / f"{value}.json").write_text(f'{{"id": {value}}}')

    def shape(rows: DataFrame) -> DataFrame:
        reader = job.spark.readStream.schema(rows.schema).option("maxFilesPerTrigger", 1)
        other = reader.json(str(others))
        return other.union(other).union(rows)

    key = "spark.sql.streaming.offsetLog.formatVersion"
    job.spark.conf.set(key, version)
    try:
        job.add(*ids(1))
        job.run(job.pipeline(), shape)
        copy = job.folder / "copy"
        shutil.copytree(job.folder / job.checkpoint, copy)
        job.add(*ids(10))
        job.run(job.pipeline(), shape)
        shutil.rmtree(job.folder / job.checkpoint)
        copy.rename(job.folder / job.checkpoint)
        (job.source / "00001.json").unlink()
        job.add(*ids(11))
        assert "rolled back" in refused(job, job.pipeline(), shape)
    finally:
        job.spark.conf.unset(key)
    assert job.visible() == Counter([1, 10, 100, 100, 101, 101])


def test_copied_checkpoint_with_its_log_overwrites_nothing(job: Job) -> None:
    """Its branches would have the names of those that the original commits; a move takes a word."""
    job.add(*ids(1))
    job.run(job.pipeline(log="checkpoint"))
    shutil.copytree(job.folder / job.checkpoint, job.folder / "copy")
    job.add(*ids(2))
    job.run(job.pipeline(log="checkpoint"))
    job.checkpoint = "copy"
    job.add(*ids(3))
    told = refused(job, job.pipeline(log="checkpoint"))
    assert f'adopt="moved from file:{job.folder}/ckpt"' in told
    assert job.visible() == Counter([1, 2])
    job.checkpoint = "ckpt"
    job.run(job.pipeline(log="checkpoint"))
    shutil.move(job.folder / "ckpt", job.folder / "new")
    job.checkpoint = "new"
    job.add(*ids(4))
    word = f"moved from {job.folder}/ckpt"
    job.run(job.pipeline(log="checkpoint", adopt=word))
    job.add(*ids(5))
    job.run(job.pipeline(log="checkpoint"))
    assert job.visible() == Counter([1, 2, 3, 4, 5])


def test_no_driver_of_a_restored_log_gets_a_token_that_was_used(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backup does not know the second batch: the third one must not get its names."""
    clock = SimpleNamespace(time=itertools.count(time.time()).__next__)  # no two starts in a second
    monkeypatch.setattr(log_base, "time", clock)
    tokens = []

    def deliver(*values: int) -> None:
        job.add(*ids(*values))
        pipeline = job.pipeline(log="checkpoint")
        job.run(pipeline)
        tokens.append(head_of(pipeline.log, "orders").token)

    deliver(1)
    shutil.copytree(job.folder / job.checkpoint, job.folder / "backup")
    deliver(2)
    shutil.rmtree(job.folder / job.checkpoint)
    (job.folder / "backup").rename(job.folder / job.checkpoint)
    (job.source / "00001.json").unlink()
    deliver(3)
    assert tokens == sorted(set(tokens))
    assert job.visible() == Counter([1, 2, 3])


def test_fresh_log_for_an_old_checkpoint_is_refused(job: Job) -> None:
    """Another working directory or host: the whole path of the log is shown."""
    job.add(*ids(1))
    job.run(job.pipeline())
    job.add(*ids(2))
    other = f"sqlite:///{job.folder}/other.db"
    message = refused(job, job.pipeline(log=other))
    assert f"log= is {other}" in message
    assert job.visible() == Counter([1])


def run_of(pipeline: ExactlyOnce) -> Run:
    """The run that the pipeline serves."""
    assert pipeline._serving.run is not None
    return pipeline._serving.run


def lose_the_race(
    job: Job,
    pipeline: ExactlyOnce,
    other: ExactlyOnce,
    monkeypatch: pytest.MonkeyPatch,
    *,
    batch: int,
) -> None:
    """`other` begins where `pipeline` is admitted and has not bound the checkpoint yet."""
    reached: list[str] = []

    def let_the_other_begin(point: str, where: object) -> None:
        if point == "begin.after" and not reached:
            reached.append(point)
            other._serving.run_of(run_of(pipeline).query)._start(batch)

    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "handler", let_the_other_begin)
        assert f"transaction log with id {other.log.log_id}" in refused(job, pipeline)
    assert reached


def test_drivers_with_logs_of_their_own_race_for_a_fresh_checkpoint(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts: neither saw the other, and each was admitted by its own log. One goes on."""
    job.add(*ids(1, 2))
    pipeline, other = job.pipeline(), job.pipeline(log=f"sqlite:///{job.folder}/other.db")
    lose_the_race(job, pipeline, other, monkeypatch, batch=0)
    assert job.visible() == Counter()
    job.run(other)
    assert job.visible() == Counter([1, 2])


def test_drivers_race_to_adopt_a_checkpoint_whose_log_is_lost(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both saw the lost log's id in it, and were told to take over from that one."""
    job.add(*ids(1))
    lost = job.pipeline()
    job.run(lost)
    job.add(*ids(2))
    pipeline, other = (
        job.pipeline(log=f"sqlite:///{job.folder}/{name}.db", adopt=lost.log.log_id)
        for name in ("one", "other")
    )
    lose_the_race(job, pipeline, other, monkeypatch, batch=1)
    assert job.visible() == Counter([1])
    job.run(other)
    assert job.visible() == Counter([1, 2])
    bound = json.loads((job.folder / job.checkpoint / "sparkonce.json").read_text())
    assert bound == {"log_id": other.log.log_id, "pipeline": "orders"}


def test_checkpoint_that_ran_without_us_needs_adopt(job: Job) -> None:
    job.add(*ids(1))
    query = (
        job.spark.readStream.schema("id long, at timestamp")
        .json(str(job.source))
        .writeStream.foreachBatch(lambda _df, _batch_id: None)
        .option("checkpointLocation", str(job.folder / job.checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    job.add(*ids(2))
    assert 'adopt="batch 1"' in refused(job, job.pipeline())
    job.run(job.pipeline(adopt="batch 1"))
    job.add(*ids(3))
    job.run(job.pipeline())
    assert job.visible() == Counter([2, 3])


def test_pipelines_with_copies_of_one_checkpoint_need_logs_of_their_own(job: Job) -> None:
    """A query that ran without us is split in two: its id is part of all names outside."""
    job.add(*ids(1))
    writer = job.rows().writeStream.foreachBatch(lambda _df, _batch_id: None)
    writer = writer.option("checkpointLocation", str(job.folder / job.checkpoint))
    writer.trigger(availableNow=True).start().awaitTermination()
    shutil.copytree(job.folder / job.checkpoint, job.folder / "copy")
    job.add(*ids(2))
    job.run(job.pipeline(adopt="batch 1"))
    job.checkpoint = "copy"
    again = job.sink_folder("again")
    settings: dict[str, Any] = {"sinks": [FileSink(again)], "adopt": "batch 1"}
    copied = ExactlyOnce("orders-us", log=f"sqlite:///{job.folder}/txn.db", **settings)
    assert "has the query id of the pipeline 'orders'" in refused(job, copied)
    job.run(ExactlyOnce("orders-us", log=f"sqlite:///{job.folder}/us.db", **settings))
    assert job.visible() == job.visible(again) == Counter([2])


def test_pipelines_with_copies_of_one_checkpoint_that_start_together(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither sees the other before it has its token: it looks again behind that, at each start."""
    job.add(*ids(1))
    pipeline = job.pipeline()

    def start_the_other(point: str, where: object) -> None:
        if point == "begin.before" and pipeline.log.head("orders-us") is None:
            query_id = run_of(pipeline).query.run.query_id
            pipeline.log.begin(Claim("orders-us", query_id, "run", "host:1", {}, 0))

    monkeypatch.setattr(failpoints, "handler", start_the_other)
    for _ in range(2):
        assert "has the query id of the pipeline 'orders-us'" in refused(job, pipeline)
    assert job.visible() == Counter()


def test_server_that_is_unreachable_while_the_start_checks_it(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    """An outage of some seconds ends no query; the wait is logged, with how long it may last."""
    tries: list[str] = []

    class Away(FileSink):
        def validate(self, schema: pa.Schema) -> None:
            tries.append(self.name)
            if len(tries) < 3:
                raise SinkUnavailableError("the database system is starting up")
            super().validate(schema)

    job.add(*ids(1))
    job.run(job.pipeline(sinks=[Away(job.out)]))
    assert len(tries) == 3
    assert job.visible() == Counter([1])
    told = [r.getMessage() for r in caplog.records if "still trying to check" in r.getMessage()]
    assert len(told) == 1  # the second try had the same error
    assert "for at most 120 s, attempt 1: the database system is starting up" in told[0]


def test_server_that_stays_unreachable_while_the_start_checks_it(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The query fails with the sink's own error when the time is over; no token was taken."""

    class Away(FileSink):
        def validate(self, schema: pa.Schema) -> None:
            raise SinkUnavailableError("no route to the host")

    monkeypatch.setattr(validating, "_FOR_S", 0.1)
    job.add(*ids(1))
    pipeline = job.pipeline(sinks=[Away(job.out)])
    with pytest.raises(StreamingQueryException, match="no route to the host"):
        job.run(pipeline)
    assert pipeline.log.head("orders") is None


def test_query_that_is_stopped_while_its_start_checks_a_server(job: Job) -> None:
    """`stop` waits for the check, which is not repeated any more."""
    tries: list[bool] = []
    queries: Future[StreamingQuery] = Future()

    class Away(FileSink):
        def validate(self, schema: pa.Schema) -> None:
            query = queries.result(60)
            if not tries:
                threading.Thread(target=query.stop).start()
            while query.isActive:
                time.sleep(0.01)
            tries.append(True)
            raise SinkUnavailableError("the database system is starting up")

    job.add(*ids(1))
    query = job.start(job.pipeline(sinks=[Away(job.out)]))
    queries.set_result(query)
    with contextlib.suppress(StreamingQueryException):
        query.awaitTermination()
    assert tries == [True]


def test_setting_that_cannot_work_is_refused_before_data_moves(job: Job) -> None:
    """The sink's own check runs before a token is taken."""
    job.add(*ids(1))
    pipeline = job.pipeline(sinks=[FileSink(job.folder / "nowhere")])
    assert "nowhere does not exist" in refused(job, pipeline)
    assert pipeline.log.head("orders") is None


def test_pipeline_that_is_called_twice_for_a_batch_fails_the_query(job: Job) -> None:
    """A user who splits a batch by hand: the rows of the second call are not swallowed."""
    job.add(*ids(1, 2))
    pipeline = job.pipeline()

    def split(df: DataFrame, batch_id: int) -> None:
        pipeline(df.where("id = 1"), batch_id)
        pipeline(df.where("id = 2"), batch_id)

    query = job.rows().writeStream.foreachBatch(split).trigger(availableNow=True)
    query = query.option("checkpointLocation", str(job.folder / job.checkpoint))
    with pytest.raises(Exception, match="called a second time for batch 0 in one run"):
        query.start().awaitTermination()
    assert job.visible() == Counter([1])


@pytest.mark.parametrize("commit", ["immediate", "after_checkpoint"])
def test_second_pipeline_of_the_name_in_one_function_fails_the_query(
    job: Job, commit: CommitPolicy
) -> None:
    """Its rows were taken for a replay of the first one's, or the first one's were aborted."""
    job.add(*ids(1, 2))

    def split(df: DataFrame, batch_id: int) -> None:
        job.pipeline(commit=commit)(df.where("id = 1"), batch_id)
        job.pipeline(commit=commit)(df.where("id = 2"), batch_id)

    query = job.rows().writeStream.foreachBatch(split).trigger(availableNow=True)
    query = query.option("checkpointLocation", str(job.folder / job.checkpoint))
    with pytest.raises(Exception, match="one object, with all sinks"):
        query.start().awaitTermination()
    whole = job.pipeline(commit=commit)
    whole.awaitTermination(job.start(whole))
    assert job.visible() == Counter([1] if commit == "immediate" else [1, 2])


@pytest.mark.parametrize("way", ["second object", "tried again", "two threads"])
def test_second_call_for_a_batch_never_passes_for_its_replay(  # noqa: C901 - three ways to call
    job: Job, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Its rows were in no sink, and nobody said so."""
    for n in range(2):
        job.add(*ids(2 * n, 2 * n + 1))
    pipeline, other = job.pipeline(), job.pipeline()

    def deliver(df: DataFrame, batch_id: int) -> None:
        if batch_id == 0:
            pipeline(df, 0)
        elif way == "second object":
            other(df.where("id = 2"), 1)
            pipeline(df.where("id = 3"), 1)
        elif way == "tried again":
            pipeline(df.where("id = 2"), 1)
            with pytest.raises(ProtocolError):
                pipeline(df.where("id = 3"), 1)
            pipeline(df.where("id = 3"), 1)
        else:
            in_a_thread(df)

    def in_a_thread(df: DataFrame) -> None:
        """The other object looks whether it is the first to be called, and goes on much later."""
        looked, delivered = threading.Event(), threading.Event()
        raised: list[Exception] = []

        def call() -> None:
            try:
                other(df.where("id = 2"), 1)
            except ProtocolError as error:
                raised.append(error)

        start = Run._start

        def stand_still(run: Run, number: int) -> Driver:
            if run.pipeline.sinks["file"] is other.sinks[0]:
                looked.set()
                delivered.wait()
            return start(run, number)

        monkeypatch.setattr(Run, "_start", stand_still)
        late = InheritableThread(target=call)
        late.start()
        looked.wait()
        pipeline(df.where("id = 3"), 1)
        delivered.set()
        late.join()
        raise raised[0]

    query = job.rows().writeStream.foreachBatch(deliver).trigger(availableNow=True)
    query = query.option("checkpointLocation", str(job.folder / job.checkpoint))
    with pytest.raises(Exception, match="called a second time for batch 1 in one run"):
        query.start().awaitTermination()
    assert job.visible() == Counter([0, 1, 3 if way == "two threads" else 2])


@pytest.mark.parametrize("has_conf", ["", "{}", "file:{}", "file://{}/", "file:{}//."])
def test_query_without_a_checkpoint_location_is_refused(
    job: Job, set_conf: Callable[[str, str], None], has_conf: str
) -> None:
    """Spark makes one up that no other start finds: each would deliver all of its rows."""
    if has_conf:
        place = has_conf.format(job.folder / "ckpts")
        set_conf("spark.sql.streaming.checkpointLocation", place)
    job.add(*ids(1, 2))
    writer = job.rows().writeStream.foreachBatch(job.pipeline()).trigger(availableNow=True)
    with pytest.raises(Exception, match="no checkpointLocation"):
        writer.start().awaitTermination()
    assert job.visible() == Counter()
    if has_conf:  # with a name it lasts
        writer.queryName("orders").start().awaitTermination()
        assert job.visible() == Counter([1, 2])


def test_replay_completes_an_observation(job: Job) -> None:
    """Whose `get` waits in the user's function, for ever, for a query over its rows."""
    job.add(*ids(1, 2))
    seen: list[dict[str, Any]] = []

    def deliver(df: DataFrame, batch_id: int) -> None:
        observation = Observation()
        pipeline(df.observe(observation, count(lit(1)).alias("n")), batch_id)
        seen.append(observation.get)

    for _ in range(2):
        pipeline = job.pipeline()
        query = job.rows().writeStream.foreachBatch(deliver).trigger(availableNow=True)
        query = query.option("checkpointLocation", str(job.folder / job.checkpoint))
        query.start().awaitTermination()
        job.forget_commit()
    assert seen == [{"n": 2}, {"n": 2}]
    assert job.visible() == Counter([1, 2])


def test_spark_that_is_too_old_is_refused(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyspark, "__version__", "3.5.7")
    with pytest.raises(ConfigurationError, match=r"PySpark is 3\.5\.7, and .*pyspark>=4"):
        job.pipeline()


def test_call_outside_foreach_batch_says_so(job: Job) -> None:
    with pytest.raises(ConfigurationError, match="foreachBatch"):
        job.pipeline()(job.spark.range(3), 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sinks": []}, "at least one sink"),
        ({"sinks": ["kafka"]}, "not a TwoPhaseCommitSink"),
        ({"sinks": FileSink("out")}, r"sinks= is one sink.*sinks=\[…\]"),
        ({"removed": FileSink("out")}, r"removed=\[…\]"),
        ({"retain": 0}, "retain=0: expected a whole number from 1"),
        ({"retain": "5"}, "retain='5'"),
        ({"driver_rows": -1}, "driver_rows=-1: expected a whole number from 0"),
        ({"commit_timeout_s": 0}, "commit_timeout_s=0: expected a positive number"),
        ({"commit_timeout_s": "5 min"}, "commit_timeout_s='5 min'"),
        ({"log": "mysql://"}, "sqlite:///"),
    ],
)
def test_wrong_setting_is_named(job: Job, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        job.pipeline(**settings)


def test_two_sinks_of_one_name_are_refused(job: Job) -> None:
    with pytest.raises(ConfigurationError, match="two sinks are named 'file'"):
        job.pipeline(sinks=[FileSink(job.out), FileSink(job.out)])
