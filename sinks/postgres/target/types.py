"""Which Arrow type goes into which Postgres type.

A value is stored unchanged or refused: nothing is rounded, wrapped or truncated. Three checks
ensure that. `plan` compares the two types and refuses a column before any data moves;
`loading.values` checks single values; the server checks the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import pyarrow as pa

Kind: TypeAlias = Literal["cast", "decimal", "string", "date", "time", "uuid", "text"]
"""The check or conversion that a value needs besides the cast; "time": all types with seconds."""

_INTS: Mapping[str, pa.DataType] = {"int2": pa.int16(), "int4": pa.int32(), "int8": pa.int64()}
_FLOATS: Mapping[str, pa.DataType] = {"float4": pa.float32(), "float8": pa.float64()}
_STRINGS = frozenset({"text", "varchar", "bpchar", "json", "jsonb"})
_ONLY_AS_TEXT_IN_ARRAYS = frozenset({"varchar", "bpchar", "json", "jsonb", "uuid", "timestamptz"})
"""pgpq writes another element type into the array's header, which the server refuses."""

_NEEDS_A_CAST = frozenset(
    {*_INTS, *_FLOATS, "numeric", "bool", "bytea", "date", "timestamp", "timestamptz"}
)
"""Their text form is ambiguous (zones, rounding), so the user must cast in Spark."""

_READ_WITH_LOSS = frozenset({"name", "char", "money"})
"""Their input functions silently cut or round."""

_ROUNDED_TO_DIGITS = frozenset({"interval", "time", "timetz"})

_OF_LENGTH = frozenset({"varchar", "bpchar"})
_ALL_FIELDS = 0x7FFF  # of an interval; upper half of its modifier

INT_DIGITS = 20
DECIMAL_DIGITS = 38
MICROSECOND_DIGITS = 6
UUID_BYTES = 16


class UnmappableError(ValueError):
    """The Arrow type does not go into the Postgres type without loss; the text says what to do."""


@dataclass(frozen=True, slots=True)
class PostgresType:
    """A column's type, with domains resolved.

    Attributes:
        ddl: as Postgres writes it, with modifiers; fit for CREATE TABLE.
        name: name of the type, or of the array's element, in pg_catalog; empty for types of other
            schemas.
        modifier: as in pg_attribute.atttypmod: -1 for none.
        is_array: an array with any number of dimensions.
        is_enum: labels, sent as text.
        is_staged_longer: the staging table takes longer strings, which the merge checks.
        has_domains: the table's array has elements of a domain, which changes the array's header.
    """

    ddl: str
    name: str
    modifier: int = -1
    is_array: bool = False
    is_enum: bool = False
    is_staged_longer: bool = False
    has_domains: bool = False

    @property
    def scale(self) -> int | None:
        """Digits after the point of a numeric; None without a limit."""
        if self.modifier < 0:
            return None
        scale = (self.modifier - 4) & 0x7FF
        return (scale ^ 1024) - 1024  # eleven bits, signed since Postgres 15

    @property
    def characters(self) -> int | None:
        """Length limit of a varchar(n) or char(n); None without a limit."""
        return None if self.modifier < 0 or self.name not in _OF_LENGTH else self.modifier - 4

    @property
    def second_digits(self) -> int:
        """Digits after the point of a second."""
        if self.modifier < 0:
            return MICROSECOND_DIGITS
        # The upper half of an interval's modifier holds its fields (YEAR TO MONTH, …).
        digits = self.modifier & 0xFFFF
        return min(digits, MICROSECOND_DIGITS)

    @property
    def has_all_fields(self) -> bool:
        """False for an interval that keeps only some fields, such as `interval day`."""
        return self.modifier < 0 or self.modifier >> 16 == _ALL_FIELDS


@dataclass(frozen=True, slots=True)
class ColumnPlan:
    """How the values of one column are sent.

    Attributes:
        name: of the column, in the batch and in the target.
        type: of the target's column.
        arrow: the type that the array is cast to; for an array column, the type of its elements.
        kind: the check or conversion that is needed besides the cast.
        binary: whether pgpq can send it.
    """

    name: str
    type: PostgresType
    arrow: pa.DataType
    kind: Kind = "cast"
    binary: bool = True

    @property
    def field(self) -> pa.Field[Any]:
        return pa.field(self.name, pa.list_(self.arrow) if self.type.is_array else self.arrow)


