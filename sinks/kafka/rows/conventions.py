"""Spark's column conventions for Kafka.

value      string | binary   required; null makes a tombstone
key        string | binary   optional
topic      string            optional; overrides the sink's topic where it is not null
partition  int               optional; null leaves the choice to the partitioner
headers    array<struct<key: string, value: binary>>   optional
timestamp  timestamp         optional; null means now
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import pyarrow as pa

from sparkonce.errors import ConfigurationError

TOPIC_NAMES: Final = "a topic's name has 1 to 249 of the characters A-Z a-z 0-9 . _ and -"
_TOPIC: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")


class RowError(ValueError):
    """A row that Kafka cannot hold; the message says why, without the row's content."""


def is_topic_name(name: str) -> bool:
    return _TOPIC.fullmatch(name) is not None and name not in {".", ".."}


def check_topic_name(topic: str) -> None:
    """Refuse a topic name that no broker accepts.

    Raises:
        ConfigurationError: naming the topic.
    """
    if not is_topic_name(topic):
        raise ConfigurationError(f"topic={topic!r}: {TOPIC_NAMES}")


def is_text(data_type: pa.DataType) -> bool:
    """Whether a column of this type can be a key or a value unchanged."""
    return is_string(data_type) or is_binary(data_type)


def is_wide(data_type: pa.DataType) -> bool:
    """Whether a column of text or bytes has one of Arrow's large types, with 64-bit offsets."""
    return pa.types.is_large_string(data_type) or pa.types.is_large_binary(data_type)


def is_string(data_type: pa.DataType) -> bool:
    """Whether a column of this type holds text."""
    return pa.types.is_string(data_type) or pa.types.is_large_string(data_type)


def is_binary(data_type: pa.DataType) -> bool:
    """Whether a column of this type holds bytes."""
    return pa.types.is_binary(data_type) or pa.types.is_large_binary(data_type)


def is_int(data_type: pa.DataType) -> bool:
    """Whether an `int` holds every value of a column of this type."""
    return pa.types.is_signed_integer(data_type) and not pa.types.is_int64(data_type)


def _is_headers(data_type: pa.DataType) -> bool:
    if not (pa.types.is_list(data_type) or pa.types.is_large_list(data_type)):
        return False
    item = data_type.value_type
    if not pa.types.is_struct(item) or {item.field(i).name for i in range(item.num_fields)} != {
        "key",
        "value",
    }:
        return False
    return is_string(item.field("key").type) and is_text(item.field("value").type)


def _is_timestamp(data_type: pa.DataType) -> bool:
    return pa.types.is_timestamp(data_type) and data_type.tz is not None


_COLUMNS: Final[dict[str, tuple[Callable[[pa.DataType], bool], str]]] = {
    "value": (is_text, "string or binary (to_json makes a string of a struct)"),
    "key": (is_text, "string or binary"),
    "topic": (is_string, "string"),
    "partition": (is_int, "int"),
    "headers": (_is_headers, "array<struct<key:string,value:binary>>"),
    "timestamp": (_is_timestamp, "timestamp (with time zone, as Spark's TimestampType has it)"),
}

CONVENTION: Final = frozenset(_COLUMNS)
"""The names of the columns that have a place in a Kafka message."""

_SOURCE_ONLY: Final = frozenset({"offset", "timestampType"})
_SOURCE_ADVICE: Final = (
    "; from a Kafka source keep only key and value (and headers if you want them): "
    "select=['key', 'value']"
)


def check_schema(schema: pa.Schema, topic: str | None) -> None:
    """Refuse rows that do not follow Spark's column conventions for Kafka.

    If the sink has no `topic` of its own, the rows need that column.

    Raises:
        ConfigurationError: naming the column and the next step.
    """
    for name in schema.names:
        if name not in _COLUMNS:
            raise ConfigurationError(
                f"the Kafka sink has no use for the column {name!r}; it takes "
                f"{', '.join(_COLUMNS)}. Put the row into one value, with value_format='json' or, "
                "for example, select=['to_json(struct(*)) AS value']"
                + (_SOURCE_ADVICE if name in _SOURCE_ONLY else "")
            )
        if schema.names.count(name) > 1:
            raise ConfigurationError(f"the column {name!r} exists twice; drop one")
        fits, wanted = _COLUMNS[name]
        found = schema.field(name).type
        if not fits(found):
            raise ConfigurationError(
                f"the column {name!r} is {found}, and Kafka needs {wanted}; cast it in the query "
                "or with select="
            )
    if "value" not in schema.names:
        raise ConfigurationError(
            "the column 'value' is missing; make it from the whole row with value_format=, or in "
            "the query or with select=, for example to_json(struct(*)) AS value"
        )
    if topic is None and "topic" not in schema.names:
        raise ConfigurationError(
            "no topic: name one in the sink, KafkaSink('orders', …), or give the rows a column "
            "'topic'"
        )
