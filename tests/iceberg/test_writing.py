"""Rows to Parquet files: types, partitions, statistics, sizes and refusals."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import (
    BucketTransform,
    DayTransform,
    HourTransform,
    IdentityTransform,
    MonthTransform,
    Transform,
    TruncateTransform,
    YearTransform,
)
from pyiceberg.types import (
    DateType,
    DecimalType,
    DoubleType,
    LongType,
    NestedField,
    StringType,
    TimestamptzType,
)

from sparkonce.errors import ConfigurationError, PrepareRejectedError
from sparkonce.sinks import IcebergSink
from sparkonce.sinks.iceberg import table as iceberg_table
from sparkonce.sinks.lakehouse import writing
from tests.iceberg.conftest import SCHEMA, Lake, branch, prepared, rows, task
from tests.support import required_cases

if TYPE_CHECKING:
    from pyiceberg.table import Table

WIDE = Schema(
    NestedField(1, "id", LongType(), required=True),
    NestedField(2, "day", DateType()),
    NestedField(3, "at", TimestamptzType()),
    NestedField(4, "city", StringType()),
    NestedField(5, "amount", DecimalType(12, 2)),
)


def wide_rows(count: int) -> pa.RecordBatch:
    start = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    cities = ["Köln", "Lima", None]
    return pa.RecordBatch.from_pylist(
        [
            {
                "id": n,
                "day": dt.date(2026, 1, 1 + n % 3),
                "at": start + dt.timedelta(hours=7 * n),
                "city": cities[n % 3],
                "amount": Decimal(n) / 4,
            }
            for n in range(count)
        ],
        schema=pa.schema(
            [
                ("id", pa.int64()),
                ("day", pa.date32()),
                ("at", pa.timestamp("us", "Europe/Berlin")),
                ("city", pa.string()),
                ("amount", pa.decimal128(10, 2)),
            ]
        ),
    )


def partitioned(source: int, transform: Transform[Any, Any]) -> PartitionSpec:
    return PartitionSpec(PartitionField(source, 1000, transform, "part"))


@pytest.mark.parametrize(
    ("spec", "row_filter"),
    [
        (partitioned(2, IdentityTransform()), "day = '2026-01-02'"),
        (partitioned(2, MonthTransform()), "day >= '2026-01-02'"),
        (partitioned(3, DayTransform()), "at < '2026-01-02T00:00:00+00:00'"),
        (partitioned(3, HourTransform()), "at < '2026-01-02T00:00:00+00:00'"),
        (partitioned(3, YearTransform()), "at > '2026-01-02T00:00:00+00:00'"),
        (partitioned(4, IdentityTransform()), "city = 'Lima'"),
        (partitioned(4, IdentityTransform()), "city is null"),
        (partitioned(4, TruncateTransform(2)), "city = 'Köln'"),
        (partitioned(1, BucketTransform(4)), "id = 7"),
        (partitioned(5, IdentityTransform()), "amount = 1.25"),
    ],
    ids=lambda value: str(value.fields[0].transform) if isinstance(value, PartitionSpec) else "",
)
def test_partitions_are_where_readers_look(
    lake: Lake, spec: PartitionSpec, row_filter: str
) -> None:
    """A filter on the table gives what a filter of the rows gives, and skips other files."""
    table = lake.create(WIDE, spec)
    sink = lake.sink(max_open_files=40)
    batch = wide_rows(30)
    sink.commit(prepared(sink, 1, [batch.slice(0, 10)], [batch.slice(10, 20)]))
    written = lake.table().scan().to_arrow()
    assert sorted(written["id"].to_pylist()) == list(range(30))
    found = lake.table().scan(row_filter=row_filter).to_arrow().to_pylist()
    plain = lake.catalog.create_table("shop.plain", WIDE)
    plain.append(pa.Table.from_batches([batch.cast(schema_to_pyarrow(WIDE))]))
    wanted = lake.catalog.load_table("shop.plain").scan(row_filter=row_filter).to_arrow()
    assert sorted(map(str, found)) == sorted(map(str, wanted.to_pylist()))
    assert found
    assert table.spec() == spec


def files_of(table: Table) -> list[dict[str, Any]]:
    return table.inspect.files().to_pylist()


def test_statistics_are_those_of_the_library(lake: Lake) -> None:
    lake.create(WIDE)
    sink = lake.sink()
    sink.commit(prepared(sink, 1, [wide_rows(20)]))
    (ours,) = files_of(lake.table())
    plain = lake.catalog.create_table("shop.plain", WIDE)
    plain.append(pa.Table.from_batches([wide_rows(20).cast(schema_to_pyarrow(WIDE))]))
    (theirs,) = files_of(lake.catalog.load_table("shop.plain"))
    apart = {"file_path", "file_size_in_bytes", "column_sizes", "readable_metrics", "split_offsets"}
    assert {k: v for k, v in ours.items() if k not in apart} == {
        k: v for k, v in theirs.items() if k not in apart
    }
    assert ours["file_size_in_bytes"] == lake.data()[0].stat().st_size or len(lake.data()) == 2


FAR = pa.schema([("id", pa.int64()), ("day", pa.date32()), ("at", pa.timestamp("us"))])


def far_rows(days: int, microseconds: int) -> pa.RecordBatch:
    """Python's dates end with the year 9999, and Spark's do not."""
    columns = [pa.array([1]), pa.array([days], pa.int32()), pa.array([microseconds])]
    return pa.record_batch([c.cast(f.type) for c, f in zip(columns, FAR, strict=True)], schema=FAR)


@pytest.mark.parametrize(("days", "microseconds"), [(2932897, 0), (0, 253402300800_000_000)])
def test_date_after_year_9999(lake: Lake, days: int, microseconds: int) -> None:
    """The file has no bounds, and readers find the row."""
    lake.create(FAR)
    sink = lake.sink()
    sink.validate(FAR)
    sink.commit(prepared(sink, 1, [far_rows(days, microseconds)]))
    (file,) = files_of(lake.table())
    assert (file["record_count"], file["lower_bounds"], file["upper_bounds"]) == (1, [], [])
    assert lake.table().scan(row_filter="id = 1").to_arrow()["day"].cast("int32")[0].as_py() == days


def test_partition_of_a_date_after_year_9999(lake: Lake) -> None:
    lake.create(FAR)
    with lake.table().update_spec() as update:
        update.add_field("day", IdentityTransform())
    sink = lake.sink()
    sink.validate(FAR)
    with pytest.raises(PrepareRejectedError, match="partitioned by day.*after the year 9999"):
        prepared(sink, 1, [far_rows(2932897, 0)])


def test_summary_counts_rows_and_files(lake: Lake) -> None:
    lake.create()
    sink = lake.sink()
    for n in range(3):
        sink.commit(prepared(sink, n, [rows(n)], [rows(10 + n)]))
    snapshot = lake.table().current_snapshot()
    assert snapshot is not None
    assert snapshot.summary is not None
    assert snapshot.summary["added-records"] == "2"
    assert snapshot.summary["total-records"] == "6"
    assert snapshot.summary["total-data-files"] == "6"
    manifests = snapshot.manifests(lake.table().io)
    assert [(m.added_files_count, m.added_rows_count) for m in manifests] == [(2, 2)] * 3
    lake.table().append(pa.Table.from_batches([rows(99)]))
    assert len(lake.ids()) == 7


def test_small_batches_become_one_row_group(lake: Lake) -> None:
    lake.create()
    sink = lake.sink()
    sink.commit(prepared(sink, 1, [rows(n) for n in range(50)]))
    (path,) = lake.data()
    assert pq.read_metadata(path).num_row_groups == 1


def test_large_file_is_followed_by_another(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    lake.create()
    with lake.table().transaction() as change:
        change.set_properties({"write.target-file-size-bytes": "2000"})
    monkeypatch.setattr(writing, "_WAITING_BYTES", 1000)
    sink = lake.sink()
    sink.commit(prepared(sink, 1, [rows(*range(n, n + 100)) for n in range(0, 2000, 100)]))
    assert lake.ids() == list(range(2000))
    assert len(lake.data()) > 3


def test_too_many_partitions(lake: Lake) -> None:
    lake.create(WIDE, partitioned(1, IdentityTransform()))
    sink = lake.sink(max_open_files=5)
    handle = sink.beginTransaction(branch())
    with pytest.raises(PrepareRejectedError, match="more than 5 partitions .* max_open_files"):
        sink.write(handle, wide_rows(6))
    sink.discard(handle)
    assert (lake.data(), lake.marks()) == ([], [])


def test_required_column_is_null(lake: Lake) -> None:
    lake.create(WIDE)
    sink = lake.sink()
    batch = pa.RecordBatch.from_pylist([{"id": None}], schema=pa.schema([("id", pa.int64())]))
    with pytest.raises(PrepareRejectedError, match="id is required, and a row has none"):
        task(sink, branch(), batch)


def test_column_is_renamed_while_the_query_runs(lake: Lake) -> None:
    """Its values have nowhere to go: null would lose them."""
    lake.create()
    sink = lake.sink()
    sink.validate(SCHEMA)
    with lake.table().update_schema() as update:
        update.rename_column("name", "title")
    with pytest.raises(PrepareRejectedError, match="no longer has the column name"):
        task(sink, branch(), rows(1))


def test_nested_field_is_renamed_while_the_query_runs(lake: Lake) -> None:
    """Arrow's cast would drop its values."""
    inner = pa.struct([("a", pa.int64()), ("b", pa.int64())])
    schema = pa.schema([("s", inner), ("l", pa.list_(inner)), ("m", pa.map_(pa.string(), inner))])
    lake.create(schema)
    sink = lake.sink()
    sink.validate(schema)
    value = {"a": 1, "b": 2}
    batch = pa.RecordBatch.from_pylist([{"s": value, "l": [value], "m": [("k", value)]}], schema)
    sink.commit(prepared(sink, 0, [batch]))
    for path in ("s.b", "l.element.b", "m.value.b"):
        with lake.table().update_schema() as update:
            update.rename_column(path, "c")
        with pytest.raises(PrepareRejectedError, match="no longer has the column"):
            task(sink, branch(), batch)
        with lake.table().update_schema() as update:
            update.rename_column(path.replace(".b", ".c"), "b")
    sink.commit(prepared(sink, 1, [batch]))
    assert lake.table().scan().to_arrow()["s"].to_pylist() == [value, value]


