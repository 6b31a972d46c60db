"""A log whose writes hold no lock: read, run the step, and swap if nobody was faster.

    load ──► step ──► swap(what was seen, what is new) ──► done
      ▲                  └─ another writer was faster ─┐
      └────────────────────────────────────────────────┘

A driver that stands still between two round trips therefore keeps nobody waiting, and its swap
fails once anyone else has written. A step that changes nothing, or refuses, has no swap that proves
that it saw the newest state, and that this lasts, so that is asked for before its answer counts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Protocol

from sparkonce.errors import LogError, LogUnavailableError, SparkOnceError
from sparkonce.txn_log.base import ResultT, Store, TransactionLog

_MOST_RACES = 100


class View(Store, Protocol):
    """The state of one pipeline as one step sees it, and what the step wants to write."""

    @property
    def is_changed(self) -> bool:
        """Whether the step wants to write anything."""

    def is_current(self) -> bool:
        """Whether nobody has written since the view was loaded, which is as lasting as a write.

        Raises:
            DecisionUnknownError: it may not be.
        """

    def swap(self) -> bool:
        """Write all changes if nobody has written since the view was loaded; whether it did.

        Raises:
            DecisionUnknownError: it may have been written.
            LogUnavailableError: it was not.
        """


class OptimisticLog(TransactionLog):
    """Runs each step on a `View`, again as long as another writer was faster."""

    @abstractmethod
    def _view(self) -> View:
        """A view that loads what it is asked for, the pipeline's version first."""

    def _write(self, step: Callable[[Store], ResultT]) -> ResultT:
        for _ in range(_MOST_RACES):
            view = self._view()
            try:
                result = step(view)
            except LogError:
                raise
            except SparkOnceError:
                if view.is_current():
                    raise
                continue
            if view.swap() if view.is_changed else view.is_current():
                return result
        raise LogUnavailableError(
            f"{self.address}: other writers were faster {_MOST_RACES} times, nothing was written; "
            "start one driver per pipeline"
        )