def plan(name: str, arrow: pa.DataType, target: PostgresType) -> ColumnPlan:
    """Choose how to send a column.

    Raises:
        UnmappableError: at least one value could not be stored unchanged.
    """
    if not target.is_array:
        if is_list(arrow):
            raise UnmappableError("make the column an array, or use to_json() for a json column")
        planned, kind = _element(arrow, target)
        return ColumnPlan(name, target, planned, kind, binary=kind != "text")
    if not is_list(arrow) and not pa.types.is_null(arrow):
        raise UnmappableError("give an array, as from split() or array()")
    element = value_type(arrow)
    if is_list(element):
        raise UnmappableError(
            "arrays of arrays are not supported; use to_json() and a jsonb column"
        )
    planned, kind = _element(element, target)
    binary = kind != "text" and target.name not in _ONLY_AS_TEXT_IN_ARRAYS
    binary = binary and not target.is_enum and not target.has_domains
    return ColumnPlan(name, target, planned, kind, binary)


def value_type(arrow: Any) -> pa.DataType:
    """Type of a list's elements; a null column has null elements."""
    return arrow if pa.types.is_null(arrow) else arrow.value_type


def is_list(arrow: pa.DataType) -> bool:
    types = pa.types
    return types.is_list(arrow) or types.is_large_list(arrow) or types.is_fixed_size_list(arrow)


def _element(arrow: pa.DataType, target: PostgresType) -> tuple[pa.DataType, Kind]:
    for is_one, read in _READERS:
        if is_one(arrow):
            found = read(arrow, target)
            if found is not None:
                return found
    if pa.types.is_nested(arrow):
        raise UnmappableError("use to_json() and a jsonb column")
    raise UnmappableError('cast it, as with select=["cast(x AS …) AS x"], or change the column')


def _is_string(arrow: pa.DataType) -> bool:
    return pa.types.is_string(arrow) or pa.types.is_large_string(arrow)


def holds_strings(arrow: pa.DataType) -> bool:
    """Whether it is a string, or a list of strings."""
    return _is_string(value_type(arrow) if is_list(arrow) else arrow)


def is_binary(arrow: pa.DataType) -> bool:
    types = pa.types
    return (
        types.is_binary(arrow) or types.is_large_binary(arrow) or types.is_fixed_size_binary(arrow)
    )


def _from_null(_arrow: Any, target: PostgresType) -> tuple[pa.DataType, Kind] | None:
    """A null column fits any type, as long as the server takes the encoding."""
    if target.name in _WITHOUT_VALUES:
        return _WITHOUT_VALUES[target.name], "cast"
    return _from_string(pa.string(), target)


def _from_string(arrow: Any, target: PostgresType) -> tuple[pa.DataType, Kind] | None:
    if target.name in _STRINGS or target.is_enum:
        return arrow, "string"
    if target.name == "uuid":
        return pa.binary(UUID_BYTES), "uuid"
    is_cut = target.modifier >= 0 and target.name in _ROUNDED_TO_DIGITS
    if target.name in _NEEDS_A_CAST | _READ_WITH_LOSS or is_cut:
        return None
    return arrow, "text"  # the type's own input function reads it: inet, interval, xml, …


def _from_integer(_arrow: Any, target: PostgresType) -> tuple[pa.DataType, Kind] | None:
    if target.name == "numeric":
        return pa.decimal128(INT_DIGITS, 0), "decimal"
    known = _INTS.get(target.name) or _FLOATS.get(target.name)
    return None if known is None else (known, "cast")


def _from_decimal(arrow: Any, target: PostgresType) -> tuple[pa.DataType, Kind] | None:
    if target.name == "numeric":
        kept = arrow.scale if target.scale is None else max(min(arrow.scale, target.scale), 0)
        return pa.decimal128(DECIMAL_DIGITS, kept), "decimal"
    if target.name in _INTS and arrow.scale != 0:
        raise UnmappableError("digits after the point would be lost; make the column numeric")
    return (_INTS[target.name], "cast") if target.name in _INTS else None


