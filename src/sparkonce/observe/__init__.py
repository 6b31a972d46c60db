"""Metrics and traces of a pipeline, by OpenTelemetry; an extra: `pip install 'sparkonce[otel]'`.

    ExactlyOnce(…, telemetry=OpenTelemetry())
                                 │ follows the steps of the driver's process
                                 ├─► metrics: `names` lists them ─► OTLP, or Prometheus' endpoint
                                 └─► spans: one trace a batch ─► OTLP
    each task ─► `tasks.TaskTrace` ─► spans of the executor ─► OTLP, from there

A batch waits for none of this. The steps reach a queue, and a thread of ours reads it; the
exporters have threads of their own.
"""

from sparkonce.observe.telemetry import OpenTelemetry

__all__ = ["OpenTelemetry"]
