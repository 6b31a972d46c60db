"""The names of metrics and attributes. They stay: dashboards and alert rules use them.

They follow OpenTelemetry's conventions: units in UCUM, no unit in a name. Prometheus shows
``sparkonce.sink.io`` as ``sparkonce_sink_io_bytes_total``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

SCOPE: Final = "sparkonce"
"""The instrumentation scope of all metrics and spans."""

PIPELINE: Final = "sparkonce.pipeline.name"
SINK: Final = "sparkonce.sink.name"
STEP: Final = "sparkonce.step.name"
STATE: Final = "sparkonce.batch.state"
ERROR: Final = "error.type"

BATCH: Final = "sparkonce.batch.id"
QUERY: Final = "sparkonce.query.id"
RUN: Final = "sparkonce.run.id"
TOKEN: Final = "sparkonce.driver.token"  # noqa: S105 - a fencing token is no secret
PARTITION: Final = "sparkonce.task.partition"
ATTEMPT: Final = "sparkonce.task.attempt"
BRANCH: Final = "sparkonce.branch.id"
RETRIES: Final = "sparkonce.step.retries"
CALLS: Final = "sparkonce.step.calls"
BUSY: Final = "sparkonce.step.busy"
ABORTED: Final = "sparkonce.branch.aborted"

ABORTED_STATE: Final = "aborted"
"""The state of a batch that failed before its decision, of which the log has no record."""


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        kind: of instrument; a gauge is asked for its value when it is collected.
        unit: in UCUM; braces mark what is counted.
        description: one sentence.
        attributes: which it may have.
    """

    kind: Literal["counter", "histogram", "gauge"]
    unit: str
    description: str
    attributes: tuple[str, ...]


BATCH_TRANSITIONS: Final = "sparkonce.batch.transitions"
BATCH_UNFINISHED: Final = "sparkonce.batch.unfinished"
UNFINISHED_AGE: Final = "sparkonce.batch.unfinished_age"
COMPLETE_AGE: Final = "sparkonce.batch.complete_age"
STEP_DURATION: Final = "sparkonce.step.duration"
STEP_RETRIES: Final = "sparkonce.step.retries"
SINK_ROWS: Final = "sparkonce.sink.rows"
SINK_IO: Final = "sparkonce.sink.io"
BRANCH_ABORTED: Final = "sparkonce.branch.aborted"
BRANCH_LOST: Final = "sparkonce.branch.lost"
BRANCH_REWRITTEN: Final = "sparkonce.branch.rewritten"
BRANCH_IN_DOUBT: Final = "sparkonce.branch.in_doubt"
BRANCH_TIME_LEFT: Final = "sparkonce.branch.time_left"
DRIVER_TOKEN: Final = "sparkonce.driver.token"  # noqa: S105 - see above
DRIVER_FENCED: Final = "sparkonce.driver.fenced"

METRICS: Final[Mapping[str, Metric]] = {
    BATCH_TRANSITIONS: Metric(
        "counter", "{transition}", "Batches that reached a state.", (PIPELINE, STATE)
    ),
    BATCH_UNFINISHED: Metric(
        "gauge",
        "{batch}",
        "Batches that are prepared or decided, and not known to be committed.",
        (PIPELINE, STATE),
    ),
    UNFINISHED_AGE: Metric(
        "gauge", "s", "Age of the oldest unfinished batch; 0 when there is none.", (PIPELINE,)
    ),
    COMPLETE_AGE: Metric(
        "gauge",
        "s",
        "Time since the last batch was complete; before the first one, since the driver began.",
        (PIPELINE,),
    ),
    STEP_DURATION: Metric(
        "histogram",
        "s",
        "Duration of a step; open, write and prepare: of one task.",
        (PIPELINE, STEP, SINK, ERROR),
    ),
    STEP_RETRIES: Metric(
        "counter", "{retry}", "Repeated calls of sinks and of the log.", (PIPELINE, STEP, SINK)
    ),
    SINK_ROWS: Metric("counter", "{row}", "Rows of complete batches.", (PIPELINE, SINK)),
    SINK_IO: Metric(
        "counter", "By", "Size of these rows in Arrow memory on the executors.", (PIPELINE, SINK)
    ),
    BRANCH_ABORTED: Metric(
        "counter", "{branch}", "Left-over branches that a sweep aborted.", (PIPELINE, SINK)
    ),
    BRANCH_LOST: Metric(
        "counter",
        "{branch}",
        "Branches that a commit found lost; each start that finds them counts them again.",
        (PIPELINE, SINK),
    ),
    BRANCH_REWRITTEN: Metric(
        "counter",
        "{branch}",
        "Lost branches that were rewritten from Spark's replay.",
        (PIPELINE, SINK),
    ),
    BRANCH_IN_DOUBT: Metric(
        "gauge",
        "{branch}",
        "Branches of unfinished batches, without those that an operator has ruled out.",
        (PIPELINE, SINK),
    ),
    BRANCH_TIME_LEFT: Metric(
        "gauge",
        "s",
        "Time until a server may drop the first of these branches; absent if none expires.",
        (PIPELINE, SINK),
    ),
    DRIVER_TOKEN: Metric(
        "gauge", "{token}", "The driver's fencing token; each start has a higher one.", (PIPELINE,)
    ),
    DRIVER_FENCED: Metric(
        "counter",
        "{driver}",
        "Drivers of this process that a newer driver replaced.",
        (PIPELINE,),
    ),
}
"""Every metric, by its name in OpenTelemetry."""

BUCKETS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
"""Boundaries of the histogram: from a local write to the longest commit that is repeated."""


def prometheus_name(name: str) -> str:
    """What Prometheus calls the metric; the series of a histogram add `_bucket`, `_sum`, `_count`.

    Args:
        name: in OpenTelemetry.
    """
    metric = METRICS[name]
    unit = {"s": "_seconds", "By": "_bytes"}.get(metric.unit, "")
    total = "_total" if metric.kind == "counter" else ""
    return f"{name.replace('.', '_')}{unit}{total}"
