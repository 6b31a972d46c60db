"""Who a driver is, and whether it still runs, as far as that can be told from here.

host:pid@1f2e3d4c       the last part stands for this boot of this machine, and for the
                        container: in another one the same pid is another process
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from pathlib import Path

_NAME = re.compile(r".*:(?P<pid>\d+)@(?P<space>[0-9a-f]{8})")
_CLOCKS_DIFFER_S = 2.0


def this_driver() -> str:
    """This process, as the transaction log keeps it."""
    space = _pid_space()
    return f"{socket.gethostname()}:{os.getpid()}" + (f"@{space}" if space else "")


def is_running(driver: str, since: float) -> bool | None:
    """Whether the driver that began at `since` (Unix time in seconds) runs; None: cannot be told.

    A process that is stopped runs: it may go on at any moment.
    """
    match = _NAME.fullmatch(driver)
    if match is None or match["space"] != _pid_space():
        return None  # another machine or container, or one that does not say
    began = _began(int(match["pid"]))
    return began is not None and began <= since + _CLOCKS_DIFFER_S


def _pid_space() -> str:
    """Eight hex digits for this boot and this set of process ids; empty where Linux is not."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = Path("/proc/self/ns/pid").readlink()
    except OSError:
        return ""
    return hashlib.sha256(f"{boot} {space}".encode()).hexdigest()[:8]


def _began(pid: int) -> float | None:
    """When the process began, in Unix time; None when there is none, or only its exit code."""
    try:
        # The second field, the program's name, may hold anything; it ends with the last bracket.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        stat = Path("/proc/stat").read_text()
    except OSError:
        return None
    state, ticks = fields[0], int(fields[19])
    if state in "ZX":
        return None
    boot_time = re.search(r"^btime (\d+)$", stat, re.MULTILINE)
    return 0.0 if boot_time is None else int(boot_time[1]) + ticks / os.sysconf("SC_CLK_TCK")
