"""Can the table's current schema read files that were written in another one?

Readers find a file's columns by their ids. `CREATE OR REPLACE TABLE` gives a column of another type
the id of the old column of that name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyiceberg.types import (
    DecimalType,
    DoubleType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StructType,
)

if TYPE_CHECKING:
    from pyiceberg.schema import Schema


def unreadable(then: Schema, now: Schema) -> str | None:
    """The first column that keeps readers of a schema from files of another; None if none does."""
    return _unreadable_field(then.fields, now.fields, "")


def _unreadable_field(
    then: Sequence[NestedField], now: Sequence[NestedField], parent: str
) -> str | None:
    written = {field.field_id: field for field in then}
    for field in now:
        name, was = f"{parent}{field.name}", written.get(field.field_id)
        if field.required and not (was is not None and was.required):
            return f"{name} is required now"
        if was is not None and (why := _unreadable_type(was.field_type, field.field_type, name)):
            return why
    return None


def _unreadable_type(then: IcebergType, now: IcebergType, name: str) -> str | None:
    if then == now or _is_wider(then, now):
        return None
    if type(then) is not type(now) or not (fields := _fields(now)):
        return f"{name} was {then}, and is {now}"
    return _unreadable_field(_fields(then), fields, f"{name}.")


def _fields(kind: IcebergType) -> Sequence[NestedField]:
    match kind:
        case StructType():
            return kind.fields
        case ListType():
            return [kind.element_field]
        case MapType():
            return [kind.key_field, kind.value_field]
    return []


def _is_wider(then: IcebergType, now: IcebergType) -> bool:
    """The changes of a type that Iceberg allows."""
    match then, now:
        case (IntegerType(), LongType()) | (FloatType(), DoubleType()):
            return True
        case DecimalType(), DecimalType():
            return then.scale == now.scale and then.precision <= now.precision
    return False
