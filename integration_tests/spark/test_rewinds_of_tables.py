"""A rewind of a real query into Iceberg and Delta tables: bad code, back to a savepoint, good code.

Another writer appends to both tables meanwhile, and its rows stay.
"""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog import load_catalog

from integration_tests.support.savepoints import aggregated, counted, delivered, rows
from integration_tests.support.spark import Job
from sparkonce.cli.main import run

if TYPE_CHECKING:
    from pyiceberg.table import Table
    from pyspark.sql import DataFrame, SparkSession

    from sparkonce import ExactlyOnce

BEFORE, AFTER = 3, 2
"""Batches before and after the savepoint."""

MODULE = """
from sparkonce import ExactlyOnce
from sparkonce.sinks import DeltaSink, FileSink, IcebergSink

catalog = {{"type": "sql", "uri": "sqlite:///{0}/catalog.db", "warehouse": "file://{0}/lake"}}

def pipeline():
    return ExactlyOnce("orders", sinks=[
        FileSink("{0}/job/out"),
        IcebergSink("shop.orders", catalog=catalog, create="if_missing"),
        DeltaSink("{0}/delta", create="if_missing"),
    ], log="sqlite:///{0}/txn.db")
"""

OTHERS = pa.table({"id": pa.array([99], pa.int64()), "count": pa.array([1], pa.int64())})


def wrong(df: DataFrame) -> DataFrame:
    return aggregated(df).selectExpr("id", "count + 1000 AS count")


class Tables:
    """The pipeline's targets, and what readers see there."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job, self.folder = job, folder
        self.name = f"tables_{folder.name.replace('-', '_')}"
        (folder / f"{self.name}.py").write_text(MODULE.format(folder))
        self.module: Any = importlib.import_module(self.name)
        self.catalog = load_catalog("default", **self.module.catalog)

    def run(self, shape: Callable[[DataFrame], DataFrame], files: range = range(0)) -> None:
        for n in files:
            self.job.add(*rows(n))
        pipeline: ExactlyOnce = self.module.pipeline()
        self.job.run(pipeline, shape)

    def command(self, verb: str, *arguments: str) -> int:
        root = str(self.folder / "savepoints")
        return run(["savepoint", verb, f"{self.name}:pipeline", root, *arguments])

    def append(self) -> None:
        iceberg = self.iceberg()
        iceberg.append(OTHERS.cast(iceberg.schema().as_arrow()))  # Spark 4.1 counts without nulls
        write_deltalake(f"{self.folder}/delta", OTHERS, mode="append")

    def iceberg(self) -> Table:
        return self.catalog.load_table("shop.orders")

    def seen(self) -> list[Counter[Any]]:
        tables = (
            self.iceberg().scan().to_arrow(),
            DeltaTable(f"{self.folder}/delta").to_pyarrow_table(),
        )
        found = [Counter(tuple(r.values()) for r in table.to_pylist()) for table in tables]
        return [delivered(self.job.out), *found]


@pytest.fixture
def tables(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    set_conf: Callable[[str, str], None],
) -> Iterator[Tables]:
    set_conf("spark.sql.shuffle.partitions", "2")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "job").mkdir()
    made = Tables(Job(spark, tmp_path / "job"), tmp_path)
    yield made
    made.catalog.close()


def test_bad_code_is_taken_back(tables: Tables, capsys: pytest.CaptureFixture[str]) -> None:
    job, good = tables.job, counted(range(BEFORE))
    tables.run(aggregated, range(BEFORE))
    assert tables.command("create", "--name", "good") == 0
    tables.run(wrong, range(BEFORE, BEFORE + AFTER))
    tables.append()
    bad, others = tables.seen()[0], Counter([(99, 1)])
    assert tables.seen() == [bad, bad + others, bad + others]
    capsys.readouterr()
    arguments = ("rewind", "good", "--into", str(job.folder / "new"), "--yes")
    assert tables.command(*arguments, "--dry-run", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    rows_after = bad.total() - good.total()
    assert {s["sink"]: (s["batches"], s["rows"]) for s in shown["sinks"]} == {
        name: (list(range(BEFORE, BEFORE + AFTER)), rows_after)
        for name in ("file", "iceberg", "delta")
    }
    assert tables.seen() == [bad, bad + others, bad + others]
    assert tables.command(*arguments) == 0
    assert tables.seen() == [good, good + others, good + others]
    job.checkpoint = "new"
    tables.run(aggregated)
    truth = counted(range(BEFORE + AFTER))
    assert tables.seen() == [truth, truth + others, truth + others]
