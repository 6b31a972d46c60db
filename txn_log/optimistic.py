"""A log whose writes hold no lock: read, run the step, and swap if no other writer was faster.

    load ──► step ──► swap(what was seen, what is new) ──► done
      ▲                  └─ another writer was faster ─┐
      └────────────────────────────────────────────────┘

So a driver that is paused between two round trips blocks no other, and its swap fails once another
driver has written. A step that changes nothing, or refuses, has no swap to prove that it saw the
newest state, and that this state is durable. So the log checks both before the answer counts.
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
        """Whether nobody has written since the view was loaded, and what it shows is durable.

        Raises:
            DecisionUnknownError: what the view shows may not be durable.
        """

    def swap(self) -> bool:
        """Write all changes if nobody has written since the view was loaded; whether it did.

        Raises:
            DecisionUnknownError: it may have been written.
            LogUnavailableError: it was not.
        """


class OptimisticLog(TransactionLog):
    """Runs each step on a `View`, and repeats it while another writer is faster."""

    @abstractmethod
    def _view(self) -> View:
        """A view that loads on demand, and the pipeline's version first."""

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
            f"{self.address}: {_MOST_RACES} times another writer was faster, or the server refused "
            "the condition of a write; nothing was written. Start only one driver per pipeline. If "
            "only one runs, look for a proxy that answers in the server's place"
        )
