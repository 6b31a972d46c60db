"""Sinks of the crash tests, each with an outsider's view on what it made visible and left over."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.parquet as pq
from confluent_kafka.admin import AdminClient, NewTopic

from integration_tests.crash.scenario import Target
from sparkonce.testing import checks
from sparkonce.testing.services import KafkaServer, PostgresServer, S3Server


def file_target(folder: Path, name: str) -> Target:
    folder.mkdir()

    def visible() -> Counter[int]:
        return Counter(
            n for path in folder.glob("*.parquet") for n in pq.read_table(path)["id"].to_pylist()
        )

    def leaks() -> list[str]:
        hidden = folder / "_sparkonce"
        return [path.name for path in hidden.iterdir()] if hidden.exists() else []

    return Target("FileSink", [str(folder)], {"name": name}, visible, leaks)


def kafka_target(server: KafkaServer, topic: str) -> Target:
    admin = AdminClient({"bootstrap.servers": server.bootstrap_servers})
    admin.create_topics([NewTopic(topic, num_partitions=3)])[topic].result(timeout=30)

    def visible() -> Counter[int]:
        with checks.CommittedReader(server.bootstrap_servers, topic) as reader:
            return Counter(
                json.loads(message.value or b"")["id"] for message in reader.read_visible()
            )

    def leaks() -> list[str]:
        return [str(leak) for leak in checks.kafka_leaks(server.bootstrap_servers)]

    settings = {
        "name": "kafka",
        "bootstrap_servers": server.bootstrap_servers,
        "select": ["string(id) AS key", "to_json(struct(*)) AS value"],
    }
    return Target("KafkaSink", [topic], settings, visible, leaks)


def postgres_target(server: PostgresServer, table: str, *, key: list[str] | None = None) -> Target:
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        columns = "id bigint, day date, name text, amount numeric(12,2)"
        unique = "" if key is None else f", PRIMARY KEY ({', '.join(key)})"
        connection.execute(f"CREATE TABLE {table} ({columns}{unique})".encode())

    def visible() -> Counter[int]:
        return Counter(row[0] for row in checks.read_postgres(server.dsn, table))

    def leaks() -> list[str]:
        return [str(leak) for leak in checks.postgres_leaks(server.dsn)]

    settings: dict[str, Any] = {
        "name": "postgres",
        "table": table,
        "select": ["id", "date(day) AS day", "name", "amount"],
        "key": key,
    }
    return Target("PostgresSink", [server.dsn], settings, visible, leaks)


def s3_target(server: S3Server, bucket: str, name: str) -> Target:
    with contextlib.closing(checks.s3_client(server)) as client:
        client.create_bucket(Bucket=bucket)

    def visible() -> Counter[int]:
        return Counter(row["id"] for row in checks.read_s3_parquet(server, bucket, "out"))

    def leaks() -> list[str]:
        return [str(leak) for leak in checks.s3_leaks(server, bucket)]

    settings = {
        "name": name,
        "endpoint_url": server.endpoint_url,
        "access_key": server.access_key,
        "secret_key": server.secret_key,
        "region": server.region,
        "partition_by": ["day"],
    }
    return Target("S3Sink", [f"s3://{bucket}/out"], settings, visible, leaks)
