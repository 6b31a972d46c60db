"""Whether Kafka still has the input that follows a savepoint.

    the batch's offsets   {"orders": {"0": 120, "1": 80}}     the next batch reads from there
    the brokers           orders/0 has 90 to 400              fine
                          orders/1 has 150 to 300             80 to 149 were deleted

The checkpoint does not name the brokers, so the user does. Nothing else of the package uses
confluent-kafka for reading.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from sparkonce.errors import ConfigurationError, SavepointError
from sparkonce.spark_hooks.savepoints.manifest import Manifest

if TYPE_CHECKING:
    from confluent_kafka import Consumer

_ASK_TIMEOUT_S: Final = 30.0
_SHOWN: Final = 3

Position = tuple[str, int, int]
"""A topic, a partition, and the offset from which the next batch reads."""


def positions(offsets: Sequence[str]) -> list[Position]:
    """Where the next batch reads, for each partition in the offsets of Kafka sources."""
    lowest: dict[tuple[str, int], int] = {}
    for shown in offsets:
        # A named source is shown as name:offset.
        text = shown if shown.startswith("{") else shown.partition(":")[2]
        for topic, partition, offset in _of_kafka(text):
            at = topic, partition
            lowest[at] = min(offset, lowest.get(at, offset))
    return [(*at, offset) for at, offset in sorted(lowest.items())]


def _of_kafka(text: str) -> Iterator[Position]:
    value = json.loads(text) if text.startswith("{") else {}
    if not all(isinstance(partitions, dict) for partitions in value.values()):
        return
    for topic, partitions in value.items():
        for partition, offset in partitions.items():
            if partition.isdigit() and isinstance(offset, int):
                yield topic, int(partition), offset


def check_input(manifest: Manifest, settings: Mapping[str, Any]) -> None:
    """Ask the brokers whether they have what follows the savepoint.

    Args:
        manifest: of the savepoint.
        settings: of librdkafka; at least `bootstrap.servers`.

    Raises:
        SavepointError: at least one partition lacks it, or the brokers cannot be asked.
        ConfigurationError: confluent-kafka is not installed, or a setting is wrong.
    """
    try:
        from confluent_kafka import Consumer, KafkaException  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"the input is checked with {error.name!r}: pip install 'sparkonce[kafka]'"
        ) from error
    own = {"group.id": "sparkonce-savepoint", "enable.auto.commit": False}  # it never joins
    try:
        consumer = Consumer({**settings, **own}, logger=logging.getLogger("sparkonce.kafka"))
    except KafkaException as error:
        raise ConfigurationError(f"--source-kafka: {error.args[0].str()}") from error
    try:
        missing = list(_missing(consumer, positions(manifest.record.offsets)))
    except KafkaException as error:
        raise SavepointError(
            f"the brokers at {settings['bootstrap.servers']} cannot be asked for the input of "
            f"{manifest.name} ({error.args[0].str()}): check the address, or start the brokers, "
            "and run this again. Without --source-kafka nobody checks whether the input is still "
            "there"
        ) from error
    finally:
        consumer.close()
    if missing:
        more = f"; and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise SavepointError(
            f"Kafka at {settings['bootstrap.servers']} lacks input that follows the savepoint "
            f"{manifest.name}: {'; '.join(missing[:_SHOWN])}{more}. Nothing was changed. Use a "
            "newer savepoint. To accept that these rows never come, leave out --source-kafka, and "
            "start the query with failOnDataLoss=false"
        )


def _missing(consumer: Consumer, wanted: Sequence[Position]) -> Iterator[str]:
    from confluent_kafka import TopicPartition  # noqa: PLC0415 - an extra

    topics = consumer.list_topics(timeout=_ASK_TIMEOUT_S).topics
    for topic, partition, offset in wanted:
        if topic not in topics or partition not in topics[topic].partitions:
            yield f"{topic}/{partition} does not exist"
            continue
        at = TopicPartition(topic, partition)
        first, end = consumer.get_watermark_offsets(at, timeout=_ASK_TIMEOUT_S)
        if not first <= offset <= end:
            yield f"{topic}/{partition} is needed from {offset}, and has {first} to {end}"
