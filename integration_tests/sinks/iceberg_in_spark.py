"""Spark with Iceberg's own runtime works on a table while `IcebergSink` writes to it.

    python -m integration_tests.sinks.iceberg_in_spark FOLDER JAR,JAR

Prints a line for each look; the test compares them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

from pyiceberg.catalog import load_catalog

from integration_tests.support.lake_in_spark import (
    ROWS,
    SCHEMA,
    batch,
    look,
    prepared,
    refusal,
    session,
)
from sparkonce.sinks import Delivered, IcebergSink

TABLE = "lake.shop.orders"


def spark_settings(folder: Path) -> dict[str, str]:
    catalog = "spark.sql.catalog.lake"
    return {
        "spark.sql.extensions": (
            "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions"
        ),
        catalog: "org.apache.iceberg.spark.SparkCatalog",
        f"{catalog}.type": "jdbc",
        f"{catalog}.uri": f"jdbc:sqlite:{folder}/catalog.db",
        f"{catalog}.warehouse": f"file://{folder}/lake",
        f"{catalog}.cache-enabled": "false",
    }


def main(folder: Path, jars: str) -> None:
    spark = session(jars, spark_settings(folder))
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

    def call(procedure: str, *arguments: str) -> Sequence[object]:
        said = ", ".join((f"table => '{TABLE}'", *arguments))
        return spark.sql(f"CALL lake.system.{procedure}({said})").collect()

    with (
        closing(load_catalog(**settings)),
        closing(IcebergSink("shop.orders", catalog=settings)) as sink,
    ):
        sink.validate(SCHEMA)
        sink.commit(prepared(sink, batch(0), 0))
        look(spark, TABLE, "one batch")
        waiting = prepared(sink, batch(1), 1)
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
        look(spark, TABLE, "maintained while a batch waits")
        sink.commit(waiting)
        look(spark, TABLE, "two batches")
        yesterday = time.time() - 24 * 3600
        with patch("time.time", return_value=yesterday):  # Java reads no table whose times go back
            sink.commit(prepared(sink, batch(2), 2))
        look(spark, TABLE, "three batches, the last one by a clock that is a day behind")
        call("rewrite_data_files", "options => map('rewrite-all', 'true')")
        call("expire_snapshots", "older_than => now()", "retain_last => 1")
        sink.commit(waiting)
        look(spark, TABLE, "committed again after the expiry")
        print(json.dumps({"marks": [path.name for path in folder.rglob("*.mark")]}))
        last = prepared(sink, batch(3), 3)
        sink.commit(last)
        call("rewrite_manifests")
        sink.take_back([Delivered(last, ROWS)])
        look(spark, TABLE, "taken back out of rewritten manifests")
        call("expire_snapshots", "older_than => now()", "retain_last => 1")
        print(json.dumps({"expired": not any(folder.rglob("*.b3.files/*.parquet"))}))
        look(spark, TABLE, "expired after that")
        touched = prepared(sink, batch(4), 4)
        sink.commit(touched)
        spark.sql(f"ALTER TABLE {TABLE} SET TBLPROPERTIES ('write.delete.mode'='merge-on-read')")
        spark.sql(f"DELETE FROM {TABLE} WHERE id = {4 * ROWS + 5}")
        print(json.dumps({"refusal": refusal(sink, Delivered(touched, ROWS))}))
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
