"""Rows for tables with required fields below the top, as Spark hands them over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkonce.errors import PrepareRejectedError

INNER = pa.struct(
    [
        pa.field("a", pa.int64(), nullable=False),
        pa.field("deep", pa.struct([pa.field("c", pa.string(), nullable=False)])),
        pa.field("many", pa.list_(pa.field("element", pa.int32(), nullable=False)), nullable=False),
        pa.field("by_name", pa.map_(pa.string(), pa.field("value", pa.int32(), nullable=False))),
    ]
)
FREE = pa.struct([("a", pa.int64())])
TABLE = pa.schema(
    [
        ("id", pa.int64()),
        ("s", INNER),
        ("all", pa.list_(pa.field("element", INNER, nullable=False))),
        ("some", pa.list_(INNER)),
        ("lists", pa.list_(pa.field("element", pa.list_(pa.int32()), nullable=False))),
        ("free", pa.list_(pa.field("element", FREE, nullable=False))),
        ("free_by_name", pa.map_(pa.string(), pa.field("value", FREE, nullable=False))),
        ("structs", pa.map_(pa.string(), pa.field("value", INNER, nullable=False))),
        ("some_structs", pa.map_(pa.string(), INNER)),
    ]
)
FULL: dict[str, Any] = {"a": 7, "deep": {"c": "x"}, "many": [1, 2], "by_name": [("k", 3)]}
SPARSE: dict[str, Any] = {"a": 8, "deep": None, "many": [], "by_name": None}

FITTING: list[dict[str, Any]] = [
    {
        "id": 0,
        "s": FULL,
        "all": [FULL, SPARSE],
        "some": [FULL, None, SPARSE],
        "lists": [[1, None], []],
        "free": [{"a": None}],
        "free_by_name": [("k", {"a": None})],
        "structs": [("k", FULL), ("l", SPARSE)],
        "some_structs": [("k", None), ("l", FULL)],
    },
    dict.fromkeys(TABLE.names) | {"id": 1},
    {name: [] for name in TABLE.names} | {"id": 2, "s": SPARSE, "some": [None]},
    dict.fromkeys(TABLE.names) | {"id": 3},
    dict.fromkeys(TABLE.names) | {"id": 4, "s": FULL, "some": [None, FULL]},
]

REFUSED = [
    ("s", {**FULL, "a": None}, "s.a"),
    ("s", {**FULL, "deep": {"c": None}}, "s.deep.c"),
    ("s", {**FULL, "many": None}, "s.many"),
    ("s", {**FULL, "many": [1, None]}, "s.many.element"),
    ("s", {**FULL, "by_name": [("k", None)]}, "s.by_name.value"),
    ("all", [FULL, None], "all.element"),
    ("all", [{**FULL, "a": None}], "all.element.a"),
    ("some", [None, {**FULL, "a": None}], "some.element.a"),
    ("lists", [[1], None], "lists.element"),
    ("free", [{"a": 7}, None], "free.element"),
    ("free_by_name", [("k", None)], "free_by_name.value"),
    ("structs", [("k", FULL), ("l", None)], "structs.value"),
    ("structs", [("k", {**FULL, "deep": {"c": None}})], "structs.value.deep.c"),
    ("some_structs", [("k", None), ("l", {**FULL, "a": None})], "some_structs.value.a"),
]


def batch(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    """Rows of which each field may be null, and whose null structs have null fields.

    Arrow's own builder puts zeros below a null struct, and Spark does not.
    """
    loose = pa.schema([field.with_type(_nullable(field.type)) for field in TABLE])
    file = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, loose), file)
    (read,) = pq.read_table(pa.BufferReader(file.getvalue())).to_batches()
    return read


def table_of(column: str) -> pa.Schema:
    return pa.schema([TABLE.field(name) for name in ("id", column)])


def check_refused(
    write: Callable[[int, pa.RecordBatch], object], column: str, value: Any, path: str
) -> None:
    """A task that gets the value is refused, and one with the row before it is not.

    Args:
        write: writes rows in the task attempt of this number, into a table of `table_of`.
        column: of the value.
        value: has a null that the table does not take.
        path: of the field that the error names.
    """
    rows = batch([{"id": 0}, {"id": 1, column: value}]).select(["id", column])
    with pytest.raises(PrepareRejectedError, match=f".column {path} is required, and") as refused:
        write(0, rows)
    assert "leave such rows out" in str(refused.value)
    write(1, rows.slice(0, 1))


def _nullable(kind: Any) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([(each.name, _nullable(each.type)) for each in kind])
    if pa.types.is_list(kind):
        return pa.list_(_nullable(kind.value_type))
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, _nullable(kind.item_type))
    return kind
