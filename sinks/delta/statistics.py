"""What Delta's log says of the values in a file, so that readers can skip it.

Minimum and maximum may be too low or too high, never the other way round. Columns of numbers with
NaN, of decimals, bytes and nested types have counts of nulls only, or nothing.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
from collections.abc import Callable, Collection
from typing import Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

_LONGEST_TEXT: Final = 32
_LAST_CHARACTER: Final = "\U0010ffff"
_MILLISECOND: Final = dt.timedelta(milliseconds=1)

_Bound: TypeAlias = Callable[[Any], Any]


def statistics_of(footer: pq.FileMetaData, schema: pa.Schema, columns: Collection[str]) -> str:
    """The statistics of a file, as JSON.

    Args:
        footer: of the file.
        schema: of the file.
        columns: the ones to describe.
    """
    nulls: dict[str, int] = {}
    least: dict[str, Any] = {}
    most: dict[str, Any] = {}
    paths = [footer.schema.column(n).path for n in range(footer.num_columns)]
    for field in schema:
        if field.name not in columns or paths.count(field.name) != 1:
            continue  # nested types have other paths
        n = paths.index(field.name)
        groups = [footer.row_group(each).column(n) for each in range(footer.num_row_groups)]
        known: list[Any] = [each.statistics for each in groups]
        if not all(each is not None and each.has_null_count for each in known):
            continue
        nulls[field.name] = sum(each.null_count for each in known)
        bounds = _bounds(field.type)
        filled = [each for each in known if each.num_values]
        # No bounds for a value that Python cannot hold: text that is not UTF-8, or a time (or its
        # bound) after the year 9999.
        with contextlib.suppress(OverflowError, ValueError):
            if bounds is not None and filled and all(each.has_min_max for each in filled):
                low = bounds[0](min(each.min for each in filled))
                most[field.name] = bounds[1](max(each.max for each in filled))
                least[field.name] = low
    found = {
        "numRecords": footer.num_rows,
        "minValues": least,
        "maxValues": most,
        "nullCount": nulls,
    }
    return json.dumps(found, separators=(",", ":"), ensure_ascii=False)


def _bounds(kind: pa.DataType) -> tuple[_Bound, _Bound] | None:
    """How the least and the greatest value of a type are written."""
    if pa.types.is_integer(kind):
        return int, int
    if pa.types.is_string(kind):
        return lambda text: text[:_LONGEST_TEXT], _text_above
    if pa.types.is_date(kind):
        return dt.date.isoformat, dt.date.isoformat
    if pa.types.is_timestamp(kind):
        return _instant, _instant_above
    return None


def _text_above(text: str) -> str:
    if len(text) <= _LONGEST_TEXT:
        return text
    if text[_LONGEST_TEXT] == _LAST_CHARACTER:
        raise ValueError("nothing short is greater")
    return text[:_LONGEST_TEXT] + _LAST_CHARACTER


def _instant(at: dt.datetime) -> str:
    """Delta keeps milliseconds."""
    return at.replace(tzinfo=None).isoformat(timespec="milliseconds") + ("Z" if at.tzinfo else "")


def _instant_above(at: dt.datetime) -> str:
    return _instant(at + _MILLISECOND if at.microsecond % 1000 else at)
