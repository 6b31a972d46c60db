"""A catalog or a store that does not respond is waited for at the start; a wrong setting is not."""

from __future__ import annotations

import socket
import traceback
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pytest

from sparkonce.errors import ConfigurationError, SinkUnavailableError
from sparkonce.sinks import DeltaSink, IcebergSink
from sparkonce.sinks.lakehouse.marks import Marks

SCHEMA = pa.schema([("id", pa.int64())])
SECRET = "pass-word-9"


@pytest.fixture
def nobody() -> str:
    """The address of a port on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def test_rest_catalog_is_down(nobody: str) -> None:
    sink = IcebergSink("shop.orders", catalog={"type": "rest", "uri": f"http://{nobody}"})
    with pytest.raises(SinkUnavailableError, match=r"shop\.orders.*unavailable now"):
        sink.validate(SCHEMA)


def test_database_of_a_catalog_is_down(nobody: str) -> None:
    uri = f"postgresql+psycopg://me:{SECRET}@{nobody}/lake"
    sink = IcebergSink("shop.orders", catalog={"type": "sql", "uri": uri, "warehouse": "file:///x"})
    with pytest.raises(SinkUnavailableError, match="unavailable now") as caught:
        sink.validate(SCHEMA)
    assert SECRET not in str(caught.value)


def test_store_of_a_delta_table_is_down(nobody: str) -> None:
    options = {
        "endpoint_url": f"http://{nobody}",
        "allow_http": "true",
        "region": "us-east-1",
        "aws_access_key_id": "me",
        "aws_secret_access_key": SECRET,
        "max_retries": "0",
    }
    sink = DeltaSink("s3://lake/orders", storage_options=options)
    with pytest.raises(SinkUnavailableError, match="s3://lake/orders.*unavailable now") as caught:
        sink.validate(SCHEMA)
    assert "\n" not in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"uri": f"mysql://me:{SECRET}@db/lake"}, "'type'"),
        ({"type": SECRET, "uri": "http://db"}, "'type'"),
        ({"type": "rest", "py-catalog-impl": "a.B", "token": SECRET}, "'type'"),
        ({"py-catalog-impl": "no.Such", "token": SECRET}, "'type'"),
        ({"type": "sql", "uri": f"postgresql+psycopg://me:1@db:{SECRET}/lake"}, "'type'"),
        ({"type": "sql", "uri": "sqlite:////no/such/folder/x.db"}, None),
    ],
    ids=["no type", "unknown", "two types", "no such class", "no port", "no folder"],
)
def test_wrong_setting_is_no_outage(settings: Mapping[str, str], expected: str | None) -> None:
    """pyiceberg's own text shows the address with its password, or all settings."""
    sink = IcebergSink("shop.orders", catalog=settings)
    with pytest.raises(Exception, match=expected) as caught:
        sink.validate(SCHEMA)
    assert not isinstance(caught.value, SinkUnavailableError)
    assert (expected is None) == (not isinstance(caught.value, ConfigurationError))
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_store_is_down_when_the_folders_are_tried_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog and the log were read, and then the store does not respond."""
    uri = f"sqlite:///{tmp_path}/catalog.db"
    settings = {"type": "sql", "uri": uri, "warehouse": f"file://{tmp_path}/lake"}
    sinks = [
        IcebergSink("shop.orders", catalog=settings, create="if_missing"),
        DeltaSink(str(tmp_path / "delta"), create="if_missing"),
    ]
    for sink in sinks:
        sink.validate(SCHEMA)
    error = OSError("AWS Error NETWORK_CONNECTION during PutObject operation: curlCode: 7")
    monkeypatch.setattr(Marks, "try_out", Mock(side_effect=error))
    for sink in sinks:
        with pytest.raises(SinkUnavailableError, match="NETWORK_CONNECTION"):
            sink.validate(SCHEMA)
        sink.close()
