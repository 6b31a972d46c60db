"""Closes every log before its process forks; parent and child each open their own connections.

If two processes share a socket, one of them may read the other's answer. With SQLite it does not
even help that the child opens a connection of its own. SQLite in the child relies on the locks of
the inherited connection, but a fork passes no locks on. The parent then believes that it is the
file's last user, and removes the write-ahead log that the child writes to. Nor can the child close
what it inherited: that sends on the parent's socket, and drops the child's locks.

So a fork waits until no other thread uses a log, and closes all logs. A child gets fresh locks.
"""

from __future__ import annotations

import os
import threading
from typing import Protocol
from weakref import WeakSet

from sparkonce.once import once


class Closable(Protocol):
    """A log that reopens its connection when needed; its lock guards that connection."""

    _lock: threading.RLock

    def close(self) -> None: ...


def closed_at_forks(log: Closable) -> None:
    """Close the log before every fork of this process, as long as the log object lives."""
    once(_Forks).add(log)


class _Forks:
    """The logs of a process, at its forks and at those of its children."""

    def __init__(self) -> None:
        self._logs: WeakSet[Closable] = WeakSet()
        self._lock = threading.Lock()  # guards `_logs`; held during a fork
        self._held: list[Closable] = []
        os.register_at_fork(
            before=self._close_all,
            after_in_parent=self._release_all,
            after_in_child=self._renew_all,
        )

    def add(self, log: Closable) -> None:
        with self._lock:
            self._logs.add(log)

    def _close_all(self) -> None:
        self._lock.acquire()
        for log in list(self._logs):
            log._lock.acquire()  # noqa: SLF001 - see Closable
            self._held.append(log)
            log.close()

    def _release_all(self) -> None:
        while self._held:
            self._held.pop()._lock.release()  # noqa: SLF001
        self._lock.release()

    def _renew_all(self) -> None:
        while self._held:
            self._held.pop()._lock = threading.RLock()  # noqa: SLF001
        self._lock = threading.Lock()  # threads of the parent may wait for the old one
