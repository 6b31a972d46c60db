"""Lineage, on a world in memory: START, and COMPLETE or FAIL, for each batch."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from sparkonce.datasets import Dataset
from sparkonce.errors import ConfigurationError, DecisionUnknownError, PrepareRejectedError
from sparkonce.failpoints import InjectedError
from sparkonce.model import BranchId, Owner
from sparkonce.observe import OpenLineage
from sparkonce.observe.lineage.front import _Sender
from sparkonce.once import made
from sparkonce.txn_log.sqlite import SqliteLog
from tests.support.lineage import Lineage, check, facts
from tests.support.telemetry import BATCHES, RUN_ID, run
from tests.support.world import QUERY_ID, Process, World, at_point

BRANCH = BranchId(Owner("0" * 16, QUERY_ID), 0, 1, "left", 0, 1)
PAIR = [("START", 0, 1), ("COMPLETE", 0, 1), ("START", 1, 1), ("COMPLETE", 1, 1)]


@pytest.fixture
def lineage() -> Iterator[Lineage]:
    lineage = Lineage()
    yield lineage
    for event in lineage.events():
        check(event)
    lineage.telemetry.end()


def stop_now() -> None:
    raise KeyboardInterrupt


def test_two_events_for_each_batch(world: World, lineage: Lineage) -> None:
    run(world)
    assert lineage.kinds() == PAIR
    ids = [event["run"]["runId"] for event in lineage.events()]
    assert ids[0] == ids[1] != ids[2] == ids[3]


def test_what_an_event_holds(world: World, lineage: Lineage) -> None:
    """Inputs with offsets, outputs with rows, bytes and schema, and the transaction."""
    run(world)
    start, _, _, complete = lineage.events()
    assert complete["job"]["namespace"] == "shop"
    assert complete["job"]["name"] == "orders"
    assert complete["job"]["facets"]["jobType"]["processingType"] == "STREAMING"
    (source,) = complete["inputs"]
    assert (source["namespace"], source["name"]) == ("file", "/data/in")
    offsets = source["inputFacets"]["sparkonce_offsets"]
    assert (offsets["start"], offsets["end"]) == ('{"upTo":0}', '{"upTo":1}')
    assert "start" not in start["inputs"][0]["inputFacets"]["sparkonce_offsets"]
    left, right = complete["outputs"]
    assert (left["namespace"], left["name"]) == ("file", "/data/left")
    fields = left["facets"]["schema"]["fields"]
    assert [(f["name"], f["type"]) for f in fields] == [("id", "long"), ("tags", "array")]
    assert fields[1]["fields"][0]["type"] == "string"
    for output in (left, right):
        statistics = output["outputFacets"]["outputStatistics"]
        assert statistics["rowCount"] == 1
        assert statistics["size"] == 8
    assert "outputStatistics" not in start["outputs"][0].get("outputFacets", {})
    transaction = complete["run"]["facets"]["sparkonce_transaction"]
    assert transaction["queryId"] == QUERY_ID
    assert transaction["sparkRunId"] == RUN_ID
    assert transaction["state"] == "complete"
    assert complete["run"]["facets"]["processing_engine"]["name"] == "spark"


def test_commit_after_the_checkpoint(tmp_path: Path, lineage: Lineage) -> None:
    """A batch is complete while the next one is delivered."""
    run(World(tmp_path, BATCHES, commit="after_checkpoint"))
    assert lineage.kinds() == PAIR


def test_batch_fails_before_its_decision(world: World, lineage: Lineage) -> None:
    """FAIL, without the text of an error that is not ours; the next attempt is another run."""

    def fail() -> None:
        raise InjectedError("password=secret")

    with at_point("vote.after", fail), pytest.raises(InjectedError):
        world.start(Process())
    assert lineage.kinds() == [("START", 0, 1), ("FAIL", 0, 1)]
    failed = lineage.events()[1]["run"]["facets"]
    assert failed["errorMessage"]["message"] == "InjectedError"
    assert failed["sparkonce_transaction"]["state"] == "aborted"
    run(world)
    assert lineage.kinds()[2:] == [("START", 0, 2), *[(k, b, 2) for k, b, _ in PAIR[1:]]]


def test_text_of_our_own_error_has_no_secret(world: World, lineage: Lineage) -> None:
    def fail(verb: str) -> None:
        if verb == "preCommit":
            raise PrepareRejectedError("postgresql://me:hidden1@db: password='hidden2'", BRANCH)

    world.on_call(fail, "left")
    with pytest.raises(PrepareRejectedError):
        world.start(Process())
    text = json.dumps(lineage.events())
    assert "postgresql://db: password=" in text
    assert "hidden" not in text


@pytest.mark.parametrize("point", ["decide.after", "complete.before", "complete.after"])
def test_recovery_sends_complete_for_the_same_run(
    world: World, lineage: Lineage, point: str
) -> None:
    """Another process finishes what was decided; the id follows from the log."""
    with at_point(point, stop_now), pytest.raises(KeyboardInterrupt):
        world.start(Process())
    before = lineage.events()
    lineage.telemetry.end()
    later = Lineage()
    run(world)
    kinds, after = later.kinds(), later.events()
    later.telemetry.end()
    assert kinds[0] == ("COMPLETE", 0, 1)
    assert [kind for kind, batch, _ in kinds if batch == 1] == ["START", "COMPLETE"]
    assert after[0]["run"]["runId"] == before[0]["run"]["runId"]
    assert after[0]["outputs"][0]["outputFacets"]["outputStatistics"]["rowCount"] == 3
    check(after[0])


def test_abandoned_batch_fails(tmp_path: Path, lineage: Lineage) -> None:
    """It was prepared, and Spark's checkpoint never reached it."""
    world = World(tmp_path, BATCHES, commit="after_checkpoint")
    with at_point("hold.after", stop_now), pytest.raises(KeyboardInterrupt):
        world.start(Process())
    run(world)
    assert lineage.kinds()[:4] == [
        ("START", 0, 1),
        ("FAIL", 0, 1),
        ("START", 0, 2),
        ("COMPLETE", 0, 2),
    ]
    assert lineage.events()[1]["run"]["facets"]["sparkonce_transaction"]["state"] == "abandoned"


