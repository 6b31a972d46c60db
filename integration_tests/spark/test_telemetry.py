"""Spans of real Spark jobs, in a real receiver of OTLP over HTTP; and receivers that fail."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.support.telemetry import Receiver, Span

from sparkonce.observe import names

ROOT = Path(__file__).parents[2]


def run_job(folder: Path, endpoint: str) -> dict[str, Any]:
    """The figures that the job prints."""
    environment = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "integration_tests.support.traced_job", str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def trace_of(batch: int, spans: list[Span]) -> list[Span]:
    (root,) = (
        s for s in spans if s.name == "deliver orders" and s.attributes[names.BATCH] == batch
    )
    assert not root.parent_id
    return [span for span in spans if span.trace_id == root.trace_id]


def test_trace_of_a_batch_has_the_spans_of_its_executors(tmp_path: Path) -> None:
    """A span for each step and sink; those of the tasks come from other processes."""
    with Receiver() as receiver:
        figures = run_job(tmp_path, receiver.url)
        spans = receiver.spans
    assert figures["rows"] == list(range(8))
    assert names.SINK_ROWS in receiver.metrics
    for batch in range(4):
        trace = trace_of(batch, spans)
        by_id = {span.span_id: span for span in trace}
        (root,) = (span for span in trace if not span.parent_id)
        assert root.attributes[names.QUERY] == figures["query_id"]
        assert root.attributes[names.RUN] == figures["run_id"]
        found = Counter((span.name, by_id[span.parent_id].name) for span in trace if span.parent_id)
        for sink in ("file", "sqlite"):
            assert found[f"vote {sink}", "deliver orders"] == 1
            assert found[f"commit {sink}", "deliver orders"] == 1
            for step in ("open", "write", "prepare"):
                assert 1 <= found[f"{step} {sink}", "tasks orders"] <= 2
        assert found["decide orders", "deliver orders"] == 1
        assert found["complete orders", "deliver orders"] == 1
        (tasks,) = (span for span in trace if span.name == "tasks orders")
        written = [span for span in trace if span.parent_id == tasks.span_id]
        processes = {span.resource["process.pid"] for span in written}
        driver = root.resource["process.pid"]
        assert processes == {driver} if batch == 3 else driver not in processes
        for span in written:
            assert tasks.began_ns <= span.began_ns <= span.ended_ns <= tasks.ended_ns + 10**6


@pytest.mark.parametrize("is_hanging", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_receiver_that_hangs_or_is_dead(is_hanging: bool, tmp_path: Path) -> None:
    """Every row is there, and the end of the pipeline waits for a few seconds at most."""
    with Receiver() as receiver, socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # nothing listens
        receiver.hang.set()
        url = receiver.url if is_hanging else f"http://127.0.0.1:{unused.getsockname()[1]}"
        figures = run_job(tmp_path, url)
    assert figures["rows"] == list(range(8))
    assert bool(receiver.requests) is is_hanging
    assert figures["close_s"] < 6
