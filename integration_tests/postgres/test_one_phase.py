"""Rows and record in one transaction: a sink and a log in one database of a real server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from integration_tests.support.postgres import (
    ROWS,
    World,
    eventually,
    merge_of,
    stage,
    world_on,
)
from integration_tests.support.proxy import Proxy, holds
from sparkonce import failpoints
from sparkonce.errors import (
    CommitUnresolvedError,
    FencedError,
    PrepareRejectedError,
    ProtocolError,
)
from sparkonce.model import BranchId, Committable
from sparkonce.protocol.driver import Driver
from sparkonce.protocol.lease import NoEntrance
from sparkonce.protocol.pipeline import Patience
from sparkonce.protocol.pipeline import Pipeline as TheirPipeline
from sparkonce.protocol.rewriting import Rewrite
from sparkonce.sinks import PostgresSink
from sparkonce.sinks.postgres import sink as sink_module
from sparkonce.testing.log_cases import claim
from sparkonce.testing.services import PostgresServer
from sparkonce.txn_log.postgres import PostgresLog
from sparkonce.txn_log.record import Fingerprint, Incarnation, Part, Share, State, TransactionRecord

OFFSETS = ('it\'s {0} 100% \\ "名"',)
ROLE = "one_phase_writer"


class OneBatch:
    """A batch of two tasks."""

    offsets = OFFSETS

    def __init__(self, sink: PostgresSink, batch_id: int, rows: Any = ROWS) -> None:
        self.batch_id = batch_id
        self.drained = False
        self._sink = sink
        self._rows = rows

    def write(
        self, incarnation: Incarnation, rewrite: Rewrite | None = None
    ) -> Mapping[str, Share]:
        assert rewrite is None
        ids = [
            BranchId(incarnation.owner, self.batch_id, incarnation.token, self._sink.name, 0, n)
            for n in range(2)
        ]
        halves = self._rows.slice(0, 1), self._rows.slice(1)
        staged = tuple(stage(self._sink, rows, b) for b, rows in zip(ids, halves, strict=True))
        parts = tuple(
            Part(n, b.name, 64, Fingerprint("a/1", len(halves[n]), n)) for n, b in enumerate(ids)
        )
        return {self._sink.name: Share(self._sink.target, parts, staged)}

    def drain(self) -> dict[str, Fingerprint]:
        self.drained = True
        return {}


@dataclass
class NoCheckpoint:
    location: str = "memory:/checkpoint"

    def committed(self) -> int | None:
        return -1

    def has_offsets(self, batch_id: int) -> bool:
        return batch_id == 0


class Pipeline:
    """Drivers of one pipeline; the log is in a schema beside the target's."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.schema = f"{world.schema}_log"
        self.logs: list[PostgresLog] = []

    def address(self, dsn: str | None = None) -> str:
        return f"{dsn or self.world.dsn}?schema={self.schema}"

    def log(self, address: str | None = None) -> PostgresLog:
        self.logs.append(PostgresLog(address or self.address()))
        return self.logs[-1]

    def driver(self, sink: PostgresSink, log: PostgresLog | None = None, **changes: Any) -> Driver:
        log = log or self.log()
        claimed = claim(sinks={sink.name: sink.target}, offsets={0: OFFSETS}, **changes)
        pipeline = TheirPipeline(
            name=claimed.pipeline,
            sinks={sink.name: sink},
            log=log,
            checkpoint=NoCheckpoint(),
            commit_timeout_s=20.0,
            retain=10,
            patience=Patience(20.0),
        )
        driver = Driver.start(pipeline, claimed, NoEntrance())
        driver.recover()
        return driver

    def xids(self) -> list[tuple[int, bool]]:
        """By batch: whether one transaction has written the record and the marker row."""
        rows: list[tuple[int, bool]] = self.world.run(
            f"SELECT r.batch_id, r.xmin = c.xmin FROM {self.schema}.records AS r "
            f"JOIN {self.world.schema}.sparkonce_commits AS c USING (query_id, batch_id) "
            "WHERE r.state = 'complete' ORDER BY 1"
        )
        return rows


@pytest.fixture
def pipeline(world: World) -> Iterator[Pipeline]:
    """With and without prepared transactions on the server."""
    yield from piped(world)


@pytest.fixture
def prepares(prepared: World) -> Iterator[Pipeline]:
    """For what does not depend on that."""
    yield from piped(prepared)


