"""`validate` with brokers that are too old, starting, or refusing. The brokers are tables."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from kafka import errors
from kafka.protocol.admin.transactions import (
    DescribeProducersRequest,
    DescribeTransactionsRequest,
    ListTransactionsRequest,
)
from kafka.protocol.broker_version_data import BrokerVersionData
from kafka.protocol.consumer.group import OffsetFetchRequest
from kafka.protocol.consumer.offsets import ListOffsetsRequest
from kafka.protocol.metadata import MetadataRequest
from kafka.protocol.producer.transaction import InitProducerIdRequest

from sparkonce.errors import ConfigurationError, SinkUnavailableError
from sparkonce.sinks import KafkaSink
from sparkonce.sinks.kafka.connecting.refused import RefusedError

KAFKA_3_0 = BrokerVersionData(broker_version=(3, 0)).api_versions


def sink_of(versions: dict[int, tuple[int, int]]) -> KafkaSink:
    """A sink whose brokers report the versions that they support, and nothing else."""

    def ask(question: Any, forget: Any = ()) -> Any:
        data = BrokerVersionData(api_versions=versions)
        manager = SimpleNamespace(broker_version_data=data)
        return asyncio.run(question(SimpleNamespace(_manager=manager)))

    sink = KafkaSink("orders", bootstrap_servers="kafka:9092")
    vars(sink._finisher)["_connection"] = SimpleNamespace(ask=ask, close=lambda: None)
    return sink


@pytest.mark.parametrize(
    ("request_class", "known"),
    [
        (DescribeProducersRequest, None),  # WarpStream
        (ListOffsetsRequest, (0, 4)),  # Redpanda 25.3
        (OffsetFetchRequest, (1, 7)),
        (MetadataRequest, (0, 6)),
        (InitProducerIdRequest, (0, 2)),
        (DescribeTransactionsRequest, None),
        (ListTransactionsRequest, None),
    ],
)
def test_brokers_that_could_not_finish_what_they_take(
    request_class: type, known: tuple[int, int] | None
) -> None:
    """Every commit would stay unresolved, so the query does not start."""
    key = request_class.API_KEY  # type: ignore[attr-defined]
    versions = {**KAFKA_3_0, key: known} if known else {**KAFKA_3_0}
    if known is None:
        del versions[key]
    words = f"{request_class.__name__}.*Kafka 3.0 or newer, or a server that is compatible"
    with pytest.raises(ConfigurationError, match=words):
        sink_of(versions).validate(pa.schema([("value", pa.string())]))


def test_kafka_3_0_knows_what_is_needed() -> None:
    assert sink_of(KAFKA_3_0)._finisher.unsupported() is None


def failing(error: BaseException) -> KafkaSink:
    """A sink whose first question fails."""

    def unsupported() -> None:
        raise error

    sink = KafkaSink("orders", bootstrap_servers="kafka:9092")
    sink._finisher = SimpleNamespace(unsupported=unsupported, close=lambda: None)  # type: ignore[assignment]
    sink._patience_s = 0.0
    return sink


@pytest.mark.parametrize(
    "error",
    [
        errors.KafkaConnectionError("111 ECONNREFUSED"),
        errors.KafkaTimeoutError("unable to bootstrap"),
        errors.NodeNotReadyError(1),
        errors.RequestTimedOutError(),
        errors.CoordinatorLoadInProgressError(),
        errors.CoordinatorNotAvailableError(),
        errors.NotCoordinatorError(),
        errors.LeaderNotAvailableError(),
        errors.BrokerNotAvailableError(),
        ConnectionResetError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_brokers_that_are_starting(error: BaseException) -> None:
    """Unavailable: the caller tries again. The error does not blame a setting."""
    with pytest.raises(SinkUnavailableError, match="kafka:9092.*are the brokers up"):
        failing(error).validate(pa.schema([("value", pa.string())]))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RefusedError("a wrong password"), "a wrong password"),
        (errors.TopicAuthorizationFailedError(), "Read and Write on the topic.*add the ACL"),
        (errors.TransactionalIdAuthorizationFailedError(), "Write on transactional ids"),
        (errors.InvalidTopicError(), "INVALID_TOPIC"),
        (errors.UnsupportedVersionError(), "UNSUPPORTED_VERSION"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_brokers_that_refuse(error: BaseException, words: str) -> None:
    """A wrong setting or a missing right: another attempt cannot help."""
    with pytest.raises(ConfigurationError, match=words):
        failing(error).validate(pa.schema([("value", pa.string())]))
