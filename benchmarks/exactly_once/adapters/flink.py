"""Copies a topic with PyFlink's own source and sinks; no record passes Python.

It runs with the Python of a venv that has apache-flink, and knows nothing of sparkonce. FLINK_JARS
names the folder of its connector.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from pyflink.common import Configuration, Encoder, SimpleStringSchema, WatermarkStrategy
from pyflink.datastream import CheckpointingMode, StreamExecutionEnvironment
from pyflink.datastream.connectors.base import DeliveryGuarantee, Sink
from pyflink.datastream.connectors.file_system import FileSink, RollingPolicy
from pyflink.datastream.connectors.kafka import (
    KafkaOffsetsInitializer,
    KafkaRecordSerializationSchema,
    KafkaSink,
    KafkaSource,
)

_CHECKPOINT_MS = 1000


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that is complete."""
    found = [path.parent for path in folder.glob("*/chk-*/_metadata")]
    return max(found, key=lambda path: (path / "_metadata").stat().st_mtime_ns, default=None)


def file_sink(folder: str) -> Sink:
    """Lines; a file ends at each checkpoint."""
    return (
        FileSink.for_row_format(folder, Encoder.simple_string_encoder())
        .with_rolling_policy(RollingPolicy.on_checkpoint_rolling_policy())
        .build()
    )


def kafka_sink(servers: str, topic: str, *, exactly_once: bool) -> Sink:
    values = (
        KafkaRecordSerializationSchema.builder()
        .set_topic(topic)
        .set_value_serialization_schema(SimpleStringSchema())
        .build()
    )
    return (
        KafkaSink.builder()
        .set_bootstrap_servers(servers)
        .set_record_serializer(values)
        .set_delivery_guarantee(
            DeliveryGuarantee.EXACTLY_ONCE if exactly_once else DeliveryGuarantee.AT_LEAST_ONCE
        )
        .set_transactional_id_prefix(f"flink-{topic}")
        .set_property("transaction.timeout.ms", "600000")
        .set_property("linger.ms", "50")
        .set_property("compression.type", "lz4")
        .build()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("servers", "input", "output", "state", "guarantee"):
        parser.add_argument(f"--{name}", required=True)
    given = parser.parse_args()
    folder = Path(given.state) / "checkpoints"
    settings = Configuration()
    settings.set_string("execution.checkpointing.storage", "filesystem")
    settings.set_string("execution.checkpointing.dir", folder.as_uri())
    settings.set_string(
        "execution.checkpointing.externalized-checkpoint-retention", "RETAIN_ON_CANCELLATION"
    )
    settings.set_string("execution.checkpointing.num-retained", "3")
    settings.set_string("restart-strategy.type", "disable")
    if (newest := newest_checkpoint(folder)) is not None:
        settings.set_string("execution.state-recovery.path", newest.as_uri())
    env = StreamExecutionEnvironment.get_execution_environment(settings)
    env.set_parallelism(2)
    env.add_jars(*(path.as_uri() for path in Path(os.environ["FLINK_JARS"]).glob("*.jar")))
    exactly_once = given.guarantee == "exactly-once"
    mode = CheckpointingMode.EXACTLY_ONCE if exactly_once else CheckpointingMode.AT_LEAST_ONCE
    env.enable_checkpointing(_CHECKPOINT_MS, mode)
    source = (
        KafkaSource.builder()
        .set_bootstrap_servers(given.servers)
        .set_topics(given.input)
        .set_group_id("flink")
        .set_starting_offsets(KafkaOffsetsInitializer.earliest())
        .set_value_only_deserializer(SimpleStringSchema())
        .build()
    )
    if given.output.startswith("file:"):
        sink = file_sink(given.output)
    else:
        sink = kafka_sink(given.servers, given.output, exactly_once=exactly_once)
    env.from_source(source, WatermarkStrategy.no_watermarks(), "input").sink_to(sink)
    env.execute("benchmark")


if __name__ == "__main__":
    main()
