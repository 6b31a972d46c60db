"""Failing twins of a contract: the names of its tests, and the page that lists a twin for each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"^\| `(\w+)` \| .+ \| `([\w/.]+)::(\w+)` \|$", re.MULTILINE)


def name_of(test: Any) -> str:
    """The name of a test, or of one with some of its arguments."""
    return str(getattr(test, "func", test).__name__)


def twins_on(page: str, contract: type) -> Iterator[tuple[str, str, str]]:
    """Check that a page in docs/contributing has a row for each test of the contract.

    Yields:
        A test of the contract, the file with its twin, and that file's text, which has the test
        that the row names.
    """
    rows = _ROW.findall((_ROOT / "docs" / "contributing" / page).read_text())
    tests = {name for name in dir(contract) if name.startswith("test_")}
    named = {name for name, _, _ in rows}
    assert not tests - named, f"docs/contributing/{page} has no twin of {tests - named}"
    assert not named - tests, f"the contract has no {named - tests}"
    for name, file, test in rows:
        paths = [_ROOT / tree / file for tree in ("tests", "integration_tests")]
        text = "\n".join(path.read_text() for path in paths if path.exists())
        assert f"def {test}(" in text, f"{file} has no {test}"
        yield name, file, text
