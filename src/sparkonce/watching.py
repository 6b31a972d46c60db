"""Nothing hangs in silence: a step that takes long is logged again and again until it returns."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sparkonce import steps
from sparkonce.once import once

if TYPE_CHECKING:
    from tenacity import RetryCallState

logger = logging.getLogger("sparkonce")

EVERY_S: Final = 30.0
"""After how many seconds a step is logged, and how often from then on."""
_LOOK_EVERY_S: Final = 3.0
_NUMBER: Final = re.compile(r"\d+(\.\d+)?")


@dataclass(slots=True)
class _Wait:
    """A step that has not returned: since when, and when it was logged last; monotonic seconds."""

    step: steps.step
    since: float
    logged: float


class Watch:
    """Logs the steps of this process that take long; one thread looks after all of them."""

    def __init__(self) -> None:
        self._running: dict[int, _Wait] = {}
        self._thread: threading.Thread | None = None
        os.register_at_fork(after_in_child=self._forget)

    def started(self, entered: steps.step) -> None:
        if steps.STEPS[entered.name].is_long:
            return
        now = time.monotonic()
        self._running[id(entered)] = _Wait(entered, now, now)
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="sparkonce-watch", daemon=True)
            self._thread.start()

    def ended(self, entered: steps.step, error: BaseException | None) -> None:
        del error
        self._running.pop(id(entered), None)  # absent in a child that was forked meanwhile

    def log_slow(self, now: float) -> None:
        """Log each step that has taken long; `now` is of time.monotonic, in seconds."""
        for wait in list(self._running.values()):
            if now - wait.logged >= EVERY_S:
                logger.warning("no response yet, after %.0f s, to: %s", now - wait.since, wait.step)
                wait.logged = now

    def _look(self) -> None:
        while True:
            time.sleep(_LOOK_EVERY_S)
            self.log_slow(time.monotonic())

    def _forget(self) -> None:
        """A forked child has neither the thread nor the steps of its parent."""
        self._running = {}
        self._thread = None


steps.add_hook(once(Watch))


def still_trying(what: object) -> Callable[[RetryCallState], None]:
    """A function for tenacity to call before it sleeps.

    It logs an error when it differs from the last one, and otherwise a short line now and then.

    Args:
        what: a step, or an infinitive such as "commit batch 7".
    """
    begun: float | None = None
    logged, last = 0.0, ""

    def log(state: RetryCallState) -> None:
        nonlocal begun, logged, last
        error = state.outcome.exception() if state.outcome else None
        now, attempt = time.monotonic(), state.attempt_number
        begun = now if begun is None else begun
        told = _NUMBER.sub("0", str(error))  # how long it took, or a port, makes no other error
        if told != last:
            logger.warning("still trying to %s, attempt %d: %s", what, attempt, error)
        elif now - logged >= EVERY_S:
            text = "still trying to %s, attempt %d, after %.0f s: the same error"
            logger.warning(text, what, attempt, now - begun)
        else:
            return
        logged, last = now, told

    return log
