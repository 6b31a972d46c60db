"""librdkafka's transactional producer for whole record batches, by its own C API.

    Arrow buffers ──► addresses and lengths (`messages`) ──► rd_kafka_produce_batch ──► brokers
    rd_kafka_queue_poll ◄── deliveries by request, statistics, errors, wishes for a token

confluent-kafka brings the library. Its own `Producer` takes rows as Python objects: a dictionary, a
lookup, an allocation and a report for each, which is more work than librdkafka's. Here no row is an
object of Python, and what was delivered is counted by requests.

Called are functions of librdkafka's public header `rdkafka.h` only, whose binary interface it keeps
through all of its versions 1 and 2. A producer belongs to one thread at a time. There are no
callbacks: `poll` takes what librdkafka has to tell.
"""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_int32, c_int64, c_size_t, c_void_p
from itertools import chain, islice
from typing import Any, Final, Protocol

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException, cimpl

from sparkonce.sinks.kafka.access import RefusedError
from sparkonce.sinks.kafka.messages import COPY, HEADERS_AT, Header, Messages
from sparkonce.sinks.kafka.oauth import Token

Settings = Mapping[str, object]
"""By librdkafka's names; `oauth_cb` is a function."""

_PRODUCER: Final = 0
_OK: Final = 0
_UNASSIGNED: Final = -1
"""The partition of rows whose partition librdkafka is to choose."""

_PURGE: Final = 0x1 | 0x2
"""What waits in the queue, and what is on its way."""

_DELIVERY: Final = 0x1
_ERROR: Final = 0x8
_STATISTICS: Final = 0x40
_TOKEN_REFRESH: Final = 0x100

_FLUSH_MS: Final = 1
"""So long librdkafka's threads wait for no `linger.ms`; what may be sent only later waits for the
rest of it, as rows do whose partition is being added to the transaction."""

_BETWEEN_FLUSHES_S: Final = 0.001
_POLL_S: Final = 0.01

_TOKEN_S: Final = 10.0
"""How long librdkafka may take to ask for its first token."""

_TEXT_BYTES: Final = 512

_FIRST: Final = ("debug", "plugin.library.paths")
"""Settings that tell what others mean, to be set before them."""


class _Partition(Structure):
    """rd_kafka_topic_partition_t, up to what is set here."""

    _fields_ = (
        ("topic", c_char_p),
        ("partition", c_int32),
        ("offset", c_int64),
        ("metadata", c_void_p),
        ("metadata_size", c_size_t),
    )


class _Topic(Structure):
    """rd_kafka_metadata_topic."""

    _fields_ = (
        ("topic", c_char_p),
        ("partition_count", c_int),
        ("partitions", c_void_p),
        ("error", c_int),
    )


class _Metadata(Structure):
    """rd_kafka_metadata, up to what is read here."""

    _fields_ = (
        ("broker_count", c_int),
        ("brokers", c_void_p),
        ("topic_count", c_int),
        ("topics", POINTER(_Topic)),
    )


class _Message(Structure):
    """rd_kafka_message_t, up to what is read here."""

    _fields_ = (("error", c_int), ("topic", c_void_p), ("partition", c_int32))


