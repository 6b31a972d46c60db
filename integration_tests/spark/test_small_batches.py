"""Small batches that the driver writes: when it does, what sinks get, what follows a failure."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

import pytest
from pyspark import TaskContext
from pyspark.errors import StreamingQueryException
from pyspark.sql.functions import udf
from pyspark.sql.pandas.types import to_arrow_schema

from integration_tests.support.spark import INCARNATION, TYPES, Capturing, Job, NoQuery, ids, typed
from sparkonce import failpoints
from sparkonce.errors import ConfigurationError
from sparkonce.model import DRIVER_ATTEMPT, BranchId, Committable
from sparkonce.sinks import FileSink
from sparkonce.spark_hooks import shaping
from sparkonce.spark_hooks.batch import Learned, SparkBatch
from sparkonce.spark_hooks.partition_writer import PartitionSummary
from sparkonce.spark_hooks.running_query import RunningQuery
from sparkonce.spark_hooks.small_batches import SmallBatches
from sparkonce.txn_log.record import Fingerprint, Part, Share, State

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sparkonce import ExactlyOnce


@pytest.fixture
def job(spark: SparkSession, tmp_path: Path) -> Job:
    return Job(spark, tmp_path)


def by_driver(pipeline: ExactlyOnce, sink: str = "file") -> list[bool]:
    """Of each batch, the first one first: whether the driver wrote it, as one branch."""
    shares = [r.shares[sink] for r in reversed(pipeline.log.history("orders"))]
    told = [{c.branch_id.attempt > DRIVER_ATTEMPT for c in s.committables} for s in shares]
    assert all(len(s.committables) == 1 for s, t in zip(shares, told, strict=True) if True in t)
    return [True in t for t in told]


def fail_in(point: str, *, batch: int) -> failpoints.Handler:
    def fail(reached: str, where: Mapping[str, object]) -> None:
        if (reached, where.get("batch")) == (point, batch):
            raise failpoints.InjectedError(reached)

    return fail


def test_select_that_makes_few_rows_of_many_sees_them_all(job: Job) -> None:
    """Small is what is written; the driver read the first rows of each partition only."""
    for start in range(0, 15_000, 3000):
        job.add(*ids(*range(start, start + 3000)))
    sink = FileSink(job.out, select=["count(*) AS id"])
    job.run(job.pipeline(sinks=[sink]), lambda df: df.coalesce(1))
    assert job.visible() == Counter({3000: 5})


def halves(df: DataFrame) -> DataFrame:
    return df.repartition(2, "id")


def test_fourth_small_batch_is_written_by_the_driver(job: Job) -> None:
    for n in range(6):
        job.add(*ids(2 * n, 2 * n + 1))
    pipeline = job.pipeline()
    job.run(pipeline, halves)
    assert job.visible() == Counter(range(12))
    assert by_driver(pipeline) == [False] * 3 + [True] * 3
    assert not list((job.out / "_sparkonce").iterdir())


@pytest.mark.parametrize("settings", [{"driver_rows": 0}, {"driver_rows": 1}])
def test_larger_batches_are_left_to_the_executors(job: Job, settings: dict[str, Any]) -> None:
    for n in range(5):
        job.add(*ids(2 * n, 2 * n + 1))
    pipeline = job.pipeline(**settings)
    job.run(pipeline)
    assert job.visible() == Counter(range(10))
    assert not any(by_driver(pipeline))


@pytest.mark.parametrize("rows", [4, 5, 30])
def test_batch_with_more_rows_than_expected_goes_to_the_executors(job: Job, rows: int) -> None:
    """Four rows are the bound: four in one partition or in two, one more, and many more."""
    for n in range(4):
        job.add(*ids(n))
    job.add(*ids(*range(4, 4 + rows)))
    job.add(*ids(100))
    pipeline = job.pipeline(driver_rows=4)
    job.run(pipeline, halves)
    assert job.visible() == Counter([*range(4 + rows), 100])
    assert by_driver(pipeline) == [False] * 3 + [True] + [rows == 4] * 2
    assert not list((job.out / "_sparkonce").iterdir())


def test_batches_without_rows_count_as_small(job: Job) -> None:
    for n in range(5):
        job.add(*ids(n))
    pipeline = job.pipeline()
    job.run(pipeline, lambda df: df.where("id % 4 <> 3"))
    assert job.visible() == Counter([0, 1, 2, 4])
    assert by_driver(pipeline) == [False] * 4 + [True]
    assert pipeline.log.history("orders")[1].shares["file"].committables == ()


def test_rows_with_state_are_computed_once(job: Job) -> None:
    """A batch that is read twice, since it has more rows than expected, would write state twice."""
    for n in range(5):
        job.add(*ids(n, n))
    pipeline = job.pipeline()
    job.run(pipeline, lambda df: df.dropDuplicates(["id"]))
    assert job.visible() == Counter(range(5))
    assert not any(by_driver(pipeline))


def test_passes_of_their_own_and_single_writers(job: Job) -> None:
    evens, one = job.sink_folder("evens"), job.sink_folder("one")
    for n in range(5):
        job.add(*ids(2 * n, 2 * n + 1))
    pipeline = job.pipeline(
        sinks=[
            FileSink(job.out, select=["id", "id + 1 AS next"]),
            FileSink(evens, name="evens", transform=lambda df: df.where("id % 2 = 0")),
            FileSink(one, name="one", writers=1),
        ]
    )
    job.run(pipeline, halves)
    assert job.visible() == job.visible(one) == Counter(range(10))
    assert job.visible(evens) == Counter(range(0, 10, 2))
    for sink in ("file", "evens", "one"):
        assert by_driver(pipeline, sink) == [False] * 3 + [True] * 2


@pytest.mark.parametrize("driver_rows", [0, 1000])
def test_passes_of_their_own_see_the_same_rows(job: Job, driver_rows: int) -> None:
    """What a batch makes by chance is made once, on the executors and on the driver."""
    one = job.sink_folder("one")
    for n in range(4):
        job.add(*ids(2 * n, 2 * n + 1))
    pipeline = job.pipeline(
        sinks=[FileSink(job.out), FileSink(one, name="one", writers=1)], driver_rows=driver_rows
    )
    by_chance = udf(lambda: str(uuid4())).asNondeterministic()
    job.run(pipeline, lambda df: halves(df).withColumn("made", by_chance()))
    assert by_driver(pipeline) == by_driver(pipeline, "one") == [False] * 3 + [driver_rows > 0]
    assert len(job.visible(column="made")) == 8
    assert job.visible(one, "made") == job.visible(column="made")


def test_partition_that_comes_back_twice_aborts_the_batch(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the two answers would be of another try, whose rows are others or come again."""
    job.add(*ids(0, 1, 2, 3))
    decode = PartitionSummary.decode
    with monkeypatch.context() as patch:
        patch.setattr(PartitionSummary, "decode", lambda text: replace(decode(text), partition=0))
        with pytest.raises(Exception, match=r"ProtocolError.*batch 0: .*a partition twice"):
            job.run(job.pipeline(), halves)
    assert job.visible() == Counter()
    assert not list((job.out / "_sparkonce").iterdir())
    pipeline = job.pipeline()
    assert not pipeline.log.history("orders")
    job.run(pipeline, halves)
    assert job.visible() == Counter(range(4))


