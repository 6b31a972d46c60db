"""Arrow arrays as the bytes or values that COPY takes.

    Arrow array ──► lossless cast ──► pgpq, COPY BINARY     (every column of the batch can)
                                 └──► psycopg, COPY TEXT    (at least one column cannot)

pgpq itself checks nothing: an int64 that is sent to a numeric arrives as 0. So every array is cast
to the exact type of its column's plan before it is encoded.
"""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
from pgpq import ArrowToPostgresBinaryEncoder, encoders
from pgpq import schema as pgpq_types

from sparkonce.sinks.postgres.target.types import (
    DECIMAL_DIGITS,
    MICROSECOND_DIGITS,
    UUID_BYTES,
    ColumnPlan,
    is_binary,
    value_type,
)

_FIRST_DAY = -2_440_588  # the first date of Postgres, counted from 1970
_DAY_US = 86_400 * 10**MICROSECOND_DIGITS

_UUID_DIGITS = re.compile(r"[0-9a-fA-F]{32}")
_CANONICAL_UUID = r"^[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}$"

# The stubs have a type for each kind of array and none for "an array of the plan's type".
_pa: Any = pa
_pc: Any = pyarrow.compute


class ValueDoesNotFitError(ValueError):
    """A value does not fit into its column's type. The text does not show the value."""


def convert(array: Any, column: ColumnPlan) -> Any:
    """Cast the array to the type of its column plan.

    Raises:
        ValueDoesNotFitError: a value cannot be stored unchanged.
    """
    try:
        if not column.type.is_array:
            return _convert(array, column)
        lists = array.cast(pa.list_(value_type(array.type)))
        values = _convert(lists.flatten(), column)
        lengths = _pc.fill_null(_pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        return _pa.ListArray.from_arrays(
            pa.array(offsets), values, type=column.field.type, mask=_pc.is_null(lists)
        )
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        raise _does_not_fit(array, column, error) from None


def _does_not_fit(array: Any, column: ColumnPlan, error: ValueError) -> ValueDoesNotFitError:
    """Without the error's own text, which shows the value: it may be confidential."""
    if isinstance(error, UnicodeDecodeError):
        return ValueDoesNotFitError(f"column {column.name!r}: a text is not UTF-8")
    return ValueDoesNotFitError(
        f"column {column.name!r}: a value of Arrow type {array.type} does not fit into "
        f"Postgres type {column.type.ddl} unchanged"
    )


def _convert(array: Any, column: ColumnPlan) -> Any:
    if pa.types.is_null(array.type):
        return _pa.nulls(len(array), column.arrow)
    if column.kind == "decimal":
        return _to_decimal(array, column)
    if column.kind == "uuid":
        return _to_uuid(array)
    array = array.cast(column.arrow)
    check = _CHECKS.get(column.kind)
    if check is not None:
        check(array, column)
    return array


def _to_decimal(array: Any, column: ColumnPlan) -> Any:
    kept, scale = array.cast(column.arrow), column.type.scale
    if scale is not None and scale < 0:
        # A whole number with fewer digits than the scale would silently become 0 in Arrow's cast.
        kept.cast(pa.decimal128(DECIMAL_DIGITS, scale))  # checks only
    return kept


def _check_string(array: Any, column: ColumnPlan) -> None:
    """Check the length: the server silently cuts blanks at the end of a value that is too long."""
    most = column.type.characters
    if most is None:
        return
    too_long = array.filter(_pc.greater(_pc.utf8_length(array), most))
    if column.type.is_staged_longer:  # the server refuses what is too long without its blanks
        trimmed = _pc.utf8_length(_pc.utf8_rtrim(too_long, " "))
        too_long = too_long.filter(_pc.less_equal(trimmed, most))
    if len(too_long):
        raise pa.ArrowInvalid("too long")


def _check_date(array: Any, _column: ColumnPlan) -> None:
    if (_pc.min(array.cast(pa.int32())).as_py() or 0) < _FIRST_DAY:
        raise pa.ArrowInvalid("before all dates of Postgres")


def _check_time(array: Any, column: ColumnPlan) -> None:
    microseconds = array.cast(pa.int64())
    if pa.types.is_timestamp(array.type):
        # Postgres counts from 2000, and reads one such value as -infinity.
        first = _pc.min(microseconds).as_py()
        if first is not None and first < _FIRST_DAY * _DAY_US:
            raise pa.ArrowInvalid("before all times of Postgres")
    step = 10 ** (MICROSECOND_DIGITS - column.type.second_digits)
    if step > 1:
        values = _pc.fill_null(microseconds, 0).to_numpy(zero_copy_only=False)
        if (values % step).any():
            raise pa.ArrowInvalid("more digits than the column keeps")


def _check_text(array: Any, column: ColumnPlan) -> None:
    """Refuse text that Postgres would round or read in part."""
    name = column.type.name
    if name in _EXACT_TEXT:
        exact = _pc.match_substring_regex(array, _EXACT_TEXT[name])
        if not _pc.all(exact, min_count=0).as_py():
            raise pa.ArrowInvalid("not a time of day as ISO 8601 writes it, to the microsecond")
    if name == "interval":
        rounded = _pc.match_substring_regex(array, _ROUNDED_INTERVAL, ignore_case=True)
        if _pc.any(rounded, min_count=0).as_py():
            raise pa.ArrowInvalid("finer than a microsecond, or a part of a year")


_TIME = r"^([01]\d|2[0-4]):[0-5]\d(:[0-5]\d(\.\d{1,6}0*)?)?"
_EXACT_TEXT: Mapping[str, str] = {
    "time": f"{_TIME}$",
    "timetz": rf"{_TIME}(Z|[+-]\d\d(:[0-5]\d(:[0-5]\d)?)?)$",
}
"""`time` silently drops a date or a zone; `timetz` silently adds the session's zone."""

# More than six digits, fractions of a year or longer (only whole months are kept), fractions of
# milliseconds or shorter, and exponents.
_ROUNDED_INTERVAL = r"\.\d{6}\d*[1-9]|\.\d*[1-9]\d*[^0-9a-z]*(y|dec|c|mil|ms|mic|us)|\de[+-]?\d"

_CHECKS: Mapping[str, Callable[[Any, ColumnPlan], None]] = {
    "text": _check_text,
    "string": _check_string,
    "date": _check_date,
    "time": _check_time,
}


def _to_uuid(array: Any) -> Any:
    if is_binary(array.type):
        return array.cast(pa.binary()).cast(pa.binary(UUID_BYTES))
    strings = _pc.fill_null(array, str(uuid.UUID(int=0)))
    if not _pc.all(_pc.match_substring_regex(strings, _CANONICAL_UUID), min_count=0).as_py():
        return pa.array(map(_read_uuid, array.to_pylist()), pa.binary(UUID_BYTES))
    digits = "".join(_pc.replace_substring(strings, "-", "").to_pylist())
    known = _pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(UUID_BYTES), len(array), [None, pa.py_buffer(bytes.fromhex(digits))]
    )
    return _pc.if_else(_pc.is_valid(array), known, pa.scalar(None, pa.binary(UUID_BYTES)))


