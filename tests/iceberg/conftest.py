"""A table in a real catalog: SQLite, with a folder as warehouse."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionSpec
from pyiceberg.transforms import BucketTransform
from pyiceberg.types import StringType

from sparkonce.model import DRIVER_ATTEMPT, BranchId, Committable, Owner
from sparkonce.sinks import IcebergSink
from sparkonce.sinks.iceberg.appending import begin

if TYPE_CHECKING:
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table

NAME = "shop.orders"
OWNER = Owner("0123456789abcdef", "5a4ae0c8-9c3e-4a0e-8f06-1d0b6a1c7b11")
SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])


def branch(batch_id: int = 1, attempt: int = 0, token: int = 3) -> BranchId:
    return BranchId(OWNER, batch_id, token, "iceberg", 0, attempt)


def rows(*ids: int) -> pa.RecordBatch:
    return pa.record_batch([pa.array(ids, pa.int64()), [f"n{n}" for n in ids]], schema=SCHEMA)


@dataclass
class Lake:
    """The catalog, and sinks that write into one of its tables."""

    folder: Path
    settings: dict[str, str]
    catalog: Catalog
    sinks: list[IcebergSink] = field(default_factory=list)

    def create(
        self,
        schema: pa.Schema | Schema = SCHEMA,
        spec: PartitionSpec = UNPARTITIONED_PARTITION_SPEC,
    ) -> Table:
        self.catalog.create_namespace_if_not_exists("shop")
        self.catalog.create_table(NAME, schema, partition_spec=spec)
        begin(self.table())
        return self.table()

    def table(self) -> Table:
        return self.catalog.load_table(NAME)

    def sink(self, **settings: Any) -> IcebergSink:
        sink = IcebergSink(NAME, catalog=self.settings, **settings)
        self.sinks.append(sink)
        return sink

    def ids(self) -> list[int]:
        return sorted(self.table().scan().to_arrow()["id"].to_pylist())

    def marks(self) -> list[str]:
        return sorted(path.name for path in self.folder.rglob("*.mark"))

    def data(self) -> list[Path]:
        return sorted(self.folder.rglob("*.parquet"))


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[Lake]:
    settings = {
        "type": "sql",
        "uri": f"sqlite:///{tmp_path}/catalog.db",
        "warehouse": f"file://{tmp_path}/lake",
    }
    made = Lake(tmp_path / "lake", settings, load_catalog("default", **settings))
    yield made
    for sink in made.sinks:
        sink.close()
    made.catalog.close()


def task(sink: IcebergSink, branch_id: BranchId, *batches: pa.RecordBatch) -> Committable:
    handle = sink.beginTransaction(branch_id)
    for batch in batches:
        sink.write(handle, batch)
    return sink.preCommit(handle)


def prepared(
    sink: IcebergSink, batch_id: int, *tasks: Sequence[pa.RecordBatch], token: int = 3
) -> Committable:
    """A batch of which each task writes these rows."""
    done = [task(sink, branch(batch_id, n, token), *batches) for n, batches in enumerate(tasks)]
    by_driver = replace(branch(batch_id, token=token), attempt=DRIVER_ATTEMPT)
    (committable,) = sink.vote(by_driver, done)
    return committable


# -- what happens meanwhile ------------------------------------------------------------------------


def another_writer(lake: Lake) -> None:
    lake.table().append(pa.Table.from_batches([rows(100)]))


def add_a_column(lake: Lake) -> None:
    with lake.table().update_schema() as update:
        update.add_column("note", StringType())


def rename_a_column(lake: Lake) -> None:
    with lake.table().update_schema() as update:
        update.rename_column("name", "title")


def drop_a_column(lake: Lake) -> None:
    with lake.table().update_schema() as update:
        update.delete_column("name")


def partition_by_id(lake: Lake) -> None:
    with lake.table().update_spec() as update:
        update.add_field("id", BucketTransform(4), "bucket")


def rewrite_the_table(lake: Lake) -> None:
    table = lake.table()
    table.overwrite(table.scan().to_arrow())


class Intruder:
    """Stands between the sink and the catalog at one commit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[], None] = lambda: None
        real, intruder = SqlCatalog.commit_table, self

        def commit_table(self: Any, *args: Any) -> Any:
            intruder.calls += 1
            before, intruder.before = intruder.before, lambda: None
            before()
            answer = real(self, *args)
            after, intruder.after = intruder.after, lambda: None
            after()
            return answer

        monkeypatch.setattr(SqlCatalog, "commit_table", commit_table)


@pytest.fixture
def intruder(monkeypatch: pytest.MonkeyPatch) -> Intruder:
    return Intruder(monkeypatch)


def raising(error: Exception) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act
