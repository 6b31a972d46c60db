"""The documents name tests as their proof: each of them must exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ("tests", "integration_tests", "src/sparkonce/testing")
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for folder in ("explanation", "contributing", "archive")
    for page in (ROOT / "docs" / folder).rglob("*.md")
)
NAMED = re.compile(r"(?<![\w/])((?:\w+/)*test_\w+\w)(\.py\b)?(?![\w*])")
OTHERS = {"test_decoding"}
"""What only looks like a test's name: a plugin of Postgres."""


@cache
def sources() -> dict[str, str]:
    """The text of each file with tests, by its path."""
    files = [file for folder in TESTS for file in (ROOT / folder).rglob("*.py")]
    return {file.relative_to(ROOT).as_posix(): file.read_text() for file in files}


@cache
def is_there(name: str) -> bool:
    return any(f"def {name}(" in text for text in sources().values()) or is_file(name)


@cache
def is_file(name: str) -> bool:
    """Whether one file is meant; in both trees, files of one name are two halves of one subject."""
    found = [path for path in sources() if f"/{path}".endswith(f"/{name}.py")]
    return len({path.partition("/")[2] for path in found}) == 1


@pytest.mark.parametrize("page", PAGES)
def test_tests_that_a_page_names(page: str) -> None:
    """A function by its name anywhere; a file by its name and `.py`, and its folder if need be."""
    found = NAMED.findall((ROOT / page).read_text())
    missing = {name for name, suffix in found if not (is_file if suffix else is_there)(name)}
    assert missing <= OTHERS


@pytest.mark.parametrize(
    ("name", "is_clear"),
    [
        ("test_protocol", True),
        ("tools/test_cli", True),
        ("tests/kafka/test_typed", True),
        ("test_sink", False),
        ("kafka/test_protocol", False),
    ],
)
def test_file_is_named_with_its_folder(name: str, is_clear: bool) -> None:
    assert is_file(name) is is_clear


def test_pages_that_rest_on_tests_name_them() -> None:
    """The check above would pass on a page that it does not read."""
    for page in ("docs/explanation/proof.md", "docs/explanation/invariants.md"):
        assert page in PAGES
        assert len(NAMED.findall((ROOT / page).read_text())) > 10
