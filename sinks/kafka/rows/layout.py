"""Brings typed columns into Spark's column conventions for Kafka, by SQL that Spark evaluates.

    id, day, amount   ─► string(id) AS key, to_json(row) AS value     whole rows, key="id"
    value struct, key ─► to_json(value) AS value, key                 a column `value`

A column `value` means that the rows already follow Spark's conventions, and only its struct is
encoded. Without that column the whole row is the value. Then a column whose name also means
something to Kafka is refused, since its meaning is ambiguous.

The key is always a list of columns. As text it is one column, unchanged or as its text; as JSON or
Avro it is a record of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import pyarrow as pa

from sparkonce.errors import ConfigurationError
from sparkonce.sinks.kafka.rows.conventions import CONVENTION, is_text
from sparkonce.sinks.spark_sql import quoted

ValueFormat: TypeAlias = Literal["json", "avro"]
KeyFormat: TypeAlias = Literal["text", "json", "avro"]

_VALUE_FORMATS: Final = ("json", "avro")
_KEY_FORMATS: Final = ("text", "json", "avro")


@dataclass(frozen=True, slots=True)
class Layout:
    """Which columns make key and value, and which of these Spark encodes.

    Avro is encoded on the executors, so Spark leaves its columns unchanged.

    Attributes:
        key: if the whole row is the value: the columns that make the key; None for no key.
        key_format: None means "text" for the columns of `key`, and leaves a column `key` unchanged.
        value_format: None leaves the column `value` unchanged.

    Raises:
        ConfigurationError: the settings contradict each other.
    """

    key: tuple[str, ...] | None
    key_format: KeyFormat | None
    value_format: ValueFormat | None

    def __post_init__(self) -> None:
        _check_format("key", self.key_format, _KEY_FORMATS)
        _check_format("value", self.value_format, _VALUE_FORMATS)
        if self.key is None:
            return
        if not self.key or not all(isinstance(name, str) and name for name in self.key):
            raise ConfigurationError(
                f"key={list(self.key)!r}: give a column's name, or a list of names"
            )
        if self.value_format is None:
            raise ConfigurationError(
                f"key={list(self.key)!r} needs value_format=, which makes the value from the whole "
                "row; without value_format= the key is the column 'key'"
            )
        if len(self.key) > 1 and self.key_format in {None, "text"}:
            raise ConfigurationError(
                f"key={list(self.key)!r} cannot be text, since text holds one column: set "
                "key_format='json' or 'avro', which write a record of the columns, or make one "
                "column of them with select="
            )

    def __call__(self, schema: pa.Schema, row: str) -> list[str]:
        """SQL expressions for the columns that Kafka gets, made from those in the struct `row`.

        Raises:
            ConfigurationError: a column is missing, ambiguous, or has a type that does not fit.
        """
        for name in schema.names:
            if schema.names.count(name) > 1:
                raise ConfigurationError(f"the column {name!r} exists twice; drop one")
        return (
            self._conventions(schema, row) if "value" in schema.names else self._rows(schema, row)
        )

    def _conventions(self, schema: pa.Schema, row: str) -> list[str]:
        if self.key is not None:
            raise ConfigurationError(
                f"key={list(self.key)!r} is for whole rows, but there is a column 'value', which "
                "is then the value: name the key's column 'key', or rename the column 'value'"
            )
        if self.key_format is not None and "key" not in schema.names:
            raise ConfigurationError(
                f"key_format={self.key_format!r} needs a column 'key', and there is no such column"
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
                "from the whole row"
            )
        for name in schema.names:
            if name in CONVENTION:
                also = "" if self.key is None else ", '… AS key'"
                without = "" if self.key is None else " in place of key="
                raise ConfigurationError(
                    f"the column {name!r} can be data or the message's {name}: to send it as data, "
                    f"set select=['struct(*) AS value'{also}]{without}; to make it the message's, "
                    f"put the data into a struct: select=['struct(…) AS value', {name!r}{also}]"
                    f"{without}"
                )
        if self.key is None and self.key_format is not None:
            raise ConfigurationError(
                f"key_format={self.key_format!r} needs key=, the key's columns"
            )
        value = f"{_encoded(row, 'value', pa.struct(list(schema)), self.value_format)} AS value"
        key = [] if self.key is None else [f"{self._key(self.key, schema, row)} AS key"]
        return [*key, value]

    def _key(self, names: tuple[str, ...], schema: pa.Schema, row: str) -> str:
        for name in names:
            if name not in schema.names:
                raise ConfigurationError(
                    f"key={name!r}: there is no such column; there are {', '.join(schema.names)}"
                )
        columns = [f"{row}.{quoted(name)}" for name in names]
        if self.key_format in {None, "text"}:
            (name,), (column,) = names, columns
            return _text(column, name, schema.field(name).type)
        record = pa.struct([schema.field(name) for name in names])
        return _encoded(f"struct({', '.join(columns)})", "key", record, self.key_format)


def _check_format(setting: str, chosen: object, known: tuple[str, ...]) -> None:
    if chosen is not None and chosen not in known:
        raise ConfigurationError(
            f"{setting}_format={chosen!r}: choose one of {', '.join(map(repr, known))}, or omit it"
        )


def _encoded(column: str, name: str, kind: pa.DataType, chosen: KeyFormat | None) -> str:
    if chosen == "avro":
        return column
    if chosen == "text":
        return _text(column, name, kind)
    if not pa.types.is_nested(kind):
        raise ConfigurationError(
            f"the column {name!r} is {kind}; JSON is made from a struct, an array or a map: make "
            f"it struct(…), or omit {name}_format="
        )
    return f"to_json({column})"


def _text(column: str, name: str, kind: pa.DataType) -> str:
    if is_text(kind):
        return column
    if _has_one_text(kind):
        return f"string({column})"
    raise ConfigurationError(
        f"the column {name!r} is {kind}, whose text as a key is not the same under all of Spark's "
        "settings: set key_format='json' or 'avro', or cast the column to string"
    )


def _has_one_text(kind: pa.DataType) -> bool:
    """Whether Spark's text of a value depends on no setting.

    A time's text depends on the session's zone, a decimal's on spark.sql.ansi.enabled.
    """
    return pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_date(kind)
