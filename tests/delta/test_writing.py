"""Rows to Parquet files: types, partitions, statistics, sizes and refusals."""

from __future__ import annotations

import datetime as dt
import json
import random
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.schema import Field, PrimitiveType, Schema, StructType

from sparkonce.errors import ConfigurationError, PrepareRejectedError
from sparkonce.sinks import DeltaSink
from sparkonce.sinks.lakehouse import writing
from tests.delta.conftest import SCHEMA, Lake, branch, prepared, rows, task
from tests.support import required_cases

INNER = pa.struct([("a", pa.int64()), ("b", pa.string())])
WIDE = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("small", pa.int16()),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", "UTC")),
        ("city", pa.string()),
        ("amount", pa.decimal128(12, 2)),
        ("score", pa.float64()),
        ("is_new", pa.bool_()),
        ("raw", pa.binary()),
        ("inner", INNER),
        ("many", pa.list_(INNER)),
        ("by_name", pa.map_(pa.string(), pa.int32())),
    ]
)


def wide_rows(count: int, seed: int = 0) -> pa.RecordBatch:
    chosen = random.Random(seed)  # noqa: S311
    start = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    inner = {"a": 1, "b": "x"}

    def maybe(value: Any) -> Any:
        return None if chosen.random() < 0.2 else value

    return pa.RecordBatch.from_pylist(
        [
            {
                "id": n,
                "small": maybe(n % 7),
                "day": maybe(dt.date(2026, 1, 1 + n % 3)),
                "at": maybe(start + dt.timedelta(microseconds=1_234_567_891 * n)),
                "city": maybe(chosen.choice(["Köln", "Lima", "a/b=c d%", "名前" * 40])),
                "amount": maybe(Decimal(n) / 4),
                "score": maybe(chosen.choice([n / 3, float("nan"), -0.0])),
                "is_new": maybe(n % 2 == 0),
                "raw": maybe(bytes([n % 256])),
                "inner": maybe(inner),
                "many": maybe([inner, inner]),
                "by_name": maybe([("k", n)]),
            }
            for n in range(count)
        ],
        schema=WIDE,
    )


def written(lake: Lake) -> list[dict[str, Any]]:
    table = lake.table().to_pyarrow_table()
    return sorted(table.to_pylist(), key=lambda row: int(row["id"]))


@pytest.mark.parametrize(
    "columns",
    [[], ["day"], ["city"], ["is_new", "small"], ["id"]],
    ids=lambda columns: "+".join(columns) or "none",
)
def test_rows_are_read_back_equal(lake: Lake, columns: list[str]) -> None:
    lake.create(WIDE, partition_by=columns)
    sink = lake.sink(max_open_files=1000)
    sink.validate(WIDE)
    batch = wide_rows(60)
    sink.commit(prepared(sink, 1, [batch.slice(0, 25), batch.slice(25, 15)], [batch.slice(40)]))
    for found, given in zip(written(lake), batch.to_pylist(), strict=True):
        assert str(found) == str(given)


def test_partition_columns_are_not_in_the_files(lake: Lake) -> None:
    lake.create(partition_by=["day"])
    sink = lake.sink()
    sink.commit(prepared(sink, 1, [rows(*range(9))]))
    assert len(lake.data()) == 3
    for path in lake.data():
        assert pq.read_schema(path).names == ["id", "name"]
    found = lake.table().to_pyarrow_table(filters=[("day", "=", dt.date(2026, 1, 2))])
    assert sorted(found["id"].to_pylist()) == [1, 4, 7]


def test_log_has_values_as_delta_writes_them(lake: Lake) -> None:
    """Spark reads true and false only; readers of changes skip files that change no data."""
    lake.create(WIDE, partition_by=["is_new"])
    sink = lake.sink()
    sink.commit(prepared(sink, 1, [wide_rows(60)]))
    lines = map(json.loads, lake.log(1).read_text().splitlines())
    adds = [line["add"] for line in lines if "add" in line]
    assert {add["partitionValues"]["is_new"] for add in adds} == {"true", "false", None}
    assert all(add["dataChange"] for add in adds)


