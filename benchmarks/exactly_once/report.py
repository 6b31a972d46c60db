"""The results as one HTML file: a table, plots, the method and its caveats."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from jinja2 import FileSystemLoader

from sparkonce.page import html

if TYPE_CHECKING:
    from benchmarks.exactly_once.engines import Engine
    from benchmarks.exactly_once.running import Load, Result

_WIDTH: Final = 680
_NAMES: Final = 260
_BAR: Final = 26


@dataclass(frozen=True)
class Bar:
    """One bar of a plot; `y` and `width` in pixels."""

    name: str
    y: int
    width: float
    shown: str


@dataclass(frozen=True)
class Plot:
    """Horizontal bars, the longest as wide as the plot."""

    title: str
    bars: Sequence[Bar]

    @property
    def height(self) -> int:
        return _BAR * len(self.bars) + 8

    width = _WIDTH
    names = _NAMES

    @classmethod
    def of(cls, title: str, values: Mapping[str, float], unit: str) -> Plot:
        most = max(values.values(), default=0.0) or 1.0
        room = _WIDTH - _NAMES - 110
        return cls(
            title,
            [
                Bar(name, _BAR * n + 4, room * number / most, f"{number:,.0f} {unit}")
                for n, (name, number) in enumerate(values.items())
            ],
        )


def median_of(result: Result) -> float:
    """The median recovery, in seconds; 0 without kills."""
    return statistics.median(result.recovery_s) if result.recovery_s else 0.0


def verdict(engine: Engine, result: Result) -> str:
    """What the run with kills says of the engine's promise."""
    if not result.lost and not result.duplicated:
        return "each row once"
    if engine.promises_once:
        return "broken"
    return "rows lost" if result.lost else "as promised: at least once"


def write_report(
    path: Path, load: Load, results: Mapping[str, Result], engines: Mapping[str, Engine]
) -> None:
    named = {engines[short].name: result for short, result in results.items()}
    plots = [
        Plot.of("Through a backlog", {n: r.rows_per_s for n, r in named.items()}, "rows/s"),
        Plot.of(
            "Until a record is visible: median", {n: r.latency.p50 for n, r in named.items()}, "ms"
        ),
        Plot.of(
            "Until a record is visible: 99 of 100",
            {n: r.latency.p99 for n, r in named.items()},
            "ms",
        ),
        Plot.of(
            "From a kill until new records are visible",
            {n: 1000 * median_of(r) for n, r in named.items()},
            "ms",
        ),
    ]
    costs = [
        (
            engines[once].name,
            engines[least].name,
            results[once].rows_per_s / results[least].rows_per_s,
        )
        for once, least in (("sparkonce", "spark"), ("flink", "flink-once"))
        if once in results and least in results
    ]
    templates = html.templates(FileSystemLoader(Path(__file__).parent))
    page = templates.get_template("report.html").render(
        load=load,
        rows=[
            (engines[short].name, result, median_of(result), verdict(engines[short], result))
            for short, result in results.items()
        ],
        plots=plots,
        costs=costs,
        machine=f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}",
        style=html.style(),
    )
    path.write_text(page)
