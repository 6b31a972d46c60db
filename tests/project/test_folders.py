"""The folders are the map of the tests: a module is in one of them, and imports no test module."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).parents[2]
TREES = ("tests", "integration_tests")
NEXT_STEP = "Move what they share to tests/support/ or integration_tests/support/."


def imported(source: str) -> Iterator[str]:
    """Dotted names that a module imports, also in a program that it has as a string."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and "import " in str(node.value):
            with suppress(SyntaxError, ValueError):  # most strings are no programs
                yield from imported(dedent(str(node.value)))


def forbidden(source: str) -> list[str]:
    """The imported names that are test modules, or are defined in one."""
    return sorted(name for name in imported(source) if is_of_a_test_module(name))


def is_of_a_test_module(name: str) -> bool:
    tree, *parts = name.split(".")
    paths = (ROOT.joinpath(tree, *parts[: n + 1]) for n in range(len(parts)))
    return tree in TREES and any(
        path.name.startswith("test_") and path.with_suffix(".py").is_file() for path in paths
    )


@pytest.mark.parametrize("tree", TREES)
def test_every_module_is_in_a_folder(tree: str) -> None:
    modules = {path.name for path in (ROOT / tree).glob("*.py")}
    assert modules <= {"__init__.py", "conftest.py"}


@pytest.mark.parametrize("tree", TREES)
def test_no_module_imports_a_test_module(tree: str) -> None:
    found = {
        path.relative_to(ROOT).as_posix(): names
        for path in (ROOT / tree).rglob("*.py")
        if (names := forbidden(path.read_text(encoding="utf-8")))
    }
    assert not found, f"{found}. {NEXT_STEP}"


HERE = "tests.project.test_folders"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import TREE.project.test_folders", [HERE]),
        ("from TREE.project import test_folders as f", [HERE]),
        ("from TREE.project import (\n    release_check,\n    test_folders,\n)", [HERE]),
        ("def f():\n    from TREE.project.test_folders import ROOT", [f"{HERE}.ROOT"]),
        ('JOB = """\n    import sys\n    import TREE.project.test_folders\n"""', [HERE]),
        ("from TREE.support.world import test_that_is_no_module", []),
        ("from TREE.project import release_check\nimport test_json_sink", []),
        ('"""Run python -m TREE.project.test_folders: import nothing."""', []),
    ],
)
def test_import_of_a_test_module_is_found(source: str, found: list[str]) -> None:
    """The sources name no tree, or they would be found in this module."""
    assert forbidden(source.replace("TREE", "tests")) == found
