"""librdkafka through its C API, without a broker."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from sparkonce.sinks.kafka.connecting.oauth import TokenCallback
from sparkonce.sinks.kafka.writing import c_api, librdkafka
from sparkonce.sinks.kafka.writing.librdkafka import TransactionalProducer
from sparkonce.sinks.kafka.writing.reports import Reports

NOWHERE = {"bootstrap.servers": "127.0.0.1:9", "transactional.id": "t", "log_level": 0}
TOKENS = {**NOWHERE, "security.protocol": "SASL_PLAINTEXT", "sasl.mechanisms": "OAUTHBEARER"}
THREADS = Path("/proc/self/task")


def threads() -> int:
    """Those of librdkafka, by their names; other tests leave some of their own."""
    count = 0
    for thread in THREADS.iterdir():
        with contextlib.suppress(OSError):  # it has ended
            count += (thread / "comm").read_text().startswith("rdk:")
    return count


def comes_down_to(count: int) -> bool:
    until = time.monotonic() + 30
    while threads() > count and time.monotonic() < until:
        time.sleep(0.01)
    return threads() <= count


@pytest.mark.skipif(not THREADS.exists(), reason="the system does not list threads")
def test_last_reference_that_goes() -> None:
    """librdkafka's threads end with the last reference; no cycle keeps the producer."""
    TransactionalProducer(NOWHERE, Reports())  # threads left over from the first one remain
    gc.collect()
    before = threads()
    producer = TransactionalProducer(NOWHERE, Reports())
    assert threads() > before
    del producer
    assert comes_down_to(before)


def test_forked_child_that_drops_its_parents_producer() -> None:
    """The child has none of librdkafka's threads and may hold their locks, so it frees nothing."""
    script = (
        "import os, sys\n"
        "from sparkonce.sinks.kafka.writing import librdkafka\n"
        "from sparkonce.sinks.kafka.writing.librdkafka import TransactionalProducer\n"
        "from sparkonce.sinks.kafka.writing.reports import Reports\n"
        f"producer = TransactionalProducer({NOWHERE!r}, Reports())\n"
        "child = os.fork()\n"
        "if child == 0: librdkafka.rd.destroy = lambda handle: os._exit(9)\n"
        "del producer\n"
        "if child == 0: os._exit(7)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=False, timeout=120)
    assert done.returncode == 7


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"no.such.setting": 1}, "no.such.setting"),
        ({"compression.type": "best"}, "compression"),
        ({"client.id": "a\0b"}, "client.id holds a NUL"),
        ({"plugin.library.paths": "/nowhere/plugin"}, "/nowhere/plugin"),
        ({"a.setting.of.the.plugin": 1, "plugin.library.paths": "/nowhere"}, "/nowhere"),
    ],
)
def test_setting_that_is_refused(settings: dict[str, object], words: str) -> None:
    """The error names it."""
    with pytest.raises(KafkaException, match=words):
        TransactionalProducer({**NOWHERE, **settings}, Reports())


def test_default_of_librdkafka_and_booleans() -> None:
    """None asks for the default; True and False are written as librdkafka reads them."""
    settings = {"client.id": None, "enable.idempotence": True, "socket.keepalive.enable": False}
    TransactionalProducer({**NOWHERE, **settings}, Reports())


@pytest.mark.parametrize(
    "told",
    [
        ("hunter2\x01", time.time() + 600),
        ("token", time.time() + 600, "me", {"tenant": "hunter2\x01"}),
    ],
)
@pytest.mark.skipif(not THREADS.exists(), reason="the system does not list threads")
def test_token_that_librdkafka_refuses(told: Any) -> None:
    """Its reason repeats token and extensions; our error does not, and keeps no client alive."""
    before = threads()
    with pytest.raises(KafkaException, match="refuses the token") as refused:
        TransactionalProducer({**TOKENS, "oauth_cb": TokenCallback(lambda _: told)}, Reports())
    assert "hunter2" not in str(refused.value)
    assert comes_down_to(before)


def test_principal_and_extensions_are_passed_on() -> None:
    """librdkafka accepts them; a wrong one is found (see above)."""
    told = ("token", time.time() + 600, "me", {"tenant": 7})
    TransactionalProducer({**TOKENS, "oauth_cb": TokenCallback(lambda _: told)}, Reports())


@pytest.mark.parametrize(
    ("code", "errors", "delivered", "failed"),
    [
        (0, [0, 0, 0], 3, 0),
        (0, [KafkaError.INVALID_RECORD, 0, 0], 0, 3),
        (0, [0, KafkaError.INVALID_RECORD, KafkaError.INVALID_RECORD], 0, 3),
        (KafkaError.MSG_SIZE_TOO_LARGE, [0, 0, 0], 0, 3),
    ],
)
def test_request_that_is_answered(
    monkeypatch: pytest.MonkeyPatch, code: int, errors: list[int], delivered: int, failed: int
) -> None:
    """Single rows that a successful request refuses are not delivered."""
    reports = Reports()
    producer = TransactionalProducer(NOWHERE, reports)
    topic = producer._topic("orders")
    messages = [c_api.Message(error, topic, 4) for error in errors]
    monkeypatch.setattr(librdkafka, "_messages_of", lambda event: iter(messages))
    monkeypatch.setattr(librdkafka.rd, "event_message_count", lambda event: len(messages))
    monkeypatch.setattr(librdkafka.rd, "event_error", lambda event: code)
    producer._take_deliveries(0)
    assert (reports.delivered, reports.failed) == (delivered, failed)
    assert reports.partitions == ({"orders": {4}} if delivered else {})
    if failed:
        assert "topic 'orders', partition 4" in str(reports.first_failure)


def test_structures_are_as_in_the_header() -> None:
    """Sizes on 64 bits, which rdkafka.h guarantees."""
    assert ctypes.sizeof(c_api.Topic) == 32
    assert c_api.Metadata.topics.offset == 24
    assert c_api.Partition.metadata.offset == 24
    assert c_api.Message.partition.offset == 16
