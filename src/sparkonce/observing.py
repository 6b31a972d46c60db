"""Follow the protocol from outside: metrics, traces, lineage, a page.

    step ─► Shown.started, .ended ─► Courier: bounded queue ─► a thread ─► observer.on_step(…)

An observer runs in a thread of its own, fed by a queue. So an observer that raises or blocks harms
nothing: its errors are logged, and what does not fit into the queue is dropped and counted. The
thread works between batches: inside one, it would take turns with the batch's own thread at
Python's lock.
`Telemetry` is what a pipeline may have of its own, also several at once: see `sparkonce.observe`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, Protocol, TypeVar

from sparkonce import steps
from sparkonce.datasets import Dataset

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger("sparkonce")

_MOST_WAITING: Final = 10_000
_LOG_EVERY: Final = 1_000

_LATEST_S: Final = 0.5
"""How long an item waits at most, inside a batch that takes longer."""

ItemT = TypeVar("ItemT")


class Event(StrEnum):
    """What has happened to a step."""

    STARTED = "started"
    FINISHED = "finished"
    FAILED = "failed"


class Observer(Protocol):
    """Gets each step of this process, in order.

    In the driver these are the driver's steps only: the executors are other processes.
    """

    def on_step(  # noqa: PLR0917 - one event, as metrics take it
        self,
        event: Event,
        name: str,
        batch: int | None,
        sink: str | None,
        seconds: float,
        pipeline: str | None,
    ) -> None:
        """Take note of a step.

        Args:
            event: started, finished or failed.
            name: of the step, one of `sparkonce.steps.STEPS`.
            batch: the micro-batch; None where the step concerns none.
            sink: the sink's name; None where it concerns none.
            seconds: how long the step took; 0.0 when it has just started.
            pipeline: the pipeline's name; None where it concerns none.
        """


class Seconds(NamedTuple):
    """How long the tasks of a batch spent in a step of one sink: one value for each task."""

    sink: str
    step: str
    tasks: tuple[float, ...]


class Source(NamedTuple):
    """A source of the query.

    Attributes:
        text: as Spark describes it, such as ``FileStreamSource[file:/data/orders]``.
        servers: Kafka's bootstrap servers; None where they are not known.
    """

    text: str
    servers: str | None = None


class Output(NamedTuple):
    """A sink of the pipeline.

    Attributes:
        dataset: asks for its name in lineage; it may wait for a server, and raise.
        default: its name where that fails.
        schema: of the rows that it gets; None before the sinks are validated.
        is_current: whether it gets rows; False where the pipeline had it before.
    """

    dataset: Callable[[], Dataset]
    default: Dataset
    schema: pa.Schema | None = None
    is_current: bool = True


class Facts(NamedTuple):
    """What a query reads and writes. The functions may wait, so no batch calls them.

    Attributes:
        outputs: by the sink's name.
        sources: in the order of their offsets; empty before Spark has created them.
        offsets: of a batch, by its id, as Spark's checkpoint has them; None where it has none.
    """

    outputs: Mapping[str, Output]
    sources: Callable[[], Sequence[Source]]
    offsets: Callable[[int], tuple[str, ...] | None]


class Telemetry(Protocol):
    """Metrics, traces or lineage of a pipeline. No method raises, and none waits for a server."""

    def follow(self, pipeline: str, query_id: str, run_id: str) -> None:
        """Follow the pipeline in this process from now on; called when a run of its query begins.

        Args:
            pipeline: its name.
            query_id: the permanent id of the query's checkpoint.
            run_id: Spark's id of the run.
        """

    def describe(self, pipeline: str, facts: Facts) -> None:
        """Take note of what the query reads and writes: at each start, and with its schemas."""

    def for_tasks(self, pipeline: str, batch_id: int) -> AbstractContextManager[object] | None:
        """What the tasks of the batch enter while they write; it is pickled to them."""

    def tasks_ended(self, pipeline: str, seconds: Iterable[Seconds]) -> None:
        """Take note of how long the tasks of a batch took."""

    def flush(self) -> None:
        """Send what waits, for a short time at most."""


@dataclass
class _EnterAll:
    """Enters several contexts, in a task; it is pickled to there."""

    contexts: Sequence[AbstractContextManager[object]]
    _entered: ExitStack | None = field(default=None, init=False)

    def __enter__(self) -> None:
        self._entered = ExitStack()
        for context in self.contexts:
            self._entered.enter_context(context)

    def __exit__(self, *error: object) -> None:
        if self._entered is not None:
            self._entered.__exit__(*error)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Several:
    """Several kinds of telemetry as one; see `Telemetry`."""

    each: tuple[Telemetry, ...]

    def follow(self, pipeline: str, query_id: str, run_id: str) -> None:
        for one in self.each:
            one.follow(pipeline, query_id, run_id)

    def describe(self, pipeline: str, facts: Facts) -> None:
        for one in self.each:
            one.describe(pipeline, facts)

    def for_tasks(self, pipeline: str, batch_id: int) -> AbstractContextManager[object] | None:
        found = [one.for_tasks(pipeline, batch_id) for one in self.each]
        contexts = [context for context in found if context is not None]
        return _EnterAll(contexts) if contexts else None

    def tasks_ended(self, pipeline: str, seconds: Iterable[Seconds]) -> None:
        taken = tuple(seconds)
        for one in self.each:
            one.tasks_ended(pipeline, taken)

    def flush(self) -> None:
        for one in self.each:
            one.flush()


def as_one(telemetry: Telemetry | Sequence[Telemetry] | None) -> Telemetry | None:
    """What ``telemetry=`` was given, as one object; None if that is nothing."""
    if not isinstance(telemetry, Sequence):
        return telemetry
    return Several(tuple(telemetry)) if telemetry else None


class Seen(NamedTuple):
    """A step that has started or ended.

    Attributes:
        event: started, finished or failed.
        step: the step itself.
        at_ns: when, in nanoseconds of Unix time.
        error: why it failed.
    """

    event: Event
    step: steps.step
    at_ns: int
    error: BaseException | None

    @property
    def sink(self) -> str | None:
        """The sink's name."""
        return getattr(self.step.sink, "name", None)


