"""Iceberg: sparkonce against Spark's own writer with Iceberg's runtime, in foreachBatch.

    python benchmarks/lakehouse.py [--rows 4000000] [--rounds 3] [--small-batches 10]

Both append the same rows to tables of one catalog in SQLite, with files on the local disk. Spark's
own writer is not idempotent. Iceberg has no runtime for Spark after 4.1, so this script starts
itself again with that version. At the end it compares the commit of 1,000 files with pyiceberg's
own append of the same files.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyspark
from harness import arguments, beside, finish, measure, scratch, spark_session
from pyiceberg.catalog import Catalog, load_catalog

from sparkonce import ExactlyOnce
from sparkonce.model import DRIVER_ATTEMPT, BranchId, Committable, Owner
from sparkonce.sinks import IcebergSink
from sparkonce.sinks.iceberg.files import from_json
from sparkonce.sinks.lakehouse.payloads import WrittenFiles
from sparkonce.testing.services.java import jar_dir

if TYPE_CHECKING:
    from pyiceberg.table.update.snapshot import _FastAppendFiles
    from pyspark.sql import DataFrame, SparkSession

SPARK = "4.1.0"
FILES = 1000
TURNS = 5
OWNER = Owner("0" * 16, "bench")
SMALL = pa.schema([("id", pa.int64()), ("name", pa.string())])


def settings_of(folder: Path) -> dict[str, str]:
    return {
        "name": "lake",
        "type": "sql",
        "uri": f"sqlite:///{folder}/catalog.db",
        "warehouse": f"file://{folder}/lake",
    }


def spark_with_iceberg(folder: Path) -> SparkSession:
    catalog = "spark.sql.catalog.lake"
    conf = {
        catalog: "org.apache.iceberg.spark.SparkCatalog",
        f"{catalog}.type": "jdbc",
        f"{catalog}.uri": f"jdbc:sqlite:{folder}/catalog.db",
        f"{catalog}.warehouse": f"file://{folder}/lake",
    }
    spark = spark_session(None, list(jar_dir("iceberg").glob("*.jar")), conf)
    spark.sql("CREATE NAMESPACE IF NOT EXISTS lake.bench")
    return spark


def fresh_table(spark: SparkSession) -> str:
    name = f"t{uuid.uuid4().hex[:10]}"
    spark.sql(
        f"CREATE TABLE lake.bench.{name} (id bigint, name string, amount double, at timestamp) "
        "USING iceberg TBLPROPERTIES ('format-version'='2')"
    )
    return name


def ours(spark: SparkSession, folder: Path) -> ExactlyOnce:
    name = fresh_table(spark)
    sink = IcebergSink(f"bench.{name}", catalog=settings_of(folder))
    return ExactlyOnce(name, sinks=[sink], log=f"sqlite:///{folder}/{name}.db")


def sparks(spark: SparkSession) -> Any:
    name = fresh_table(spark)

    def write(df: DataFrame, _batch_id: int) -> None:
        df.writeTo(f"lake.bench.{name}").append()

    return write


def prepared(sink: IcebergSink, batch_id: int, tasks: Sequence[Committable]) -> Committable:
    (voted,) = sink.vote(BranchId(OWNER, batch_id, 1, "iceberg", 0, DRIVER_ATTEMPT), tasks)
    return voted


def commits_of_many_files(folder: Path) -> tuple[float, float]:
    """Milliseconds for 1,000 files: our commit, and the library's append; medians, in turn."""
    settings = settings_of(folder)
    with (
        closing(load_catalog(**settings)) as catalog,
        closing(IcebergSink("bench.many", catalog=settings, create="if_missing")) as sink,
    ):
        sink.validate(SMALL)
        took: dict[str, list[float]] = {"ours": [], "library": []}
        for turn in range(TURNS):
            tasks = [one_file(sink, turn, attempt) for attempt in range(FILES)]
            committable = prepared(sink, turn, tasks)
            began = time.perf_counter()
            sink.commit(committable)
            took["ours"].append(time.perf_counter() - began)
            took["library"].append(library_append(catalog, turn, tasks))
        return (
            1000 * statistics.median(took["ours"]),
            1000 * statistics.median(took["library"]),
        )


def one_file(sink: IcebergSink, batch_id: int, attempt: int) -> Committable:
    handle = sink.beginTransaction(BranchId(OWNER, batch_id, 1, "iceberg", 0, attempt))
    rows = pa.record_batch([pa.array([attempt], pa.int64()), ["x"]], schema=SMALL)
    sink.write(handle, rows)
    return sink.preCommit(handle)


def library_append(catalog: Catalog, turn: int, tasks: Sequence[Committable]) -> float:
    """Append the same files to another table as pyiceberg does it, whose statistics are known."""
    if turn == 0:
        catalog.create_table("bench.library", SMALL)
    table = catalog.load_table("bench.library")
    files = [
        from_json(file, table.spec(), table.schema())
        for task in tasks
        for file in WrittenFiles.of(task).files
    ]
    began = time.perf_counter()
    with table.transaction() as change:
        update: _FastAppendFiles
        with change.update_snapshot().fast_append() as update:
            for file in files:
                update.append_data_file(file)
    return time.perf_counter() - began


def with_older_spark() -> None:
    """Start this script again with the newest PySpark for which Iceberg has a runtime."""
    sys.path.append(str(Path(__file__).parents[1]))
    from integration_tests.support.older_spark import packages

    os.environ["PYTHONPATH"] = str(packages(SPARK))
    os.execv(sys.executable, [sys.executable, *sys.argv])  # noqa: S606


def main() -> None:
    given = arguments(__doc__, rows=4_000_000)
    if pyspark.__version__ != SPARK:
        with_older_spark()
    with scratch() as folder:
        spark = spark_with_iceberg(folder)
        medians = measure(
            {"sparkonce": lambda: ours(spark, folder), "Spark's own": lambda: sparks(spark)},
            spark,
            folder,
            title="Iceberg, files on the local disk",
            **given,
        )
        spark.stop()
        mine, theirs = medians.values()
        many, library = commits_of_many_files(folder)
        print(
            f"a commit of {FILES:,} files: {many:,.0f} ms; the library's append: {library:,.0f} ms"
        )
        finish(
            **beside(mine, theirs, baseline="spark"),
            ratio_of_many_files_to_library=many / library,
        )


if __name__ == "__main__":
    main()
