"""`shaped`: the columns that each sink asks for, made in the query itself.

In foreachBatch sparkonce adds them to the batch. A data source gets the rows as they are, so the
query has to make them. It needs no JVM, and so works over Spark Connect.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sparkonce.sinks.base import AnySink
from sparkonce.spark_hooks.described import sinks_for_columns
from sparkonce.spark_hooks.shaping import Shapes, distinct_shapes

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

HASH = "sparkonce_hash"
"""How the names of the hash columns begin; the rest says for which sinks the columns are."""


def shaped(df: DataFrame, sinks: Sequence[AnySink] | str) -> DataFrame:
    """The rows for ``format("sparkonce")``, with each sink's columns and a hash of each row.

    The sinks' select= and key= are evaluated here. With the hashes, a branch that its server has
    lost after the decision is rewritten from Spark's replay, once the rows are proven equal;
    without `shaped`, an operator has to settle it.

    Args:
        df: the streaming DataFrame, with the columns from which the sinks make theirs.
        sinks: the sinks of the pipeline, in its order. A pipeline without a module: the option
            "sinks", or the path of the file of JSON. Its secrets are not needed here.

    Raises:
        ConfigurationError: a select= means something else next to those of the other sinks, or
            changes the rows of all; or the JSON is wrong.
    """
    if isinstance(sinks, str):
        sinks = sinks_for_columns(sinks)
    rows, _ = Shapes().with_hashes(df, sinks)
    hashes = hash_names(sinks)
    return rows.toDF(*rows.columns[: -len(hashes)], *hashes)


def hash_names(sinks: Sequence[AnySink]) -> list[str]:
    """The names of the hash columns, one for each shape.

    The plan compares them with those of the pipeline's sinks: with other sinks, or in another
    order, a sink would get the columns of another one.
    """
    names = []
    for select, columns in distinct_shapes(sinks):
        same = [sink for sink in sinks if (sink.select, sink.columns) == (select, columns)]
        told = json.dumps([[sink.name, sink.select] for sink in same]).encode()
        names.append(f"{HASH}_{hashlib.sha256(told).hexdigest()[:12]}")
    return names
