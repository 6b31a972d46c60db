"""Refuses, before any data moves, columns that no reader of a file would take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

import pyarrow as pa

from sparkonce.errors import ConfigurationError

Refusal: TypeAlias = tuple[Callable[[pa.DataType], bool], str]
"""Whether a type is refused, and why."""


def check_names(sink: str, schema: pa.Schema) -> None:
    """Refuse a column that is there twice.

    Raises:
        ConfigurationError: naming the columns.
    """
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise ConfigurationError(
            f"{sink}: the rows have the columns {twice} more than once: rename them (transform=)"
        )


def check_kinds(sink: str, schema: pa.Schema, refusals: Sequence[Refusal], advice: str) -> None:
    """Refuse columns by their type, or by a type within it.

    Raises:
        ConfigurationError: naming the column, and why; it ends with the advice.
    """
    for column in schema:
        for inner in _kinds(column.type):
            reason = next((reason for refuses, reason in refusals if refuses(inner)), None)
            if reason is not None:
                raise ConfigurationError(
                    f"{sink}: column {column.name!r} is {column.type}, and {reason}: {advice}"
                )


def _kinds(kind: pa.DataType) -> Iterable[pa.DataType]:
    """The type and all types within it."""
    yield kind
    for index in range(kind.num_fields):
        yield from _kinds(kind.field(index).type)


def _has_a_name_twice(kind: pa.DataType) -> bool:
    return isinstance(kind, pa.StructType) and len({f.name for f in kind}) < kind.num_fields


def _is_spatial(kind: pa.DataType) -> bool:
    if not isinstance(kind, pa.StructType):
        return False
    return any({b"geometry", b"geography"} & set(field.metadata or ()) for field in kind)


# Spark cannot read such a column from CSV, and from Parquet only since SPARK-54220 (not in 4.0).
VOID: Final[Refusal] = (pa.types.is_null, "readers refuse a column that has no type (cast it)")
NESTED: Final[Sequence[Refusal]] = (
    (_has_a_name_twice, "a struct in it has two fields of one name, and readers see only one"),
    (_is_spatial, "no reader returns it as such (write its st_asbinary and st_srid)"),
)
