"""Record batches on their way to Python workers, and the limit on their size.

Spark measures a record batch anew after each of its rows, for fear that it grows beyond
``spark.sql.execution.arrow.maxBytesPerBatch``. With narrow rows that makes half of the whole way
from the JVM to a worker. Where the record batches before tell that none will come near the limit,
it is lifted while ours are made; then Spark does not measure.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from py4j.protocol import Py4JError

from sparkonce.spark_hooks.partition_writer import PartitionSummary
from sparkonce.spark_hooks.running_query import RunningQuery

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

logger = logging.getLogger("sparkonce")

_LIMIT: Final = "spark.sql.execution.arrow.maxBytesPerBatch"
_UNLIMITED: Final = 2**31 - 1
"""The one value with which Spark does not measure."""

_MARGIN: Final = 8
"""How many times wider than ever before the rows may become and still stay under the limit."""


class RecordBatches:
    """Tells from the record batches before how wide the rows of the next ones will be."""

    def __init__(self) -> None:
        self._row_bytes = 0.0
        self._is_refused = False

    def note(self, summaries: Iterable[PartitionSummary]) -> None:
        """Take note of what the tasks of a pass got."""
        self._row_bytes = max([self._row_bytes, *(summary.row_bytes for summary in summaries)])

    @contextmanager
    def unmeasured(self, df: DataFrame, query: RunningQuery) -> Iterator[None]:
        """Within it, no limit is watched where none will be met; else nothing is changed.

        Args:
            df: the rows on their way.
            query: which made the batch. Where Python computes some of the rows, there or in `df`,
                the limit is left: it also holds for what that Python gets, which may be wider.
        """
        conf: Any = df.sparkSession.conf
        state: Any = df.sparkSession._jsparkSession.sessionState().conf()  # noqa: SLF001
        # Spark clones the session for each query, so no other query sees the limit.
        lifts = self._is_far_below_limit(state) and _is_without_python(df, query)
        before = conf.get(_LIMIT) if lifts and state.contains(_LIMIT) else None
        lifts = lifts and self._lift(conf)
        try:
            yield
        finally:
            if lifts and before is None:
                conf.unset(_LIMIT)
            elif lifts:
                conf.set(_LIMIT, before)

    def _is_far_below_limit(self, state: Any) -> bool:
        if not self._row_bytes or self._is_refused:
            return False
        try:
            limit, rows = state.arrowMaxBytesPerBatch(), state.arrowMaxRecordsPerBatch()
        except Py4JError:  # an older Spark, which does not measure
            return False
        return bool(0 < rows * self._row_bytes * _MARGIN < limit < _UNLIMITED)

    def _lift(self, conf: Any) -> bool:
        try:
            conf.set(_LIMIT, str(_UNLIMITED))
        except Exception as error:  # noqa: BLE001 - some platforms let nobody set it
            logger.info("%s cannot be set here, so Spark measures every row: %s", _LIMIT, error)
            self._is_refused = True
            return False
        return True


def _is_without_python(df: DataFrame, query: RunningQuery) -> bool:
    try:
        patterns = df.sparkSession._jvm.org.apache.spark.sql.catalyst.trees.TreePattern  # noqa: SLF001
        python = patterns.PYTHON_UDF(), patterns.EVAL_PYTHON_UDTF()
        plans = df._jdf.queryExecution().optimizedPlan(), query.plan  # noqa: SLF001
        return not any(plan.containsPattern(p) for plan in plans for p in python)
    except (Py4JError, AttributeError, TypeError):  # a Spark that has other names for this
        return False
