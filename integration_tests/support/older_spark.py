"""Older releases of PySpark, each in a folder of packages that comes before the installed ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from sparkonce.testing.services.cache import cache_dir, cached


def packages(version: str) -> Path:
    """A folder that holds this PySpark and what it needs; downloaded once."""

    def install(folder: Path) -> None:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
        subprocess.run([*pip, f"pyspark=={version}"], check=True)

    return cached(cache_dir() / f"pyspark-{version}", install)


def said_by(module: str, version: str, *arguments: str) -> list[dict[str, Any]]:
    """Run a script of this project with this PySpark; the lines of JSON that it prints."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(packages(version))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
