"""A Delta table in a folder."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.schema import Field, PrimitiveType

from sparkonce.model import DRIVER_ATTEMPT, BranchId, Committable, Owner
from sparkonce.sinks import DeltaSink

OWNER = Owner("0123456789abcdef", "5a4ae0c8-9c3e-4a0e-8f06-1d0b6a1c7b11")
SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string()), ("day", pa.date32())])


def branch(batch_id: int = 1, attempt: int = 0, token: int = 3) -> BranchId:
    return BranchId(OWNER, batch_id, token, "delta", 0, attempt)


def of_driver(branch_id: BranchId) -> BranchId:
    return replace(branch_id, attempt=DRIVER_ATTEMPT)


def rows(*ids: int) -> pa.RecordBatch:
    days = [dt.date(2026, 1, 1 + n % 3) for n in ids]
    return pa.record_batch(
        [pa.array(ids, pa.int64()), [f"n{n}" for n in ids], pa.array(days, pa.date32())],
        schema=SCHEMA,
    )


@dataclass
class Lake:
    """A table, and sinks that write into it."""

    folder: Path

    @property
    def uri(self) -> str:
        return str(self.folder / "orders")

    def create(self, schema: pa.Schema = SCHEMA, **settings: Any) -> DeltaTable:
        return DeltaTable.create(self.uri, schema, **settings)

    def table(self) -> DeltaTable:
        return DeltaTable(self.uri)

    def append(self, *ids: int) -> None:
        """Another writer adds rows."""
        write_deltalake(self.uri, pa.Table.from_batches([rows(*ids)]), mode="append")

    def sink(self, **settings: Any) -> DeltaSink:
        return DeltaSink(self.uri, **settings)

    def ids(self) -> list[int]:
        return sorted(self.table().to_pyarrow_table()["id"].to_pylist())

    def left_over(self) -> list[str]:
        """Marks, and manifests of batches that have not ended."""
        folder = Path(self.uri, "_sparkonce")
        return sorted(path.name for path in folder.rglob("*") if path.is_file())

    def data(self) -> list[Path]:
        """The data files that sinks have written."""
        return sorted(path for path in self.folder.rglob("a*.parquet"))

    def log(self, version: int) -> Path:
        return Path(self.uri, "_delta_log", f"{version:020}.json")


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


def task(sink: DeltaSink, branch_id: BranchId, *batches: pa.RecordBatch) -> Committable:
    handle = sink.beginTransaction(branch_id)
    for batch in batches:
        sink.write(handle, batch)
    return sink.preCommit(handle)


def prepared(
    sink: DeltaSink, batch_id: int, *tasks: Sequence[pa.RecordBatch], token: int = 3
) -> Committable:
    """A batch of which each task writes these rows."""
    done = [task(sink, branch(batch_id, n, token), *batches) for n, batches in enumerate(tasks)]
    (committable,) = sink.vote(of_driver(branch(batch_id, token=token)), done)
    return committable


# -- what happens meanwhile ------------------------------------------------------------------------


def another_writer(lake: Lake) -> None:
    lake.append(100)


def add_a_column(lake: Lake) -> None:
    lake.table().alter.add_columns([Field("note", PrimitiveType("string"))])


def compact(lake: Lake) -> None:
    lake.table().optimize.compact()


def delete_other_rows(lake: Lake) -> None:
    lake.table().delete("id >= 100")


def vacuum(lake: Lake) -> None:
    lake.table().vacuum(dry_run=False)


def checkpoint_and_clean_the_log(lake: Lake) -> None:
    table = lake.table()
    table.create_checkpoint()
    for version in range(table.version()):
        lake.log(version).unlink(missing_ok=True)


class Intruder:
    """Stands between the sink and the log at one commit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[], None] = lambda: None
        real, intruder = DeltaTable.create_write_transaction, self

        def commit(self: Any, *args: Any, **settings: Any) -> None:
            intruder.calls += 1
            before, intruder.before = intruder.before, lambda: None
            before()
            real(self, *args, **settings)
            after, intruder.after = intruder.after, lambda: None
            after()

        monkeypatch.setattr(DeltaTable, "create_write_transaction", commit)


@pytest.fixture
def intruder(monkeypatch: pytest.MonkeyPatch) -> Intruder:
    return Intruder(monkeypatch)


def raising(error: Exception) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act
