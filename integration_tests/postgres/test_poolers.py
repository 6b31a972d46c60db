"""The Postgres sink through a real PgBouncer: sessions are shared, transactions are not."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pyarrow as pa
import pytest

from integration_tests.support.one_phase import OneBatch, Pipeline, at
from integration_tests.support.postgres import (
    OWNER,
    ROWS,
    World,
    commit_until_known,
    eventually,
    merge_of,
    stage,
    task,
)
from sparkonce import ExactlyOnce
from sparkonce.errors import CommitUnresolvedError, ConfigurationError, PrepareRejectedError
from sparkonce.finding import Level
from sparkonce.model import Committable
from sparkonce.sinks import PostgresSink
from sparkonce.testing.services.postgres import unprivileged_user
from sparkonce.testing.services.process import Command, Guard, free_port
from sparkonce.testing.services.services import make_root

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
LOADS = ("staged", "direct")

pytestmark = pytest.mark.skipif(PGBOUNCER is None, reason="pgbouncer is not installed")


class Pooler:
    """PgBouncer before one server; in transaction mode with fewer sessions than clients."""

    def __init__(self, folder: Path, guard: Guard, server_dsn: str, pool_mode: str) -> None:
        self.port = free_port()
        port = server_dsn.rpartition(":")[2].partition("/")[0]
        self.dsn = server_dsn.replace(f":{port}/", f":{self.port}/")
        (folder / "users.txt").write_text('"postgres" ""\n')
        (folder / "pgbouncer.ini").write_text(
            f"[databases]\n* = host=127.0.0.1 port={port}\n[pgbouncer]\n"
            f"listen_addr = 127.0.0.1\nlisten_port = {self.port}\nunix_socket_dir =\n"
            f"auth_type = trust\nauth_file = {folder}/users.txt\npool_mode = {pool_mode}\n"
            # In a session of its own each worker keeps its connection from task to task.
            f"default_pool_size = {8 if pool_mode == 'session' else 3}\n"
            "max_client_conn = 50\nquery_wait_timeout = 20\n"
        )
        user = unprivileged_user()
        if user is not None:
            os.chown(folder, *user)
        self._guard = guard
        argv = [str(PGBOUNCER), str(folder / "pgbouncer.ini")]
        self._command = Command(argv, log=folder / "pgbouncer.log", user=user)

    def start(self) -> None:
        self._guard.start(self._command)
        eventually(lambda: self._guard.status() is not None or self._answers(), "PgBouncer answers")
        assert self._guard.status() is None, self._command.log.read_text()

    def _answers(self) -> bool:
        with contextlib.suppress(psycopg.OperationalError):
            psycopg.connect(self.dsn).close()
            return True
        return False

    def kill(self) -> None:
        self._guard.end()


@pytest.fixture
def pooler(world: World) -> Iterator[Callable[[str], Pooler]]:
    """`pooler("transaction")` starts one."""
    root = make_root(None)
    guard = Guard(remove=[root])

    def start(pool_mode: str) -> Pooler:
        folder = root / "pgbouncer"
        folder.mkdir()
        made = Pooler(folder, guard, world.dsn, pool_mode)
        made.start()
        return made

    yield start
    for sink in world.sinks:
        sink.close()
    guard.close()


def prepare(sink: PostgresSink, batch: int = 0) -> list[Committable]:
    """Four tasks at once, more than there are sessions, and the driver's vote."""
    with ThreadPoolExecutor(4) as pool:
        parts = [ROWS.slice(n, 1) for n in range(3)] + [pa.table({"id": [9], "name": ["z"]})]
        tasks = [task(n, batch) for n in range(4)]
        staged = list(pool.map(lambda rows, branch: stage(sink, rows, branch), parts, tasks))
    return list(sink.vote(merge_of(batch), staged))


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("key", [None, ["id"]])
@pytest.mark.parametrize("pool_mode", ["transaction", "session"])
def test_batches_through_a_pooler(
    world: World, pooler: Callable[[str], Pooler], load: str, key: list[str] | None, pool_mode: str
) -> None:
    """All of it works, also an open merge, and no setting is left in a session of others."""
    if load == "direct" and not world.prepares:
        pytest.skip("the server allows no prepared transactions")
    if pool_mode == "session" and key is not None:
        pytest.skip("the pooler does not look into the statements")
    world.table("id bigint PRIMARY KEY, name text")
    dsn = pooler(pool_mode).dsn
    sink = world.ready(dsn=dsn, load=load, key=key)
    committables = prepare(sink)
    assert len(world.ids()) == 0
    for committable in committables:
        sink.commit(committable)
        sink.commit(committable)
    assert world.rows() == [(1, "a"), (2, "b"), (3, None), (9, "z")]
    world.run(f"TRUNCATE {world.schema}.orders")
    for found in prepare(sink, 1):
        sink.abort(found)
    for found in sink.find_branches(OWNER):
        sink.abort(found)
    assert (world.ids(), world.staging(), world.gids()) == ([], [], [])
    sink.close()
    assert settings_of_others(dsn) == settings_of_others(world.dsn)


