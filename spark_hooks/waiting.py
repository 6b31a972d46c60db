"""Nothing hangs in silence: what takes long is said, again and again, until it returns."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tenacity import RetryCallState

logger = logging.getLogger("sparkonce")

EVERY_S: Final = 30.0
"""After how long a wait is said, and how often from there on, in seconds."""

_waits: dict[object, tuple[str, float]] = {}
_changes = threading.Lock()


@contextlib.contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Log `what` while the block takes long: an infinitive and its objects, as in "commit batch 7".

    It costs two changes of a dictionary: one thread looks after all waits of the process.
    """
    _watch()
    wait = object()
    with _changes:
        _waits[wait] = what, time.monotonic()
    try:
        yield
    finally:
        with _changes:
            _waits.pop(wait, None)  # a child that was forked meanwhile has forgotten it


def still_trying(what: str) -> Callable[[RetryCallState], None]:
    """What tenacity calls before it sleeps: it logs `what`, as above, with the last error."""

    def say(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        logger.warning("still trying to %s, attempt %d: %s", what, state.attempt_number, error)

    return say


def say_waits(now: float) -> None:
    """Log what has taken long; `now` is of time.monotonic, in seconds."""
    with _changes:
        waits = list(_waits.values())
    for what, since in waits:
        if now - since >= EVERY_S:
            logger.warning("no answer yet, after %.0f s, to: %s", now - since, what)


@functools.cache
def _watch() -> None:
    def watch() -> None:
        while True:
            time.sleep(EVERY_S)
            say_waits(time.monotonic())

    threading.Thread(target=watch, name="sparkonce-waits", daemon=True).start()


def _begin_anew() -> None:
    """A child has neither the thread nor the waits of its parent, and maybe a lock held by them."""
    global _changes  # noqa: PLW0603
    _changes = threading.Lock()
    _waits.clear()
    _watch.cache_clear()


os.register_at_fork(after_in_child=_begin_anew)
