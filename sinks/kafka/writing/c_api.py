"""The functions and structures of librdkafka that the sink uses, from its public C header.

`rdkafka.h` keeps its binary interface through all versions 1 and 2. The library comes with
confluent-kafka.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, Structure, c_char_p, c_int, c_int32, c_int64, c_size_t, c_void_p
from types import SimpleNamespace
from typing import Any, Final

from confluent_kafka import cimpl


class Partition(Structure):
    """The fields of rd_kafka_topic_partition_t that the sink sets, and those before them."""

    _fields_ = (
        ("topic", c_char_p),
        ("partition", c_int32),
        ("offset", c_int64),
        ("metadata", c_void_p),
        ("metadata_size", c_size_t),
    )


class Topic(Structure):
    """rd_kafka_metadata_topic."""

    _fields_ = (
        ("topic", c_char_p),
        ("partition_count", c_int),
        ("partitions", c_void_p),
        ("error", c_int),
    )


class Metadata(Structure):
    """The fields of rd_kafka_metadata that the sink reads, and those before them."""

    _fields_ = (
        ("broker_count", c_int),
        ("brokers", c_void_p),
        ("topic_count", c_int),
        ("topics", POINTER(Topic)),
    )


class Message(Structure):
    """The fields of rd_kafka_message_t that the sink reads, and those before them."""

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
    # events
    "queue_get_main": (c_void_p, c_void_p),
    "queue_poll": (c_void_p, c_void_p, c_int),
    "queue_destroy": (None, c_void_p),
    "event_type": (c_int, c_void_p),
    "event_error": (c_int, c_void_p),
    "event_error_string": (c_char_p, c_void_p),
    "event_stats": (c_char_p, c_void_p),
    "event_config_string": (c_char_p, c_void_p),
    "event_log": (c_int, c_void_p, POINTER(c_char_p), POINTER(c_char_p), POINTER(c_int)),
    "set_log_queue": (c_int, c_void_p, c_void_p),
    "event_message_count": (c_size_t, c_void_p),
    "event_message_next": (POINTER(Message), c_void_p),
    "event_destroy": (None, c_void_p),
    # the cluster
    "metadata": (c_int, c_void_p, c_int, c_void_p, POINTER(POINTER(Metadata)), c_int),
    "metadata_destroy": (None, POINTER(Metadata)),
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
    "topic_partition_list_add": (POINTER(Partition), c_void_p, c_char_p, c_int32),
    "topic_partition_list_destroy": (None, c_void_p),
    "error_code": (c_int, c_void_p),
    "error_string": (c_char_p, c_void_p),
    "error_is_fatal": (c_int, c_void_p),
    "error_is_retriable": (c_int, c_void_p),
    "error_txn_requires_abort": (c_int, c_void_p),
    "error_destroy": (None, c_void_p),
}
"""The result and the argument types of each function, by its name without `rd_kafka_`."""


def _declared() -> Any:
    # The loader searches a library, and then the libraries that it was linked with.
    library = ctypes.CDLL(cimpl.__file__)
    functions = {name: getattr(library, f"rd_kafka_{name}") for name in _FUNCTIONS}
    for name, (result, *arguments) in _FUNCTIONS.items():
        functions[name].restype, functions[name].argtypes = result, arguments
    return SimpleNamespace(**functions)


rd: Final = _declared()
"""The librdkafka that confluent-kafka was built with; each function is an attribute."""
