"""The spans, on a world in memory: one trace for each batch, whatever happens to it."""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.trace import StatusCode
from pyspark import cloudpickle

from sparkonce import steps
from sparkonce.errors import ConfigurationError, PrepareRejectedError
from sparkonce.failpoints import InjectedError
from sparkonce.model import BranchId, Owner
from sparkonce.observe import OpenTelemetry, names
from sparkonce.observe.spans import Spans
from sparkonce.observe.tasks import TaskTrace
from sparkonce.observing import Event, Seen
from sparkonce.steps import step
from sparkonce.txn_log.sqlite import SqliteLog
from tests.support.telemetry import BATCHES, RUN_ID, InMemory, child_of, run
from tests.support.world import QUERY_ID, Process, World, at_point

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

BRANCH = BranchId(Owner("0" * 16, QUERY_ID), 0, 1, "left", 0, 1)


def trace_of(batch: int, spans: list[ReadableSpan]) -> list[ReadableSpan]:
    """The spans of the batch's trace."""
    (root,) = (s for s in spans if s.name == "deliver orders" and of(s)[names.BATCH] == batch)
    assert root.parent is None
    return [s for s in spans if s.context.trace_id == root.context.trace_id]


def of(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_trace_of_a_batch(world: World, seen: InMemory) -> None:
    """A span for each step and sink; the tasks' spans under the step that ran the tasks."""
    run(world)
    spans = seen.spans()
    trace = trace_of(0, spans)
    assert Counter((s.name, child_of(s, spans)) for s in trace) == Counter(
        {
            ("deliver orders", None): 1,
            ("look orders", "deliver orders"): 2,
            ("tasks orders", "deliver orders"): 1,
            ("open left", "tasks orders"): 2,
            ("open right", "tasks orders"): 2,
            ("write left", "tasks orders"): 2,
            ("write right", "tasks orders"): 2,
            ("prepare left", "tasks orders"): 2,
            ("prepare right", "tasks orders"): 2,
            ("vote left", "deliver orders"): 1,
            ("vote right", "deliver orders"): 1,
            ("decide orders", "deliver orders"): 1,
            ("commit left", "deliver orders"): 1,
            ("commit right", "deliver orders"): 1,
            ("publish left", "deliver orders"): 1,
            ("publish right", "deliver orders"): 1,
            ("complete orders", "deliver orders"): 1,
            ("sweep left", "deliver orders"): 1,
            ("sweep right", "deliver orders"): 1,
        }
    )
    assert {s.context.trace_id for s in trace}.isdisjoint(
        s.context.trace_id for s in trace_of(1, spans)
    )


def test_attributes_link_to_the_query(world: World, seen: InMemory) -> None:
    run(world)
    spans = seen.spans()
    (root,) = (s for s in trace_of(0, spans) if s.parent is None)
    head = SqliteLog(world.path).head("orders")
    assert head is not None
    assert of(root) == {
        names.PIPELINE: "orders",
        names.STEP: "deliver",
        names.BATCH: 0,
        names.QUERY: QUERY_ID,
        names.RUN: RUN_ID,
        names.TOKEN: head.token,
    }
    (complete,) = (s for s in trace_of(0, spans) if s.name.startswith("complete"))
    assert of(complete)[names.STATE] == "complete"


def test_spans_lie_inside_their_parents(world: World, seen: InMemory) -> None:
    """Within a millisecond: the ends are taken one after the other."""
    run(world)
    spans = seen.spans()
    by_id = {s.context.span_id: s for s in spans}
    for span in spans:
        assert span.start_time is not None
        assert span.end_time is not None
        if span.parent is not None:
            parent = by_id[span.parent.span_id]
            assert parent.start_time is not None
            assert parent.end_time is not None
            assert parent.start_time - 10**6 <= span.start_time
            assert span.end_time <= parent.end_time + 10**6


def test_writes_of_a_branch_are_one_span(seen: InMemory) -> None:
    """From the first record batch to the last, however many there were, and `idle` has none."""
    with step("tasks", batch=0, pipeline="orders"):
        for name in ("open", "write", "write", "idle", "write", "prepare"):
            with step(name, batch=0, of=BRANCH, partition=3):
                time.sleep(0.002)
    open_, write, prepare, _ = seen.spans()
    assert [s.name for s in (open_, write, prepare)] == ["open left", "write left", "prepare left"]
    assert of(write)[names.CALLS] == 3
    assert of(write)[names.PARTITION] == 3
    assert of(write)[names.BRANCH] == "t1.left.p0.a1"
    assert write.start_time is not None
    assert write.end_time is not None
    assert write.end_time - write.start_time >= 8_000_000
    assert 0.006 <= of(write)[names.BUSY] < (write.end_time - write.start_time) / 1e9


def test_commit_after_the_checkpoint_is_in_the_trace_of_its_batch(
    tmp_path: Path, seen: InMemory
) -> None:
    """Batch 0 is decided while batch 1 is delivered, and batch 1 after its `deliver` has ended."""
    world = World(tmp_path, BATCHES, commit="after_checkpoint")
    run(world)
    spans = seen.spans()
    for batch in (0, 1):
        trace = trace_of(batch, spans)
        assert {of(s).get(names.BATCH, batch) for s in trace} == {batch}
        found = {s.name for s in trace}
        assert {"hold orders", "decide orders", "commit left", "complete orders"} <= found


def test_batch_that_fails(world: World, seen: InMemory) -> None:
    def fail() -> None:
        raise InjectedError("password=secret")

    with at_point("vote.after", fail), pytest.raises(InjectedError):
        world.start(Process())
    trace = trace_of(0, seen.spans())
    (root,) = (s for s in trace if s.parent is None)
    assert root.status.status_code is StatusCode.ERROR
    assert root.status.description == "InjectedError"  # the text of an error that is not ours
    assert of(root)[names.ERROR] == "InjectedError"
    assert "commit left" not in {s.name for s in trace}
    assert "sweep left" in {s.name for s in trace}


def test_text_of_our_own_errors_is_shown(world: World, seen: InMemory) -> None:
    def fail(verb: str) -> None:
        if verb == "preCommit":
            raise PrepareRejectedError("the disk is full", BRANCH)

    world.on_call(fail, "left")
    with pytest.raises(PrepareRejectedError):
        world.start(Process())
    failed = [s for s in seen.spans() if s.name == "prepare left"]
    assert failed
    assert failed[0].status.description == "the disk is full"


def test_recovery_has_a_trace_of_its_own(world: World, seen: InMemory) -> None:
    with at_point("decide.after", stop_now), pytest.raises(KeyboardInterrupt):
        world.start(Process())
    seen.exporter.clear()
    run(world)
    spans = seen.spans()
    (finish,) = (s for s in spans if s.name == "finish orders")
    assert child_of(finish, spans) == "recover orders"
    assert {child_of(s, spans) for s in spans if s.name == "commit left"} == {
        "finish orders",
        "deliver orders",
    }


def stop_now() -> None:
    raise KeyboardInterrupt


def test_end_that_was_dropped_harms_no_later_batch(seen: InMemory) -> None:
    """The queue was full: the next batch ends what is still open."""
    spans = Spans(seen.telemetry.tracer_provider.get_tracer("test"))  # type: ignore[union-attr]
    spans.follow("orders", QUERY_ID, RUN_ID)
    for batch in (0, 1):
        spans.take(Seen(Event.STARTED, step("deliver", batch=batch, pipeline="orders"), 1, None))
    spans.take(Seen(Event.FINISHED, step("decide", batch=1, pipeline="orders"), 2, None))
    spans.take(Seen(Event.FINISHED, step("tasks", batch=1, pipeline="orders"), 2, None))
    finished = seen.spans()
    assert [s.name for s in finished] == ["deliver orders", "decide orders", "tasks orders"]
    assert {of(s)[names.BATCH] for s in finished[1:]} == {1}
    assert finished[1].parent is not None


# -- what goes to the tasks ------------------------------------------------------------------------


def test_trace_for_the_tasks_is_the_span_that_runs_them(seen: InMemory) -> None:
    with step("tasks", batch=3, pipeline="orders"):
        seen.telemetry.flush()  # on a busy machine the span comes too late for its tasks
        trace = seen.telemetry.for_tasks("orders", 3)
    assert isinstance(trace, TaskTrace)
    (span,) = seen.spans()
    assert f"{span.context.span_id:016x}" in trace.carrier["traceparent"]
    assert cloudpickle.loads(cloudpickle.dumps(trace)) == trace


def test_no_trace_goes_to_tasks_that_belong_to_no_span(seen: InMemory) -> None:
    assert seen.telemetry.for_tasks("orders", 3) is None
    with step("tasks", batch=3, pipeline="other"):
        assert seen.telemetry.for_tasks("other", 3) is None


def test_batch_waits_for_its_span_once_at_most(seen: InMemory) -> None:
    """An exporter that hangs delays one batch by a moment, and no other."""
    spans = Spans(seen.telemetry.tracer_provider.get_tracer("test"))  # type: ignore[union-attr]
    spans.follow("orders", QUERY_ID, RUN_ID)
    took = []
    for batch in range(3):
        spans.expect(step("tasks", batch=batch, pipeline="orders"))
        began = time.monotonic()
        assert spans.for_tasks("orders") is None
        took.append(time.monotonic() - began)
    assert 0.04 < took[0] < 1
    assert max(took[1:]) < 0.02


def test_task_without_a_receiver_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is imported, and no step is followed."""
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.setattr("sparkonce.observe.tasks.sys", SimpleNamespace(modules={}))
    monkeypatch.setattr("sparkonce.observe.tasks.once", lambda make: make())
    before = steps._hooks
    with TaskTrace({"traceparent": "00-1-1-01"}, "orders"):
        assert steps._hooks == before


def test_missing_library_is_one_line_of_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sparkonce.observe.providers", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'sparkonce\[otel\]'"):
        OpenTelemetry()
