"""Kafka: sparkonce against Spark's own at-least-once sink, `format("kafka")`.

    python benchmarks/kafka.py [--rows 2000000] [--rounds 3]

Both write the same records of about 100 bytes, with a producer that is tuned alike (linger 50 ms,
lz4), to a topic with two partitions on one broker.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import uuid
from functools import partial
from typing import TYPE_CHECKING

sys.path.append(sys.path.pop(0))  # this folder last: this file would hide the package `kafka`

from confluent_kafka.admin import AdminClient, NewTopic
from harness import finish, in_turn, make_source, report, run_query, scratch, spark_session

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


def sparks_own(kafka: KafkaServer) -> dict[str, str]:
    return {
        "kafka.bootstrap.servers": kafka.bootstrap_servers,
        "topic": fresh_topic(kafka),
        "kafka.linger.ms": "50",
        "kafka.compression.type": "lz4",
    }


def main(*, rows: int, rounds: int, small_batches: int) -> None:
    with scratch() as folder, start_services(["kafka"], quick_start=False) as up:
        spark = spark_session(up)
        source = partial(make_source, spark, folder, columns=COLUMNS)
        contenders = {
            "sparkonce": lambda: exactly_once(up.kafka, folder),
            "Spark's own": lambda: sparks_own(up.kafka),
        }
        large = source(rows=rows, batches=4)
        runs = in_turn(
            contenders, lambda w: run_query(spark, large, w, folder, SCHEMA), rounds=rounds
        )
        small = source(rows=100 * small_batches, batches=small_batches)
        small_runs = in_turn(
            contenders, lambda w: run_query(spark, small, w, folder, SCHEMA), rounds=rounds
        )
        spark.stop()
    figures = {
        name: {
            "all batches, rows/s": [run.rows_per_s(warm=False) for run in runs[name]],
            "warm batches, rows/s": [run.rows_per_s(warm=True) for run in runs[name]],
            "batch of 100 rows, ms": [run.small_ms for run in small_runs[name]],
            "Python worker, MiB": [run.worker_mib for run in runs[name]],
        }
        for name in contenders
    }
    report(f"{rows:,} records of about 100 bytes in 4 batches into Kafka", figures)
    ours, theirs = (
        {key: statistics.median(values) for key, values in figures[name].items()}
        for name in contenders
    )
    finish(
        rows_per_s=ours["all batches, rows/s"],
        rows_per_s_warm=ours["warm batches, rows/s"],
        small_batch_ms=ours["batch of 100 rows, ms"],
        worker_mib=ours["Python worker, MiB"],
        ratio_to_spark_kafka=ours["all batches, rows/s"] / theirs["all batches, rows/s"],
        ratio_to_spark_kafka_warm=ours["warm batches, rows/s"] / theirs["warm batches, rows/s"],
        ratio_small_batch_to_spark_kafka=(
            ours["batch of 100 rows, ms"] / theirs["batch of 100 rows, ms"]
        ),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small-batches", type=int, default=10)
    main(**vars(parser.parse_args()))
