"""Copies a topic with Spark's own sinks of Kafka and of files."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession

from sparkonce.testing.services import spark_kafka_jars

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming import DataStreamWriter

_MOST_RECORDS = 250_000


def arguments(doc: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc)
    for name in ("servers", "input", "output", "state", "guarantee"):
        parser.add_argument(f"--{name}", required=True)
    return parser.parse_args()


def rows_of(given: argparse.Namespace) -> DataFrame:
    """The values of the input topic."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
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
    return (
        builder.getOrCreate()
        .readStream.format("kafka")
        .option("kafka.bootstrap.servers", given.servers)
        .option("subscribe", given.input)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", _MOST_RECORDS)
        .load()
        .select("value")
    )


def run(stream: DataStreamWriter, given: argparse.Namespace) -> None:
    checkpoint = str(Path(given.state) / "checkpoint")
    stream.option("checkpointLocation", checkpoint).start().awaitTermination()


def main() -> None:
    given = arguments(__doc__)
    stream = rows_of(given).writeStream
    if given.output.startswith("file:"):
        stream = stream.format("parquet").option("path", given.output)
    else:
        stream = (
            stream.format("kafka")
            .option("kafka.bootstrap.servers", given.servers)
            .option("topic", given.output)
            .option("kafka.linger.ms", "50")
            .option("kafka.compression.type", "lz4")
        )
    run(stream, given)


if __name__ == "__main__":
    main()