def piped(world: World) -> Iterator[Pipeline]:
    world.table()
    pipeline = Pipeline(world)
    yield pipeline
    world.server.start()
    for log in pipeline.logs:
        log.close()
    world.run(f"DROP SCHEMA IF EXISTS {pipeline.schema} CASCADE")


@contextlib.contextmanager
def at(point: str, action: Callable[[], object]) -> Iterator[None]:
    """Act once, when the protocol gets there."""
    todo = [action]

    def handle(reached: str, where: Mapping[str, object]) -> None:
        del where
        if reached == point and todo:
            todo.pop()()

    failpoints.handler = handle
    try:
        yield
    finally:
        failpoints.handler = None
    assert not todo, f"{point} was not reached"


def port_of(dsn: str) -> int:
    return int(dsn.rpartition(":")[2].partition("/")[0])


@pytest.fixture
def behind_proxy(prepares: Pipeline) -> Iterator[tuple[PostgresSink, Proxy]]:
    """A sink behind a proxy."""
    proxy = Proxy(port := port_of(prepares.world.dsn))
    yield (
        prepares.world.ready(dsn=prepares.world.dsn.replace(f":{port}/", f":{proxy.port}/")),
        proxy,
    )
    proxy.close()


# -- one transaction -------------------------------------------------------------------------------


def test_rows_marker_and_record_are_of_one_transaction(pipeline: Pipeline) -> None:
    """Nothing is ever prepared, and the record is complete at once."""
    world = pipeline.world
    sink = world.ready()
    driver = pipeline.driver(sink)
    assert driver.two_phases is None

    def look() -> None:
        assert world.gids() == []
        assert (world.ids(), world.markers(), world.open_merges()) == ([], [], 1)
        assert pipeline.log().history("orders") == []

    for batch_id in range(2):
        with at("decide.before", look) if batch_id == 0 else contextlib.nullcontext():
            driver.deliver(OneBatch(sink, batch_id))
    assert world.state() == (6, 2, 0, 0)
    assert pipeline.xids() == [(0, True), (1, True)]
    records = pipeline.log().history("orders")
    assert {r.state for r in records} == {State.COMPLETE}
    assert all(r.times.keys() == {State.DECIDED, State.COMPLETE} for r in records)
    assert [r.offsets for r in records] == [OFFSETS] * 2
    assert all(not c.payload["prepared"] for r in records for c in r.committables())


@pytest.mark.parametrize(
    "options", [{"key": ["id"]}, {"dead_letter": "rejected"}, {"key": ["id"], "write": "ignore"}]
)
def test_every_way_to_write(prepares: Pipeline, options: dict[str, Any]) -> None:
    world = prepares.world
    world.run(f"ALTER TABLE {world.schema}.orders ADD PRIMARY KEY (id), ADD CHECK (name <> 'b')")
    if "dead_letter" not in options:
        world.run(f"ALTER TABLE {world.schema}.orders DROP CONSTRAINT orders_name_check")
    else:
        options = {"dead_letter": f"{world.schema}.rejected"}
    sink = world.ready(**options)
    prepares.driver(sink).deliver(OneBatch(sink, 0))
    assert world.ids() == ([1, 3] if "dead_letter" in options else [1, 2, 3])
    assert prepares.xids() == [(0, True)]
    assert world.staging() == []


def test_replay_of_a_complete_batch_is_drained(prepares: Pipeline) -> None:
    sink = prepares.world.ready()
    prepares.driver(sink).deliver(OneBatch(sink, 0))
    prepares.driver(sink, run_id="2").deliver(again := OneBatch(sink, 0))
    assert again.drained
    assert prepares.world.state() == (3, 1, 0, 0)


def test_log_write_and_commit_are_one_message(
    prepares: Pipeline, behind_proxy: tuple[PostgresSink, Proxy]
) -> None:
    """No lock in the log waits for the driver: before the message there is none (ADR 12)."""
    sink, proxy = behind_proxy
    sent: list[bytes] = []

    def note(data: bytes) -> bool:
        if b"WITH head AS" in data and b"EXPLAIN" not in data:
            sent.append(data)
        return False

    def look() -> None:
        query = (
            f"SELECT count(*) FROM pg_locks WHERE relation = '{prepares.schema}.heads'::regclass"
        )
        assert prepares.world.run(query) == [(0,)]

    driver = prepares.driver(sink)
    proxy.lose = note
    with at("decide.before", look):
        driver.deliver(OneBatch(sink, 0))
    (message,) = sent
    assert message.endswith(b"; COMMIT\0")
    assert prepares.xids() == [(0, True)]


