"""Write orders to Kafka, Postgres and S3, exactly once and together.

    make services                          # in one terminal: local servers on fixed ports
    .venv/bin/python examples/orders.py    # in another; stop it, kill it, start it again
    .venv/bin/sparkonce status examples.orders:pipeline

The orders come from Spark's rate source, ten per second. The checkpoint and the transaction log are
in ./orders-state; if you delete it, also delete the topic, the table and the bucket.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import boto3
import psycopg
from botocore.exceptions import ClientError
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.sql import SparkSession

from sparkonce import ExactlyOnce
from sparkonce.sinks import KafkaSink, PostgresSink, S3Connection, S3Sink

KAFKA = os.environ.get("KAFKA", "localhost:9092")
POSTGRES = os.environ.get("POSTGRES", "postgresql://postgres:postgres@localhost:5432/postgres")
S3 = {  # boto3's own names
    "endpoint_url": os.environ.get("S3", "http://localhost:9000"),
    "aws_access_key_id": os.environ.get("S3_ACCESS_KEY", "sparkonce"),
    "aws_secret_access_key": os.environ.get("S3_SECRET_KEY", "sparkonce-secret"),
    "region_name": "us-east-1",
}
STATE = Path(os.environ.get("STATE", "orders-state")).absolute()


def make_targets() -> None:
    """Create the topic, the table and the bucket; sparkonce creates no targets."""
    admin = AdminClient({"bootstrap.servers": KAFKA})
    made = admin.create_topics([NewTopic("orders", num_partitions=3)])
    if (error := made["orders"].exception()) and "already exists" not in str(error):
        raise error
    with psycopg.connect(POSTGRES) as connection:
        connection.execute(
            "CREATE TABLE IF NOT EXISTS orders"
            " (id bigint PRIMARY KEY, day date, amount numeric(12,2))"
        )
    client = boto3.client("s3", **S3)
    try:
        client.create_bucket(Bucket="lake")
    except ClientError as error:
        if error.response["Error"]["Code"] not in {
            "BucketAlreadyOwnedByYou",
            "BucketAlreadyExists",
        }:
            raise


def pipeline() -> ExactlyOnce:
    return ExactlyOnce(
        "orders",
        sinks=[
            KafkaSink("orders", bootstrap_servers=KAFKA, key="id", value_format="json"),
            PostgresSink(POSTGRES, table="orders", key=["id"]),
            S3Sink("s3://lake/orders", partition_by=["day"], connection=S3Connection(**S3)),
        ],
        log=f"sqlite:///{STATE}/txn.db",
    )


def main() -> None:
    STATE.mkdir(exist_ok=True)
    make_targets()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = SparkSession.builder.master("local[2]").appName("orders").getOrCreate()
    orders = (
        spark.readStream.format("rate")
        .option("rowsPerSecond", 10)
        .load()
        .selectExpr(
            "value AS id", "date(timestamp) AS day", "CAST(value % 90 AS decimal(12,2)) AS amount"
        )
    )
    query = (
        orders.writeStream.foreachBatch(pipeline())
        .option("checkpointLocation", str(STATE / "checkpoint"))
        .trigger(processingTime="5 seconds")
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    main()
