"""The result of a torture as one HTML file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from jinja2 import PackageLoader

from sparkonce.page import html
from sparkonce.testing.torture.running import Outcome
from sparkonce.words import counted

_BEFORE: Final = 25
"""How many events before the anomaly are its history."""


def write_report(path: Path, job: str, outcome: Outcome) -> None:
    """Write the page: the first anomaly with its history, the counts, and every event."""
    templates = html.templates(PackageLoader("sparkonce.testing.torture", ""))
    templates.filters |= {"counted": counted}
    first = next((n for n, e in enumerate(outcome.events) if e.kind == "anomaly"), None)
    page = templates.get_template("report.html").render(
        job=job,
        outcome=outcome,
        style=html.style(),
        passed_s=outcome.events[-1].at_s,
        history=[] if first is None else outcome.events[max(first - _BEFORE, 0) : first],
        record=None if outcome.record is None else json.dumps(outcome.record, indent=2),
    )
    path.write_text(page)