_FUNCTIONS: Final[Mapping[str, tuple[Any, ...]]] = {
    "conf_new": (c_void_p,),
    "conf_set": (c_int, c_void_p, c_char_p, c_char_p, c_char_p, c_size_t),
    "conf_set_events": (None, c_void_p, c_int),
    "conf_destroy": (None, c_void_p),
    "new": (c_void_p, c_int, c_void_p, c_char_p, c_size_t),
    "destroy": (None, c_void_p),
    "fatal_error": (c_int, c_void_p, c_char_p, c_size_t),
    "mem_malloc": (c_void_p, c_void_p, c_size_t),
    "mem_free": (None, c_void_p, c_void_p),
    # what it has to tell
    "queue_get_main": (c_void_p, c_void_p),
    "queue_poll": (c_void_p, c_void_p, c_int),
    "queue_destroy": (None, c_void_p),
    "event_type": (c_int, c_void_p),
    "event_error": (c_int, c_void_p),
    "event_error_string": (c_char_p, c_void_p),
    "event_stats": (c_char_p, c_void_p),
    "event_config_string": (c_char_p, c_void_p),
    "event_message_count": (c_size_t, c_void_p),
    "event_message_next": (POINTER(_Message), c_void_p),
    "event_destroy": (None, c_void_p),
    # the cluster
    "metadata": (c_int, c_void_p, c_int, c_void_p, POINTER(POINTER(_Metadata)), c_int),
    "metadata_destroy": (None, POINTER(_Metadata)),
    "clusterid": (c_void_p, c_void_p, c_int),
    "oauthbearer_set_token": (
        *(c_int, c_void_p, c_char_p, c_int64, c_char_p),
        *(POINTER(c_char_p), c_size_t, c_char_p, c_size_t),
    ),
    "oauthbearer_set_token_failure": (c_int, c_void_p, c_char_p),
    # rows
    "topic_new": (c_void_p, c_void_p, c_char_p, c_void_p),
    "topic_name": (c_char_p, c_void_p),
    "topic_destroy": (None, c_void_p),
    "produce_batch": (c_int, c_void_p, c_int32, c_int, c_void_p, c_int),
    "produceva": (c_void_p, c_void_p, c_void_p, c_size_t),
    "headers_new": (c_void_p, c_size_t),
    "header_add": (c_int, c_void_p, c_char_p, c_int64, c_char_p, c_int64),
    "headers_destroy": (None, c_void_p),
    "flush": (c_int, c_void_p, c_int),
    "purge": (c_int, c_void_p, c_int),
    # transactions
    "init_transactions": (c_void_p, c_void_p, c_int),
    "begin_transaction": (c_void_p, c_void_p),
    "send_offsets_to_transaction": (c_void_p, c_void_p, c_void_p, c_void_p, c_int),
    "abort_transaction": (c_void_p, c_void_p, c_int),
    "consumer_group_metadata_new": (c_void_p, c_char_p),
    "consumer_group_metadata_destroy": (None, c_void_p),
    "topic_partition_list_new": (c_void_p, c_int),
    "topic_partition_list_add": (POINTER(_Partition), c_void_p, c_char_p, c_int32),
    "topic_partition_list_destroy": (None, c_void_p),
    "error_code": (c_int, c_void_p),
    "error_string": (c_char_p, c_void_p),
    "error_is_fatal": (c_int, c_void_p),
    "error_is_retriable": (c_int, c_void_p),
    "error_txn_requires_abort": (c_int, c_void_p),
    "error_destroy": (None, c_void_p),
}
"""What is called, without its `rd_kafka_`: the result and the arguments."""


