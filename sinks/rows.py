"""A base class for stores that take rows one by one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from sparkonce.sinks.arrow_types import for_python
from sparkonce.sinks.base import HandleT, TwoPhaseCommitSink

if TYPE_CHECKING:
    import pyarrow as pa


class RowSink(TwoPhaseCommitSink[HandleT]):
    """A sink for stores that take rows one by one: implement `write_rows` instead of `write`."""

    rows_at_once: ClassVar[int] = 1000
    """The most rows that one call of `write_rows` gets."""

    @abstractmethod
    def write_rows(self, handle: HandleT, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows into the open branch, each a mapping from column to Python value.

        An instant is a `datetime` in the session's time zone, or in UTC if Python does not know
        that zone (`GMT+8`).

        Raises:
            PrepareRejectedError: the target does not take these rows; the batch is aborted.
        """

    def write(self, handle: HandleT, batch: pa.RecordBatch) -> None:
        rows = for_python(batch)
        for start in range(0, rows.num_rows, self.rows_at_once):
            self.write_rows(handle, _python(rows.slice(start, self.rows_at_once)))


def _python(rows: pa.RecordBatch) -> list[dict[str, Any]]:
    try:
        return rows.to_pylist()
    except (OverflowError, ValueError):
        for name, column in zip(rows.schema.names, rows.columns, strict=True):
            try:
                column.to_pylist()
            except (OverflowError, ValueError) as error:  # a year after 9999; text not in UTF-8
                raise ValueError(
                    f"column {name!r} has a value that Python cannot hold: {error}"
                ) from error
        raise
