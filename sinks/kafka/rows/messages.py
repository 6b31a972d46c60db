"""Arrow rows in librdkafka's form: an array of addresses and lengths, without a copy.

    value, key ──► offsets + address of their bytes ──► one rd_kafka_message_t per row
    partition, headers, timestamp ──► rd_kafka_vu_t's as well, for rows that are sent one by one

A string is sent as the UTF-8 bytes that Arrow holds; it is never decoded. The rows' own buffers
must live until the messages are queued.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkonce.sinks.kafka.rows.conventions import TOPIC_NAMES, RowError, is_topic_name, is_wide

Header: TypeAlias = tuple[bytes, bytes | None]

COPY: Final = 0x2
"""RD_KAFKA_MSG_F_COPY."""

_MESSAGE: Final = np.dtype(
    [
        ("err", np.int32),
        ("rkt", np.uintp),
        ("partition", np.int32),
        ("payload", np.uintp),
        ("len", np.uintp),
        ("key", np.uintp),
        ("key_len", np.uintp),
        ("offset", np.int64),
        ("_private", np.uintp),
    ],
    align=True,
)
"""rd_kafka_message_t."""

_VALUE: Final = np.dtype(
    {
        "names": ["address", "size", "int64", "int32"],
        "formats": [np.uintp, np.uintp, np.int64, np.int32],
        "offsets": [0, np.dtype(np.uintp).itemsize, 0, 0],
        "itemsize": 64,
    },
    align=True,
)
_ITEM: Final = np.dtype([("kind", np.int32), ("value", _VALUE)], align=True)
"""rd_kafka_vu_t: which value, and a union of them."""

_TOPIC, _PARTITION, _PAYLOAD, _KEY, _FLAGS, _TIMESTAMP, _HEADERS = range(7)
"""The position of each value in a message that is sent individually."""
_KINDS: Final = (2, 3, 4, 5, 7, 8, 10)
"""Their RD_KAFKA_VTYPE_…."""

HEADERS_AT: Final = _HEADERS * _ITEM.itemsize + _ITEM.itemsize - _VALUE.itemsize
"""The offset of the headers' address in a row of `values`, in bytes."""

_EMPTY: Final = ctypes.create_string_buffer(1)
"""The address of a value without bytes; no address means null."""


@dataclass(frozen=True)
class Messages:
    """Rows of one topic.

    Attributes:
        rows: `rd_kafka_message_t`s.
        source: holds the bytes that they point to.
        are_plain: whether they have only keys and values. Only such rows may be sent together.
            With RD_KAFKA_MSG_F_PARTITION librdkafka stalls the transaction if the topic is new to
            it, since it adds partition -1. And it forever keeps a row for a partition that does not
            exist, so that an abort waits for that row.
        timestamps: in milliseconds, 0 for now; None where no row has one.
        headers: of each row; None where no row has any.
    """

    rows: np.ndarray[Any, Any]
    source: pa.RecordBatch
    are_plain: bool = True
    timestamps: np.ndarray[Any, Any] | None = None
    headers: list[Sequence[Header]] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def values(self, topic: int) -> np.ndarray[Any, Any]:
        """The rows in `produceva`'s form: a fixed number of `rd_kafka_vu_t`s for each."""
        self._values["value"]["address"][:, _TOPIC] = topic
        return self._values

    @cached_property  # needed repeatedly while the queue is full
    def _values(self) -> np.ndarray[Any, Any]:
        values = np.zeros((len(self.rows), len(_KINDS)), _ITEM)
        values["kind"] = _KINDS
        value = values["value"]
        value["int32"][:, _PARTITION] = self.rows["partition"]
        value["address"][:, _PAYLOAD] = self.rows["payload"]
        value["size"][:, _PAYLOAD] = self.rows["len"]
        value["address"][:, _KEY] = self.rows["key"]
        value["size"][:, _KEY] = self.rows["key_len"]
        value["int32"][:, _FLAGS] = COPY
        if self.timestamps is not None:
            value["int64"][:, _TIMESTAMP] = self.timestamps
        return values

    def take(self, numbers: np.ndarray[Any, Any]) -> Messages:
        return Messages(
            self.rows[numbers],
            self.source,
            self.are_plain,
            None if self.timestamps is None else self.timestamps[numbers],
            None if self.headers is None else [self.headers[n] for n in numbers.tolist()],
        )