def _read_uuid(text: str | None) -> bytes | None:
    if text is None:
        return None
    # Like `uuid.UUID`, but it refuses other numbers that `int` accepts: "0x1…", "1_1…", " 1…".
    digits = text.replace("urn:", "").replace("uuid:", "").strip("{}").replace("-", "")
    if _UUID_DIGITS.fullmatch(digits) is None:
        raise pa.ArrowInvalid("not a UUID")
    return bytes.fromhex(digits)


def python_values(array: Any, column: ColumnPlan) -> list[Any]:
    """The converted array as values that psycopg writes in Postgres' text form.

    Raises:
        ValueDoesNotFitError: a text is not UTF-8.
    """
    try:
        if not column.type.is_array:
            return _python_values(array, column)
        parts = iter(_python_values(array.flatten(), column))
    except UnicodeDecodeError as error:
        raise _does_not_fit(array, column, error) from None
    lengths = _pc.list_value_length(array).to_pylist()
    return [None if n is None else list(itertools.islice(parts, n)) for n in lengths]


def _python_values(array: Any, column: ColumnPlan) -> list[Any]:
    types = pa.types
    if types.is_date(column.arrow) or types.is_timestamp(column.arrow):
        return _shown_times(array)
    show: Callable[[Any], object] | None = None
    if types.is_duration(column.arrow):
        array, show = array.cast(pa.int64()), _shown_duration
    elif column.kind == "uuid":
        show = _shown_uuid
    elif types.is_binary(column.arrow):
        show = _shown_bytes
    values: list[Any] = array.to_pylist()
    return values if show is None else [None if v is None else show(v) for v in values]


def _shown_uuid(value: bytes) -> uuid.UUID:
    return uuid.UUID(bytes=value)


def _shown_bytes(value: bytes) -> str:
    """In hex; psycopg's own text form depends on `standard_conforming_strings`."""
    return f"\\x{value.hex()}"


def _shown_duration(microseconds: int) -> str:
    """In hours, without days: once a year '1 day' is 23 hours long."""
    seconds, fraction = divmod(abs(microseconds), 10**MICROSECOND_DIGITS)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    sign = "-" if microseconds < 0 else ""
    return f"{sign}{hours}:{minutes:02}:{seconds:02}.{fraction:06}"


def _shown_times(array: Any) -> list[str | None]:
    """Dates and timestamps as text; Python's own types end at the years 1 and 9999."""
    is_date = pa.types.is_date(array.type)
    numbers = array.cast(pa.int32() if is_date else pa.int64())
    days = numbers.fill_null(0).to_numpy().astype("datetime64[D]" if is_date else "datetime64[us]")
    zone = "+00" if not is_date and array.type.tz else ""
    return [
        text if is_valid else None
        for text, is_valid in zip(
            (_with_era(text, zone) for text in np.datetime_as_string(days).tolist()),
            array.is_valid().to_pylist(),
            strict=True,
        )
    ]


def _with_era(text: str, zone: str) -> str:
    """Years before 1: ISO 8601 counts 0, -1, …; Postgres writes BC."""
    year = text[: text.index("-", 1)]
    if int(year) > 0:
        return text + zone
    return f"{1 - int(year):04}-{text[len(year) + 1 :]}{zone} BC"


def binary_encoder(columns: Sequence[ColumnPlan]) -> ArrowToPostgresBinaryEncoder:
    """An encoder for record batches with these columns, in this order."""
    schema = pa.schema([column.field for column in columns])
    builders = {column.name: _builder(column) for column in columns}
    return ArrowToPostgresBinaryEncoder.new_with_encoders(schema, builders)


def _builder(column: ColumnPlan) -> Any:
    if column.type.name == "jsonb":
        builder = (
            encoders.LargeStringEncoderBuilder
            if pa.types.is_large_string(column.arrow)
            else encoders.StringEncoderBuilder
        )
        return builder.new_with_output(column.field, pgpq_types.Jsonb())
    return ArrowToPostgresBinaryEncoder.infer_encoder(column.field)
