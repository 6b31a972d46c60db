"""A process that outlives its parent briefly, to end the parent's server and remove its data.

    parent ──pipe──► watchdog ──► server ──► the server's own children

The parent holds the only write end of the pipe. When the parent ends, even by SIGKILL, the kernel
closes that end, and the watchdog reads the end of file. Then it ends all its descendants and
removes the folders it was given. It runs as a file, so that it imports nothing of sparkonce and
starts quickly.

Requests and answers are JSON, one per line; every request gets one answer, with its number:

    {"id": 1, "do": "start", "argv": […], "log": …, …}    -> {"id": 1, "pid": 4711}
    {"id": 2, "do": "poll"}                               -> {"id": 2, "status": null | 0 | -9}
    {"id": 3, "do": "end", "signal": 2, "grace_s": 10}    -> {"id": 3}   null: SIGKILL at once

If the watchdog itself is killed, Linux kills the server with it, and the folders stay.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
ON_LINUX = sys.platform == "linux"
QUIT_GRACE_S = 2.0
"""How long a server may take to clean up outside its folder after the parent is gone."""

_libc = ctypes.CDLL(None) if ON_LINUX else None


def _prctl(option: int, value: int) -> None:
    if _libc is not None:
        _libc.prctl(option, value, 0, 0, 0)


class Watchdog:
    """Starts and ends one server at a time."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._server: subprocess.Popen[bytes] | None = None
        self._quit_signal: int | None = None
        self._exits: dict[int, int] = {}
        # Grandchildren whose parent died become our children, so `_kill_descendants` finds them.
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        signal.signal(signal.SIGCHLD, self._reap)

    def serve(self) -> None:
        for line in sys.stdin.buffer:
            request = json.loads(line)
            number, verb = request.pop("id"), request.pop("do")
            try:
                answer = getattr(self, f"do_{verb}")(**request)
            except OSError as error:
                answer = {"error": str(error)}
            os.write(sys.stdout.fileno(), json.dumps({"id": number, **answer}).encode() + b"\n")

    def do_start(
        self,
        *,
        argv: list[str],
        log: str,
        env: dict[str, str],
        user: int | None,
        group: int | None,
        quit_signal: int | None,
    ) -> dict[str, Any]:
        self._exits.clear()
        self._quit_signal = quit_signal
        with Path(log).open("ab") as output:
            server = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=env,
                cwd="/",
                user=user,
                group=group,
                extra_groups=None if user is None else [],
                start_new_session=True,
                # It runs after the change of user, which would clear the death signal. It is safe:
                # this process has one thread, which lives as long as the process.
                preexec_fn=self._die_with_watchdog,  # noqa: PLW1509
            )
        self._server = server
        return {"pid": server.pid}

    def do_poll(self) -> dict[str, Any]:
        return {"status": self._status()}

    def _status(self) -> int | None:
        return None if self._server is None else self._exits.get(self._server.pid)

    def do_end(self, *, signal: int | None, grace_s: float) -> dict[str, Any]:
        if signal is not None and self._server is not None and self._status() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._server.pid, signal)
            deadline = time.monotonic() + grace_s
            while self._status() is None and time.monotonic() < deadline:
                time.sleep(0.01)
        self._kill_descendants()
        return {}

    def quit(self, folders: list[str]) -> None:
        """End every process, and remove the folders and their parent folder if that is empty."""
        self.do_end(signal=self._quit_signal, grace_s=QUIT_GRACE_S)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                Path(folder).parent.rmdir()

    def _die_with_watchdog(self) -> None:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._pid:  # died between the fork and the line above
            os._exit(1)

    def _reap(self, *_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                self._exits[pid] = os.waitstatus_to_exitcode(status)

    def _kill_descendants(self) -> None:
        while True:
            # Parents come before their children here, so that no parent can fork unnoticed.
            living = psutil.Process().children(recursive=True)
            if not living:
                return
            for process in living:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.005)
            self._reap()


def main() -> None:
    watchdog = Watchdog()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        # The parent may be gone before it reads an answer.
        with contextlib.suppress(BrokenPipeError):
            watchdog.serve()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        watchdog.quit(sys.argv[1:])


if __name__ == "__main__":
    main()