@pytest.mark.parametrize("pool_mode", ["transaction", "session"])
def test_rows_and_record_in_one_transaction_through_a_pooler(
    pipeline: Pipeline, pooler: Callable[[str], Pooler], pool_mode: str
) -> None:
    """The sink goes through it, and the log does not: they are told to be at one place."""
    bouncer = pooler(pool_mode)
    sink = pipeline.world.ready(dsn=bouncer.dsn)
    driver = pipeline.driver(sink)
    driver.deliver(OneBatch(sink, 0))
    assert pipeline.xids() == [(0, True)]
    with at("decide.before", bouncer.kill), pytest.raises(PrepareRejectedError):
        driver.deliver(OneBatch(sink, 1))
    assert pipeline.world.ids() == [1, 2, 3]
    bouncer.start()
    pipeline.driver(sink, run_id="2").deliver(OneBatch(sink, 1))
    assert pipeline.xids() == [(0, True), (1, True)]


def settings_of_others(dsn: str) -> set[tuple[str, ...]]:
    """What another client meets, in every session that the pooler has."""
    query = (
        "SELECT current_setting('search_path'), current_setting('lock_timeout'), "
        "current_setting('statement_timeout'), current_setting('application_name')"
    )
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(psycopg.connect(dsn, application_name="other")) for _ in range(3)
        ]
        # Their transactions stay open, so that each has a session of its own.
        return {row for client in clients for row in client.execute(query).fetchall()}


@pytest.mark.parametrize("load", LOADS)
def test_pooler_killed_between_prepare_and_commit(
    world: World, pooler: Callable[[str], Pooler], load: str
) -> None:
    """A prepared transaction stands; an open one dies with its session and is merged again."""
    if load == "direct" and not world.prepares:
        pytest.skip("the server allows no prepared transactions")
    world.table()
    bouncer = pooler("transaction")
    sink = world.ready(dsn=bouncer.dsn, load=load)
    committables = prepare(sink)
    bouncer.kill()
    for committable in committables:
        with pytest.raises(CommitUnresolvedError):
            sink.commit(committable)
    bouncer.start()
    for committable in committables:
        commit_until_known(sink, committable)
    assert world.state() == (4, len(committables), 0, 0)


@pytest.mark.parametrize("load", LOADS)
def test_pooler_that_splits_transactions_is_refused(
    world: World, pooler: Callable[[str], Pooler], load: str
) -> None:
    """pool_mode = statement, named before any data moves."""
    world.table()
    sink = world.sink(dsn=pooler("statement").dsn, load=load)
    with pytest.raises(ConfigurationError, match="statement pooling|max_prepared"):
        sink.validate(ROWS.schema)
    (found,) = (one for one in sink.diagnose() if one.level is Level.ERROR)
    assert "pool_mode to transaction or session" in found.fix


@pytest.mark.slow
def test_two_hundred_tasks_through_three_sessions(
    spark: SparkSession, world: World, pooler: Callable[[str], Pooler], tmp_path: Path
) -> None:
    """Each task waits for a session of the pooler; none fails, and no row is there twice."""
    world.table("id bigint PRIMARY KEY, name text")
    sink = world.sink(dsn=pooler("transaction").dsn)
    log = f"sqlite:///{tmp_path}/txn.db"
    with ExactlyOnce("orders", sinks=[sink], log=log, driver_rows=0) as pipeline:
        source = spark.readStream.format("rate-micro-batch")
        rows = source.options(rowsPerBatch=1000, numPartitions=200).load()
        writer = rows.selectExpr("value AS id", "string(value) AS name").writeStream
        writer = writer.option("checkpointLocation", f"{tmp_path}/ckpt")
        query = writer.foreachBatch(pipeline).start()
        done = tmp_path / "ckpt" / "commits" / "1"
        eventually(lambda: done.exists() or not query.isActive, "two batches are committed")
        query.stop()
        assert query.exception() is None
        (second, *_) = [r for r in pipeline.log.history("orders") if r.id.batch_id == 1]
        assert len(second.shares[sink.name].parts) == 200
    ids = world.ids()  # what `stop` has cut off is in no sink, or in all
    assert len(ids) >= 2000
    assert ids == list(range(len(ids) // 1000 * 1000))
