"""Changes Arrow types, at any depth, so that equal rows have equal types.

in_zone      an instant is the same in any time zone, but schemas of two zones are not equal
for_python   Spark knows zones that Python does not (`GMT+8`, `Z`, `PST`)
plain        with `spark.sql.execution.arrow.useLargeVarTypes` the executors get other string types
             than the driver, and each sink would have to handle both
loosened     a null struct has null fields, even those that Spark declares NOT NULL; Parquet, JSON
             and Arrow's own cast would rely on that declaration
required     no field is nullable, to compare nothing but types
optional     every field is nullable: the checks that a cast makes are made elsewhere
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, tzinfo
from zoneinfo import ZoneInfo

import pyarrow as pa


def in_zone(schema: pa.Schema, zone: str | None) -> pa.Schema:
    """Return the schema with its instants in this time zone."""

    def change(kind: pa.DataType) -> pa.DataType:
        return pa.timestamp(kind.unit, zone) if pa.types.is_timestamp(kind) and kind.tz else kind

    return _changed(schema, change)


def zone_of(name: str) -> tzinfo:
    """Return the zone of a timestamp type.

    Some versions of Arrow lack daylight saving time after 2037 in their own zones.

    Raises:
        LookupError, ValueError, OSError: Python does not know the name.
    """
    if name.startswith(("+", "-")):
        return datetime.strptime(name, "%z").tzinfo or UTC
    return ZoneInfo(name)


def for_python(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows that `to_pylist` accepts: instants in UTC if Python does not know their zone.

    Raises:
        pa.ArrowInvalid: a time of day has nanoseconds, which `datetime.time` would drop.
    """

    def change(kind: pa.DataType) -> pa.DataType:
        if pa.types.is_time64(kind):
            return pa.time64("us")
        if not pa.types.is_timestamp(kind) or kind.tz is None:
            return kind
        try:
            zone_of(kind.tz)
        except (LookupError, ValueError, OSError):
            return pa.timestamp(kind.unit, "UTC")
        return kind

    wanted = _changed(batch.schema, change)
    return batch if wanted == batch.schema else batch.cast(wanted)


def plain(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Turn large strings and binaries into plain ones, and loosen the schema of each batch.

    Raises:
        pa.ArrowInvalid: a column of one batch is larger than 2 GiB.
    """
    sent = wanted = pa.schema([])
    for batch in batches:
        if batch.schema != sent:
            sent, wanted = batch.schema, loosened(_changed(batch.schema, _plain))
        yield batch if sent == wanted else batch.cast(wanted)


def loosened(schema: pa.Schema) -> pa.Schema:
    """Return the schema in which every field of a nullable struct is nullable too."""
    return pa.schema(map(_loosened, schema)).with_metadata(schema.metadata)


def required(schema: pa.Schema) -> pa.Schema:
    """Return the schema in which no field is nullable."""
    return pa.schema(map(_required, schema))


def optional(kind: pa.DataType) -> pa.DataType:
    """Return the type in which every field is nullable, except the keys of maps."""
    return _rebuilt(kind, _optional)


def _optional(field: pa.Field[pa.DataType]) -> pa.Field[pa.DataType]:
    return field.with_nullable(True).with_type(optional(field.type))


def _required(field: pa.Field[pa.DataType]) -> pa.Field[pa.DataType]:
    return field.with_nullable(False).with_type(_rebuilt(field.type, _required))


def _loosened(field: pa.Field[pa.DataType], *, within_null: bool = False) -> pa.Field[pa.DataType]:
    nullable = field.nullable or within_null
    hides = nullable and pa.types.is_struct(field.type)  # a null list has no elements
    kind = _rebuilt(field.type, lambda each: _loosened(each, within_null=hides))
    return field.with_nullable(nullable).with_type(kind)


def _plain(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_large_string(kind):
        return pa.string()
    return pa.binary() if pa.types.is_large_binary(kind) else kind


def _changed(schema: pa.Schema, change: Callable[[pa.DataType], pa.DataType]) -> pa.Schema:
    return pa.schema([_field(field, change) for field in schema]).with_metadata(schema.metadata)


def _field(
    field: pa.Field[pa.DataType], change: Callable[[pa.DataType], pa.DataType]
) -> pa.Field[pa.DataType]:
    return field.with_type(change(_rebuilt(field.type, lambda each: _field(each, change))))


def _rebuilt(
    kind: pa.DataType, change: Callable[[pa.Field[pa.DataType]], pa.Field[pa.DataType]]
) -> pa.DataType:
    """Return the type with each of its direct fields changed."""
    if isinstance(kind, pa.StructType):
        return pa.struct([change(kind.field(n)) for n in range(kind.num_fields)])
    if isinstance(kind, pa.ListType):
        return pa.list_(change(kind.value_field))
    if isinstance(kind, pa.LargeListType):
        return pa.large_list(change(kind.value_field))
    if isinstance(kind, pa.MapType):
        key, item = change(kind.key_field).with_nullable(False), change(kind.item_field)
        return pa.map_(key, item)  # type: ignore[call-overload, no-any-return] # fields are taken
    return kind