# -- where it does not apply -----------------------------------------------------------------------


def test_log_in_another_database(prepares: Pipeline, fresh_name: Callable[[], str]) -> None:
    """Of the same server: told apart by its oid, whatever the URLs say."""
    world, name = prepares.world, fresh_name()
    world.run(f"CREATE DATABASE {name}")
    try:
        sink = world.ready()
        log = prepares.log(prepares.address(world.dsn.rpartition("/")[0] + f"/{name}"))
        driver = prepares.driver(sink, log)
        assert driver.two_phases == "the transaction log is in another database"
        driver.deliver(OneBatch(sink, 0))
        assert world.state() == (3, 1, 0, 0)
        assert log.history("orders")[0].committables().__next__().payload["prepared"]
        log.close()
    finally:
        world.run(f"DROP DATABASE {name} WITH (FORCE)")


def test_log_on_another_server(
    prepares: Pipeline, open_server: PostgresServer, fresh_name: Callable[[], str]
) -> None:
    """Of the same names."""
    with world_on(open_server, fresh_name(), prepares=False) as other:
        log = prepares.log(prepares.address(other.dsn))
        driver = prepares.driver(prepares.world.ready(), log)
        assert driver.two_phases == "the transaction log is in another database"
        log.close()
        other.run(f"DROP SCHEMA {prepares.schema} CASCADE")


def test_mode_that_commits_task_by_task(prepares: Pipeline) -> None:
    driver = prepares.driver(prepares.world.ready(load="direct"))
    assert "task by task" in str(driver.two_phases)


def test_sink_that_cannot_be_asked(prepares: Pipeline) -> None:
    sink = prepares.world.sink(dsn="postgresql://u:secret@127.0.0.1:1/db")
    two_phases = str(prepares.driver(sink).two_phases)
    assert "127.0.0.1:1: connection" in two_phases
    assert "secret" not in two_phases


@pytest.mark.parametrize("right", ["none", "too few", "enough"])
def test_role_of_the_sink(prepares: Pipeline, right: str) -> None:
    """It writes the log's tables itself; without the rights there are two phases, as ever."""
    world, schema = prepares.world, prepares.schema
    prepares.log()
    world.run(
        f"DO $$ BEGIN CREATE ROLE {ROLE} LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$"
    )
    world.run(f"GRANT ALL ON SCHEMA {world.schema} TO {ROLE}")
    world.run(f"GRANT ALL ON {world.schema}.orders TO {ROLE}")
    if right != "none":
        world.run(f"GRANT USAGE ON SCHEMA {schema} TO {ROLE}")
        world.run(f"GRANT SELECT, UPDATE ON {schema}.heads TO {ROLE}")
        granted = "SELECT, INSERT, UPDATE" + ", DELETE" * (right == "enough")
        world.run(f"GRANT {granted} ON {schema}.records TO {ROLE}")
    try:
        sink = world.ready(dsn=make_conninfo(world.dsn, user=ROLE))
        driver = prepares.driver(sink)
        if right == "enough":
            assert driver.two_phases is None
        else:
            assert "permission denied" in str(driver.two_phases)
        driver.deliver(OneBatch(sink, 0))
        assert world.state() == (3, 1, 0, 0)
        assert prepares.xids() == [(0, right == "enough")]
        sink.close()
    finally:
        world.run(f"DROP OWNED BY {ROLE}")


# -- faults ----------------------------------------------------------------------------------------


def test_answer_to_the_commit_is_lost(
    prepares: Pipeline, behind_proxy: tuple[PostgresSink, Proxy]
) -> None:
    """The log tells that the batch is complete, and the query goes on."""
    sink, proxy = behind_proxy
    driver = prepares.driver(sink)
    for batch_id in range(2):
        proxy.lose = holds(b"WITH head AS") if batch_id == 0 else None
        driver.deliver(OneBatch(sink, batch_id))
    assert proxy.lost == 1
    assert prepares.xids() == [(0, True), (1, True)]
    assert prepares.world.state() == (6, 2, 0, 0)


