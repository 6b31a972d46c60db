"""The metrics, on a world in memory: what each shows after what has happened."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sparkonce.errors import CommitUnresolvedError, FencedError, PreparedBranchLostError
from sparkonce.failpoints import InjectedError
from sparkonce.model import BranchId, Committable, Owner
from sparkonce.observe import names
from sparkonce.observe.metrics import Metrics
from sparkonce.observing import Seconds
from sparkonce.steps import step
from sparkonce.txn_log.sqlite import SqliteLog
from tests.support.telemetry import BATCHES, InMemory, run
from tests.support.world import QUERY_ID, Crash, Handle, MemorySink, Process, World, at_point

BRANCH = BranchId(Owner("0" * 16, QUERY_ID), 0, 1, "left", 0, 1)


def crash_at(world: World, point: str) -> None:
    process = Process()
    with at_point(point, process.crash), pytest.raises(Crash):
        world.start(process)


def states(seen: InMemory) -> dict[str, int]:
    """The states that batches have reached."""
    return {key: n for (key,), n in seen.values(names.BATCH_TRANSITIONS).items() if n}


def token_of(world: World) -> int:
    with closing(SqliteLog(world.path)) as log:
        head = log.head("orders")
    assert head is not None
    return head.token


def test_batches_that_end_well(world: World, seen: InMemory) -> None:
    run(world)
    assert states(seen) == {"decided": 2, "complete": 2}
    assert seen.values(names.SINK_ROWS) == {("left",): 4, ("right",): 4}
    assert all(size > 0 for size in seen.values(names.SINK_IO).values())
    assert seen.values(names.BATCH_UNFINISHED) == {("prepared",): 0, ("decided",): 0}
    assert seen.values(names.UNFINISHED_AGE) == {(): 0}
    assert 0 <= seen.values(names.COMPLETE_AGE)[()] < 60
    assert seen.values(names.DRIVER_TOKEN) == {(): token_of(world)}
    assert seen.values(names.DRIVER_FENCED) == {(): 0}
    assert seen.values(names.BRANCH_ABORTED) == {("left",): 0, ("right",): 0}
    assert seen.values(names.BRANCH_REWRITTEN) == {("left",): 0, ("right",): 0}
    assert set(seen.values(names.STEP_RETRIES).values()) == {0}


def test_counters_of_trouble_are_zero_before_the_first(seen: InMemory) -> None:
    """An alert on an increase does not see the first one of a series that was not there."""
    assert seen.values(names.DRIVER_FENCED) == {(): 0}
    assert seen.values(names.BATCH_TRANSITIONS)["aborted",] == 0


def test_counter_of_retries_is_zero_while_a_call_is_repeated(world: World, seen: InMemory) -> None:
    """A scrape during the first outage finds the series, and the next one its increase."""
    during: list[dict[tuple[str, ...], float]] = []

    def look(verb: str) -> None:
        if verb == "commit":
            seen.telemetry.flush()
            during.append(seen.values(names.STEP_RETRIES))

    world.on_call(look, "left")
    run(world)
    assert during[0]["left", "commit"] == 0


def test_each_step_of_each_sink_has_a_duration(world: World, seen: InMemory) -> None:
    run(world)
    found = {key: point.count for key, point in seen.points(names.STEP_DURATION).items()}
    assert found["orders", "deliver"] == 2
    assert found["orders", "tasks"] == 2
    assert found["orders", "left", "commit"] == 2
    assert found["orders", "right", "vote"] == 2
    assert seen.points(names.STEP_DURATION)["orders", "deliver"].sum > 0
    assert not any("write" in key for key in found)  # the tasks' own come by `tasks_ended`


def test_durations_of_tasks(seen: InMemory) -> None:
    seen.telemetry.tasks_ended("orders", [Seconds("left", "write", (0.5, 1.5))])
    point = seen.points(names.STEP_DURATION)["orders", "left", "write"]
    assert (point.count, point.sum) == (2, 2.0)


def test_pipeline_that_nobody_follows_has_no_metrics(seen: InMemory) -> None:
    with step("commit", batch=1, pipeline="other"):
        pass
    assert seen.points(names.STEP_DURATION) == {}


def test_batch_that_fails_before_its_decision(world: World, seen: InMemory) -> None:
    def fail() -> None:
        raise InjectedError

    with at_point("vote.after", fail), pytest.raises(InjectedError):
        world.start(Process())
    assert states(seen) == {"aborted": 1}
    failed = seen.points(names.STEP_DURATION)["InjectedError", "orders", "deliver"]
    assert failed.count == 1
    assert seen.values(names.BRANCH_ABORTED) == {("left",): 2, ("right",): 2}


def test_driver_that_died_in_doubt(world: World, seen: InMemory) -> None:
    """The next driver finds what is unfinished, shows its age, and finishes it."""
    crash_at(world, "decide.after")
    seen.telemetry.end()
    seen = InMemory()  # as in a process of its own, which knows nothing of the first
    found: dict[str, Any] = {}

    def look() -> None:
        found["unfinished"] = seen.values(names.BATCH_UNFINISHED)
        found["age"] = seen.values(names.UNFINISHED_AGE)
        found["in doubt"] = seen.values(names.BRANCH_IN_DOUBT)

    with at_point("finish.before", look):
        run(world)
    assert found["unfinished"] == {("prepared",): 0, ("decided",): 1}
    assert found["age"][()] > 0
    assert found["in doubt"] == {("left",): 2, ("right",): 2}
    assert seen.values(names.BATCH_UNFINISHED) == {("prepared",): 0, ("decided",): 0}
    assert seen.values(names.BRANCH_IN_DOUBT) == {}
    assert seen.values(names.DRIVER_TOKEN) == {(): token_of(world)}
    seen.telemetry.end()


def test_branch_that_expires(world: World, seen: InMemory) -> None:
    """The time left is that of the branch that its server drops first."""

    class Expiring(MemorySink):
        def preCommit(self, handle: Handle) -> Committable:
            committable = super().preCommit(handle)
            return Committable(committable.branch_id, safe_until=time.time() + 100)

    world.kinds["left"] = Expiring
    crash_at(world, "commit.before")
    left: dict[str, dict[tuple[str, ...], float]] = {}
    with at_point("finish.before", lambda: left.update(v=seen.values(names.BRANCH_TIME_LEFT))):
        run(world)
    assert left["v"].keys() == {("left",)}
    assert 90 < left["v"]["left",] < 100


def test_batch_that_waits_for_the_checkpoint(tmp_path: Path, seen: InMemory) -> None:
    world = World(tmp_path, BATCHES, commit="after_checkpoint")
    run(world)
    assert states(seen) == {"prepared": 2, "decided": 2, "complete": 2}


def test_branch_that_is_lost_and_rewritten(world: World, seen: InMemory) -> None:
    crash_at(world, "decide.after")
    world.stores["left"].prepared.popitem()
    run(world)
    assert seen.values(names.BRANCH_LOST)["left",] >= 1
    assert seen.values(names.BRANCH_REWRITTEN) == {("left",): 1, ("right",): 0}
    assert states(seen) == {"decided": 2, "complete": 2}


def test_lost_branch_without_a_replay(world: World, seen: InMemory) -> None:
    crash_at(world, "decide.after")
    world.stores["left"].prepared.clear()
    world.spark.committed = 0
    with pytest.raises(PreparedBranchLostError):
        world.start(Process())
    assert seen.values(names.BATCH_UNFINISHED)["decided",] == 1
    assert seen.values(names.BRANCH_LOST) == {("left",): 2, ("right",): 0}


def test_commit_that_is_repeated(world: World, seen: InMemory) -> None:
    left = [1, 2]

    def fail(verb: str) -> None:
        if verb == "commit" and left:
            left.pop()
            raise CommitUnresolvedError("no response", BRANCH)

    world.on_call(fail, "left")
    run(world)
    assert {key: n for key, n in seen.values(names.STEP_RETRIES).items() if n} == {
        ("left", "commit"): 1
    }


def test_zombie(world: World, seen: InMemory) -> None:
    """A driver that was replaced counts once, and shows no age of what is another driver's."""
    old = world.driver(Process())
    batch = world.batch(Process())
    world.driver(Process())
    seen.telemetry.flush()
    for _ in range(2):
        with pytest.raises(FencedError):
            old.deliver(batch)
    assert seen.values(names.DRIVER_FENCED) == {(): 1}
    assert seen.values(names.UNFINISHED_AGE) == {}
    assert seen.values(names.COMPLETE_AGE) == {}
    assert "aborted" not in states(seen)


def test_age_before_the_first_complete_batch_counts_from_the_start() -> None:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    now, reader = [1000.0], InMemoryMetricReader()
    metrics = Metrics(MeterProvider([reader]).get_meter("test"), clock=lambda: now[0])
    metrics.follow("orders")
    now[0] = 1060.0
    data = reader.get_metrics_data()
    assert data is not None
    (age,) = (
        point.value
        for metric in data.resource_metrics[0].scope_metrics[0].metrics
        if metric.name == names.COMPLETE_AGE
        for point in metric.data.data_points
    )
    assert age == 60


def test_every_attribute_is_in_the_list(world: World, seen: InMemory) -> None:
    crash_at(world, "commit.before")
    run(world)
    seen.telemetry.flush()
    data = seen.reader.get_metrics_data()
    assert data is not None
    metrics = data.resource_metrics[0].scope_metrics[0].metrics
    assert {metric.name for metric in metrics} <= names.METRICS.keys()
    for metric in metrics:
        declared = names.METRICS[metric.name]
        assert (metric.unit, metric.description) == (declared.unit, declared.description)
        for point in metric.data.data_points:
            assert set(point.attributes or {}) <= set(declared.attributes), metric.name
