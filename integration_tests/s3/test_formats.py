"""What Spark, pyarrow and DuckDB read back is what went in: every format, every type it takes."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql.pandas.types import from_arrow_schema

from integration_tests.support.spark import session_zone
from sparkonce.sinks.s3.writing.columns import check_schema
from sparkonce.sinks.s3.writing.formats import FileFormat, spark_read_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def exact(digits: int, scale: int) -> Decimal:
    """Without the rounding of decimal's context."""
    return Decimal((int(digits < 0), tuple(map(int, str(abs(digits)))), -scale))


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from(
    ["", " ", " a ", '"', '""', "\\", '\\"', "a,b", "a\nb", "a\r\nb", "\r", "null", "NaN", "#", "'"]
)
# All that Python has, but for a day at both ends, which another zone could push beyond them.
INSTANTS = st.datetimes(dt.datetime(1, 1, 2), dt.datetime(9999, 12, 30))  # noqa: DTZ001
# Their offsets had seconds once: 17:30 minutes, 4:56:02 hours, 5:53:28.
ZONES = ["UTC", "Europe/Amsterdam", "America/New_York", "Asia/Kolkata"]
FLAT: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "flag": (pa.bool_(), st.booleans()),
    "tiny": (pa.int8(), st.integers(-(2**7), 2**7 - 1)),
    "small": (pa.int16(), st.integers(-(2**15), 2**15 - 1)),
    "int": (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    "big": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "float": (pa.float32(), st.floats(width=32)),
    "double": (pa.float64(), st.floats()),
    "money": (pa.decimal128(38, 18), st.integers(-(10**37), 10**37).map(lambda n: exact(n, 18))),
    "cents": (pa.decimal128(9, 2), st.integers(-(10**8), 10**8).map(lambda n: exact(n, 2))),
    "text": (pa.string(), TEXT),
    "date": (pa.date32(), st.dates()),
    "zoned": (pa.timestamp("us", "UTC"), INSTANTS.map(lambda t: t.replace(tzinfo=dt.UTC))),
    "local": (pa.timestamp("us"), INSTANTS),
}
STRUCT = pa.struct([("a", pa.int32()), ("b", pa.string())])
NESTED: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "bytes": (pa.binary(), st.binary(max_size=4)),
    "list": (pa.list_(pa.int64()), st.lists(st.none() | st.integers(-5, 5), max_size=3)),
    "map": (
        pa.map_(pa.string(), pa.float64()),
        st.dictionaries(TEXT, st.none() | st.just(0.5), max_size=3).map(lambda d: list(d.items())),
    ),
    "structs": (
        pa.list_(STRUCT),
        st.lists(
            st.none() | st.fixed_dictionaries({"a": st.none() | st.just(1), "b": TEXT}), max_size=2
        ),
    ),
}
INTERVALS = {"span": (pa.duration("us"), st.timedeltas(dt.timedelta(-9), dt.timedelta(9)))}
TAKES = {
    "parquet": {**FLAT, **NESTED, **INTERVALS},
    "json": {**FLAT, **NESTED},
    "csv": FLAT,
}


@st.composite
def tables(draw: st.DrawFn, file_format: str) -> pa.Table:
    columns = TAKES[file_format]
    count = draw(st.integers(1, 12))
    arrays = [
        pa.array(draw(st.lists(st.none() | values, min_size=count, max_size=count)), kind)
        for kind, values in columns.values()
    ]
    return pa.table(arrays, names=list(columns))


def frame_of(spark: SparkSession, table: pa.Table) -> DataFrame:
    schema = from_arrow_schema(table.schema, prefer_timestamp_ntz=True)
    return spark.createDataFrame(table, schema=schema)


