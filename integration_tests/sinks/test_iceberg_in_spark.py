"""Iceberg's own runtime reads and maintains a table that `IcebergSink` writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from integration_tests.support.older_spark import said_by
from sparkonce.testing.services.java import jar_dir

if TYPE_CHECKING:
    from pathlib import Path

SPARK = "4.1.0"
"""Iceberg 1.12 has no runtime for Spark 4.2 and 4.3. The sink needs none."""


@pytest.mark.slow
def test_spark_reads_compacts_and_expires(tmp_path: Path) -> None:
    """Before a batch, while one waits, after the clock went back, before a repeat, after a rewind.

    A batch that Spark has deleted a row from is not taken back.
    """
    jars = ",".join(map(str, jar_dir("iceberg").glob("*.jar")))
    said = said_by("integration_tests.sinks.iceberg_in_spark", SPARK, str(tmp_path), jars)
    looks = [each for each in said if "what" in each]
    assert [(look["rows"], look["equal"], look["day"]) for look in looks] == [
        (40, True, 3),
        (40, True, 3),
        (80, True, 3),
        (120, True, 3),
        (120, True, 3),
        (120, True, 3),
        (120, True, 3),
    ]
    assert {"removed": []} in said
    assert {"marks": []} in said
    assert {"expired": True} in said
    assert "marks rows" in said[-1]["refusal"]
