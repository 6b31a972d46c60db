"""A query with real sinks and a real log on one disk, which a test fills, or takes away."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from sparkonce.model import Owner
from sparkonce.protocol.driver import Driver
from sparkonce.protocol.pipeline import targets_of
from sparkonce.sinks import FileSink
from sparkonce.sinks.sqlite import SqliteSink
from sparkonce.txn_log import TransactionLog, checkpoint_log, open_log
from tests.support.world import QUERY_ID, MemoryEntrance, Process, World

BATCHES = [[[1, 2], [3]], [[4], [5, 6]], [[7], []]]


class DiskWorld(World):
    """A folder, a database and the log on one small disk."""

    def __init__(self, disk: Path, kind: str) -> None:
        super().__init__(disk, BATCHES)
        self.disk, self.kind = disk, kind
        (disk / "files").mkdir(exist_ok=True)
        (disk / "log").mkdir(exist_ok=True)

    def log(self) -> TransactionLog:
        if self.kind == "sqlite":
            return open_log(f"sqlite:///{self.disk}/log/txn.db")
        return checkpoint_log(str(self.disk / "log"))

    def deliver(self, upto: int) -> None:
        """A start of the query, which delivers every batch below `upto`."""
        self.spark.batches = BATCHES[:upto]
        with closing(self.log()) as self._log:
            self.start(Process())

    def driver(
        self, process: Process, may_repeat: Callable[[], None] = lambda: None, **changes: Any
    ) -> Driver:
        del process
        self.sinks = [
            FileSink(self.disk / "files", name="files"),
            SqliteSink(self.disk / "rows.db", "numbers", name="rows"),
        ]
        for sink in self.sinks:
            sink.validate(pa.schema([("id", pa.int64())]))
        place = str(self.disk / "log")
        claim = self.claim(sinks=targets_of(self.sinks), checkpoint=place, **changes)
        entrance = MemoryEntrance(self.spark, may_repeat)
        return Driver.start(self.pipeline(self.sinks, self._log), claim, entrance)

    def shown(self) -> list[Counter[int]]:
        files = ds.dataset(self.disk / "files", format="parquet").to_table()
        with closing(sqlite3.connect(self.disk / "rows.db")) as db:
            rows = Counter(number for (number,) in db.execute("SELECT id FROM numbers"))
        return [Counter(files["id"].to_pylist()), rows]

    def left_over(self) -> list[str]:
        with closing(self.log()) as log:
            assert not log.unfinished("orders")
            owner = Owner(log.id_of("orders"), QUERY_ID)
        return [str(c.branch_id) for sink in self.sinks for c in sink.find_branches(owner)]
