"""The metrics of the pipelines in this process, from the steps of their drivers.

a step has ended ─► duration, retries ─► what it came to: a record, a token, a number of branches
a collection     ─► gauges, from each pipeline's `Standing`
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from sparkonce.errors import FencedError, LogError
from sparkonce.observe import names
from sparkonce.observe.standing import Standing
from sparkonce.observing import Event, Seconds, Seen
from sparkonce.steps import STEPS
from sparkonce.txn_log.record import Incarnation, State, TransactionRecord

if TYPE_CHECKING:
    from sparkonce.steps import step

Value: TypeAlias = "tuple[float, dict[str, str]]"
"""A gauge's value, and its attributes besides the pipeline."""

_COUNTED: Final = {"commit": names.BRANCH_LOST, "sweep": names.BRANCH_ABORTED}
"""By the step, the counter of the branches that it came to."""


class Metrics:
    """Takes the steps of this process, in one thread; a collector reads from another.

    Args:
        meter: makes the instruments.
        clock: gives Unix time in seconds.
    """

    def __init__(self, meter: Meter, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._pipelines: dict[str, Standing] = {}
        self._instruments = {name: self._made(meter, name) for name in names.METRICS}

    def _made(self, meter: Meter, name: str) -> Any:
        metric = names.METRICS[name]
        if metric.kind == "counter":
            return meter.create_counter(name, metric.unit, metric.description)
        if metric.kind == "gauge":
            callback = partial(self._observed, _GAUGES[name])
            return meter.create_observable_gauge(name, [callback], metric.unit, metric.description)
        return meter.create_histogram(
            name,
            metric.unit,
            metric.description,
            explicit_bucket_boundaries_advisory=names.BUCKETS_S,
        )

    def follow(self, pipeline: str) -> None:
        """Take the pipeline's steps from now on."""
        if pipeline in self._pipelines:
            return
        # An alert on an increase does not see the first one unless the counter was 0 before.
        for state in (*State, names.ABORTED_STATE):
            self._add(names.BATCH_TRANSITIONS, 0, pipeline, **{names.STATE: str(state)})
        self._add(names.DRIVER_FENCED, 0, pipeline)
        self._pipelines[pipeline] = Standing(self._clock())

    def take(self, seen: Seen) -> None:
        """Take note of a step."""
        pipeline = seen.step.pipeline
        standing = self._pipelines.get(pipeline or "")
        if pipeline is None or standing is None:
            return
        self._note_call(pipeline, seen)
        if seen.event is Event.STARTED:
            return
        if seen.error is None:
            self._note_result(pipeline, standing, seen.step, seen.sink)
        else:
            self._note_failure(pipeline, standing, seen.step, seen.error)

    def tasks_ended(self, pipeline: str, seconds: Iterable[Seconds]) -> None:
        """Take note of how long the tasks of a batch took."""
        for sink, name, tasks in seconds:
            attributes = {names.PIPELINE: pipeline, names.STEP: name, names.SINK: sink}
            for took in tasks:
                self._instruments[names.STEP_DURATION].record(took, attributes)

    # -- steps -------------------------------------------------------------------------------------

    def _note_call(self, pipeline: str, seen: Seen) -> None:
        if STEPS[seen.step.name].process != "driver":
            return  # `tasks_ended` has them, also those of a batch that the driver wrote
        attributes = {names.PIPELINE: pipeline, names.STEP: seen.step.name}
        if seen.sink is not None:
            attributes[names.SINK] = seen.sink
        is_start = seen.event is Event.STARTED
        retries = 0 if is_start else seen.step.retries  # at 0 first, as in `follow`
        self._instruments[names.STEP_RETRIES].add(retries, attributes)
        if is_start:
            return
        if seen.error is not None:
            attributes[names.ERROR] = type(seen.error).__name__
        self._instruments[names.STEP_DURATION].record(seen.step.seconds, attributes)

    def _note_result(
        self, pipeline: str, standing: Standing, ended: step, sink: str | None
    ) -> None:
        result = ended.result
        if isinstance(result, Incarnation):
            standing.start(result.token)
        elif isinstance(result, TransactionRecord):
            if ended.name == "look":  # it may have been in that state for long
                standing.reached(result)
            else:
                self._note_record(pipeline, standing, result)
        elif ended.name == "look" and isinstance(result, Sequence):
            standing.found(result)
        elif isinstance(result, int) and ended.name in _COUNTED:
            self._add(_COUNTED[ended.name], result, pipeline, sink)

    def _note_record(self, pipeline: str, standing: Standing, record: TransactionRecord) -> None:
        before = standing.reached(record)
        if before is None or before.state is not record.state:
            self._add(names.BATCH_TRANSITIONS, 1, pipeline, **{names.STATE: str(record.state)})
        known = 0 if before is None else len(before.lost)
        rewritten = Counter(lost.branch_id.sink for lost in record.lost[known:])
        for name, share in record.shares.items():
            is_new = before is not None and record.revision > before.revision
            self._add(names.BRANCH_REWRITTEN, rewritten[name] if is_new else 0, pipeline, name)
            if record.state.is_finished:
                self._add(names.SINK_ROWS, share.rows, pipeline, name)
                self._add(names.SINK_IO, share.bytes, pipeline, name)

    def _note_failure(
        self, pipeline: str, standing: Standing, ended: step, error: BaseException
    ) -> None:
        if isinstance(error, FencedError):
            self._add(names.DRIVER_FENCED, int(standing.fence()), pipeline)
            return
        if ended.name != "deliver" or ended.batch is None or isinstance(error, LogError):
            return  # or the log may have a record of it
        if ended.batch > standing.newest:
            state = {names.STATE: names.ABORTED_STATE}
            self._add(names.BATCH_TRANSITIONS, 1, pipeline, **state)

    def _add(
        self, name: str, value: float, pipeline: str, sink: str | None = None, **more: str
    ) -> None:
        attributes = {names.PIPELINE: pipeline, **more}
        if sink is not None:
            attributes[names.SINK] = sink
        self._instruments[name].add(value, attributes)

    # -- gauges ------------------------------------------------------------------------------------

    def _observed(
        self,
        gauge: Callable[[Standing, float], Iterator[Value]],
        options: CallbackOptions,
    ) -> Iterator[Observation]:
        del options
        now = self._clock()
        for pipeline, standing in list(self._pipelines.items()):  # another thread may add one
            for value, attributes in gauge(standing, now):
                yield Observation(value, {names.PIPELINE: pipeline, **attributes})


def _unfinished(standing: Standing, now: float) -> Iterator[Value]:
    del now
    states = Counter(record.state for record in standing.unfinished.values())
    for state in State:
        if state.is_unfinished:
            yield states[state], {names.STATE: str(state)}


def _unfinished_age(standing: Standing, now: float) -> Iterator[Value]:
    if standing.is_fenced:
        return  # the newer driver knows
    oldest = standing.oldest()
    yield (0.0 if oldest is None else max(now - oldest, 0.0)), {}


def _complete_age(standing: Standing, now: float) -> Iterator[Value]:
    if standing.is_fenced:
        return
    since = standing.began if standing.completed is None else standing.completed
    yield max(now - since, 0.0), {}


def _in_doubt(standing: Standing, now: float) -> Iterator[Value]:
    del now
    sinks = Counter(committable.branch_id.sink for committable in standing.in_doubt())
    yield from ((number, {names.SINK: sink}) for sink, number in sinks.items())


def _time_left(standing: Standing, now: float) -> Iterator[Value]:
    left: dict[str, float] = {}
    for committable in standing.in_doubt():
        if committable.safe_until is not None:
            sink, seconds = committable.branch_id.sink, committable.safe_until - now
            left[sink] = min(left.get(sink, seconds), seconds)
    yield from ((seconds, {names.SINK: sink}) for sink, seconds in left.items())


def _token(standing: Standing, now: float) -> Iterator[Value]:
    del now
    if standing.token is not None:
        yield standing.token, {}


_GAUGES: Mapping[str, Callable[[Standing, float], Iterator[Value]]] = {
    names.BATCH_UNFINISHED: _unfinished,
    names.UNFINISHED_AGE: _unfinished_age,
    names.COMPLETE_AGE: _complete_age,
    names.BRANCH_IN_DOUBT: _in_doubt,
    names.BRANCH_TIME_LEFT: _time_left,
    names.DRIVER_TOKEN: _token,
}
