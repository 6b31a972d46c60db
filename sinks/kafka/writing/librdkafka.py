"""librdkafka's transactional producer for whole record batches, through its C API.

    Arrow buffers ──► addresses and lengths (`messages`) ──► rd_kafka_produce_batch ──► brokers
    rd_kafka_queue_poll ◄── events: deliveries by request, statistics, errors, logs, token requests

confluent-kafka's own `Producer` takes rows as Python objects: a dictionary, a lookup, an allocation
and a report for each, which is more work than librdkafka's own. Here no row is a Python object, and
deliveries are counted by request.

A producer belongs to one thread at a time. There are no callbacks: `poll` takes the events.
"""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_void_p
from itertools import chain, islice
from typing import Any, Final, Protocol

from confluent_kafka import KafkaError, KafkaException

from sparkonce.sinks.kafka.connecting.oauth import Token
from sparkonce.sinks.kafka.connecting.refused import RefusedError
from sparkonce.sinks.kafka.rows.messages import COPY, HEADERS_AT, Header, Messages
from sparkonce.sinks.kafka.writing.c_api import Message, Metadata, rd
from sparkonce.sinks.kafka.writing.handle import (
    DELIVERY,
    ERROR,
    LOG,
    OK,
    STATISTICS,
    TEXT_BYTES,
    TOKEN_REFRESH,
    Settings,
    check,
    destroy_producer,
    invalid,
    log_event,
    ms,
    new_producer,
    text_of,
    to_exception,
    without_token,
)

_UNASSIGNED: Final = -1
"""The partition of rows for which librdkafka chooses one."""

_PURGE: Final = 0x1 | 0x2
"""Messages in the queue, and messages in flight."""

_FLUSH_MS: Final = 1
"""For this long librdkafka's threads ignore `linger.ms`. Messages that can only be sent later, such
as rows whose partition is being added to the transaction, wait for the rest of `linger.ms`."""

_BETWEEN_FLUSHES_S: Final = 0.001
_POLL_S: Final = 0.01

_TOKEN_S: Final = 10.0
"""How long librdkafka may take before it asks for its first token."""


class Listener(Protocol):
    """Receives librdkafka's events."""

    def on_delivered(self, topic: str, partition: int, count: int) -> None: ...
    def on_failure(self, error: KafkaError, topic: str, partition: int) -> None: ...
    def on_statistics(self, statistics: str) -> None: ...
    def on_error(self, error: KafkaError) -> None: ...


