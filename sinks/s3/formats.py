"""What a file holds: Parquet, JSON lines or CSV, and which rows each of them can hold.

    rows ─► [Spark: to_json] ─► Arrow ─► writer ─► [gzip or zstd] ─► bytes in order

Spark turns rows into JSON itself, in the pass that hashes them, so that its own readers get back
what it had; Parquet and CSV are written from Arrow. What a format cannot give back is refused: a
column before any data moves, a value with its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, TypeAlias, cast, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pyarrow.types as pat

from sparkonce.errors import ConfigurationError
from sparkonce.sinks.arrow_types import in_zone
from sparkonce.sinks.s3.upload import PARTS_IN_FLIGHT, PartSizes
from sparkonce.sinks.spark_sql import quoted

Format: TypeAlias = Literal["parquet", "json", "csv"]
Compression: TypeAlias = Literal["zstd", "snappy", "lz4", "gzip", "brotli", "none"]

BUFFER_BYTES = 160 << 20
"""For the part buffers of all open files, and the parts on their way."""

MIN_PART_BYTES = 5 << 20
MAX_PART_BYTES = 32 << 20
PART_BYTES: Final = 8 << 20

_EXTENSIONS: Final[Mapping[Compression, str]] = {"gzip": ".gz", "zstd": ".zst", "none": ""}
_ROWS_PER_GROUP: Final = 1 << 20
# Between row groups a writer holds the last column's dictionary, with a hash table of up to six
# times its size: little enough for one file, too much for 32.
_DICTIONARY_BYTES: Final = {False: 1 << 20, True: 1 << 17}
_LINE: Final = "sparkonce_line"

# Microseconds, which Spark's defaults cut off, and the seconds that offsets once had: XXXXX writes
# them where there are some.
_JSON_TIMES: Final = {
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
# Spark takes what equals `nullValue` for null, quoted or not, and by default that is the empty
# string. An empty field that is not quoted becomes this, and no text is.
_CSV_NULL: Final = "sparkonce null 8c1f0b7e52d94a36"
# Arrow writes years of 16 bits, and from 10000 on without the plus that Spark's times then need.
_CSV_YEARS: Final = {"dates": (-32767, 32767), "times": (-32767, 9999)}
_UNITS_PER_DAY: Final = {unit: 86_400 * 1000**n for n, unit in enumerate(("s", "ms", "us", "ns"))}
# A column of this name would be Spark's, not ours; by default it is `_corrupt_record`. What cannot
# be parsed is no row of nulls.
_STRICT: Final = {
    "columnNameOfCorruptRecord": "sparkonce corrupt 8c1f0b7e52d94a36",
    "mode": "FAILFAST",
}
_READ_OPTIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "parquet": {},
    "json": {**_JSON_TIMES, **_STRICT},
    "csv": {
        **_STRICT,
        "header": "true",
        "escape": '"',
        "nullValue": _CSV_NULL,
        "multiLine": "true",
        "lineSep": "\n",
        "positiveInf": "inf",
        "negativeInf": "-inf",
        "nanValue": "nan",
        "timestampFormat": "yyyy-MM-dd HH:mm:ss.SSSSSSX",
        "timestampNTZFormat": "yyyy-MM-dd HH:mm:ss.SSSSSS",
    },
}


def spark_read_options(file_format: str) -> Mapping[str, str]:
    """With which Spark reads back exactly what was written."""
    return _READ_OPTIONS[file_format]


class RowWriter(Protocol):
    """Writes rows into a file from its begin to its end."""

    def write(self, rows: pa.Table) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class FileFormat:
    """How rows become files.

    Attributes:
        name: "parquet", "json" or "csv".
        partition_by: columns that become folders.
        compression: of Parquet's pages, or of the whole text.
        part_bytes: wanted size of every part; None: they begin with 8 MiB and grow with the file.
        max_open_files: bound on the folders of one task.
        target_bytes: a file that has become this large is followed by another one.
        parquet: settings of pyarrow's ParquetWriter, and `row_group_size`, in rows.

    Raises:
        ConfigurationError: the format does not know the compression, or a setting.
    """

    name: str
    partition_by: tuple[str, ...]
    compression: Compression
    part_bytes: int | None
    max_open_files: int
    target_bytes: int | None = None
    parquet: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.name not in get_args(Format):
            raise ConfigurationError(
                f"S3Sink: format={self.name!r}: give one of {', '.join(get_args(Format))}"
            )
        known = get_args(Compression) if self.name == "parquet" else tuple(_EXTENSIONS)
        if self.compression not in known:
            raise ConfigurationError(
                f"S3Sink: compression={self.compression!r}: give one of {', '.join(known)} with "
                f"format={self.name!r}"
            )
        if self.parquet and self.name != "parquet":
            raise ConfigurationError(f"S3Sink: parquet= is for Parquet, not {self.name!r}")
        if self.parquet.get("flavor"):
            raise ConfigurationError(
                "S3Sink: parquet= has a flavor, with which pyarrow gives columns other names than "
                "read_committed looks for: leave it out, and rename columns by select="
            )
        for name, value in self.parquet.items():
            if isinstance(value, str) and value.lower() in {"true", "false"}:
                raise ConfigurationError(
                    f"S3Sink: parquet={{{name!r}: {value!r}}}: give True or False, since pyarrow "
                    "takes any text for true"
                )
        if self.name == "parquet":
            try:
                self.writer(pa.BufferOutputStream(), pa.schema([("x", pa.int64())])).close()
            except (TypeError, ValueError, OSError, pa.ArrowException) as error:
                raise ConfigurationError(
                    f"S3Sink: parquet={dict(self.parquet)!r}, compression={self.compression!r}: "
                    f"pyarrow's ParquetWriter refuses this: {error}"
                ) from error

    @property
    def extension(self) -> str:
        if self.name == "parquet":
            return "parquet"
        return self.name + _EXTENSIONS[self.compression]

    @property
    def is_lines(self) -> bool:
        """Whether Spark makes the text of each row."""
        return self.name == "json"

    @property
    def rows_per_group(self) -> int:
        """As many rows as are written at once."""
        return int(self.parquet.get("row_group_size", _ROWS_PER_GROUP))

    @property
    def part_sizes(self) -> PartSizes:
        """Such that the buffers of all open files, and the parts on their way, fit into memory."""
        files = self.max_open_files if self.partition_by else 1
        bound = max(MIN_PART_BYTES, BUFFER_BYTES // (files + PARTS_IN_FLIGHT))
        if self.part_bytes is not None:
            return PartSizes(min(self.part_bytes, bound), min(self.part_bytes, bound))
        return PartSizes(min(PART_BYTES, bound), min(MAX_PART_BYTES, bound))

    def writer(self, where: pa.NativeFile, schema: pa.Schema) -> RowWriter:
        """A writer of rows with this schema, which has no columns of `partition_by`."""
        if self.name == "parquet":
            return _Parquet(self, where, schema)
        if self.compression != "none":
            where = pa.CompressedOutputStream(
                where, cast("Literal['gzip', 'zstd']", self.compression)
            )
        return _Csv(where, schema) if self.name == "csv" else _Lines(where)

    def lines(self, schema: pa.Schema, row: str) -> list[str]:
        """SQL that makes a line of each row, beside the columns of the folders."""
        data = ", ".join(
            f"{row}.{quoted(name)} AS {quoted(name)}"
            for name in schema.names
            if name not in self.partition_by
        )
        options = ", ".join(f"'{k}', \"{v}\"" for k, v in _JSON_TIMES.items())
        folders = (f"{row}.{quoted(name)} AS {quoted(name)}" for name in self.partition_by)
        return [f"to_json(struct({data}), map({options})) AS {_LINE}", *folders]

    def check(self, schema: pa.Schema) -> None:
        """Refuse columns that the files cannot hold, or not give back.

        Args:
            schema: without the columns of `partition_by`.

        Raises:
            ConfigurationError: naming the column.
        """
        cannot = _UNFIT.get(self.name, ())
        for column in schema:
            for inner in _kinds(column.type):
                told = next((told for refuses, told in cannot if refuses(inner)), None)
                if told is not None:
                    raise ConfigurationError(
                        f"S3Sink: column {column.name!r} is {column.type}, and {told}: use another "
                        "format, or change the column (select=)"
                    )
        if self.name == "csv" and len(schema) == 1 and schema.field(0).nullable:
            raise ConfigurationError(
                f"S3Sink: CSV of the one column {schema.field(0).name!r} cannot hold nulls, whose "
                "lines are empty and skipped by readers: add a column, use another format, or fill "
                "the nulls (select=)"
            )
        try:
            if not self.is_lines:
                writer = self.writer(pa.BufferOutputStream(), schema)
                writer.write(schema.empty_table())
                writer.close()
        except (ValueError, pa.ArrowException) as error:
            kind = "Parquet" if self.name == "parquet" else self.name.upper()
            raise ConfigurationError(
                f"S3Sink: {kind} cannot hold these columns ({error}): change them (select=)"
            ) from error


def check_arrow_reads_json(schema: pa.Schema) -> None:
    """Refuse columns that Arrow's reader of JSON fails on, or, worse, takes for others.

    Raises:
        ConfigurationError: naming the column.
    """
    for column in schema:
        for kind in _kinds(column.type):
            if pat.is_binary(kind) or pat.is_map(kind) or pat.is_date(kind):
                raise ConfigurationError(
                    f"column {column.name!r} is {column.type}, and Arrow does not read {kind} from "
                    "JSON as it was written: use read_committed, which asks Spark"
                )


class _Parquet:
    def __init__(self, file_format: FileFormat, where: pa.NativeFile, schema: pa.Schema) -> None:
        settings = {
            "dictionary_pagesize_limit": _DICTIONARY_BYTES[bool(file_format.partition_by)],
            **{k: v for k, v in file_format.parquet.items() if k != "row_group_size"},
        }
        self._rows = file_format.rows_per_group
        self._writer = pq.ParquetWriter(
            where, schema, compression=file_format.compression, **settings
        )

    def write(self, rows: pa.Table) -> None:
        self._writer.write_table(rows, row_group_size=self._rows)

    def close(self) -> None:
        self._writer.close()


class _Csv:
    def __init__(self, where: pa.NativeFile, schema: pa.Schema) -> None:
        self._where = where
        # Strings are quoted, nulls are not, so that an empty string is no null.
        self._writer = pa_csv.CSVWriter(where, in_zone(schema, "UTC"))  # type: ignore[arg-type]  # takes it

    def write(self, rows: pa.Table) -> None:
        for name, column in zip(rows.column_names, rows.columns, strict=True):
            _check_years(name, column)
        # Of another zone's offset Arrow writes hours and minutes alone.
        self._writer.write_table(rows.cast(in_zone(rows.schema, "UTC")))

    def close(self) -> None:
        self._writer.close()
        self._where.close()


class _Lines:
    def __init__(self, where: pa.NativeFile) -> None:
        self._where = where

    def write(self, rows: pa.Table) -> None:
        for chunk in rows.column(0).chunks:
            lines = pc.binary_join_element_wise(chunk, "\n", "")  # type: ignore[call-overload]
            _, offsets, data = lines.buffers()
            ends = np.frombuffer(offsets, np.int32, len(lines) + 1, 4 * lines.offset)
            self._where.write(data[int(ends[0]) : int(ends[-1])])

    def close(self) -> None:
        self._where.close()


def _kinds(kind: pa.DataType) -> Iterable[pa.DataType]:
    """The type and all within it."""
    yield kind
    for index in range(kind.num_fields):
        yield from _kinds(kind.field(index).type)


def _check_years(name: str, column: pa.ChunkedArray[Any]) -> None:
    if pat.is_date32(column.type):
        kind, per_day = "dates", 1
    elif pat.is_timestamp(column.type):
        kind, per_day = "times", _UNITS_PER_DAY[column.type.unit]
    else:
        return
    first, last = _CSV_YEARS[kind]
    begin, end = (int(np.datetime64(f"{y:05}-01-01").astype(int)) for y in (first, last + 1))
    bounds: Any = pc.min_max(column)
    least, most = bounds["min"].value, bounds["max"].value
    if least is not None and not begin * per_day <= least <= most < end * per_day:
        raise ValueError(
            f"column {name!r} has {kind} outside of the years {first} to {last}, which CSV cannot "
            "give back: use another format, or change the column (select=)"
        )


def _has_a_name_twice(kind: pa.DataType) -> bool:
    return isinstance(kind, pa.StructType) and len({f.name for f in kind}) < kind.num_fields


def _is_spatial(kind: pa.DataType) -> bool:
    if not isinstance(kind, pa.StructType):
        return False
    return any({b"geometry", b"geography"} & set(field.metadata or ()) for field in kind)


def _has_other_keys(kind: pa.DataType) -> bool:
    return pat.is_map(kind) and not pat.is_string(kind.key_type)


# Spark's reader of CSV does not, and of Parquet not before SPARK-54220, which 4.0 lacks.
_VOID: Final = (pat.is_null, "readers take no column that has no type (cast it)")
_NESTED: Final = (
    (_has_a_name_twice, "a struct in it has a name twice, of which readers see one"),
    (_is_spatial, "no reader gives it back as that (keep st_asbinary and st_srid of it)"),
)
_UNFIT: Final[Mapping[str, Sequence[tuple[Callable[[pa.DataType], bool], str]]]] = {
    "parquet": (_VOID, *_NESTED),
    "json": (
        *_NESTED,
        (_has_other_keys, "the keys of JSON's objects are strings"),
        (pat.is_duration, "JSON has no intervals"),
    ),
    "csv": (
        _VOID,
        (pat.is_nested, "CSV holds no nested columns"),
        (pat.is_binary, "CSV holds no bytes"),
        (pat.is_large_binary, "CSV holds no bytes"),
        (pat.is_duration, "CSV has no intervals"),
    ),
}
