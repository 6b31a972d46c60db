"""Iceberg and Delta: sparkonce against Spark's own writers with each format's runtime.

    python benchmarks/lakehouse.py [--rows 4000000] [--rounds 3] [--small-batches 10]

All append the same rows in foreachBatch, to tables on the local disk; Iceberg's catalog is SQLite.
Spark's Iceberg writer is not idempotent; its Delta writer skips a repeated batch (txnAppId). No
format has a runtime for Spark after 4.1, so this script starts itself again with that version. At
the end it compares the commit of 1,000 files with the library's own append of the same files.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyspark
from deltalake import DeltaTable
from deltalake.transaction import AddAction
from harness import arguments, beside, finish, measure, scratch, spark_session
from pyiceberg.catalog import load_catalog

from sparkonce import ExactlyOnce
from sparkonce.model import DRIVER_ATTEMPT, BranchId, Committable, Owner
from sparkonce.sinks import DeltaSink, IcebergSink
from sparkonce.sinks.iceberg.files import from_json
from sparkonce.sinks.lakehouse.payloads import WrittenFiles
from sparkonce.sinks.lakehouse.sink import LakehouseSink
from sparkonce.testing.services.java import jar_dir

if TYPE_CHECKING:
    from pyiceberg.table.update.snapshot import _FastAppendFiles
    from pyspark.sql import DataFrame, SparkSession

SPARK = "4.1.0"
FILES = 1000
TURNS = 5
OWNER = Owner("0" * 16, str(uuid.UUID(int=0)))  # as Spark names a query
SMALL = pa.schema([("id", pa.int64()), ("name", pa.string())])
COLUMNS = "id bigint, name string, amount double, at timestamp"


class Lake(ABC):
    """Tables of one format in a folder."""

    name: str
    prefix: str

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def conf(self) -> dict[str, str]:
        """Spark's settings."""

    @abstractmethod
    def create(self, spark: SparkSession) -> str:
        """Create a table; its name."""

    @abstractmethod
    def sink(self, table: str, **settings: Any) -> LakehouseSink: ...

    @abstractmethod
    def append(self, df: DataFrame, table: str, batch_id: int) -> None:
        """Spark's own writer."""

    @abstractmethod
    def library_append(self, turn: int, tasks: Sequence[Committable]) -> float:
        """Append the same files to another table as the library does it; seconds."""

    def ours(self, spark: SparkSession) -> ExactlyOnce:
        table = self.create(spark)
        return ExactlyOnce(
            table, sinks=[self.sink(table)], log=f"sqlite:///{self.folder}/{table}.db"
        )

    def sparks(self, spark: SparkSession) -> Callable[[DataFrame, int], None]:
        table = self.create(spark)
        return lambda df, batch_id: self.append(df, table, batch_id)

    def commits_of_many_files(self) -> tuple[float, float]:
        """Milliseconds for 1,000 files: our commit, and the library's append; medians, in turn."""
        sink = self.sink("many", create="if_missing")
        sink.validate(SMALL)
        took: dict[str, list[float]] = {"ours": [], "library": []}
        for turn in range(TURNS):
            tasks = [one_file(sink, turn, attempt) for attempt in range(FILES)]
            by_driver = BranchId(OWNER, turn, 1, sink.name, 0, DRIVER_ATTEMPT)
            (committable,) = sink.vote(by_driver, tasks)
            began = time.perf_counter()
            sink.commit(committable)
            took["ours"].append(time.perf_counter() - began)
            took["library"].append(self.library_append(turn, tasks))
        sink.close()
        return (
            1000 * statistics.median(took["ours"]),
            1000 * statistics.median(took["library"]),
        )


