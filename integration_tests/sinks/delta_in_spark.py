"""Spark with Delta's own runtime works on a table while `DeltaSink` writes to it.

    python -m integration_tests.sinks.delta_in_spark FOLDER JAR,JAR

Prints a line for each look; the test compares them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from integration_tests.support.lake_in_spark import (
    ROWS,
    SCHEMA,
    batch,
    look,
    prepared,
    refusal,
    session,
)
from sparkonce.sinks import Delivered, DeltaSink

SETTINGS = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}


def with_day(number: int) -> pa.RecordBatch:
    """A batch, and the column that the table is partitioned by."""
    rows = batch(number)
    return rows.append_column("day", pc.cast(rows.column("at"), pa.date32()))


def main(folder: Path, jars: str) -> None:
    spark = session(jars, SETTINGS)
    uri = folder / "orders"
    table = f"delta.`{uri}`"
    spark.sql(
        f"CREATE TABLE {table} (id bigint, at timestamp, tags array<string>, day date) USING delta "
        "PARTITIONED BY (day) TBLPROPERTIES ('delta.checkpointInterval'='2', "
        "'delta.enableDeletionVectors'='true')"
    )

    def clean_up_the_log() -> None:
        """As Delta does after its retention: what a checkpoint covers goes."""
        for path in sorted((uri / "_delta_log").glob("*.json"))[:-1]:
            os.utime(path, (old, old))
        spark.sql(f"DELETE FROM {table} WHERE id < 0")
        for n in range(3):
            spark.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ('n'='{n}')")

    old, young = (time.time() - days * 24 * 3600 for days in (40, 6.9))
    sink = DeltaSink(str(uri))
    sink.validate(pa.schema([*SCHEMA, ("day", pa.date32())]))
    sink.commit(prepared(sink, with_day(0), 0))
    look(spark, table, "one batch")
    waiting = prepared(sink, with_day(1), 1)
    spark.sql(f"OPTIMIZE {table}")
    spark.sql(f"ALTER TABLE {table} ADD COLUMNS (note string)")
    spark.sql(f"DELETE FROM {table} WHERE id = 1000")
    for path in folder.rglob("*.parquet"):
        os.utime(path, (young, young))
    spark.sql(f"VACUUM {table}")
    look(spark, table, "maintained while a batch waits")
    sink.commit(waiting)
    look(spark, table, "two batches")
    sink.commit(prepared(sink, with_day(2), 2))
    spark.sql(f"OPTIMIZE {table}")
    sink.commit(waiting)
    look(spark, table, "committed again after a compaction")
    clean_up_the_log()
    sink.commit(prepared(sink, with_day(3), 3))
    look(spark, table, "after the log was cleaned up")
    has_first = (uri / "_delta_log" / f"{0:020}.json").exists()
    left = sorted(path.name for path in (uri / "_sparkonce").iterdir() if path.is_file())
    print(json.dumps({"has_first_version": has_first, "left": left}))
    last = prepared(sink, with_day(4), 4)
    sink.commit(last)
    sink.take_back([Delivered(last, ROWS)])
    look(spark, table, "taken back")
    touched = prepared(sink, with_day(5), 5)
    sink.commit(touched)
    spark.sql(f"DELETE FROM {table} WHERE id = {5 * ROWS + 5}")
    print(json.dumps({"refusal": refusal(sink, Delivered(touched, ROWS))}))
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
