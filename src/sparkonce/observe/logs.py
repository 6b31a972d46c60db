"""Which pipeline, batch, step and sink a line of the log is about, as fields of its record."""

from __future__ import annotations

import logging
from contextvars import ContextVar

from sparkonce import steps


class StepFields(logging.Filter):
    """Adds what is known of the current step to each record, for a handler that writes JSON.

    Add it to a handler, by ``addFilter`` or in the configuration of `logging`. It lets every
    record pass. A record that is logged inside a step of the protocol gets those of these
    attributes that are known: ``pipeline``, ``batch``, ``step`` and ``sink`` (strings, the batch
    an integer). Other records, and fields that a caller has set by ``extra=``, stay unchanged.
    """

    def __init__(self) -> None:
        super().__init__()
        # Of this thread, or of the one that has started it for its step; see `sparkonce.parallel`.
        self._within: ContextVar[tuple[steps.step, ...]] = ContextVar("steps", default=())
        steps.add_hook(self)

    def filter(self, record: logging.LogRecord) -> bool:
        for step in self._within.get():
            sink = getattr(step.sink, "name", None)
            known = {"pipeline": step.pipeline, "batch": step.batch, "step": step.name}
            for field, value in (known | {"sink": sink}).items():
                if value is not None and not hasattr(record, field):
                    setattr(record, field, value)
        return True

    def started(self, entered: steps.step) -> None:
        """See `sparkonce.steps.Hook`. The innermost step comes first."""
        self._within.set((entered, *self._within.get()))

    def ended(self, entered: steps.step, error: BaseException | None) -> None:
        """See `sparkonce.steps.Hook`."""
        del error
        self._within.set(tuple(each for each in self._within.get() if each is not entered))

    def end(self) -> None:
        """Follow the steps no longer; for tests, and handlers that are taken away."""
        steps.remove_hook(self)
