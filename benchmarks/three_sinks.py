"""Kafka, Postgres and S3 from one query: sparkonce against Spark's own three sinks.

    python benchmarks/three_sinks.py [--rows 2000000] [--rounds 3]

Spark's side is what one writes today: foreachBatch with `persist` and three writes, at least once.
Both sides write the same rows: JSON to Kafka, typed columns to Postgres and Parquet.
"""

from __future__ import annotations

import argparse
import statistics
import uuid
from typing import TYPE_CHECKING, Any

import psycopg
from confluent_kafka.admin import AdminClient, NewTopic
from harness import finish, in_turn, make_source, report, run_query, scratch, spark_session

from sparkonce import ExactlyOnce
from sparkonce.sinks import KafkaSink, PostgresSink, S3Sink
from sparkonce.testing.checks import s3_client
from sparkonce.testing.services import Services, start_services, unavailable

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame

MESSAGE = ["string(id) AS key", "to_json(struct(*)) AS value"]
BUCKET = "bench"
COLUMNS = "id bigint, name text, amount float8, at timestamptz"


class Places:
    """Fresh topics, tables and prefixes for each run."""

    def __init__(self, services: Services) -> None:
        self.services = services
        (self.s3,) = services.s3.values()
        client = s3_client(self.s3)
        client.create_bucket(Bucket=BUCKET)
        client.close()

    def fresh(self) -> str:
        name = f"b{uuid.uuid4().hex[:10]}"
        admin = AdminClient({"bootstrap.servers": self.services.kafka.bootstrap_servers})
        admin.create_topics([NewTopic(name, num_partitions=2)])[name].result(30)
        with psycopg.connect(self.services.postgres.dsn, autocommit=True) as connection:
            connection.execute(f"CREATE TABLE {name} ({COLUMNS})".encode())
        return name

    def exactly_once(self, folder: Path) -> ExactlyOnce:
        name = self.fresh()
        return ExactlyOnce(
            name,
            sinks=[
                KafkaSink(
                    name,
                    bootstrap_servers=self.services.kafka.bootstrap_servers,
                    select=MESSAGE,
                ),
                PostgresSink(self.services.postgres.dsn, table=name),
                S3Sink(
                    f"s3://{BUCKET}/{name}",
                    endpoint_url=self.s3.endpoint_url,
                    access_key=self.s3.access_key,
                    secret_key=self.s3.secret_key,
                    region=self.s3.region,
                ),
            ],
            log=f"sqlite:///{folder}/{name}.db",
        )

    def sparks_own(self) -> Any:
        name = self.fresh()
        kafka = {
            "kafka.bootstrap.servers": self.services.kafka.bootstrap_servers,
            "topic": name,
            "kafka.linger.ms": "50",
            "kafka.compression.type": "lz4",
        }
        host = psycopg.conninfo.conninfo_to_dict(self.services.postgres.dsn)
        url = (
            f"jdbc:postgresql://{host['host']}:{host['port']}/{host['dbname']}"
            "?reWriteBatchedInserts=true"
        )
        jdbc = {"user": str(host["user"]), "driver": "org.postgresql.Driver", "batchsize": "10000"}

        def write(df: DataFrame, _batch_id: int) -> None:
            df.persist()
            df.selectExpr(*MESSAGE).write.format("kafka").options(**kafka).save()
            df.write.jdbc(url, name, mode="append", properties=jdbc)
            df.write.mode("append").parquet(f"s3a://{BUCKET}/{name}")
            df.unpersist()

        return write


def main(*, rows: int, rounds: int, small_batches: int) -> None:
    s3 = "s3mock" if "versitygw" in unavailable() else "versitygw"
    with scratch() as folder, start_services(["kafka", "postgres", s3], quick_start=False) as up:
        spark = spark_session(up)
        places = Places(up)
        contenders = {
            "sparkonce": lambda: places.exactly_once(folder),
            "Spark's own": places.sparks_own,
        }
        figures: dict[str, dict[str, list[float]]] = {name: {} for name in contenders}
        large = make_source(spark, folder, rows=rows, batches=4)
        runs = in_turn(
            contenders, lambda writer: run_query(spark, large, writer, folder), rounds=rounds
        )
        small = make_source(spark, folder, rows=100 * small_batches, batches=small_batches)
        small_runs = in_turn(
            contenders, lambda writer: run_query(spark, small, writer, folder), rounds=rounds
        )
        spark.stop()
    for name in contenders:
        figures[name] = {
            "all batches, rows/s": [run.rows_per_s(warm=False) for run in runs[name]],
            "warm batches, rows/s": [run.rows_per_s(warm=True) for run in runs[name]],
            "batch of 100 rows, ms": [run.small_ms for run in small_runs[name]],
            "Python worker, MiB": [run.worker_mib for run in runs[name]],
        }
    report(f"{rows:,} rows in 4 batches into Kafka, Postgres and S3 ({s3})", figures)
    ours, theirs = (
        {key: statistics.median(values) for key, values in figures[name].items()}
        for name in contenders
    )
    finish(
        rows_per_s=ours["all batches, rows/s"],
        rows_per_s_warm=ours["warm batches, rows/s"],
        small_batch_ms=ours["batch of 100 rows, ms"],
        worker_mib=ours["Python worker, MiB"],
        ratio_to_spark_three_sinks=ours["all batches, rows/s"] / theirs["all batches, rows/s"],
        ratio_to_spark_three_sinks_warm=(
            ours["warm batches, rows/s"] / theirs["warm batches, rows/s"]
        ),
        ratio_small_batch_to_spark_three_sinks=(
            ours["batch of 100 rows, ms"] / theirs["batch of 100 rows, ms"]
        ),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small-batches", type=int, default=10)
    main(**vars(parser.parse_args()))
