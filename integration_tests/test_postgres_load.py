"""The load path of the Postgres sink: connections of the workers, staging, and types."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.pq import Trace

from integration_tests.test_postgres_sink import (
    OWNER,
    ROWS,
    World,
    eventually,
    heard,
    kill,
    stage,
    task,
    world_on,
)
from sparkonce.errors import CommitUnresolvedError, PrepareRejectedError
from sparkonce.sinks import PostgresSink
from sparkonce.sinks.postgres.connections import Address, Pool, pool_of
from sparkonce.sinks.postgres.sql import staging_name
from sparkonce.testing.services import PostgresServer


@pytest.fixture
def world(postgres: PostgresServer, fresh_name: Callable[[], str]) -> Iterator[World]:
    with world_on(postgres, fresh_name(), prepares=True) as world:
        yield world


# -- the workers' connections ----------------------------------------------------------------------


def sessions(world: World) -> list[tuple[int, str]]:
    """Process ids and names of our sessions."""
    return world.run(
        "SELECT pid, application_name FROM pg_stat_activity "
        "WHERE datname = current_database() AND starts_with(application_name, 'sparkonce')"
    )


def end(world: World, pid: int) -> None:
    world.run(f"SELECT pg_terminate_backend({pid})")
    eventually(lambda: pid not in dict(sessions(world)), "the session ended")


@pytest.fixture
def worker(world: World) -> Pool:
    """The pool of this process as a Python worker, without what other tests left in it."""
    pool = pool_of(Address.read(world.dsn))
    pool.close()
    return pool


def test_tasks_of_a_worker_share_a_connection_one_after_another(
    world: World, worker: Pool
) -> None:
    """Its session is named after the branch while there is one, and after none in between."""
    world.table()
    sink = world.ready()
    sink.close()
    seen = set()
    for attempt in range(3):
        handle = sink.beginTransaction(task(attempt))
        ((pid, name),) = sessions(world)
        assert name == staging_name(task(attempt))
        sink.write(handle, ROWS.to_batches()[0])
        sink.preCommit(handle)
        assert sessions(world) == [(pid, "sparkonce")]
        seen.add(pid)
    assert len(seen) == 1
    worker.close()
    eventually(lambda: sessions(world) == [], "the connection closed")


def test_connection_that_died_while_nobody_used_it_is_replaced(
    world: World, worker: Pool
) -> None:
    world.table()
    sink = world.ready()
    sink.close()
    stage(sink)
    ((pid, _),) = sessions(world)
    end(world, pid)
    stage(sink, branch_id=task(8))
    assert len(world.staging()) == 2
    assert dict(sessions(world)).keys().isdisjoint({pid})
    worker.close()


@pytest.mark.parametrize("how", ["refused value", "discarded", "ended by the server"])
def test_connection_that_an_error_has_touched_is_not_used_again(
    world: World, worker: Pool, how: str
) -> None:
    world.table("id bigint, name varchar(1)")
    sink = world.ready()
    sink.close()
    handle = sink.beginTransaction(task())
    ((pid, _),) = sessions(world)
    if how == "discarded":
        sink.discard(handle)
    else:
        if how == "ended by the server":
            end(world, pid)
        rows = ROWS.set_column(1, "name", [["a", "too long", None]])
        with pytest.raises(PrepareRejectedError):
            for batch in rows.to_batches():
                sink.write(handle, batch)
            sink.preCommit(handle)
        sink.discard(handle)
    eventually(lambda: sessions(world) == [], "the connection closed")
    stage(sink, branch_id=task(8))
    assert [staging_name(task(8))] == world.staging()
    worker.close()


def test_forked_process_makes_a_connection_of_its_own(world: World, worker: Pool) -> None:
    """Two processes on one socket would read each other's answers."""
    world.table()
    sink = world.ready()
    sink.close()
    stage(sink)
    ((pid, _),) = sessions(world)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            connection, is_new = pool_of(Address.read(world.dsn)).take()
            os.write(write, f"{is_new} {connection.info.backend_pid}".encode())
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as pipe:
        is_new, backend = pipe.read().split()
    assert os.waitpid(child, 0)[1] == 0
    assert (is_new, int(backend) != pid) == ("True", True)
    stage(sink, branch_id=task(8))  # the parent's is as good as before
    eventually(lambda: [p for p, _ in sessions(world)] == [pid], "the same session goes on")
    worker.close()


def test_connection_that_nobody_uses_is_closed_in_time(world: World) -> None:
    """Others that are in use, or were used later, live on."""
    pool = Pool(Address.read(world.dsn), idle_s=0.05)
    held, _ = pool.take()
    for _ in range(2):
        pool.run(lambda connection: connection.execute("SELECT"))
        eventually(lambda: len(sessions(world)) == 1, "the idle connection closed")
    assert sessions(world) == [(held.info.backend_pid, "sparkonce")]
    pool.give(held)
    eventually(lambda: sessions(world) == [], "the last one closed")


def test_worker_that_is_killed_leaves_no_session(world: World) -> None:
    world.table()
    child = world.child(world.ready(), "prepare")
    world.sinks[0].close()
    assert heard(child)
    assert len(sessions(world)) == 1
    kill(child)
    eventually(lambda: sessions(world) == [], "the server noticed")


# -- orphans ---------------------------------------------------------------------------------------


def statements(world: World, sink: PostgresSink, action: Callable[[], object]) -> list[str]:
    """What the sink's one connection sends meanwhile, round trip by round trip."""
    connection, _ = pool_of(Address.read(world.dsn)).take()
    with tempfile.NamedTemporaryFile() as file:
        connection.pgconn.trace(file.fileno())
        connection.pgconn.set_trace_flags(Trace.SUPPRESS_TIMESTAMPS)
        sink._pool.give(connection)
        action()
        connection.pgconn.untrace()
        sent = Path(file.name).read_text(encoding="utf-8", errors="replace").splitlines()
    return [line.split("\t", 3)[3] for line in sent if line.startswith("F\t")]


def test_orphans_of_many_tasks_go_in_few_round_trips(world: World) -> None:
    """One for each 50 tables, and one that is in use keeps none of the others alive."""
    world.table()
    sink = world.ready(lock_timeout=0.2)
    for attempt in range(60):
        stage(sink, ROWS.slice(0, 1), task(attempt))
    orphans = list(sink.find_branches(OWNER))
    with psycopg.connect(world.dsn) as reader:
        reader.execute(f"SELECT FROM {world.schema}.{staging_name(task(3))}".encode())
        outcomes = sink.abortBatch(orphans)
        assert [type(error) for error in outcomes if error] == [CommitUnresolvedError]
        assert world.staging() == [staging_name(task(3))]
    for attempt in range(60):
        stage(sink, ROWS.slice(0, 1), task(attempt, batch=1))
    orphans = list(sink.find_branches(OWNER))
    assert len(orphans) == 61
    sent = statements(world, sink, lambda: sink.abortBatch(orphans))
    assert world.staging() == []
    assert len([line for line in sent if "DROP TABLE" in line]) == len(sent) == 2
