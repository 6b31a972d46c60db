"""Rows that a sink of a table format writes, and Spark with that format's own runtime reads.

The scripts that use this run with an older PySpark, in a process of their own.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from sparkonce.errors import TakeBackRefusedError
from sparkonce.model import DRIVER_ATTEMPT, BranchId, Committable, Owner
from sparkonce.sinks import Delivered

ROWS = 40
SCHEMA = pa.schema(
    [("id", pa.int64()), ("at", pa.timestamp("us", "UTC")), ("tags", pa.list_(pa.string()))]
)
_OWNER = Owner("0123456789abcdef", "5a4ae0c8-9c3e-4a0e-8f06-1d0b6a1c7b11")


def batch(number: int) -> pa.RecordBatch:
    start = dt.datetime(2026, 3, 1, tzinfo=dt.UTC)
    return pa.RecordBatch.from_pylist(
        [
            {"id": n, "at": start + dt.timedelta(hours=n), "tags": [f"名 {n}", None]}
            for n in range(number * ROWS, (number + 1) * ROWS)
        ],
        schema=SCHEMA,
    )


def prepared(sink: Any, rows: pa.RecordBatch, number: int) -> Committable:
    """A batch of two tasks that has voted."""
    tasks = []
    for attempt in (0, 1):
        handle = sink.beginTransaction(BranchId(_OWNER, number, 1, sink.name, 0, attempt))
        sink.write(handle, rows.slice(attempt * ROWS // 2, ROWS // 2))
        tasks.append(sink.preCommit(handle))
    (voted,) = sink.vote(BranchId(_OWNER, number, 1, sink.name, 0, DRIVER_ATTEMPT), tasks)
    return voted


def refusal(sink: Any, branch: Delivered) -> str:
    """Why the sink does not take the batch back; empty if it would."""
    try:
        sink.find_delivered([branch])
    except TakeBackRefusedError as error:
        return str(error)
    return ""


def session(jars: str, settings: Mapping[str, str]) -> SparkSession:
    builder = SparkSession.builder.master("local[2]")
    common = {
        "spark.jars": jars,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
    }
    for name, value in {**common, **settings}.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def look(spark: SparkSession, table: str, what: str) -> None:
    """Print whether Spark reads all batches equal, and how many rows a filter finds."""
    names = ", ".join(SCHEMA.names)
    rows = spark.sql(f"SELECT {names} FROM {table} ORDER BY id").toArrow().cast(SCHEMA)
    wanted = [row for n in range(rows.num_rows // ROWS) for row in batch(n).to_pylist()]
    day = spark.sql(f"SELECT id FROM {table} WHERE at < '2026-03-02' AND id > 20").count()
    is_equal = rows.to_pylist() == wanted
    print(json.dumps({"what": what, "rows": rows.num_rows, "equal": is_equal, "day": day}))
