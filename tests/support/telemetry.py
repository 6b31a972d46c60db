"""Receivers of metrics and spans: in memory, and a server of OTLP over HTTP."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from sparkonce.observe import OpenTelemetry
from tests.support.world import QUERY_ID, Process, World

RUN_ID = "99999999-8888-7777-6666-555555555555"

BATCHES = [[[1, 2], [3]], [[4], []]]


@dataclass
class InMemory:
    """Telemetry whose metrics and spans stay in this process."""

    reader: InMemoryMetricReader = field(default_factory=InMemoryMetricReader)
    exporter: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)

    def __post_init__(self) -> None:
        tracers = TracerProvider()
        tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.telemetry = OpenTelemetry(
            tracer_provider=tracers, meter_provider=MeterProvider([self.reader])
        )
        self.telemetry.follow("orders", QUERY_ID, RUN_ID)

    def points(self, name: str) -> dict[tuple[str, ...], Any]:
        """The data points of a metric, by the values of their attributes, sorted by their names."""
        self.telemetry.flush()
        data = self.reader.get_metrics_data()
        scopes = [s for r in data.resource_metrics for s in r.scope_metrics] if data else []
        found = [m for scope in scopes for m in scope.metrics if m.name == name]
        return {
            tuple(str(value) for _, value in sorted((point.attributes or {}).items())): point
            for metric in found
            for point in metric.data.data_points
        }

    def values(self, name: str) -> dict[tuple[str, ...], Any]:
        """The values of a counter or gauge, like `points`, without the pipeline."""
        return {
            tuple(part for part in key if part != "orders"): point.value
            for key, point in self.points(name).items()
        }

    def spans(self) -> list[ReadableSpan]:
        self.telemetry.flush()
        return list(self.exporter.get_finished_spans())


def run(world: World) -> None:
    """Run the query to its end."""
    world.start(Process())
    world.check()


def child_of(span: ReadableSpan, spans: list[ReadableSpan]) -> str | None:
    """The name of the span's parent."""
    if span.parent is None:
        return None
    return next(s.name for s in spans if s.context.span_id == span.parent.span_id)


# -- a server --------------------------------------------------------------------------------------


@dataclass
class Span:
    """A span as it came over the wire."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: Mapping[str, Any]
    resource: Mapping[str, Any]
    began_ns: int
    ended_ns: int


class Receiver:
    """A collector: receives OTLP over HTTP, as protobuf.

    Attributes:
        spans: what came.
        metrics: the names of the metrics that came.
        requests: how many requests came.
        hang: while it is set, no request gets a response.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.metrics: set[str] = set()
        self.requests = 0
        self.hang = threading.Event()
        self._released = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.requests += 1
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                if receiver.hang.is_set():
                    receiver._released.wait()
                    return
                if self.path == "/v1/traces":
                    receiver.spans += decoded(body)
                elif self.path == "/v1/metrics":
                    receiver.metrics |= metric_names(body)
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def wait_for(self, is_there: Callable[[list[Span]], bool], timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_there(list(self.spans)):
            assert time.monotonic() < deadline, sorted(span.name for span in self.spans)
            time.sleep(0.05)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()


def decoded(body: bytes) -> Iterator[Span]:
    request = ExportTraceServiceRequest.FromString(body)
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Span(
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    attributes(span.attributes),
                    attributes(resource.resource.attributes),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                )


def metric_names(body: bytes) -> set[str]:
    request = ExportMetricsServiceRequest.FromString(body)
    scopes = [scope for resource in request.resource_metrics for scope in resource.scope_metrics]
    return {metric.name for scope in scopes for metric in scope.metrics}


def attributes(found: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in found}
