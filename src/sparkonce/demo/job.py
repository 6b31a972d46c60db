"""The program that the demo kills: orders from Kafka into Kafka, Postgres and S3.

    python -m sparkonce.demo.job JOB.json

What matters is in `exactly_once` and `main`; the rest is addresses.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from pyspark.sql import SparkSession
from pyspark.sql.functions import col, from_json

from sparkonce import ExactlyOnce
from sparkonce.demo.lakes import lake_of
from sparkonce.demo.naive import Naive
from sparkonce.demo.orders import DERIVED, KAFKA_COLUMNS, SOURCE_SCHEMA
from sparkonce.demo.settings import PIPELINE, Job
from sparkonce.sinks import KafkaSink, PostgresSink
from sparkonce.testing.quick_spark import jvm_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming import StreamingQuery

Writer: TypeAlias = "Callable[[DataFrame, int], None]"


def exactly_once(job: Job) -> Writer:
    """Three sinks, one transaction for each batch."""
    return ExactlyOnce(
        PIPELINE,
        sinks=[
            KafkaSink(job.topic, bootstrap_servers=job.kafka, select=KAFKA_COLUMNS),
            PostgresSink(job.postgres, table=job.table),
            lake_of(job).sink(),
        ],
        log=job.log,
    )


def main(job: Job) -> None:
    spark = session(job)
    orders = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", job.kafka)
        .option("subscribe", job.source_topic)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", job.rows_per_batch)
        .load()
        .select(from_json(col("value").cast("string"), SOURCE_SCHEMA).alias("order"))
        .select("order.*")
        .selectExpr(*DERIVED)
    )
    writer = exactly_once(job) if job.writer == "exactly-once" else Naive(job)
    query = (
        orders.writeStream.foreachBatch(writer).option("checkpointLocation", job.checkpoint).start()
    )
    # Such a query runs for ever; the demo stops it when it has read every order.
    while not query.awaitTermination(1) and rows_read(query) < job.rows:
        pass
    query.stop()
    spark.stop()


def session(job: Job) -> SparkSession:
    """A local Spark with its temporary files in the job's folder, so that a kill leaves none."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {
        "spark.jars": ",".join(job.jars),
        "spark.ui.enabled": "false",
        "spark.python.unix.domain.socket.enabled": "true",  # over TCP a task waits 40 ms for an ACK
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": f"{jvm_options()} -XX:-UsePerfData "
        f"-Djava.io.tmpdir={job.scratch}",
        "spark.local.dir": f"{job.scratch}",
        "spark.sql.warehouse.dir": f"{job.folder}/warehouse",
        "spark.sql.session.timeZone": "UTC",
        # Small record batches, so that the demo can stop a task between two of them.
        "spark.sql.execution.arrow.maxRecordsPerBatch": "2000",
        "spark.log.level": "ERROR",
        **(Naive.settings(job) if job.writer == "naive" else {}),
    }
    builder = SparkSession.builder.master("local[2]").appName("sparkonce-demo")
    return builder.config(map=settings).getOrCreate()


def rows_read(query: StreamingQuery) -> int:
    """How far the query has come in the source topic, after its last finished batch."""
    progress = query.lastProgress
    if progress is None:
        return 0
    ends = json.loads(progress["sources"][0]["endOffset"] or "{}")
    return sum(offset for topic in ends.values() for offset in topic.values())


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    for noisy in ("py4j", "kafka", "botocore", "boto3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    main(Job.load(Path(sys.argv[1])))
