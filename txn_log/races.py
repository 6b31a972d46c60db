"""Starts several writers at the same moment, to see how many of them a place lets succeed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
ResultT = TypeVar("ResultT")

_START_S = 30.0


class Race(Protocol):
    """Runs one race."""

    def __call__(
        self, act: Callable[Concatenate[int, P], ResultT], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[ResultT]:
        """What `act` returned in each of the threads; its first argument is the thread's number."""


@contextlib.contextmanager
def racing(racers: int) -> Iterator[Race]:
    """Threads for several races. If the system starts fewer, a race fails instead of hanging."""
    gate = threading.Barrier(racers, timeout=_START_S)
    with ThreadPoolExecutor(racers) as pool:

        def race(
            act: Callable[Concatenate[int, P], ResultT], /, *args: P.args, **kwargs: P.kwargs
        ) -> list[ResultT]:
            def start(racer: int) -> ResultT:
                gate.wait()
                return act(racer, *args, **kwargs)

            return list(pool.map(start, range(racers)))

        yield race
