"""What stands on a Postgres server, seen from outside; the steps of a task and a driver."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql

import sparkonce
from sparkonce.errors import CommitUnresolvedError
from sparkonce.model import DRIVER_ATTEMPT, BranchId, Committable, Owner
from sparkonce.once import once
from sparkonce.sinks import PostgresSink
from sparkonce.sinks.postgres.server.connections import Address, Pool
from sparkonce.testing.services import PostgresServer

DEADLINE_S = 60.0
OWNER = Owner("0123456789abcdef", "11111111-2222-3333-4444-555555555555")
ROWS = pa.table({"id": pa.array([1, 2, 3], pa.int64()), "name": ["a", "b", None]})
COLUMNS = "id bigint, name text"

CHILD = """
import json, pickle, sys
import pyarrow as pa
from sparkonce.model import DRIVER_ATTEMPT, BranchId, Committable

def say(value):
    print(json.dumps(value), flush=True)

sink, branch_id, rows, do, committable = pickle.load(sys.stdin.buffer)
say("ready")
if do == "commit":
    sys.stdin.buffer.read(1)
    try:
        sink.commit(Committable.from_json(committable))
        say("committed")
    except Exception as error:
        say(type(error).__name__)
else:
    handle = sink.beginTransaction(branch_id)
    for batch in rows.to_batches():
        sink.write(handle, batch)
    if do == "prepare":
        staged = sink.preCommit(handle)
        merged, = sink.vote(merge_id := BranchId(
            branch_id.owner, branch_id.batch_id, branch_id.token, branch_id.sink, 0, DRIVER_ATTEMPT
        ), [staged])
        say(merged.to_json())
    else:
        say("written")
    sys.stdin.buffer.read()
"""
"""Another process of ours: it prepares or copies and then stands still, or commits on a sign."""


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait for a state of the world, not for a time."""
    until = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until, f"not reached in {DEADLINE_S:.0f} s: {what}"
        time.sleep(0.01)


