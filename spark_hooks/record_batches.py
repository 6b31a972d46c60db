"""Record batches on their way to Python workers, and the limit on their size.

Spark measures a record batch anew after each of its rows, for fear that it grows beyond
``spark.sql.execution.arrow.maxBytesPerBatch``. With narrow rows that makes half of the whole way
from the JVM to a worker. Where the batches before tell that no record batch will come near the
limit, it is lifted while ours are made; then Spark does not measure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from py4j.protocol import Py4JError

from sparkonce.spark_hooks.checkpoint import RunningQuery
from sparkonce.txn_log.record import Share

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_LIMIT: Final = "spark.sql.execution.arrow.maxBytesPerBatch"
_UNLIMITED: Final = 2**31 - 1
"""The one value with which Spark does not measure."""

_MARGIN: Final = 8
"""How many times wider than ever before the rows may become and still stay under the limit."""


class RecordBatches:
    """Tells from the micro-batches before how wide the rows of the next one will be."""

    def __init__(self) -> None:
        self._row_bytes: float | None = None

    def note(self, shares: Iterable[Share]) -> None:
        """Take note of a micro-batch that was written."""
        widths = [
            max(part.bytes / part.content.rows for part in share.parts)
            for share in shares
            if share.parts
        ]
        if widths:
            self._row_bytes = max(sum(widths), self._row_bytes or 0.0)

    @contextmanager
    def unmeasured(self, df: DataFrame, query: RunningQuery) -> Iterator[None]:
        """Within it, no limit is watched where none will be met; else nothing is changed.

        Args:
            df: the rows on their way.
            query: which made the batch. Where Python computes some of the rows, there or in `df`,
                the limit is left: it also holds for what that Python gets, which may be wider.
        """
        session: Any = df.sparkSession
        state: Any = session._jsparkSession.sessionState().conf()  # noqa: SLF001
        if not (self._is_far_below_limit(state) and _is_without_python(df, query)):
            yield
            return
        before = session.conf.get(_LIMIT) if state.contains(_LIMIT) else None
        session.conf.set(_LIMIT, str(_UNLIMITED))
        try:
            yield
        finally:
            if before is None:
                session.conf.unset(_LIMIT)
            else:
                session.conf.set(_LIMIT, before)

    def _is_far_below_limit(self, state: Any) -> bool:
        if self._row_bytes is None:
            return False
        try:
            limit, rows = state.arrowMaxBytesPerBatch(), state.arrowMaxRecordsPerBatch()
            is_modifiable = bool(state.isModifiable(_LIMIT))
        except Py4JError:  # an older Spark, which does not measure
            return False
        return is_modifiable and 0 < rows * self._row_bytes * _MARGIN < limit < _UNLIMITED


def _is_without_python(df: DataFrame, query: RunningQuery) -> bool:
    try:
        trees = df.sparkSession._jvm.org.apache.spark.sql.catalyst.trees  # noqa: SLF001
        python = trees.TreePattern.PYTHON_UDF()
        plans = df._jdf.queryExecution().analyzed(), query.plan  # noqa: SLF001
        return not any(plan.containsPattern(python) for plan in plans)
    except (Py4JError, AttributeError, TypeError):  # a Spark that has other names for this
        return False
