"""Where metrics and spans go: what the user gave, what is set globally, or what OTEL_* names.

    given to OpenTelemetry(…) ─► set by the application (opentelemetry-instrument) ─► OTEL_* ─► none

A provider of ours exports in threads of its own, from bounded queues, over HTTP. It is made once in
a process, so that a pipeline that is recreated continues its counters.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from typing import TYPE_CHECKING, Final

from opentelemetry import metrics, trace
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from prometheus_client import CollectorRegistry, start_http_server

from sparkonce import __version__
from sparkonce.observe.environment import is_exported
from sparkonce.observe.names import SCOPE
from sparkonce.once import once

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter
    from opentelemetry.trace import Tracer

logger = logging.getLogger("sparkonce")

_SPANS_EVERY_MS: Final = 500.0
"""Spark ends Python workers without a word, so spans wait only for a moment."""

_REQUEST_S: Final = 10
"""After how many seconds without a response an export fails, unless OTEL_* sets another time."""


def tracer(given: trace.TracerProvider | None) -> Tracer | None:
    """The tracer; None where no spans are sent.

    Args:
        given: the user's own provider.
    """
    provider = given or _global_tracer_provider()
    if provider is None and is_exported("TRACES"):
        provider = once(_own_tracer_provider)
    return None if provider is None else provider.get_tracer(SCOPE, __version__)


def meter(given: metrics.MeterProvider | None, prometheus: tuple[str, int] | None) -> Meter | None:
    """The meter; None where no metrics are sent.

    Args:
        given: the user's own provider.
        prometheus: host and port of the endpoint to open.
    """
    provider = given or (None if prometheus is not None else _global_meter_provider())
    if provider is None and (prometheus is not None or is_exported("METRICS")):
        provider = once(_own_meter_provider, prometheus)
    return None if provider is None else provider.get_meter(SCOPE, __version__)


def flush(timeout_s: float) -> None:
    """Let the providers that were made here send what waits.

    Args:
        timeout_s: after which to go on, which the SDK itself may exceed.
    """

    def send() -> None:
        for pushes in list(once(_Own).pushing):
            try:
                pushes.force_flush(int(timeout_s * 1000))
            except Exception:
                logger.debug("telemetry was not sent", exc_info=True)

    thread = threading.Thread(target=send, name="sparkonce-flush", daemon=True)
    thread.start()
    thread.join(timeout_s)


class _Own:
    """What sends from this process by itself.

    The endpoint is not among it: it would keep the values that it flushes, and show them twice.
    """

    def __init__(self) -> None:
        self.pushing: list[TracerProvider | MetricReader] = []


def _global_tracer_provider() -> trace.TracerProvider | None:
    found = trace.get_tracer_provider()
    return None if isinstance(found, trace.ProxyTracerProvider) else found


def _global_meter_provider() -> metrics.MeterProvider | None:
    found = metrics.get_meter_provider()
    # The API exports no name for the one that waits for a provider.
    return None if type(found).__name__ == "_ProxyMeterProvider" else found


def _own_tracer_provider() -> TracerProvider:
    # No handler at exit: it would wait half a minute for a collector that hangs.
    provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
    delay_ms = None if "OTEL_BSP_SCHEDULE_DELAY" in os.environ else _SPANS_EVERY_MS
    exporter = OTLPSpanExporter()
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=delay_ms))
    once(_Own).pushing.append(provider)
    return provider


def _own_meter_provider(prometheus: tuple[str, int] | None) -> MeterProvider:
    readers: list[MetricReader] = []
    if is_exported("METRICS"):
        readers.append(PeriodicExportingMetricReader(OTLPMetricExporter()))
        once(_Own).pushing += readers
    if prometheus is not None:
        readers.append(_endpoint(*prometheus))
    return MeterProvider(readers, resource=_resource(), shutdown_on_exit=False)


def _endpoint(host: str, port: int) -> MetricReader:
    """Metrics as Prometheus reads them; a port that is taken stops no pipeline."""
    registry = CollectorRegistry()
    reader = PrometheusMetricReader(registry=registry, scope_info_enabled=False)
    try:
        start_http_server(port, host, registry)
    except OSError as error:
        logger.error(  # noqa: TRY400 - the error says it all
            "the endpoint for Prometheus cannot listen on %s:%d: %s. The pipeline runs without it: "
            "give it another prometheus_port=, or end the process that has this one",
            host,
            port,
            error,
        )
    return reader


def _resource() -> Resource:
    """This process, as OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES describe it."""
    of_process = {"host.name": socket.gethostname(), "process.pid": os.getpid()}
    named = os.environ.get("OTEL_SERVICE_NAME", "") + os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    is_named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in named
    return Resource.create(of_process if is_named else {**of_process, "service.name": "sparkonce"})