class World:
    """What stands in one schema of one server, seen from outside."""

    def __init__(self, server: PostgresServer, schema: str, *, prepares: bool) -> None:
        self.server = server
        self.schema = schema
        self.prepares = prepares
        self.sinks: list[PostgresSink] = []
        self.children: list[subprocess.Popen[bytes]] = []

    @property
    def dsn(self) -> str:
        return self.server.dsn

    def run(self, query: str | sql.Composed) -> list[Any]:
        # A test that fails may leave a transaction open: what follows fails then, and never hangs.
        options = f"-c lock_timeout={DEADLINE_S:.0f}s"
        with psycopg.connect(self.dsn, autocommit=True, options=options) as connection:
            cursor = connection.execute(query.encode() if isinstance(query, str) else query)
            return cursor.fetchall() if cursor.description else []

    def table(self, columns: str = COLUMNS, name: str = "orders") -> str:
        self.run(f"CREATE TABLE {self.schema}.{name} ({columns})")
        return f"{self.schema}.{name}"

    @contextlib.contextmanager
    def role(self, rights: str = "") -> Iterator[tuple[str, str]]:
        """A role that may make tables in the schema and has `rights` on orders; its conninfo."""
        role = f"{self.schema}_role"
        self.run(f"CREATE ROLE {role} LOGIN")
        try:
            self.run(f"GRANT USAGE, CREATE ON SCHEMA {self.schema} TO {role}")
            if rights:
                self.run(f"GRANT {rights} ON {self.schema}.orders TO {role}")
            yield role, self.dsn.replace("postgres@", f"{role}@")
        finally:
            self.run(f"DROP OWNED BY {role} CASCADE; DROP ROLE {role}")

    def sink(self, table: str | None = None, **options: Any) -> PostgresSink:
        options = {"lock_timeout_s": 10.0, **options}
        dsn = options.pop("dsn", self.dsn)
        sink = PostgresSink(dsn, table=table or f"{self.schema}.orders", **options)
        self.sinks.append(sink)
        return sink

    def ready(self, schema: pa.Schema = ROWS.schema, **options: Any) -> PostgresSink:
        sink = self.sink(**options)
        sink.validate(schema)
        return sink

    def rows(self, name: str = "orders", order: str = "1") -> list[Any]:
        return self.run(f"SELECT * FROM {self.schema}.{name} ORDER BY {order}")

    def ids(self) -> list[int]:
        return [row[0] for row in self.run(f"SELECT id FROM {self.schema}.orders ORDER BY 1")]

    def markers(self) -> list[int]:
        """Batch ids of the marker rows."""
        query = f"SELECT batch_id FROM {self.schema}.sparkonce_commits ORDER BY 1"
        return [row[0] for row in self.run(query)]

    def staging(self) -> list[str]:
        return [
            row[0]
            for row in self.run(
                "SELECT tablename FROM pg_tables WHERE starts_with(tablename, 'sparkonce_') "
                f"AND tablename <> 'sparkonce_commits' AND schemaname = '{self.schema}' ORDER BY 1"
            )
        ]

    def gids(self) -> list[str]:
        return [row[0] for row in self.run("SELECT gid FROM pg_prepared_xacts ORDER BY 1")]

    def open_merges(self) -> int:
        """Sessions that hold a merge, or a COPY, of ours open."""
        return int(
            self.run(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
                "AND starts_with(application_name, 'sparkonce_') AND xact_start IS NOT NULL"
            )[0][0]
        )

    def state(self) -> tuple[int, int, int, int]:
        """Visible rows, marker rows, staging tables, merges that wait for the decision."""
        waiting = len(self.gids()) if self.prepares else self.open_merges()
        return len(self.ids()), len(self.markers()), len(self.staging()), waiting

    def child(
        self,
        sink: PostgresSink,
        do: str,
        branch_id: BranchId | None = None,
        rows: pa.Table = ROWS,
        committable: Committable | None = None,
    ) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(sparkonce.__file__).parents[1])},
        )
        self.children.append(child)
        assert child.stdin is not None
        value = None if committable is None else committable.to_json()
        pickle.dump((sink, branch_id or task(), rows, do, value), child.stdin)
        child.stdin.flush()
        assert heard(child) == "ready"
        return child

    def waiting(self) -> int:
        """Sessions that wait for a lock."""
        query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        return int(self.run(query)[0][0])

    def end_sessions(self) -> None:
        """What tests before have left open to the server, here or in Spark's Python workers."""
        once(Pool, Address.read(self.dsn)).close()
        query = (
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
            "WHERE starts_with(application_name, 'sparkonce')"
        )
        eventually(lambda: self.run(query) == [(0,)], "every session ended")

    def close(self) -> None:
        for child in self.children:
            kill(child)
        for sink in self.sinks:
            sink.close()
        roll_back_all(self.dsn)


def heard(child: subprocess.Popen[bytes]) -> Any:
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line, "the child ended without a word"
    return json.loads(line)