@pytest.mark.parametrize("point", ["vote.after", "decide.before"])
def test_connection_that_dies_before_the_commit(pipeline: Pipeline, point: str) -> None:
    """The batch is aborted as a whole, and the next start delivers it."""
    world = pipeline.world
    sink = world.ready()

    def end() -> None:
        world.run(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE starts_with(application_name, 'sparkonce_') AND xact_start IS NOT NULL"
        )
        eventually(lambda: world.open_merges() == 0, "the session has ended")

    with at(point, end), pytest.raises(PrepareRejectedError, match="start the query again"):
        pipeline.driver(sink).deliver(OneBatch(sink, 0))
    assert world.state() == (0, 0, 0, 0)
    assert pipeline.log().history("orders") == []
    pipeline.driver(sink, run_id="2").deliver(OneBatch(sink, 0))
    assert world.state() == (3, 1, 0, 0)


def test_server_killed_before_the_commit(prepares: Pipeline) -> None:
    """Nothing of the transaction survives; the next start delivers the batch."""
    world = prepares.world
    sink = world.ready()

    def crash() -> None:
        world.server.kill()
        world.server.start()

    with at("decide.before", crash), pytest.raises(PrepareRejectedError):
        prepares.driver(sink).deliver(OneBatch(sink, 0))
    assert prepares.log().history("orders") == []
    prepares.driver(sink, run_id="2").deliver(OneBatch(sink, 0))
    assert world.state() == (3, 1, 0, 0)
    assert prepares.xids() == [(0, True)]


def test_server_killed_behind_the_commit(
    prepares: Pipeline, behind_proxy: tuple[PostgresSink, Proxy]
) -> None:
    """Committed and not answered: what was flushed is there after the crash, and is told."""
    sink, proxy = behind_proxy
    driver, world = prepares.driver(sink), prepares.world
    commit = sink.commit_one_phase

    def crash_behind(committable: Committable, log_write: object) -> None:
        proxy.lose = holds(b"WITH head AS")
        try:
            commit(committable, log_write)
        finally:
            eventually(lambda: len(world.markers()) == 1, "the server has committed")
            world.server.kill()
            world.server.start()

    sink.commit_one_phase = crash_behind  # type: ignore[method-assign]
    driver.deliver(OneBatch(sink, 0))
    assert world.state() == (3, 1, 0, 0)
    assert prepares.xids() == [(0, True)]


def test_only_a_database_and_a_statement_of_postgres_are_shared(prepares: Pipeline) -> None:
    assert prepares.log().why_apart("sqlite") == (
        "the transaction log is in Postgres, and the sink is not"
    )
    sink = prepares.world.ready()
    (merged,) = sink.prepare_one_phase(merge_of(), [stage(sink)])
    with pytest.raises(ProtocolError, match="'COMMIT' is not a write of a Postgres log"):
        sink.commit_one_phase(merged, "COMMIT")
    sink.abort(merged)
    assert prepares.world.state() == (0, 0, 0, 0)


@pytest.mark.parametrize("is_swept", [False, True])
def test_newer_driver_claims_between_merge_and_commit(pipeline: Pipeline, is_swept: bool) -> None:
    """The open merge keeps no one from the log; its COMMIT fails, ended by a sweep or not."""
    world = pipeline.world
    older, newer = world.ready(), world.ready()
    log = pipeline.log()
    drivers: list[Driver] = []

    def take_over() -> None:
        if is_swept:
            drivers.append(pipeline.driver(newer, run_id="2"))
            assert world.open_merges() == 0
        else:
            log.begin(claim(run_id="2", sinks={older.name: older.target}))

    with at("decide.before", take_over), pytest.raises(FencedError, match="token 2"):
        pipeline.driver(older).deliver(OneBatch(older, 0))
    assert (world.ids(), world.markers()) == ([], [])
    assert log.history("orders") == []
    driver = drivers[0] if drivers else pipeline.driver(newer, run_id="3")
    driver.deliver(OneBatch(newer, 0))
    assert world.state() == (3, 1, 0, 0)


def test_newer_driver_claims_behind_the_read(prepares: Pipeline) -> None:
    """The last moment: the write is on its way. It names what was read, and does not count."""
    world, log = prepares.world, prepares.log()
    sink = world.ready()
    commit = sink.commit_one_phase

    def take_over(committable: Committable, log_write: object) -> None:
        log.begin(claim(run_id="2", sinks={sink.name: sink.target}))
        commit(committable, log_write)

    sink.commit_one_phase = take_over  # type: ignore[method-assign]
    with pytest.raises(FencedError, match="token 2") as caught:
        prepares.driver(sink).deliver(OneBatch(sink, 0))
    assert "another driver has written the log" in str(caught.value.__cause__)
    assert world.state() == (0, 0, 0, 0)
    assert log.history("orders") == []


