"""Arrow columns as Avro, in the frame that a Confluent schema registry's readers know.

    0x00, id of the schema (4 bytes, big-endian), the row in Avro's binary encoding

Nothing is converted by guess: fastavro would write 2**40 as an `int`, 1.5 as 1 and a time without
a zone in the zone of the machine, all without a word. So each column's type is compared with the
schema before any data moves, and what is left for a row to get wrong is told by its field's name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from io import BytesIO
from typing import Any, Final, TypeAlias

import fastavro
import pyarrow as pa
import pyarrow.compute as pc
from fastavro.schema import SchemaParseException

from sparkonce.errors import ConfigurationError
from sparkonce.sinks.kafka.rows import RowError, is_string

Schema: TypeAlias = "str | list[Any] | dict[str, Any]"

NAMESPACE: Final = "sparkonce"

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_MICROS: Final = "timestamp-micros"
_LOCAL_MICROS: Final = "local-timestamp-micros"


# -- a schema from a column's type -----------------------------------------------------------------


def derive(kind: pa.DataType, name: str) -> str:
    """The text of the Avro schema for a column of this type.

    A null is allowed where the column allows it, with null as the default, so that a column that is
    added later is compatible. The column's own nulls are Kafka's: a tombstone, or no key.

    Args:
        kind: of the column.
        name: of the record, where the column is a struct.

    Raises:
        ConfigurationError: naming the field that Avro has no type or no name for.
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
        f"{' (the keys of its maps are strings)' if types.is_map(kind) else ''}; cast it in select="
    )


def _field(item: pa.Field[Any], path: tuple[str, ...]) -> dict[str, Any]:
    here = (*path, item.name)
    if _NAME.fullmatch(item.name) is None:
        raise ConfigurationError(
            f"{_shown(here)}: a name in Avro has letters A-Z a-z, digits and _, and starts with no "
            "digit; rename the column in select="
        )
    default = {"default": None} if item.nullable else {}
    return {"name": item.name, "type": _nullable(item, here), **default}


def _nullable(item: pa.Field[Any], path: tuple[str, ...]) -> Schema:
    schema = _derived(item.type, path)
    return ["null", schema] if item.nullable else schema


def _shown(path: tuple[str, ...]) -> str:
    return f"the column {'.'.join(path[2:])!r}" if path[2:] else f"the {path[-1].lower()}"