def write(spark: SparkSession, table: pa.Table, wanted: FileFormat, folder: Path) -> Path:
    """As the sink does it: Spark makes the lines, a task the file; columns have its zone."""
    frame = frame_of(spark, table).coalesce(1)
    if wanted.is_lines:
        frame = frame.selectExpr("struct(*) AS row")
        frame = frame.selectExpr(*wanted.lines(table.schema, "row"))
    path = folder / f"{abs(hash(str(table)))}.{wanted.extension}"

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = pa.Table.from_batches(batches)
        with pa.OSFile(str(path), "wb") as file:
            writer = wanted.writer(file, rows.schema)
            writer.write(rows)
            writer.close()
        yield pa.RecordBatch.from_pydict({"rows": [rows.num_rows]})

    frame.mapInArrow(run, "rows long").collect()
    return path


def spark_read(spark: SparkSession, path: Path, name: str, schema: pa.Schema) -> DataFrame:
    reader = spark.read.format(name).options(**spark_read_options(name))
    return reader.schema(from_arrow_schema(schema, prefer_timestamp_ntz=True)).load(str(path))


def said(rows: list[Any]) -> list[str]:
    return sorted(map(repr, rows))


# Making an example smaller takes Spark minutes.
SLOWLY = settings(
    deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.generate)
)

CASES = [
    ("parquet", "zstd"),
    ("parquet", "none"),
    ("json", "none"),
    ("json", "gzip"),
    ("csv", "none"),
    ("csv", "gzip"),
    ("json", "zstd"),
    ("csv", "zstd"),
]


@pytest.mark.parametrize(("name", "compression"), CASES)
def test_spark_reads_what_was_written(
    spark: SparkSession, tmp_path: Path, name: Any, compression: Any
) -> None:
    """Every value of every type, nulls and the awkward ones too, whichever zones sessions have."""
    wanted = FileFormat(name, (), compression, 8 << 20, 32)

    @settings(SLOWLY, max_examples=8)
    @given(tables(name), st.sampled_from(ZONES), st.sampled_from(ZONES))
    def check(table: pa.Table, writers_zone: str, readers_zone: str) -> None:
        check_schema(table.schema, wanted)
        with session_zone(spark, writers_zone):
            path = write(spark, table, wanted, tmp_path)
        with session_zone(spark, readers_zone):
            read = spark_read(spark, path, name, table.schema)
            assert said(read.collect()) == said(frame_of(spark, table).collect())

    check()


def micros(frame: DataFrame) -> list[Any]:
    """Times as numbers, which have no zone and no last year."""
    columns = ["n", "unix_micros(zoned)", "CAST(local AS string)", "unix_date(date)"]
    return frame.selectExpr(*columns).sort("n").collect()


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("name", ["parquet", "json", "csv"])
def test_times_of_every_age(spark: SparkSession, tmp_path: Path, name: Any, zone: str) -> None:
    """Offsets with seconds, years before the first and after 9999; in any session's zone."""
    years = ["-32767", "-9999", "-0500", "0000", "0001", "1582", "1850", "2026", "2060", "9999"]
    if name != "csv":
        years += ["-290000", "10000", "32768", "294000"]
    days = [np.datetime64(f"{year}-07-01", "D").astype(int) for year in years]
    instants = pa.array([86_400_000_000 * int(day) + 123_456 for day in days])
    table = pa.table(
        {
            "n": range(len(years)),
            "zoned": instants.cast(pa.timestamp("us", "UTC")),
            "local": instants.cast(pa.timestamp("us")),
            "date": pa.array(days, pa.int32()).cast(pa.date32()),
        }
    )
    with session_zone(spark, zone):
        path = write(spark, table, FileFormat(name, (), "none", 8 << 20, 32), tmp_path)
        read = micros(spark_read(spark, path, name, table.schema))
    assert read == micros(frame_of(spark, table))
    assert micros(spark_read(spark, path, name, table.schema)) == read


