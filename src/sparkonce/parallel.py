"""Calls that run at the same time, and all finish before the caller continues."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from threading import Event
from typing import TypeVar

logger = logging.getLogger("sparkonce")

MAX_THREADS = 16
_LOOK_EVERY_S = 0.2

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


def at_once(
    action: Callable[[ItemT], ResultT],
    items: Iterable[ItemT],
    most: int = MAX_THREADS,
    interrupted: Event | None = None,
) -> list[ResultT]:
    """Call the action for every item, up to `most` at a time; return the results in order.

    Every call that has begun finishes before the first error, or Ctrl-C, is raised: the caller may
    catch that error and start other work. Ctrl-C sets `interrupted`, so that a long call can end.
    """
    work = list(items)
    if len(work) <= 1:
        return [action(work[0])] if work else []
    interrupts: list[BaseException] = []
    with ThreadPoolExecutor(min(most, len(work))) as pool:
        futures = [_submitted(pool, action, item) for item in work]
        while running := [future for future in futures if not future.done()]:
            try:
                # Python handles Ctrl-C when this thread runs, even if another thread received it.
                wait(running, _LOOK_EVERY_S)
            except BaseException as interrupt:  # noqa: BLE001 - raised below
                interrupts.append(interrupt)
                if interrupted is not None:
                    interrupted.set()
                logger.warning(
                    "interrupted; waiting for the calls that have begun (SIGKILL is safe: the next "
                    "start continues from there)"
                )
                for future in running:
                    future.cancel()
    if interrupts:
        raise interrupts[0]
    return [future.result() for future in futures]


def _submitted(
    pool: ThreadPoolExecutor, action: Callable[[ItemT], ResultT], item: ItemT
) -> Future[ResultT]:
    """Start the call in the pool; make it in this thread once the main thread has finished.

    Python refuses new work for pools after the end of a script, while a query may still run.
    """
    try:
        return pool.submit(copy_context().run, action, item)  # for `StepFields`
    except RuntimeError as error:
        if "shutdown" not in str(error):
            raise
    future: Future[ResultT] = Future()
    try:
        future.set_result(action(item))
    except Exception as error:  # noqa: BLE001 - kept in the future, as a pool does
        future.set_exception(error)
    return future
