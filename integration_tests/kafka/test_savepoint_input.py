"""A savepoint whose input Kafka has deleted: the commands refuse it before they change anything."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from tests.support.rewind_cases import RewindStage

from sparkonce.cli.main import ERROR, run

if TYPE_CHECKING:
    from sparkonce.testing.services import KafkaServer

ROWS, READ = 10, 4
"""Rows in a topic, and those that the savepoint's batches have read."""


class Operator:
    """Somebody with a savepoint of batch 0, while the sink has batch 1 too."""

    def __init__(self, folder: Path, topic: str, server: KafkaServer, rows: int = ROWS) -> None:
        self.stage = RewindStage(
            folder, batches=2, savepoint=0, offset_of=lambda _: {topic: {"0": READ}}
        )
        self.folder, self.topic = folder, topic
        self.server = {"bootstrap.servers": server.bootstrap_servers}
        producer = Producer(self.server)
        for _ in range(rows):
            producer.produce(topic, b"row", partition=0)
        assert producer.flush(30) == 0
        for name, out in (("orders", "out"), ("fork", "fork-out")):
            sink = {"type": "file", "folder": str(folder / out), "name": "out"}
            described = {"name": name, "log": f"sqlite:///{folder}/txn.db", "sinks": [sink]}
            (folder / f"{name}.json").write_text(json.dumps(described))
        servers = folder / "servers"
        servers.write_text(server.bootstrap_servers)
        by_reference = {"bootstrap.servers": {"file": str(servers)}}
        (folder / "kafka.json").write_text(json.dumps(by_reference))

    def delete_before(self, offset: int) -> None:
        at = TopicPartition(self.topic, 0, offset)
        admin = AdminClient(self.server)  # its requests end with it
        (deleted,) = admin.delete_records([at]).values()
        deleted.result(30)

    def command(self, verb: str, *more: str) -> int:
        job = self.folder / ("fork.json" if verb == "fork" else "orders.json")
        into = ["--into", str(self.folder / "new"), *(["--yes"] if verb == "rewind" else [])]
        return run(["savepoint", verb, str(job), str(self.stage.root), "good", *into, *more])


@pytest.fixture
def operator(tmp_path: Path, fresh_topic: Callable[..., str], kafka: KafkaServer) -> Operator:
    return Operator(tmp_path, fresh_topic(1), kafka)


@pytest.mark.parametrize("verb", ["restore", "fork", "rewind"])
def test_input_that_is_gone_is_refused(
    operator: Operator, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    operator.delete_before(READ + 1)
    before = operator.stage.everything()
    servers = operator.server["bootstrap.servers"]
    assert operator.command(verb, "--source-kafka", servers) == ERROR
    assert f"0 is needed from {READ}, and has {READ + 1} to {ROWS}" in capsys.readouterr().err
    assert operator.stage.everything() == before


@pytest.mark.parametrize("is_recreated", [False, True])
def test_topic_that_was_deleted_is_refused(
    tmp_path: Path,
    fresh_topic: Callable[..., str],
    kafka: KafkaServer,
    capsys: pytest.CaptureFixture[str],
    is_recreated: bool,
) -> None:
    """A topic that ends before the savepoint's offset is another one of the same name."""
    topic = fresh_topic(1) if is_recreated else "nowhere"
    operator = Operator(tmp_path, topic, kafka, rows=READ - 1 if is_recreated else 0)
    servers = kafka.bootstrap_servers
    assert operator.command("rewind", "--source-kafka", servers) == ERROR
    why = f"has 0 to {READ - 1}" if is_recreated else "nowhere/0 does not exist"
    assert why in capsys.readouterr().err
    assert operator.stage.delivered() == operator.stage.rows_of(0, 1)


def test_input_that_is_there(operator: Operator, capsys: pytest.CaptureFixture[str]) -> None:
    """Up to the row that the next batch begins with; settings may be in a file."""
    operator.delete_before(READ)
    file = str(operator.folder / "kafka.json")
    assert operator.command("rewind", "--source-kafka", file) == 0
    assert "not checked" not in capsys.readouterr().err
    assert operator.stage.delivered() == operator.stage.rows_of(0)


def test_without_brokers_it_says_what_is_not_known(
    operator: Operator, capsys: pytest.CaptureFixture[str]
) -> None:
    operator.delete_before(READ + 1)
    assert operator.command("rewind") == 0
    assert "not checked whether Kafka" in capsys.readouterr().err


def test_brokers_that_cannot_be_asked(
    operator: Operator, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparkonce.spark_hooks.savepoints.retention._ASK_TIMEOUT_S", 1.0)
    before = operator.stage.everything()
    for given, why in (
        ("127.0.0.1:1", "cannot be asked"),
        (str(operator.folder / "none.json"), "cannot be read"),
        (str(operator.folder / "orders.json"), "with bootstrap.servers"),
    ):
        assert operator.command("rewind", "--source-kafka", given) == ERROR
        assert why in capsys.readouterr().err
    assert operator.stage.everything() == before