def test_empty_text_in_a_partition_column_is_null(lake: Lake) -> None:
    """Delta's log has no other way to write it."""
    lake.create(partition_by=["name"])
    sink = lake.sink()
    day = dt.date(2026, 1, 1)
    given = [{"id": 1, "name": "", "day": day}, {"id": 2, "name": None, "day": day}]
    sink.commit(prepared(sink, 1, [pa.RecordBatch.from_pylist(given, SCHEMA)]))
    assert len(lake.data()) == 1
    assert [row["name"] for row in written(lake)] == [None, None]


# -- statistics ------------------------------------------------------------------------------------


def statistics(lake: Lake) -> list[dict[str, Any]]:
    adds = pa.table(lake.table().get_add_actions()).to_pylist()
    logs = sorted(Path(lake.uri, "_delta_log").glob("*.json"))
    lines = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    found = [json.loads(line["add"]["stats"]) for line in lines if "add" in line]
    assert len(found) == len(adds)
    return found


def without_nan(batch: pa.RecordBatch) -> pa.RecordBatch:
    n = batch.schema.get_field_index("score")
    score: Any = batch.column(n)
    return batch.set_column(n, "score", pc.if_else(pc.is_nan(score), pa.scalar(0.5), score))


@pytest.mark.parametrize("row_group", [1000, 7])
def test_statistics_hold_for_every_row(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, row_group: int
) -> None:
    """What readers skip, they must not miss; also where a file has several row groups."""
    monkeypatch.setattr("sparkonce.sinks.delta.table.DeltaLayout.row_group", row_group)
    lake.create(WIDE)
    sink = lake.sink()
    batches = [without_nan(wide_rows(40, seed)) for seed in range(3)]
    tasks = [[batch.slice(n, 8) for n in range(0, 40, 8)] for batch in batches]
    sink.commit(prepared(sink, 1, *tasks))
    groups = [pq.read_metadata(path).num_row_groups for path in lake.data()]
    assert groups == [5 if row_group == 7 else 1] * 3
    for found, batch in zip(statistics(lake), batches, strict=True):
        assert found["numRecords"] == 40
        assert set(found["minValues"]) == set(WIDE.names) - {"raw", "many", "by_name"}
        assert found["minValues"].pop("inner") == found["maxValues"].pop("inner") == {}
        for name, nulls in found["nullCount"].items():
            assert nulls == batch.column(name).null_count, name
        assert set(found["nullCount"]) == set(WIDE.names) - {"inner", "many", "by_name"}
        for name in found["minValues"]:
            column = batch.column(name).drop_null()
            least, most = pc.min(column).as_py(), pc.max(column).as_py()
            low, high = found["minValues"][name], found["maxValues"][name]
            if name == "day":
                low, high = dt.date.fromisoformat(low), dt.date.fromisoformat(high)
            if name == "at":
                low, high = dt.datetime.fromisoformat(low), dt.datetime.fromisoformat(high)
                assert least - low < dt.timedelta(milliseconds=1)
                assert high - most < dt.timedelta(milliseconds=1)
            assert low <= least, name
            assert high >= most, name


def test_long_texts_are_cut_off(lake: Lake) -> None:
    lake.create()
    sink = lake.sink()
    text = "z" * 100
    batch = pa.RecordBatch.from_pylist([{"id": 1, "name": text, "day": None}], SCHEMA)
    sink.commit(prepared(sink, 1, [batch]))
    (found,) = statistics(lake)
    low, high = found["minValues"]["name"], found["maxValues"]["name"]
    assert low < text < high
    assert len(high) == len(low) + 1 == 33


