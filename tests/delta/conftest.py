"""A Delta table in a folder."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

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
