"""Metrics, traces and lineage of a pipeline, by OpenTelemetry and OpenLineage; both are extras.

    ExactlyOnce(…, telemetry=[OpenTelemetry(), OpenLineage()])
                                 │ follows the steps of the driver's process
                                 ├─► metrics: `names` lists them ─► OTLP, or Prometheus' endpoint
                                 ├─► spans: one trace a batch ─► OTLP
                                 └─► lineage: two events a batch ─► OpenLineage's transports
    each task ─► `tasks.TaskTrace` ─► spans of the executor ─► OTLP, from there

A batch waits for none of this. The steps reach a queue, and a thread of ours reads it; the
exporters have threads of their own.
"""

from sparkonce.observe.lineage import OpenLineage
from sparkonce.observe.logs import StepFields
from sparkonce.observe.telemetry import OpenTelemetry

__all__ = ["OpenLineage", "OpenTelemetry", "StepFields"]
