"""A log has nothing open while its process forks; parent and child each open their own afterwards.

A socket that two processes share gives one of them the other's answer. With SQLite even a
connection of the child's own does not help. SQLite trusts the locks that its process holds as far
as it knows, and those of an inherited connection ended with the fork. The parent then believes that
it is the file's last user, and removes the write-ahead log that the child writes to. Closing what
is inherited does not help either: it sends on the parent's socket, and drops the child's locks.

So a fork waits until no other thread is in a log, and closes them all. A child has fresh locks.
"""

from __future__ import annotations

import os
import threading
from typing import Protocol
from weakref import WeakSet

from sparkonce.once import once


class Closable(Protocol):
    """A log that opens again by itself what was closed; its lock guards what it has open."""

    _lock: threading.RLock

    def close(self) -> None: ...


def closed_at_forks(log: Closable) -> None:
    """Close the log before every fork of this process, from now on, as long as it is in use."""
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
            log._lock.acquire()  # noqa: SLF001 - as agreed above
            self._held.append(log)
            log.close()

    def _release_all(self) -> None:
        while self._held:
            self._held.pop()._lock.release()  # noqa: SLF001
        self._lock.release()

    def _renew_all(self) -> None:
        while self._held:
            self._held.pop()._lock = threading.RLock()  # noqa: SLF001
        self._lock = threading.Lock()  # threads of the parent may have waited for the old one
