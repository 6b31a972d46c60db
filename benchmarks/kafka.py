"""Kafka: sparkonce against Spark's own at-least-once sink, `format("kafka")`.

    python benchmarks/kafka.py [--rows 2000000] [--rounds 3]

Both write the same records of about 100 bytes, with a producer that is tuned alike (linger 50 ms,
lz4), to a topic with two partitions on one broker.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from confluent_kafka.admin import AdminClient, NewTopic
from harness import Format, arguments, compare, scratch, spark_session

from sparkonce import ExactlyOnce
from sparkonce.sinks import KafkaSink
from sparkonce.testing.services import KafkaServer, start_services

if TYPE_CHECKING:
    from pathlib import Path

SCHEMA = "key string, value string"
COLUMNS = ("string(id) AS key", "concat(sha2(string(id), 256), sha1(string(id))) AS value")


def fresh_topic(kafka: KafkaServer) -> str:
    name = f"b{uuid.uuid4().hex[:10]}"
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.create_topics([NewTopic(name, num_partitions=2)])[name].result(30)
    return name


def exactly_once(kafka: KafkaServer, folder: Path) -> ExactlyOnce:
    name = fresh_topic(kafka)
    sink = KafkaSink(name, bootstrap_servers=kafka.bootstrap_servers)
    return ExactlyOnce(name, sinks=[sink], log=f"sqlite:///{folder}/{name}.db")


def sparks_own(kafka: KafkaServer) -> Format:
    options = {
        "kafka.bootstrap.servers": kafka.bootstrap_servers,
        "topic": fresh_topic(kafka),
        "kafka.linger.ms": "50",
        "kafka.compression.type": "lz4",
    }
    return Format("kafka", options)


def main(*, rows: int, rounds: int, small_batches: int) -> None:
    with scratch() as folder, start_services(["kafka"], quick_start=False) as up:
        compare(
            {
                "sparkonce": lambda: exactly_once(up.kafka, folder),
                "Spark's own": lambda: sparks_own(up.kafka),
            },
            spark_session(up),
            folder,
            title=f"{rows:,} records of about 100 bytes in 4 batches into Kafka",
            baseline="spark_kafka",
            rows=rows,
            rounds=rounds,
            small_batches=small_batches,
            schema=SCHEMA,
            columns=COLUMNS,
        )


if __name__ == "__main__":
    main(**arguments(__doc__))
