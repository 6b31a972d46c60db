"""Small batches, which the driver writes itself.

    three small batches in a row ─► the next one: its rows ─► driver: begin ─► write ─► preCommit
                                         │                           └─ fails, as a task may
                                         └─ more than expected ──────────┴─► executors, as ever

A pass through Python workers, and a branch in each sink for each task, make about a fifth of what a
batch of a hundred rows takes. What the driver writes is one branch per sink, under an attempt
number that no task has; from there on the protocol is the same. When it is lost after the decision,
all of the batch is, so the executors write it again from Spark's replay.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from sparkonce.txn_log.record import Share

DEFAULT_ROWS: Final = 1_000
"""The most rows of a batch that the driver writes."""

_MOST_BYTES: Final = 8 * 2**20
IN_A_ROW: Final = 3
_MOST_IN_A_ROW: Final = 96


class NotSmallError(Exception):
    """A batch has more rows than the driver takes."""


class SmallBatches:
    """Tells from the batches before whether the next one will be small.

    Args:
        most_rows: of a small batch; 0 if the driver writes none.
        wanted: after how many small batches in a row the driver writes the next one.

    Attributes:
        most_rows: as given.
    """

    def __init__(self, most_rows: int, wanted: int = IN_A_ROW) -> None:
        self.most_rows = most_rows
        self._in_a_row = 0
        self._wanted = wanted

    @property
    def is_next(self) -> bool:
        """Whether the next batch is expected to be small."""
        return self._in_a_row >= self._wanted

    def note(self, shares: Iterable[Share]) -> None:
        """Take note of a batch that was written."""
        is_small = self.most_rows > 0 and all(
            share.rows <= self.most_rows and share.bytes <= _MOST_BYTES for share in shares
        )
        self._in_a_row = self._in_a_row + 1 if is_small else 0

    def forget(self) -> None:
        """The batch was not small, or not for the driver: wait twice as long before the next."""
        self._in_a_row = 0
        self._wanted = min(2 * self._wanted, _MOST_IN_A_ROW)