def test_missing_column_is_null(lake: Lake) -> None:
    lake.create(WIDE)
    sink = lake.sink()
    batch = pa.RecordBatch.from_pylist([{"id": 1}], schema=pa.schema([("id", pa.int64())]))
    sink.validate(batch.schema)
    sink.commit(prepared(sink, 1, [batch]))
    assert lake.table().scan().to_arrow()["city"].to_pylist() == [None]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"id": pa.string(), "name": pa.string()}, "id"),
        ({"id": pa.int64(), "name": pa.int64()}, "name"),
        ({"id": pa.int64(), "nam": pa.string()}, 'nam is not in the table.*new_columns="add"'),
    ],
)
def test_columns_that_do_not_fit(lake: Lake, columns: dict[str, Any], message: str) -> None:
    lake.create()
    with pytest.raises(ConfigurationError, match=f"(?s)does not take these columns.*{message}"):
        lake.sink().validate(pa.schema(columns))


def test_missing_required_column(lake: Lake) -> None:
    lake.create(WIDE)
    with pytest.raises(ConfigurationError, match="(?s)does not take these columns.*id"):
        lake.sink().validate(pa.schema([("city", pa.string())]))


def test_narrower_types_fit(lake: Lake) -> None:
    """Spark's int and decimal(10,2) into long and decimal(12,2)."""
    lake.create(WIDE)
    given = pa.schema([("id", pa.int32()), ("amount", pa.decimal128(10, 2))])
    sink = lake.sink()
    sink.validate(given)
    batch = pa.RecordBatch.from_pylist([{"id": 1, "amount": Decimal("1.25")}], schema=given)
    sink.commit(prepared(sink, 1, [batch]))
    assert lake.table().scan().to_arrow()["amount"].to_pylist() == [Decimal("1.25")]


