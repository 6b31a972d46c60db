"""What a page shows, compared with what a command printed."""

from __future__ import annotations

import re


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
