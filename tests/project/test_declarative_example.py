"""The example for declarative pipelines is the one that its page prints.

`integration_tests/spark/test_declarative.py` runs it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "howto" / "declarative-pipelines.md").read_text(encoding="utf-8")
FILES = sorted((ROOT / "examples" / "declarative_pipeline").glob("*.*"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_page_prints_the_file(path: Path) -> None:
    """Without its docstring."""
    text = re.sub(r'\A""".*?"""\n+', "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    kind = {".yml": "yaml", ".py": "python"}[path.suffix]
    assert f"```{kind}\n{text}```\n" in PAGE