class TransactionalProducer:
    """One producer of librdkafka, which lives as long as something refers to it.

    Destroying it neither aborts nor commits: an open transaction stays open. The listener receives
    its events, during calls of this object's methods.

    Raises:
        KafkaException: librdkafka refuses a setting, or there is no token.
    """

    def __init__(self, settings: Settings, listener: Listener) -> None:
        self._listener = listener
        self._token_callback: Any = settings.get("oauth_cb")
        self._has_token = False
        self._unreported = 0
        self._topics: dict[str, int] = {}
        self._handle = new_producer(settings, with_tokens=self._token_callback is not None)
        self._queue: int = rd.queue_get_main(self._handle)
        destroy = weakref.finalize(
            self, destroy_producer, os.getpid(), self._handle, self._queue, self._topics
        )
        destroy.atexit = False  # the threads end with the process
        try:
            if self._token_callback is not None:
                self._await_token()
        except BaseException:
            destroy()  # the error's traceback may keep this object alive
            raise

    def poll(self, timeout_s: float) -> None:
        """Take librdkafka's events; wait up to `timeout_s` for the first one."""
        timeout_ms = int(timeout_s * 1000)
        while event := rd.queue_poll(self._queue, timeout_ms):
            try:
                self._take(event)
            finally:
                rd.event_destroy(event)
            timeout_ms = 0

    def look(
        self, topic: str | None, timeout_s: float
    ) -> tuple[str | None, Mapping[str, KafkaError]]:
        """Ask a broker for the cluster's id, if it has one, and for topics with an error.

        Without a `topic` the request is about all topics of the cluster.

        Raises:
            KafkaException: no broker responded.
        """
        deadline = time.monotonic() + timeout_s
        only = None if topic is None else self._topic(topic)
        found = POINTER(Metadata)()
        code = rd.metadata(self._handle, only is None, only, byref(found), ms(timeout_s))
        if code != OK:
            raise KafkaException(KafkaError(code))
        try:
            topics = found.contents.topics[: found.contents.topic_count]
            failed = {t.topic.decode(): KafkaError(t.error) for t in topics if t.error != OK}
        finally:
            rd.metadata_destroy(found)
        text = rd.clusterid(self._handle, ms(deadline - time.monotonic()))
        if text is None:
            return None, failed
        try:
            return ctypes.string_at(text).decode(), failed
        finally:
            rd.mem_free(self._handle, text)

    # -- rows --------------------------------------------------------------------------------------

    def send(self, topic: str, messages: Messages, start: int = 0) -> int:
        """Queue copies of the messages from number `start` on, in their order.

        Returns:
            How many of the messages are queued now: all, unless the queue is full.

        Raises:
            KafkaException: librdkafka refuses one of them; others may be queued.
        """
        if messages.are_plain:
            return self._send_together(topic, messages, start)
        return self._send_each(topic, messages, start)

    def flush(self, timeout_s: float) -> int:
        """Send the queued messages, and wait until each is reported.

        Returns:
            How many messages are unreported after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        self.poll(0)
        while self._unreported and (left_s := deadline - time.monotonic()) > 0:
            rd.flush(self._handle, _FLUSH_MS)
            self.poll(min(left_s, _BETWEEN_FLUSHES_S))
        return self._unreported

    # -- transactions ------------------------------------------------------------------------------

    def init_transactions(self, timeout_s: float) -> None:
        check(rd.init_transactions(self._handle, ms(timeout_s)))

    def begin_transaction(self) -> None:
        check(rd.begin_transaction(self._handle))

    def abort_transaction(self, timeout_s: float) -> None:
        # librdkafka waits until all rows are reported, and does not poll for the reports itself.
        rd.purge(self._handle, _PURGE)
        self.flush(timeout_s)
        check(rd.abort_transaction(self._handle, ms(timeout_s)))

    def send_offsets(
        self, group: str, offset: int, metadata: str, topics: Sequence[str], timeout_s: float
    ) -> None:
        """Commit an offset of partition 0 of each of `topics` as part of the transaction."""
        with _offsets(offset, metadata.encode(), topics) as offsets, _group(group) as member:
            check(rd.send_offsets_to_transaction(self._handle, offsets, member, ms(timeout_s)))

    def fatal_error(self) -> KafkaError | None:
        """The fatal error after which the producer can do nothing, if there is one."""
        text = ctypes.create_string_buffer(TEXT_BYTES)
        code = rd.fatal_error(self._handle, text, TEXT_BYTES)
        return KafkaError(code, text_of(text.value), fatal=True) if code != OK else None

    # -- helpers -----------------------------------------------------------------------------------

    def _take(self, event: int) -> None:
        kind = rd.event_type(event)
        if kind == DELIVERY:
            self._take_deliveries(event)
        elif kind == STATISTICS:
            self._listener.on_statistics(text_of(rd.event_stats(event)))
        elif kind == ERROR:
            error = KafkaError(rd.event_error(event), text_of(rd.event_error_string(event)))
            self._listener.on_error(error)
        elif kind == LOG:
            log_event(event)
        elif kind == TOKEN_REFRESH:
            self._refresh_token(rd.event_config_string(event))

    def _take_deliveries(self, event: int) -> None:
        """Count an event's rows: at least one, all of the same partition."""
        count, code = rd.event_message_count(event), rd.event_error(event)
        self._unreported -= count
        messages = _messages_of(event)
        # If a request succeeded but single rows failed, at most one of its rows has no error. So
        # two rows show whether all were delivered.
        seen = list(islice(messages, 2))
        topic = text_of(rd.topic_name(seen[0].topic))
        if code == OK and not any(message.error for message in seen):
            self._listener.on_delivered(topic, seen[0].partition, count)
            return
        for message in chain(seen, messages):
            error = KafkaError(message.error or code or KafkaError._FAIL)  # noqa: SLF001
            self._listener.on_failure(error, topic, message.partition)

    def _topic(self, name: str) -> int:
        if name not in self._topics:
            topic = None if "\0" in name else rd.topic_new(self._handle, name.encode(), None)
            if topic is None:
                raise invalid(f"{name!r} is not a topic name")
            self._topics[name] = topic
        return self._topics[name]

    def _send_together(self, topic: str, messages: Messages, start: int) -> int:
        rows = messages.rows[start:]
        address = rows.ctypes.data
        sent: int = rd.produce_batch(self._topic(topic), _UNASSIGNED, COPY, address, len(rows))
        self._unreported += sent
        if sent == len(rows):
            return start + sent
        refused = set(rows["err"].tolist()) - {OK, KafkaError._QUEUE_FULL}  # noqa: SLF001
        if refused:
            raise KafkaException(KafkaError(refused.pop()))
        if rows["err"][:sent].any():
            raise KafkaException(
                KafkaError(KafkaError._FAIL, "librdkafka queued messages out of order")  # noqa: SLF001
            )
        return start + sent

    def _send_each(self, topic: str, messages: Messages, start: int) -> int:
        values = messages.values(self._topic(topic))
        width, items = values.strides[0], values.shape[1]
        produce, handle, headers = rd.produceva, self._handle, messages.headers
        row = values.ctypes.data + start * width
        for number in range(start, len(values)):
            pairs = None
            if headers is not None and headers[number]:
                pairs = _headers(headers[number])
                c_void_p.from_address(row + HEADERS_AT).value = pairs
            error = produce(handle, row, items)
            if error is not None:
                if pairs is not None:  # librdkafka owns them only once it takes the message
                    rd.headers_destroy(pairs)
                failure = to_exception(error)
                if failure.args[0].code() == KafkaError._QUEUE_FULL:  # noqa: SLF001 - its name
                    return number
                raise failure
            self._unreported += 1
            row += width
        return len(values)

    # -- tokens ------------------------------------------------------------------------------------

    def _await_token(self) -> None:
        deadline = time.monotonic() + _TOKEN_S
        while not self._has_token and time.monotonic() < deadline:
            self.poll(_POLL_S)
        if not self._has_token:
            raise without_token("librdkafka did not ask for a token")

    def _refresh_token(self, argument: bytes | None) -> None:
        failure = ctypes.create_string_buffer(TEXT_BYTES)
        try:
            token: Token = self._token_callback(None if argument is None else argument.decode())
        except RefusedError as error:
            reason = str(error)
        else:
            pairs = [text.encode() for pair in token.extensions.items() for text in pair]
            code = rd.oauthbearer_set_token(
                *(self._handle, token.text.encode(), int(token.expires_at * 1000)),
                *(token.principal.encode(), (c_char_p * len(pairs))(*pairs), len(pairs)),
                *(failure, TEXT_BYTES),  # never shown, since this text repeats the token
            )
            if code == OK:
                self._has_token = True
                return
            reason = "librdkafka refuses the token, its principal or its extensions"
        rd.oauthbearer_set_token_failure(self._handle, reason.encode())
        if not self._has_token:
            raise without_token(reason)


def _messages_of(event: int) -> Iterator[Message]:
    while message := rd.event_message_next(event):
        yield message.contents


@contextmanager
def _offsets(offset: int, metadata: bytes, topics: Sequence[str]) -> Iterator[int]:
    partitions = rd.topic_partition_list_new(len(topics))
    try:
        for topic in topics:
            partition = rd.topic_partition_list_add(partitions, topic.encode(), 0).contents
            partition.offset = offset
            # The list frees this memory.
            partition.metadata = rd.mem_malloc(None, len(metadata))
            ctypes.memmove(partition.metadata, metadata, len(metadata))
            partition.metadata_size = len(metadata)
        yield partitions
    finally:
        rd.topic_partition_list_destroy(partitions)


@contextmanager
def _group(name: str) -> Iterator[int]:
    member = rd.consumer_group_metadata_new(name.encode())
    try:
        yield member
    finally:
        rd.consumer_group_metadata_destroy(member)


def _headers(pairs: Sequence[Header]) -> int:
    headers: int = rd.headers_new(len(pairs))
    for name, value in pairs:
        rd.header_add(headers, name, len(name), value, 0 if value is None else len(value))
    return headers
