"""What one transaction with the log does on every version of the server."""

from __future__ import annotations

import contextlib

import pytest
from psycopg.conninfo import make_conninfo

from integration_tests.support.one_phase import OFFSETS, OneBatch, Pipeline, at
from integration_tests.support.postgres import eventually
from integration_tests.support.proxy import Proxy, holds
from sparkonce.errors import FencedError, PrepareRejectedError
from sparkonce.model import Committable
from sparkonce.protocol.driver import Driver
from sparkonce.sinks import PostgresSink
from sparkonce.sinks.postgres import sink as sink_module
from sparkonce.testing.log_cases import claim
from sparkonce.txn_log.record import State

ROLE = "one_phase_writer"


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

    with at("decide.before", take_over), pytest.raises(FencedError, match="took token"):
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
    with pytest.raises(FencedError, match="took token") as caught:
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
