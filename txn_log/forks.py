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


class Closable(Protocol):
    """A log that reopens its connection when needed; its lock guards that connection."""

    _lock: threading.RLock

    def close(self) -> None: ...


_logs: WeakSet[Closable] = WeakSet()
_forking = threading.Lock()  # guards `_logs` too
_held: list[Closable] = []


def closed_at_forks(log: Closable) -> None:
    """Close the log before every fork of this process, as long as the log object lives."""
    with _forking:
        _logs.add(log)


def _close_all() -> None:
    _forking.acquire()
    for log in list(_logs):
        log._lock.acquire()  # noqa: SLF001 - see Closable
        _held.append(log)
        log.close()


def _release_all() -> None:
    while _held:
        _held.pop()._lock.release()  # noqa: SLF001
    _forking.release()


def _renew_all() -> None:
    global _forking  # noqa: PLW0603  # threads of the parent may wait for the old one
    while _held:
        _held.pop()._lock = threading.RLock()  # noqa: SLF001
    _forking = threading.Lock()


os.register_at_fork(before=_close_all, after_in_parent=_release_all, after_in_child=_renew_all)
