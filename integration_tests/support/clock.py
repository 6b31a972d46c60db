"""A wall clock of its own for the processes of a test, which the test moves while they run.

    clock = ShiftedClock(library, file)     library: `shifted_clock.c`, compiled
    process started with `clock.env`        Python, JVM and workers see the machine's clock
    clock.set_ahead(DAY_S)                  … and from now on one that is a day ahead

Servers keep the machine's clock. Clocks that only count up (`time.monotonic`) are not moved.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from unittest.mock import patch

HOUR_S: Final = 3600.0
DAY_S: Final = 24 * HOUR_S
SOURCE: Final = Path(__file__).with_name("shifted_clock.c")


def missing() -> str | None:
    """Why no clock can be moved here; None where one can."""
    if not Path("/proc/self").exists():
        return "a process gets a clock of its own on Linux only"
    if shutil.which("cc") is None:
        return "a moved clock needs a C compiler: apt-get install gcc libc6-dev"
    return None


def compile_library(folder: Path) -> Path:
    """Compile the library for LD_PRELOAD; returns its file."""
    library = folder / "shifted_clock.so"
    argv = ["cc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"]
    subprocess.run(argv, check=True)
    return library


class ShiftedClock:
    """The wall clock of the processes that run with `env`; at first the machine's.

    Attributes:
        env: environment variables.
        ahead_s: how far it is ahead of the machine's clock, in seconds.
    """

    def __init__(self, library: Path, file: Path) -> None:
        self._file = file
        self._file.write_bytes(struct.pack("q", 0))
        self.env: Mapping[str, str] = {"LD_PRELOAD": str(library), "SHIFTED_CLOCK": str(file)}
        self.ahead_s = 0.0

    def set_ahead(self, seconds: float) -> None:
        """Set it this much ahead of the machine's clock, also under running processes."""
        self.ahead_s = seconds
        with self._file.open("r+b") as mapped:  # in place: processes have mapped this file
            mapped.write(struct.pack("q", int(seconds * 1e9)))

    @contextmanager
    def process(self) -> Iterator[Executor]:
        """One process with this clock, in which functions of modules can run."""
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            with patch.dict(os.environ, self.env):
                assert self.is_near(pool.submit(time.time).result())  # it runs by now
            yield pool

    def is_near(self, at: float, *, within_s: float = 600.0) -> bool:
        """Whether a Unix time is one that this clock showed lately."""
        return abs(at - time.time() - self.ahead_s) < within_s
