"""`shaped`: the columns that each sink asks for, made in the query itself.

In foreachBatch sparkonce adds them to the batch. A data source gets the rows as they are, so the
query has to make them. It needs no JVM, and so works over Spark Connect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sparkonce.sinks.base import AnySink
from sparkonce.spark_hooks.shaping import Shapes

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def shaped(df: DataFrame, sinks: Sequence[AnySink]) -> DataFrame:
    """The rows for ``format("sparkonce")``, with each sink's columns and a hash of each row.

    The sinks' select= and key= are evaluated here. With the hashes, a branch that its server has
    lost after the decision is rewritten from Spark's replay, once the rows are proven equal;
    without `shaped`, an operator has to settle it.

    Args:
        df: the streaming DataFrame, with the columns from which the sinks make theirs.
        sinks: the sinks of the pipeline, in its order.

    Raises:
        ConfigurationError: a select= means something else beside those of the other sinks, or
            changes the rows of all.
    """
    return Shapes().with_hashes(df, sinks)[0]