def _is_binary(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _is_int(kind: pa.DataType) -> bool:
    return pa.types.is_signed_integer(kind) and not pa.types.is_int64(kind)


_SIMPLE: Final = (
    (pa.types.is_boolean, "boolean"),
    (_is_int, "int"),
    (pa.types.is_int64, "long"),
    (pa.types.is_float32, "float"),
    (pa.types.is_float64, "double"),
    (is_string, "string"),
    (_is_binary, "bytes"),
    (pa.types.is_date32, {"type": "int", "logicalType": "date"}),
)


# -- a schema that somebody wrote ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Parsed:
    """A schema as fastavro wants it, with the types that it names."""

    schema: Any
    names: Mapping[str, Any]

    def resolved(self, schema: Schema) -> tuple[Any, bool]:
        """A schema that is no name and no union, and whether it may be null.

        Raises:
            ConfigurationError: it is a union of more than null and one type.
        """
        branches = schema if isinstance(schema, list) else [schema]
        others = [branch for branch in branches if branch != "null"]
        if len(others) != 1:
            raise ConfigurationError(
                "a union of more than null and one type; which one a column is for is not known"
            )
        (one,) = others
        found = self.names.get(one, {"type": one}) if isinstance(one, str) else one
        return found, len(others) < len(branches)


@lru_cache(maxsize=64)
def parse(text: str) -> _Parsed:
    """The schema as fastavro wants it.

    Raises:
        ConfigurationError: the text is no Avro schema.
    """
    try:
        names: dict[str, Any] = {}
        return _Parsed(fastavro.parse_schema(json.loads(text), names), names)
    except (SchemaParseException, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigurationError(f"not an Avro schema: {type(error).__name__}: {error}") from error


def fit(kind: pa.DataType, text: str) -> pa.DataType:
    """To which type a column is cast so that this schema writes it without loss.

    Times and dates become the whole numbers that Avro stores.

    Raises:
        ConfigurationError: it cannot be; the message names the field and both types.
    """
    parsed = parse(text)
    return _fit(kind, parsed.schema, parsed, "")


def _fit(kind: pa.DataType, schema: Schema, parsed: _Parsed, path: str) -> pa.DataType:
    try:
        one, _ = parsed.resolved(schema)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path or 'the whole'}: {error}") from None
    found = _fit_nested(kind, one, parsed, path) or _fit_leaf(kind, one)
    if found is None:
        raise ConfigurationError(
            f"{path or 'the whole'} is {kind}, and the schema has {_said(one)}, which cannot hold "
            "it without loss; cast it in select="
        )
    return found


def _fit_nested(kind: pa.DataType, one: Any, parsed: _Parsed, path: str) -> pa.DataType | None:
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


def _fit_record(kind: pa.StructType, record: Any, parsed: _Parsed, path: str) -> pa.DataType:
    fields = {item["name"]: item for item in record["fields"]}
    columns = {item.name: item for item in kind}
    unknown = [name for name in columns if name not in fields]
    if unknown:
        raise ConfigurationError(
            f"{_below(path, unknown[0])}: the schema's {record['name']!r} has no such field; "
            "leave it out with select=, or add it to the schema"
        )
    for name, item in fields.items():
        if name not in columns and "default" not in item:
            raise ConfigurationError(
                f"{_below(path, name)}: the schema needs it, and there is no such column"
            )
        if name not in columns and isinstance(item["default"], str) and _is_bytes(item, parsed):
            raise ConfigurationError(
                f"{_below(path, name)}: there is no such column, and a default that is bytes "
                "cannot be written; give the column in select="
            )
    fits = {n: _fit(c.type, fields[n]["type"], parsed, _below(path, n)) for n, c in columns.items()}
    return pa.struct(list(fits.items()))


def _is_bytes(item: Any, parsed: _Parsed) -> bool:
    schema = item["type"]
    one, _ = parsed.resolved(schema[0] if isinstance(schema, list) else schema)
    return one["type"] in {"bytes", "fixed"}


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _said(schema: Any) -> str:
    said = {
        key: schema[key]
        for key in ("type", "logicalType", "precision", "scale", "name")
        if key in schema
    }
    return str(said["type"]) if len(said) == 1 else json.dumps(said)


_TIMES: Final = frozenset(
    {
        (False, _MICROS),
        (False, "timestamp-millis"),
        (True, _LOCAL_MICROS),
        (True, "local-timestamp-millis"),
    }
)
"""By whether the column is without a time zone."""

_PLAIN: Final = frozenset({None, "uuid"})
_UUID: Final = "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$"

_INTO: Final = (
    (pa.types.is_boolean, {"boolean"}),
    (pa.types.is_int64, {"long"}),
    (_is_int, {"int", "long", "double"}),
    (pa.types.is_float32, {"float", "double"}),
    (pa.types.is_float64, {"double"}),
    (is_string, {"string", "enum"}),
    (_is_binary, {"bytes", "fixed"}),
)


# -- rows ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AvroSchema:
    """A schema that the registry has; it travels to the executors.

    Attributes:
        column: which it is the schema of, `value` or `key`.
        text: the schema.
        schema_id: the registry's number.
    """

    column: str
    text: str = field(repr=False)
    schema_id: int

    def encoded(self, column: pa.Array[Any]) -> pa.Array[Any]:
        """Each row in Avro, after the schema's id; null where the column is null.

        Raises:
            RowError: naming the field that does not fit the schema.
        """
        parsed = parse(self.text)
        rows: pa.Array[Any] = column.cast(fit(column.type, self.text))
        _check(rows.drop_null(), parsed.schema, parsed, self.column)
        has_millis = "-millis" in self.text
        head = b"\0" + self.schema_id.to_bytes(4, "big")
        encoded: list[bytes | None] = []
        try:
            objects = _objects(rows)
        except UnicodeDecodeError:
            raise RowError(f"{self.column!r} has text that is not UTF-8") from None
        for row in objects:
            if row is None:
                encoded.append(None)
                continue
            out = BytesIO()
            out.write(head)
            try:
                if has_millis:
                    row = _in_millis(row, parsed.schema, parsed)  # noqa: PLW2901
                fastavro.schemaless_writer(out, parsed.schema, row)
            except Exception as error:  # noqa: BLE001 - of any type, as fastavro's writers are
                told = _misfit(row, parsed.schema, parsed, self.column)
                raise RowError(
                    told or f"{self.column!r} is refused by Avro with {type(error).__name__}"
                ) from None  # the error shows the row's content
            encoded.append(out.getvalue())
        return pa.array(encoded, pa.large_binary())


def _objects(column: pa.Array[Any]) -> list[Any]:
    """As `to_pylist`; in half of its time for structs."""
    if not isinstance(column, pa.StructArray) or not column.type.num_fields:
        return column.to_pylist(maps_as_pydicts="strict")
    names = [item.name for item in column.type]
    fields = (each.to_pylist(maps_as_pydicts="strict") for each in column.flatten())
    valid = column.is_valid().to_pylist()
    rows = zip(valid, zip(*fields, strict=True), strict=True)
    return [dict(zip(names, row, strict=True)) if is_valid else None for is_valid, row in rows]


def _in_millis(value: Any, schema: Schema, parsed: _Parsed) -> Any:
    """The value with its times cut to the milliseconds of its schema, as Spark's to_avro does."""
    one, _ = parsed.resolved(schema)
    if value is None:
        return None
    if one.get("logicalType") in {"timestamp-millis", "local-timestamp-millis"}:
        return value // 1000
    if one["type"] == "record":
        inner = {item["name"]: item["type"] for item in one["fields"]}
        return {name: _in_millis(each, inner[name], parsed) for name, each in value.items()}
    if one["type"] == "array":
        return [_in_millis(each, one["items"], parsed) for each in value]
    if one["type"] == "map":
        return {key: _in_millis(each, one["values"], parsed) for key, each in value.items()}
    return value


def _check(values: pa.Array[Any], schema: Schema, parsed: _Parsed, path: str) -> None:
    """Refuse what fastavro would write as something else, or nobody could read.

    Raises:
        RowError: a null where the schema has none, which it makes false of a boolean; or text that
            is no UUID.
    """
    one, nullable = parsed.resolved(schema)
    if values.null_count and not nullable:
        raise RowError(f"{path!r} is null, which the schema does not allow")
    values = values.drop_null()
    if isinstance(values, pa.StructArray):
        inner = {item["name"]: item["type"] for item in one["fields"]}
        for item, array in zip(values.type, values.flatten(), strict=True):
            _check(array, inner[item.name], parsed, f"{path}.{item.name}")
    elif isinstance(values, pa.MapArray):
        start, end = values.offsets[0].as_py(), values.offsets[-1].as_py()
        _check(values.items.slice(start, end - start), one["values"], parsed, f"{path}{{}}")
    elif isinstance(values, (pa.ListArray, pa.LargeListArray)):
        _check(values.flatten(), one["items"], parsed, f"{path}[]")
    elif one.get("logicalType") == "uuid":
        is_uuid = pc.match_substring_regex(values, _UUID)
        if not pc.all(is_uuid, min_count=0).as_py():
            raise RowError(f"{path!r} is text that is no UUID")


def _misfit(value: Any, schema: Schema, parsed: _Parsed, path: str) -> str | None:
    """Which part of a value does not fit the schema, and why, without its content."""
    one, _ = parsed.resolved(schema)
    if value is None:
        return None
    inner: list[tuple[Any, Schema, str]] = []
    if one["type"] == "record":
        fields = (item for item in one["fields"] if item["name"] in value)
        inner = [(value[f["name"]], f["type"], f"{path}.{f['name']}") for f in fields]
    elif one["type"] == "array":
        inner = [(item, one["items"], f"{path}[]") for item in value]
    elif one["type"] == "map":
        inner = [(item, one["values"], f"{path}{{}}") for item in value.values()]
    elif one["type"] == "enum" and value not in one["symbols"]:
        return f"{path!r} is none of the schema's symbols: {', '.join(one['symbols'])}"
    elif one["type"] == "fixed" and isinstance(value, bytes) and len(value) != one["size"]:
        return f"{path!r} has {len(value)} bytes, and the schema wants {one['size']}"
    return next((told for each in inner if (told := _misfit(*each[:2], parsed, each[2]))), None)
