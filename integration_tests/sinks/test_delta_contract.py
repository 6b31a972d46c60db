"""The contract of sinks on Delta tables, in a folder and in S3."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from integration_tests.support.lake_in_s3 import delta_options
from sparkonce.errors import ConfigurationError
from sparkonce.sinks import DeltaSink
from sparkonce.testing import Proxy, SinkContract, SinkWorld
from sparkonce.testing.sink_late import SinkLate
from sparkonce.testing.sink_network import SinkNetwork

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

    from sparkonce.model import Committable
    from sparkonce.testing.services import S3Server


def rows_in(uri: str, options: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    table = DeltaTable(uri, storage_options=dict(options or {}))
    return table.to_pyarrow_table().to_pylist()


class TestDeltaSink(SinkContract):
    """In a folder."""

    race_rounds = 40

    @pytest.fixture
    def make_world(self, tmp_path: Path) -> Callable[[pa.Schema], SinkWorld]:
        uri = str(tmp_path / "orders")

        def lose(committable: Committable) -> None:
            for file in tmp_path.rglob(f"{committable.branch_id}files/*.parquet"):
                file.unlink()

        return lambda schema: SinkWorld(
            sink=lambda: DeltaSink(uri, create="if_missing"),
            visible=lambda: rows_in(uri),
            unfinished=lambda: [*tmp_path.rglob("*.mark"), *tmp_path.rglob("*.adds")],
            lose=lose,
        )


@pytest.fixture
def s3_options(s3: S3Server) -> dict[str, str]:
    return delta_options(s3)


def marks_in(client: S3Client, bucket: str) -> list[str]:
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
    keys = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
    return [key for key in keys if key.endswith((".mark", ".adds"))]


@pytest.mark.parametrize("s3", ["s3mock"], indirect=True)
def test_server_that_lets_several_writers_commit_a_version(
    s3_options: dict[str, str], fresh_bucket: str
) -> None:
    """S3Mock honours If-None-Match, but for requests that race: a batch would be lost there."""
    uri, schema = f"s3://{fresh_bucket}/orders", pa.schema([("id", pa.int64())])
    sink = DeltaSink(uri, storage_options=s3_options, create="if_missing")
    said = ""
    for _ in range(20):  # the trial is a race
        try:
            sink.validate(schema)
        except ConfigurationError as error:
            said = str(error)
            break
    assert "lets several writers commit the same version" in said


@pytest.mark.parametrize("s3", ["versitygw"], indirect=True)
class TestDeltaSinkOnS3(SinkNetwork, SinkLate):
    """Requests are lost, or late: those of the commit above all."""

    most_faults = 3

    @pytest.fixture
    def make_world(
        self, s3_options: dict[str, str], s3: S3Server, s3_client: S3Client, fresh_bucket: str
    ) -> Iterator[Callable[[pa.Schema], SinkWorld]]:
        uri = f"s3://{fresh_bucket}/lake/orders"
        with Proxy(int(s3.endpoint_url.rpartition(":")[2])) as proxy:

            def sink() -> DeltaSink:
                endpoint = {"AWS_ENDPOINT_URL": f"http://{proxy.address}"}
                return DeltaSink(uri, storage_options=s3_options | endpoint, create="if_missing")

            yield lambda schema: SinkWorld(
                sink=sink,
                visible=lambda: rows_in(uri, s3_options),
                unfinished=lambda: marks_in(s3_client, fresh_bucket),
                proxy=proxy,
            )
