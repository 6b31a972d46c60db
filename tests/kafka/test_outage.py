"""Brokers that stop responding: one log line of ours instead of hundreds from the clients."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaException
from kafka import errors

from sparkonce.sinks.kafka.connecting import outage, quiet
from sparkonce.sinks.kafka.connecting.connection import Connection, Patience, refresh
from sparkonce.sinks.kafka.connecting.outage import Outage
from sparkonce.sinks.kafka.connecting.settings import KafkaSettings
from sparkonce.sinks.kafka.writing.librdkafka import TransactionalProducer
from sparkonce.sinks.kafka.writing.reports import Reports

NOBODY = "127.0.0.1:1"


@pytest.fixture
def connection() -> Iterator[Connection]:
    opened = Connection(KafkaSettings(NOBODY))
    yield opened
    opened.close()


def test_stopped_broker_is_one_line(
    connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """The driver's client retries several times a second, and only our first line is logged."""
    caplog.set_level(logging.INFO)
    with pytest.raises(errors.KafkaTimeoutError):
        Patience(6)(lambda: connection.ask(refresh))
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.name for record in warnings] == ["sparkonce"]
    (line,) = (record.message for record in warnings)
    assert line.startswith(f"Kafka at {NOBODY} does not respond: ")
    assert "ECONNREFUSED" in line


def test_client_at_debug_is_not_quietened(
    connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """With kafka-python's loggers at DEBUG every attempt is logged."""
    caplog.set_level(logging.DEBUG, "kafka")
    with pytest.raises(errors.KafkaTimeoutError):
        connection.ask(refresh)
    assert [r for r in caplog.records if r.name.startswith("kafka") and r.levelno >= logging.ERROR]


def test_other_clients_of_the_process_are_not_quietened(caplog: pytest.LogCaptureFixture) -> None:
    """Only I/O threads with our client id are, except for lines that we do not report ourselves."""
    quiet.quieten("ours")

    def log() -> None:
        for logger in map(logging.getLogger, ("kafka.net.manager", "kafka.net.selector")):
            logger.error("Connection failed: %s", "why")
        logging.getLogger("kafka.net.connection").warning("%s throttled by broker (%d ms)", "x", 1)

    for name in ("kafka-io-ours", "kafka-io-theirs"):
        thread = threading.Thread(target=log, name=name)
        thread.start()
        thread.join()
    seen = [(record.threadName, record.name) for record in caplog.records]
    assert seen == [
        ("kafka-io-ours", "kafka.net.selector"),
        ("kafka-io-ours", "kafka.net.connection"),
        ("kafka-io-theirs", "kafka.net.manager"),
        ("kafka-io-theirs", "kafka.net.selector"),
        ("kafka-io-theirs", "kafka.net.connection"),
    ]


def test_end_of_an_outage_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each end once. A refusal is a response; an outage soon after the last one is not logged."""
    now = [1000.0]
    monkeypatch.setattr(outage, "time", SimpleNamespace(monotonic=lambda: now[0]))
    seen = Outage("here:1")
    seen.ends()
    seen.failed(errors.InvalidTxnStateError(), "refused")
    assert caplog.messages == []
    for _ in range(3):
        seen.failed(errors.NodeNotReadyError(1), "not ready")
        now[0] += 5
    for _ in range(3):
        seen.ends()
    began, ended = caplog.messages
    assert began.startswith("Kafka at here:1 does not respond: not ready.")
    assert ended == "Kafka at here:1 responds again, after 15 s"
    seen.failed(errors.NodeNotReadyError(1), "not ready")
    seen.ends()
    assert len(caplog.messages) == 2
    now[0] += outage.NOT_AGAIN_S
    seen.failed(errors.RequestTimedOutError(), "timed out")
    assert len(caplog.messages) == 3


def test_librdkafka_does_not_write_to_stderr(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Its connection errors are one line of ours; with debug it logs as it always does."""
    reports = Reports(Outage(NOBODY))
    settings = {"bootstrap.servers": NOBODY, "transactional.id": "t", "reconnect.backoff.ms": 10}
    producer = TransactionalProducer(settings, reports)
    until = time.monotonic() + 2
    while time.monotonic() < until:
        producer.poll(0.1)
    with pytest.raises(KafkaException):
        producer.look(None, 0.1)
    assert capfd.readouterr().err == ""
    assert [m for m in caplog.messages if "does not respond" in m] == caplog.messages
    assert len(caplog.messages) == 1
    TransactionalProducer({**settings, "debug": "broker"}, reports)
    time.sleep(0.2)
    assert f"{NOBODY}/bootstrap: " in capfd.readouterr().err


def test_other_lines_of_librdkafka_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Our logger gets the lines that our errors do not repeat, such as a setting without effect."""
    caplog.set_level(logging.DEBUG, "sparkonce")
    settings = {"bootstrap.servers": NOBODY, "transactional.id": "t", "fetch.min.bytes": 5}
    producer = TransactionalProducer(settings, Reports())
    until = time.monotonic() + 5
    while time.monotonic() < until and not any("CONFWARN" in m for m in caplog.messages):
        producer.poll(0.1)
    assert any(
        m.startswith("librdkafka: CONFWARN: ") and "fetch.min.bytes" in m for m in caplog.messages
    )