class Courier(Generic[ItemT]):
    """Hands items to a function, in a thread of its own: twice a second, and when it is asked to.

    Args:
        take: the function; what it raises is logged.
        whose: what the log calls it.
    """

    def __init__(self, take: Callable[[ItemT], None], whose: object) -> None:
        self._take = take
        self._whose = whose
        self._waiting: deque[ItemT | threading.Event] = deque()
        self._asked = threading.Event()
        self._is_over = False
        self._dropped = 0
        self._failed = 0
        self._thread = threading.Thread(target=self._run, name="sparkonce-observer", daemon=True)
        self._thread.start()

    def put(self, item: ItemT) -> None:
        """Leave an item for the thread; drop it when too many wait."""
        if len(self._waiting) < _MOST_WAITING:
            self._waiting.append(item)
            return
        if self._dropped % _LOG_EVERY == 0:
            logger.warning(
                "the observer %r is too slow: %d steps were not shown to it",
                self._whose,
                self._dropped + 1,
            )
        self._dropped += 1

    def hurry(self) -> None:
        """Let the thread take what waits now."""
        self._asked.set()

    def drain(self, timeout_s: float) -> bool:
        """Wait until the items so far are taken; returns whether they are."""
        reached = threading.Event()
        self._waiting.append(reached)
        self.hurry()
        return reached.wait(timeout_s)

    def end(self, timeout_s: float) -> None:
        """Hand over what waits, and end the thread; one that blocks keeps no process alive."""
        self._is_over = True
        self.hurry()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            is_last = self._is_over
            self._take_all()
            if is_last:
                return
            self._asked.wait(_LATEST_S)
            self._asked.clear()

    def _take_all(self) -> None:
        while self._waiting:
            item = self._waiting.popleft()
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                self._take(item)
            except Exception:
                if self._failed % _LOG_EVERY == 0:
                    logger.warning("the observer %r raised an error", self._whose, exc_info=True)
                self._failed += 1


class Shown:
    """A hook that hands each step of this process to a courier."""

    def __init__(self, courier: Courier[Seen]) -> None:
        self._courier = courier

    def started(self, entered: steps.step) -> None:
        self._courier.put(Seen(Event.STARTED, entered, time.time_ns(), None))

    def ended(self, entered: steps.step, error: BaseException | None) -> None:
        event = Event.FINISHED if error is None else Event.FAILED
        self._courier.put(Seen(event, entered, time.time_ns(), error))
        if entered.name == "deliver":
            self._courier.hurry()  # the batch is over


def observe(observer: Observer, *, timeout_s: float = 5.0) -> Callable[[], None]:
    """Show each step of this process to the observer from now on.

    Args:
        observer: called in a thread of its own, when a batch has ended, else within half a second.
        timeout_s: how long the returned function waits for what the observer has not yet seen, in
            seconds.

    Returns:
        A function that stops showing steps.
    """

    def take(seen: Seen) -> None:
        entered = seen.step
        seconds = 0.0 if seen.event is Event.STARTED else entered.seconds
        observer.on_step(
            seen.event, entered.name, entered.batch, seen.sink, seconds, entered.pipeline
        )

    courier = Courier(take, observer)
    shown = Shown(courier)
    steps.add_hook(shown)

    def end() -> None:
        steps.remove_hook(shown)
        courier.end(timeout_s)

    return end


def by_sink_and_step(tasks: Iterable[Mapping[str, Mapping[str, float]]]) -> list[Seconds]:
    """What each task took, by sink and step, in one value for each sink and step."""
    found: dict[tuple[str, str], list[float]] = {}
    for task in tasks:
        for sink, of_steps in task.items():
            for name, seconds in of_steps.items():
                found.setdefault((sink, name), []).append(seconds)
    return [Seconds(sink, name, tuple(values)) for (sink, name), values in found.items()]
