"""Arrow arrays as the bytes or values that COPY takes.

    Arrow array ──► cast that loses nothing ──► pgpq, COPY BINARY    (every column of the batch can)
                                           └──► psycopg, COPY TEXT   (one column cannot)

pgpq itself checks nothing: an int64 that is sent to a numeric arrives as 0. So an array always has
the exact type of its column's plan before it is encoded.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
from pgpq import ArrowToPostgresBinaryEncoder, encoders
from pgpq import schema as pgpq_types

from sparkonce.sinks.postgres.types import (
    DECIMAL_DIGITS,
    INT_DIGITS,
    MICROSECOND_DIGITS,
    UUID_BYTES,
    ColumnPlan,
    is_binary,
    value_type,
)

_CANONICAL_UUID = r"^[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}$"

# The stubs have a type for each kind of array and none for "an array of the plan's type".
_pa: Any = pa
_pc: Any = pyarrow.compute


class ValueDoesNotFitError(ValueError):
    """A value of this column does not go into its type. The text holds no value."""


def convert(array: Any, column: ColumnPlan) -> Any:
    """Give the array the type that its column plan says.

    Raises:
        ValueDoesNotFitError: a value would not survive it.
    """
    try:
        if not column.type.is_array:
            return _convert(array, column)
        lists = array.cast(pa.list_(value_type(array.type)))
        values = _convert(lists.flatten(), column)
        lengths = _pc.fill_null(_pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        return _pa.ListArray.from_arrays(
            pa.array(offsets), values, type=column.field.type, mask=_pc.is_null(lists)
        )
    except pa.ArrowInvalid:
        # Arrow's text shows the value, which may be nobody's business.
        raise ValueDoesNotFitError(
            f"column {column.name!r}: a value of Arrow type {array.type} does not fit into "
            f"Postgres type {column.type.ddl} as it is"
        ) from None


def _convert(array: Any, column: ColumnPlan) -> Any:
    if pa.types.is_null(array.type):
        return _pa.nulls(len(array), column.arrow)
    if column.kind == "decimal":
        return _to_decimal(array, column)
    if column.kind == "timestamp":
        return _to_timestamp(array, column)
    if column.kind == "uuid":
        return _to_uuid(array)
    return array.cast(column.arrow)


def _to_decimal(array: Any, column: ColumnPlan) -> Any:
    scale = column.type.scale
    if scale is not None and scale < 0:
        if pa.types.is_integer(array.type):
            array = array.cast(pa.decimal128(INT_DIGITS, 0))
        array = array.cast(pa.decimal128(DECIMAL_DIGITS, scale))  # checks only
    return array.cast(column.arrow)


def _to_timestamp(array: Any, column: ColumnPlan) -> Any:
    array = array.cast(column.arrow)
    step = 10 ** (MICROSECOND_DIGITS - column.type.second_digits)
    if step > 1:
        microseconds = _pc.fill_null(array.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
        if (microseconds % step).any():
            raise pa.ArrowInvalid("more digits than the column keeps")
    return array


def _to_uuid(array: Any) -> Any:
    if is_binary(array.type):
        return array.cast(pa.binary()).cast(pa.binary(UUID_BYTES))
    strings = _pc.fill_null(array, str(uuid.UUID(int=0)))
    if not _pc.all(_pc.match_substring_regex(strings, _CANONICAL_UUID), min_count=0).as_py():
        return pa.array(map(_read_uuid, array.to_pylist()), pa.binary(UUID_BYTES))
    digits = "".join(_pc.replace_substring(strings, "-", "").to_pylist())
    known = _pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(UUID_BYTES), len(array), [None, pa.py_buffer(bytes.fromhex(digits))]
    )
    return _pc.if_else(_pc.is_valid(array), known, pa.scalar(None, pa.binary(UUID_BYTES)))


def _read_uuid(text: str | None) -> bytes | None:
    if text is None:
        return None
    try:
        return uuid.UUID(text).bytes
    except ValueError:
        raise pa.ArrowInvalid("not a UUID") from None


def python_values(array: Any, column: ColumnPlan) -> list[Any]:
    """The converted array as values that psycopg writes as the text that Postgres reads."""
    values: list[Any] = array.to_pylist()
    if column.kind != "uuid":
        return values
    return [_shown_uuid(value) for value in values]


def _shown_uuid(value: bytes | list[bytes | None] | None) -> object:
    if isinstance(value, list):
        return [_shown_uuid(item) for item in value]
    return None if value is None else uuid.UUID(bytes=value)


def binary_encoder(columns: Sequence[ColumnPlan]) -> ArrowToPostgresBinaryEncoder:
    """An encoder for record batches whose fields are the columns', in this order."""
    fields = [column.field for column in columns]
    builders = {
        column.name: _builder(column, field) for column, field in zip(columns, fields, strict=True)
    }
    return ArrowToPostgresBinaryEncoder.new_with_encoders(pa.schema(fields), builders)


def _builder(column: ColumnPlan, field: pa.Field[Any]) -> Any:
    if column.type.name == "jsonb":
        builder = (
            encoders.LargeStringEncoderBuilder
            if pa.types.is_large_string(column.arrow)
            else encoders.StringEncoderBuilder
        )
        return builder.new_with_output(field, pgpq_types.Jsonb())
    return ArrowToPostgresBinaryEncoder.infer_encoder(field)
