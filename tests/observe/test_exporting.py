"""Where metrics and spans go, and that no batch depends on it."""

from __future__ import annotations

import logging
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from sparkonce.observe import OpenTelemetry, names, providers
from sparkonce.observe.environment import is_exported
from sparkonce.once import forget, once
from tests.support.telemetry import RUN_ID, Receiver, run
from tests.support.world import QUERY_ID, World


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No OTEL_* from outside, and no provider of another test.

    A thread that goes on exporting draws random waits, which Hypothesis takes for a test's own.
    """
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    before = set(threading.enumerate())
    yield
    for pushes in once(providers._Own).pushing:
        pushes.shutdown()
    left = [t for t in threading.enumerate() if t not in before and t.name.startswith("Otel")]
    for thread in left:
        thread.join(60)
        assert not thread.is_alive(), thread.name
    forget(providers._own_tracer_provider)
    forget(providers._own_meter_provider, None)
    forget(providers._Own)


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with Receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        yield receiver


def followed(telemetry: OpenTelemetry) -> OpenTelemetry:
    telemetry.follow("orders", QUERY_ID, RUN_ID)
    return telemetry


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


# -- where it goes ---------------------------------------------------------------------------------


def test_receiver_that_the_environment_names(world: World, receiver: Receiver) -> None:
    """Metrics and spans, with the name of the service."""
    telemetry = followed(OpenTelemetry())
    run(world)
    telemetry.flush()
    receiver.wait_for(lambda spans: sum(span.name == "deliver orders" for span in spans) == 2)
    assert {span.resource["service.name"] for span in receiver.spans} == {"sparkonce"}
    assert names.BATCH_TRANSITIONS in receiver.metrics
    assert receiver.metrics <= names.METRICS.keys()
    telemetry.end()


def test_providers_of_the_application(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, exporter = InMemoryMetricReader(), InMemorySpanExporter()
    tracers = TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", tracers)
    monkeypatch.setattr(metrics._internal, "_METER_PROVIDER", MeterProvider([reader]))
    telemetry = followed(OpenTelemetry())
    run(world)
    telemetry.end()
    assert "deliver orders" in {span.name for span in exporter.get_finished_spans()}
    data = reader.get_metrics_data()
    assert data is not None
    assert data.resource_metrics[0].scope_metrics[0].scope.name == names.SCOPE


def test_telemetry_without_a_receiver_is_logged(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    telemetry = followed(OpenTelemetry())
    run(world)
    assert telemetry.for_tasks("orders", 0) is None
    assert "set OTEL_EXPORTER_OTLP_ENDPOINT" in caplog.text
    telemetry.end()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c:4318/v1/metrics"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_EXPORTER": "console"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_environment(
    variables: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_exported("TRACES") is expected


# -- Prometheus ------------------------------------------------------------------------------------


def test_endpoint_for_prometheus(world: World) -> None:
    """Scraped over HTTP: every metric of the list that this run has, under the documented name."""
    port = free_port()
    telemetry = followed(OpenTelemetry(prometheus_port=port))
    run(world)
    telemetry.flush()
    with urllib.request.urlopen(f"http://localhost:{port}/metrics") as response:
        text = response.read().decode()
    found = [
        sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("sparkonce")
    ]
    series = [(sample.name, *sorted(sample.labels.items())) for sample in found]
    assert len(set(series)) == len(series)
    samples = {sample.name: sample for sample in found}
    absent = {names.BRANCH_IN_DOUBT, names.BRANCH_TIME_LEFT, names.STEP_RETRIES}
    for name in names.METRICS.keys() - absent:
        suffix = "_count" if names.METRICS[name].kind == "histogram" else ""
        sample = samples[names.prometheus_name(name) + suffix]
        assert sample.labels["sparkonce_pipeline_name"] == "orders"
    assert len({names.prometheus_name(name) for name in names.METRICS}) == len(names.METRICS)
    telemetry.end()


def test_endpoint_is_off_by_default(world: World) -> None:
    before = {thread.name for thread in threading.enumerate()}
    telemetry = followed(OpenTelemetry(meter_provider=MeterProvider()))
    run(world)
    telemetry.end()
    new = {thread.name for thread in threading.enumerate()} - before
    assert not any("serve_forever" in name for name in new)


def test_port_that_is_taken_stops_no_pipeline(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        telemetry = followed(OpenTelemetry(prometheus_port=port, prometheus_host="127.0.0.1"))
        run(world)
    assert f"cannot listen on 127.0.0.1:{port}" in caplog.text
    telemetry.end()


def test_pipeline_that_is_recreated_keeps_its_endpoint(world: World) -> None:
    """As in a notebook: a second object with the same port continues the counters."""
    port = free_port()
    telemetry = followed(OpenTelemetry(prometheus_port=port))
    run(world)
    again = followed(OpenTelemetry(prometheus_port=port))
    again.flush()
    with urllib.request.urlopen(f"http://localhost:{port}/metrics") as response:
        text = response.read().decode()
    assert 'sparkonce_batch_state="complete",sparkonce_pipeline_name="orders"} 2.0' in text
    telemetry.end()


# -- a collector that hangs or dies ----------------------------------------------------------------


@pytest.mark.parametrize("is_hanging", [True, False])
def test_collector_that_hangs_or_is_dead(
    is_hanging: bool, world: World, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every batch is delivered, none waits, and the end of the pipeline waits for a moment."""
    if is_hanging:
        receiver.hang.set()
    else:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    telemetry = followed(OpenTelemetry())
    began = time.monotonic()
    run(world)
    assert time.monotonic() - began < 3
    began = time.monotonic()
    telemetry.flush()
    assert time.monotonic() - began < 5
    assert receiver.spans == []
    assert bool(receiver.requests) is is_hanging
    telemetry.end()


class Hanging(SpanExporter):
    """As an application may have set up: it exports in the thread that ends the span."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def export(self, spans: object) -> SpanExportResult:
        self.released.wait()
        return SpanExportResult.FAILURE


def test_exporter_without_a_queue_that_hangs(world: World) -> None:
    """The spans' thread hangs, the batches do not, and the metrics are those of a good run."""
    hanging, reader, tracers = Hanging(), InMemoryMetricReader(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(hanging))
    telemetry = OpenTelemetry(tracer_provider=tracers, meter_provider=MeterProvider([reader]))
    followed(telemetry)
    began = time.monotonic()
    run(world)
    assert time.monotonic() - began < 3
    telemetry.flush()
    text = str(reader.get_metrics_data())
    assert "'sparkonce.batch.state': 'complete'" in text
    hanging.released.set()
    telemetry.end()


def test_telemetry_that_raises(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be set up is logged, with its error; the pipeline runs."""

    def fail(*_: object) -> None:
        raise RuntimeError("no such protocol")

    monkeypatch.setattr(providers, "tracer", fail)
    with caplog.at_level(logging.WARNING):
        telemetry = followed(OpenTelemetry())
        run(world)
        assert telemetry.for_tasks("orders", 0) is None
        telemetry.tasks_ended("orders", [])
        telemetry.flush()
    assert "the pipeline goes on" in caplog.text
    assert "no such protocol" in caplog.text


def test_command_starts_no_telemetry(caplog: pytest.LogCaptureFixture) -> None:
    """It has the job, and follows no pipeline: the port belongs to the driver on its machine."""
    with socket.create_server(("localhost", 0)) as driver:
        OpenTelemetry(prometheus_port=driver.getsockname()[1]).flush()
    assert caplog.messages == []