def test_table_is_created_if_missing(lake: Lake) -> None:
    with pytest.raises(ConfigurationError, match="does not exist: create it"):
        lake.sink().validate(SCHEMA)
    sink = lake.sink(create="if_missing")
    assert list(sink.find_branches(branch().owner)) == []
    sink.validate(SCHEMA)
    lake.sink(create="if_missing").validate(SCHEMA)
    sink.commit(prepared(sink, 1, [rows(1)]))
    assert lake.ids() == [1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([(6, IdentityTransform())], "score, which is no exact number"),
        ([(1, IdentityTransform()), (1, BucketTransform(4))], "two partition fields of id"),
    ],
)
def test_partitions_that_cannot_be_written(
    lake: Lake, fields: list[tuple[int, Transform[Any, Any]]], message: str
) -> None:
    spec = PartitionSpec(
        *(
            PartitionField(source, 1000 + n, kind, f"p{n}")
            for n, (source, kind) in enumerate(fields)
        )
    )
    lake.create(Schema(*WIDE.fields, NestedField(6, "score", DoubleType())), spec)
    with pytest.raises(ConfigurationError, match=message):
        lake.sink().validate(wide_rows(1).schema)


def test_rows_that_belong_to_no_partition(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    lake.create(WIDE, partitioned(4, IdentityTransform()))
    sink = lake.sink()
    monkeypatch.setattr(iceberg_table, "_determine_partitions", lambda *_: [])
    with pytest.raises(PrepareRejectedError, match="belong to no partition, or to two"):
        task(sink, branch(), wide_rows(3))


@pytest.mark.parametrize("buckets", [0, 2])
def test_null_struct_has_no_required_fields(lake: Lake, buckets: int) -> None:
    """Spark's type of a struct that may be null still has fields that are NOT NULL."""
    made = lake.create(required_cases.TABLE)
    if buckets:
        with made.update_spec() as update:
            update.add_field("id", BucketTransform(buckets), "bucket")
    sink = lake.sink()
    sink.validate(required_cases.TABLE)
    batch = required_cases.batch(required_cases.FITTING)
    sink.commit(prepared(sink, 1, [batch.slice(0, 2), batch.slice(2)]))
    found = [row for path in lake.data() for row in pq.read_table(path).to_pylist()]
    assert sorted(found, key=lambda row: int(row["id"])) == required_cases.FITTING
    # pyiceberg's own reader makes an empty list of a null list of structs.
    read = lake.table().scan(selected_fields=("id", "s")).to_arrow().sort_by("id")
    assert read["s"].to_pylist() == [row["s"] for row in required_cases.FITTING]


@pytest.mark.parametrize(("column", "value", "path"), required_cases.REFUSED)
def test_null_where_the_table_takes_none(lake: Lake, column: str, value: Any, path: str) -> None:
    """Readers would see a struct of nulls, or an empty list."""
    lake.create(required_cases.table_of(column))
    sink = lake.sink()

    def write(attempt: int, rows: pa.RecordBatch) -> None:
        task(sink, branch(attempt=attempt), rows)

    required_cases.check_refused(write, column, value, path)


def test_folder_that_cannot_be_listed(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found out before any data moves: the commit needs it."""
    lake.create()

    def denied(*_: object) -> None:
        raise PermissionError("ListBucket")

    monkeypatch.setattr("sparkonce.sinks.lakehouse.storage.Storage.files", denied)
    with pytest.raises(ConfigurationError, match="ListBucket.*give the driver these rights"):
        lake.sink().validate(SCHEMA)
    monkeypatch.setattr("sparkonce.sinks.lakehouse.storage.Storage.files", lambda *_: iter(()))
    with pytest.raises(ConfigurationError, match="was written and is not listed"):
        lake.sink().validate(SCHEMA)


def test_format_version_1_is_refused(lake: Lake) -> None:
    lake.catalog.create_namespace("shop")
    lake.catalog.create_table("shop.orders", SCHEMA, properties={"format-version": "1"})
    with pytest.raises(ConfigurationError, match="has format version 1.*writes version 2"):
        lake.sink().validate(SCHEMA)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"table": "orders"}, "names no namespace"),
        ({"table": "a.b", "create": "always"}, "if_missing"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        IcebergSink(catalog={}, **settings)


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
