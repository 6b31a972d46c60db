"""What is done to a running query. Each fault waits for a state that the query has reached."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args

from sparkonce.errors import ConfigurationError
from sparkonce.testing.crash import Arm, Hit
from sparkonce.testing.kills import Kill
from sparkonce.testing.proxy import FaultKind, Proxy
from sparkonce.testing.torture.drivers import Driver, Drivers, NotReachedError

_ON_EXECUTORS: Final = ("open.after", "write.after", "prepare.before", "prepare.after")
_MOST_BATCHES: Final = 6
"""How long to wait for a point: some are reached only after other faults."""
_FREEZE_S: Final = 45.0
_AWAY_S: Final = 10.0
_TRIES: Final = 3
_COMMAND_S: Final = 600.0


@dataclass
class Stage:
    """What the faults act on.

    Attributes:
        drivers: of the query.
        random: by which they choose.
        note: gets the kind of each event, and a sentence.
        sinks: the names of the pipeline's sinks.
    """

    drivers: Drivers
    random: random.Random
    note: Callable[[str, str], None]
    sinks: Sequence[str]

    def start(self) -> None:
        """Start a driver, unless one runs."""
        driver = self.drivers.now
        if not driver.is_running:
            driver.start()
            self.note("start", f"driver {driver.run}")

    def calm(self, batches: int = 1) -> None:
        """Let the query complete some batches without a fault.

        Raises:
            NotReachedError: it does not.
        """
        for _ in range(_TRIES):
            self.start()
            if self.drivers.advance(batches):
                return
            self.ended(self.drivers.now)
        raise NotReachedError(
            f"{_TRIES} drivers ended by themselves, the last one with: "
            f"{self.drivers.now.last_lines()}"
        )

    def ended(self, driver: Driver) -> None:
        self.note("end", f"driver {driver.run} ended with {driver.status}: {driver.last_lines()}")
        driver.kill()

    def paused(self, arm: Arm, what: object) -> Hit | None:
        """Wait until a process is paused at the point; None if the driver does not get there."""
        driver = self.drivers.now
        hit = self.drivers.meet(arm, _MOST_BATCHES)
        if hit is None and driver.is_running:
            driver.kill()
            self.note("kill", f"driver {driver.run}; it did not reach {what}")
        elif hit is None:
            self.ended(driver)
        return hit

    def recovers(self) -> None:
        """Let the query complete two batches after a fault; a driver may fail once by it."""
        try:
            if self.drivers.advance(2):
                return
            self.ended(self.drivers.now)
        except NotReachedError as error:
            self.note("end", f"{error}; it is killed")
            self.drivers.now.kill()
        self.calm()


class Fault(ABC):
    """One kind of fault; `strike` lets it happen once."""

    @abstractmethod
    def strike(self, stage: Stage) -> None: ...


class KillAtPoint(Fault):
    """SIGKILL a driver that is paused at a point of the protocol."""

    def __init__(self, points: Sequence[Kill]) -> None:
        self._points = points

    def strike(self, stage: Stage) -> None:
        kill = stage.random.choice(self._points)
        is_of_a_start = kill.again or kill.point.startswith("begin")
        if not is_of_a_start:
            stage.calm()
        driver = stage.drivers.now
        if is_of_a_start and driver.is_running:
            driver.kill()
            stage.note("kill", f"driver {driver.run}, to see the next one start")
        arm = _arm(driver, kill)
        stage.start()
        if (hit := stage.paused(arm, kill)) is not None:
            batch = f", batch {hit.where['batch']}" if "batch" in hit.where else ""
            driver.kill()
            stage.note("kill", f"driver {driver.run} at {kill}{batch}")


class KillAtAnyTime(Fault):
    """SIGKILL a driver at a moment that no point names."""

    def strike(self, stage: Stage) -> None:
        stage.calm(stage.random.randint(1, 3))
        time.sleep(stage.random.uniform(0, 1.5))
        driver = stage.drivers.now
        driver.kill()
        stage.note(
            "kill", f"driver {driver.run} at any time, batch {stage.drivers.progress.complete}"
        )


class Freeze(Fault):
    """SIGSTOP a driver at a point, let another one take over, and let the first one go on."""

    def __init__(self, points: Sequence[Kill]) -> None:
        self._points = [kill for kill in points if not kill.again]

    def strike(self, stage: Stage) -> None:
        stage.calm()
        drivers, kill = stage.drivers, stage.random.choice(self._points)
        first = drivers.now
        arm = _arm(first, kill)
        if stage.paused(arm, kill) is None:
            return
        with first.frozen():
            stage.note("freeze", f"driver {first.run} at {kill}")
            drivers.swap()
            stage.start()
            goal, deadline = drivers.progress.complete + 2, time.monotonic() + _FREEZE_S
            drivers.wait(lambda: drivers.progress.complete >= goal or time.monotonic() > deadline)
            if not drivers.now.is_running:
                stage.ended(drivers.now)
                stage.start()
        first.failpoints.disarm()
        stage.note("thaw", f"driver {first.run}, next to driver {drivers.now.run}")
        if first.ends(drivers.patience_s):
            stage.ended(first)
        else:
            stage.note("end", f"driver {first.run} did not end; it is killed")
            first.kill()


class KillWorker(Fault):
    """SIGKILL the Python worker of a task that is paused at a point."""

    def strike(self, stage: Stage) -> None:
        stage.calm()
        driver = stage.drivers.now
        kill = Kill(stage.random.choice(_ON_EXECUTORS), "none", stage.random.choice(stage.sinks))
        arm = _arm(driver, kill)
        hit = stage.paused(arm, kill)
        if hit is None:
            return
        if hit.pid == driver.pid:
            driver.kill()
            stage.note("kill", f"driver {driver.run}, which writes itself, at {kill}")
            return
        os.kill(hit.pid, signal.SIGKILL)
        driver.failpoints.disarm(arm)
        stage.note("worker", f"a task of driver {driver.run} at {kill}, {hit.where}")
        stage.recovers()


def _arm(driver: Driver, kill: Kill) -> Arm:
    where: dict[str, Any] = {} if kill.sink is None else {"sink": kill.sink}
    return driver.failpoints.arm(kill.point, **where)


class Network(Fault):
    """Lose or delay one request or answer, cut all connections, or make a server unreachable."""

    def __init__(self, name: str, proxy: Proxy) -> None:
        self._name, self._proxy = name, proxy

    def strike(self, stage: Stage) -> None:
        stage.calm()
        kind = stage.random.choice([*get_args(FaultKind), "away", "cut"])
        if kind == "cut":
            self._proxy.cut()
            stage.note("network", f"{self._name}: all connections cut")
        elif kind == "away":
            away_s = stage.random.uniform(0, _AWAY_S)
            with self._proxy.away():
                stage.note("network", f"{self._name}: unreachable for {away_s:.1f} s")
                time.sleep(away_s)
        else:
            self._spoil(stage, kind)
        stage.recovers()

    def _spoil(self, stage: Stage, kind: FaultKind) -> None:
        at = stage.random.randint(1, 30)
        goal = stage.drivers.progress.complete + _MOST_BATCHES
        with self._proxy.fault(kind, at) as fault:
            stage.drivers.wait(
                lambda: fault.has_happened or stage.drivers.progress.complete >= goal
            )
            if not fault.has_happened:
                return
            stage.note("network", f"{self._name}: {fault}")
            if kind.endswith("late"):
                # What is held back arrives when another driver has gone on.
                driver = stage.drivers.now
                driver.kill()
                stage.note("kill", f"driver {driver.run}, which waits for {self._name}")
                stage.calm(2)
        if kind.endswith("late"):
            stage.note("network", f"{self._name}: it arrives now")


class Command(Fault):
    """Run a command of the user's, such as one that restarts a server."""

    def __init__(self, name: str, command: str) -> None:
        self._name, self._command = name, command

    def strike(self, stage: Stage) -> None:
        stage.calm()
        stage.note("command", f"{self._name}: {self._command}")
        with tempfile.TemporaryFile() as output:  # not a pipe: it may leave a server that holds it
            process = subprocess.Popen(  # noqa: S602 - the command is the user's own
                self._command,
                shell=True,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                ended = f"ended with {process.wait(_COMMAND_S)}"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                ended = f"took more than {_COMMAND_S:.0f} s"
            if process.returncode != 0:
                output.seek(0)
                said = output.read().decode(errors="replace").strip()[-500:]
                raise ConfigurationError(f"--fault {self._name} {ended}: {said}")
        stage.recovers()
