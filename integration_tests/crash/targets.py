"""The sinks of the crash tests: what an outsider sees of each, and how a branch gets lost."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
from confluent_kafka.admin import AdminClient, NewTopic
from deltalake import DeltaTable
from psycopg import sql
from pyiceberg.catalog import load_catalog

from integration_tests.crash.scenario import Row, SeenRow, Target
from sparkonce.model import Committable, Owner
from sparkonce.sinks.kafka.connecting.settings import KafkaSettings
from sparkonce.sinks.kafka.finishing.finisher import Finisher
from sparkonce.testing import checks
from sparkonce.testing.services import KafkaServer, PostgresServer, S3Server, Services


def real_targets(
    services: Services, fresh_name: Callable[[], str], **kafka_settings: Any
) -> list[Target]:
    """Kafka, Postgres and every S3 server that runs here."""
    return [
        kafka_target(services.kafka, fresh_name(), **kafka_settings),
        postgres_target(services.postgres, fresh_name()),
        *(s3_target(server, fresh_name(), kind) for kind, server in services.s3.items()),
    ]


def file_target(folder: Path, name: str) -> Target:
    folder.mkdir()

    def read() -> Iterator[SeenRow]:
        for path in folder.glob("*.parquet"):
            yield from map(_seen, pq.read_table(path).to_pylist())

    def leaks(owner: Owner) -> list[str]:
        hidden = folder / "_sparkonce"
        return [path.name for path in hidden.iterdir()] if hidden.exists() else []

    def lose(committable: Committable) -> None:
        (folder / "_sparkonce" / f"{committable.branch_id}.parquet").unlink()

    return Target("FileSink", [str(folder)], {"name": name}, read, leaks, lose)


def iceberg_target(folder: Path, name: str) -> Target:
    """A table of a catalog in SQLite, with its files in `folder`."""
    settings = {
        "type": "sql",
        "uri": f"sqlite:///{folder}/catalog.db",
        "warehouse": f"file://{folder}/lake",
    }
    folder.mkdir()

    def read() -> Iterator[SeenRow]:
        with contextlib.closing(load_catalog("default", **settings)) as catalog:
            if catalog.table_exists("shop.orders"):
                rows = catalog.load_table("shop.orders").scan().to_arrow().to_pylist()
                yield from map(_seen, rows)

    def leaks(owner: Owner) -> list[str]:
        """Marks, and files that no snapshot names."""
        with contextlib.closing(load_catalog("default", **settings)) as catalog:
            files = catalog.load_table("shop.orders").inspect.all_files()["file_path"].to_pylist()
        named = {file.removeprefix("file://") for file in files}
        left = [path for path in folder.rglob("*.parquet") if str(path) not in named]
        return [path.name for path in [*left, *folder.rglob(f"{owner.prefix}*.mark")]]

    def lose(committable: Committable) -> None:
        for path in folder.rglob(f"{committable.branch_id}files/*.parquet"):
            path.unlink()

    sink = {"name": name, "catalog": settings, "create": "if_missing"}
    return Target("IcebergSink", ["shop.orders"], sink, read, leaks, lose)


def delta_target(folder: Path, name: str) -> Target:
    """A Delta table in `folder`."""

    def read() -> Iterator[SeenRow]:
        if DeltaTable.is_deltatable(str(folder)):
            yield from map(_seen, DeltaTable(str(folder)).to_pyarrow_table().to_pylist())

    def leaks(owner: Owner) -> list[str]:
        """Marks, lists of files, and files that the table does not name."""
        named = set(pa.table(DeltaTable(str(folder)).get_add_actions())["path"].to_pylist())
        left = [
            path
            for path in folder.rglob("a*.parquet")
            if str(path.relative_to(folder)) not in named
        ]
        return [path.name for path in [*left, *(folder / "_sparkonce").glob(f"{owner.prefix}*")]]

    def lose(committable: Committable) -> None:
        for path in folder.rglob(f"{committable.branch_id}files/*.parquet"):
            path.unlink()

    return Target(
        "DeltaSink", [str(folder)], {"name": name, "create": "if_missing"}, read, leaks, lose
    )


def kafka_target(server: KafkaServer, topic: str, **settings: Any) -> Target:
    server.start()  # an earlier test may have killed it
    admin = AdminClient({"bootstrap.servers": server.bootstrap_servers})
    admin.create_topics([NewTopic(topic, num_partitions=3)])[topic].result(timeout=30)

    def read() -> Iterator[SeenRow]:
        with checks.CommittedReader(server.bootstrap_servers, topic) as reader:
            for message in reader.read_visible():
                yield _seen(json.loads(message.value or b"", parse_float=Decimal))

    def leaks(owner: Owner) -> list[str]:
        found = checks.kafka_leaks(server.bootstrap_servers, f"sparkonce.{owner.log_id}.")
        return [str(leak) for leak in found]

    def lose(committable: Committable) -> None:
        finisher = Finisher(KafkaSettings(server.bootstrap_servers))
        payload: Any = committable.payload
        finisher.end(
            payload["transactional_id"],
            payload["producer_id"],
            payload["producer_epoch"],
            commit=False,
        )
        finisher.close()

    settings = {
        "name": "kafka",
        "bootstrap_servers": server.bootstrap_servers,
        "select": ["string(id) AS key", "to_json(struct(*)) AS value"],
        **settings,
    }
    return Target("KafkaSink", [topic], settings, read, leaks, lose)


def postgres_target(
    server: PostgresServer, table: str, *, dsn: str | None = None, **settings: Any
) -> Target:
    """The sink connects through `dsn`, such as a proxy's; the outsider connects directly."""
    server.start()
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        key = " PRIMARY KEY" if "key" in settings else ""
        columns = f"id bigint{key}, day date, name text, amount numeric(12,2), run bigint"
        connection.execute(f"CREATE TABLE {table} ({columns})".encode())

    def read() -> Iterator[SeenRow]:
        names = ("id", "day", "name", "amount", "run")
        for values in checks.read_postgres(server.dsn, table):
            yield _seen(dict(zip(names, values, strict=True)))

    def leaks(owner: Owner) -> list[str]:
        ours = f"sparkonce.{owner.log_id}.", f"sparkonce_{owner.digest}_"
        found = map(str, checks.postgres_leaks(server.dsn))
        return [leak for leak in found if any(name in leak for name in ours)]

    def lose(committable: Committable) -> None:
        payload: Any = committable.payload
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            gid = sql.Literal(str(committable.branch_id))
            connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(gid))
            for name in payload.get("staging", ()):
                staging = sql.Identifier(payload["schema"], name)
                connection.execute(sql.SQL("DROP TABLE {}").format(staging))

    settings = {
        "name": "postgres",
        "table": table,
        "select": ["id", "date(day) AS day", "name", "amount", "run"],
        **settings,
    }
    return Target("PostgresSink", [dsn or server.dsn], settings, read, leaks, lose)


