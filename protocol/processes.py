"""Which process a driver is, and whether it still runs, as far as this process can know.

host:pid@1f2e3d4c.536854    8 hex digits for this boot of this machine and for the container, since
                            the same pid elsewhere is another process; then the time from the boot
                            to the process's start, which no change of the clock moves

A driver counts as gone only where that is proven: an operator's command then fences it without
asking.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from pathlib import Path
from typing import Final, NamedTuple

_PROC: Final = Path("/proc")
_NAME = re.compile(r".*:(?P<pid>\d+)@(?P<space>[0-9a-f]{8})\.(?P<ticks>\d+)")


class _Process(NamedTuple):
    command: str
    state: str
    parent: int
    ticks: int


def this_driver(pid: int | None = None) -> str:
    """A process of this machine, as the transaction log keeps it; default: this one."""
    pid = os.getpid() if pid is None else pid
    name, space, process = f"{socket.gethostname()}:{pid}", _pid_space(), _look_at(str(pid))
    return f"{name}@{space}.{process.ticks}" if space and process else name


def spark_driver() -> str:
    """The JVM that has started this Python process, directly or through a daemon of PySpark's.

    This process itself where there is none, or where it cannot be found.
    """
    pid, seen = os.getpid(), _look_at("self")
    while seen is not None and seen.parent > 1:
        pid, seen = seen.parent, _look_at(str(seen.parent))
        if seen is not None and seen.command == "java":
            return this_driver(pid)
    return this_driver()


def is_running(driver: str) -> bool | None:
    """Whether the driver runs; None: not known.

    A stopped process counts as running: it may resume at any moment.
    """
    match = _NAME.fullmatch(driver)
    if match is None or match["space"] != _pid_space():
        return None  # another machine or container, or an unknown one
    process = _look_at(match["pid"])
    if process is None:
        return False if _is_gone(int(match["pid"])) else None
    return process.state not in "ZX" and process.ticks == int(match["ticks"])


def _pid_space() -> str:
    """Eight hex digits for this boot and this set of process ids; empty if this is not Linux."""
    try:
        if (_PROC / "self").readlink() != Path(str(os.getpid())):
            return ""  # it shows the processes of another container
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        space = (_PROC / "self/ns/pid").readlink()
    except OSError:
        return ""
    return hashlib.sha256(f"{boot} {space}".encode()).hexdigest()[:8]


def _look_at(pid: str) -> _Process | None:
    """The process, which may be a zombie; None when there is none, or it is hidden from us."""
    try:
        # The second field, the program's name, may hold anything; it ends with the last bracket.
        name, _, rest = (_PROC / pid / "stat").read_bytes().rpartition(b")")
    except OSError:
        return None
    fields = rest.split()
    command = name.partition(b"(")[2].decode(errors="replace")
    return _Process(command, fields[0].decode(), int(fields[1]), int(fields[19]))


def _is_gone(pid: int) -> bool:
    """Whether there is no such process; /proc may hide those of other users (hidepid)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