def messages_by_topic(batch: pa.RecordBatch, topic: str | None) -> Iterator[tuple[str, Messages]]:
    """The rows of a batch in Spark's conventions as messages, those of each topic in their order.

    Rows that name no topic go to `topic`.

    Raises:
        RowError: a row has no topic, or has a partition, header or time that Kafka cannot hold.
    """
    messages = _messages(batch)
    if "topic" not in batch.schema.names:
        if topic is None:
            raise RowError("the rows have no column 'topic', and the sink has no topic of its own")
        yield topic, messages
        return
    column = batch.column("topic").cast(pa.large_string())
    named: Any = column.fill_null("" if topic is None else topic).dictionary_encode()
    numbers = named.indices.to_numpy()
    for number, name in enumerate(named.dictionary.to_pylist()):
        if not name:
            raise RowError(
                "the column 'topic' is null or empty in a row, and the sink has no topic of its "
                "own; fill the column, or give KafkaSink a topic"
            )
        if not is_topic_name(name):
            raise RowError(f"the column 'topic' holds {name!r}, and {TOPIC_NAMES}")
        yield name, messages.take(np.flatnonzero(numbers == number))


def _messages(batch: pa.RecordBatch) -> Messages:
    names = batch.schema.names
    rows = np.zeros(batch.num_rows, _MESSAGE)
    rows["partition"] = -1
    _point(rows, "payload", "len", batch.column("value"))
    if "key" in names:
        _point(rows, "key", "key_len", batch.column("key"))
    if "partition" in names:
        rows["partition"] = _partitions(batch.column("partition"))
    return Messages(
        rows,
        batch,
        are_plain=not {"partition", "timestamp", "headers"}.intersection(names),
        timestamps=_timestamps(batch.column("timestamp")) if "timestamp" in names else None,
        headers=_headers(batch.column("headers")) if "headers" in names else None,
    )


def _point(rows: np.ndarray[Any, Any], where: str, size: str, column: pa.Array[Any]) -> None:
    """Set the address and length of each row's bytes; no address where the column is null."""
    buffers: list[Any] = column.buffers()
    _, offsets, data = buffers
    if offsets is None or not len(column):
        return
    width: Any = np.int64 if is_wide(column.type) else np.int32
    first = column.offset * np.dtype(width).itemsize
    ends = np.frombuffer(offsets, width, len(column) + 1, first)
    base = ctypes.addressof(_EMPTY) if data is None or not data.size else data.address
    rows[where] = ends[:-1].astype(np.uintp) + np.uintp(base)
    rows[size] = np.diff(ends)
    if column.null_count:
        is_null = column.is_null().to_numpy(zero_copy_only=False)
        rows[where][is_null] = 0
        rows[size][is_null] = 0


def _partitions(column: pa.Array[Any]) -> np.ndarray[Any, Any]:
    lowest = pc.min(column).as_py()
    if lowest is not None and lowest < 0:
        raise RowError(f"the column 'partition' holds {lowest}; partitions start at 0")
    return column.cast(pa.int32()).fill_null(-1).to_numpy(zero_copy_only=False)


def _timestamps(column: pa.Array[Any]) -> np.ndarray[Any, Any]:
    in_ms = column.cast(pa.timestamp("ms", tz=column.type.tz), safe=False).cast(pa.int64())
    first = pc.min(in_ms).as_py()
    if first is not None and first <= 0:
        raise RowError(
            "the column 'timestamp' holds a time at or before 1970-01-01T00:00:00Z, which "
            "Kafka's producer reads as 'now'"
        )
    return in_ms.fill_null(0).to_numpy(zero_copy_only=False)


def _headers(column: pa.Array[Any]) -> list[Sequence[Header]]:
    found: Any = column
    items = found.flatten()
    names, values = (items.flatten()[items.type.get_field_index(n)] for n in ("key", "value"))
    if items.null_count or names.null_count:
        raise RowError("the column 'headers' holds a header without a key")
    if pc.any(pc.match_substring(names, "\0")).as_py():
        raise RowError("the column 'headers' holds a key with a NUL, where Kafka would cut it off")
    pairs = iter(zip(_as_bytes(names), _as_bytes(values), strict=True))
    counts = pc.list_value_length(found).fill_null(0).to_pylist()
    return [tuple(islice(pairs, count)) for count in counts]


def _as_bytes(column: pa.Array[Any]) -> list[Any]:
    return column.cast(pa.large_binary() if is_wide(column.type) else pa.binary()).to_pylist()