@pytest.mark.parametrize(
    ("settings", "described"),
    [
        ({"delta.dataSkippingNumIndexedCols": "1"}, {"id"}),
        ({"delta.dataSkippingNumIndexedCols": "-1"}, {"id", "name", "day"}),
        ({"delta.dataSkippingStatsColumns": "name,day"}, {"name", "day"}),
    ],
)
def test_table_says_which_columns_are_described(
    lake: Lake, settings: dict[str, str], described: set[str]
) -> None:
    lake.create(configuration=settings)
    sink = lake.sink()
    sink.commit(prepared(sink, 1, [rows(1)]))
    (found,) = statistics(lake)
    assert set(found["minValues"]) == set(found["nullCount"]) == described


def test_column_with_nothing_but_nulls(lake: Lake) -> None:
    lake.create()
    sink = lake.sink()
    batch = pa.RecordBatch.from_pylist([{"id": 1, "name": None, "day": None}], SCHEMA)
    sink.commit(prepared(sink, 1, [batch]))
    (found,) = statistics(lake)
    assert found["nullCount"] == {"id": 0, "name": 1, "day": 1}
    assert found["minValues"] == {"id": 1}


# -- files -----------------------------------------------------------------------------------------


def test_small_batches_become_one_row_group(lake: Lake) -> None:
    lake.create()
    sink = lake.sink()
    sink.commit(prepared(sink, 1, [rows(n) for n in range(50)]))
    (path,) = lake.data()
    assert pq.read_metadata(path).num_row_groups == 1


def test_large_file_is_followed_by_another(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    lake.create()
    monkeypatch.setattr("sparkonce.sinks.delta.table.DeltaLayout.file_bytes", 2000)
    monkeypatch.setattr(writing, "_WAITING_BYTES", 1000)
    sink = lake.sink()
    sink.commit(prepared(sink, 1, [rows(*range(n, n + 100)) for n in range(0, 2000, 100)]))
    assert lake.ids() == list(range(2000))
    assert len(lake.data()) > 3


def test_too_many_partitions(lake: Lake) -> None:
    lake.create(partition_by=["id"])
    sink = lake.sink(max_open_files=5)
    handle = sink.beginTransaction(branch())
    with pytest.raises(PrepareRejectedError, match="more than 5 partitions .* max_open_files"):
        sink.write(handle, rows(*range(6)))
    sink.discard(handle)
    assert (lake.data(), lake.left_over()) == ([], [])


# -- types -----------------------------------------------------------------------------------------


def test_required_column_is_null(lake: Lake) -> None:
    lake.create(WIDE)
    batch = pa.RecordBatch.from_pylist([{"id": None}], schema=pa.schema([("id", pa.int64())]))
    with pytest.raises(PrepareRejectedError, match="id is required, and a row has none"):
        task(lake.sink(), branch(), batch)


@pytest.mark.parametrize("columns", [[], ["id"]])
def test_null_struct_has_no_required_fields(lake: Lake, columns: list[str]) -> None:
    """Spark's type of a struct that may be null still has fields that are NOT NULL."""
    lake.create(required_cases.TABLE, partition_by=columns)
    sink = lake.sink()
    sink.validate(required_cases.TABLE)
    batch = required_cases.batch(required_cases.FITTING)
    sink.commit(prepared(sink, 1, [batch.slice(0, 2), batch.slice(2)]))
    assert written(lake) == required_cases.FITTING
    assert lake.table().to_pyarrow_table(filters=[("id", "=", 1)]).num_rows == 1


@pytest.mark.parametrize(("column", "value", "path"), required_cases.REFUSED)
def test_null_where_the_table_takes_none(lake: Lake, column: str, value: Any, path: str) -> None:
    """Readers would see a struct of nulls, or an empty list."""
    lake.create(required_cases.table_of(column))
    sink = lake.sink()

    def write(attempt: int, rows: pa.RecordBatch) -> None:
        task(sink, branch(attempt=attempt), rows)

    required_cases.check_refused(write, column, value, path)


def test_missing_column_is_null(lake: Lake) -> None:
    lake.create(WIDE)
    sink = lake.sink()
    batch = pa.RecordBatch.from_pylist([{"id": 1}], schema=pa.schema([("id", pa.int64())]))
    sink.validate(batch.schema)
    sink.commit(prepared(sink, 1, [batch]))
    (row,) = written(lake)
    assert row["city"] is None


def test_column_is_added_while_the_query_runs(lake: Lake) -> None:
    lake.create()
    sink = lake.sink()
    sink.validate(SCHEMA)
    lake.table().alter.add_columns([Field("note", PrimitiveType("string"))])
    sink.commit(prepared(sink, 1, [rows(1)]))
    (row,) = written(lake)
    assert row["note"] is None


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"id": pa.int64(), "nam": pa.string()}, "nam is not in the table; id.*|nam is not in"),
        ({"id": pa.string()}, "id is string, and int64 in the table"),
        ({"id": pa.int64(), "city": pa.int64()}, "city is int64, and string"),
        ({"city": pa.string()}, "id is missing"),
        ({"id": pa.int64(), "amount": pa.decimal128(13, 2)}, "amount is decimal128"),
        ({"id": pa.int64(), "amount": pa.decimal128(12, 3)}, "amount is decimal128"),
        ({"id": pa.int64(), "small": pa.int32()}, "small is int32, and int16"),
        (
            {"id": pa.int64(), "inner": pa.struct([("a", pa.int64()), ("c", pa.int64())])},
            "inner.c is not in the table",
        ),
        (
            {"id": pa.int64(), "many": pa.list_(pa.struct([("a", pa.string())]))},
            "many.a is string, and int64",
        ),
        (
            {"id": pa.int64(), "by_name": pa.map_(pa.string(), pa.string())},
            "by_name.value is string",
        ),
        ({"id": pa.int64(), "inner": pa.list_(pa.int64())}, "inner is list"),
    ],
)
def test_columns_that_do_not_fit(lake: Lake, columns: dict[str, Any], message: str) -> None:
    lake.create(WIDE)
    with pytest.raises(ConfigurationError, match=f"(?s)does not take these columns.*{message}"):
        lake.sink().validate(pa.schema(columns))


