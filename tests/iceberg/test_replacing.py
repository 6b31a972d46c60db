"""The table is replaced, or upgraded, between the preparation of a batch and its commit.

`CREATE OR REPLACE TABLE` keeps the table's UUID, gives columns of the same name their old ids, and
leaves no snapshot on main.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.schema import Schema
from pyiceberg.table.update import (
    AddSchemaUpdate,
    RemoveSchemasUpdate,
    RemoveSnapshotRefUpdate,
    SetCurrentSchemaUpdate,
)
from pyiceberg.types import (
    DoubleType,
    IcebergType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
)

from sparkonce.errors import CommitUnresolvedError, PreparedBranchLostError, PrepareRejectedError
from sparkonce.model import DRIVER_ATTEMPT
from sparkonce.sinks.iceberg.appending import begin
from sparkonce.sinks.lakehouse.payloads import PreparedBatch
from tests.iceberg.conftest import (
    SCHEMA,
    Intruder,
    Lake,
    another_writer,
    branch,
    prepared,
    rows,
    task,
)

ID, NAME = NestedField(1, "id", LongType()), NestedField(2, "name", StringType())


def optional(number: int, kind: IcebergType) -> NestedField:
    return NestedField(number, f"f{number}", kind, required=False)


def replace_the_table(lake: Lake, *fields: NestedField, has_snapshot: bool = True) -> None:
    """As Spark does; it makes a snapshot for `AS SELECT` only."""
    table = lake.table()
    schema = AddSchemaUpdate(schema_=Schema(*fields, schema_id=1))
    no_snapshot = RemoveSnapshotRefUpdate(ref_name="main")
    table.catalog.commit_table(
        table, (), (schema, SetCurrentSchemaUpdate(schema_id=-1), no_snapshot)
    )
    if has_snapshot:
        begin(lake.table())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([NestedField(1, "id", StringType()), NAME], "id was long, and is string"),
        ([ID, NAME, NestedField(3, "more", LongType(), required=True)], "more is required now"),
        ([NestedField(1, "id", LongType(), required=True), NAME], "id is required now"),
        ([ID, NestedField(2, "name", ListType(3, LongType()))], "name was string, and is list"),
    ],
)
def test_columns_cannot_be_read(
    lake: Lake, fields: list[NestedField], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commit is refused, so that readers can still read the table."""
    lake.create()
    sink = lake.sink()
    sink.validate(SCHEMA)
    committable = prepared(sink, 1, [rows(1)])
    replace_the_table(lake, *fields)
    with pytest.raises(CommitUnresolvedError, match=f"other columns .*: {message}.*settle"):
        sink.commit(committable)
    assert lake.ids() == []
    sink.abort_decided(committable)
    assert lake.marks() == []
    assert capsys.readouterr().out == ""


NESTED = StructType(NestedField(4, "x", LongType(), required=False))


@pytest.mark.parametrize(
    ("then", "now", "is_readable"),
    [
        (ListType(3, LongType()), ListType(3, StringType()), False),
        (ListType(3, LongType(), False), ListType(3, LongType(), True), False),
        (ListType(3, NESTED), ListType(3, StructType(optional(4, DoubleType()))), False),
        (ListType(3, NESTED), ListType(3, StructType(*NESTED.fields, optional(5, NESTED))), True),
        (MapType(3, StringType(), 4, StringType()), MapType(3, LongType(), 4, StringType()), False),
        (MapType(3, StringType(), 4, StringType()), MapType(3, StringType(), 4, LongType()), False),
        (
            MapType(3, StringType(), 4, StringType()),
            MapType(3, StringType(), 4, StringType(), False),
            True,
        ),
    ],
    ids=str,
)
def test_nested_types(
    lake: Lake, then: IcebergType, now: IcebergType, *, is_readable: bool
) -> None:
    """A field within a column counts as a column does."""
    lake.create(Schema(ID, NestedField(2, "name", then, required=False)))
    sink = lake.sink()
    committable = prepared(sink, 1, [pa.record_batch([pa.array([1])], names=["id"])])
    replace_the_table(lake, ID, NestedField(2, "name", now, required=False))
    if is_readable:
        sink.commit(committable)
    else:
        with pytest.raises(CommitUnresolvedError, match="name"):
            sink.commit(committable)
    assert lake.ids() == ([1] if is_readable else [])


