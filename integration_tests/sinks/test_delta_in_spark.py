"""Delta's own runtime reads and maintains a table that `DeltaSink` writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from integration_tests.support.older_spark import packages
from sparkonce.testing.services.java import jar_dir

ROOT = Path(__file__).parents[2]
SPARK = "4.1.0"
"""Delta 4.3 has no runtime for Spark 4.2 and 4.3. The sink needs none."""


@pytest.mark.slow
def test_spark_reads_compacts_and_vacuums(tmp_path: Path) -> None:
    """Before a batch, while one waits for its commit, and before a commit is repeated."""
    jars = ",".join(map(str, jar_dir("delta").glob("*.jar")))
    done = subprocess.run(
        [sys.executable, "-m", "integration_tests.sinks.delta_in_spark", str(tmp_path), jars],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(packages(SPARK))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    looks = [each for each in said if "what" in each]
    assert [(look["rows"], look["equal"], look["day"]) for look in looks] == [
        (40, True, 3),
        (40, True, 3),
        (80, True, 3),
        (120, True, 3),
        (160, True, 3),
    ]
    assert {"has_first_version": False, "left": []} in said
