"""The drivers of a torture: started, frozen, killed; and how far their query has come."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from sparkonce.testing.crash import Arm, DriverProcess, Failpoints, Hit
from sparkonce.testing.quick_spark import submit_args
from sparkonce.testing.services.process import import_path, log_tail
from sparkonce.testing.torture.query import Order

_PROGRAM: Final = "sparkonce.testing.torture.query"
_POLL_S: Final = 0.05


class NotReachedError(Exception):
    """The query does not reach a state, although no fault is left."""


class Progress:
    """How far Spark's checkpoint says that the query has come."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint

    @property
    def complete(self) -> int:
        """The number of complete batches."""
        return self._count("commits")

    @property
    def planned(self) -> int:
        """The number of planned batches."""
        return self._count("offsets")

    def _count(self, log: str) -> int:
        folder = self._checkpoint / log
        numbers = [int(path.name) for path in folder.glob("*") if path.name.isdigit()]
        return max(numbers, default=-1) + 1


class Driver:
    """One driver process after the other, of one query.

    Attributes:
        run: the number of the process; it is in the column `run` of its rows.
        failpoints: where it can be paused.
    """

    def __init__(self, folder: Path, order: Order, runs: Iterator[int]) -> None:
        folder.mkdir()
        self._order, self._runs = order, runs
        self._path = folder / "order.json"
        self.failpoints = Failpoints(folder / "failpoints")
        self.run = 0
        self._log_start = 0
        self._process = DriverProcess(
            [sys.executable, "-P", "-m", _PROGRAM, str(self._path)],
            self.failpoints,
            log=folder / "driver.log",
            env={**import_path(), "PYSPARK_SUBMIT_ARGS": submit_args()},
        )

    def start(self, *, is_last: bool = False) -> None:
        self._log_start = self._process.log.stat().st_size if self._process.log.exists() else 0
        self.run = next(self._runs)
        replace(self._order, run=self.run, is_last=is_last).save(self._path)
        self._process.start()

    @property
    def is_running(self) -> bool:
        return self._process.pid is not None and self._process.status() is None

    @property
    def status(self) -> int | None:
        return self._process.status()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def last_lines(self) -> str:
        """The last error of `sparkonce` in this driver's log; if there is none, its last lines."""
        with self._process.log.open("rb") as file:
            file.seek(self._log_start)
            errors = [line for line in file if b"sparkonce.errors." in line]
        if errors:
            return errors[-1].decode(errors="replace").strip()
        return log_tail(self._process.log, self._log_start)

    def kill(self) -> None:
        """SIGKILL Python, JVM and workers, and disarm all points."""
        self._process.kill()
        self.failpoints.disarm()

    def frozen(self) -> AbstractContextManager[None]:
        """See `DriverProcess.frozen`."""
        return self._process.frozen()

    def ends(self, timeout_s: float) -> bool:
        """Wait until it ends by itself; False if it does not."""
        deadline = time.monotonic() + timeout_s
        while self.is_running and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return not self.is_running

    def close(self) -> None:
        self._process.close()


class Drivers:
    """Two places for drivers of the same query: one works, the other one may be frozen.

    Attributes:
        now: the one that works.
        progress: of the query.
        patience_s: seconds for a batch.
    """

    def __init__(self, folder: Path, order: Order, patience_s: float) -> None:
        runs = itertools.count(1)
        self.now = Driver(folder / "driver-a", order, runs)
        self._other = Driver(folder / "driver-b", order, runs)
        self.progress = Progress(Path(order.checkpoint))
        self.patience_s = patience_s

    def swap(self) -> None:
        """Let the other place work."""
        self.now, self._other = self._other, self.now

    def advance(self, batches: int) -> bool:
        """Wait until that many more batches are complete; False if the driver ended first."""
        goal = self.progress.complete + batches
        return self.wait(lambda: self.progress.complete >= goal)

    def meet(self, arm: Arm, batches: int) -> Hit | None:
        """Wait until a process is paused there; None if that many batches pass, or it ends."""
        goal = self.progress.complete + batches
        hits = partial(self.now.failpoints.hits, arm)
        self.wait(lambda: bool(hits()) or self.progress.complete >= goal)
        return next(iter(hits()), None)

    def wait(self, reached: Callable[[], bool]) -> bool:
        """Wait until a state is reached; False if the driver ended first.

        Raises:
            NotReachedError: neither, and no batch was completed for `patience_s`.
        """
        complete, deadline = self.progress.complete, time.monotonic() + self.patience_s
        while not reached():
            if not self.now.is_running:
                return reached()
            if self.progress.complete > complete:
                complete = self.progress.complete
                deadline = time.monotonic() + self.patience_s
            if time.monotonic() > deadline:
                raise NotReachedError(
                    f"driver {self.now.run} runs, and completes no batch in "
                    f"{self.patience_s:.0f} s: {self.now.last_lines()}"
                )
            time.sleep(_POLL_S)
        return True

    def close(self) -> None:
        self.now.close()
        self._other.close()
