"""The Avro schema of an Arrow column: derived from its type, or checked against it.

    no schema given ──► derive: a schema that holds the column's type
    a schema given  ──► fit: refuse it if a value could be lost

fastavro converts silently: it writes 2**40 as an `int`, 1.5 as 1, and a time without a zone in the
machine's zone. So the type of each column is compared with the schema before any data moves, and
only values are left to check (`avro_rows`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeAlias

import fastavro
import pyarrow as pa
from fastavro.schema import SchemaParseException

from sparkonce.errors import ConfigurationError
from sparkonce.sinks.kafka.rows.conventions import is_binary, is_int, is_string

Schema: TypeAlias = "str | list[Any] | dict[str, Any]"

NAMESPACE: Final = "sparkonce"

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_MICROS: Final = "timestamp-micros"
_LOCAL_MICROS: Final = "local-timestamp-micros"


# -- a schema from a column's type -----------------------------------------------------------------


def derive(kind: pa.DataType, name: str) -> str:
    """The text of the Avro schema for a column of this type.

    A field may be null where its column may, with null as the default, so that a column that is
    added later is compatible. Nulls of the whole column belong to Kafka: a tombstone, or no key.
    If the column is a struct, `name` is the record's name.

    Raises:
        ConfigurationError: naming the field for which Avro has no type or no name.
    """
    return json.dumps(_derived(kind, (NAMESPACE, name)))


def _derived(kind: pa.DataType, path: tuple[str, ...]) -> Schema:
    types = pa.types
    for is_of, schema in _SIMPLE:
        if is_of(kind):
            return schema
    if types.is_timestamp(kind):
        return {"type": "long", "logicalType": _MICROS if kind.tz else _LOCAL_MICROS}
    if types.is_decimal(kind):
        size = {"precision": kind.precision, "scale": kind.scale}
        return {"type": "bytes", "logicalType": "decimal", **size}
    if types.is_map(kind) and is_string(kind.key_type):
        return {"type": "map", "values": _nullable(kind.item_field, (*path, "value"))}
    if types.is_list(kind) or types.is_large_list(kind):
        return {"type": "array", "items": _nullable(kind.value_field, (*path, "element"))}
    if types.is_struct(kind):
        return {
            "type": "record",
            "name": path[-1],
            "namespace": ".".join(path[:-1]),
            "fields": [_field(item, path) for item in kind],
        }
    raise ConfigurationError(
        f"{_shown(path)} is {kind}, for which Avro has no type"
        f"{' (its maps have strings as keys)' if types.is_map(kind) else ''}; cast it in select="
    )


def _field(item: pa.Field[Any], path: tuple[str, ...]) -> dict[str, Any]:
    here = (*path, item.name)
    if _NAME.fullmatch(item.name) is None:
        raise ConfigurationError(
            f"{_shown(here)}: a name in Avro has letters A-Z a-z, digits and _, and does not start "
            "with a digit; rename the column in select="
        )
    default = {"default": None} if item.nullable else {}
    return {"name": item.name, "type": _nullable(item, here), **default}


def _nullable(item: pa.Field[Any], path: tuple[str, ...]) -> Schema:
    schema = _derived(item.type, path)
    return ["null", schema] if item.nullable else schema


def _shown(path: tuple[str, ...]) -> str:
    return f"the column {'.'.join(path[2:])!r}" if path[2:] else f"the {path[-1].lower()}"


_SIMPLE: Final = (
    (pa.types.is_boolean, "boolean"),
    (is_int, "int"),
    (pa.types.is_int64, "long"),
    (pa.types.is_float32, "float"),
    (pa.types.is_float64, "double"),
    (is_string, "string"),
    (is_binary, "bytes"),
    (pa.types.is_date32, {"type": "int", "logicalType": "date"}),
)


# -- a schema given by the user --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Parsed:
    """A schema in fastavro's form, with the types that it names."""

    schema: Any
    names: Mapping[str, Any]

    def resolved(self, schema: Schema) -> tuple[Any, bool]:
        """The schema that a name or a union with null stands for, and whether it may be null.

        Raises:
            ConfigurationError: it is a union of more than null and one type.
        """
        branches = schema if isinstance(schema, list) else [schema]
        others = [branch for branch in branches if branch != "null"]
        if len(others) != 1:
            raise ConfigurationError(
                "a union of more than null and one type; the type for a column is ambiguous"
            )
        (one,) = others
        found = self.names.get(one, {"type": one}) if isinstance(one, str) else one
        return found, len(others) < len(branches)


