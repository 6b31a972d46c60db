"""Refuses, before any data moves, columns that the folders or the file format cannot hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import pyarrow as pa
import pyarrow.types as pat

from sparkonce.errors import ConfigurationError
from sparkonce.sinks.arrow_types import zone_of
from sparkonce.sinks.file_columns import NESTED, VOID, Refusal, check_kinds, check_names
from sparkonce.sinks.s3.writing.formats import FileFormat

_FOLDER_TYPES: Final[tuple[Callable[[pa.DataType], bool], ...]] = (
    pat.is_string,
    pat.is_large_string,
    pat.is_boolean,
    pat.is_integer,
    pat.is_decimal,
    pat.is_date,
    pat.is_timestamp,
)


def check_schema(schema: pa.Schema, file_format: FileFormat) -> None:
    """Refuse columns that cannot become folders, or that the files cannot hold.

    Raises:
        ConfigurationError: naming the column.
    """
    partition_by = file_format.partition_by
    check_names("S3Sink", schema)
    missing = [name for name in partition_by if name not in schema.names]
    if missing:
        raise ConfigurationError(
            f"S3Sink: partition_by names {missing}, but the rows have {schema.names}: "
            "name columns of the rows, or add these (transform=)"
        )
    for name in partition_by:
        _check_folder(schema.field(name))
    rest = [field for field in schema if field.name not in partition_by]
    if not rest:
        raise ConfigurationError(
            f"S3Sink: partition_by={list(partition_by)} names every column, so none is left for "
            "the files"
        )
    _check_files(pa.schema(rest), file_format)


def _check_folder(column: pa.Field[pa.DataType]) -> None:
    name, kind = column.name, column.type
    if name.startswith(("_", ".")):
        raise ConfigurationError(
            f"S3Sink: partition_by column {name!r} makes folders that most readers hide because of "
            "their first character (pyarrow, Hive, Trino): rename it in select="
        )
    if not any(fits(kind) for fits in _FOLDER_TYPES):
        raise ConfigurationError(
            f"S3Sink: partition_by column {name!r} is {kind}, which cannot name folders: "
            "use a string, integer, decimal, boolean, date or timestamp column"
        )
    if isinstance(kind, pa.TimestampType) and kind.tz is not None:
        try:
            zone_of(kind.tz)
        except (LookupError, ValueError, OSError) as error:
            raise ConfigurationError(
                f"S3Sink: partition_by column {name!r} has times of the zone {kind.tz!r}, "
                "which cannot name folders: Spark knows it, but Python and Arrow do not. Set "
                "spark.sql.session.timeZone to a region such as Europe/Berlin, or to an "
                "offset such as +08:00"
            ) from error


def _check_files(schema: pa.Schema, file_format: FileFormat) -> None:
    """Refuse columns that the files cannot hold, or cannot return unchanged."""
    advice = "use another format, or change the column (select=)"
    check_kinds("S3Sink", schema, _UNFIT.get(file_format.name, ()), advice)
    if file_format.name == "csv" and len(schema) == 1 and schema.field(0).nullable:
        raise ConfigurationError(
            f"S3Sink: CSV of the one column {schema.field(0).name!r} cannot hold nulls, because "
            "readers skip empty lines: add a column, use another format, or fill the nulls "
            "(select=)"
        )
    try:
        if not file_format.is_lines:
            writer = file_format.writer(pa.BufferOutputStream(), schema)
            writer.write(schema.empty_table())
            writer.close()
    except (ValueError, pa.ArrowException) as error:
        kind = "Parquet" if file_format.name == "parquet" else file_format.name.upper()
        raise ConfigurationError(
            f"S3Sink: {kind} cannot hold these columns ({error}): change them (select=)"
        ) from error


def _has_other_keys(kind: pa.DataType) -> bool:
    return pat.is_map(kind) and not pat.is_string(kind.key_type)


_UNFIT: Final[Mapping[str, Sequence[Refusal]]] = {
    "parquet": (VOID, *NESTED),
    "json": (
        *NESTED,
        (_has_other_keys, "the keys of JSON's objects are strings"),
        (pat.is_duration, "JSON has no intervals"),
    ),
    "csv": (
        VOID,
        (pat.is_nested, "CSV holds no nested columns"),
        (pat.is_binary, "CSV holds no bytes"),
        (pat.is_large_binary, "CSV holds no bytes"),
        (pat.is_duration, "CSV has no intervals"),
    ),
}
