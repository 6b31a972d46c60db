"""Worlds for the tests of the Postgres sink."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from integration_tests.support.direct_load import ready
from integration_tests.support.one_phase import Pipeline, piped, port_of
from integration_tests.support.postgres import World, world_on
from integration_tests.support.proxy import Proxy
from sparkonce.sinks import PostgresSink
from sparkonce.testing.services import PostgresServer, start_services, unavailable


@pytest.fixture(scope="session")
def open_server() -> Iterator[PostgresServer]:
    """A server as most are set up: without prepared transactions."""
    if "postgres" in (reasons := unavailable()):
        pytest.skip(f"postgres: {reasons['postgres']}")
    config = {"max_prepared_transactions": "0"}
    with start_services(["postgres"], postgres_config=config) as services:
        yield services.postgres


@pytest.fixture(params=["prepared", "open"])
def world(request: pytest.FixtureRequest, fresh_name: Callable[[], str]) -> Iterator[World]:
    """Each way to hold a merge in turn."""
    prepares = request.param == "prepared"
    server = request.getfixturevalue("postgres" if prepares else "open_server")
    with world_on(server, fresh_name(), prepares=prepares) as world:
        yield world


@pytest.fixture
def prepared(postgres: PostgresServer, fresh_name: Callable[[], str]) -> Iterator[World]:
    """A world with prepared transactions, for what does not depend on the way."""
    with world_on(postgres, fresh_name(), prepares=True) as world:
        yield world


@pytest.fixture
def held_open(open_server: PostgresServer, fresh_name: Callable[[], str]) -> Iterator[World]:
    with world_on(open_server, fresh_name(), prepares=False) as world:
        yield world


@pytest.fixture
def cut(prepared: World) -> Any:
    """A sink behind a proxy, and the proxy."""
    port = int(prepared.dsn.rpartition(":")[2].partition("/")[0])
    proxy = Proxy(port)
    prepared.table()
    sink = ready(prepared, dsn=prepared.dsn.replace(f":{port}/", f":{proxy.port}/"))
    yield sink, proxy
    sink.close()
    proxy.close()


@pytest.fixture
def pipeline(world: World) -> Iterator[Pipeline]:
    """With and without prepared transactions on the server."""
    yield from piped(world)


@pytest.fixture
def prepares(prepared: World) -> Iterator[Pipeline]:
    """For what does not depend on that."""
    yield from piped(prepared)


@pytest.fixture
def behind_proxy(prepares: Pipeline) -> Iterator[tuple[PostgresSink, Proxy]]:
    """A sink behind a proxy."""
    proxy = Proxy(port := port_of(prepares.world.dsn))
    yield (
        prepares.world.ready(dsn=prepares.world.dsn.replace(f":{port}/", f":{proxy.port}/")),
        proxy,
    )
    proxy.close()