def test_narrower_types_fit(lake: Lake) -> None:
    """Spark's int and decimal(10,2) into long and decimal(12,2)."""
    lake.create(WIDE)
    given = pa.schema(
        [
            ("id", pa.int32()),
            ("amount", pa.decimal128(10, 2)),
            ("score", pa.float32()),
            ("at", pa.timestamp("us", "Europe/Berlin")),
        ]
    )
    sink = lake.sink()
    sink.validate(given)
    at = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    row = {"id": 1, "amount": Decimal("1.25"), "score": 0.5, "at": at}
    sink.commit(prepared(sink, 1, [pa.RecordBatch.from_pylist([row], schema=given)]))
    assert {name: written(lake)[0][name] for name in row} == row


# -- the table -------------------------------------------------------------------------------------


def test_table_is_created_if_missing(lake: Lake) -> None:
    with pytest.raises(ConfigurationError, match="does not exist: create it"):
        lake.sink().validate(SCHEMA)
    sink = lake.sink(create="if_missing")
    assert list(sink.find_branches(branch().owner)) == []
    sink.abort(branch())
    sink.validate(SCHEMA)
    lake.sink(create="if_missing").validate(SCHEMA)
    sink.commit(prepared(sink, 1, [rows(1)]))
    assert lake.ids() == [1]
    assert lake.left_over() == []


def test_column_that_delta_has_no_type_for(lake: Lake) -> None:
    schema = pa.schema([("id", pa.int64()), ("took", pa.duration("us"))])
    with pytest.raises(ConfigurationError, match="cannot be created with these columns") as found:
        lake.sink(create="if_missing").validate(schema)
    assert "\n" not in str(found.value)


