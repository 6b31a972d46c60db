"""A cache of downloads and builds: each folder in it is complete, or does not exist.

A download goes into a folder of another name, which is renamed when it is complete. Other processes
wait for a lock meanwhile, so no process ever uses an incomplete download.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sparkonce.once import once

if TYPE_CHECKING:
    from rich.status import Status

SCRATCH = ".scratch"
LINE_EVERY_S = 10.0
SPINNER_EVERY_S = 0.5


def cache_dir() -> Path:
    """`$SPARKONCE_CACHE`, or `sparkonce` in the user's cache folder."""
    if own := os.environ.get("SPARKONCE_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sparkonce"


def cached(path: Path, make: Callable[[Path], None]) -> Path:
    """The folder `path`, made by `make(temporary folder)` if it does not exist.

    `make` puts files that it needs only meanwhile into the subfolder `SCRATCH`.
    """
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    # The kernel releases the lock when its holder dies.
    with path.with_name(f".{path.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():  # another process made it while we waited
            return path
        partial = path.with_name(f".{path.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        scratch = partial / SCRATCH
        scratch.mkdir(parents=True)
        make(partial)
        shutil.rmtree(scratch)
        partial.rename(path)
    return path


@contextlib.contextmanager
def progress(what: str, folder: Path | None = None) -> Iterator[Callable[[], None]]:
    """Show on stderr that work is in progress; the caller calls the result again and again.

    Shows a spinner on a terminal, else a line every `LINE_EVERY_S`; both with the seconds so far,
    and with the size of `folder` if given.
    """
    begin = time.monotonic()

    def state() -> str:
        took = f"{time.monotonic() - begin:.0f} s"
        return took if folder is None else f"{took}, {_size(folder)}"

    if sys.stderr.isatty():
        with once(_Spinner).shown(what) as update:
            yield _at_most_every(SPINNER_EVERY_S, lambda: update(state()))
        return
    _line(f"{what} (once) …")
    yield _at_most_every(LINE_EVERY_S, lambda: _line(f"{what}: {state()} …"))


class _Spinner:
    """One line on the terminal for all downloads, each of which runs in its own thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: dict[str, str] = {}
        self._status: Status | None = None

    @contextlib.contextmanager
    def shown(self, what: str) -> Iterator[Callable[[str], None]]:
        self._change(what, "")
        try:
            yield lambda state: self._change(what, state)
        finally:
            self._change(what, None)

    def _change(self, what: str, state: str | None) -> None:
        from rich.console import Console  # noqa: PLC0415  # only a terminal needs it

        with self._lock:
            if state is None:
                self._tasks.pop(what, None)
            else:
                self._tasks[what] = state
            text = ", ".join(f"{task} {done}".strip() for task, done in self._tasks.items())
            if self._status is None:
                self._status = Console(stderr=True).status("")
                self._status.start()
            self._status.update(f"{text} (once)")
            if not self._tasks:
                self._status.stop()
                self._status = None


def _at_most_every(seconds: float, act: Callable[[], None]) -> Callable[[], None]:
    last = time.monotonic()

    def call() -> None:
        nonlocal last
        if time.monotonic() - last > seconds:
            last = time.monotonic()
            act()

    return call


def _line(text: str) -> None:
    print(f"sparkonce: {text}", file=sys.stderr, flush=True)  # noqa: T201


def _size(folder: Path) -> str:
    size = 0
    for inside, _, names in os.walk(folder):  # walk skips folders that are gone by now
        for name in names:
            with contextlib.suppress(OSError):  # a temporary file may be gone too
                size += Path(inside, name).lstat().st_size
    return f"{size / 1e6:.0f} MB"
