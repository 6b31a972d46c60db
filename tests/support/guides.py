"""The guides for authors of sinks: their code, as files."""

from __future__ import annotations

import re
from pathlib import Path

HOWTO = Path(__file__).parents[2] / "docs" / "howto"
GUIDE = HOWTO / "writing-a-sink.md"
PROOF = HOWTO / "proving-a-sink.md"
WHOLE_PROOF = HOWTO / "testing-a-pipeline.md"


def text_of(page: Path) -> str:
    """The page's text. A blank line replaces each closing fence, so that it ends an output."""
    return re.sub(r"^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)


def block_with(line: str, page: Path) -> str:
    """The page's Python block that has this line."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (block,) = (block for block in blocks if line in block)
    return str(block)


def sink_of_the_guide() -> str:
    """The source of `json_sink.py`."""
    return block_with("class JsonSink", GUIDE)


def write_the_guides_files(folder: Path) -> None:
    """Write `JsonSink` as a module, and the tests of it that the pages show."""
    (folder / "json_sink.py").write_text(sink_of_the_guide())
    tests = (
        block_with("class TestJsonSink", PROOF),
        block_with("def test_exactly_once", WHOLE_PROOF),
    )
    (folder / "test_json_sink.py").write_text("\n\n".join(tests))
