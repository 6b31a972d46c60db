"""What Delta's log says of the values in a file, so that readers can skip it.

Minimum and maximum may be too low or too high, never the other way round. Spark answers `min()` and
`max()` of numbers and dates from them, so those are exact.

A file has bounds of every column that the table describes, or the number of its rows only: if some
columns have bounds, deltalake 1.6 takes a column without them for a column of nulls, and skips the
file. So truth values have bounds too, which Spark leaves out. A struct has empty bounds.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import partial
from typing import Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

_DESCRIBED_COLUMNS: Final = 32  # Delta's own default
_LONGEST_TEXT: Final = 32
_LAST_CHARACTER: Final = "\U0010ffff"
_MILLISECOND: Final = dt.timedelta(milliseconds=1)

_Bound: TypeAlias = Callable[[Any], str]
_Values: TypeAlias = "pa.ChunkedArray[Any]"

_json: Final = partial(json.dumps, separators=(",", ":"), ensure_ascii=False)


def described(settings: Mapping[str, Any], columns: Sequence[str]) -> Sequence[str]:
    """The columns, of those in a file, that the table wants described."""
    if named := settings.get("delta.dataSkippingStatsColumns"):
        names = [name.strip(" `") for name in named.split(",")]
        return [name for name in columns if name in names]
    count = int(settings.get("delta.dataSkippingNumIndexedCols", _DESCRIBED_COLUMNS))
    return columns[: count if count >= 0 else None]


def statistics_of(
    footer: pq.FileMetaData, schema: pa.Schema, columns: Collection[str], *, has_bounds: bool = True
) -> str:
    """The statistics of a file, as JSON.

    Args:
        footer: of the file.
        schema: of the file.
        columns: the ones to describe.
        has_bounds: False if a value of these columns `is_beyond_bounds`.
    """
    found = {"numRecords": str(footer.num_rows)}
    if has_bounds:
        # No bounds for a value that Python cannot hold: text that is not UTF-8, or a time (or its
        # bound) after the year 9999.
        with contextlib.suppress(OverflowError, ValueError):
            found |= _bounds_and_nulls(footer, schema, columns)
    return _object(found)


def is_beyond_bounds(values: _Values) -> bool:
    """Whether a column has NaN, or a text that no short text is sure to be greater than.

    Spark takes NaN for the greatest number, and Parquet leaves it out.
    """
    if pa.types.is_floating(values.type):
        return bool(pc.any(pc.is_nan(values)).as_py())
    if pa.types.is_string(values.type):
        return bool(pc.any(pc.starts_with(values, _LAST_CHARACTER)).as_py())
    return False


def _bounds_and_nulls(
    footer: pq.FileMetaData, schema: pa.Schema, columns: Collection[str]
) -> dict[str, str]:
    """Bounds and counts of nulls, each as JSON.

    Raises:
        OverflowError, ValueError: a column has no bounds.
    """
    nulls: dict[str, str] = {}
    least: dict[str, str] = {}
    most: dict[str, str] = {}
    for field, n in _first_leaves(schema):
        if pa.types.is_struct(field.type):
            least[field.name] = most[field.name] = "{}"
        if pa.types.is_nested(field.type) or field.name not in columns:
            continue
        groups = [footer.row_group(each).column(n) for each in range(footer.num_row_groups)]
        known: list[Any] = [each.statistics for each in groups]
        if not all(each is not None and each.has_null_count for each in known):
            raise ValueError("Parquet has not counted the nulls")
        nulls[field.name] = str(sum(each.null_count for each in known))
        filled = [each for each in known if each.num_values]
        if filled and (written := _written(field.type)):
            low, high = _bounds(filled, is_text=pa.types.is_string(field.type))
            least[field.name], most[field.name] = written[0](low), written[1](high)
    return {
        "minValues": _object(least),
        "maxValues": _object(most),
        "nullCount": _object(nulls),
    }


def _first_leaves(schema: pa.Schema) -> Iterator[tuple[pa.Field[pa.DataType], int]]:
    """Each field, and the number of its first column in Parquet."""
    n = 0
    for field in schema:
        yield field, n
        n += _leaves(field.type)


def _leaves(kind: pa.DataType) -> int:
    return sum(_leaves(kind.field(n).type) for n in range(kind.num_fields)) or 1


def _object(members: dict[str, str]) -> str:
    return "{" + ",".join(f"{_json(name)}:{value}" for name, value in members.items()) + "}"


def _bounds(groups: list[Any], *, is_text: bool) -> tuple[Any, Any]:
    if all(each.has_min_max for each in groups):
        return min(each.min for each in groups), max(each.max for each in groups)
    if is_text:  # longer than Parquet wants to describe
        return "", _LAST_CHARACTER
    raise ValueError("Parquet has no bounds")


def _written(kind: pa.DataType) -> tuple[_Bound, _Bound] | None:
    """How the least and the greatest value of a type are written; None if Delta has no bounds."""
    return next(((low, high) for is_kind, low, high in _KINDS if is_kind(kind)), None)


def _finite(number: float) -> str:
    if not math.isfinite(number):
        raise ValueError("JSON has no infinity")
    return repr(number)


def _digits(number: Decimal) -> str:
    """All of them: deltalake reads no exponent, and a float would be another number."""
    return format(number, "f")


def _text_above(text: str) -> str:
    if len(text) <= _LONGEST_TEXT:
        return _json(text)
    if text[_LONGEST_TEXT] == _LAST_CHARACTER:
        raise ValueError("nothing short is greater")
    return _json(text[:_LONGEST_TEXT] + _LAST_CHARACTER)


def _day(day: dt.date) -> str:
    return _json(day.isoformat())


def _instant(at: dt.datetime) -> str:
    """Delta keeps milliseconds."""
    text = at.replace(tzinfo=None).isoformat(timespec="milliseconds")
    return _json(f"{text}Z" if at.tzinfo else text)


def _instant_above(at: dt.datetime) -> str:
    return _instant(at + _MILLISECOND if at.microsecond % 1000 else at)


_KINDS: Final[Sequence[tuple[Callable[[pa.DataType], bool], _Bound, _Bound]]] = (
    (pa.types.is_integer, _json, _json),
    (pa.types.is_boolean, _json, _json),
    (pa.types.is_floating, _finite, _finite),
    (pa.types.is_decimal, _digits, _digits),
    (pa.types.is_string, lambda text: _json(text[:_LONGEST_TEXT]), _text_above),
    (pa.types.is_date, _day, _day),
    (pa.types.is_timestamp, _instant, _instant_above),
)
