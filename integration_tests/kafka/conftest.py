"""Sinks and branches for the tests of the Kafka sink."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

from integration_tests.support.kafka import ROWS, World, eventually
from sparkonce.model import BranchId, Owner
from sparkonce.sinks import KafkaSink
from sparkonce.testing.services import KafkaServer


@pytest.fixture
def topic(fresh_topic: Callable[..., str]) -> str:
    return fresh_topic(1)


@pytest.fixture
def world(kafka: KafkaServer, topic: str) -> Iterator[World]:
    world = World(kafka, topic)
    yield world
    world.close()


@pytest.fixture
def make_sink(kafka: KafkaServer) -> Iterator[Callable[..., KafkaSink]]:
    """`make_sink(topic, …)`, closed at the end of the test."""
    made: list[KafkaSink] = []

    def make(topic: str | None, **settings: Any) -> KafkaSink:
        settings.setdefault("bootstrap_servers", kafka.bootstrap_servers)
        made.append(KafkaSink(topic, **settings))
        return made[-1]

    yield make
    for sink in made:
        sink.close()


@pytest.fixture
def sink(make_sink: Callable[..., KafkaSink], topic: str) -> KafkaSink:
    sink = make_sink(topic)
    sink.validate(ROWS.schema)
    return sink


@pytest.fixture
def owner(fresh_name: Callable[[], str]) -> Owner:
    """A log and query of this test only."""
    return Owner(fresh_name()[1:], "5e1f-00")


@pytest.fixture
def branch(owner: Owner) -> BranchId:
    return BranchId(owner, 7, 1, "kafka", 0, 0)


@pytest.fixture
def unverified(kafka: KafkaServer) -> Iterator[None]:
    """Brokers that accept rows without checking that their transaction is open, as before 3.6."""
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    setting = "transaction.partition.verification.enable"

    def alter(how: AlterConfigOpType) -> None:
        entry = ConfigEntry(setting, "false", incremental_operation=how)
        broker = ConfigResource(ConfigResource.Type.BROKER, "1", incremental_configs=[entry])
        admin.incremental_alter_configs([broker])[broker].result(30)

    def verifies() -> str:
        broker = ConfigResource(ConfigResource.Type.BROKER, "1")
        return str(admin.describe_configs([broker])[broker].result(30)[setting].value)

    alter(AlterConfigOpType.SET)
    eventually(lambda: verifies() == "false", "the broker has the setting")
    yield
    alter(AlterConfigOpType.DELETE)
    eventually(lambda: verifies() == "true", "the broker has its default")
