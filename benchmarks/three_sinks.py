"""Kafka, Postgres and S3 from one query: sparkonce against Spark's own three sinks.

    python benchmarks/three_sinks.py [--rows 2000000] [--rounds 3]

Spark's side is what one writes today: foreachBatch with `persist` and three writes, at least once.
Both sides write the same rows: JSON to Kafka, typed columns to Postgres and Parquet.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import psycopg
from confluent_kafka.admin import AdminClient, NewTopic
from harness import arguments, compare, scratch, spark_session

from sparkonce import ExactlyOnce
from sparkonce.sinks import KafkaSink, PostgresSink, S3Connection, S3Sink
from sparkonce.testing.checks import s3_client
from sparkonce.testing.services import Services, start_services, unavailable

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame

    from sparkonce.sinks.base import AnySink

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

    def exactly_once(
        self, folder: Path, *, only: str | None = None, **settings: Any
    ) -> ExactlyOnce:
        """A pipeline into fresh places.

        Args:
            folder: for its log.
            only: into this sink only.
            settings: more settings of `ExactlyOnce`.
        """
        name = self.fresh()
        kafka = self.services.kafka.bootstrap_servers
        sinks: list[AnySink] = [
            KafkaSink(name, bootstrap_servers=kafka, select=MESSAGE),
            PostgresSink(self.services.postgres.dsn, table=name),
            S3Sink(f"s3://{BUCKET}/{name}", connection=S3Connection(**self.s3.boto3_settings)),
        ]
        return ExactlyOnce(
            name,
            sinks=[sink for sink in sinks if only in {None, sink.name}],
            log=f"sqlite:///{folder}/{name}.db",
            **settings,
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
        spark, places = spark_session(up), Places(up)
        compare(
            {
                "sparkonce": lambda: places.exactly_once(folder),
                "Spark's own": places.sparks_own,
            },
            spark,
            folder,
            title=f"{rows:,} rows in 4 batches into Kafka, Postgres and S3 ({s3})",
            baseline="spark_three_sinks",
            rows=rows,
            rounds=rounds,
            small_batches=small_batches,
        )


if __name__ == "__main__":
    main(**arguments(__doc__))
