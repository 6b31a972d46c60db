"""Spark's column conventions for Kafka, and Arrow rows as messages.

    value      string | binary   required; null makes a tombstone
    key        string | binary   optional
    topic      string            optional; overrides the sink's topic where it is not null
    partition  int               optional; null leaves the choice to the partitioner
    headers    array<struct<key: string, value: binary>>   optional
    timestamp  timestamp         optional; null means now

A string is sent as the UTF-8 bytes that Arrow holds: it is never decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import pyarrow as pa

from sparkonce.errors import ConfigurationError

Message: TypeAlias = dict[str, Any]
"""Arguments of one `Producer.produce`."""

ROW_BY_ROW: Final = frozenset({"partition", "headers", "timestamp"})
"""Columns that confluent-kafka's `produce_batch` does not take. It silently ignores a partition."""


class RowError(ValueError):
    """A row that Kafka cannot hold; its message says why, without the row's content."""


def is_text(data_type: pa.DataType) -> bool:
    """Whether a column of this type can be a key or value as it is."""
    types = pa.types
    return (
        types.is_string(data_type)
        or types.is_large_string(data_type)
        or types.is_binary(data_type)
        or types.is_large_binary(data_type)
    )


def is_string(data_type: pa.DataType) -> bool:
    """Whether a column of this type holds text."""
    return pa.types.is_string(data_type) or pa.types.is_large_string(data_type)


def _is_partition(data_type: pa.DataType) -> bool:
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
    "partition": (_is_partition, "int"),
    "headers": (_is_headers, "array<struct<key:string,value:binary>>"),
    "timestamp": (_is_timestamp, "timestamp (with time zone, as Spark's TimestampType has it)"),
}


CONVENTION: Final = frozenset(_COLUMNS)
"""The names of the columns that Kafka has a place for."""

_SOURCE_ONLY: Final = frozenset({"offset", "timestampType"})
_SOURCE_ADVICE: Final = (
    "; of a Kafka source keep key and value only (and headers if they are wanted): "
    "select=['key', 'value']"
)


def check_schema(schema: pa.Schema, topic: str | None) -> None:
    """Refuse rows that are not in Spark's column conventions for Kafka.

    Args:
        schema: of the rows.
        topic: the sink's own topic; without one the rows need the column `topic`.

    Raises:
        ConfigurationError: naming the column, and what to do.
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
            raise ConfigurationError(f"the column {name!r} is there twice; drop one")
        fits, wanted = _COLUMNS[name]
        found = schema.field(name).type
        if not fits(found):
            raise ConfigurationError(
                f"the column {name!r} is {found}, and Kafka needs {wanted}; cast it in the query "
                "or with select="
            )
    if "value" not in schema.names:
        raise ConfigurationError(
            "the column 'value' is missing; make it of the whole row with value_format=, or in the "
            "query or with select=, for example to_json(struct(*)) AS value"
        )
    if topic is None and "topic" not in schema.names:
        raise ConfigurationError(
            "no topic: give the sink one, KafkaSink('orders', …), or the rows a column 'topic'"
        )


def messages_by_topic(
    batch: pa.RecordBatch, topic: str | None, used: list[Message] | None = None
) -> Iterator[tuple[str, list[Message]]]:
    """The rows as messages, each topic's in the order of the rows.

    Args:
        batch: in the column conventions.
        topic: for rows that name none.
        used: messages of batches before, which are sent, to be filled anew; it grows as needed.

    Raises:
        RowError: a row has no topic, or a partition, header or time that Kafka cannot hold.
    """
    messages = _messages(batch, [] if used is None else used)
    if "topic" not in batch.schema.names:
        if topic is None:
            raise RowError("the rows have no column 'topic' and the sink has no topic of its own")
        yield topic, messages
        return
    encoded = batch.column("topic").dictionary_encode()
    names: list[str | None] = encoded.dictionary.to_pylist()
    grouped: dict[str, list[Message]] = {}
    for index, message in zip(encoded.indices.to_pylist(), messages, strict=True):
        name = topic if index is None else names[index]
        if not name:
            raise RowError(
                "the column 'topic' is null or empty in a row and the sink has no topic of its "
                "own; fill the column, or give KafkaSink a topic"
            )
        grouped.setdefault(name, []).append(message)
    yield from grouped.items()


def _messages(batch: pa.RecordBatch, used: list[Message]) -> list[Message]:
    names = batch.schema.names
    values = binary_values(batch.column("value"))
    # The two shapes of nearly every job, without a loop over columns for each row, and with
    # messages that are filled anew: to make them takes as long as all else that is done here.
    if not ROW_BY_ROW.intersection(names):
        if used and ("key" in used[0]) != ("key" in names):
            used.clear()
        used.extend({} for _ in range(len(values) - len(used)))
        messages = used[: len(values)]
        if "key" not in names:
            for message, value in zip(messages, values, strict=True):
                message["value"] = value
            return messages
        keys = binary_values(batch.column("key"))
        for message, value, key in zip(messages, values, keys, strict=True):
            message["value"] = value
            message["key"] = key
        return messages
    messages = [{"value": value} for value in values]
    for name, read in _READERS.items():
        if name in names:
            for message, item in zip(messages, read(batch.column(name)), strict=True):
                if item is not None:
                    message[name] = item
    return messages


def binary_values(column: pa.Array[Any]) -> list[bytes | None]:
    """The bytes of each row of a string or binary column; None where it is null."""
    wide = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
    values: list[bytes | None] = column.cast(pa.large_binary() if wide else pa.binary()).to_pylist()
    return values


def _partitions(column: pa.Array[Any]) -> list[int | None]:
    partitions: list[int | None] = column.to_pylist()
    for partition in partitions:
        if partition is not None and partition < 0:
            raise RowError(f"the column 'partition' holds {partition}; partitions start at 0")
    return partitions


def _headers(column: pa.Array[Any]) -> list[list[tuple[str, bytes | None]] | None]:
    rows = column.to_pylist()
    for row in rows:
        if row is not None and any(h is None or h["key"] is None for h in row):
            raise RowError("the column 'headers' holds a header without a key")
        if row is not None and any("\0" in h["key"] for h in row):
            raise RowError("the column 'headers' holds a key with a NUL, at which it would end")
    # As bytes, since confluent-kafka ends text at a NUL.
    return [
        None if row is None else [(h["key"], _as_bytes(h["value"])) for h in row] for row in rows
    ]


def _as_bytes(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


def _timestamps(column: pa.Array[Any]) -> list[int | None]:
    in_ms = column.cast(pa.timestamp("ms", tz=column.type.tz), safe=False).cast(pa.int64())
    times: list[int | None] = in_ms.to_pylist()
    for time in times:
        if time is not None and time <= 0:
            raise RowError(
                "the column 'timestamp' holds a time at or before 1970-01-01T00:00:00Z, which "
                "Kafka's producer takes for 'now'"
            )
    return times


_READERS: Final[dict[str, Callable[[pa.Array[Any]], list[Any]]]] = {
    "key": binary_values,
    "partition": _partitions,
    "headers": _headers,
    "timestamp": _timestamps,
}
