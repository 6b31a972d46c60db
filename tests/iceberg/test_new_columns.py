"""Columns that a start adds to the table."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest

from sparkonce.errors import ConfigurationError
from tests.iceberg.conftest import SCHEMA, Lake, prepared, rows

PLACE = pa.struct([("city", pa.string()), ("floor", pa.int32())])
WIDER = pa.schema(
    [*SCHEMA, pa.field("amount", pa.decimal128(10, 2), nullable=False), ("place", PLACE)]
)


def wider_row(lake: Lake, id_: int) -> dict[str, Any]:
    (row,) = (row for row in lake.table().scan().to_arrow().to_pylist() if row["id"] == id_)
    return row


def test_new_columns_are_added(lake: Lake) -> None:
    """Rows that are there, and a batch that was prepared before, have nulls in them."""
    lake.create()
    old = lake.sink()
    old.validate(SCHEMA)
    old.commit(prepared(old, 1, [rows(1)]))
    decided = prepared(old, 2, [rows(2)])
    with pytest.raises(ConfigurationError, match="amount"):
        lake.sink().validate(WIDER)
    sink = lake.sink(new_columns="add")
    sink.validate(WIDER)
    old.commit(decided)
    row = {**rows(3).to_pylist()[0], "amount": 1, "place": {"city": "Lima", "floor": 2}}
    sink.commit(prepared(sink, 3, [pa.RecordBatch.from_pylist([row], schema=WIDER)]))
    assert [wider_row(lake, n)["amount"] for n in (1, 2, 3)] == [None, None, 1]
    assert wider_row(lake, 3)["place"] == {"city": "Lima", "floor": 2}
    assert not lake.table().schema().find_field("amount").required


def test_table_that_has_all_columns_is_not_changed(lake: Lake) -> None:
    lake.create(WIDER)
    lake.sink().validate(WIDER)
    before = lake.table().metadata_location
    lake.sink(new_columns="add").validate(pa.schema([*WIDER][:-1]))
    assert lake.table().metadata_location == before


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.field("ID", pa.int64()), "ID"),
        (pa.field("name", pa.int64()), "name"),
        (pa.field("took", pa.duration("us")), "cannot get the columns took"),
    ],
)
def test_columns_that_cannot_be_added(lake: Lake, column: pa.Field, message: str) -> None:
    """A name that differs only in case, another type, and one that the format does not have."""
    lake.create()
    before = lake.table().metadata_location
    rest = [field for field in SCHEMA if field.name != column.name]
    with pytest.raises(ConfigurationError, match=message) as found:
        lake.sink(new_columns="add").validate(pa.schema([*rest, column]))
    assert "select=" in str(found.value)
    assert lake.table().metadata_location == before


def test_several_starts_add_a_column_at_once(lake: Lake) -> None:
    lake.create()
    made = [lake.sink(new_columns="add") for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda sink: sink.validate(WIDER), made))
    made[0].commit(prepared(made[0], 1, [rows(1)]))
    assert wider_row(lake, 1)["amount"] is None


def test_other_changes_come_first(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is changed after each of the first loads: the columns go into the newer one."""
    lake.create()
    sink = lake.sink(new_columns="add")
    load, changes = sink._tables.load, iter(range(3))

    def changed_after_load() -> Any:
        table = load()
        with contextlib.suppress(StopIteration):
            with lake.table().transaction() as other:
                other.set_properties(change=str(next(changes)))
        return table

    monkeypatch.setattr(sink._tables, "load", changed_after_load)
    sink.validate(WIDER)
    assert next(changes, None) is None
    sink.commit(prepared(sink, 1, [rows(1)]))
    assert wider_row(lake, 1)["amount"] is None


def test_setting_has_one_value(lake: Lake) -> None:
    with pytest.raises(ConfigurationError, match="new_columns='merge': write \"add\" or None"):
        lake.sink(new_columns="merge")
