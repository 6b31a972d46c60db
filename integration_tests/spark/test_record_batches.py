"""Record batches that Spark need not measure: when, and how large they get."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from pyspark.sql.functions import udf, udtf

from integration_tests.support.spark import INCARNATION, Capturing, Job, NoQuery, ids
from sparkonce.spark_hooks.batch import Learned, SparkBatch
from sparkonce.spark_hooks.partition_writer import PartitionSummary
from sparkonce.spark_hooks.record_batches import RecordBatches
from sparkonce.spark_hooks.running_query import RunningQuery
from sparkonce.spark_hooks.small_batches import SmallBatches

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

LIMIT = "spark.sql.execution.arrow.maxBytesPerBatch"
LIMIT_BYTES = 64 * 1024
ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
NARROW, WIDE = 20, 4_000


class PlainQuery(NoQuery):
    """One that computes nothing in Python."""

    def __init__(self, spark: SparkSession) -> None:
        self.plan = spark.range(1)._jdf.queryExecution().optimizedPlan()


def plain_query(spark: SparkSession) -> RunningQuery:
    return cast("RunningQuery", PlainQuery(spark))


class Measuring(Capturing):
    """Keeps the size of each record batch, in bytes."""

    def write(self, handle: list[str], batch: pa.RecordBatch) -> None:
        handle.append(str(batch.nbytes))


@pytest.fixture
def limited(spark: SparkSession) -> Iterator[SparkSession]:
    """A session that wants record batches of at most 100 rows and 64 KiB."""
    spark.conf.set(LIMIT, str(LIMIT_BYTES))
    spark.conf.set(ROWS, "100")
    try:
        yield spark
        assert spark.conf.get(LIMIT) == str(LIMIT_BYTES)
    finally:
        spark.conf.unset(LIMIT)
        spark.conf.unset(ROWS)


def rows(spark: SparkSession, width: int) -> DataFrame:
    return spark.range(0, 300, 1, 1).selectExpr(f"repeat('x', {width}) AS value")


def largest(df: DataFrame, known: RecordBatches) -> int:
    """The largest record batch that a sink gets, in bytes."""
    query = plain_query(df.sparkSession)
    small = SmallBatches(0)
    batch = SparkBatch(df, 7, [Measuring()], query, Learned(small, known))
    (share,) = batch.write(INCARNATION).values()
    (committable,) = share.committables
    return max(map(int, cast("list[str]", committable.payload["rows"])))


def test_record_batches_of_narrow_rows_are_not_measured(limited: SparkSession) -> None:
    """The first rows that are wide pass the limit, which shows it; the next are measured again."""
    known = RecordBatches()
    assert largest(rows(limited, NARROW), known) < LIMIT_BYTES
    assert largest(rows(limited, WIDE), known) == pytest.approx(100 * WIDE, rel=0.02)
    assert largest(rows(limited, WIDE), known) < LIMIT_BYTES + 2 * WIDE
    assert largest(rows(limited, NARROW), known) < LIMIT_BYTES


def test_first_batch_is_measured(limited: SparkSession) -> None:
    assert largest(rows(limited, WIDE), RecordBatches()) < LIMIT_BYTES + 2 * WIDE


def test_rows_that_would_come_near_the_limit_are_measured(limited: SparkSession) -> None:
    """A hundred rows eight times as wide as those before would pass it."""
    known = RecordBatches()
    largest(rows(limited, LIMIT_BYTES // 800 + 1), known)
    assert largest(rows(limited, WIDE), known) < LIMIT_BYTES + 2 * WIDE


def test_rows_that_python_computes_are_measured(limited: SparkSession) -> None:
    """The limit is also that of what the function gets, which may be wide where ours is narrow."""
    known = RecordBatches()
    assert largest(rows(limited, NARROW), known) < LIMIT_BYTES
    same = udf(lambda value: value, "string")
    chosen = rows(limited, WIDE).select(same("value").alias("value"))
    mapped = rows(limited, WIDE).mapInArrow(lambda batches: batches, "value string")
    for df in (chosen, mapped):
        assert largest(df, known) < LIMIT_BYTES + 2 * WIDE
        known = RecordBatches()
        largest(rows(limited, NARROW), known)


def test_rows_of_a_query_are_not_measured(limited: SparkSession, tmp_path: Path) -> None:
    job = Job(limited, tmp_path)
    for n in range(2):
        job.add(*ids(*range(300 * n, 300 * n + 300)))
    pipeline = job.pipeline(sinks=[Measuring(name="file")], driver_rows=0)
    job.run(pipeline, lambda df: df.selectExpr(f"repeat('x', if(id < 300, 9, {WIDE})) AS value"))
    newest, _ = pipeline.log.history("orders")
    (committable,) = newest.shares["file"].committables
    sizes = map(int, cast("list[str]", committable.payload["rows"]))
    assert max(sizes) == pytest.approx(100 * WIDE, rel=0.02)


def test_limit_holds_for_python_in_the_query_itself(limited: SparkSession, tmp_path: Path) -> None:
    """What the query computes before foreachBatch has its settings from before."""
    sizes = tmp_path / "sizes"

    def narrow(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            with sizes.open("a") as file:
                file.write(f"{batch.nbytes}\n")
            yield batch.select(["id"])

    job = Job(limited, tmp_path)
    for n in range(3):
        job.add(*ids(*range(300 * n, 300 * n + 300)))
    wide = ["id", f"repeat('x', {WIDE}) AS value"]
    pipeline = job.pipeline(driver_rows=0)
    job.run(pipeline, lambda df: df.selectExpr(*wide).mapInArrow(narrow, "id long"))
    assert job.visible() == Counter(range(900))
    known = [int(line) for line in sizes.read_text().split()]
    assert sum(known) > 3 * 300 * WIDE
    assert max(known) < LIMIT_BYTES + 2 * WIDE


def test_wide_rows_among_narrow_ones_are_measured(limited: SparkSession) -> None:
    """It is the widest record batch of a task that counts, not the mean of its rows."""
    width = f"if(id < 20000, {NARROW}, {WIDE})"
    skewed = limited.range(0, 20_100, 1, 1).selectExpr(f"repeat('x', {width}) AS value")
    known = RecordBatches()
    for _ in range(2):
        assert largest(skewed, known) < LIMIT_BYTES + 2 * WIDE


def test_rows_of_a_table_function_in_python_are_measured(limited: SparkSession) -> None:
    class Same:
        def eval(self, value: str) -> Iterator[tuple[str]]:
            yield (value,)

    limited.udtf.register("same_value", udtf(Same, returnType="same: string"))  # type: ignore[arg-type]
    known = RecordBatches()
    largest(rows(limited, NARROW), known)
    wide = rows(limited, WIDE)
    wide.createOrReplaceTempView("wide")
    joined = limited.sql("SELECT same AS value FROM wide, LATERAL same_value(value)")
    assert largest(joined, known) < LIMIT_BYTES + 2 * WIDE


@pytest.mark.parametrize("is_set", [True, False])
def test_limit_is_put_back(spark: SparkSession, is_set: bool) -> None:
    """Also when the pass fails, as it was: set, or by default."""
    known, df = RecordBatches(), rows(spark, NARROW)
    known.note([PartitionSummary(0, {}, (), row_bytes=NARROW)])
    if is_set:
        spark.conf.set(LIMIT, "32m")
    seen = []

    def fail() -> None:
        with known.unmeasured(df, plain_query(spark)):
            seen.append(spark.conf.get(LIMIT))
            raise ZeroDivisionError

    try:
        with pytest.raises(ZeroDivisionError):
            fail()
        assert seen == [str(2**31 - 1)]
        state = spark._jsparkSession.sessionState().conf()
        assert state.contains(LIMIT) is is_set
        assert not is_set or spark.conf.get(LIMIT) == "32m"
    finally:
        spark.conf.unset(LIMIT)


def test_second_query_of_a_session_does_not_keep_the_limit_lifted(spark: SparkSession) -> None:
    df, query = rows(spark, NARROW), plain_query(spark)
    first, second = RecordBatches(), RecordBatches()
    for known in (first, second):
        known.note([PartitionSummary(0, {}, (), row_bytes=NARROW)])
    before = spark.conf.get(LIMIT)
    outer, inner = first.unmeasured(df, query), second.unmeasured(df, query)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    assert spark.conf.get(LIMIT) == before


def test_platform_that_lets_nobody_set_the_limit(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The batch is written all the same, measured; it is said once."""
    tries = []

    def refuse(_: object, key: str, value: str) -> None:
        tries.append((key, value))
        raise PermissionError("not on the list")

    known = RecordBatches()
    known.note([PartitionSummary(0, {}, (), row_bytes=NARROW)])
    monkeypatch.setattr(type(spark.conf), "set", refuse)
    caplog.set_level(logging.INFO, "sparkonce")
    assert largest(rows(spark, NARROW), known) > 0
    assert largest(rows(spark, NARROW), known) > 0
    assert tries == [(LIMIT, str(2**31 - 1))]
    assert caplog.text.count("not on the list") == 1