class IcebergLake(Lake):
    name = "Iceberg"
    prefix = ""

    @property
    def settings(self) -> dict[str, str]:
        return {
            "name": "lake",
            "type": "sql",
            "uri": f"sqlite:///{self.folder}/catalog.db",
            "warehouse": f"file://{self.folder}/lake",
        }

    def conf(self) -> dict[str, str]:
        catalog = "spark.sql.catalog.lake"
        return {
            catalog: "org.apache.iceberg.spark.SparkCatalog",
            f"{catalog}.type": "jdbc",
            f"{catalog}.uri": f"jdbc:sqlite:{self.folder}/catalog.db",
            f"{catalog}.warehouse": f"file://{self.folder}/lake",
        }

    def create(self, spark: SparkSession) -> str:
        name = f"t{uuid.uuid4().hex[:10]}"
        spark.sql("CREATE NAMESPACE IF NOT EXISTS lake.bench")
        spark.sql(
            f"CREATE TABLE lake.bench.{name} ({COLUMNS}) USING iceberg "
            "TBLPROPERTIES ('format-version'='2')"
        )
        return name

    def sink(self, table: str, **settings: Any) -> IcebergSink:
        return IcebergSink(f"bench.{table}", catalog=self.settings, **settings)

    def append(self, df: DataFrame, table: str, batch_id: int) -> None:
        df.writeTo(f"lake.bench.{table}").append()

    def library_append(self, turn: int, tasks: Sequence[Committable]) -> float:
        catalog = load_catalog(**self.settings)
        if turn == 0:
            catalog.create_table("bench.library", SMALL)
        table = catalog.load_table("bench.library")
        files = [from_json(file, table.spec(), table.schema()) for file in files_of(tasks)]
        began = time.perf_counter()
        with table.transaction() as change:
            update: _FastAppendFiles
            with change.update_snapshot().fast_append() as update:
                for file in files:
                    update.append_data_file(file)
        took = time.perf_counter() - began
        catalog.close()
        return took


class DeltaLake(Lake):
    name = "Delta"
    prefix = "delta_"

    def conf(self) -> dict[str, str]:
        return {
            "spark.databricks.delta.snapshotPartitions": "2",  # 50 tasks for each commit by default
            "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
            "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        }

    def path(self, table: str) -> str:
        return str(self.folder / "delta" / table)

    def create(self, spark: SparkSession) -> str:
        name = f"t{uuid.uuid4().hex[:10]}"
        spark.sql(f"CREATE TABLE delta.`{self.path(name)}` ({COLUMNS}) USING delta")
        return name

    def sink(self, table: str, **settings: Any) -> DeltaSink:
        return DeltaSink(self.path(table), **settings)

    def append(self, df: DataFrame, table: str, batch_id: int) -> None:
        writer = df.write.format("delta").mode("append")
        writer.option("txnAppId", table).option("txnVersion", batch_id).save(self.path(table))

    def library_append(self, turn: int, tasks: Sequence[Committable]) -> float:
        path = self.path("library")
        if turn == 0:
            DeltaTable.create(path, SMALL)
        adds = [
            AddAction(file["path"], file["bytes"], {}, 0, True, file["stats"])
            for file in files_of(tasks)
        ]
        began = time.perf_counter()
        table = DeltaTable(path)
        table.create_write_transaction(adds, "append", table.schema())
        return time.perf_counter() - began


def files_of(tasks: Sequence[Committable]) -> list[Any]:
    return [file for task in tasks for file in WrittenFiles.of(task).files]


def one_file(sink: LakehouseSink, batch_id: int, attempt: int) -> Committable:
    handle = sink.beginTransaction(BranchId(OWNER, batch_id, 1, sink.name, 0, attempt))
    rows = pa.record_batch([pa.array([attempt], pa.int64()), ["x"]], schema=SMALL)
    sink.write(handle, rows)
    return sink.preCommit(handle)


def with_older_spark() -> None:
    """Start this script again with the newest PySpark for which there are runtimes."""
    sys.path.append(str(Path(__file__).parents[1]))
    from integration_tests.support.older_spark import packages

    os.environ["PYTHONPATH"] = str(packages(SPARK))
    os.execv(sys.executable, [sys.executable, *sys.argv])  # noqa: S606


def main() -> None:
    given = arguments(__doc__, rows=4_000_000)
    if pyspark.__version__ != SPARK:
        with_older_spark()
    results: dict[str, float] = {}
    with scratch() as folder:
        lakes = [IcebergLake(folder), DeltaLake(folder)]
        jars = [*jar_dir("iceberg").glob("*.jar"), *jar_dir("delta").glob("*.jar")]
        conf = {name: value for lake in lakes for name, value in lake.conf().items()}
        spark = spark_session(None, jars, conf)
        for lake in lakes:
            writers = {
                "sparkonce": lambda lake=lake: lake.ours(spark),
                "Spark's own": lambda lake=lake: lake.sparks(spark),
            }
            (own := folder / f"runs-{lake.name}").mkdir()
            medians = measure(writers, spark, own, title=f"{lake.name}, a local disk", **given)
            mine, theirs = medians.values()
            results |= beside(mine, theirs, baseline="spark", prefix=lake.prefix)
        spark.stop()
        for lake in lakes:
            many, library = lake.commits_of_many_files()
            print(
                f"{lake.name}, a commit of {FILES:,} files: {many:,.0f} ms; the library's append: "
                f"{library:,.0f} ms"
            )
            results[f"{lake.prefix}ratio_of_many_files_to_library"] = many / library
        finish(**results)


if __name__ == "__main__":
    main()
