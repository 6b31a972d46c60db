"""DuckDB reads what `IcebergSink` and `DeltaSink` write, as users' tools do."""

from __future__ import annotations

import datetime as dt
import importlib
from collections.abc import Iterator
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog
from pyiceberg.transforms import BucketTransform, DayTransform

from integration_tests.support.lake_in_s3 import delta_options, iceberg_settings
from integration_tests.support.lake_in_spark import prepared
from sparkonce.sinks import DeltaSink, IcebergSink

if TYPE_CHECKING:
    from sparkonce.testing.services import S3Server

TABLE = "shop.orders"
ROWS = 40
SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("at", pa.timestamp("us", "UTC")),
        ("day", pa.date32()),
        ("amount", pa.decimal128(12, 2)),
        ("rate", pa.float64()),
        ("is_paid", pa.bool_()),
        ("name", pa.string()),
        ("photo", pa.binary()),
        ("tags", pa.list_(pa.string())),
        ("place", pa.struct([("city", pa.string()), ("floor", pa.int32())])),
    ]
)


def row(n: int) -> dict[str, Any]:
    at = dt.datetime(2026, 3, 1, tzinfo=dt.UTC) + dt.timedelta(hours=n)
    return {
        "id": n,
        "at": at,
        "day": at.date(),
        "amount": Decimal(n * 100 + 7) / 100 if n % 5 else None,
        "rate": n / 7,
        "is_paid": n % 2 == 0,
        "name": f"名 {n}" if n % 3 else None,
        "photo": bytes([n % 256, 0, 255]),
        "tags": [f"t{n}", None],
        "place": {"city": f"c{n}", "floor": None if n % 4 else n},
    }


def batch(number: int) -> pa.RecordBatch:
    rows = [row(n) for n in range(number * ROWS, (number + 1) * ROWS)]
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def wider(number: int) -> pa.RecordBatch:
    """A batch with one more column than the table has."""
    return batch(number).append_column("note", pa.array([f"n{n}" for n in range(ROWS)]))


@pytest.fixture
def duck(s3: S3Server) -> Iterator[duckdb.DuckDBPyConnection]:
    with closing(duckdb.connect()) as connection:
        connection.execute("SET autoinstall_known_extensions=false; SET TimeZone='UTC'")
        for name in ("avro", "httpfs", "iceberg", "delta"):
            package = importlib.import_module(f"duckdb_extension_{name}")
            (file,) = Path(str(package.__file__)).parent.rglob(f"{name}.duckdb_extension")
            connection.load_extension(str(file))
        connection.execute(
            "CREATE SECRET (TYPE s3, URL_STYLE 'path', USE_SSL false, REGION 'us-east-1', "
            f"KEY_ID '{s3.access_key}', SECRET '{s3.secret_key}', "
            f"ENDPOINT '{s3.endpoint_url.removeprefix('http://')}')"
        )
        yield connection


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path, fresh_bucket: str) -> str:
    return str(tmp_path) if request.param == "folder" else f"s3://{fresh_bucket}"


def deliver(sink: IcebergSink | DeltaSink) -> None:
    """Three batches, the last with a new column; before each, one is prepared and aborted."""
    for number, rows in enumerate((batch(0), batch(1), wider(2))):
        sink.validate(rows.schema)
        sink.abort(prepared(sink, rows, number + 1000))
        sink.commit(prepared(sink, rows, number))


def check(connection: duckdb.DuckDBPyConnection, table: str) -> None:
    """Every value of every row, what a filter on the partitions finds, and the new column."""
    names = ", ".join(f'"{name}"' for name in SCHEMA.names)
    found = connection.execute(f"SELECT {names} FROM {table} ORDER BY id").to_arrow_table()
    assert found.cast(SCHEMA).to_pylist() == [row(n) for n in range(3 * ROWS)]
    day = f"SELECT count(*) FROM {table} WHERE day = DATE '2026-03-02' AND id > 30"
    assert connection.execute(day).fetchall() == [(17,)]
    notes = f"SELECT note, count(*) FROM {table} GROUP BY note ORDER BY note NULLS FIRST LIMIT 2"
    assert connection.execute(notes).fetchall() == [(None, 2 * ROWS), ("n0", 1)]


@pytest.mark.parametrize("s3", ["versitygw"], indirect=True)
def test_iceberg(duck: duckdb.DuckDBPyConnection, s3: S3Server, place: str, tmp_path: Path) -> None:
    settings = {
        "type": "sql",
        "uri": f"sqlite:///{tmp_path}/catalog.db",
        "warehouse": f"{place}/lake",
        **iceberg_settings(s3),
    }
    with (
        closing(load_catalog("default", **settings)) as catalog,
        closing(IcebergSink(TABLE, catalog=settings, new_columns="add")) as sink,
    ):
        catalog.create_namespace("shop")
        table = catalog.create_table(TABLE, SCHEMA)
        with table.update_spec() as update:
            update.add_field("day", DayTransform(), "in_days")
            update.add_field("id", BucketTransform(3), "in_buckets")
        deliver(sink)
        newest = catalog.load_table(TABLE).metadata_location
    check(duck, f"iceberg_scan('{newest}')")


@pytest.mark.parametrize("s3", ["versitygw"], indirect=True)
def test_delta(duck: duckdb.DuckDBPyConnection, s3: S3Server, place: str) -> None:
    uri, options = f"{place}/orders", delta_options(s3)
    DeltaTable.create(uri, schema=SCHEMA, partition_by=["day"], storage_options=options)
    with closing(DeltaSink(uri, storage_options=options, new_columns="add")) as sink:
        deliver(sink)
    check(duck, f"delta_scan('{uri}')")
