"""deltalake's own reader finds with a filter what the rows have, whatever a file may hold.

Once a file has a minimum of any column, this reader takes a column of numbers, text or truth values
without one for a column of nulls, and skips the file.
"""

from __future__ import annotations

import datetime as dt
import json
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from tests.delta.conftest import Lake, prepared

NAIVE = dt.datetime(2026, 1, 1, 1, 2, 3, 456789)  # noqa: DTZ001
AT = NAIVE.replace(tzinfo=dt.UTC)
BIG = Decimal("1234567890123456789012345678.0123456789")
POINT = pa.struct(
    [("a", pa.int64()), ("is_b", pa.bool_()), ("within", pa.struct([("c", pa.int8())]))]
)
VALUES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "truth": (pa.bool_(), [True, False]),
    "one_truth": (pa.bool_(), [True]),
    "float": (pa.float32(), [1.5, -0.1, -0.0, 3.4e38]),
    "double": (pa.float64(), [0.1, -0.0, 1e-300, -1e300]),
    "zero": (pa.float64(), [0.0]),
    "price": (pa.decimal128(9, 2), [Decimal("-3.50"), Decimal("1.25"), Decimal("0.01")]),
    "tiny": (pa.decimal128(12, 12), [Decimal("1E-12"), Decimal("-0.000000000100")]),
    "big": (pa.decimal128(38, 10), [BIG, -BIG, Decimal("0E-10")]),
    "whole": (pa.decimal128(38, 0), [Decimal(10**37), Decimal(-(10**37))]),
    "at": (pa.timestamp("us", "UTC"), [AT, AT + dt.timedelta(days=1)]),
    "naive": (pa.timestamp("us"), [NAIVE, NAIVE - dt.timedelta(days=1)]),
    "day": (pa.date32(), [dt.date(2026, 1, 1), dt.date(1960, 2, 29)]),
    "text": (pa.string(), ["名前" * 40, "", "b"]),
    "raw": (pa.binary(), [b"\xff\x00", b""]),
    "byte": (pa.int8(), [-128, 127]),
    "short": (pa.int16(), [-(2**15), 2**15 - 1]),
    "int": (pa.int32(), [-(2**31), 2**31 - 1]),
    "long": (pa.int64(), [-(2**63), 2**63 - 1]),
    "nothing": (pa.int64(), []),
    "nothing_true": (pa.bool_(), []),
    "point": (POINT, [{"a": 1, "is_b": True, "within": {"c": 2}}, {"a": 2, "is_b": None}]),
    "points": (pa.list_(POINT), [[{"a": 1}, None], []]),
    "by_name": (pa.map_(pa.string(), pa.float64()), [[("k", 1.5)], []]),
}
SCHEMA = pa.schema([(name, kind) for name, (kind, _) in VALUES.items()])
ROWS = [
    {name: [*values, None][n % (len(values) + 1)] for name, (_, values) in VALUES.items()}
    for n in range(20)
]
SPECIAL = {
    "NaN": {"double": math.nan},
    "NaN in a float": {"float": math.nan},
    "infinity": {"double": math.inf},
    "minus infinity": {"float": -math.inf},
    "a text without a short one that is greater": {"text": "名前" * 16 + "\U0010ffff" * 2},
    "a text that Parquet does not describe, of last characters": {"text": "\U0010ffff" * 2000},
    "the end of time": {"naive": dt.datetime.max},  # noqa: DTZ901
}


def filters() -> Iterator[pc.Expression]:
    """Each comparison of each column with each of its values, and what it is within."""
    for name, (kind, values) in VALUES.items():
        yield pc.field(name).is_null()
        yield pc.field(name).is_valid()
        if pa.types.is_nested(kind):
            continue
        compared = [pa.scalar(value, kind) for value in values]
        for value in compared:
            column = pc.field(name)
            yield from (column == value, column != value, column < value)
            yield from (column <= value, column > value, column >= value)
            yield column.isin(pa.array([value.as_py()], kind))
        yield pc.field(name).isin(pa.array(values, kind))
    yield pc.field("point", "a") == 1
    yield pc.field("point", "is_b") == pa.scalar(True)
    yield pc.field("point", "a").is_null()
    yield pc.field("point", "within", "c") == pa.scalar(2, pa.int8())


def check_filters(lake: Lake, *batches: pa.RecordBatch) -> None:
    given = pa.Table.from_batches(batches)
    read = lake.table().to_pyarrow_dataset()
    wrong = []
    for each in filters():
        found, wanted = read.to_table(filter=each).num_rows, given.filter(each).num_rows
        if found != wanted:
            wrong.append(f"{each}: {found} instead of {wanted}")
    assert not wrong, "\n".join(wrong)


def stats(lake: Lake) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in lake.log(1).read_text().splitlines()]
    return [json.loads(line["add"]["stats"]) for line in lines if "add" in line]


