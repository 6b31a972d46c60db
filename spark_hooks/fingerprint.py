"""A fingerprint of a sink's rows that depends on neither their order nor their partitions.

    every row ─► xxhash64 in the JVM ─► one more column ─► summed modulo 2^64 in the task

A replay must bring back the rows that a lost branch held: their sums must be equal. Spark's
`xxhash64` of the columns is not enough. It skips nulls, so ``(null, 'a')`` equals ``('a', null)``;
it runs the elements of neighbouring arrays together; it refuses maps and variants; and under a
collation it may take different strings for equal. So nulls and sizes are hashed too, and each type
in a form that tells its values apart. Only what SQL itself calls equal stays equal: 0.0 and -0.0,
and two maps with their entries in another order.

The hash depends on neither nullability in the schema nor a setting of the session. Both may change
before a replay, as with a new `coalesce` in the query, or Spark's ANSI mode.
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
    """The fingerprint of the rows that have these hashes."""
    total = pc.sum(hashes, min_count=0).as_py()  # wraps around, as it must
    return Fingerprint(ALGORITHM, len(hashes), total % 2**64)


def row_hash(schema: StructType, parent: str | None = None) -> str:
    """SQL that hashes a row: of the columns themselves, or of those in the struct `parent`."""
    if parent is not None and not has_names(schema):
        return _hash(_of_value(quoted(parent), schema, 0))
    return _hash(_of_fields(schema, "" if parent is None else f"{quoted(parent)}.", 0))


def is_plain(schema: StructType) -> bool:
    """Whether each unquoted name finds its column, under any of Spark's settings."""
    return has_names(schema) and all(_PLAIN_NAME.fullmatch(name) for name in schema.names)


def has_names(schema: StructType) -> bool:
    """Whether SQL can name each field, even where it ignores case."""
    return len({_folded(name) for name in schema.names}) == len(schema.names)


def _folded(name: str) -> str:
    """The name as Java compares it when it ignores case: letter by letter, upper, then lower."""
    upper = (u if len(u := letter.upper()) == 1 else letter for letter in name)
    return "".join(letter.lower()[0] for letter in upper)  # \u0130 becomes i without its dot


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
        # SQL cannot name its fields: cast it to a struct with numbered fields, called `item`.
        numbered = _numbered(kind)
        fields = _of_value(item, numbered, depth + 1)
        of_one = f"array(cast({value} AS {numbered.simpleString()}))"
        parts = [f"transform({of_one}, {item} -> {_hash(fields)})"]
    elif isinstance(kind, UserDefinedType):
        # SQL cannot look inside it. The JSON shows how its values are nested, but not all of each
        # (no microseconds); xxhash64 of the value itself has all of each, but ignores the nesting.
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
    """The type with numbers as field names; a cast goes by the position."""
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
