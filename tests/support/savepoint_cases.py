"""Folders that stop a process at one of its writes, or let two processes take turns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from sparkonce.storage import LocalFolder

ResultT = TypeVar("ResultT")


class KilledError(BaseException):
    """The process ends here; nothing of it catches this."""


class Observed(LocalFolder):
    """Calls `note` before and after each call that reads or changes the folder."""

    def __init__(self, root: Path, note: Callable[[str], None]) -> None:
        super().__init__(root)
        self._note = note

    def _noted(self, what: str, action: Callable[[], ResultT]) -> ResultT:
        self._note(f"before {what}")
        result = action()
        self._note(f"after {what}")
        return result

    def create(self, name: str, text: str) -> bool:
        return self._noted(f"create {name}", lambda: super(Observed, self).create(name, text))

    def store(self, name: str, pieces: Callable[[], Iterable[bytes]]) -> None:
        self._noted(f"store {name}", lambda: super(Observed, self).store(name, pieces))

    def delete(self, name: str) -> None:
        self._noted(f"delete {name}", lambda: super(Observed, self).delete(name))

    def read(self, name: str) -> str | None:
        return self._noted(f"read {name}", lambda: super(Observed, self).read(name))

    def files(self, folder: str) -> Sequence[str]:
        return self._noted(f"files {folder}", lambda: super(Observed, self).files(folder))

    def names(self, folder: str) -> Sequence[str]:
        return self._noted(f"names {folder}", lambda: super(Observed, self).names(folder))


def killed_at_each_change(
    root: Path, action: Callable[[LocalFolder], object]
) -> Iterator[tuple[str, LocalFolder]]:
    """Run the action once for each moment before and after a change, and kill it there.

    Yields the moment, and the folder to look at; the caller puts things back before the next one.
    """
    moment = 0
    while True:
        reached: list[str] = []

        def note(what: str, moment: int = moment, reached: list[str] = reached) -> None:
            if what.split()[1] in {"create", "store", "delete"}:
                reached.append(what)
                if len(reached) > moment:
                    raise KilledError(what)

        try:
            action(Observed(root, note))
        except KilledError as killed:
            yield str(killed), LocalFolder(root)
        else:
            return
        moment += 1


class Turns:
    """Two threads that take turns: one call of a folder each, in the order of `schedule`."""

    def __init__(self, schedule: Sequence[int]) -> None:
        self._schedule = list(schedule)
        self._changed = threading.Condition()
        self._ended: set[int] = set()

    def note(self, actor: int) -> Callable[[str], None]:
        def wait(what: str) -> None:
            if what.startswith("after"):
                return
            with self._changed:
                self._changed.wait_for(lambda: self._next() in {actor, None})
                if self._schedule:
                    self._schedule.pop(0)
                self._changed.notify_all()

        return wait

    def _next(self) -> int | None:
        while self._schedule and self._schedule[0] in self._ended:
            self._schedule.pop(0)
        return self._schedule[0] if self._schedule else None

    def run(self, actions: Sequence[Callable[[], object]]) -> None:
        def call(actor: int, action: Callable[[], object]) -> None:
            try:
                action()
            finally:
                with self._changed:
                    self._ended.add(actor)
                    self._changed.notify_all()

        threads = [
            threading.Thread(target=call, args=(n, action)) for n, action in enumerate(actions)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
