"""The pipelines of a seed, and the folders that savepoints are copied between.

    Line "orders"     one log, one ledger, one or more checkpoints: `Spark`
    Line "orders-b"   its fork, on the same servers

All files of a checkpoint are in memory. Spark's own writes take no step; each write of a command is
one, so that it may be killed or paused there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from sparkonce.model import TransactionId
from sparkonce.storage import FileSystemFolder
from tests.simulation.ledger import Ledger

if TYPE_CHECKING:
    from sparkonce.txn_log.record import Head, TransactionRecord
    from tests.simulation.drivers import Driver, SimWorld
    from tests.simulation.log import Disk
    from tests.simulation.spark import Spark


class Line:
    """One pipeline.

    Attributes:
        name: of the pipeline.
        target: where its sinks write; a fork may share it.
        adopt: left in the settings.
        rows: the number of rows that its source has had.
        other_rows: batches whose replay had other rows.
        repartitioned: batches whose replay had other partitions.
        checkpoints: all that were restored for it, and the first one.
        spark: the one that the user starts.
    """

    def __init__(self, world: SimWorld, name: str, disk: Disk, target: str) -> None:
        self.name, self.disk, self.target = name, disk, target
        self.adopt: tuple[str, ...] = ()
        self.rows = 0
        self.other_rows: set[int] = set()
        self.repartitioned: set[int] = set()
        self.checkpoints: list[Spark] = []
        self.spark: Spark
        self.ledger = Ledger(world, self)
        self._world = world
        world.pipelines[name] = self

    def use(self, spark: Spark) -> None:
        """The user starts this checkpoint from now on."""
        self.spark = spark
        if spark not in self.checkpoints:
            self.checkpoints.append(spark)

    @property
    def head(self) -> Head | None:
        return self.disk.heads.get(self.name)

    def records(self) -> list[TransactionRecord]:
        return self.disk.of(self.name)

    def record(self, spark: Spark, batch_id: int) -> TransactionRecord | None:
        """Of a batch of that checkpoint's query."""
        return self.disk.records.get(TransactionId(self.name, spark.query_id, batch_id))

    def unfinished(self) -> list[TransactionRecord]:
        return self.disk.unfinished(self.name)

    def drivers(self) -> Iterator[Driver]:
        return (driver for driver in self._world.drivers if driver.line is self)


class MemoryFolder(FileSystemFolder):
    """A folder in memory; `is_live` makes each change a step of the running command."""

    def __init__(self, world: SimWorld, location: str, *, is_live: bool = False) -> None:
        self._world, self._location, self._is_live = world, location, is_live
        self.content: dict[str, bytes] = {}

    @property
    def address(self) -> str:
        return self._location

    @property
    def location(self) -> str:
        return self._location

    def put(self, name: str, text: str) -> None:
        """Write or replace a file, without a step."""
        self.content[name] = text.encode()

    def create(self, name: str, text: str) -> bool:
        def effect() -> bool:
            if name in self.content:
                return False
            self.content[name] = text.encode()
            return True

        return self._change(effect)

    def store(self, name: str, pieces: Callable[[], Iterable[bytes]]) -> None:
        def effect() -> None:
            text = b"".join(pieces())
            assert self.content.setdefault(name, text) == text, name

        self._change(effect)

    def delete(self, name: str) -> None:
        self._change(lambda: self.content.pop(name, None))

    def _change(self, effect: Callable[[], object]) -> bool:
        return bool(self._world.call("folder.change", effect) if self._is_live else effect())

    def read(self, name: str) -> str | None:
        found = self.content.get(name)
        return None if found is None else found.decode()

    def read_end(self, name: str, most_bytes: int) -> str | None:
        found = self.content.get(name)
        return None if found is None else found[-most_bytes:].decode()

    def pieces(self, name: str) -> Iterator[bytes] | None:
        found = self.content.get(name)
        return None if found is None else iter([found])

    def exists(self, name: str) -> bool:
        return name in self.content or any(n.startswith(f"{name}/") for n in self.content)

    def names(self, folder: str) -> Sequence[str]:
        inside = f"{folder}/" if folder else ""
        return [name for name in self.content if name.startswith(inside)]

    def files(self, folder: str) -> Sequence[str]:
        inside = f"{folder}/" if folder else ""
        return [
            n.removeprefix(inside) for n in self.names(folder) if n.count("/") == inside.count("/")
        ]
