"""What Spark, pyarrow and DuckDB read back is what went in: every format, every type it takes."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql.pandas.types import from_arrow_schema

from sparkonce.errors import ConfigurationError
from sparkonce.sinks.s3.formats import FileFormat, spark_read_options
from sparkonce.sinks.s3.readers import _arrow_format

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def exact(digits: int, scale: int) -> Decimal:
    """Without the rounding of decimal's context."""
    return Decimal((int(digits < 0), tuple(map(int, str(abs(digits)))), -scale))


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from(
    ["", " ", " a ", '"', '""', "\\", '\\"', "a,b", "a\nb", "a\r\nb", "\r", "null", "NaN", "#", "'"]
)
INSTANTS = st.datetimes(dt.datetime(1900, 1, 1), dt.datetime(2200, 1, 1))  # noqa: DTZ001
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
    "date": (pa.date32(), st.dates(dt.date(1600, 1, 1), dt.date(2200, 1, 1))),
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
    """As the sink does it: Spark makes the lines, the executor the file."""
    if wanted.is_lines:
        frame = frame_of(spark, table).selectExpr("struct(*) AS row")
        table = frame.selectExpr(*wanted.lines(table.schema, "row")).toArrow()
    path = folder / f"{abs(hash(str(table)))}.{wanted.extension}"
    with pa.OSFile(str(path), "wb") as file:
        writer = wanted.writer(file, table.schema)
        writer.write(table)
        writer.close()
    return path


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
    """Every value of every type, nulls and the awkward ones too."""
    wanted = FileFormat(name, (), compression, 8 << 20, 32)

    @settings(SLOWLY, max_examples=6)
    @given(tables(name))
    def check(table: pa.Table) -> None:
        wanted.check(table.schema)
        path = write(spark, table, wanted, tmp_path)
        schema = from_arrow_schema(table.schema, prefer_timestamp_ntz=True)
        reader = spark.read.format(name).schema(schema).options(**spark_read_options(name))
        assert said(reader.load(str(path)).collect()) == said(frame_of(spark, table).collect())

    check()


@pytest.mark.parametrize(("name", "compression"), CASES[:-2])
def test_arrow_reads_what_was_written(
    spark: SparkSession, tmp_path: Path, name: Any, compression: Any
) -> None:
    """Through the format that `committed_dataset` uses; without what it refuses."""
    wanted = FileFormat(name, (), compression, 8 << 20, 32)
    # NaN and infinity too: it fails on them.
    not_read = {"float", "double", "bytes", "map", "date"} if name == "json" else set()

    @settings(SLOWLY, max_examples=4)
    @given(tables(name))
    def check(table: pa.Table) -> None:
        table = table.drop_columns(sorted(not_read))
        path = write(spark, table, wanted, tmp_path)
        read = ds.dataset(str(path), format=_arrow_format(name, table.schema), schema=table.schema)
        assert said(read.to_table().to_pylist()) == said(table.to_pylist())

    check()


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
    """With the settings that docs/s3.md gives; without what it does not know."""
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


@pytest.mark.parametrize(
    "kind", [pa.binary(), pa.list_(pa.date32()), pa.map_(pa.string(), pa.int64())]
)
def test_json_that_arrow_would_take_for_something_else(kind: pa.DataType) -> None:
    """It is refused rather than read as other values."""
    with pytest.raises(ConfigurationError, match="use read_committed"):
        _arrow_format("json", pa.schema([("x", kind)]))
