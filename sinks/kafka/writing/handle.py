"""librdkafka's producer as a handle: created from settings, destroyed, its errors and its log.

settings ──► new_producer ──► handle ──► … ──► destroy_producer
rd_kafka_error_t ──► check, to_exception ──► KafkaException
log event ──► log_event ──► our logger, without the lines that our own errors report
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Mapping
from ctypes import byref, c_char_p, c_int
from typing import Final

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException

from sparkonce.sinks.kafka.writing.c_api import rd

logger = logging.getLogger("sparkonce")

Settings = Mapping[str, object]
"""In librdkafka's names; `oauth_cb` is a function."""

OK: Final = 0
_PRODUCER: Final = 0
DELIVERY: Final = 0x1
LOG: Final = 0x4
ERROR: Final = 0x8
STATISTICS: Final = 0x40
TOKEN_REFRESH: Final = 0x100

TEXT_BYTES: Final = 512

_FIRST: Final = ("debug", "plugin.library.paths")
"""Settings that change the meaning of others, and must be set first."""

_NOT_LOGGED: Final = frozenset({"FAIL", "ERROR", "REQTMOUT", "GETPID", "TXNERR"})
"""Log lines about connections and transactions, which our own errors and warnings report."""

_LEVELS: Final = {4: logging.WARNING, 5: logging.INFO, 6: logging.INFO, 7: logging.DEBUG}
"""Python's log level for each syslog level; 0 to 3 are errors."""


def new_producer(settings: Settings, *, with_tokens: bool) -> int:
    version = f"{confluent_kafka.__version__}-rdkafka-{confluent_kafka.libversion()[0]}"
    software = {"client.software.name": "sparkonce", "client.software.version": version}
    events = DELIVERY | LOG | ERROR | STATISTICS | (TOKEN_REFRESH if with_tokens else 0)
    given = {**software, **{k: v for k, v in settings.items() if k != "oauth_cb"}}
    # With debug, librdkafka logs to stderr as usual, where users look for it.
    takes_log = "debug" not in given and given.setdefault("log.queue", True) is True
    ordered = sorted(given, key=lambda name: name not in _FIRST)
    texts = [(name, _as_text(name, given[name])) for name in ordered]
    failure = ctypes.create_string_buffer(TEXT_BYTES)
    handle: int | None = None
    conf = rd.conf_new()
    try:
        if all(
            rd.conf_set(conf, name.encode(), text, failure, TEXT_BYTES) == OK
            for name, text in texts
        ):
            rd.conf_set_events(conf, events)
            handle = rd.new(_PRODUCER, conf, failure, TEXT_BYTES)
    finally:
        if handle is None:  # else the producer owns the settings
            rd.conf_destroy(conf)
    if handle is None:
        raise invalid(text_of(failure.value))
    if takes_log:
        rd.set_log_queue(handle, None)  # among the other events
    return handle


def log_event(event: int) -> None:
    facility, text, level = c_char_p(), c_char_p(), c_int()
    if rd.event_log(event, byref(facility), byref(text), byref(level)) != OK:
        return
    name = text_of(facility.value)
    if name not in _NOT_LOGGED:
        logger.log(
            _LEVELS.get(level.value, logging.ERROR), "librdkafka: %s: %s", name, text_of(text.value)
        )


def _as_text(name: str, value: object) -> bytes | None:
    if value is None:
        return None  # librdkafka's default
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if "\0" in text:
        raise invalid(f"{name} holds a NUL, where librdkafka would cut its value off")
    return text.encode()


def destroy_producer(process: int, handle: int, queue: int, topics: Mapping[str, int]) -> None:
    if os.getpid() != process:  # a forked child lacks the threads that this would wait for
        return
    for topic in topics.values():
        rd.topic_destroy(topic)
    rd.queue_destroy(queue)
    rd.destroy(handle)


def invalid(reason: str) -> KafkaException:
    return KafkaException(KafkaError(KafkaError._INVALID_ARG, reason))  # noqa: SLF001


def without_token(reason: str) -> KafkaException:
    return KafkaException(KafkaError(KafkaError._AUTHENTICATION, reason))  # noqa: SLF001


def check(error: int | None) -> None:
    """Raise the error that a transactional request returned."""
    if error is not None:
        raise to_exception(error)


def to_exception(error: int) -> KafkaException:
    found = KafkaError(
        rd.error_code(error),
        text_of(rd.error_string(error)),
        fatal=bool(rd.error_is_fatal(error)),
        retriable=bool(rd.error_is_retriable(error)),
        txn_requires_abort=bool(rd.error_txn_requires_abort(error)),
    )
    rd.error_destroy(error)
    return KafkaException(found)


def ms(seconds: float) -> int:
    return max(0, int(seconds * 1000))


def text_of(encoded: bytes | None) -> str:
    return "" if encoded is None else encoded.decode(errors="replace")
