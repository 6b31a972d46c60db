"""Follow the protocol from outside: metrics, traces, a page.

    step ─► Courier.started, .ended ─► bounded queue ─► a thread ─► observer.on_step(…)

An observer runs in a thread of its own, fed by a queue. So an observer that raises or blocks harms
nothing: its errors are logged, and what does not fit into the queue is dropped and counted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from enum import StrEnum
from queue import Full, Queue
from typing import Final, NamedTuple, Protocol

from sparkonce import steps

logger = logging.getLogger("sparkonce")

_MOST_WAITING: Final = 10_000
_LOG_EVERY: Final = 1_000


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


class _Seen(NamedTuple):
    event: Event
    name: str
    batch: int | None
    sink: str | None
    seconds: float
    pipeline: str | None


class _Courier:
    """Hands the steps of this process to one observer."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._queue: Queue[_Seen | None] = Queue(_MOST_WAITING)
        self._dropped = 0
        self._failed = 0
        self._thread = threading.Thread(target=self._run, name="sparkonce-observer", daemon=True)
        self._thread.start()

    def started(self, entered: steps.step) -> None:
        self._put(Event.STARTED, entered)

    def ended(self, entered: steps.step, error: BaseException | None) -> None:
        self._put(Event.FINISHED if error is None else Event.FAILED, entered)

    def end(self, timeout_s: float) -> None:
        """Hand over what waits in the queue."""
        try:
            self._queue.put(None, timeout=timeout_s)
        except Full:
            return  # the observer blocks: its thread is left, and keeps no process alive
        self._thread.join(timeout_s)

    def _put(self, event: Event, entered: steps.step) -> None:
        sink = getattr(entered.sink, "name", None)
        seen = _Seen(event, entered.name, entered.batch, sink, entered.seconds, entered.pipeline)
        try:
            self._queue.put_nowait(seen)
        except Full:
            if self._dropped % _LOG_EVERY == 0:
                logger.warning(
                    "the observer %r is too slow: %d steps were not shown to it",
                    self._observer,
                    self._dropped + 1,
                )
            self._dropped += 1

    def _run(self) -> None:
        while (seen := self._queue.get()) is not None:
            try:
                self._observer.on_step(*seen)
            except Exception:
                if self._failed % _LOG_EVERY == 0:
                    logger.warning("the observer %r raised an error", self._observer, exc_info=True)
                self._failed += 1


def observe(observer: Observer, *, timeout_s: float = 5.0) -> Callable[[], None]:
    """Show each step of this process to the observer from now on.

    Args:
        observer: called in a thread of its own.
        timeout_s: how long the returned function waits for what the observer has not yet seen, in
            seconds; up to twice as long if the queue is full.

    Returns:
        A function that stops showing steps.
    """
    courier = _Courier(observer)
    steps.add_hook(courier)

    def end() -> None:
        steps.remove_hook(courier)
        courier.end(timeout_s)

    return end
