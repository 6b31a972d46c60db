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


class Closable(Protocol):
    """A log that opens again by itself what was closed; its lock guards what it has open."""

    _lock: threading.RLock

    def close(self) -> None: ...


_logs: WeakSet[Closable] = WeakSet()
_forking = threading.Lock()  # guards `_logs` too
_held: list[Closable] = []


def closed_at_forks(log: Closable) -> None:
    """Close the log before every fork of this process, from now on, as long as it is in use."""
    with _forking:
        _logs.add(log)


def _close_all() -> None:
    _forking.acquire()
    for log in list(_logs):
        log._lock.acquire()  # noqa: SLF001 - as agreed above
        _held.append(log)
        log.close()


def _release_all() -> None:
    while _held:
        _held.pop()._lock.release()  # noqa: SLF001
    _forking.release()


def _renew_all() -> None:
    global _forking  # noqa: PLW0603  # threads of the parent may have waited for the old one
    while _held:
        _held.pop()._lock = threading.RLock()  # noqa: SLF001
    _forking = threading.Lock()


os.register_at_fork(before=_close_all, after_in_parent=_release_all, after_in_child=_renew_all)