def with_rule(name: str, value: str) -> Schema:
    rule = Field("n", PrimitiveType("long"), metadata={name: value})
    return Schema([Field("id", PrimitiveType("long")), rule])


@pytest.mark.parametrize(
    ("schema", "settings", "message"),
    [
        (SCHEMA, {"delta.columnMapping.mode": "name"}, "maps its columns to other names"),
        (SCHEMA, {"delta.constraints.positive": "id > 0"}, "has a CHECK constraint"),
        (
            SCHEMA,
            {"delta.setTransactionRetentionDuration": "interval 1 day"},
            "forgets after a while how batches ended",
        ),
        (
            with_rule("delta.invariants", '{"expression":{"expression":"n > 3"}}'),
            {},
            "has a rule for the values of a column .delta.invariants",
        ),
        (with_rule("delta.generationExpression", "id + 1"), {}, "delta.generationExpression"),
        (with_rule("__CHAR_VARCHAR_TYPE_STRING", "varchar(3)"), {}, "__CHAR_VARCHAR_TYPE_STRING"),
    ],
)
def test_tables_that_are_refused(
    lake: Lake, schema: Any, settings: dict[str, str], message: str
) -> None:
    """Nothing would check the rows, or readers would not find them."""
    made = lake.create(SCHEMA)
    log = lake.log(0)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:  # deltalake itself refuses to make some of these tables
        if "metaData" in line:
            line["metaData"]["configuration"] = settings
            if isinstance(schema, Schema):
                line["metaData"]["schemaString"] = schema.to_json()
    log.write_text("\n".join(map(json.dumps, lines)))
    assert made.version() == 0
    with pytest.raises(ConfigurationError, match=message):
        lake.sink().validate(SCHEMA)
    (finding,) = lake.sink().diagnose()
    assert finding.level.name == "ERROR"


def test_unknown_feature_is_refused(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    lake.create(pa.schema([("at", pa.timestamp("us"))]))
    monkeypatch.setattr("sparkonce.sinks.delta.table._KNOWN_FEATURES", frozenset())
    with pytest.raises(ConfigurationError, match="the feature timestampNtz, which DeltaSink does"):
        lake.sink().validate(pa.schema([("at", pa.timestamp("us"))]))


@pytest.mark.parametrize("column", ["score", "amount", "at", "raw"])
def test_partition_column_without_exact_text(lake: Lake, column: str) -> None:
    """deltalake itself fails to read fractions below zero."""
    lake.create(WIDE, partition_by=[column])
    with pytest.raises(ConfigurationError, match=f"partitioned by {column}, whose values"):
        lake.sink().validate(WIDE)


def test_rule_of_a_nested_field_is_refused(lake: Lake) -> None:
    rule = Field("a", PrimitiveType("long"), metadata={"delta.invariants": "{}"})
    lake.create(pa.schema([("s", pa.struct([("a", pa.int64())]))]))
    log = lake.log(0)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    schema = Schema([Field("s", StructType([rule]))])
    for line in lines:
        if "metaData" in line:
            line["metaData"]["schemaString"] = schema.to_json()
    log.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(ConfigurationError, match="delta.invariants"):
        lake.sink().validate(pa.schema([("s", pa.struct([("a", pa.int64())]))]))


def test_table_is_created_by_several_at_once(lake: Lake) -> None:
    with ThreadPoolExecutor(6) as pool:
        made = [lake.sink(create="if_missing") for _ in range(6)]
        list(pool.map(lambda sink: sink.validate(SCHEMA), made))
    assert lake.ids() == []


def test_text_in_a_required_partition_column_is_empty(lake: Lake) -> None:
    """It would be null, and nobody could read the table any more."""
    schema = pa.schema([("id", pa.int64()), pa.field("city", pa.string(), nullable=False)])
    lake.create(schema, partition_by=["city"])
    batch = pa.RecordBatch.from_pylist([{"id": 1, "city": ""}], schema)
    with pytest.raises(PrepareRejectedError, match="city is required, and a row has an empty text"):
        task(lake.sink(), branch(), batch)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.timestamp("us"), dt.datetime(9999, 12, 31, 23, 59, 59, 999999)),  # noqa: DTZ001
        (pa.string(), "a" * 32 + "\U0010ffff" + "z"),
    ],
)
def test_value_without_a_bound(lake: Lake, kind: pa.DataType, value: Any) -> None:
    """The end of time is no reason to stop; readers skip nothing then."""
    schema = pa.schema([("id", pa.int64()), ("x", kind)])
    lake.create(schema)
    sink = lake.sink()
    sink.validate(schema)
    sink.commit(prepared(sink, 1, [pa.RecordBatch.from_pylist([{"id": 1, "x": value}], schema)]))
    assert written(lake) == [{"id": 1, "x": value}]
    found = json.loads(
        next(
            json.loads(line)["add"]["stats"]
            for line in lake.log(1).read_text().splitlines()
            if "add" in json.loads(line)
        )
    )
    assert found == {"numRecords": 1}