class FailingOnTheDriver(FileSink):
    """Prepares nothing outside of a task."""

    def preCommit(self, handle: Any) -> Committable:
        if TaskContext.get() is None:
            raise OSError("no route from here")
        return super().preCommit(handle)


def test_what_the_driver_cannot_write_the_executors_do(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing stays of the driver's try, in any sink; the next one comes after twice as many."""
    bad = job.sink_folder("bad")
    for n in range(10):
        job.add(*ids(n))
    pipeline = job.pipeline(sinks=[FileSink(job.out), FailingOnTheDriver(bad, name="bad")])
    with caplog.at_level(logging.WARNING, "sparkonce"):
        job.run(pipeline)
    assert job.visible() == job.visible(bad) == Counter(range(10))
    assert not any(by_driver(pipeline))
    told = [r.getMessage() for r in caplog.records if "no route from here" in r.getMessage()]
    assert [text.partition(":")[0] for text in told] == ["batch 3", "batch 9"]
    assert "driver_rows=0 leaves all batches to them" in told[0]
    for folder in (job.out, bad):
        assert not list((folder / "_sparkonce").iterdir())


def test_batch_that_is_stopped_is_not_written_again(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark's `stop()` cancels its jobs, and would wait for those that the executors begin."""
    bad = job.sink_folder("bad")
    for n in range(4):
        job.add(*ids(n))
    pipeline = job.pipeline(sinks=[FailingOnTheDriver(bad, name="bad")])
    monkeypatch.setattr(RunningQuery, "is_stopping", True)
    with pytest.raises(StreamingQueryException, match="no route from here"):
        job.run(pipeline)
    assert job.visible(bad) == Counter(range(3))


def test_lost_branch_of_the_driver_is_written_again(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executors do so, in as many branches as the replay has partitions."""
    for n in range(4):
        job.add(*ids(4 * n, 4 * n + 1, 4 * n + 2, 4 * n + 3))
    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "handler", fail_in("decide.after", batch=3))
        with pytest.raises(Exception, match=r"decide\.after"):
            job.run(job.pipeline(), halves)
    (hidden,) = (job.out / "_sparkonce").iterdir()
    hidden.unlink()
    pipeline = job.pipeline()
    job.run(pipeline, halves)
    assert job.visible() == Counter(range(16))
    record, *_ = pipeline.log.history("orders")
    (lost,) = record.lost
    assert (record.state, record.revision, lost.branch_id.attempt > DRIVER_ATTEMPT) == (
        State.COMPLETE,
        1,
        True,
    )
    assert len(record.shares["file"].committables) == 2


def test_lost_branch_of_the_driver_that_goes_on(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes the batch again at once, with the executors and in the names of the next pass."""
    for n in range(4):
        job.add(*ids(4 * n, 4 * n + 1, 4 * n + 2, 4 * n + 3))
    lost = []

    def lose(reached: str, where: Mapping[str, object]) -> None:
        if (reached, where.get("batch")) == ("decide.after", 3):
            (hidden,) = (job.out / "_sparkonce").iterdir()
            hidden.unlink()
            lost.append(BranchId.from_name(hidden.stem + "."))

    monkeypatch.setattr(failpoints, "handler", lose)
    pipeline = job.pipeline()
    job.run(pipeline, halves)
    assert job.visible() == Counter(range(16))
    record, *_ = pipeline.log.history("orders")
    assert (record.state, record.revision) == (State.COMPLETE, 1)
    assert [c.branch_id for c in record.lost] == lost
    assert record.lost[0].branch_id.attempt > DRIVER_ATTEMPT
    again = [c.branch_id for c in record.shares["file"].committables]
    assert {(b.write_pass, b.attempt > DRIVER_ATTEMPT) for b in again} == {(1, False)}


def test_failing_batch_is_aborted_and_replayed(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(5):
        job.add(*ids(n))
    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "handler", fail_in("vote.after", batch=3))
        with pytest.raises(Exception, match=r"vote\.after"):
            job.run(job.pipeline())
    assert job.visible() == Counter(range(3))
    assert not list((job.out / "_sparkonce").iterdir())
    job.run(job.pipeline())
    assert job.visible() == Counter(range(5))


def captured(df: DataFrame, *, on_driver: bool) -> tuple[Any, Fingerprint]:
    """What a sink got of the rows, and their fingerprint."""
    small = SmallBatches(1000)
    for _ in range(3 * on_driver):
        small.note([])
    query = cast("RunningQuery", NoQuery())
    rows = SparkBatch(df, 7, [Capturing()], query, Learned(small))
    (share,) = rows.write(INCARNATION).values()
    (committable,), (part,) = share.committables, share.parts
    assert committable.payload["on driver"] == str(on_driver)
    return committable.payload["rows"], part.content


ZONE = "spark.sql.session.timeZone"
LARGE = "spark.sql.execution.arrow.useLargeVarTypes"


@pytest.mark.parametrize("zone", ["UTC", "Asia/Kolkata"])
@pytest.mark.parametrize("kind", TYPES)
def test_sinks_get_the_same_from_the_driver(
    spark: SparkSession, kind: str, zone: str, set_conf: Callable[[str, str], None]
) -> None:
    """Values and Arrow types, of each type that Spark has."""
    values = [*TYPES[kind], "NULL"]
    if "variant" in kind:  # toArrow fails at a null one: such batches are left to the executors
        values = [value for value in values if "null" not in value.lower()]
    set_conf(ZONE, zone)
    df = typed(spark, kind, values).coalesce(1)
    of_driver = captured(df, on_driver=True)
    assert captured(df, on_driver=False) == of_driver
    set_conf(LARGE, "true")
    assert captured(df, on_driver=False) == captured(df, on_driver=True) == of_driver


def test_sinks_get_the_same_from_the_driver_of_an_older_spark(
    spark: SparkSession, set_conf: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its `to_arrow_schema` knows no zone but UTC; its executors know the session's."""

    def older(schema: Any) -> Any:
        knows_zones = "timezone" in inspect.signature(to_arrow_schema).parameters
        return to_arrow_schema(schema, **({"timezone": "UTC"} if knows_zones else {}))

    monkeypatch.setattr(shaping, "to_arrow_schema", older)
    set_conf(ZONE, "Asia/Kolkata")
    for kind in ("timestamp", "array<timestamp>", "map<string, timestamp>", "struct<a: timestamp>"):
        df = typed(spark, kind, [*TYPES.get(kind, ()), "NULL"]).coalesce(1)
        assert captured(df, on_driver=True) == captured(df, on_driver=False)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("INTERVAL '1' YEAR", "interval year"),
        ("array(INTERVAL '1' YEAR)", "interval year"),
        ("array()", "array<void>"),
    ],
)
def test_type_that_no_python_worker_gets_is_named(
    spark: SparkSession, value: str, named: str
) -> None:
    """Before any data moves: it is asked for what every sink validates."""
    with pytest.raises(ConfigurationError, match=rf"column 'span' is .*{named}.*cast it"):
        shaping.arrow_schema(spark.sql(f"SELECT 1 AS id, {value} AS span"))


@pytest.mark.parametrize(
    ("kind", "crashes"),
    [
        ("array<struct<a: map<int, int>>>", True),
        ("map<int, array<map<int, int>>>", True),
        ("map<int, map<int, int>>", True),
        ("struct<a: struct<b: map<int, array<int>>>>", False),
        ("map<int, array<struct<a: int>>>", False),
    ],
)
def test_type_that_crashes_python_under_older_sparks_is_refused(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, kind: str, crashes: bool
) -> None:
    """An empty or missing map in an array or a map, in Spark 4.0 and 4.1 (every_spark has them)."""
    monkeypatch.setattr(shaping, "NESTED_MAPS_CRASH", True)
    df = spark.sql(f"SELECT 1 AS id, CAST(NULL AS {kind}) AS maps")
    with (
        pytest.raises(ConfigurationError, match=r"column 'maps' has a map inside.*to_json\(maps\)")
        if crashes
        else contextlib.nullcontext()
    ):
        shaping.arrow_schema(df)


def test_wide_rows_are_not_small() -> None:
    """As many bytes as would be long in the driver's memory."""
    small = SmallBatches(1000)
    content = Fingerprint("sum", 10, 0)
    for size, expected in [(100, False), (100, False), (100, True), (1 << 24, False)]:
        small.note([Share("t", (Part(0, "b", size, content),))])
        assert small.is_next is expected
