"""The tests of this folder, and the cluster's, on the first release of each older Spark 4.

Each version gets a folder of packages, downloaded once, which comes before the installed ones.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from integration_tests.support.older_spark import packages

ROOT = Path(__file__).parents[2]
OLDER = ("4.0.0", "4.1.0", "4.2.0")
SUITES = ("integration_tests/spark", "integration_tests/cluster/test_kills.py")
FEWEST = 250
"""Tests that must have passed; a suite that skips itself proves nothing."""


@pytest.mark.slow
@pytest.mark.parametrize("version", OLDER)
def test_older_spark(version: str, tmp_path: Path) -> None:
    newest = tuple(map(int, pyspark.__version__.split(".")[:2]))
    assert len(OLDER) == newest[1], "each Spark 4 before the installed one is listed"
    environment = {**os.environ, "PYTHONPATH": str(packages(version))}
    shown = [sys.executable, "-c", "import pyspark; print(pyspark.__version__)"]
    said = subprocess.run(shown, env=environment, check=True, capture_output=True, text=True)
    assert said.stdout.strip() == version
    log = tmp_path / "pytest.log"
    command = [sys.executable, "-m", "pytest", "-m", "not slow", "-p", "no:cacheprovider", *SUITES]
    command += ["--numprocesses=2", "--dist=worksteal"]
    # PySpark's own sockets: before 4.1 it does not close those of `collect` and `toArrow`.
    command += ["-W", "ignore::pytest.PytestUnraisableExceptionWarning"]
    with log.open("w") as output:
        ended = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False
        )
    text = log.read_text()
    print(f"Spark {version}: {text.splitlines()[-1]}")
    assert ended.returncode == 0, f"Spark {version}: {text[-10_000:]}"
    passed = re.search(r"(\d+) passed", text)
    assert passed is not None
    assert int(passed[1]) >= FEWEST, text.splitlines()[-1]