@pytest.mark.parametrize(
    "setting",
    ["spark.sql.ansi.doubleQuotedIdentifiers", "spark.sql.parser.escapedStringLiterals"],
)
def test_lines_in_any_session(spark: SparkSession, tmp_path: Path, setting: str) -> None:
    table = pa.table({"n": [0], "zoned": [dt.datetime(2026, 7, 1, tzinfo=dt.UTC)]})
    wanted = FileFormat("json", (), "none", 8 << 20, 32)
    spark.conf.set(setting, "true")
    try:
        path = write(spark, table, wanted, tmp_path)
    finally:
        spark.conf.unset(setting)
    (row,) = spark_read(spark, path, "json", table.schema).collect()
    assert row.n == 0
    assert '"zoned":"2026-07-01T' in path.read_text()


def test_text_that_json_would_change_fails_its_batch(spark: SparkSession, tmp_path: Path) -> None:
    """`to_json` puts U+FFFD for a byte that is not UTF-8."""
    rows = pa.table({"n": [0], "name": ["Müller"]})
    wanted = FileFormat("json", (), "none", 8 << 20, 32)
    frame = spark.sql("SELECT 0L AS n, CAST(unhex('4DFC6C6C6572') AS string) AS name")
    lines = frame.selectExpr("struct(*) AS row").selectExpr(*wanted.lines(rows.schema, "row"))
    with pytest.raises(Exception, match="INVALID_UTF8_STRING"):
        lines.collect()
    assert "Müller" in write(spark, rows, wanted, tmp_path).read_text()


@pytest.mark.parametrize(
    ("name", "zoned"),
    [
        ("json", ["2026-07-01T02:00:00.123456+02:00", "0001-07-01T00:53:28.123456+00:53:28"]),
        ("csv", ["2026-07-01 00:00:00.123456Z", "0001-07-01 00:00:00.123456Z"]),
    ],
)
def test_text_of_times(spark: SparkSession, tmp_path: Path, name: Any, zoned: list[str]) -> None:
    """JSON has the session's zone with every second of its offset, CSV is in UTC."""
    instants = [dt.datetime(year, 7, 1, 0, 0, 0, 123456, dt.UTC) for year in (2026, 1)]
    table = pa.table({"n": [0, 1], "zoned": pa.array(instants, pa.timestamp("us", "UTC"))})
    with session_zone(spark, "Europe/Berlin"):
        path = write(spark, table, FileFormat(name, (), "none", 8 << 20, 32), tmp_path)
    line = '{{"n":{},"zoned":"{}"}}' if name == "json" else "{},{}"
    wanted = [line.format(n, text) for n, text in enumerate(zoned)]
    assert path.read_text().splitlines()[-2:] == wanted


DUCKDB_READS = {
    "parquet": "read_parquet($path)",
    "json": "read_json($path, format = 'newline_delimited', columns = $columns)",
    "csv": "read_csv($path, columns = $columns, auto_detect = false, header = true, delim = ',', "
    "quote = '\"', escape = '\"', nullstr = '', allow_quoted_nulls = false)",
}


@pytest.mark.parametrize(("name", "compression"), CASES)
def test_duckdb_reads_what_was_written(
    spark: SparkSession, tmp_path: Path, name: Any, compression: Any
) -> None:
    """With the settings that docs/howto/s3-reading.md gives; without what it does not know."""
    wanted = FileFormat(name, (), compression, 8 << 20, 32)
    # It takes intervals in Parquet for integers, base64 for itself, JSON's numbers for doubles.
    not_read = {"parquet": ["span"], "json": ["bytes", "money"], "csv": []}[name]

    @settings(SLOWLY, max_examples=20)
    @given(tables(name))
    def check(table: pa.Table) -> None:
        table = table.drop_columns(not_read)
        path = write(spark, table, wanted, tmp_path)
        with duckdb.connect() as duck:
            duck.execute("SET TimeZone = 'UTC'")
            written = duck.from_arrow(table)
            kinds = dict(zip(written.columns, map(str, written.types), strict=True))
            given = {"path": str(path)} | ({} if name == "parquet" else {"columns": kinds})
            read = duck.sql(f"FROM {DUCKDB_READS[name]}", params=given).to_arrow_table()
        assert said(read.cast(table.schema).to_pylist()) == said(table.to_pylist())

    check()
