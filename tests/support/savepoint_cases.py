"""A pipeline without Spark; folders in which a process is killed, or two of them take turns."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from sparkonce import facts
from sparkonce.model import TransactionId
from sparkonce.spark_hooks.checkpoint import open_checkpoint
from sparkonce.spark_hooks.savepoints import Filling, Manifest, Savepoints, create, fork, restore
from sparkonce.storage import FileSystemFolder, LocalFolder
from sparkonce.txn_log import open_log
from sparkonce.txn_log.claim import Claim
from sparkonce.txn_log.record import State, TransactionRecord

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


QUERY = "5b1dfe36-93c9-4c8e-9d4e-0c4a4d2f7a10"


def write(folder: Path, files: Iterable[tuple[str, str]]) -> None:
    for name, text in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def offsets(*sources: object) -> str:
    return "\n".join(["v1", json.dumps({"conf": {"a": "b"}}), *map(json.dumps, sources)])


def commit(**values: object) -> str:
    return "v1\n" + json.dumps({"nextBatchWatermarkMs": 0, **values})


def checkpoint(folder: Path, batches: int, *, state: str = "delta") -> Path:
    """A checkpoint with a file source and a store of two partitions."""
    write(folder, [("metadata", json.dumps({"id": QUERY}))])
    write(folder, [("state/0/_metadata/metadata", "v1\n{}")])
    for n in range(batches):
        write(
            folder,
            [
                (f"offsets/{n}", offsets({"logOffset": n})),
                (f"commits/{n}", commit()),
                (f"sources/0/{n}", f'v1\n{{"path":"file:/in/{n}","batchId":{n}}}'),
                *((f"state/0/{p}/{n + 1}.{state}", f"{p} {n}") for p in (0, 1)),
            ],
        )
    return folder


class Stage:
    """A pipeline whose log and checkpoint have as many complete batches."""

    def __init__(self, folder: Path, batches: int) -> None:
        self.folder = folder
        self.root = folder / "savepoints"
        self.location = str(checkpoint(folder / "ckpt", batches))
        self.log = open_log(f"sqlite:///{folder}/txn.db")
        self.incarnation = self.log.begin(self.claim("orders", QUERY, 0))
        write(
            folder / "ckpt",
            [("sparkonce.json", json.dumps({"log_id": self.log.log_id, "pipeline": "orders"}))],
        )
        for n in range(batches):
            self.deliver(n)

    def claim(self, pipeline: str, query_id: str, batch: int, **more: object) -> Claim:
        return Claim(pipeline, query_id, "run", "driver", {"out": "file:/out"}, batch, **more)  # type: ignore[arg-type]

    def deliver(self, batch: int) -> None:
        record = TransactionRecord(
            TransactionId("orders", QUERY, batch),
            self.incarnation.token,
            State.DECIDED,
            (json.dumps({"logOffset": batch}),),
            {},
        )
        self.log.complete(self.log.decide(record), self.incarnation.token)

    def create(self, folder: FileSystemFolder, name: str, batch: int | None = None) -> Manifest:
        files = open_checkpoint(self.location, None)
        return create(Savepoints(folder), self.log, "orders", files, name=name, batch=batch)

    def shown(self) -> facts.Facts:
        """What `sparkonce status` knows of the pipeline."""
        head = self.log.head("orders")
        assert head is not None
        return facts.pipeline(self.log, head)

    def filling(
        self, folder: LocalFolder, pipeline: str, source_paths: Mapping[str, str] | None = None
    ) -> Filling:
        """Of the savepoint "first"."""
        savepoints = Savepoints(LocalFolder(self.root))
        manifest = savepoints.read("first")
        return Filling(savepoints, manifest, folder, pipeline, lambda: self.log, source_paths or {})

    def restore(self, folder: LocalFolder) -> str:
        return restore(self.filling(folder, "orders"), self.log)

    def fork(
        self, folder: LocalFolder, into: Path, pipeline: str, target: str = "file:/fork"
    ) -> str:
        return fork(self.filling(folder, pipeline), {"out": target})
