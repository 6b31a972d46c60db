"""For contrast: the same three writes with Spark's own sinks, as foreachBatch is often used.

    batch ─► Kafka ─► Postgres (JDBC) ─► S3 (S3A, Parquet) ─► Spark's commits/N

Spark promises each of them at least once. Killed anywhere on this line, the next driver writes
the whole batch again, also into the sinks that have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pyspark import TaskContext

from sparkonce.demo.orders import KAFKA_COLUMNS
from sparkonce.failpoints import reach

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from sparkonce.demo.settings import Job


class Naive:
    """Goes into foreachBatch where `ExactlyOnce` would."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __call__(self, df: DataFrame, batch_id: int) -> None:
        # Executors can be stopped in Python only, so the rows pass through it once.
        batch = df.mapInArrow(_Watched(batch_id), df.schema).persist()
        self._write_kafka(batch)
        reach("commit.after", batch=batch_id, sink="kafka")
        self._write_postgres(batch)
        reach("commit.after", batch=batch_id, sink="postgres")
        self._write_s3(batch)
        reach("deliver.after", batch=batch_id)
        batch.unpersist()

    def _write_kafka(self, batch: DataFrame) -> None:
        writer = batch.selectExpr(*KAFKA_COLUMNS).write.format("kafka")
        writer.option("kafka.bootstrap.servers", self._job.kafka).option(
            "topic", self._job.topic
        ).save()

    def _write_postgres(self, batch: DataFrame) -> None:
        at = urlsplit(self._job.postgres)
        batch.write.format("jdbc").mode("append").options(
            url=f"jdbc:postgresql://{at.hostname}:{at.port}{at.path}?reWriteBatchedInserts=true",
            driver="org.postgresql.Driver",
            user=at.username or "",
            dbtable=self._job.table,
        ).save()

    def _write_s3(self, batch: DataFrame) -> None:
        url = f"s3a://{self._job.bucket}/{self._job.prefix}"
        batch.write.mode("append").partitionBy("day").parquet(url)

    @staticmethod
    def settings(job: Job) -> Mapping[str, str]:
        """Settings of the session, with which S3A finds the server."""
        return {
            "spark.hadoop.fs.s3a.endpoint": job.s3_endpoint,
            "spark.hadoop.fs.s3a.endpoint.region": job.s3_region,
            "spark.hadoop.fs.s3a.access.key": job.s3_access_key,
            "spark.hadoop.fs.s3a.secret.key": job.s3_secret_key,
            "spark.hadoop.fs.s3a.path.style.access": "true",
            "spark.hadoop.fs.s3a.connection.ssl.enabled": "false",
            "spark.hadoop.fs.s3a.buffer.dir": job.scratch,
            "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        }


class _Watched:
    """Passes rows on and reaches the fail point of sparkonce's executors."""

    def __init__(self, batch_id: int) -> None:
        self._batch_id = batch_id

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        partition = context.partitionId() if context else 0
        for batch in batches:
            yield batch
            reach("write.after", batch=self._batch_id, partition=partition)
