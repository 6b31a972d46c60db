"""docs/writing_a_sink.md runs as it stands."""

from __future__ import annotations

import doctest
from pathlib import Path

GUIDE = Path(__file__).parent.parent / "docs" / "writing_a_sink.md"


def test_guide_runs() -> None:
    """Every example gives what the page shows, illegal orders too."""
    flags = doctest.ELLIPSIS
    done = doctest.testfile(str(GUIDE), module_relative=False, optionflags=flags, encoding="utf-8")
    assert done.attempted > 40
    assert done.failed == 0
