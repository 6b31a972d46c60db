"""When the driver writes a small batch itself.

    three small batches in a row ─► the next one: its rows ─► driver: begin ─► write ─► preCommit
                                         │                           └─ fails, as a task may
                                         └─ more than expected ──────────┴─► executors, as before

A pass through Python workers, and a branch in each sink for each task, take about a fifth of the
time of a batch of a hundred rows. The driver writes one branch per sink, under an attempt number
that no task has; the rest of the protocol is the same. If such a branch is lost after the decision,
the executors rewrite all of its sink's rows from Spark's replay.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from sparkonce.txn_log.record import Share

DEFAULT_ROWS: Final = 1_000
"""The most rows of a batch that the driver writes, unless the user sets driver_rows=."""

_MOST_BYTES: Final = 8 * 2**20
IN_A_ROW: Final = 3
_MOST_IN_A_ROW: Final = 96


class NotSmallError(Exception):
    """A batch has more rows than the driver takes."""


class SmallBatches:
    """Predicts from earlier batches whether the next one will be small.

    Args:
        wanted: after how many small batches in a row the driver writes the next one.

    Attributes:
        most_rows: the most rows of a small batch; 0: the driver writes none.
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
        """Note the size of a batch that was written."""
        is_small = self.most_rows > 0 and all(
            share.rows <= self.most_rows and share.bytes <= _MOST_BYTES for share in shares
        )
        self._in_a_row = self._in_a_row + 1 if is_small else 0

    def forget(self) -> None:
        """The driver could not write a batch: wait for twice as many small ones before the next."""
        self._in_a_row = 0
        self._wanted = min(2 * self._wanted, _MOST_IN_A_ROW)
