"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration_tests.support.clock import ShiftedClock, compile_library, missing
from sparkonce.testing import checks
from sparkonce.testing.quick_spark import local_checkpoints

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparkonce.testing.services import S3Server


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Kill only "decide" at each of its round trips on servers; mark the other verbs slow."""
    for item in items:
        name, _, verb = item.name.partition("[")
        is_of_all = name == "test_process_is_killed_at_every_round_trip" and verb != "decide]"
        if is_of_all and "integration_tests" in item.path.parts:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def spark(spark: SparkSession) -> SparkSession:
    """The session of the kit's plugin, whose queries have their checkpoints on a local disk."""
    for name, value in local_checkpoints().items():
        spark.conf.set(name, value)
    return spark


@pytest.fixture
def set_conf(spark: SparkSession) -> Iterator[Callable[[str, str | None], None]]:
    """A function that changes a setting of Spark for one test; None: back to Spark's default."""
    before: dict[str, str | None] = {}

    def put(key: str, value: str | None) -> None:
        if value is None:
            spark.conf.unset(key)
        else:
            spark.conf.set(key, value)

    def put_for_now(key: str, value: str | None) -> None:
        before.setdefault(key, spark.conf.get(key, None))
        put(key, value)

    yield put_for_now
    for key, value in before.items():
        put(key, value)


@pytest.fixture
def remote_checkpoints(set_conf: Callable[[str, str | None], None]) -> None:
    """Spark writes checkpoints as it does by default, for one test."""
    for name in local_checkpoints():
        set_conf(name, None)


@pytest.fixture(scope="session")
def clock_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that gives a process a clock of its own."""
    if reason := missing():
        pytest.skip(reason)
    return compile_library(tmp_path_factory.mktemp("clock"))


@pytest.fixture
def fresh_clock(
    clock_library: Path, tmp_path: Path, fresh_name: Callable[[], str]
) -> Callable[[], ShiftedClock]:
    """A function that returns a clock for processes of the test."""
    return lambda: ShiftedClock(clock_library, tmp_path / f"clock-{fresh_name()}")


@pytest.fixture
def fresh_log(
    fresh_name: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[S3Server], str]:
    """Gives the address of a log in a bucket of its own; the credentials are in the environment."""

    def make(server: S3Server) -> str:
        server.start()  # a test before may have left it killed
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_key)
        name = fresh_name()
        client = checks.s3_client(server)
        client.create_bucket(Bucket=name)
        client.close()
        endpoint = f"endpoint_url={server.endpoint_url}&region={server.region}&path_style=true"
        return f"s3://{name}/logs/a?{endpoint}"

    return make
