"""A fingerprint of a sink's rows that neither their order nor their partitions change.

    every row ─► xxhash64 in the JVM ─► one column beside the rows ─► summed modulo 2^64 in the task

A replay must bring back the rows that a lost branch held: the sums of both tell. Spark's function
`xxhash64` alone would not: it passes over nulls, so that ``(null, 'a')`` equals ``('a', null)``,
it runs the elements of neighbouring arrays together, it refuses maps and variants, and it may see
equal strings through a collation. So nulls and sizes are hashed too, and each type in a form that
tells its values apart. Only what SQL itself calls equal stays equal: 0.0 and -0.0, and two maps
whose entries stand in another order.

Neither what the schema says of nulls counts nor a setting of the session: a replay may run after
both have changed, as with a `coalesce` more in the query, or Spark's ANSI mode.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
    DataType,
    MapType,
    NullType,
    StringType,
    StructType,
    UserDefinedType,
)

from sparkonce.sinks.spark_sql import quoted
from sparkonce.txn_log.record import Fingerprint

if TYPE_CHECKING:
    import pyarrow as pa

ALGORITHM: Final = "spark-xxhash64-sum/5"
"""Changes with anything that changes the hash of any row."""

_BINARY: Final = "UTF8_BINARY"
_PLAIN_NAME = re.compile(r"\w+", re.ASCII)


def fingerprint(hashes: pa.Array[pa.Int64Scalar]) -> Fingerprint:
    """Of the rows whose hashes these are."""
    total = pc.sum(hashes, min_count=0).as_py()  # wraps around, as it must
    return Fingerprint(ALGORITHM, len(hashes), total % 2**64)


def row_hash(schema: StructType, parent: str | None = None) -> str:
    """SQL that hashes a row: of the columns themselves, or of those in the struct `parent`."""
    if parent is not None and not has_names(schema):
        return _hash(_of_value(quoted(parent), schema, 0))
    return _hash(_of_fields(schema, "" if parent is None else f"{quoted(parent)}.", 0))


def is_plain(schema: StructType) -> bool:
    """Whether each name finds its column in any of Spark's settings, without quotes."""
    return has_names(schema) and all(_PLAIN_NAME.fullmatch(name) for name in schema.names)


def has_names(schema: StructType) -> bool:
    """Whether SQL can name each field, also where upper and lower case are one."""
    return len({_folded(name) for name in schema.names}) == len(schema.names)


def _folded(name: str) -> str:
    """As Java compares names without regard to case: letter by letter, in both cases."""
    upper = (u if len(u := letter.upper()) == 1 else letter for letter in name)
    return "".join(letter.lower()[0] for letter in upper)  # \u0130 is i, and its dot is lost


def free_name(names: Sequence[str]) -> str:
    """A column name that is not among `names`."""
    taken, name = {_folded(known) for known in names}, "sparkonce_hash"
    while name in taken:
        name += "_"
    return name


def _hash(parts: Sequence[str]) -> str:
    return f"xxhash64({', '.join(parts) or '0'})"


def _of_fields(schema: StructType, prefix: str, depth: int) -> list[str]:
    return [
        part
        for field in schema.fields
        for part in _of_value(prefix + quoted(field.name), field.dataType, depth)
    ]


def _of_value(value: str, kind: DataType, depth: int) -> list[str]:
    """The arguments of xxhash64 that tell apart any two values of this type."""
    if isinstance(kind, NullType):
        return []
    null = f"isnull({value})"
    size = f"coalesce(size({value}), -1)"
    if isinstance(kind, StructType) and has_names(kind):
        return [*_of_fields(kind, f"{value}.", depth), null]
    item = f"sparkonce_{depth}"  # of a lambda; it hides outer names, and needs none of them
    parts = [value]
    if isinstance(kind, StructType):
        # SQL cannot name its fields: another struct with the same values, to be called `item`.
        numbered = _numbered(kind)
        fields = _of_value(item, numbered, depth + 1)
        of_one = f"array(cast({value} AS {numbered.simpleString()}))"
        parts = [f"transform({of_one}, {item} -> {_hash(fields)})"]
    elif isinstance(kind, UserDefinedType):
        # SQL reaches nothing inside of it. The text tells where its values stand, and not all of
        # each (no microseconds); they themselves are hashed as if no array or struct held them.
        of_one = f"named_struct('v', {value})"
        parts = [f"to_json({of_one}, map('timeZone', 'UTC', 'ignoreNullFields', 'false'))", value]
    elif isinstance(kind, StringType) and getattr(kind, "collation", _BINARY) != _BINARY:
        parts = [f"cast({value} AS binary)"]
    elif isinstance(kind, ArrayType):
        element = _of_value(item, kind.elementType, depth + 1)
        parts = [f"transform({value}, {item} -> {_hash(element)})", size]
    elif isinstance(kind, MapType):
        entry = StructType().add("key", kind.keyType).add("value", kind.valueType)
        of_entry = _of_fields(entry, f"{item}.", depth + 1)
        hashes = f"transform(map_entries({value}), {item} -> {_hash(of_entry)})"
        parts = [f"array_sort({hashes})", size]
    elif kind.typeName() == "variant":
        json = f"to_json({value}, map('timeZone', 'UTC'))"  # the same in any session's zone
        parts = [json, f"schema_of_variant({value})"]
    elif kind.typeName() in {"geometry", "geography"}:
        parts = [f"st_asbinary({value})", f"st_srid({value})"]
    return [*parts, null]


def _numbered(kind: DataType) -> DataType:
    """The type with its fields' numbers for their names, as a cast takes them: by position."""
    if isinstance(kind, StructType):
        numbered = StructType()
        for number, field in enumerate(kind.fields):
            numbered.add(f"_{number}", _numbered(field.dataType))
        return numbered
    if isinstance(kind, ArrayType):
        return ArrayType(_numbered(kind.elementType))
    if isinstance(kind, MapType):
        return MapType(_numbered(kind.keyType), _numbered(kind.valueType))
    return kind
