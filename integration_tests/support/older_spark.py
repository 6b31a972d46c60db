"""Older releases of PySpark, each in a folder of packages that comes before the installed ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from sparkonce.testing.services.cache import cache_dir, cached


def packages(version: str) -> Path:
    """A folder that holds this PySpark and what it needs; downloaded once."""

    def install(folder: Path) -> None:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
        subprocess.run([*pip, f"pyspark=={version}"], check=True)

    return cached(cache_dir() / f"pyspark-{version}", install)
