"""The query of the tests of savepoints: its input, and what it has to have delivered."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from integration_tests.support.spark import ids

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def values(n: int) -> list[int]:
    return [*(n * 7 + i for i in range(5)), n % 3]


def rows(n: int) -> list[str]:
    return ids(*values(n))


def counted(files: range) -> Counter[Any]:
    """What `aggregated` delivers for these files, after all before them; one file is one batch."""
    counts: Counter[int] = Counter()
    found: Counter[Any] = Counter()
    for n in range(files.stop):
        counts.update(value % 3 for value in values(n))
        if n in files:
            found.update((key, counts[key]) for key in {value % 3 for value in values(n)})
    return found


def aggregated(df: DataFrame) -> DataFrame:
    return df.selectExpr("id % 3 AS id").groupBy("id").count()


def delivered(folder: Path) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for path in folder.glob("*.parquet"):
        found.update(tuple(row.values()) for row in pq.read_table(path).to_pylist())
    return found