@lru_cache(maxsize=64)
def parse(text: str) -> Parsed:
    """The schema in fastavro's form.

    Raises:
        ConfigurationError: the text is not an Avro schema.
    """
    try:
        names: dict[str, Any] = {}
        return Parsed(fastavro.parse_schema(json.loads(text), names), names)
    except (SchemaParseException, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigurationError(f"not an Avro schema: {type(error).__name__}: {error}") from error


def fit(kind: pa.DataType, text: str) -> pa.DataType:
    """The type to which a column is cast so that this schema writes it without loss.

    Times and dates become the integers that Avro stores.

    Raises:
        ConfigurationError: a value could be lost; the message names the field and both types.
    """
    parsed = parse(text)
    return _fit(kind, parsed.schema, parsed, "")


def _fit(kind: pa.DataType, schema: Schema, parsed: Parsed, path: str) -> pa.DataType:
    try:
        one, _ = parsed.resolved(schema)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path or 'the whole row'}: {error}") from None
    found = _fit_nested(kind, one, parsed, path) or _fit_leaf(kind, one)
    if found is None:
        raise ConfigurationError(
            f"{path or 'the whole row'} is {kind}, and the schema has {_shown_schema(one)}, which "
            "cannot hold it without loss; cast it in select="
        )
    return found


def _fit_nested(kind: pa.DataType, one: Any, parsed: Parsed, path: str) -> pa.DataType | None:
    types, avro = pa.types, one["type"]
    if avro == "record" and types.is_struct(kind):
        return _fit_record(kind, one, parsed, path)
    if avro == "array" and (types.is_list(kind) or types.is_large_list(kind)):
        item = _fit(kind.value_type, one["items"], parsed, f"{path}[]")
        wide = pa.large_list if types.is_large_list(kind) else pa.list_
        return wide(item)
    if avro == "map" and types.is_map(kind) and is_string(kind.key_type):
        item = _fit(kind.item_type, one["values"], parsed, f"{path}{{}}")
        return pa.map_(kind.key_type, item)
    return None


def _fit_leaf(kind: pa.DataType, one: Any) -> pa.DataType | None:
    types, avro, logical = pa.types, one["type"], one.get("logicalType")
    if types.is_timestamp(kind):
        fits = avro == "long" and kind.unit == "us" and (kind.tz is None, logical) in _TIMES
        return pa.int64() if fits else None
    if types.is_date32(kind):
        return pa.int32() if (avro, logical) == ("int", "date") else None
    if types.is_decimal(kind):
        return kind if _holds_decimal(one, kind) else None
    fits = logical in _PLAIN and any(is_of(kind) and avro in into for is_of, into in _INTO)
    return kind if fits else None


def _holds_decimal(one: Any, kind: Any) -> bool:
    if one.get("logicalType") != "decimal" or one["type"] not in {"bytes", "fixed"}:
        return False
    scale = int(one.get("scale", 0))
    whole = int(one["precision"]) - scale
    return bool(scale >= kind.scale and whole >= kind.precision - kind.scale)


def _fit_record(kind: pa.StructType, record: Any, parsed: Parsed, path: str) -> pa.DataType:
    fields = {item["name"]: item for item in record["fields"]}
    columns = {item.name: item for item in kind}
    unknown = [name for name in columns if name not in fields]
    if unknown:
        raise ConfigurationError(
            f"{_below(path, unknown[0])}: the schema's {record['name']!r} has no such field; "
            "omit it with select=, or add it to the schema"
        )
    for name, item in fields.items():
        if name not in columns and "default" not in item:
            raise ConfigurationError(
                f"{_below(path, name)}: the schema needs it, but there is no such column; add one "
                "with select=, or give the field a default"
            )
        if name not in columns and isinstance(item["default"], str) and _is_bytes(item, parsed):
            raise ConfigurationError(
                f"{_below(path, name)}: there is no such column, and a default of bytes cannot be "
                "written; add the column in select="
            )
    fits = {n: _fit(c.type, fields[n]["type"], parsed, _below(path, n)) for n, c in columns.items()}
    return pa.struct(list(fits.items()))


def _is_bytes(item: Any, parsed: Parsed) -> bool:
    schema = item["type"]
    one, _ = parsed.resolved(schema[0] if isinstance(schema, list) else schema)
    return one["type"] in {"bytes", "fixed"}


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _shown_schema(schema: Any) -> str:
    shown = {
        key: schema[key]
        for key in ("type", "logicalType", "precision", "scale", "name")
        if key in schema
    }
    return str(shown["type"]) if len(shown) == 1 else json.dumps(shown)


_TIMES: Final = frozenset(
    {
        (False, _MICROS),
        (False, "timestamp-millis"),
        (True, _LOCAL_MICROS),
        (True, "local-timestamp-millis"),
    }
)
"""Whether the column has no time zone, and the logical types that fit it."""

_PLAIN: Final = frozenset({None, "uuid"})

_INTO: Final = (
    (pa.types.is_boolean, {"boolean"}),
    (pa.types.is_int64, {"long"}),
    (is_int, {"int", "long", "double"}),
    (pa.types.is_float32, {"float", "double"}),
    (pa.types.is_float64, {"double"}),
    (is_string, {"string", "enum"}),
    (is_binary, {"bytes", "fixed"}),
)
