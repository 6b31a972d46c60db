"""Rows in the table's columns and types, with a value wherever the table requires one.

A field that is required has no value where the struct around it is null, and Spark leaves a null
there. Arrow's cast and Parquet's writer refuse that null; below a list or a map, the writer takes a
null that the table does not allow for a value. So the cast is to a type without requirements, and
they are checked here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from sparkonce.sinks.arrow_types import optional

_Values: TypeAlias = "pa.Array[Any]"


def check_known(given: pa.Schema, wanted: pa.Schema) -> None:
    """Check that the table has every column of the rows, and every field within.

    Raises:
        pa.ArrowInvalid: it lacks one, and Arrow's cast would drop its values.
    """
    if unknown := list(_unknown(pa.struct(list(given)), pa.struct(list(wanted)))):
        raise pa.ArrowInvalid(f"the table no longer has the column {', '.join(unknown)}")


def _unknown(given: pa.DataType, wanted: pa.DataType, path: str = "") -> Iterator[str]:
    """The fields that a cast would leave out, at any depth."""
    names = [wanted.field(n).name for n in range(wanted.num_fields)]
    for n in range(given.num_fields):
        field = given.field(n)
        where = f"{path}.{field.name}".lstrip(".")
        if not pa.types.is_struct(given):  # lists and maps call their fields as they like
            yield from _unknown(field.type, wanted.field(n).type, where)
        elif field.name not in names:
            yield where
        else:
            yield from _unknown(field.type, wanted.field(names.index(field.name)).type, where)


def fitted(batch: pa.RecordBatch, wanted: pa.Schema) -> pa.Table:
    """Rows with the table's columns and types; columns that the rows lack are null.

    Raises:
        pa.ArrowException: a value does not fit, or is null where the table requires one.
    """
    given = batch.schema.names
    columns = []
    for each in wanted:
        column = batch.column(each.name) if each.name in given else pa.nulls(batch.num_rows)
        columns.append(_checked(column.cast(optional(each.type)), each, each.name))
    return pa.Table.from_arrays(columns, schema=wanted)


def _checked(values: _Values, field: pa.Field[pa.DataType], path: str) -> _Values:
    """Values of the `optional` type, in the field's own."""
    if values.null_count and not field.nullable:
        raise pa.ArrowInvalid(
            f"column {path} is required, and a row has none: leave such rows out of the query, "
            "give it a value with coalesce, or make it optional in the table"
        )
    if optional(field.type) == field.type:
        return values
    has_value = values.is_valid()
    filled = _within(values.take(pc.indices_nonzero(has_value)), field.type, path)
    if not values.null_count:
        return filled
    # Below a null that Arrow itself makes, a field that is required is not null.
    numbers = pc.subtract(pc.cumulative_sum(has_value.cast(pa.int64())), 1)
    places = pc.if_else(has_value, numbers, len(filled))
    return pa.concat_arrays([filled, pa.array([None], field.type)]).take(places)


def _within(values: Any, kind: Any, path: str) -> _Values:
    """Values that are not null and no slice, with all that is within them checked."""
    if pa.types.is_struct(kind):
        fields = [kind.field(n) for n in range(kind.num_fields)]
        columns = [
            _checked(values.field(n), each, f"{path}.{each.name}") for n, each in enumerate(fields)
        ]
        return pa.StructArray.from_arrays(columns, fields=fields)
    if pa.types.is_map(kind):
        within = [
            _checked(values.keys, kind.key_field, f"{path}.key"),
            _checked(values.items, kind.item_field, f"{path}.value"),
        ]
    else:
        within = [_checked(values.values, kind.value_field, f"{path}.element")]
    made: _Values = type(values).from_arrays(values.offsets, *within, type=kind)
    return made
