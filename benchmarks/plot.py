"""Line plots as SVG, for the documents: both axes are logarithmic.

No library draws them, so that every machine draws them alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Final

_WIDTH: Final = 420
_HEIGHT: Final = 260
_LEFT: Final = 56
_RIGHT: Final = 90
_TOP: Final = 34
_BOTTOM: Final = 40
_COLOURS: Final = ("#3f51b5", "#c77700", "#1a6b35", "#b3161b", "#6a1b9a")
_STYLE: Final = "text{font:12px system-ui,sans-serif;fill:#7a7f92}line{stroke:#aab0c4}"

Line = Sequence[tuple[float, float]]


def panels(titles: Mapping[str, Mapping[str, Line]], x: str) -> str:
    """Plots side by side.

    Args:
        titles: by title, what a plot shows: by name, the points of a line; y is in seconds.
        x: what x counts.

    Returns:
        An SVG document.
    """
    drawn = [
        f'<g transform="translate({_WIDTH * n} 0)">{"".join(_panel(title, lines, x))}</g>'
        for n, (title, lines) in enumerate(titles.items())
    ]
    size = f"0 0 {_WIDTH * len(titles)} {_HEIGHT}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" role="img">'
    return f"{head}<style>{_STYLE}</style>{''.join(drawn)}</svg>\n"


def _panel(title: str, lines: Mapping[str, Line], x: str) -> Iterable[str]:
    points = [point for line in lines.values() for point in line]
    xs = sorted({number for number, _ in points})
    low = math.floor(math.log10(min(y for _, y in points)))
    high = math.ceil(math.log10(max(y for _, y in points)))

    def across(number: float) -> float:
        share = math.log(number / xs[0]) / math.log(xs[-1] / xs[0])
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def down(seconds: float) -> float:
        share = (math.log10(seconds) - low) / max(high - low, 1)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    yield f'<text x="{_LEFT}" y="18" style="font-weight:bold">{escape(title)}</text>'
    for power in range(low, high + 1):
        y = down(10.0**power)
        yield f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_time(power)}</text>'
    for number in xs:
        place = f'x="{across(number):.1f}" y="{_HEIGHT - 22}" text-anchor="middle"'
        yield f"<text {place}>{number:,.0f}</text>"
    yield f'<text x="{across(xs[-1]):.1f}" y="{_HEIGHT - 6}" text-anchor="end">{escape(x)}</text>'
    above = -math.inf
    ends = sorted(lines, key=lambda name: -lines[name][-1][1])
    shown_at: dict[str, float] = {}
    for name in ends:  # names that would overlap move down
        shown_at[name] = above = max(down(lines[name][-1][1]) + 4, above + 13)
    for colour, (name, line) in zip(_COLOURS, lines.items(), strict=False):
        path = " ".join(f"{across(a):.1f},{down(b):.1f}" for a, b in line)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
        place = f'x="{_WIDTH - _RIGHT + 6}" y="{shown_at[name]:.1f}"'
        yield f'<text {place} style="fill:{colour}">{escape(name)}</text>'


def _time(power: int) -> str:
    return {-3: "1 ms", -2: "10 ms", -1: "100 ms"}.get(power) or f"{10**power:,} s"