def test_driver_that_stands_still_is_ended_by_the_server(
    prepares: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between merge and COMMIT, with no newer driver: its row locks do not stay for ever."""
    monkeypatch.setattr(sink_module, "_FROZEN_S", 0.2)
    world = prepares.world
    sink = world.ready()

    def stand_still() -> None:
        eventually(lambda: world.open_merges() == 0, "the server has ended the transaction")

    with at("decide.before", stand_still), pytest.raises(PrepareRejectedError):
        prepares.driver(sink).deliver(OneBatch(sink, 0))
    assert world.state() == (0, 0, 0, 0)


@pytest.mark.parametrize("ends", ["SELECT 1 / 0", "ROLLBACK"])
def test_transaction_that_failed_or_ended_unseen(prepares: Pipeline, ends: str) -> None:
    """The record is not written without its rows."""
    world = prepares.world
    sink = world.ready()

    def end() -> None:
        (connection,) = sink._held._held.values()
        with contextlib.suppress(psycopg.errors.DivisionByZero):
            connection.execute(ends.encode())

    told = "ended unseen" if ends == "ROLLBACK" else "transaction is aborted"
    with at("decide.before", end), pytest.raises(PrepareRejectedError, match=told) as caught:
        prepares.driver(sink).deliver(OneBatch(sink, 0))
    assert isinstance(caught.value.__cause__, CommitUnresolvedError)
    assert world.state() == (0, 0, 0, 0)
    assert prepares.log().history("orders") == []


def test_sink_closed_before_the_commit(prepares: Pipeline) -> None:
    """By another thread: its open transaction is gone."""
    sink = prepares.world.ready()
    with at("decide.before", sink.close), pytest.raises(PrepareRejectedError, match="not open"):
        prepares.driver(sink).deliver(OneBatch(sink, 0))
    assert prepares.world.state() == (0, 0, 0, 0)


def decided(driver: Driver, batch: OneBatch) -> TransactionRecord:
    """Write the batch and decide it; nothing is committed."""
    with pytest.raises(Decided), at("decide.after", stop):
        driver.deliver(batch)
    (record,) = driver.lease.pipeline.log.unfinished(driver.lease.name)
    return record


class Decided(BaseException):
    """The driver is stopped there, as by a crash."""


def stop() -> None:
    raise Decided


def test_decided_by_two_phases_before(prepares: Pipeline) -> None:
    """A batch that an older start has decided is finished as it was prepared."""
    world, log = prepares.world, prepares.log()
    sink = world.ready()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PostgresLog, "why_apart", lambda self, database: "as it was")
        driver = prepares.driver(sink, log)
        record = decided(driver, OneBatch(sink, 0))
    assert world.gids() == [str(c.branch_id) for c in record.committables()]
    driver = prepares.driver(sink, run_id="2")
    assert driver.two_phases is None
    assert world.state() == (3, 1, 0, 0)
    driver.deliver(OneBatch(sink, 1))
    assert prepares.xids() == [(0, False), (1, True)]


@pytest.mark.parametrize("load", ["staged", "direct"])
def test_complete_batch_on_a_server_that_went_back_in_time(
    prepares: Pipeline, caplog: pytest.LogCaptureFixture, load: str
) -> None:
    """The log has the end of the batch, the server its PREPARE alone: no sweep rolls that back."""
    world, log = prepares.world, prepares.log()
    sink = world.ready(load=load)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PostgresLog, "why_apart", lambda self, database: "as it was")
        driver = prepares.driver(sink, log)
        record = decided(driver, OneBatch(sink, 0))
    log.complete(record, driver.incarnation.token)
    named = sorted(str(c.branch_id) for c in record.committables())
    assert (world.gids(), world.ids(), world.markers()) == (named, [], [])
    driver = prepares.driver(sink, run_id="2")
    assert caplog.text.count("went back in time") == len(named)
    for _ in range(2):
        assert world.state() == (3, len(named), 0, 0)
        driver.sweep()
    assert log.history("orders")[0].state is State.COMPLETE
