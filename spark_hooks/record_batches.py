"""Record batches on their way to Python workers, and the limit on their size.

Spark measures a record batch again after each row, since it must not grow beyond
``spark.sql.execution.arrow.maxBytesPerBatch``. With narrow rows, measuring takes half of the time
from the JVM to a worker. If earlier record batches show that none will come near the limit, the
limit is lifted while ours are made, and Spark does not measure.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from py4j.protocol import Py4JError

from sparkonce.spark_hooks.partition_writer import PartitionSummary
from sparkonce.spark_hooks.running_query import RunningQuery
from sparkonce.storage.hadoop import java_class

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

logger = logging.getLogger("sparkonce")

_LIMIT: Final = "spark.sql.execution.arrow.maxBytesPerBatch"
_UNLIMITED: Final = 2**31 - 1
"""The one value with which Spark does not measure."""

TREE_PATTERNS: Final = "org.apache.spark.sql.catalyst.trees.TreePattern"

_MARGIN: Final = 8
"""Rows may become this many times wider than any before, and still stay under the limit."""


class RecordBatches:
    """Predicts from earlier record batches how wide the next rows will be."""

    def __init__(self) -> None:
        self._row_bytes = 0.0
        self._is_refused = False

    def note(self, summaries: Iterable[PartitionSummary]) -> None:
        """Note the width of the rows that the tasks of a pass read."""
        self._row_bytes = max([self._row_bytes, *(summary.row_bytes for summary in summaries)])

    @contextmanager
    def unmeasured(self, df: DataFrame, query: RunningQuery) -> Iterator[None]:
        """Lift the limit inside the block, if the rows will stay far below it.

        Not where `df` or the query's own plan runs Python: the limit also applies to the rows that
        this Python gets, and those may be wider.
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
        except Exception as error:  # noqa: BLE001 - some platforms forbid setting it
            logger.info("%s cannot be set here, so Spark measures every row: %s", _LIMIT, error)
            self._is_refused = True
            return False
        return True


def _is_without_python(df: DataFrame, query: RunningQuery) -> bool:
    try:
        patterns = java_class(df.sparkSession._jvm, TREE_PATTERNS)  # noqa: SLF001
        python = patterns.PYTHON_UDF(), patterns.EVAL_PYTHON_UDTF()
        plans = df._jdf.queryExecution().optimizedPlan(), query.plan  # noqa: SLF001
        return not any(plan.containsPattern(p) for plan in plans for p in python)
    except (Py4JError, AttributeError, TypeError):  # another Spark, with other names for this
        return False
