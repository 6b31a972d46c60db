"""The driver program that `torture` starts and kills: endless rows into a pipeline.

python -m sparkonce.testing.torture.query ORDER.json

The rows come from Spark's source "rate-micro-batch", whose batches are equal in each replay.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from pyspark.sql.functions import col, lit, sha2

from sparkonce import ExactlyOnce
from sparkonce.spark_hooks.jobs import load_writer
from sparkonce.testing.job import quiet_session, set_writer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COLUMNS: Final = "id, run, payload"
"""The rows: a number, counted up; the driver that read it; a text that follows from the number."""

_EVERY: Final = "1 second"
_TASKS: Final = 2

Writer: TypeAlias = "Callable[[DataFrame, int], object]"


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a driver runs.

    Attributes:
        job: the pipeline, or a function for foreachBatch: see `load_writer`.
        cwd: the folder in which the job is found.
        checkpoint: the query's.
        rows: what is selected from `COLUMNS`, in SQL.
        batch_rows: the number of rows of a batch.
        master: Spark's.
        conf: Spark's settings.
        run: the number of the driver.
        is_last: it ends by itself, after at most one more batch.
    """

    job: str
    cwd: str
    checkpoint: str
    rows: str = COLUMNS
    batch_rows: int = 20
    master: str = "local[2,4]"
    conf: dict[str, str] = field(default_factory=dict)
    run: int = 0
    is_last: bool = False

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


def selected(df: DataFrame, rows: str) -> DataFrame:
    """The rows as the pipeline gets them."""
    df.createOrReplaceTempView("sparkonce_torture")
    return df.sparkSession.sql(f"SELECT {rows} FROM sparkonce_torture")


def source(spark: SparkSession, order: Order) -> DataFrame:
    """`COLUMNS`, as a stream."""
    return (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", order.batch_rows)
        .option("numPartitions", _TASKS)
        .load()
        .select(
            col("value").alias("id"),
            lit(order.run).alias("run"),
            sha2(col("value").cast("string"), 256).alias("payload"),
        )
    )


def main(arguments: Sequence[str]) -> None:
    order = Order(**json.loads(Path(arguments[0]).read_text()))
    os.chdir(order.cwd)
    spark = quiet_session(order.master, Path(order.checkpoint).parent, order.conf)
    writer: Writer = load_writer(order.job)
    if isinstance(writer, ExactlyOnce):
        set_writer(writer, is_driver=order.run % 2 == 1)
    written = (
        selected(source(spark, order), order.rows)
        .writeStream.foreachBatch(writer)
        .option("checkpointLocation", order.checkpoint)
    )
    if order.is_last:
        query = written.trigger(availableNow=True).start()
    else:
        # A function has no points at which to kill it; without pauses any time hits a batch.
        every = _EVERY if isinstance(writer, ExactlyOnce) else "0 seconds"
        query = written.trigger(processingTime=every).start()
    if isinstance(writer, ExactlyOnce):
        with writer:
            writer.awaitTermination(query)
    else:
        query.awaitTermination()


if __name__ == "__main__":
    main(sys.argv[1:])
