"""Typed columns into Spark's column conventions for Kafka, as SQL that Spark itself evaluates.

    id, day, amount   ─► string(id) AS key, to_json(row) AS value     whole rows, key="id"
    value struct, key ─► to_json(value) AS value, key                 a column `value`

A column `value` means that the rows are in Spark's conventions already, and only its struct is
encoded. Without one the whole row is the value; a column that Kafka would also know by its name is
then refused, since nobody can tell which of the two it is meant to be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import pyarrow as pa

from sparkonce.errors import ConfigurationError
from sparkonce.sinks.kafka.rows import CONVENTION, is_text
from sparkonce.sinks.spark_sql import quoted

Format: TypeAlias = Literal["json", "avro"]

FORMATS: Final = ("json", "avro")


@dataclass(frozen=True, slots=True)
class Layout:
    """Which columns make key and value, and which of these Spark turns into JSON.

    Avro is written on the executors, so its columns stay as they are.

    Attributes:
        key: of whole rows: the column that is also the key, or the columns of the key's record.
        key_format: None sends text and bytes as they are, and whole numbers and dates as text.
        value_format: None leaves the column `value` as it is.

    Raises:
        ConfigurationError: the settings do not fit each other.
    """

    key: str | tuple[str, ...] | None
    key_format: Format | None
    value_format: Format | None

    def __post_init__(self) -> None:
        for setting, chosen in (("key", self.key_format), ("value", self.value_format)):
            if chosen is not None and chosen not in FORMATS:
                raise ConfigurationError(
                    f"{setting}_format={chosen!r}: choose one of {', '.join(map(repr, FORMATS))}, "
                    "or leave it out"
                )
        if self.key is None:
            return
        if not self.key or not all(isinstance(name, str) and name for name in self.key):
            raise ConfigurationError(f"key={self.key!r}: give a column, or a list of columns")
        if self.value_format is None:
            raise ConfigurationError(
                f"key={self.key!r} needs value_format=, which makes the value of the whole row; "
                "without it the key is the column 'key'"
            )
        if isinstance(self.key, tuple) and self.key_format is None:
            raise ConfigurationError(
                f"key={list(self.key)!r} makes a record: say how it is written with key_format="
            )

    def __call__(self, schema: pa.Schema, row: str) -> list[str]:
        """SQL expressions for the columns that Kafka gets, of those in the struct `row`.

        Raises:
            ConfigurationError: a column is missing, ambiguous, or of a type without a place.
        """
        for name in schema.names:
            if schema.names.count(name) > 1:
                raise ConfigurationError(f"the column {name!r} is there twice; drop one")
        return (
            self._conventions(schema, row) if "value" in schema.names else self._rows(schema, row)
        )

    def _conventions(self, schema: pa.Schema, row: str) -> list[str]:
        if self.key is not None:
            raise ConfigurationError(
                f"key={self.key!r} is for whole rows, and there is a column 'value', which is then "
                "the value: name the key 'key', or rename the column 'value'"
            )
        if self.key_format is not None and "key" not in schema.names:
            raise ConfigurationError(
                f"key_format={self.key_format!r}, and there is no column 'key'"
            )
        formats = {"value": self.value_format, "key": self.key_format}
        columns = []
        for name in schema.names:
            column, chosen = f"{row}.{quoted(name)}", formats.get(name)
            if chosen is not None:
                column = _encoded(column, name, schema.field(name).type, chosen)
            columns.append(f"{column} AS {quoted(name)}")
        return columns

    def _rows(self, schema: pa.Schema, row: str) -> list[str]:
        if self.value_format is None:
            raise ConfigurationError(
                "the column 'value' is missing; make it with select=, or let value_format= make it "
                "of the whole row"
            )
        for name in schema.names:
            if name in CONVENTION:
                raise ConfigurationError(
                    f"the column {name!r} can be data or the message's {name}: as data, send "
                    "select=['struct(*) AS value']; as the message's, put the data into a struct: "
                    f"select=['struct(…) AS value', {name!r}]"
                )
        if self.key is None and self.key_format is not None:
            raise ConfigurationError(
                f"key_format={self.key_format!r} needs key=, the key's columns"
            )
        value = f"{_encoded(row, 'value', pa.struct(list(schema)), self.value_format)} AS value"
        key = [] if self.key is None else [f"{self._key(self.key, schema, row)} AS key"]
        return [*key, value]

    def _key(self, key: str | tuple[str, ...], schema: pa.Schema, row: str) -> str:
        names = (key,) if isinstance(key, str) else key
        for name in names:
            if name not in schema.names:
                raise ConfigurationError(
                    f"key={name!r}: there is no such column; there are {', '.join(schema.names)}"
                )
        if isinstance(key, str):
            value = f"{row}.{quoted(key)}"
            return _encoded(value, key, schema.field(key).type, self.key_format)
        record = f"struct({', '.join(f'{row}.{quoted(name)}' for name in names)})"
        fields = [schema.field(name) for name in names]
        return _encoded(record, "key", pa.struct(fields), self.key_format)


def _encoded(value: str, name: str, kind: pa.DataType, chosen: Format | None) -> str:
    if chosen == "avro":
        return value
    if chosen == "json":
        if not pa.types.is_nested(kind):
            raise ConfigurationError(
                f"the column {name!r} is {kind}; JSON is made of a struct, an array or a map: make "
                f"it struct(…), key=['{name}'] where it is the key, or leave the format out"
            )
        return f"to_json({value})"
    if is_text(kind):
        return value
    if _has_one_text(kind):
        return f"string({value})"
    raise ConfigurationError(
        f"the column {name!r} is {kind}, which cannot be a key as it is: choose key_format=, or "
        "cast it to string"
    )


def _has_one_text(kind: pa.DataType) -> bool:
    """Whether Spark's text of a value depends on no setting.

    A time's depends on the session's zone, and a decimal's on spark.sql.ansi.enabled.
    """
    return pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_date(kind)
