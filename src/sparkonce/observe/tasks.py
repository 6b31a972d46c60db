"""The spans of a task, on its executor, as children of the driver's span.

    driver: TaskTrace(traceparent) ── pickled with the writer ──► task: with trace: write, prepare
                                                                     └─► queue ─► a thread ─► spans

The executor has exporters of its own, by its own OTEL_* variables. If it has none, or lacks
OpenTelemetry, the task does nothing more than without telemetry.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from sparkonce import steps
from sparkonce.model import BranchId
from sparkonce.observe import names
from sparkonce.observe.environment import is_exported
from sparkonce.observing import Courier, Event, Seen
from sparkonce.once import once

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

logger = logging.getLogger("sparkonce")


class _Of:
    """One task's steps on their way to its spans."""

    __slots__ = ("seen", "trace")

    def __init__(self, trace: TaskTrace, seen: Seen) -> None:
        self.trace = trace
        self.seen = seen


@dataclass
class TaskTrace:
    """Where the spans of a batch's tasks belong; a context manager that the task enters.

    Attributes:
        carrier: the driver's span, as W3C's trace context has it.
        pipeline: its name.
    """

    carrier: Mapping[str, str]
    pipeline: str
    _courier: Courier[Any] | None = field(default=None, init=False, compare=False, repr=False)

    @classmethod
    def of(cls, span: Span, pipeline: str) -> Self:
        """For children of the span."""
        from opentelemetry.context import Context  # noqa: PLC0415 - executors may lack it
        from opentelemetry.trace import set_span_in_context  # noqa: PLC0415 - likewise
        from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415 - likewise
            TraceContextTextMapPropagator,
        )

        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, set_span_in_context(span, Context()))
        return cls(carrier, pipeline)

    def __enter__(self) -> Self:
        self._courier = once(_courier)
        if self._courier is not None:
            steps.add_hook(self)
        return self

    def __exit__(self, *_: object) -> None:
        steps.remove_hook(self)
        if self._courier is not None:
            self._courier.hurry()
        self._courier = None

    def __getstate__(self) -> tuple[Mapping[str, str], str]:
        return self.carrier, self.pipeline

    def __setstate__(self, state: tuple[Mapping[str, str], str]) -> None:
        self.carrier, self.pipeline = state
        self._courier = None

    # -- a hook, in the threads of the task --------------------------------------------------------

    def started(self, entered: steps.step) -> None:
        """Nothing: a span is made when its step has ended."""

    def ended(self, entered: steps.step, error: BaseException | None) -> None:
        """Hand the step over."""
        if self._courier is not None and isinstance(entered.of, BranchId):
            event = Event.FINISHED if error is None else Event.FAILED
            self._courier.put(_Of(self, Seen(event, entered, time.time_ns(), error)))


def _courier() -> Courier[_Of] | None:
    """What makes the spans in this process; None if nothing would receive them."""
    if "opentelemetry.sdk.trace" not in sys.modules and not is_exported("TRACES"):
        return None
    try:
        from sparkonce.observe.providers import tracer  # noqa: PLC0415 - executors may lack it
    except ImportError as error:
        logger.warning(
            "OTEL_* is set, and this Python cannot send spans: %s. Install sparkonce[otel] in the "
            "executors' Python too",
            error,
        )
        return None
    found = tracer(None)
    return None if found is None else _courier_of(found)


def _courier_of(tracer: Tracer) -> Courier[_Of]:
    from opentelemetry.context import Context  # noqa: PLC0415 - executors may lack it
    from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415 - likewise
        TraceContextTextMapPropagator,
    )

    from sparkonce.observe.branches import Branches, show  # noqa: PLC0415 - likewise

    branches, propagator = Branches(), TraceContextTextMapPropagator()

    def take(item: _Of) -> None:
        for call in branches.ended(item.seen):
            parent = propagator.extract(item.trace.carrier, Context())
            show(call, tracer, parent, {names.PIPELINE: item.trace.pipeline})

    return Courier(take, "spans of tasks")
