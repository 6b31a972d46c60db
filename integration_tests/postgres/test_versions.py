"""The same tests on every older Postgres that starts here; all others run on the newest."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psycopg
import pytest

from integration_tests.postgres.every_version import direct, one_phase, staged
from integration_tests.support.collecting import cases_of
from sparkonce.testing.services import PostgresServer, postgres_versions, start_services

globals().update(cases_of(one_phase))
globals().update(cases_of(staged))
globals().update(cases_of(direct, prefix="direct_load_"))

OLDER = postgres_versions()[:-1]


@pytest.fixture(
    scope="module",
    autouse=True,  # `world` asks for its server while it runs, too late for parameters
    params=[pytest.param(n, marks=pytest.mark.slow) for n in OLDER]
    or [pytest.param(None, marks=pytest.mark.skip("only one version of Postgres starts here"))],
)
def version(request: pytest.FixtureRequest) -> int:
    """Every older one, with the slow tests."""
    return int(request.param)


@pytest.fixture(scope="module")
def postgres(version: int) -> Iterator[PostgresServer]:
    with start_services(["postgres"], postgres_version=version) as services:
        yield services.postgres


@pytest.fixture(scope="module")
def open_server(version: int) -> Iterator[PostgresServer]:
    config = {"max_prepared_transactions": "0"}
    with start_services(["postgres"], postgres_version=version, postgres_config=config) as services:
        yield services.postgres


def test_older_server_is_what_runs(
    postgres: PostgresServer, version: int, fresh_name: Callable[[], str]
) -> None:
    with psycopg.connect(postgres.dsn) as connection:
        assert connection.info.server_version // 10_000 == version
