"""A query whose aggregates did not make the state in its checkpoint does not start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as f

from integration_tests.support.spark import Job, ids
from sparkonce.sinks import FileSink
from sparkonce.spark_hooks.aggregates import AGGREGATES

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


def by_id(df: DataFrame, *columns: Column) -> DataFrame:
    return df.selectExpr("0 AS key", "id AS v").groupBy("key").agg(*columns)


def summed(df: DataFrame) -> DataFrame:
    return by_id(df, f.sum("v").alias("found"))


def highest(df: DataFrame) -> DataFrame:
    return by_id(df, f.max("v").alias("found"))


def last_row(job: Job) -> dict[str, Any]:
    rows = [row for path in job.out.glob("*.parquet") for row in pq.read_table(path).to_pylist()]
    return max(rows, key=lambda row: row["found"])


@pytest.fixture
def job(spark: SparkSession, tmp_path: Path) -> Job:
    job = Job(spark, tmp_path)
    job.add(*ids(1, 2, 3))
    job.add(*ids(4))
    return job


def test_other_function_is_refused_before_data_moves(job: Job) -> None:
    job.run(job.pipeline(), summed)
    job.add(*ids(5))
    before = sorted(path.name for path in job.out.iterdir())
    with pytest.raises(StreamingQueryException) as refused:
        job.run(job.pipeline(), highest)
    assert "was made by sum(bigint), and the query computes max(bigint) now" in str(refused.value)
    assert sorted(path.name for path in job.out.iterdir()) == before
    job.run(job.pipeline(), summed)
    assert last_row(job)["found"] == 15


def test_change_that_is_meant_passes_once(job: Job) -> None:
    job.run(job.pipeline(), summed)
    job.add(*ids(5))
    job.run(job.pipeline(adopt="changed state"), highest)
    assert last_row(job)["found"] == 10  # the old sum
    job.add(*ids(50))
    job.run(job.pipeline(), highest)
    assert last_row(job)["found"] == 50
    job.add(*ids(6))
    with pytest.raises(StreamingQueryException, match=r"made by max\(bigint\)"):
        job.run(job.pipeline(), summed)


def test_other_order_of_equal_types_is_refused(job: Job) -> None:
    def both(df: DataFrame) -> DataFrame:
        return by_id(df, f.min("v"), f.sum("v").alias("found"))

    def swapped(df: DataFrame) -> DataFrame:
        return by_id(df, f.sum("v").alias("found"), f.min("v"))

    job.run(job.pipeline(), both)
    job.add(*ids(5))
    with pytest.raises(StreamingQueryException, match=r"min\(bigint\), sum\(bigint\)"):
        job.run(job.pipeline(), swapped)


def test_names_filters_and_arguments_may_change(job: Job) -> None:
    def changed(df: DataFrame) -> DataFrame:
        kept = df.where("id > 4").selectExpr("0 AS group", "id + 0 AS amount", "at")
        return kept.groupBy("group").agg(f.sum("amount").alias("found"))

    job.run(job.pipeline(), summed)
    job.add(*ids(5))
    job.run(job.pipeline(), changed)
    assert last_row(job)["found"] == 15


def test_batches_without_rows_have_the_same_aggregates(spark: SparkSession, tmp_path: Path) -> None:
    """A watermark makes batches in which no row comes, and their plan is another."""

    def windows(df: DataFrame) -> DataFrame:
        late = df.withWatermark("at", "1 second")
        return (
            late.groupBy(f.window("at", "1 minute")).agg(f.sum("id").alias("found")).select("found")
        )

    job = Job(spark, tmp_path)
    for n in range(2):
        job.add(json.dumps({"id": n, "at": f"2026-01-01 00:0{n}:00"}))
        job.run(job.pipeline(), windows, "append")
    made_by = (tmp_path / "ckpt" / AGGREGATES).read_text()
    assert json.loads(made_by) == [["sum(bigint)"]]


def test_session_windows_are_compared(spark: SparkSession, tmp_path: Path) -> None:
    def sessions(aggregate: Column) -> Any:
        return lambda df: (
            df.withWatermark("at", "1 second")
            .groupBy(f.session_window("at", "1 minute"), "id")
            .agg(aggregate.alias("found"))
            .select("found")
        )

    job = Job(spark, tmp_path)
    for n in range(2):
        job.add(json.dumps({"id": n, "at": f"2026-01-01 0{n}:00:00"}))
    job.run(job.pipeline(), sessions(f.sum("id")), "append")
    job.add(json.dumps({"id": 9, "at": "2026-01-01 09:00:00"}))
    with pytest.raises(StreamingQueryException, match=r"made by sum\(bigint\)"):
        job.run(job.pipeline(), sessions(f.max("id")), "append")


def test_each_aggregation_of_a_query_is_compared(spark: SparkSession, tmp_path: Path) -> None:
    """One above the other; the upper one changes."""

    def twice(upper: Any) -> Any:
        return lambda df: (
            df.withWatermark("at", "1 second")
            .groupBy(f.window("at", "1 minute"))
            .agg(f.sum("id").alias("v"))
            .groupBy(f.window("window", "1 hour"))
            .agg(upper("v").alias("found"))
            .select("found")
        )

    job = Job(spark, tmp_path)
    job.add(json.dumps({"id": 1, "at": "2026-01-01 00:00:00"}))
    job.run(job.pipeline(), twice(f.max), "append")
    job.add(json.dumps({"id": 9, "at": "2026-01-01 09:00:00"}))
    with pytest.raises(
        StreamingQueryException, match=r"made by max\(bigint\); sum\(bigint\), and .* min\(bigint\)"
    ):
        job.run(job.pipeline(), twice(f.min), "append")


def test_change_before_the_first_commit_is_free(job: Job) -> None:
    """Nothing is in the state yet that Spark would continue from."""

    class Unfit(FileSink):
        def validate(self, schema: object) -> None:
            raise ValueError("unfit")

    with pytest.raises(StreamingQueryException, match="unfit"):
        job.run(job.pipeline(sinks=[Unfit(job.out)]), summed)
    assert (job.folder / "ckpt" / AGGREGATES).exists()
    job.run(job.pipeline(), highest)
    assert last_row(job)["found"] == 4


def test_query_without_aggregates_leaves_no_file(job: Job) -> None:
    job.run(job.pipeline(), lambda df: df.select("id").dropDuplicates(["id"]))
    assert not (job.folder / "ckpt" / AGGREGATES).exists()
