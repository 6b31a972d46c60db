"""The display: live on a terminal, plain lines elsewhere (no control characters)."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Final, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sparkonce.demo.kills import SINKS
from sparkonce.demo.outside import Seen, in_words

PLAIN_EVERY_S: Final = 10.0
PLAIN_WIDTH: Final = 110


@dataclass
class View:
    """What is shown; the show and the ticker change it."""

    writer: str
    rows: int
    kills_planned: int
    kills: int = 0
    sent: int = 0
    batches: int = 0
    newest: str = ""
    doing: str = "starting"
    seen: Seen | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def clock(self) -> str:
        seconds = int(time.monotonic() - self.started)
        return f"{seconds // 60}:{seconds % 60:02d}"


class Screen:
    """Shows a view that changes, and lines that stay."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._lock = threading.Lock()
        self._said_at = 0.0
        self.console = (
            Console(highlight=False)
            if sys.stdout.isatty()
            else Console(highlight=False, no_color=True, width=PLAIN_WIDTH, force_terminal=False)
        )
        self._live = (
            Live(console=self.console, get_renderable=self._picture, refresh_per_second=4)
            if sys.stdout.isatty()
            else None
        )

    def print(self, text: str) -> None:
        """Print a line without the time; not wrapped where a program may read it."""
        self.console.print(Text(text), soft_wrap=not self.console.is_terminal)

    def say(self, text: str, style: str = "") -> None:
        """Print a line that stays."""
        with self._lock:
            self._said_at = time.monotonic()
            self.console.print(
                Text(f"{self._view.clock:>5}  {text}", style=style), soft_wrap=self._live is None
            )

    def tick(self) -> None:
        """Show that the view has changed; without a terminal, print a line now and then."""
        if self._live is None and time.monotonic() - self._said_at > PLAIN_EVERY_S:
            view, rows = self._view, self._view.seen.rows if self._view.seen else {}
            visible = " ".join(f"{sink} {rows.get(sink, 0)}" for sink in SINKS)
            self.say(f"  {view.doing}: {view.batches} batches; visible rows: {visible}")

    def _picture(self) -> Group:
        view = self._view
        table = Table(title=f"sparkonce demo, writer {view.writer}", title_justify="left")
        table.add_column("sink")
        table.add_column("visible rows", justify="right")
        table.add_column("open, prepared or staged", min_width=40)
        for sink in SINKS:
            rows = view.seen.rows[sink] if view.seen else 0
            standing = in_words(view.seen.standing[sink]) if view.seen else ""
            table.add_row(sink, f"{rows:,}", standing)
        facts = Text(
            f"{view.clock}  orders sent {view.sent:,} of {view.rows:,} · batches {view.batches}"
            f"{view.newest} · kills {view.kills} of {view.kills_planned}"
        )
        return Group(table, facts, Text(view.doing, style="bold"))

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Leave the last picture, and continue with plain lines."""
        if self._live:
            self._live.stop()
            self._live = None
