"""Names of datasets: those of the sinks, without secrets, and those of the sources."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkonce.datasets import Dataset, without_secrets
from sparkonce.observe.lineage.inputs import reads
from sparkonce.observing import Source
from sparkonce.sinks import (
    DeltaSink,
    FileSink,
    KafkaSink,
    PostgresSink,
    S3Connection,
    S3Sink,
    SqliteSink,
    verbs,
)
from sparkonce.sinks.iceberg.tables import Tables
from sparkonce.sinks.postgres.naming import first_server


def postgres() -> PostgresSink:
    sink = PostgresSink("postgresql://me:hidden@db,standby:5433/shop", table="orders")
    sink._target = SimpleNamespace(schema="public", table="orders")  # type: ignore[assignment]
    return sink


@pytest.mark.parametrize(
    ("sink", "namespace", "name"),
    [
        (FileSink("/data/orders"), "file", "/data/orders"),
        (SqliteSink("/data/shop.db", "orders"), "sqlite:///data/shop.db", "orders"),
        (postgres(), "postgres://db:5432", "shop.public.orders"),
        (
            KafkaSink(
                "orders",
                bootstrap_servers="SASL_SSL://b1:9093,b2:9093",
                config={
                    "security.protocol": "SASL_SSL",
                    "sasl.mechanism": "PLAIN",
                    "sasl.username": "me",
                    "sasl.password": "hidden",
                },
            ),
            "kafka://b1:9093",
            "orders",
        ),
        (KafkaSink(bootstrap_servers="b1"), "kafka://b1:9092", "*"),
        (
            S3Sink(
                "s3://lake/orders",
                connection=S3Connection(aws_access_key_id="hidden", aws_secret_access_key="hidden"),
            ),
            "s3://lake",
            "orders",
        ),
        (
            DeltaSink("s3a://lake/t", storage_options={"AWS_SECRET_ACCESS_KEY": "hidden"}),
            "s3://lake",
            "t",
        ),
    ],
)
def test_name_of_a_sink(sink: Any, namespace: str, name: str) -> None:
    found = verbs.dataset(sink)
    assert (found.namespace, found.name) == (namespace, name)
    assert "hidden" not in repr((found, verbs.default_dataset(sink)))


def test_name_of_an_iceberg_table(tmp_path: Path) -> None:
    """Its location, and its name in the catalog as a symlink, by a connection of its own."""
    settings = {
        "type": "sql",
        "uri": f"sqlite:///{tmp_path}/catalog.db",
        "warehouse": f"file://{tmp_path}/lake",
    }
    import pyarrow as pa

    tables = Tables(settings, "shop.orders")
    tables.catalog.create_namespace("shop")
    tables.catalog.create_table("shop.orders", pa.schema([("id", pa.int64())]))
    tables.close()
    found = tables.dataset()
    assert found.namespace == "file"
    assert found.name.startswith(f"{tmp_path}/lake/")
    assert found.symlinks == (Dataset(f"file://{tmp_path}/lake", "shop.orders"),)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [("db:5432", "db:5432"), ("/run/pg:", "localhost:5432"), ("a,b:1,2", "a:1")],
)
def test_first_server(shown: str, expected: str) -> None:
    assert first_server(shown) == expected


@pytest.mark.parametrize(
    ("location", "namespace", "name"),
    [
        ("s3a://key:hidden@lake/a/b/", "s3://lake", "a/b"),
        ("hdfs://nn:8020/a", "hdfs://nn:8020", "/a"),
        ("file:/a/b", "file", "/a/b"),
        ("file:///a/b", "file", "/a/b"),
        ("/a b/", "file", "/a b"),
    ],
)
def test_name_of_a_location(location: str, namespace: str, name: str) -> None:
    found = Dataset.at(location)
    assert (found.namespace, found.name) == (namespace, name)


def test_secrets_are_left_out() -> None:
    text = "amqp://me:hidden@host/x?password=hidden&a=1 secret_key: 'hidden' AWS_ACCESS_KEY=hidden"
    found = without_secrets(text)
    assert "hidden" not in found
    assert "host/x" in found
    assert "a=1" in found


KAFKA = json.dumps({"orders": {"0": 5, "1": 7}, "returns": {"0": 2}})


def test_topics_of_a_batch() -> None:
    before = json.dumps({"orders": {"0": 1, "1": 2}})
    source = Source("KafkaV2[Subscribe[orders,returns]]", "b1:9092,b2:9092")
    orders, returns = reads([KAFKA], [before], [source])
    assert orders.dataset == Dataset("kafka://b1:9092", "orders")
    assert json.loads(orders.start or "") == {"0": 1, "1": 2}
    assert json.loads(orders.end) == {"0": 5, "1": 7}
    assert (returns.dataset.name, returns.start) == ("returns", None)


@pytest.mark.parametrize(
    ("offsets", "sources", "expected"),
    [
        ([KAFKA], [], [("kafka", "orders"), ("kafka", "returns")]),
        ([f"a:{KAFKA}", 'b:{"logOffset":1}'], [Source("x"), Source("y")],
         [("kafka", "orders"), ("kafka", "returns"), ("sparkonce", "source b")]),
        (['{"logOffset":3}'], [Source("FileStreamSource[s3a://k:hidden@lake/in]")],
         [("s3://lake", "in")]),
        (["17"], [Source("RateStreamV2[rowsPerSecond=5]")],
         [("sparkonce", "RateStreamV2[rowsPerSecond=5]")]),
        (["17"], [Source("org.example.Mine@1a2b")], [("sparkonce", "org.example.Mine")]),
        (["17", "17"], [Source("Rate[]"), Source("Rate[]")], [("sparkonce", "Rate[]")]),
        (["-"], [], [("sparkonce", "source")]),
    ],
)  # fmt: skip
def test_sources_of_a_batch(
    offsets: list[str], sources: list[Source], expected: list[tuple[str, str]]
) -> None:
    found = reads(offsets, None, sources)
    assert [(read.dataset.namespace, read.dataset.name) for read in found] == expected
