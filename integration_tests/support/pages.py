"""What a page shows, compared with what a command printed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

_BLOCK = re.compile(
    r"(<!-- not run by the test -->\n)?^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE
)


def blocks(pages: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """Language and text of each block, but for those below "not run by the test"."""
    for page in pages:
        for left_out, language, text in _BLOCK.findall(page.read_text(encoding="utf-8")):
            if not left_out:
                yield language, text


def plain(text: str) -> str:
    """One line, without numbers, names and places, which differ from run to run."""
    text = re.sub(r"\bsparkonce\.[0-9a-f]{16}\.", "sparkonce.LOG.", text)
    text = re.sub(r'"[0-9a-f]{16}"', "DIGEST", text)
    text = re.sub(r"\S*/\S+", "PATH", text)
    text = re.sub(r"\b[0-9a-f]{8}-[0-9a-f-]{27}\b", "ID", text)
    text = re.sub(r"by \S+:\d+", "by DRIVER", text)
    text = re.sub(r"by \S+@\S+", "by USER", text)
    text = re.sub(r"\d[\d.:-]*", "N", text)
    text = re.sub(r"N (s|min) ago", "T ago", text)
    return " ".join(text.split())