@pytest.mark.parametrize("row_group", [1000, 3])
def test_filter_finds_every_row(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, row_group: int
) -> None:
    monkeypatch.setattr("sparkonce.sinks.delta.table.DeltaLayout.row_group", row_group)
    lake.create(SCHEMA)
    sink = lake.sink()
    sink.validate(SCHEMA)
    batch = pa.RecordBatch.from_pylist(ROWS, SCHEMA)
    sink.commit(prepared(sink, 1, [batch.slice(n, 2) for n in range(0, 20, 2)]))
    check_filters(lake, batch)
    (found,) = stats(lake)
    with_bounds = set(VALUES) - {"raw", "nothing", "nothing_true", "points", "by_name"}
    assert set(found["minValues"]) == set(found["maxValues"]) == with_bounds


@pytest.mark.parametrize(
    ("special", "columns"), [*((special, []) for special in SPECIAL), ("NaN", ["byte"])]
)
def test_filter_finds_every_row_of_a_file_without_bounds(
    lake: Lake, special: str, columns: list[str]
) -> None:
    """It has no statistics but the number of rows; other files keep theirs."""
    lake.create(SCHEMA, partition_by=columns)
    sink = lake.sink()
    sink.validate(SCHEMA)
    plain = pa.RecordBatch.from_pylist(ROWS, SCHEMA)
    other = pa.RecordBatch.from_pylist([*ROWS, {**ROWS[0], **SPECIAL[special]}], SCHEMA)
    sink.commit(prepared(sink, 1, [plain], [other]))
    check_filters(lake, plain, other)
    (found,) = [each for each in stats(lake) if "minValues" not in each]
    assert found == {"numRecords": 8 if columns else 21}


@pytest.mark.parametrize(
    "settings",
    [
        {"delta.dataSkippingNumIndexedCols": "3"},
        {"delta.dataSkippingNumIndexedCols": "0"},
        {"delta.dataSkippingStatsColumns": "long, text,`day`,point.a"},
    ],
)
def test_filter_finds_every_row_where_few_columns_are_described(
    lake: Lake, settings: dict[str, str]
) -> None:
    lake.create(SCHEMA, configuration=settings)
    sink = lake.sink()
    sink.validate(SCHEMA)
    batch = pa.RecordBatch.from_pylist(ROWS, SCHEMA)
    sink.commit(prepared(sink, 1, [batch]))
    check_filters(lake, batch)


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()])
def test_column_of_nothing_but_nan(lake: Lake, kind: pa.DataType) -> None:
    schema = pa.schema([("id", pa.int64()), ("x", kind)])
    lake.create(schema)
    sink = lake.sink()
    batch = pa.RecordBatch.from_pylist([{"id": 1, "x": math.nan}, {"id": 2, "x": None}], schema)
    sink.commit(prepared(sink, 1, [batch]))
    read = lake.table().to_pyarrow_dataset()
    assert read.to_table(filter=pc.is_nan(pc.field("x")))["id"].to_pylist() == [1]
    assert read.to_table(filter=pc.field("x").is_null())["id"].to_pylist() == [2]


def test_text_that_parquet_does_not_describe(lake: Lake) -> None:
    """The other columns keep their bounds."""
    lake.create(SCHEMA)
    sink = lake.sink()
    batch = pa.RecordBatch.from_pylist([*ROWS, {**ROWS[0], "text": "龍" * 5000}], SCHEMA)
    sink.commit(prepared(sink, 1, [batch]))
    check_filters(lake, batch)
    (found,) = stats(lake)
    assert (found["minValues"]["text"], found["maxValues"]["text"]) == ("", "\U0010ffff")


def test_column_with_a_dot_in_its_name(lake: Lake) -> None:
    """Parquet gives it the path of a field within another column."""
    schema = pa.schema([("a", pa.struct([("b", pa.int64())])), ("a.b", pa.int64())])
    lake.create(schema)
    sink = lake.sink()
    batch = pa.RecordBatch.from_pylist([{"a": {"b": 1}, "a.b": 2}], schema)
    sink.commit(prepared(sink, 1, [batch]))
    (found,) = stats(lake)
    assert found["minValues"] == {"a": {}, "a.b": 2}


def test_decimals_are_written_to_the_last_digit(lake: Lake) -> None:
    schema = pa.schema([("big", pa.decimal128(38, 10)), ("tiny", pa.decimal128(12, 12))])
    lake.create(schema)
    sink = lake.sink()
    batch = pa.RecordBatch.from_pylist([{"big": BIG, "tiny": Decimal("1E-12")}], schema)
    sink.commit(prepared(sink, 1, [batch]))
    assert '\\"big\\":1234567890123456789012345678.0123456789' in lake.log(1).read_text()
    assert '\\"tiny\\":0.000000000001' in lake.log(1).read_text()
