"""`OpenTelemetry`, which a user hands to a pipeline: settings, and the observers of this process.

steps ─┬─► queue ─► thread ─► `Metrics` ─► the meter
       └─► queue ─► thread ─► `Spans`   ─► the tracer
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sparkonce import steps
from sparkonce.errors import ConfigurationError
from sparkonce.observe.harmless import harmless
from sparkonce.observing import Courier, Facts, Seconds, Shown
from sparkonce.once import forget, made, once

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

    from sparkonce.observe.metrics import Metrics
    from sparkonce.observe.spans import Spans

logger = logging.getLogger("sparkonce")

_FLUSH_S: Final = 1.0
"""How long the end of a pipeline waits for each queue; for the exporters, twice as long."""


@dataclass(frozen=True)
class OpenTelemetry:
    """Metrics and traces of a pipeline: ``ExactlyOnce(…, telemetry=OpenTelemetry())``.

    By default they go where the application has sent its own, such as `opentelemetry-instrument`
    sets it up; otherwise to the receiver of OTLP that OTEL_EXPORTER_OTLP_ENDPOINT names. Executors
    send their spans to the receiver that their own environment names. No batch waits for any of
    it, and none fails with it.

    Args:
        prometheus_port: of an endpoint on the driver, ``/metrics``, for Prometheus; default: none.
        prometheus_host: the address on which it listens; default: this machine only.
        tracer_provider: gets the spans, in place of the application's.
        meter_provider: gets the metrics, in place of the application's and of Prometheus.

    Raises:
        ConfigurationError: OpenTelemetry is not installed.
    """

    prometheus_port: int | None = None
    prometheus_host: str = "localhost"
    tracer_provider: TracerProvider | None = None
    meter_provider: MeterProvider | None = None

    def __post_init__(self) -> None:
        try:
            import sparkonce.observe.providers  # noqa: F401, PLC0415 - an extra
        except ImportError as error:
            raise ConfigurationError(
                f"OpenTelemetry needs {error.name!r}: pip install 'sparkonce[otel]'"
            ) from error

    @harmless
    def follow(self, pipeline: str, query_id: str, run_id: str) -> None:
        """See `sparkonce.observing.Telemetry`."""
        once(_Observers, self).follow(pipeline, query_id, run_id)

    def describe(self, pipeline: str, facts: Facts) -> None:
        """Metrics and traces need none of it."""

    @harmless
    def for_tasks(self, pipeline: str, batch_id: int) -> AbstractContextManager[object] | None:
        """See `sparkonce.observing.Telemetry`."""
        del batch_id
        spans = once(_Observers, self).spans
        return None if spans is None else spans.for_tasks(pipeline)

    @harmless
    def tasks_ended(self, pipeline: str, seconds: Iterable[Seconds]) -> None:
        """See `sparkonce.observing.Telemetry`."""
        once(_Observers, self).tasks_ended(pipeline, seconds)

    @harmless
    def flush(self) -> None:
        """See `sparkonce.observing.Telemetry`. A command follows no pipeline: it sends nothing."""
        observers = made(_Observers, self)
        if observers is not None:
            observers.flush()

    def end(self) -> None:
        """Follow no pipeline any more, and send what waits; for tests."""
        observers = forget(_Observers, self)
        if observers is not None:
            observers.end()


class _Tracing(Shown):
    """A hook that also prepares, in the batch's own thread, for tasks that will ask for a span."""

    def __init__(self, courier: Courier[Any], spans: Spans) -> None:
        super().__init__(courier)
        self._spans = spans

    def started(self, entered: steps.step) -> None:
        if entered.name != "tasks":
            super().started(entered)
            return
        self._spans.expect(entered)
        super().started(entered)
        self._courier.hurry()


class _Observers:
    """What follows the pipelines of this process that have the same settings."""

    def __init__(self, settings: OpenTelemetry) -> None:
        from sparkonce.observe.metrics import Metrics  # noqa: PLC0415 - an extra
        from sparkonce.observe.providers import meter, tracer  # noqa: PLC0415 - an extra
        from sparkonce.observe.spans import Spans  # noqa: PLC0415 - an extra

        port = settings.prometheus_port
        endpoint = None if port is None else (settings.prometheus_host, port)
        own_meter = meter(settings.meter_provider, endpoint)
        own_tracer = tracer(settings.tracer_provider)
        self.metrics: Metrics | None = None if own_meter is None else once(Metrics, own_meter)
        self.spans: Spans | None = None if own_tracer is None else Spans(own_tracer)
        self._couriers: list[Courier[Any]] = []
        self._hooks: list[steps.Hook] = []
        if self.metrics is not None:
            self._add(Shown(self._courier(self.metrics.take, "metrics")))
        if self.spans is not None:
            self._add(_Tracing(self._courier(self.spans.take, "traces"), self.spans))
        if not self._hooks:
            logger.warning(
                "telemetry= has nowhere to go: set OTEL_EXPORTER_OTLP_ENDPOINT where the driver "
                "starts, or give it a prometheus_port="
            )
        atexit.register(self.flush)

    def _courier(self, take: Callable[[Any], None], whose: str) -> Courier[Any]:
        courier: Courier[Any] = Courier(take, whose)
        self._couriers.append(courier)
        return courier

    def _add(self, hook: steps.Hook) -> None:
        self._hooks.append(hook)
        steps.add_hook(hook)

    def follow(self, pipeline: str, query_id: str, run_id: str) -> None:
        if self.metrics is not None:
            self.metrics.follow(pipeline)
        if self.spans is not None:
            self.spans.follow(pipeline, query_id, run_id)

    def tasks_ended(self, pipeline: str, seconds: Iterable[Seconds]) -> None:
        if self.metrics is not None:
            self.metrics.tasks_ended(pipeline, seconds)

    def flush(self) -> None:
        from sparkonce.observe.providers import flush  # noqa: PLC0415 - an extra

        for courier in self._couriers:
            courier.drain(_FLUSH_S)
        flush(2 * _FLUSH_S)

    def end(self) -> None:
        for hook in self._hooks:
            steps.remove_hook(hook)
        for courier in self._couriers:
            courier.end(_FLUSH_S)
        atexit.unregister(self.flush)
