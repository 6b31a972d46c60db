"""The servers themselves: they answer, they come back on the same data, they leave no orphans."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import psycopg
import pytest
from confluent_kafka import Consumer, KafkaException, Producer

from sparkonce.testing.services import (
    KINDS,
    KafkaServer,
    PostgresServer,
    S3Server,
    ServiceError,
    start_services,
    unavailable,
)
from sparkonce.testing.services.containers import choose_backend

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from pyspark.sql import SparkSession

GONE_WITHIN_S = 30
local_only = pytest.mark.skipif(
    choose_backend() == "docker", reason="about local processes; here they are containers"
)


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
    frame.write.format("kafka").options(**address, topic=topic, **{"kafka.client.id": topic}).save()
    read = spark.read.format("kafka").options(**address, subscribe=topic).load()
    assert read.count() == 10


def test_server_stopped_and_started_again(
    s3: S3Server, s3_client: S3Client, fresh_bucket: str
) -> None:
    """An orderly stop keeps the data too; a second stop or start changes nothing."""
    s3_client.put_object(Bucket=fresh_bucket, Key="key", Body=b"kept")
    s3.stop()
    s3.stop()
    s3.start()
    s3.start()
    assert s3_client.get_object(Bucket=fresh_bucket, Key="key")["Body"].read() == b"kept"


def test_settings_of_ones_own() -> None:
    """They reach the servers, over the settings that every server here gets."""
    with start_services(
        ["kafka", "postgres"],
        kafka_config={"transaction.max.timeout.ms": "60000"},
        postgres_config={"max_prepared_transactions": "0"},
    ) as services:
        with psycopg.connect(services.postgres.dsn) as connection:
            row = connection.execute("SHOW max_prepared_transactions").fetchone()
        assert row == ("0",)
        producer = Producer(
            {
                "bootstrap.servers": services.kafka.bootstrap_servers,
                "transactional.id": "t",
                "transaction.timeout.ms": 60001,
            }
        )
        with pytest.raises(KafkaException, match="timeout"):
            producer.init_transactions(30)


def test_one_server_fails_to_start() -> None:
    """The sentence has the server's own words, and the other one is not left running."""
    before = watchdogs_below(psutil.Process())
    with pytest.raises(ServiceError, match="Postgres ended at its start.*no_such_setting"):
        start_services(["postgres", "kafka"], postgres_config={"no_such_setting": "1"})
    assert watchdogs_below(psutil.Process()) == before


@pytest.fixture
def data_dir() -> Iterator[Path]:
    """A folder that any user may enter; pytest's own is this user's alone."""
    folder = Path(tempfile.mkdtemp(prefix="sparkonce-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@local_only
def test_data_folder_of_ones_own(data_dir: Path) -> None:
    """What one run wrote, the next one reads, on other ports."""
    with start_services(["postgres"], data_dir=data_dir) as services:
        with psycopg.connect(services.postgres.dsn) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 1 AS id")
    with start_services(["postgres"], data_dir=data_dir) as services:
        with psycopg.connect(services.postgres.dsn) as connection:
            assert connection.execute("SELECT id FROM kept").fetchone() == (1,)


@local_only
@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs Postgres as another user")
def test_data_folder_that_the_server_cannot_enter(data_dir: Path) -> None:
    data_dir.chmod(0o700)
    with pytest.raises(ServiceError, match="cannot enter"):
        start_services(["postgres"], data_dir=data_dir)


PARENT = """
import sys, threading
from sparkonce.testing.services import start_services
with start_services(sys.argv[1:]):
    print("ready", flush=True)
    threading.Event().wait()
"""


@local_only
def test_parent_killed() -> None:
    """All servers die with the process that started them, and their data goes too.

    While they live, they listen on this machine's own address only.
    """
    kinds = [kind for kind in KINDS if kind not in unavailable()]
    argv = [sys.executable, "-c", PARENT, *kinds]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline() == b"ready\n"
            watchdogs = watchdogs_below(psutil.Process(parent.pid))
            folders = [Path(watchdog.cmdline()[-1]) for watchdog in watchdogs]
            assert sorted(folder.name for folder in folders) == sorted(kinds)
            assert all(folder.is_dir() for folder in folders)
            servers = [child for dog in watchdogs for child in dog.children(recursive=True)]
            assert addresses_of(servers) == {"127.0.0.1"}
        finally:
            parent.kill()
    deadline = time.monotonic() + GONE_WITHIN_S
    while not all(map(is_gone, [*watchdogs, *servers])):
        assert time.monotonic() < deadline, [*watchdogs, *servers]
        time.sleep(0.05)
    assert not folders[0].parent.exists()


def watchdogs_below(process: psutil.Process) -> list[psutil.Process]:
    return [
        child
        for child in process.children()
        if any(word.endswith("watchdog.py") for word in child.cmdline())
    ]


def addresses_of(processes: list[psutil.Process]) -> set[str]:
    """Where they listen; Java's form of an IPv4 address as the address it is."""
    return {
        connection.laddr.ip.removeprefix("::ffff:")
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


def is_gone(process: psutil.Process) -> bool:
    try:
        # Init may take its time to collect what died without a parent.
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
