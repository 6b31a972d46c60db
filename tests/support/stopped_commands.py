"""The command `sparkonce` as a process that is killed before one of its changes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from sparkonce.testing.services.process import import_path

_HOOK = Path(__file__).parent / "stopping"


def kill_before_change(number: int, below: Path, arguments: list[str]) -> str | None:
    """Run the command, stop it before its change of that number below the folder, and kill it.

    Returns:
        The change; None if the command has ended well before.
    """
    path = import_path()["PYTHONPATH"]
    env = {
        **os.environ,
        "PYTHONPATH": f"{_HOOK}{os.pathsep}{path}",
        "STOP_AT": str(number),
        "STOP_BELOW": f"{below}/",
    }
    shown = below.parent / f"{below.name}.txt"
    with shown.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "sparkonce", *arguments],
            cwd=below,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        process.kill()
        assert process.wait() < 0
        return shown.read_text().splitlines()[-1].removeprefix("stopped before ")
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, shown.read_text()
    return None
