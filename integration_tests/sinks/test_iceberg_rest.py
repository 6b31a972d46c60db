"""The contract of `IcebergSink` on a REST catalog, behind a network that loses and delays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyiceberg.catalog import load_catalog

from integration_tests.support.lake_in_s3 import iceberg_settings
from integration_tests.support.nessie import nessie
from sparkonce.sinks import IcebergSink
from sparkonce.testing import Proxy, SinkContract, SinkWorld, checks
from sparkonce.testing.services import start_services

if TYPE_CHECKING:
    import pyarrow as pa
    from mypy_boto3_s3 import S3Client

BUCKET = "lake"


@dataclass(frozen=True)
class Catalog:
    settings: dict[str, str]
    port: int
    client: S3Client

    def at(self, port: int) -> dict[str, str]:
        return {**self.settings, "uri": f"http://127.0.0.1:{port}/iceberg"}

    def rows(self, table: str) -> list[dict[str, Any]]:
        with closing(load_catalog(**self.at(self.port))) as catalog:
            return catalog.load_table(table).scan().to_arrow().to_pylist()

    def marks(self, table: str) -> list[str]:
        folder = f"{table.replace('.', '/')}_"
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=folder)
        keys = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
        return [key for key in keys if key.endswith(".mark")]


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    log: Path = tmp_path_factory.mktemp("nessie") / "log"
    with start_services(["versitygw"]) as services:
        (s3,) = services.s3.values()
        with closing(checks.s3_client(s3)) as client:
            client.create_bucket(Bucket=BUCKET)
            with nessie(s3, BUCKET, log) as port:
                settings = {
                    "name": "nessie",
                    "type": "rest",
                    **iceberg_settings(s3),
                }
                yield Catalog(settings, port, client)


@pytest.mark.slow
class TestIcebergSinkOnRest(SinkContract):
    race_rounds = 40
    most_faults = 6

    @pytest.fixture
    def make_world(
        self, catalog: Catalog, fresh_name: Callable[[], str]
    ) -> Iterator[Callable[[pa.Schema], SinkWorld]]:
        table = f"shop.{fresh_name()}"
        with Proxy(catalog.port) as proxy:
            # The server's answers name the address that the client has used: the proxy's.
            yield lambda schema: SinkWorld(
                sink=lambda: IcebergSink(
                    table, catalog=catalog.at(proxy.port), create="if_missing"
                ),
                visible=lambda: catalog.rows(table),
                unfinished=lambda: catalog.marks(table),
                proxy=proxy,
            )
