"""Faults of the server, its disk and its other users, in both modes of the Postgres sink."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import psycopg
import pyarrow as pa
import pytest

from integration_tests.support.postgres import (
    OWNER,
    ROWS,
    World,
    commit_until_known,
    eventually,
    merge_of,
    stage,
    task,
    wal_kept_back,
    world_on,
)
from sparkonce.errors import (
    CommitUnresolvedError,
    PrepareRejectedError,
    SinkUnavailableError,
)
from sparkonce.model import Committable
from sparkonce.sinks import PostgresSink
from sparkonce.sinks.postgres import sink as sink_module
from sparkonce.sinks.postgres.server import connections
from sparkonce.testing.services import PostgresServer, start_services
from sparkonce.testing.services.server import LocalRuntime

LOADS = ("staged", "direct")
KEYED = "id bigint PRIMARY KEY, name text"


def prepare(
    sink: PostgresSink, rows: pa.Table = ROWS, *, batch: int = 0, attempt: int = 7
) -> Committable:
    """One task, and the driver's vote."""
    of_task = stage(sink, rows, task(attempt, batch))
    (committable,) = sink.vote(merge_of(batch), [of_task])
    return committable


def sweep(world: World, sink: PostgresSink) -> None:
    """What the coordinator does with an aborted batch; nothing of it stands then."""

    def swept() -> bool:
        for branch in sink.find_branches(OWNER):
            sink.abort(branch)
        return world.staging() == [] and world.gids() == [] and world.open_merges() == 0

    eventually(swept, "everything of the batch is gone")


# -- the table is altered between batches ----------------------------------------------------------


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ("ADD COLUMN more text DEFAULT 'm'", [(1, "a", "m")]),
        ("DROP COLUMN spare", [(1, "a")]),
        ("ALTER COLUMN spare TYPE text", [(1, "a", None)]),
        ("ADD CHECK (id < 100)", [(1, "a", None)]),
    ],
)
def test_table_altered_beside_the_columns_of_the_batch(
    prepared: World, load: str, change: str, wanted: list[Any]
) -> None:
    """The next batch is written."""
    prepared.table("id bigint, name text" + ", spare int" * ("more" not in change))
    sink = prepared.ready(load=load)
    sink.commit(prepare(sink, ROWS.slice(1, 1)))
    prepared.run(f"ALTER TABLE {prepared.schema}.orders {change}")
    sink.commit(prepare(sink, ROWS.slice(0, 1), batch=1))
    assert prepared.rows()[:1] == wanted


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("ALTER COLUMN id TYPE double precision", "'id' was bigint and is double precision.*again"),
        ("ALTER COLUMN id TYPE numeric(4, 0)", "'id' was bigint and is numeric"),
        ("ALTER COLUMN name TYPE varchar(5)", r"'name' was text and is character varying\(5\)"),
        ("DROP COLUMN name", "table has changed since.*'name' is gone; start the query again"),
        ("RENAME COLUMN name TO title", "table has changed since.*'name' is gone; start the"),
        ("RENAME TO elsewhere", "table has changed since.*'id' is gone; start the query again"),
        ("ADD COLUMN must int NOT NULL", '"must"'),
    ],
)
def test_table_altered_in_the_columns_of_the_batch(
    prepared: World, load: str, change: str, message: str
) -> None:
    """Nothing is written by guess: the error names the change, and a new start goes on."""
    prepared.table()
    sink = prepared.ready(load=load)
    prepared.run(f"ALTER TABLE {prepared.schema}.orders {change}")
    with pytest.raises(PrepareRejectedError, match=message):
        prepare(sink)
    sweep(prepared, sink)
    assert prepared.run(f"SELECT * FROM {prepared.schema}.sparkonce_commits") == []