def _from_float(arrow: Any, target: PostgresType) -> tuple[pa.DataType, Kind] | None:
    if target.name == "float4" and pa.types.is_float64(arrow):
        raise UnmappableError("it would be rounded; make the column double precision")
    return (_FLOATS[target.name], "cast") if target.name in _FLOATS else None


def _from_timestamp(arrow: Any, target: PostgresType) -> tuple[pa.DataType, Kind] | None:
    if target.name not in {"timestamp", "timestamptz"}:
        return None
    if (arrow.tz is None) != (target.name == "timestamp"):
        raise UnmappableError(
            "one of them has a time zone and the other has none; cast it to "
            f"{'timestamp_ntz' if arrow.tz else 'timestamp'} in Spark, or change the column"
        )
    return pa.timestamp("us", "UTC" if arrow.tz else None), "time"


def _from_duration(_arrow: Any, target: PostgresType) -> tuple[pa.DataType, Kind] | None:
    if target.name == "interval" and not target.has_all_fields:
        raise UnmappableError("it keeps some fields only; make the column a plain interval")
    return (pa.duration("us"), "time") if target.name == "interval" else None


def _from_time(_arrow: Any, target: PostgresType) -> tuple[pa.DataType, Kind] | None:
    return (pa.time64("us"), "time") if target.name == "time" else None


def _from_boolean(_arrow: Any, target: PostgresType) -> tuple[pa.DataType, Kind] | None:
    return (pa.bool_(), "cast") if target.name == "bool" else None


def _from_date(_arrow: Any, target: PostgresType) -> tuple[pa.DataType, Kind] | None:
    return (pa.date32(), "date") if target.name == "date" else None


def _from_binary(_arrow: Any, target: PostgresType) -> tuple[pa.DataType, Kind] | None:
    if target.name == "uuid":
        return pa.binary(UUID_BYTES), "uuid"
    return (pa.binary(), "cast") if target.name == "bytea" else None


_WITHOUT_VALUES: Mapping[str, pa.DataType] = {
    **_INTS,
    **_FLOATS,
    "numeric": pa.decimal128(1, 0),
    "bool": pa.bool_(),
    "bytea": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", "UTC"),
    "interval": pa.duration("us"),
    "time": pa.time64("us"),
    "uuid": pa.binary(UUID_BYTES),
}

_Reader: TypeAlias = Callable[[Any, PostgresType], "tuple[pa.DataType, Kind] | None"]

_READERS: tuple[tuple[Callable[[Any], bool], _Reader], ...] = (
    (pa.types.is_null, _from_null),
    (_is_string, _from_string),
    (pa.types.is_integer, _from_integer),
    (pa.types.is_decimal128, _from_decimal),
    (pa.types.is_floating, _from_float),
    (pa.types.is_timestamp, _from_timestamp),
    (pa.types.is_duration, _from_duration),
    (pa.types.is_time, _from_time),
    (pa.types.is_boolean, _from_boolean),
    (pa.types.is_date32, _from_date),
    (is_binary, _from_binary),
)


def spark_name(arrow: Any) -> str:
    """Spark's name of the type, for messages."""
    names = {
        "int8": "tinyint",
        "int16": "smallint",
        "int32": "int",
        "int64": "bigint",
        "float": "float",
        "double": "double",
        "bool": "boolean",
        "large_string": "string",
        "large_binary": "binary",
        "date32[day]": "date",
        "duration[us]": "interval day to second",
        "time64[ns]": "time",
        "null": "void",
    }
    types = pa.types
    if types.is_timestamp(arrow):
        return "timestamp" if arrow.tz else "timestamp_ntz"
    if types.is_decimal(arrow):
        return f"decimal({arrow.precision},{arrow.scale})"
    if is_list(arrow):
        return f"array<{spark_name(value_type(arrow))}>"
    if types.is_map(arrow):
        return f"map<{spark_name(arrow.key_type)},{spark_name(arrow.item_type)}>"
    if types.is_struct(arrow):
        return f"struct<{','.join(f'{f.name}:{spark_name(f.type)}' for f in arrow)}>"
    return names.get(str(arrow), str(arrow))