@pytest.mark.parametrize("is_written", [True, False])
def test_outcome_of_the_decision_is_unknown(
    world: World, lineage: Lineage, is_written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is sent until a later driver reads the log."""
    decide = SqliteLog.decide

    def fail(log: SqliteLog, *args: Any) -> None:
        if is_written:
            decide(log, *args)
        raise DecisionUnknownError("no answer")

    with monkeypatch.context() as broken:
        broken.setattr(SqliteLog, "decide", fail)
        with pytest.raises(DecisionUnknownError):
            world.start(Process())
    assert lineage.kinds() == [("START", 0, 1)]
    run(world)
    end = "COMPLETE" if is_written else "FAIL"
    assert [k for k in lineage.kinds() if k[1:] == (0, 1)] == [("START", 0, 1), (end, 0, 1)]


def test_transport_that_raises(
    world: World, lineage: Lineage, caplog: pytest.LogCaptureFixture
) -> None:
    """Events are lost, and no batch."""

    def fail() -> None:
        raise OSError("no route")

    lineage.transport.act = fail
    with caplog.at_level(logging.WARNING):
        run(world)
        assert lineage.events() == []
    assert "the observer 'lineage' raised an error" in caplog.text


def test_transport_that_hangs(world: World, lineage: Lineage) -> None:
    """The batches go on, and the end waits for a second."""
    released = threading.Event()
    lineage.transport.act = lambda: released.wait() and None
    began = time.monotonic()
    run(world)
    lineage.telemetry.flush()
    assert time.monotonic() - began < 10
    assert lineage.transport.events == []
    released.set()
    assert lineage.kinds() == PAIR


def test_sink_without_a_name_now(world: World, lineage: Lineage) -> None:
    """The event has the default name, and the next one asks again."""
    calls: list[int] = []

    def name() -> Dataset:
        calls.append(1)
        if len(calls) == 1:
            raise OSError("password=hidden")
        return Dataset("postgres://db:5432", "shop.public.orders")

    lineage.telemetry.describe("orders", facts(name))
    run(world)
    found = [event["outputs"][0]["name"] for event in lineage.events()]
    assert found == ["memory", *["shop.public.orders"] * 3]


def test_event_that_breaks_the_specification_is_found(world: World, lineage: Lineage) -> None:
    """The check itself can fail: in the event, in a facet of the specification, in one of ours."""
    run(world)

    def broken(change: Any) -> None:
        event = json.loads(json.dumps(lineage.events()[1]))
        change(event)
        with pytest.raises(jsonschema.ValidationError):
            check(event)

    broken(lambda e: e.update(eventType="DONE"))
    broken(lambda e: e["run"]["facets"]["sparkonce_transaction"].update(token="1"))
    broken(lambda e: e["outputs"][0]["facets"]["schema"]["fields"][0].pop("name"))
    broken(lambda e: e["inputs"][0]["inputFacets"]["sparkonce_offsets"].pop("_producer"))


def test_extra_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "sparkonce.observe.lineage.events", raising=False)
    monkeypatch.setitem(sys.modules, "openlineage.client", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'sparkonce\[openlineage\]'"):
        OpenLineage()


def test_command_starts_no_sender() -> None:
    """It has the job, and follows no pipeline."""
    lineage = OpenLineage(namespace="of a command")
    lineage.flush()
    assert made(_Sender, lineage) is None