def direct_targets(server: PostgresServer, fresh_name: Callable[[], str]) -> list[Target]:
    """Postgres with `load="direct"`: appends, and upserts in their own pass over the batch."""
    return [
        postgres_target(server, fresh_name(), name="straight", load="direct"),
        postgres_target(server, fresh_name(), name="upsert", load="direct", key=["id"], writers=3),
    ]


def s3_target(
    server: S3Server, bucket: str, name: str, *, endpoint_url: str | None = None
) -> Target:
    """The sink connects through `endpoint_url`, such as a proxy's; the outsider directly."""
    server.start()
    with contextlib.closing(checks.s3_client(server)) as client:
        client.create_bucket(Bucket=bucket)

    def read() -> Iterator[SeenRow]:
        yield from map(_seen, checks.read_s3_parquet(server, bucket, "out"))

    def leaks(owner: Owner) -> list[str]:
        return [str(leak) for leak in checks.s3_leaks(server, bucket)]

    def lose(committable: Committable) -> None:
        payload: Any = committable.payload
        with contextlib.closing(checks.s3_client(server)) as client:
            for file in payload["files"]:
                client.abort_multipart_upload(
                    Bucket=bucket, Key=file["key"], UploadId=file["upload_id"]
                )

    settings = {
        "name": name,
        "connection": {
            **server.boto3_settings,
            "endpoint_url": endpoint_url or server.endpoint_url,
        },
        "partition_by": ["day"],
    }
    return Target("S3Sink", [f"s3://{bucket}/out"], settings, read, leaks, lose)


def _seen(value: Mapping[str, Any]) -> SeenRow:
    day = value["day"]
    row = Row(
        value["id"],
        day.isoformat() if isinstance(day, dt.date) else day,
        value.get("name"),
        Decimal(value["amount"]),
    )
    return SeenRow(row, value["run"])
