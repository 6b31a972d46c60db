"""What is downloaded once and kept: a folder is complete, or it is not there.

A download goes into a folder of another name and is renamed when it is complete, under a lock that
other processes wait for. So nobody ever uses half a download.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

PLAIN_PROGRESS_S = 10.0


def cache_dir() -> Path:
    """`$SPARKONCE_CACHE`, or `sparkonce` in the user's cache folder."""
    if own := os.environ.get("SPARKONCE_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sparkonce"


def cached(path: Path, make: Callable[[Path], None]) -> Path:
    """The folder `path`, made by `make(temporary folder)` if it is not there."""
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock(path.with_name(f".{path.name}.lock")):
        if path.exists():  # another process made it while we waited
            return path
        partial = path.with_name(f".{path.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        make(partial)
        partial.rename(path)
    return path


@contextlib.contextmanager
def _lock(file: Path) -> Iterator[None]:
    # The kernel gives the lock back when its holder dies.
    with file.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def progress(what: str, folder: Path) -> Iterator[Callable[[], None]]:
    """Show on stderr that something is being fetched; call the result now and then.

    A spinner with the size of `folder` on a terminal, a plain line every ten seconds elsewhere.
    """
    console = Console(stderr=True)
    begin = shown = time.monotonic()
    if console.is_terminal:
        with console.status(f"{what} (once) …") as status:

            def update() -> None:
                status.update(f"{what} (once), {_megabytes(folder)} …")

            yield _at_most_every(0.5, update)
        return

    print(f"sparkonce: {what} (once) …", file=sys.stderr, flush=True)  # noqa: T201

    def line() -> None:
        nonlocal shown
        if time.monotonic() - shown > PLAIN_PROGRESS_S:
            shown = time.monotonic()
            since = f"{shown - begin:.0f} s, {_megabytes(folder)}"
            print(f"sparkonce: {what}: {since} …", file=sys.stderr, flush=True)  # noqa: T201

    yield line


def _at_most_every(seconds: float, act: Callable[[], None]) -> Callable[[], None]:
    last = 0.0

    def call() -> None:
        nonlocal last
        if time.monotonic() - last > seconds:
            last = time.monotonic()
            act()

    return call


def _megabytes(folder: Path) -> str:
    size = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):  # a temporary file that is gone by now
            size += file.lstat().st_size
    return f"{size / 1e6:.0f} MB"