def test_batch_of_no_rows_makes_no_file(lake: Lake) -> None:
    lake.create()
    sink = lake.sink()
    task(sink, branch(), rows())
    assert lake.data() == []


def test_storage_that_overwrites_commits(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """As S3 servers without conditional writes do."""
    lake.create()

    def accepts(*_: object, **__: object) -> None:
        return

    monkeypatch.setattr(DeltaTable, "create_write_transaction", accepts)
    with pytest.raises(ConfigurationError, match="lets several writers commit the same version"):
        lake.sink().validate(SCHEMA)
    (finding,) = lake.sink().diagnose()
    assert "lets several writers" in finding.what


def test_folder_that_cannot_be_listed(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    lake.create()

    def denied(*_: object) -> None:
        raise PermissionError("ListBucket")

    monkeypatch.setattr("sparkonce.sinks.lakehouse.storage.Storage.files", denied)
    with pytest.raises(ConfigurationError, match="ListBucket.*give the driver these rights"):
        lake.sink().validate(SCHEMA)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"uri": "gs://bucket/orders"}, "neither a folder nor s3://"),
        ({"uri": "/orders", "create": "always"}, "if_missing"),
        ({"uri": "/lake/t#1"}, "read in different ways"),
        ({"uri": "s3://lake/f?1"}, "read in different ways"),
        ({"uri": "/lake/a%20b"}, "read in different ways"),
        ({"uri": "s3://lake//h"}, "read in different ways"),
        ({"uri": "~/t"}, "read in different ways"),
        ({"uri": "file://lake/orders"}, "names a host"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DeltaSink(**settings)


def test_doctor_looks_at_the_table(lake: Lake) -> None:
    def said(**settings: Any) -> list[tuple[str, str]]:
        return [(each.level.name, each.what) for each in lake.sink(**settings).diagnose()]

    assert said()[0][0] == "ERROR"
    assert said(create="if_missing")[0][0] == "OK"
    lake.create()
    before = sorted(path for path in lake.folder.rglob("*") if path.is_file())
    ((level, text),) = said()
    assert level == "OK"
    assert "can be read" in text
    assert sorted(path for path in lake.folder.rglob("*") if path.is_file()) == before


def test_partition_of_a_date_after_year_9999(lake: Lake) -> None:
    """Python's dates end there, and Spark's do not: the error names the column."""
    schema = pa.schema([("id", pa.int64()), ("day", pa.date32())])
    lake.create(schema, partition_by=["day"])
    sink = lake.sink()
    sink.validate(schema)
    day = pa.array([2932897], pa.int32()).cast(pa.date32())
    with pytest.raises(PrepareRejectedError, match="column day, .*after the year 9999: leave"):
        prepared(sink, 1, [pa.record_batch([pa.array([1]), day], schema=schema)])
