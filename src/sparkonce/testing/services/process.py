"""Processes that end with this one, and the ports they listen on."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkonce.once import once
from sparkonce.testing.services.errors import ServiceError

WATCHDOG = Path(__file__).with_name("watchdog.py")
LOG_TAIL_LINES = 12
POLL_S = 0.02
LOCALHOST = "127.0.0.1"


@dataclass(frozen=True)
class Command:
    """A program to run, its environment and its user."""

    argv: Sequence[str]
    log: Path
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    user: tuple[int, int] | None = None
    """User and group ids to run as; None: those of this process."""
    quit_signal: int | None = None
    """Sent first when the parent is gone, for a server that keeps things outside its folder."""


class Guard:
    """Runs one process at a time, which ends with this process at the latest (see `watchdog`).

    The folders in `remove` are removed after that. Safe to use from any thread.
    """

    def __init__(self, *, remove: Sequence[Path] = ()) -> None:
        if importlib.util.find_spec("psutil") is None:
            raise ServiceError(
                "psutil is missing; install sparkonce[testing] or sparkonce[services]."
            )
        # Unbuffered: a forked child must be able to close its copy without taking a lock.
        self._watchdog = subprocess.Popen(
            [sys.executable, "-P", str(WATCHDOG), *map(str, remove)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            start_new_session=True,
        )
        self._lock = threading.Lock()
        self._requests = 0
        self.pid: int | None = None
        """The process that was started last."""
        # A forked child (multiprocessing) would hold the pipe open after this process died. A
        # child that is started by exec never gets it: Python's pipes are close-on-exec.
        forget = weakref.WeakMethod(self.forget)
        os.register_at_fork(after_in_child=lambda: _call(forget()))

    def start(self, command: Command) -> None:
        user, group = command.user or (None, None)
        answer = self._ask(
            do="start",
            argv=[str(word) for word in command.argv],
            log=str(command.log),
            env=dict(command.env),
            user=user,
            group=group,
            quit_signal=command.quit_signal,
        )
        self.pid = answer["pid"]

    def status(self) -> int | None:
        """The exit code of the process that was started last; None while it runs."""
        status: int | None = self._ask(do="poll")["status"]
        return status

    def end(self, signal: int | None = None, *, grace_s: float = 10.0) -> None:
        """End the process and all its children: by `signal` if given, then by SIGKILL."""
        self._ask(do="end", signal=signal, grace_s=grace_s)

    def run(self, command: Command, *, tick: Callable[[], None] = lambda: None) -> int:
        """Run to the end and return the exit code; call `tick` many times a second meanwhile."""
        self.start(command)
        while (status := self.status()) is None:
            tick()
            time.sleep(POLL_S)
        return status

    def close(self) -> None:
        """End everything and remove the folders; returns when that is done."""
        with self._lock:  # never during a request of another thread
            self.forget()
        self._watchdog.wait()

    def forget(self) -> None:
        """Close this process's ends of the pipes."""
        for pipe in (self._watchdog.stdin, self._watchdog.stdout):
            if pipe is not None:
                pipe.close()

    def _ask(self, **request: Any) -> dict[str, Any]:
        with self._lock:
            answer = self._exchange(request)
        if answer is None:
            raise ServiceError("The watchdog of a server was killed, and the server with it.")
        if "error" in answer:
            raise ServiceError(f"{request['argv'][0]} cannot be started: {answer['error']}.")
        return answer

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any] | None:
        stdin, stdout = self._watchdog.stdin, self._watchdog.stdout
        if stdin is None or stdout is None or stdin.closed:
            raise ServiceError("The server was closed; start_services gives a new one.")
        self._requests += 1
        unsent = json.dumps({"id": self._requests, **request}).encode() + b"\n"
        try:
            while unsent:
                unsent = unsent[stdin.write(unsent) :]
            while line := stdout.readline():
                answer: dict[str, Any] = json.loads(line)
                # Any other number answers a request whose caller was interrupted, by Ctrl-C.
                if answer["id"] == self._requests:
                    return answer
        except BrokenPipeError:
            pass
        return None


@contextlib.contextmanager
def own_guard(guard: Guard | None) -> Iterator[Guard]:
    """The given guard, or a new one that is closed after the block."""
    if guard is not None:
        yield guard
        return
    own = Guard()
    try:
        yield own
    finally:
        own.close()


def _call(action: Callable[[], None] | None) -> None:
    if action is not None:
        action()


def import_path() -> dict[str, str]:
    """The environment that lets another Python import what this process can import."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, map(str, sys.path)))}


def log_tail(log: Path, start: int = 0, lines: int = LOG_TAIL_LINES) -> str:
    """The last lines of a log from the byte `start` on, joined into one line."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(start)
        found = file.read().decode(errors="replace").strip().splitlines()
        return " | ".join(line.strip() for line in found[-lines:])
    return ""


class _Ports:
    """The ports of 127.0.0.1 that this process has given away."""

    def __init__(self) -> None:
        # Not `random` itself: concurrent test runs may seed that with the same number.
        self._random = random.SystemRandom()
        self._lock = threading.Lock()
        self._given: set[int] = set()

    def take(self, choices: Sequence[int]) -> int:
        with self._lock:
            for _ in range(1000):
                port = self._random.choice(choices)
                if port not in self._given and not is_port_taken(port):
                    self._given.add(port)
                    return port
        raise ServiceError("No free port was found on 127.0.0.1.")


def free_port() -> int:
    """A free port of 127.0.0.1 that no client's socket will take meanwhile.

    The kernel gives client sockets ports from its ephemeral range. A server could lose a port of
    that range between a kill and the restart, even to a client that connects to itself. So these
    ports are below the range.
    """
    low = 32768
    with contextlib.suppress(OSError, ValueError):
        low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    return once(_Ports).take(range(15000, low if low >= 16000 else 65000))  # noqa: PLR2004


def json_at(host: str, port: int, path: str) -> dict[str, Any]:
    """What a server's page shows as JSON; empty while it does not respond."""
    try:
        with urllib.request.urlopen(f"http://{host}:{port}/{path}", timeout=5) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except (OSError, ValueError):
        return {}


def is_port_taken(port: int, host: str = LOCALHOST) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the servers do
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return True
            raise ServiceError(f"Port {port} on {host} cannot be used: {error}.") from error
    return False
