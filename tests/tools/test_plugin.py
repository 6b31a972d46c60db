"""The pytest plugin in a project of its own, without pytest-xdist and in two of its workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = {
    "conftest.py": 'pytest_plugins = ["sparkonce.testing.plugin"]\n',
    "test_it.py": """
import pytest
from sparkonce.testing import plugin

@pytest.mark.parametrize("number", range(4))
def test_it(number, pytestconfig):
    plugin._left_out(pytestconfig)[:] = ["no network"]  # as the fixture spark does
""",
}


@pytest.mark.parametrize("mode", [["-p", "no:xdist"], ["-n", "0"], ["-n", "2"]], ids=" ".join)
def test_what_the_session_went_without_is_told_once(tmp_path: Path, mode: list[str]) -> None:
    """Also when it was a session of a worker, and by how many ever."""
    for name, text in PROJECT.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *mode],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("The fixture spark runs without some jars: no network") == 1
    assert "4 passed" in lines[-1]