def test_columns_can_be_read(lake: Lake) -> None:
    """A type is wider, a column is gone, and a new one may be null."""
    columns = pa.schema([("id", pa.int64()), ("number", pa.int32()), ("part", pa.float32())])
    lake.create(columns)
    sink = lake.sink()
    sink.validate(columns)
    batch = pa.record_batch([[1], [5], [0.5]], schema=columns)
    committable = prepared(sink, 1, [batch])
    new = StructType(NestedField(5, "x", LongType(), required=True))
    number = NestedField(2, "number", LongType(), required=False)
    replace_the_table(lake, ID, number, NestedField(4, "new", new, required=False))
    for _ in range(2):
        sink.commit(committable)
        found = lake.table().scan(row_filter="number = 5").to_arrow().to_pylist()
        assert found == [{"id": 1, "number": 5, "new": None}]
    assert lake.marks() == []


def test_schema_is_gone(lake: Lake) -> None:
    """As after a removal of metadata that has expired: nobody knows what the files hold."""
    lake.create()
    sink = lake.sink()
    committable = prepared(sink, 1, [rows(1)])
    replace_the_table(lake, ID)
    table = lake.table()
    table.catalog.commit_table(table, (), (RemoveSchemasUpdate(schema_ids=[0]),))
    with pytest.raises(CommitUnresolvedError, match="no longer has the schema 0"):
        sink.commit(committable)


def test_table_is_replaced_before_the_vote(lake: Lake) -> None:
    """The batch is aborted, and not decided for a table that cannot take it."""
    lake.create()
    sink = lake.sink()
    done = task(sink, branch(), rows(1))
    replace_the_table(lake, NestedField(1, "id", StringType()), NAME)
    by_driver = replace(branch(), attempt=DRIVER_ATTEMPT)
    with pytest.raises(PrepareRejectedError, match="id was long, and is string"):
        sink.vote(by_driver, [done])
    for found in sink.find_branches(branch().owner):
        sink.abort(found)
    assert (lake.ids(), lake.marks(), lake.data()) == ([], [], [])


def test_batch_of_the_release_before(lake: Lake) -> None:
    """It does not say in which schema its files are, and is committed as before."""
    lake.create()
    sink = lake.sink()
    committable = prepared(sink, 1, [rows(1)])
    batch = PreparedBatch.of(committable)
    older = [{k: v for k, v in each.items() if k != "schemas"} for each in batch.manifests]
    assert list(batch.manifests) != older
    batch = replace(batch, manifests=tuple(older))
    again = batch.committable(committable.branch_id, safe_until=None, text="")
    sink.commit(again)
    assert lake.ids() == [1]


def test_table_has_no_snapshot(lake: Lake) -> None:
    """As after CREATE OR REPLACE TABLE: the commit makes one, as a start does."""
    lake.create()
    sink = lake.sink()
    first, second = prepared(sink, 1, [rows(1)]), prepared(sink, 2, [rows(2)])
    replace_the_table(lake, ID, NAME, has_snapshot=False)
    sink.commit(first)
    assert lake.ids() == [1]
    replace_the_table(lake, ID, NAME, has_snapshot=False)
    sink.abort_decided(second)
    with pytest.raises(PreparedBranchLostError):
        sink.commit(second)
    assert (lake.ids(), lake.marks()) == ([], [])


def test_two_drivers_find_no_snapshot(lake: Lake, intruder: Intruder) -> None:
    """One of them commits, and the other one rules the batch out."""
    lake.create()
    sink, other = lake.sink(), lake.sink()
    committable = prepared(sink, 1, [rows(1)])
    replace_the_table(lake, ID, NAME, has_snapshot=False)
    intruder.before = lambda: other.abort(committable)
    with pytest.raises(PreparedBranchLostError):
        sink.commit(committable)
    assert (lake.ids(), lake.marks()) == ([], [])


def test_first_snapshot_is_made_meanwhile(lake: Lake, intruder: Intruder) -> None:
    """A catalog that accepts any first snapshot must not be sent a second one."""
    lake.create()
    replace_the_table(lake, ID, NAME, has_snapshot=False)
    stale = lake.table()
    another_writer(lake)
    intruder.calls = 0
    begin(stale)
    assert (intruder.calls, lake.ids()) == (0, [100])


def test_version_3(lake: Lake) -> None:
    """Nothing can be committed to it, not even an abort: the error offers no redo."""
    lake.create()
    sink = lake.sink()
    committable = prepared(sink, 1, [rows(1)])
    path = Path(lake.table().metadata_location.removeprefix("file://"))
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "format-version": 3, "next-row-id": 0}))
    for verb in (sink.commit, sink.abort, sink.abort_decided):
        with pytest.raises(CommitUnresolvedError, match=r"version 3 .*--as committed\|aborted`"):
            verb(committable)
    assert len(lake.marks()) == 2