def kill(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.close()


def task(attempt: int = 7, batch: int = 0, token: int = 1, **parts: Any) -> BranchId:
    return BranchId(
        **{
            "owner": OWNER,
            "batch_id": batch,
            "token": token,
            "sink": "postgres",
            "write_pass": 0,
            "attempt": attempt,
            **parts,
        }
    )


def merge_of(batch: int = 0, **parts: Any) -> BranchId:
    return task(DRIVER_ATTEMPT, batch, **parts)


def stage(
    sink: PostgresSink, rows: pa.Table = ROWS, branch_id: BranchId | None = None
) -> Committable:
    handle = sink.beginTransaction(branch_id or task())
    try:
        for batch in rows.to_batches():
            sink.write(handle, batch)
        return sink.preCommit(handle)
    except BaseException:
        sink.discard(handle)
        raise


def prepare(sink: PostgresSink, rows: pa.Table = ROWS, batch: int = 0) -> Committable:
    """One task and the driver's vote; what a decision would name, as the log gives it back."""
    (merged,) = sink.vote(merge_of(batch), [stage(sink, rows, task(batch=batch))])
    return Committable.from_json(json.loads(json.dumps(merged.to_json())))


def deliver(sink: PostgresSink, rows: pa.Table = ROWS, batch: int = 0) -> None:
    sink.commit(prepare(sink, rows, batch))


def vote_behind(world: World, change: str, sink: PostgresSink, rows: pa.Table) -> Committable:
    """A vote that waits for another session's `change`, and ends once that is committed."""
    staged = stage(sink, rows)
    with psycopg.connect(world.dsn) as rival, ThreadPoolExecutor(1) as pool:
        rival.execute(change.encode())
        voting = pool.submit(sink.vote, merge_of(), [staged])
        eventually(lambda: world.waiting() > 0, "the merge waits for the other session")
        rival.commit()
        (merged,) = voting.result(DEADLINE_S)
    return merged


def lose(world: World, sink: PostgresSink) -> None:
    """The merge that waits for its commit is gone, and its staging tables are not."""
    if world.prepares:
        world.run(f"ROLLBACK PREPARED '{merge_of()}'")
    else:
        sink.close()
        eventually(lambda: world.open_merges() == 0, "the open merge rolled back")


def commit_until_known(sink: PostgresSink, committable: Committable) -> None:
    def is_committed() -> bool:
        try:
            sink.commit(committable)
        except CommitUnresolvedError:
            return False
        return True

    eventually(is_committed, "a known outcome")


@contextlib.contextmanager
def wal_kept_back(server: PostgresServer) -> Iterator[None]:
    """What no commit waits for stays in the server's memory, and is lost when that is killed."""

    def run(*queries: str) -> None:
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            for query in (*queries, "SELECT pg_reload_conf()"):
                connection.execute(query.encode())

    run("ALTER SYSTEM SET wal_writer_delay = '10s'")
    try:
        yield
    finally:
        server.start()
        run("ALTER SYSTEM RESET wal_writer_delay")


def roll_back_all(dsn: str) -> None:
    """What killed pipelines have left prepared. Where one is left, VACUUM removes nothing."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        found = connection.execute(
            "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
        )
        for (gid,) in found.fetchall():
            connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))


@contextlib.contextmanager
def world_on(server: PostgresServer, name: str, *, prepares: bool) -> Iterator[World]:
    world = World(server, name, prepares=prepares)
    roll_back_all(world.dsn)
    world.run(f"CREATE SCHEMA {name}")
    try:
        yield world
    finally:
        server.start()
        world.close()
        world.run(f"DROP SCHEMA {name} CASCADE")


def _await_a_commit_that_hangs(connection: psycopg.Connection, dsn: str) -> None:
    """Sessions wait only once the checkpointer, too, has read the setting."""
    waiting = "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND wait_event = 'SyncRep'"
    with psycopg.connect(dsn, autocommit=True) as probe, ThreadPoolExecutor(1) as pool:
        while True:
            write = pool.submit(probe.execute, "SELECT pg_logical_emit_message(true, 'probe', '')")
            while not write.done():
                if connection.execute(waiting, [probe.info.backend_pid]).fetchone():
                    probe.cancel()
                    write.result()
                    return


@contextlib.contextmanager
def commits_hang(dsn: str) -> Iterator[None]:
    """Each COMMIT waits for a standby that never comes; it holds its locks, and reads go on."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SET synchronous_commit = local")
        connection.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
        connection.execute("SELECT pg_reload_conf()")
        try:
            _await_a_commit_that_hangs(connection, dsn)
            yield
        finally:
            connection.execute("ALTER SYSTEM RESET synchronous_standby_names")
            connection.execute("SELECT pg_reload_conf()")
