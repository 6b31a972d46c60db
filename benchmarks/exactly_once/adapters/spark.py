"""Copies a topic with Spark: by sparkonce, or by Spark's own Kafka sink."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession

from sparkonce import ExactlyOnce
from sparkonce.sinks import KafkaSink
from sparkonce.testing.services import spark_kafka_jars

_MOST_RECORDS = 250_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("servers", "input", "output", "state", "guarantee"):
        parser.add_argument(f"--{name}", required=True)
    given = parser.parse_args()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    state = Path(given.state)
    settings = {
        "spark.jars": ",".join(map(str, spark_kafka_jars())),
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.sql.shuffle.partitions": "2",
        "spark.log.level": "ERROR",
    }
    builder = SparkSession.builder.master("local[2]").appName("benchmark")
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    rows = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", given.servers)
        .option("subscribe", given.input)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", _MOST_RECORDS)
        .load()
        .select("value")
    )
    if given.guarantee == "at-least-once":
        stream = (
            rows.writeStream.format("kafka")
            .option("kafka.bootstrap.servers", given.servers)
            .option("topic", given.output)
            .option("kafka.linger.ms", "50")
            .option("kafka.compression.type", "lz4")
        )
    else:
        waits = given.guarantee == "after-checkpoint"
        pipeline = ExactlyOnce(
            "benchmark",
            sinks=[KafkaSink(given.output, bootstrap_servers=given.servers)],
            log=f"sqlite:///{state}/log.db",
            commit="after_checkpoint" if waits else "immediate",
        )
        stream = rows.writeStream.foreachBatch(pipeline)
    stream.option("checkpointLocation", str(state / "checkpoint")).start().awaitTermination()


if __name__ == "__main__":
    main()
