"""The spans of the pipelines in this process: one trace for each batch.

    deliver 7 ─┬─ look
               ├─ tasks ─┬─ open, write, prepare of each sink, on the executors
               │         └─ …
               ├─ vote of each sink
               ├─ decide
               ├─ commit, publish of each sink, at the same time
               └─ complete, sweep of each sink

A step that holds others has a span while it runs; the other spans are made when their step has
ended. Each pipeline runs one such step inside the other, so the innermost one is the parent. A
commit after Spark's checkpoint, which comes after `deliver`, goes into the trace of its batch.
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLateError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from opentelemetry.context import Context
from opentelemetry.trace import Span, Tracer, set_span_in_context

from sparkonce.model import BranchId
from sparkonce.observe import names
from sparkonce.observe.branches import Branches, end, show
from sparkonce.observe.tasks import TaskTrace
from sparkonce.observing import Event, Seen
from sparkonce.steps import STEPS
from sparkonce.txn_log.record import Incarnation, TransactionRecord

if TYPE_CHECKING:
    from sparkonce.steps import step

_LONGEST_WAIT_S: Final = 0.05
"""How long a batch waits for the span that its tasks belong to."""

_MOST_TRACES: Final = 16
"""How many batches of a pipeline may get spans after their `deliver` has ended."""


class _Running(NamedTuple):
    step: step
    span: Span


@dataclass
class _Pipeline:
    """What is running in a pipeline, outermost first, and the newest batches' traces."""

    query_id: str
    run_id: str
    token: int = 0
    running: list[_Running] = field(default_factory=list)
    traces: OrderedDict[int, Context] = field(default_factory=OrderedDict)

    @property
    def inner(self) -> Context | None:
        """The context of the innermost step that runs."""
        return set_span_in_context(self.running[-1].span, Context()) if self.running else None


class Spans:
    """Takes the steps of this process, in one thread."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._pipelines: dict[str, _Pipeline] = {}
        self._by_query: dict[str, str] = {}
        self._branches = Branches()
        self._asked: dict[str, Future[TaskTrace | None]] = {}
        self._is_late = False

    def follow(self, pipeline: str, query_id: str, run_id: str) -> None:
        """Take the pipeline's steps from now on."""
        self._pipelines[pipeline] = _Pipeline(query_id, run_id)
        self._by_query[query_id] = pipeline

    # -- the tasks' share --------------------------------------------------------------------------

    def expect(self, entered: step) -> None:
        """The step that runs tasks begins, in the thread that will ask `for_tasks`."""
        if entered.pipeline in self._pipelines and entered.pipeline is not None:
            self._asked[entered.pipeline] = Future()

    def for_tasks(self, pipeline: str) -> TaskTrace | None:
        """The span that the tasks belong to, for them; None if it is not known soon."""
        asked = self._asked.get(pipeline)
        if asked is None:
            return None
        try:
            return asked.result(0 if self._is_late else _LONGEST_WAIT_S)
        except TooLateError:
            self._is_late = True  # the next batch does not wait
            return None

    # -- steps -------------------------------------------------------------------------------------

    def take(self, seen: Seen) -> None:
        """Take note of a step."""
        entered = seen.step
        if isinstance(entered.of, BranchId):
            if seen.event is not Event.STARTED:
                self._show_branch(seen, entered.of)
            return
        of = self._pipelines.get(entered.pipeline or "")
        if of is None:
            return
        holds_others = STEPS[entered.name].is_long
        if seen.event is not Event.STARTED:
            span = self._pop(of, entered) or self._started(of, seen)
            self._end(of, span, seen)
        elif holds_others:
            span = self._started(of, seen)  # which may end what was running
            of.running.append(_Running(entered, span))
            if entered.name == "tasks":
                self._answer(of, entered)

    def _show_branch(self, seen: Seen, branch: BranchId) -> None:
        """Show a step of a batch that the driver writes itself."""
        name = self._by_query.get(branch.owner.query_id, "")
        of = self._pipelines.get(name)
        if of is None or of.inner is None:
            return
        for call in self._branches.ended(seen):
            show(call, self._tracer, of.inner, {names.PIPELINE: name})

    def _started(self, of: _Pipeline, seen: Seen) -> Span:
        entered = seen.step
        if entered.name == "deliver":
            self._abandon(of, seen.at_ns)
        took_ns = 0 if seen.event is Event.STARTED else int(entered.seconds * 1e9)
        attributes: dict[str, str | int] = {
            names.PIPELINE: entered.pipeline or "",
            names.STEP: entered.name,
            names.QUERY: of.query_id,
            names.RUN: of.run_id,
        }
        if of.token:
            attributes[names.TOKEN] = of.token
        if entered.batch is not None:
            attributes[names.BATCH] = entered.batch
        if seen.sink is not None:
            attributes[names.SINK] = seen.sink
        span = self._tracer.start_span(
            f"{entered.name} {seen.sink or entered.pipeline}",
            _parent(of, entered),
            attributes=attributes,
            start_time=seen.at_ns - took_ns,
        )
        if entered.name == "deliver" and entered.batch is not None:
            of.traces[entered.batch] = set_span_in_context(span, Context())
            while len(of.traces) > _MOST_TRACES:
                of.traces.popitem(last=False)
        return span

    def _end(self, of: _Pipeline, span: Span, seen: Seen) -> None:
        result = seen.step.result
        if isinstance(result, Incarnation):
            of.token = result.token
            span.set_attribute(names.TOKEN, result.token)
        elif isinstance(result, TransactionRecord):
            span.set_attribute(names.STATE, str(result.state))
        elif seen.step.name == "sweep" and isinstance(result, int):
            span.set_attribute(names.ABORTED, result)
        if seen.step.retries:
            span.set_attribute(names.RETRIES, seen.step.retries)
        end(span, seen.at_ns, seen.error)

    def _pop(self, of: _Pipeline, ended: step) -> Span | None:
        """The span of a step that holds others, which has ended; None if it has none."""
        found = next((r.span for r in of.running if r.step is ended), None)
        of.running = [running for running in of.running if running.step is not ended]
        return found

    def _abandon(self, of: _Pipeline, at_ns: int) -> None:
        """End what has not been seen to end: a batch begins, so nothing runs."""
        for running in reversed(of.running):
            running.span.end(at_ns)
        of.running = []

    def _answer(self, of: _Pipeline, entered: step) -> None:
        asked = self._asked.get(entered.pipeline or "")
        if asked is not None and not asked.done():
            span = of.running[-1].span
            trace = TaskTrace.of(span, entered.pipeline or "") if span.is_recording() else None
            asked.set_result(trace)
            self._is_late = False


def _parent(of: _Pipeline, entered: step) -> Context:
    """Where the step's span belongs; an empty context begins a trace."""
    if entered.name == "deliver":
        return Context()
    inner, trace = of.inner, None
    if entered.batch is not None:
        trace = of.traces.get(entered.batch)
    is_of_another = of.running and of.running[0].step.batch not in {None, entered.batch}
    if trace is not None and (inner is None or is_of_another):
        return trace
    return inner or Context()
