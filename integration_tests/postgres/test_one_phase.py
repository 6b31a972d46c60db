"""Rows and record in one transaction: a sink and a log in one database of a real server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from integration_tests.postgres.every_version import one_phase
from integration_tests.support.collecting import cases_of
from integration_tests.support.one_phase import OneBatch, Pipeline, at
from integration_tests.support.postgres import eventually, merge_of, stage, world_on
from integration_tests.support.proxy import Proxy, holds
from sparkonce.errors import CommitUnresolvedError, PrepareRejectedError, ProtocolError
from sparkonce.model import Committable
from sparkonce.protocol.driver import Driver
from sparkonce.sinks import PostgresSink
from sparkonce.testing.services import PostgresServer
from sparkonce.txn_log.postgres import PostgresLog
from sparkonce.txn_log.record import State, TransactionRecord

globals().update(cases_of(one_phase))


# -- one transaction -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"key": ["id"]}, {"dead_letter": "rejected"}, {"key": ["id"], "write": "ignore"}]
)
def test_every_way_to_write(
    prepares: Pipeline, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Its staging tables go with the commit: nothing is "left over" where all went well."""
    caplog.set_level("INFO", "sparkonce")
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
    assert "left-over" not in caplog.text


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


# -- faults ----------------------------------------------------------------------------------------


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


def decided_in_two_phases(
    pipeline: Pipeline, sink: PostgresSink, log: PostgresLog
) -> tuple[Driver, TransactionRecord]:
    """The same, as where sink and log do not share a database."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PostgresLog, "why_apart", lambda self, database: "as it was")
        driver = pipeline.driver(sink, log)
        return driver, decided(driver, OneBatch(sink, 0))


class Decided(BaseException):
    """The driver is stopped there, as by a crash."""


def stop() -> None:
    raise Decided


def test_decided_by_two_phases_before(prepares: Pipeline) -> None:
    """A batch that an older start has decided is finished as it was prepared."""
    world, log = prepares.world, prepares.log()
    sink = world.ready()
    driver, record = decided_in_two_phases(prepares, sink, log)
    assert world.gids() == [str(c.branch_id) for c in record.committables()]
    driver = prepares.driver(sink, run_id="2")
    assert driver.two_phases is None
    assert world.state() == (3, 1, 0, 0)
    driver.deliver(OneBatch(sink, 1))
    assert prepares.xids() == [(0, False), (1, True)]


def test_tables_of_a_complete_batch_on_a_server_that_went_back_in_time(
    prepares: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    """The standby that took over had the tasks' tables, and not the driver's transaction."""
    world, log = prepares.world, prepares.log()
    sink = world.ready()
    driver, record = decided_in_two_phases(prepares, sink, log)
    log.complete(record, driver.incarnation.token)
    for gid in world.gids():
        world.run(f"ROLLBACK PREPARED '{gid}'")
    driver = prepares.driver(sink, run_id="2")
    assert world.state() == (3, 1, 0, 0)
    assert caplog.text.count("was merged again from its staging tables") == 1
    driver.sweep()
    assert world.state() == (3, 1, 0, 0)


@pytest.mark.parametrize("load", ["staged", "direct"])
def test_complete_batch_on_a_server_that_went_back_in_time(
    prepares: Pipeline, caplog: pytest.LogCaptureFixture, load: str
) -> None:
    """The log has the end of the batch, the server its PREPARE alone: no sweep rolls that back."""
    world, log = prepares.world, prepares.log()
    sink = world.ready(load=load)
    driver, record = decided_in_two_phases(prepares, sink, log)
    log.complete(record, driver.incarnation.token)
    named = sorted(str(c.branch_id) for c in record.committables())
    assert (world.gids(), world.ids(), world.markers()) == (named, [], [])
    driver = prepares.driver(sink, run_id="2")
    assert caplog.text.count("went back in time") == len(named)
    for _ in range(2):
        assert world.state() == (3, len(named), 0, 0)
        driver.sweep()
    assert log.history("orders")[0].state is State.COMPLETE
