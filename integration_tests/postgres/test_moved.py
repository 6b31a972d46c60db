"""The database moves to another server, or is held still for that, while batches are under way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psycopg
import pytest

from integration_tests.support.postgres import (
    World,
    eventually,
    merge_of,
    prepare,
    stage,
    task,
    world_on,
)
from integration_tests.support.proxy import Proxy
from sparkonce.errors import CommitUnresolvedError, PrepareRejectedError
from sparkonce.testing.services import PostgresServer, start_services

if TYPE_CHECKING:
    from sparkonce.model import Committable
    from sparkonce.sinks import PostgresSink

LOADS = ("staged", "direct")


def vote(sink: PostgresSink, load: str, batch: int = 0) -> Committable:
    if load == "staged":
        return prepare(sink, batch=batch)
    return stage(sink, branch_id=task(batch=batch))


@pytest.fixture(scope="module")
def new_server() -> Iterator[PostgresServer]:
    with start_services(["postgres"]) as services:
        yield services.postgres


@pytest.fixture
def new(prepared: World, new_server: PostgresServer) -> Iterator[World]:
    """Where the database moves to: the same tables, on a server with another identifier."""
    with world_on(new_server, prepared.schema, prepares=True) as world:
        world.table()
        world.ready()
        yield world


def take_along(old: World, new: World, table: str) -> None:
    """As a dump, an upgrade or logical replication does."""
    place = f"{old.schema}.{table}"
    with psycopg.connect(old.dsn) as source, psycopg.connect(new.dsn) as target:
        with (
            source.cursor().copy(f"COPY {place} TO STDOUT".encode()) as read,
            target.cursor().copy(f"COPY {place} FROM STDIN".encode()) as write,
        ):
            for data in read:
                write.write(data)


@pytest.mark.parametrize("load", LOADS)
def test_marker_row_that_moved_with_its_rows_proves_the_commit(
    prepared: World, new: World, load: str
) -> None:
    """The answer of the commit was lost, and then the database moved; without the row, no proof."""
    prepared.table()
    sink = prepared.ready(load=load)
    committable = vote(sink, load)
    sink.commit(committable)
    moved = new.sink(load=load)
    with pytest.raises(CommitUnresolvedError, match="system identifier") as caught:
        moved.commit(committable)
    for table in ("orders", "sparkonce_commits"):
        take_along(prepared, new, table)
    moved.commit(committable)
    assert new.state() == (3, 1, 0, 0)
    assert "pg_upgrade" in str(caught.value)
    assert "`sparkonce settle JOB 0 --branch" in str(caught.value)


@pytest.mark.parametrize("load", LOADS)
def test_server_that_changes_between_two_batches(prepared: World, new: World, load: str) -> None:
    """What is left there would be looked for on the old one: the batch is refused."""
    prepared.table()
    proxy = Proxy(port_of(prepared))
    try:
        dsn = prepared.dsn.replace(f":{port_of(prepared)}/", f":{proxy.port}/")
        sink = prepared.ready(dsn=dsn, load=load)
        sink.commit(vote(sink, load))
        sink.close()
        proxy._upstream = ("127.0.0.1", port_of(new))
        with pytest.raises(PrepareRejectedError, match="another server since the query began"):
            vote(sink, load, batch=1)
        sink.close()
    finally:
        proxy.close()
    assert (prepared.state()[:2], new.state()[:2], new.gids()) == ((3, 1), (0, 0), [])


def port_of(world: World) -> int:
    return int(world.dsn.rpartition(":")[2].partition("/")[0])


@contextmanager
def held_still(world: World, role: str, sink: PostgresSink) -> Iterator[None]:
    """As an operator does it before the database moves: new sessions only read by default."""
    world.run(f"ALTER ROLE {role} SET default_transaction_read_only = on")
    sink.close()  # its kept sessions do not know
    eventually(lambda: world.open_merges() == 0, "no merge is held open")
    yield
    world.run(f"ALTER ROLE {role} RESET default_transaction_read_only")
    sink.close()


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("key", [None, ["id"]])
def test_database_that_is_held_still_takes_no_batch(
    prepared: World, load: str, key: list[str] | None
) -> None:
    """Its rows would be missing where it moves to; what is decided is committed all the same."""
    prepared.table("id bigint PRIMARY KEY, name text")
    with prepared.role("SELECT, INSERT, UPDATE") as (role, dsn):
        sink = prepared.ready(dsn=dsn, load=load, key=key)
        decided = vote(sink, load)
        with held_still(prepared, role, sink):
            with pytest.raises(PrepareRejectedError, match="default_transaction_read_only"):
                vote(sink, load, batch=1)
            sink.commit(decided)
        assert prepared.state() == (3, 1, 0, 0)
        sink.close()


def test_database_that_is_held_still_before_the_merge(world: World) -> None:
    world.table()
    with world.role("SELECT, INSERT") as (role, dsn):
        sink = world.ready(dsn=dsn)
        of_task = stage(sink)
        with (
            held_still(world, role, sink),
            pytest.raises(PrepareRejectedError, match="default_transaction_read_only"),
        ):
            sink.vote(merge_of(), [of_task])
        assert world.state() == (0, 0, 1, 0)
        sink.close()


def test_database_that_is_held_still_merges_nothing_again(held_open: World) -> None:
    """Nor is it a verdict on the batch."""
    held_open.table()
    with held_open.role("SELECT, INSERT") as (role, dsn):
        sink = held_open.ready(dsn=dsn)
        committable = prepare(sink)
        with (
            held_still(held_open, role, sink),
            pytest.raises(CommitUnresolvedError, match="default_transaction_read_only"),
        ):
            sink.commit(committable)
        sink.commit(committable)
        assert held_open.state() == (3, 1, 0, 0)
        sink.close()
