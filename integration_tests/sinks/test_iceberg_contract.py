"""The contract of sinks on Iceberg tables: catalogs in SQLite and Postgres, files in S3 too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from pyiceberg.catalog import load_catalog

from integration_tests.support.lake_in_s3 import iceberg_settings
from sparkonce.sinks import IcebergSink
from sparkonce.testing import Proxy, SinkContract, SinkWorld
from sparkonce.testing.sink_late import SinkLate
from sparkonce.testing.sink_network import SinkNetwork

if TYPE_CHECKING:
    import pyarrow as pa
    from mypy_boto3_s3 import S3Client

    from sparkonce.model import Committable
    from sparkonce.testing.services import PostgresServer, S3Server

TABLE = "shop.orders"


def rows_in(settings: Mapping[str, str]) -> list[dict[str, Any]]:
    with closing(load_catalog("default", **settings)) as catalog:
        return catalog.load_table(TABLE).scan().to_arrow().to_pylist()


class TestIcebergSink(SinkContract):
    """A catalog in SQLite, files in a folder."""

    race_rounds = 40

    @pytest.fixture
    def make_world(self, tmp_path: Path) -> Callable[[pa.Schema], SinkWorld]:
        settings = {
            "type": "sql",
            "uri": f"sqlite:///{tmp_path}/catalog.db",
            "warehouse": f"file://{tmp_path}/lake",
        }

        def lose(committable: Committable) -> None:
            for file in tmp_path.rglob(f"{committable.branch_id}files/*.parquet"):
                file.unlink()

        return lambda schema: SinkWorld(
            sink=lambda: IcebergSink(TABLE, catalog=settings, create="if_missing"),
            visible=lambda: rows_in(settings),
            unfinished=lambda: list(tmp_path.rglob("*.mark")),
            lose=lose,
        )


@pytest.fixture
def in_postgres(postgres: PostgresServer, fresh_schema: str) -> dict[str, str]:
    """A catalog in Postgres."""
    parts = psycopg.conninfo.conninfo_to_dict(postgres.dsn)
    return {
        "type": "sql",
        "uri": f"postgresql+psycopg://{parts['user']}:{parts.get('password', '')}"
        f"@{parts['host']}:{parts['port']}/{parts['dbname']}?options=-csearch_path%3D{fresh_schema}",
    }


@pytest.fixture
def s3_settings(in_postgres: dict[str, str], s3: S3Server, fresh_bucket: str) -> dict[str, str]:
    """The same, and a warehouse in S3."""
    return {
        **in_postgres,
        "warehouse": f"s3://{fresh_bucket}/lake",
        **iceberg_settings(s3),
    }


def marks_in(client: S3Client, bucket: str) -> list[str]:
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
    keys = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
    return [key for key in keys if key.endswith(".mark")]


class TestIcebergSinkOnS3(SinkNetwork, SinkLate):
    """Requests to the storage are lost, or late."""

    most_faults = 3

    @pytest.fixture
    def make_world(
        self, s3_settings: dict[str, str], s3: S3Server, s3_client: S3Client, fresh_bucket: str
    ) -> Iterator[Callable[[pa.Schema], SinkWorld]]:
        with Proxy(int(s3.endpoint_url.rpartition(":")[2])) as proxy:

            def sink() -> IcebergSink:
                endpoint = {"s3.endpoint": f"http://{proxy.address}"}
                return IcebergSink(TABLE, catalog=s3_settings | endpoint, create="if_missing")

            yield lambda schema: SinkWorld(
                sink=sink,
                visible=lambda: rows_in(s3_settings),
                unfinished=lambda: marks_in(s3_client, fresh_bucket),
                proxy=proxy,
            )


class TestIcebergSinkWithACatalogFarAway(SinkNetwork, SinkLate):
    """Requests to the catalog are lost, or late: its commit above all."""

    most_faults = 3

    @pytest.fixture
    def make_world(
        self, in_postgres: dict[str, str], postgres: PostgresServer, tmp_path: Path
    ) -> Iterator[Callable[[pa.Schema], SinkWorld]]:
        settings = in_postgres | {"warehouse": f"file://{tmp_path}/lake"}
        port = str(psycopg.conninfo.conninfo_to_dict(postgres.dsn)["port"])
        with Proxy(int(port)) as proxy:

            def sink() -> IcebergSink:
                uri = settings["uri"].replace(f":{port}/", f":{proxy.port}/")
                return IcebergSink(TABLE, catalog=settings | {"uri": uri}, create="if_missing")

            yield lambda schema: SinkWorld(
                sink=sink,
                visible=lambda: rows_in(settings),
                unfinished=lambda: list(tmp_path.rglob("*.mark")),
                proxy=proxy,
            )
