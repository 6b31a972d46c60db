"""Sinks for the tests of the S3 sink."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.s3_sinks import s3_sink

from integration_tests.support.proxy import Proxy
from integration_tests.support.s3 import World
from sparkonce.sinks import S3Sink
from sparkonce.sinks.s3.finishing import outcome
from sparkonce.testing.services import S3Server

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


@pytest.fixture
def world(s3_client: S3Client, fresh_bucket: str) -> World:
    return World(s3_client, fresh_bucket)


@pytest.fixture
def lost_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing completes in the background, so that no test has to wait for it."""
    monkeypatch.setattr(outcome, "PATIENCE_S", 0.0)


@pytest.fixture
def make_sink(s3: S3Server, fresh_bucket: str) -> Iterator[Callable[..., S3Sink]]:
    sinks = []

    def make(prefix: str = "lake/orders", **settings: Any) -> S3Sink:
        sink = s3_sink(f"s3://{fresh_bucket}/{prefix}", **{**s3.boto3_settings, **settings})
        sinks.append(sink)
        return sink

    yield make
    for sink in sinks:
        sink.close()


@pytest.fixture
def sink(make_sink: Callable[..., S3Sink]) -> S3Sink:
    return make_sink()


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[Proxy]:
    proxy = Proxy(int(s3.endpoint_url.rpartition(":")[2]))
    yield proxy
    proxy.close()