@pytest.mark.parametrize("load", LOADS)
def test_table_altered_while_the_query_starts(
    prepared: World, load: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Types that rows are encoded for, and those that a change is told by, are of one look."""
    prepared.table()
    resolve = sink_module.resolve

    def and_alter(*args: Any) -> Any:
        target = resolve(*args)
        prepared.run(f"ALTER TABLE {prepared.schema}.orders ALTER id TYPE numeric(1, 0)")
        return target

    monkeypatch.setattr(sink_module, "resolve", and_alter)
    sink = prepared.ready(load=load)
    with pytest.raises(PrepareRejectedError, match="'id' was bigint and is numeric"):
        prepare(sink)


def test_table_altered_while_a_task_waits_for_its_first_row(prepared: World) -> None:
    """Checked again once the rows hold the table's lock: a double's bytes are a bigint's too."""
    prepared.table()
    sink = prepared.ready(load="direct")
    with psycopg.connect(prepared.dsn) as other, ThreadPoolExecutor(1) as pool:
        change = "ALTER COLUMN id TYPE double precision"
        other.execute(f"ALTER TABLE {prepared.schema}.orders {change}".encode())
        writing = pool.submit(stage, sink)
        eventually(lambda: prepared.waiting() > 0, "the COPY waits for the table")
        other.commit()
        with pytest.raises(PrepareRejectedError, match="'id' was bigint and is double precision"):
            writing.result(timeout=60)
    assert prepared.gids() == []
    assert prepared.rows() == []


# -- constraints, locks, time ----------------------------------------------------------------------


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("key", [None, ["id"]])
@pytest.mark.parametrize(
    ("columns", "constraint"),
    [
        (f"{KEYED}, CONSTRAINT small CHECK (id <> 4)", "small"),
        ("id bigint PRIMARY KEY, name text NOT NULL", "not-null constraint"),
        (f"{KEYED} CONSTRAINT once UNIQUE DEFERRABLE INITIALLY DEFERRED", "once"),
        (f"{KEYED} CONSTRAINT known REFERENCES {{s}}.known INITIALLY DEFERRED", "known"),
        (f"{KEYED}, CONSTRAINT lone EXCLUDE (name WITH =)", "lone"),
    ],
)
def test_violated_constraint_is_found_before_the_decision(
    prepared: World, load: str, key: list[str] | None, columns: str, constraint: str
) -> None:
    """The error names it and shows no row; nothing of the batch stands."""
    prepared.run(f"CREATE TABLE {prepared.schema}.known (name text PRIMARY KEY)")
    prepared.run(f"INSERT INTO {prepared.schema}.known VALUES ('secret')")
    prepared.table(columns.format(s=prepared.schema))
    prepared.run(f"INSERT INTO {prepared.schema}.orders VALUES (9, 'secret')")
    sink = prepared.ready(load=load, key=key)
    rows = pa.table({"id": pa.array([4, 5, 3], pa.int64()), "name": ["secret", "other", None]})
    with pytest.raises(PrepareRejectedError, match=constraint) as caught:
        prepare(sink, rows)
    assert "batch 0" in str(caught.value)
    assert "secret" not in f"{caught.value} {caught.value.__cause__!r}"
    sweep(prepared, sink)
    assert prepared.rows() == [(9, "secret")]


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("key", [None, ["id"]])
def test_row_that_another_writer_holds(prepared: World, load: str, key: list[str] | None) -> None:
    """Named with its setting and the next step; when the other is done the batch is written."""
    prepared.table(KEYED)
    sink = prepared.ready(load=load, key=key, lock_timeout_s=0.2)
    with psycopg.connect(prepared.dsn) as other:
        other.execute(f"INSERT INTO {prepared.schema}.orders VALUES (2, 'x')".encode())
        with pytest.raises(PrepareRejectedError, match=r"lock_timeout_s=0.2.*pg_prepared_xacts"):
            prepare(sink)
        other.rollback()
    sweep(prepared, sink)
    sink.commit(prepare(sink, batch=1))
    assert prepared.state() == (3, 1, 0, 0)


@pytest.mark.parametrize("load", LOADS)
def test_merge_that_takes_too_long(prepared: World, load: str) -> None:
    prepared.table("id bigint PRIMARY KEY CHECK (pg_sleep(id) IS NOT NULL), name text")
    sink = prepared.ready(load=load, key=["id"], statement_timeout_s=0.1)
    with pytest.raises(PrepareRejectedError, match=r"statement_timeout_s=0.1.*smaller"):
        prepare(sink)
    sweep(prepared, sink)
    assert prepared.state() == (0, 0, 0, 0)


@pytest.mark.parametrize("load", LOADS)
def test_deadlock_with_another_writer_is_tried_again(prepared: World, load: str) -> None:
    """In the prepared mode too, the rows that were copied are merged again."""
    schema, gate = prepared.schema, "1234"
    prepared.table(KEYED)
    prepared.run(f"INSERT INTO {schema}.orders VALUES (1, 'x'), (2, 'x')")
    prepared.run(
        f"CREATE FUNCTION {schema}.f() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"IF NEW.id = 2 THEN PERFORM pg_advisory_xact_lock({gate}); END IF; RETURN NEW; END $$"
    )
    prepared.run(
        f"CREATE TRIGGER t BEFORE INSERT ON {schema}.orders FOR EACH ROW "
        f"EXECUTE FUNCTION {schema}.f()"
    )
    prepared.run("ALTER ROLE CURRENT_USER IN DATABASE postgres SET deadlock_timeout = '50ms'")
    update = f"UPDATE {schema}.orders SET name = 'r' WHERE id = "
    try:
        sink = prepared.ready(load=load, key=["id"])
        with (
            psycopg.connect(prepared.dsn) as rival,
            psycopg.connect(prepared.dsn) as gatekeeper,
            ThreadPoolExecutor(2) as pool,
        ):
            rival.execute("SET deadlock_timeout = '1h'")  # the other one looks for the deadlock
            rival.execute(f"{update} 2".encode())
            gatekeeper.execute(f"SELECT pg_advisory_lock({gate})".encode())
            writing = pool.submit(prepare, sink)
            eventually(lambda: prepared.waiting() == 1, "the merge has row 1")
            waiting = pool.submit(rival.execute, f"{update} 1".encode())
            eventually(lambda: prepared.waiting() == 2, "the rival waits for row 1")
            gatekeeper.execute(f"SELECT pg_advisory_unlock({gate})".encode())
            gatekeeper.commit()
            waiting.result(timeout=60)
            rival.commit()
            sink.commit(writing.result(timeout=60))
    finally:
        prepared.run("ALTER ROLE CURRENT_USER IN DATABASE postgres RESET deadlock_timeout")
    assert prepared.rows() == [(1, "a"), (2, "b"), (3, None)]


@pytest.mark.parametrize("load", LOADS)
def test_failure_of_serialization_is_tried_again(prepared: World, load: str) -> None:
    """A trigger of the target raises it, twice."""
    prepared.table(KEYED)
    prepared.run(f"CREATE SEQUENCE {prepared.schema}.tries")
    prepared.run(
        f"CREATE FUNCTION {prepared.schema}.f() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"IF nextval('{prepared.schema}.tries') < 3 THEN RAISE SQLSTATE '40001'; END IF; "
        "RETURN NULL; END $$"
    )
    prepared.run(
        f"CREATE TRIGGER t AFTER INSERT ON {prepared.schema}.orders "
        f"EXECUTE FUNCTION {prepared.schema}.f()"
    )
    sink = prepared.ready(load=load, key=["id"])
    sink.commit(prepare(sink))
    assert prepared.state() == (3, 1, 0, 0)
    assert prepared.run(f"SELECT last_value FROM {prepared.schema}.tries") == [(3,)]


# -- connections -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_server() -> Iterator[PostgresServer]:
    """A server with few connections."""
    config = {"max_connections": "12", "superuser_reserved_connections": "0"}
    with start_services(["postgres"], postgres_config=config) as services:
        yield services.postgres


@pytest.mark.parametrize("load", LOADS)
def test_server_takes_no_more_connections(
    small_server: PostgresServer,
    fresh_name: Callable[[], str],
    load: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The batch is aborted before the decision, and committed again and again after it."""
    monkeypatch.setattr(connections, "_WAIT_FOR_ROOM_S", 0.0)
    with world_on(small_server, fresh_name(), prepares=True) as world:
        world.table()
        sink = world.ready(load=load)
        committable = prepare(sink)
        sink.close()
        with contextlib.ExitStack() as stack:
            with pytest.raises(psycopg.OperationalError):  # noqa: PT012 - one of them fails
                for _ in range(13):
                    stack.enter_context(psycopg.connect(world.dsn))
            with pytest.raises(PrepareRejectedError, match="clients.*raise max_connections"):
                stage(sink, branch_id=task(8))
            with pytest.raises(SinkUnavailableError, match="clients.*raise max_connections"):
                world.sink(load=load).validate(ROWS.schema)
            with pytest.raises(CommitUnresolvedError, match="clients"):
                sink.commit(committable)
        commit_until_known(sink, committable)
        assert world.state() == (3, 1, 0, 0)


@pytest.mark.parametrize("load", LOADS)
def test_task_waits_for_room_on_the_server(
    small_server: PostgresServer,
    fresh_name: Callable[[], str],
    load: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A refused connection costs none of the task's attempts."""
    with world_on(small_server, fresh_name(), prepares=True) as world:
        world.table()
        sink = world.ready(load=load)
        sink.close()
        taken = []
        with contextlib.suppress(psycopg.OperationalError):
            while True:
                taken.append(psycopg.connect(world.dsn))
        with ThreadPoolExecutor(1) as pool:
            prepared = pool.submit(prepare, sink)
            eventually(lambda: "no room for another connection" in caplog.text, "the task waits")
            assert not prepared.done()
            for connection in taken:
                connection.close()
            sink.commit(prepared.result())
        assert world.state() == (3, 1, 0, 0)


# -- the disk --------------------------------------------------------------------------------------


@contextlib.contextmanager
def no_file_above(server: PostgresServer, size_bytes: int) -> Iterator[None]:
    """Sessions that begin meanwhile can make no file longer than that, as on a full disk."""
    runtime = server.runtime
    if not isinstance(runtime, LocalRuntime) or shutil.which("prlimit") is None:
        pytest.skip("needs prlimit and a server that is a local process")
    server.start()
    set_limit(runtime, f"{size_bytes}:")
    try:
        yield
    finally:
        set_limit(runtime, "unlimited:")


def set_limit(runtime: LocalRuntime, soft: str) -> None:
    """As the server's own user, who may."""
    assert runtime.pid is not None
    process = psutil.Process(runtime.pid)
    is_root = os.geteuid() == 0
    subprocess.run(
        [str(shutil.which("prlimit")), f"--pid={runtime.pid}", f"--fsize={soft}"],
        check=True,
        user=process.uids().real if is_root else None,
        group=process.gids().real if is_root else None,
        extra_groups=[] if is_root else None,
    )


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("key", [None, ["id"]])
def test_disk_is_full_while_a_task_writes(
    prepared: World, load: str, key: list[str] | None
) -> None:
    """Named, nothing of it stands, and the same rows are written once there is room."""
    prepared.table(KEYED)
    prepared.run(f"INSERT INTO {prepared.schema}.orders VALUES (0, 'before')")
    sink = prepared.ready(load=load, key=key)
    sink.close()  # its sessions have no limit
    rows = pa.table({"id": range(1, 40_001), "name": ["x" * 1000] * 40_000})
    with no_file_above(prepared.server, 20 * 1024 * 1024):  # more than a file of the WAL
        with pytest.raises(PrepareRejectedError, match="could not (extend|write).*too large"):
            prepare(sink, rows)
        sweep(prepared, sink)
        assert prepared.state() == (1, 0, 0, 0)
        sink.close()
    sink.commit(prepare(sink, rows, batch=1))
    assert prepared.state() == (40_001, 1, 0, 0)


def test_disk_is_full_while_the_batch_is_merged(prepared: World) -> None:
    """Staging is swept with the aborted batch."""
    prepared.table()
    sink = prepared.ready()
    rows = pa.table({"id": range(40_000), "name": ["x" * 1000] * 40_000})
    of_task = stage(sink, rows)
    sink.close()
    with no_file_above(prepared.server, 20 * 1024 * 1024):
        with pytest.raises(PrepareRejectedError, match="could not (extend|write).*too large"):
            sink.vote(merge_of(), [of_task])
        sweep(prepared, sink)
        sink.close()
    assert prepared.state() == (0, 0, 0, 0)
    sink.commit(prepare(sink, rows, batch=1))
    assert prepared.state() == (40_000, 1, 0, 0)


@pytest.mark.parametrize("load", LOADS)
def test_server_that_dies_when_a_task_was_given_up_starts_again(prepared: World, load: str) -> None:
    """With an UNLOGGED table it would not, before somebody starts it twice (Postgres' bug 17731).

    The files of the table are gone, the end of its transaction is not yet in the write-ahead log,
    and what made it is.
    """
    with wal_kept_back(prepared.server):
        prepared.table(KEYED)
        sink = prepared.ready(load=load, key=["id"])
        handle = sink.beginTransaction(task())
        sink.write(handle, ROWS.to_batches()[0])
        eventually(lambda: prepared.open_merges() == 1, "the server has made the table")
        prepared.run(f"CREATE TABLE {prepared.schema}.flushed ()")  # and all that came before it
        sink.discard(handle)
        eventually(lambda: prepared.open_merges() == 0, "it is rolled back")
        prepared.server.kill()
        prepared.server.start()
        commit_until_known(sink, prepare(sink))
        assert prepared.ids() == [1, 2, 3]