class _Library:
    """The librdkafka that confluent-kafka was built with, one attribute a function."""

    def __init__(self) -> None:
        # A symbol is looked up in a library and in those that it was linked with.
        library = ctypes.CDLL(cimpl.__file__)
        for name, (result, *arguments) in _FUNCTIONS.items():
            function = getattr(library, f"rd_kafka_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(name)


_rd: Final = _Library()


class Listener(Protocol):
    """Who hears what librdkafka tells."""

    def on_delivered(self, topic: str, partition: int, count: int) -> None: ...
    def on_failure(self, error: KafkaError, topic: str, partition: int) -> None: ...
    def on_statistics(self, statistics: str) -> None: ...
    def on_error(self, error: KafkaError) -> None: ...


class TransactionalProducer:
    """One producer of librdkafka, which lives as long as somebody refers to it.

    Nothing of it is aborted or committed when it goes: a transaction that is open stays so.

    Args:
        settings: of librdkafka.
        listener: hears what it tells, from within the calls of this object.

    Raises:
        KafkaException: librdkafka refuses a setting, or there is no token.
    """

    def __init__(self, settings: Settings, listener: Listener) -> None:
        self._listener = listener
        self._token_callback: Any = settings.get("oauth_cb")
        self._has_token = False
        self._unreported = 0
        self._topics: dict[str, int] = {}
        self._handle = _new(settings, with_tokens=self._token_callback is not None)
        self._queue: int = _rd.queue_get_main(self._handle)
        destroy = weakref.finalize(
            self, _destroy, os.getpid(), self._handle, self._queue, self._topics
        )
        destroy.atexit = False  # the process's end ends its threads
        try:
            if self._token_callback is not None:
                self._await_token()
        except BaseException:
            destroy()  # the error refers to this object for as long as somebody keeps it
            raise

    def poll(self, timeout_s: float) -> None:
        """Take what librdkafka has to tell; wait for the first of it, so long at most."""
        timeout_ms = int(timeout_s * 1000)
        while event := _rd.queue_poll(self._queue, timeout_ms):
            try:
                self._take(event)
            finally:
                _rd.event_destroy(event)
            timeout_ms = 0

    def look(
        self, topic: str | None, timeout_s: float
    ) -> tuple[str | None, Mapping[str, KafkaError]]:
        """Ask a broker for the cluster's id, if it has one, and which topics have an error.

        Args:
            topic: the one to ask for; None: all of the cluster.
            timeout_s: how long to wait.

        Raises:
            KafkaException: nobody answered.
        """
        deadline = time.monotonic() + timeout_s
        only = None if topic is None else self._topic(topic)
        found = POINTER(_Metadata)()
        code = _rd.metadata(self._handle, only is None, only, byref(found), _ms(timeout_s))
        if code != _OK:
            raise KafkaException(KafkaError(code))
        try:
            topics = found.contents.topics[: found.contents.topic_count]
            failed = {t.topic.decode(): KafkaError(t.error) for t in topics if t.error != _OK}
        finally:
            _rd.metadata_destroy(found)
        text = _rd.clusterid(self._handle, _ms(deadline - time.monotonic()))
        if text is None:
            return None, failed
        try:
            return ctypes.string_at(text).decode(), failed
        finally:
            _rd.mem_free(self._handle, text)

    # -- rows --------------------------------------------------------------------------------------

    def send(self, topic: str, messages: Messages, start: int = 0) -> int:
        """Queue the messages from the number `start` on, in their order, as copies.

        Returns:
            How many of them are queued by now: all, unless the queue is full.

        Raises:
            KafkaException: one of them is refused for what it is; some others are queued.
        """
        if messages.are_plain:
            return self._send_together(topic, messages, start)
        return self._send_each(topic, messages, start)

    def flush(self, timeout_s: float) -> int:
        """Send what is queued, and wait until all of it is reported.

        Returns:
            How many messages are not reported yet, when the time is over.
        """
        deadline = time.monotonic() + timeout_s
        self.poll(0)
        while self._unreported and (left_s := deadline - time.monotonic()) > 0:
            _rd.flush(self._handle, _FLUSH_MS)
            self.poll(min(left_s, _BETWEEN_FLUSHES_S))
        return self._unreported

    # -- transactions ------------------------------------------------------------------------------

    def init_transactions(self, timeout_s: float) -> None:
        _check(_rd.init_transactions(self._handle, _ms(timeout_s)))

    def begin_transaction(self) -> None:
        _check(_rd.begin_transaction(self._handle))

    def abort_transaction(self, timeout_s: float) -> None:
        # It waits until all rows are reported, and does not poll for that itself.
        _rd.purge(self._handle, _PURGE)
        self.flush(timeout_s)
        _check(_rd.abort_transaction(self._handle, _ms(timeout_s)))

    def send_offsets(
        self, group: str, offset: int, metadata: str, topics: Sequence[str], timeout_s: float
    ) -> None:
        """Commit an offset of partition 0 of each of `topics` in the transaction."""
        with _offsets(offset, metadata.encode(), topics) as offsets, _group(group) as member:
            _check(_rd.send_offsets_to_transaction(self._handle, offsets, member, _ms(timeout_s)))

    def fatal_error(self) -> KafkaError | None:
        """Why nothing works any more, if that is so."""
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        code = _rd.fatal_error(self._handle, text, _TEXT_BYTES)
        return KafkaError(code, _text(text.value), fatal=True) if code != _OK else None

    # -- helpers -----------------------------------------------------------------------------------

    def _take(self, event: int) -> None:
        kind = _rd.event_type(event)
        if kind == _DELIVERY:
            self._take_deliveries(event)
        elif kind == _STATISTICS:
            self._listener.on_statistics(_text(_rd.event_stats(event)))
        elif kind == _ERROR:
            error = KafkaError(_rd.event_error(event), _text(_rd.event_error_string(event)))
            self._listener.on_error(error)
        elif kind == _TOKEN_REFRESH:
            self._refresh_token(_rd.event_config_string(event))

    def _take_deliveries(self, event: int) -> None:
        """One event is of one partition, and of one row at the least."""
        count, code = _rd.event_message_count(event), _rd.event_error(event)
        self._unreported -= count
        messages = _messages_of(event)
        # Where a request is fine and single rows are not, all but one of them, at the least, are
        # marked: looking at two is enough.
        seen = list(islice(messages, 2))
        topic = _text(_rd.topic_name(seen[0].topic))
        if code == _OK and not any(message.error for message in seen):
            self._listener.on_delivered(topic, seen[0].partition, count)
            return
        for message in chain(seen, messages):
            error = KafkaError(message.error or code or KafkaError._FAIL)  # noqa: SLF001
            self._listener.on_failure(error, topic, message.partition)

    def _topic(self, name: str) -> int:
        if name not in self._topics:
            topic = None if "\0" in name else _rd.topic_new(self._handle, name.encode(), None)
            if topic is None:
                raise _invalid(f"no topic is called {name!r}")
            self._topics[name] = topic
        return self._topics[name]

    def _send_together(self, topic: str, messages: Messages, start: int) -> int:
        rows = messages.rows[start:]
        address = rows.ctypes.data
        sent: int = _rd.produce_batch(self._topic(topic), _UNASSIGNED, COPY, address, len(rows))
        self._unreported += sent
        if sent == len(rows):
            return start + sent
        refused = set(rows["err"].tolist()) - {_OK, KafkaError._QUEUE_FULL}  # noqa: SLF001
        if refused:
            raise KafkaException(KafkaError(refused.pop()))
        if rows["err"][:sent].any():
            raise KafkaException(
                KafkaError(KafkaError._FAIL, "librdkafka took messages out of their order")  # noqa: SLF001
            )
        return start + sent

    def _send_each(self, topic: str, messages: Messages, start: int) -> int:
        values = messages.values(self._topic(topic))
        width, items = values.strides[0], values.shape[1]
        produce, handle, headers = _rd.produceva, self._handle, messages.headers
        row = values.ctypes.data + start * width
        for number in range(start, len(values)):
            pairs = None
            if headers is not None and headers[number]:
                pairs = _headers(headers[number])
                c_void_p.from_address(row + HEADERS_AT).value = pairs
            error = produce(handle, row, items)
            if error is not None:
                if pairs is not None:  # librdkafka has them only with the message
                    _rd.headers_destroy(pairs)
                failure = _failure(error)
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
            raise _without_token("librdkafka did not ask for a token")

    def _refresh_token(self, argument: bytes | None) -> None:
        failure = ctypes.create_string_buffer(_TEXT_BYTES)
        try:
            token: Token = self._token_callback(None if argument is None else argument.decode())
        except RefusedError as error:
            reason = str(error)
        else:
            pairs = [text.encode() for pair in token.extensions.items() for text in pair]
            code = _rd.oauthbearer_set_token(
                *(self._handle, token.text.encode(), int(token.expires_at * 1000)),
                *(token.principal.encode(), (c_char_p * len(pairs))(*pairs), len(pairs)),
                *(failure, _TEXT_BYTES),  # it repeats the token: nobody is to see it
            )
            if code == _OK:
                self._has_token = True
                return
            reason = "librdkafka refuses the token, its principal or its extensions"
        _rd.oauthbearer_set_token_failure(self._handle, reason.encode())
        if not self._has_token:
            raise _without_token(reason)


def _messages_of(event: int) -> Iterator[_Message]:
    while message := _rd.event_message_next(event):
        yield message.contents


def _new(settings: Settings, *, with_tokens: bool) -> int:
    version = f"{confluent_kafka.__version__}-rdkafka-{confluent_kafka.libversion()[0]}"
    software = {"client.software.name": "sparkonce", "client.software.version": version}
    told = _DELIVERY | _ERROR | _STATISTICS | (_TOKEN_REFRESH if with_tokens else 0)
    given = {**software, **{k: v for k, v in settings.items() if k != "oauth_cb"}}
    ordered = sorted(given, key=lambda name: name not in _FIRST)
    texts = [(name, _as_text(name, given[name])) for name in ordered]
    failure = ctypes.create_string_buffer(_TEXT_BYTES)
    handle: int | None = None
    conf = _rd.conf_new()
    try:
        if all(
            _rd.conf_set(conf, name.encode(), text, failure, _TEXT_BYTES) == _OK
            for name, text in texts
        ):
            _rd.conf_set_events(conf, told)
            handle = _rd.new(_PRODUCER, conf, failure, _TEXT_BYTES)
    finally:
        if handle is None:  # else it owns them
            _rd.conf_destroy(conf)
    if handle is None:
        raise _invalid(_text(failure.value))
    return handle


def _as_text(name: str, value: object) -> bytes | None:
    if value is None:
        return None  # librdkafka's default
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if "\0" in text:
        raise _invalid(f"{name} holds a NUL, at which its value would end")
    return text.encode()


def _destroy(process: int, handle: int, queue: int, topics: Mapping[str, int]) -> None:
    if os.getpid() != process:  # a forked child has none of its threads, for which it would wait
        return
    for topic in topics.values():
        _rd.topic_destroy(topic)
    _rd.queue_destroy(queue)
    _rd.destroy(handle)


def _invalid(reason: str) -> KafkaException:
    return KafkaException(KafkaError(KafkaError._INVALID_ARG, reason))  # noqa: SLF001


def _without_token(reason: str) -> KafkaException:
    return KafkaException(KafkaError(KafkaError._AUTHENTICATION, reason))  # noqa: SLF001


def _check(error: int | None) -> None:
    """Raise what a request of a transaction returned."""
    if error is not None:
        raise _failure(error)


def _failure(error: int) -> KafkaException:
    told = KafkaError(
        _rd.error_code(error),
        _text(_rd.error_string(error)),
        fatal=bool(_rd.error_is_fatal(error)),
        retriable=bool(_rd.error_is_retriable(error)),
        txn_requires_abort=bool(_rd.error_txn_requires_abort(error)),
    )
    _rd.error_destroy(error)
    return KafkaException(told)


@contextmanager
def _offsets(offset: int, metadata: bytes, topics: Sequence[str]) -> Iterator[int]:
    partitions = _rd.topic_partition_list_new(len(topics))
    try:
        for topic in topics:
            partition = _rd.topic_partition_list_add(partitions, topic.encode(), 0).contents
            partition.offset = offset
            # The list frees it.
            partition.metadata = _rd.mem_malloc(None, len(metadata))
            ctypes.memmove(partition.metadata, metadata, len(metadata))
            partition.metadata_size = len(metadata)
        yield partitions
    finally:
        _rd.topic_partition_list_destroy(partitions)


@contextmanager
def _group(name: str) -> Iterator[int]:
    member = _rd.consumer_group_metadata_new(name.encode())
    try:
        yield member
    finally:
        _rd.consumer_group_metadata_destroy(member)


def _headers(pairs: Sequence[Header]) -> int:
    headers: int = _rd.headers_new(len(pairs))
    for name, value in pairs:
        _rd.header_add(headers, name, len(name), value, 0 if value is None else len(value))
    return headers


def _ms(seconds: float) -> int:
    return max(0, int(seconds * 1000))


def _text(encoded: bytes | None) -> str:
    return "" if encoded is None else encoded.decode(errors="replace")
