"""The formats of files: Parquet, JSON lines and CSV, with their compression and part sizes.

    rows ─► [Spark: to_json] ─► Arrow ─► writer ─► [gzip or zstd] ─► bytes in order

Spark itself turns rows into JSON, in the pass that hashes them, so that its own readers get the
same values back. Arrow writes Parquet and CSV. `columns` refuses the columns that a format cannot
return unchanged; a value that it cannot return fails its batch.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from sparkonce.sinks.s3.writing.upload import PARTS_IN_FLIGHT, PartSizes
from sparkonce.sinks.spark_sql import quoted

Format: TypeAlias = Literal["parquet", "json", "csv"]
Compression: TypeAlias = Literal["zstd", "snappy", "lz4", "gzip", "brotli", "none"]

BUFFER_BYTES = 160 << 20
"""Memory for the part buffers of all open files, and for the parts that are being sent."""

MIN_PART_BYTES = 5 << 20
MAX_PART_BYTES = 32 << 20
PART_BYTES: Final = 8 << 20

_EXTENSIONS: Final[Mapping[Compression, str]] = {"gzip": ".gz", "zstd": ".zst", "none": ""}
_ROWS_PER_GROUP: Final = 1 << 20
# Between row groups a writer keeps the last column's dictionary, with a hash table of up to six
# times its size: that is fine for one file, and too much for 32.
_DICTIONARY_BYTES: Final = {False: 1 << 20, True: 1 << 17}
_LINE: Final = "sparkonce_line"

# With microseconds, which Spark's defaults cut off, and with the seconds of old offsets: XXXXX
# writes them if there are any.
_JSON_TIMES: Final = {
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
# Spark reads every text that equals `nullValue` as null, quoted or not; the default is the empty
# string. With this value only an empty field without quotes becomes null.
_CSV_NULL: Final = "sparkonce null 8c1f0b7e52d94a36"
# Arrow writes years of 16 bits, and from 10000 on without the plus sign that Spark's times need.
_CSV_YEARS: Final = {"dates": (-32767, 32767), "times": (-32767, 9999)}
_UNITS_PER_DAY: Final = {unit: 86_400 * 1000**n for n, unit in enumerate(("s", "ms", "us", "ns"))}
# Spark treats a column of this name as its own; the default name is `_corrupt_record`. A line that
# cannot be parsed fails the read: it does not become a row of nulls.
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
    """The options with which Spark reads back exactly the written rows."""
    return _READ_OPTIONS[file_format]


class RowWriter(Protocol):
    """Writes rows into a file from its beginning to its end."""

    def write(self, rows: pa.Table) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class FileFormat:
    """How rows become files.

    Attributes:
        name: "parquet", "json" or "csv".
        partition_by: columns that become folders.
        compression: of Parquet's pages, or of the whole text.
        part_size: bytes of every part; otherwise parts begin with 8 MiB and grow with the file.
        max_open_files: how many folders one task may write.
        target_bytes: a file that reaches this size is followed by another file.
        parquet: settings of pyarrow's ParquetWriter, and `row_group_size`, in rows.

    Raises:
        ConfigurationError: a setting cannot work, or the format does not know it.
    """

    name: str
    partition_by: tuple[str, ...]
    compression: Compression
    part_size: int | Literal["growing"] | None
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
        self._check_files()
        if self.name == "parquet":
            self._check_parquet()
        elif self.parquet:
            raise ConfigurationError(f"S3Sink: parquet= is for Parquet, not {self.name!r}")

    def _check_files(self) -> None:
        columns = self.partition_by
        if len(set(columns)) != len(columns):
            raise ConfigurationError(
                f"S3Sink: partition_by={list(columns)!r}: give a list of columns, each once"
            )
        size = self.part_size
        if size not in {None, "growing"} and not (
            isinstance(size, int) and MIN_PART_BYTES <= size <= MAX_PART_BYTES
        ):
            raise ConfigurationError(
                f"S3Sink: part_size={size}: give {MIN_PART_BYTES} (the least that S3 accepts) to "
                f'{MAX_PART_BYTES} bytes, or "growing"'
            )
        if self.max_open_files < 1:
            raise ConfigurationError(
                f"S3Sink: max_open_files={self.max_open_files}: give 1 or more"
            )
        if self.target_bytes is not None and self.target_bytes < 1:
            raise ConfigurationError(
                f"S3Sink: target_file_size={self.target_bytes}: give 1 or more"
            )

    def _check_parquet(self) -> None:
        if self.parquet.get("flavor"):
            raise ConfigurationError(
                "S3Sink: parquet= contains a flavor, with which pyarrow renames columns: leave it "
                "out, and rename columns by select="
            )
        for name, value in self.parquet.items():
            if isinstance(value, str) and value.lower() in {"true", "false"}:
                raise ConfigurationError(
                    f"S3Sink: parquet={{{name!r}: {value!r}}}: give True or False, because pyarrow "
                    "treats any text as true"
                )
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
        """Whether Spark makes a line of text from each row."""
        return self.name == "json"

    @property
    def rows_per_group(self) -> int:
        """The number of rows that are written at a time."""
        return int(self.parquet.get("row_group_size", _ROWS_PER_GROUP))

    @property
    def part_sizes(self) -> PartSizes:
        """Sizes that let all part buffers, and the parts that are being sent, fit into memory."""
        files = self.max_open_files if self.partition_by else 1
        bound = max(MIN_PART_BYTES, BUFFER_BYTES // (files + PARTS_IN_FLIGHT))
        if isinstance(self.part_size, int):
            return PartSizes(min(self.part_size, bound), min(self.part_size, bound))
        return PartSizes(min(PART_BYTES, bound), min(MAX_PART_BYTES, bound))

    def writer(self, where: pa.NativeFile, schema: pa.Schema) -> RowWriter:
        """A writer of rows with this schema, which lacks the columns of `partition_by`."""
        if self.name == "parquet":
            return _Parquet(self, where, schema)
        if self.compression != "none":
            where = pa.CompressedOutputStream(
                where, cast("Literal['gzip', 'zstd']", self.compression)
            )
        return _Csv(where, schema) if self.name == "csv" else _Lines(where)

    def lines(self, schema: pa.Schema, row: str) -> list[str]:
        """SQL that makes one line of each row, and the columns of the folders."""
        data = ", ".join(
            f"{_checked(f'{row}.{quoted(field.name)}', field.type)} AS {quoted(field.name)}"
            for field in schema
            if field.name not in self.partition_by
        )
        options = ", ".join(f"'{k}', {_literal(v)}" for k, v in _JSON_TIMES.items())
        folders = (f"{row}.{quoted(name)} AS {quoted(name)}" for name in self.partition_by)
        return [f"to_json(struct({data}), map({options})) AS {_LINE}", *folders]


def _checked(column: str, kind: pa.DataType) -> str:
    """The column; its text fails the batch where it is not UTF-8, which `to_json` would change."""
    is_text = pat.is_string(kind) or pat.is_large_string(kind)
    return f"validate_utf8({column})" if is_text else column


def _literal(pattern: str) -> str:
    """The pattern as a constant of Spark's SQL, in a session with any quotes and escapes."""
    return "concat('" + pattern.replace("'", "', char(39), '") + "')"


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
        # Strings are quoted and nulls are not, which distinguishes an empty string from a null.
        self._writer = pa_csv.CSVWriter(where, in_zone(schema, "UTC"))  # type: ignore[arg-type]  # takes it

    def write(self, rows: pa.Table) -> None:
        for name, column in zip(rows.column_names, rows.columns, strict=True):
            _check_years(name, column)
        # Arrow writes only hours and minutes of another zone's offset.
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
            "hold: use another format, or change the column (select=)"
        )
