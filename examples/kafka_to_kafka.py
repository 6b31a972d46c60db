"""Kafka to Kafka, exactly once: read payments, check them, and write them to another topic.

    make services    # in one terminal: local servers on fixed ports

    # In another; stop it, kill it, start it again.
    jars=$(.venv/bin/python -c "
    from sparkonce.testing.services import spark_kafka_jars as jars
    print(*jars(), sep=',')")
    export PYSPARK_SUBMIT_ARGS="--jars $jars pyspark-shell"
    .venv/bin/python examples/kafka_to_kafka.py --make 1000
    .venv/bin/sparkonce status examples.kafka_to_kafka:pipeline

With spark-submit, `--packages org.apache.spark:spark-sql-kafka-0-10_2.13:VERSION` loads the same
jars, for your version of Spark. `--make` writes payments into the source topic first.

Spark's checkpoint records how far the source has been read, and the transaction log records which
batches were written. Consumers of `payments-checked` with isolation.level=read_committed see each
payment once. One Spark task reads one partition of the source and writes its rows in that order, so
the payments of one key stay in order.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.sql import SparkSession
from pyspark.sql.functions import col

from sparkonce import ExactlyOnce
from sparkonce.sinks import KafkaSink

KAFKA = os.environ.get("KAFKA", "localhost:9092")
SOURCE, TARGET = "payments", "payments-checked"
STATE = Path(os.environ.get("STATE", "payments-state")).absolute()


def make_topics() -> None:
    admin = AdminClient({"bootstrap.servers": KAFKA})
    for made in admin.create_topics([NewTopic(name, 3) for name in (SOURCE, TARGET)]).values():
        if (error := made.exception()) and "already exists" not in str(error):
            raise error


def make_payments(number: int) -> None:
    # A retry of a producer without idempotence can change the order of a key's payments.
    producer = Producer({"bootstrap.servers": KAFKA, "enable.idempotence": True})
    for payment in range(number):
        producer.produce(SOURCE, str(payment), key=f"customer {payment % 10}")
    producer.flush()


def pipeline() -> ExactlyOnce:
    return ExactlyOnce(
        "payments",
        sinks=[KafkaSink(TARGET, bootstrap_servers=KAFKA)],
        log=f"sqlite:///{STATE}/txn.db",
    )


def main(*, once: bool, batch: int, make: int) -> None:
    STATE.mkdir(exist_ok=True)
    make_topics()
    make_payments(make)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = SparkSession.builder.master("local[2]").appName("payments").getOrCreate()
    payments = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", KAFKA)
        .option("kafka.isolation.level", "read_committed")  # if the source is transactional
        .option("subscribe", SOURCE)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", batch)
        .load()
        .where(col("value").isNotNull())
        .selectExpr(
            "key",
            "to_json(named_struct('payment', string(value), 'is_checked', true)) AS value",
        )
    )
    writer = payments.writeStream.foreachBatch(pipeline()).option(
        "checkpointLocation", str(STATE / "checkpoint")
    )
    writer = writer.trigger(availableNow=True) if once else writer
    writer.start().awaitTermination()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--once", action="store_true", help="write the existing payments, then end")
    parser.add_argument("--batch", type=int, default=10_000, help="most payments in a batch")
    parser.add_argument("--make", type=int, default=0, help="payments to write first")
    main(**vars(parser.parse_args()))
