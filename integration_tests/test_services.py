"""The servers themselves: they answer, they come back on the same data, they leave no orphans."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import psycopg
from confluent_kafka import Consumer, Producer

from sparkonce.testing.services import KafkaServer, PostgresServer, S3Server

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from pyspark.sql import SparkSession


def test_kafka_killed_and_started_again(
    kafka: KafkaServer, fresh_topic: Callable[..., str]
) -> None:
    """A record that was acknowledged before the SIGKILL is read after the restart."""
    topic = fresh_topic(3)
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "acks": "all"})
    producer.produce(topic, b"kept")
    assert producer.flush(30) == 0
    kafka.kill()
    kafka.start()
    consumer = Consumer(
        {
            "bootstrap.servers": kafka.bootstrap_servers,
            "group.id": topic,
            "auto.offset.reset": "earliest",
        }
    )
    consumer.subscribe([topic])
    message = consumer.poll(30)
    consumer.close()
    assert message is not None
    assert message.value() == b"kept"


def test_postgres_killed_and_started_again(
    postgres: PostgresServer, fresh_table: Callable[[str], str]
) -> None:
    """A prepared transaction outlives a SIGKILL of the server."""
    table = fresh_table("id int")
    with psycopg.connect(postgres.dsn, autocommit=True) as connection:
        connection.execute("BEGIN")
        connection.execute(f"INSERT INTO {table} VALUES (1)".encode())
        connection.execute(f"PREPARE TRANSACTION '{table}'".encode())
    postgres.kill()
    postgres.start()
    with psycopg.connect(postgres.dsn, autocommit=True) as connection:
        connection.execute(f"COMMIT PREPARED '{table}'".encode())
        assert connection.execute(f"SELECT id FROM {table}".encode()).fetchall() == [(1,)]


def test_s3_killed_and_started_again(s3: S3Server, s3_client: S3Client, fresh_bucket: str) -> None:
    """An upload that was begun before the SIGKILL can be completed after the restart."""
    upload = s3_client.create_multipart_upload(Bucket=fresh_bucket, Key="key")
    names = {"Bucket": fresh_bucket, "Key": "key", "UploadId": upload["UploadId"]}
    part = s3_client.upload_part(**names, PartNumber=1, Body=b"kept")
    s3.kill()
    s3.start()
    s3_client.complete_multipart_upload(
        **names, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    )
    assert s3_client.get_object(Bucket=fresh_bucket, Key="key")["Body"].read() == b"kept"


def test_spark_reads_and_writes_kafka(
    spark: SparkSession, kafka: KafkaServer, fresh_topic: Callable[..., str]
) -> None:
    """The connector's jars fit the Spark that is installed."""
    topic = fresh_topic()
    address = {"kafka.bootstrap.servers": kafka.bootstrap_servers}
    frame = spark.range(10).selectExpr("CAST(id AS STRING) AS value")
    frame.write.format("kafka").options(**address, topic=topic).save()
    read = spark.read.format("kafka").options(**address, subscribe=topic).load()
    assert read.count() == 10
