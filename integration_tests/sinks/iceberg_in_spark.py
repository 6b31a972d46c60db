"""Spark with Iceberg's own runtime works on a table while `IcebergSink` writes to it.

    python -m integration_tests.sinks.iceberg_in_spark FOLDER JAR,JAR

Prints a line for each look; the test compares them.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pyarrow as pa
from pyiceberg.catalog import load_catalog
from pyspark.sql import SparkSession

from sparkonce.model import DRIVER_ATTEMPT, BranchId, Committable, Owner
from sparkonce.sinks import IcebergSink

TABLE = "lake.shop.orders"
ROWS = 40
OWNER = Owner("0123456789abcdef", "5a4ae0c8-9c3e-4a0e-8f06-1d0b6a1c7b11")
SCHEMA = pa.schema(
    [("id", pa.int64()), ("at", pa.timestamp("us", "UTC")), ("tags", pa.list_(pa.string()))]
)


def batch(number: int) -> pa.RecordBatch:
    start = dt.datetime(2026, 3, 1, tzinfo=dt.UTC)
    return pa.RecordBatch.from_pylist(
        [
            {"id": n, "at": start + dt.timedelta(hours=n), "tags": [f"名 {n}", None]}
            for n in range(number * ROWS, (number + 1) * ROWS)
        ],
        schema=SCHEMA,
    )


def prepared(sink: IcebergSink, number: int) -> Committable:
    branches = [BranchId(OWNER, number, 1, "iceberg", 0, attempt) for attempt in (0, 1)]
    tasks = []
    for part, branch_id in enumerate(branches):
        handle = sink.beginTransaction(branch_id)
        sink.write(handle, batch(number).slice(part * ROWS // 2, ROWS // 2))
        tasks.append(sink.preCommit(handle))
    (voted,) = sink.vote(BranchId(OWNER, number, 1, "iceberg", 0, DRIVER_ATTEMPT), tasks)
    return voted


def session(folder: Path, jars: str) -> SparkSession:
    catalog = "spark.sql.catalog.lake"
    settings = {
        "spark.jars": jars,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.extensions": (
            "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions"
        ),
        catalog: "org.apache.iceberg.spark.SparkCatalog",
        f"{catalog}.type": "jdbc",
        f"{catalog}.uri": f"jdbc:sqlite:{folder}/catalog.db",
        f"{catalog}.warehouse": f"file://{folder}/lake",
        f"{catalog}.cache-enabled": "false",
    }
    builder = SparkSession.builder.master("local[2]")
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def main(folder: Path, jars: str) -> None:
    spark = session(folder, jars)
    spark.sql("CREATE NAMESPACE lake.shop")
    spark.sql(
        f"CREATE TABLE {TABLE} (id bigint, at timestamp, tags array<string>) USING iceberg "
        "PARTITIONED BY (days(at), bucket(3, id)) TBLPROPERTIES ('format-version'='2')"
    )
    settings = {
        "name": "lake",
        "type": "sql",
        "uri": f"sqlite:///{folder}/catalog.db",
        "warehouse": f"file://{folder}/lake",
    }

    def look(what: str) -> None:
        rows = spark.sql(f"SELECT * FROM {TABLE} ORDER BY id").toArrow().cast(SCHEMA)
        wanted = [row for n in range(rows.num_rows // ROWS) for row in batch(n).to_pylist()]
        day = spark.sql(f"SELECT id FROM {TABLE} WHERE at < '2026-03-02' AND id > 20").count()
        is_equal = rows.to_pylist() == wanted
        print(json.dumps({"what": what, "rows": rows.num_rows, "equal": is_equal, "day": day}))

    def call(procedure: str, *arguments: str) -> Sequence[object]:
        said = ", ".join((f"table => '{TABLE}'", *arguments))
        return spark.sql(f"CALL lake.system.{procedure}({said})").collect()

    with (
        closing(load_catalog(**settings)),
        closing(IcebergSink("shop.orders", catalog=settings)) as sink,
    ):
        sink.validate(SCHEMA)
        sink.commit(prepared(sink, 0))
        look("one batch")
        waiting = prepared(sink, 1)
        call("rewrite_data_files", "options => map('rewrite-all', 'true')")
        call("rewrite_manifests")
        call("expire_snapshots", "older_than => now()", "retain_last => 1")
        old, young = (time.time() - days * 24 * 3600 for days in (9, 2.9))
        for path in folder.rglob("*.mark"):
            os.utime(path, (old, old))
        for path in folder.rglob("*.parquet"):
            os.utime(path, (young, young))
        removed = call("remove_orphan_files")
        print(json.dumps({"removed": [str(row) for row in removed]}))
        look("maintained while a batch waits")
        sink.commit(waiting)
        look("two batches")
        sink.commit(prepared(sink, 2))
        call("rewrite_data_files", "options => map('rewrite-all', 'true')")
        call("expire_snapshots", "older_than => now()", "retain_last => 1")
        sink.commit(waiting)
        look("committed again after the expiry")
        print(json.dumps({"marks": [path.name for path in folder.rglob("*.mark")]}))
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
