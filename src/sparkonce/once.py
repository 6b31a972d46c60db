"""What exists once in a process: connection pools, clients, listeners, a JVM.

    once(Pool, address)      Pool(address), made by the first call in this process
    made(Pool, address)      the same one; None if there is none yet
    forget(Pool, address)    gives it back; the next call makes another one

A forked child makes its own: sockets, threads and locks belong to the process that made them. It
keeps what its parent made and never touches it, so that no finalizer uses the parent's sockets.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, TypeVarTuple, cast

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class _Slot:
    """Room for one object, and the lock that is held while it is made."""

    __slots__ = ("lock", "made")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.made: list[Any] = []


_slots: dict[Hashable, _Slot] = {}
"""By the process, the function and its arguments. `once` and `forget` change it atomically."""


def once(make: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
    """What `make` returned at its first call with these arguments in this process.

    Args:
        make: a class or a function; while it runs, other threads wait for the same object only.
            If it raises, nothing is kept.
        arguments: hashable, and equal for callers that share the object.
    """
    key = (os.getpid(), make, arguments)
    slot = _slots.get(key) or _slots.setdefault(key, _Slot())
    if not slot.made:
        with slot.lock:
            if not slot.made:
                slot.made.append(make(*arguments))
    return cast("T", slot.made[0])


def made(make: Callable[[*Arguments], T], *arguments: *Arguments) -> T | None:
    """What `once` has made with these arguments in this process; None if it has made nothing."""
    return cast("T | None", _content(_slots.get((os.getpid(), make, arguments))))


def forget(make: Callable[[*Arguments], T], *arguments: *Arguments) -> T | None:
    """Let the next `once` make another object.

    Returns:
        The object that was kept, for the caller to close; None if there was none.
    """
    return cast("T | None", _content(_slots.pop((os.getpid(), make, arguments), None)))


def _content(slot: _Slot | None) -> object:
    return slot.made[0] if slot is not None and slot.made else None
