"""Kill a driver at a named point of the protocol.

    points = Failpoints(folder)
    driver = DriverProcess([sys.executable, "job.py"], points, log=folder / "driver.log")
    arm = points.arm("decide.after", batch=3)
    driver.start()
    driver.wait_for(arm)       # the driver is paused at the point: the state is reached
    driver.kill()              # SIGKILL for Python, its JVM and the workers
    points.disarm()

No kill depends on timing: each one waits until the driver has reached its state. `wait_for` fails
when the driver ends, or a deadline passes, before that.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sparkonce.failpoints import ENVIRONMENT_VARIABLE
from sparkonce.steps import POINTS
from sparkonce.testing.services.process import Command, Guard, log_tail

POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Arm:
    """One armed point."""

    name: str
    point: str
    where: Mapping[str, object]

    def __str__(self) -> str:
        where = " ".join(f"{key}={value}" for key, value in self.where.items())
        return f"{self.point} {where}".strip()


@dataclass(frozen=True, slots=True)
class Hit:
    """An armed point was reached.

    Attributes:
        arm: name of the `Arm`.
        point: which point.
        where: batch, sink and the like, as the code reported them.
        pid: of the process that reached it (the driver's Python, or a Python worker).
    """

    arm: str
    point: str
    where: Mapping[str, Any]
    pid: int


class Failpoints:
    """The folder through which a test controls a driver (see `sparkonce.failpoints`)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("armed", "hits"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self._count = 0

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that the driver needs."""
        return {ENVIRONMENT_VARIABLE: str(self.folder)}

    def arm(
        self,
        point: str,
        *,
        action: Literal["stop", "error", "note"] = "stop",
        skip: int = 0,
        **where: object,
    ) -> Arm:
        """Arm a point, also while the driver runs.

        Args:
            point: a name of `sparkonce.steps.POINTS`.
            action: ``stop`` pauses the process there, ``error`` makes it fail, ``note`` only
                records the hit.
            skip: how often each process passes the point before the action applies.
            where: only where these match, such as ``batch=3`` or ``sink="kafka"``.

        Raises:
            ValueError: there is no such point.
        """
        if point not in POINTS:
            raise ValueError(f"no fail point {point!r}; use one of {', '.join(POINTS)}")
        self._count += 1
        arm = Arm(f"{self._count:04d}", point, where)
        path = self._path(arm)
        hidden = path.with_suffix(".tmp")
        order = {"point": point, "where": where, "action": action, "skip": skip}
        hidden.write_text(json.dumps(order))
        hidden.rename(path)
        return arm

    def disarm(self, *arms: Arm) -> None:
        """Let processes that are paused at these points continue; without arguments, at all."""
        paths = [self._path(arm) for arm in arms] or (self.folder / "armed").glob("*.json")
        for path in paths:
            path.unlink(missing_ok=True)

    def hits(self, *arms: Arm) -> list[Hit]:
        """The hits so far of these arms; without arguments, of all."""
        patterns = [f"{arm.name}-*.json" for arm in arms] or ["*.json"]
        paths = [path for each in patterns for path in (self.folder / "hits").glob(each)]
        return [Hit(**json.loads(path.read_text())) for path in sorted(paths)]

    def _path(self, arm: Arm) -> Path:
        return self.folder / "armed" / f"{arm.name}.json"


class DriverProcess:
    """A driver program that is started, killed and started again; it never outlives this process.

    Args:
        argv: the program and its arguments.
        failpoints: passed to it through its environment.
        log: the file for its output.
        env: more environment variables.
    """

    def __init__(
        self,
        argv: Sequence[str],
        failpoints: Failpoints,
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
    ) -> None:
        environment = {**os.environ, **failpoints.environment, **(env or {})}
        self._command = Command(argv=list(argv), log=log, env=environment)
        self._failpoints = failpoints
        self._guard = Guard()
        self.log = log

    @property
    def pid(self) -> int | None:
        return self._guard.pid

    def start(self) -> None:
        self._guard.start(self._command)

    def status(self) -> int | None:
        """The exit code; None while it runs."""
        return self._guard.status()

    def wait_for(self, *arms: Arm, timeout_s: float = 180.0) -> list[Hit]:
        """Wait until every one of `arms` was hit; return all their hits.

        Raises:
            AssertionError: the driver ended first, or `timeout_s` passed. The message has the end
                of the driver's log.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            hits = self._failpoints.hits(*arms)
            missing = [arm for arm in arms if arm.name not in {hit.arm for hit in hits}]
            if not missing:
                return hits
            waited_for = ", ".join(map(str, missing))
            if (status := self.status()) is not None:
                raise AssertionError(
                    f"the driver ended with {status} before {waited_for}: "
                    f"{log_tail(self.log, lines=1)}\nthe end of its log: {log_tail(self.log)}"
                )
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"{waited_for} not reached in {timeout_s:.0f} s: {log_tail(self.log)}"
                )
            time.sleep(POLL_S)

    def kill(self) -> None:
        """SIGKILL the program and all its descendants: Python, JVM and workers."""
        self._guard.end()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """SIGSTOP the program and all its descendants; SIGCONT them at the end of the block."""
        import psutil  # noqa: PLC0415 - an extra, which `Guard` asks for in words

        program = psutil.Process(self.pid)
        tree = [program, *program.children(recursive=True)]

        def send(number: signal.Signals) -> None:
            for process in tree:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)

        try:
            send(signal.SIGSTOP)
            yield
        finally:
            send(signal.SIGCONT)

    def wait(self, *, timeout_s: float = 300.0) -> int:
        """Wait until the program ends by itself; return its exit code.

        Raises:
            AssertionError: `timeout_s` passed.
        """
        deadline = time.monotonic() + timeout_s
        while (status := self.status()) is None:
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"the driver did not end in {timeout_s:.0f} s: {log_tail(self.log)}"
                )
            time.sleep(POLL_S)
        return status

    def close(self) -> None:
        """End the program if it still runs."""
        self._guard.close()
