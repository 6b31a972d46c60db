"""Whether a driver still runs, on a machine of which only /proc and `os.kill` are faked."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from sparkonce.protocol import processes
from sparkonce.protocol.processes import is_running, this_driver

TICKS = 500_000
DRIVER = 4242


class Machine:
    """Its processes, as one user sees them."""

    def __init__(self, proc: Path) -> None:
        self.proc = proc
        self.kill_says: type[OSError] | None = ProcessLookupError
        (proc / "sys/kernel/random").mkdir(parents=True)
        (proc / "sys/kernel/random/boot_id").write_text("5a2f\n")
        self.be(os.getpid())

    def be(self, pid: int) -> None:
        """The process that looks."""
        (self.proc / "self").unlink(missing_ok=True)
        (self.proc / "self").symlink_to(str(pid))
        (self.proc / str(pid) / "ns").mkdir(parents=True, exist_ok=True)
        (self.proc / str(pid) / "ns/pid").unlink(missing_ok=True)
        (self.proc / str(pid) / "ns/pid").symlink_to("pid:[4026531836]")

    def begin(self, pid: int, ticks: int = TICKS, state: str = "S") -> None:
        (self.proc / str(pid)).mkdir(exist_ok=True)
        fields = [state, *["0"] * 18, str(ticks), *["0"] * 30]
        (self.proc / str(pid) / "stat").write_text(f"{pid} (a ) b) {' '.join(fields)}\n")
        self.kill_says = None

    def end(self, pid: int) -> None:
        (self.proc / str(pid) / "stat").unlink()
        self.kill_says = ProcessLookupError

    def kill(self, pid: int, signal: int) -> None:
        assert (pid, signal) == (DRIVER, 0)
        if self.kill_says is not None:
            raise self.kill_says


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(tmp_path / "proc")
    monkeypatch.setattr(processes, "_PROC", machine.proc)
    monkeypatch.setattr(os, "kill", machine.kill)
    return machine


@pytest.fixture
def driver(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the log keeps of a driver that runs."""
    machine.begin(DRIVER)
    looking = os.getpid()
    machine.be(DRIVER)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: DRIVER)
        name = this_driver()
    machine.be(looking)
    assert name.startswith(f"{socket.gethostname()}:{DRIVER}@")
    return name


def test_driver_that_runs(machine: Machine, driver: str) -> None:
    assert is_running(driver) is True


@pytest.mark.parametrize("state", "ZX")
def test_driver_that_has_ended(machine: Machine, driver: str, state: str) -> None:
    """It is known to be gone, also while nobody has asked for its exit code."""
    machine.begin(DRIVER, state=state)
    assert is_running(driver) is False
    machine.end(DRIVER)
    assert is_running(driver) is False


@pytest.mark.parametrize("says", [PermissionError, None])
def test_driver_of_another_user_behind_hidepid(
    machine: Machine, driver: str, says: type[OSError] | None
) -> None:
    """/proc does not show it, and it lives: nobody knows which process that is."""
    machine.end(DRIVER)
    machine.kill_says = says
    assert is_running(driver) is None


def test_process_that_got_the_drivers_number(machine: Machine, driver: str) -> None:
    """It began at another time since the boot."""
    machine.begin(DRIVER, ticks=TICKS + 1)
    assert is_running(driver) is False


@pytest.mark.parametrize(
    "change",
    [
        lambda proc: (proc / "sys/kernel/random/boot_id").write_text("another"),
        lambda proc: (proc / "sys/kernel/random/boot_id").unlink(),
        lambda proc: (proc / "self").unlink(),
        lambda proc: ((proc / "self").unlink(), (proc / "self").symlink_to(str(DRIVER))),
    ],
)
def test_another_boot_or_container(
    machine: Machine, driver: str, change: Callable[[Path], object]
) -> None:
    """The number is that of another process there, or of none."""
    change(machine.proc)
    machine.end(DRIVER)
    assert is_running(driver) is None


def test_system_that_is_not_linux(machine: Machine) -> None:
    """Host and process, for messages."""
    (machine.proc / "sys/kernel/random/boot_id").unlink()
    assert this_driver() == f"{socket.gethostname()}:{os.getpid()}"
