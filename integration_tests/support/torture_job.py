"""A job with Kafka, Postgres, S3 and Delta for `sparkonce torture`; its sinks can have a bug each.

The environment variable TORTURE_JOB has a `Settings` as JSON.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import boto3
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
from botocore.config import Config
from confluent_kafka.admin import AdminClient, NewTopic
from deltalake import DeltaTable

from sparkonce import ExactlyOnce
from sparkonce.sinks import DeltaSink, KafkaSink, PostgresSink, S3Connection, S3Sink
from sparkonce.sinks.base import AnySink
from sparkonce.testing import checks
from sparkonce.testing.services import Services, spark_kafka_jars
from sparkonce.txn_log import open_log

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from pyspark.sql import DataFrame

    from sparkonce.errors import SparkOnceError
    from sparkonce.model import Committable

VARIABLE = "TORTURE_JOB"


@dataclass(frozen=True)
class Settings:
    kafka: str
    postgres: str
    s3: Mapping[str, str]
    name: str
    log: str
    lake: str
    commit: str = "immediate"
    bugs: tuple[str, ...] = ()
    ports: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls) -> Settings:
        return cls(**json.loads(os.environ[VARIABLE]))

    def through(self, **ports: int) -> Settings:
        """With proxies between sinks and servers; readers go to the servers."""
        return replace(self, ports=ports)

    def address_of(self, sink: str, address: str) -> str:
        """The address of its server, or of the proxy before it."""
        port = urlsplit(address).port
        return address.replace(f":{port}", f":{self.ports.get(sink, port)}")

    def to_env(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}

    @property
    def bucket(self) -> str:
        return self.name.replace("_", "-")

    def client(self) -> S3Client:
        return boto3.client("s3", **self.s3, config=Config(s3={"addressing_style": "path"}))


def made(services: Services, name: str, folder: Path, **settings: Any) -> Settings:
    """Make topic, table and bucket of that name; the log and the Delta table are in the folder."""
    s3 = next(iter(services.s3.values()))
    admin = AdminClient({"bootstrap.servers": services.kafka.bootstrap_servers})
    admin.create_topics([NewTopic(name, num_partitions=3)])[name].result(timeout=30)
    with psycopg.connect(services.postgres.dsn, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE {name} (id bigint, run int, payload text)".encode())
    dsn, kafka = services.postgres.dsn, services.kafka.bootstrap_servers
    log, lake = f"sqlite:///{folder}/log.db", f"{folder}/lake"
    found = Settings(kafka, dsn, s3.boto3_settings, name, log, lake, **settings)
    found.client().create_bucket(Bucket=found.bucket)
    return found


# -- one bug each ----------------------------------------------------------------------------------


class Eager:
    """Is visible when it is prepared."""

    def preCommit(self, handle: Any) -> Committable:
        committable: Committable = super().preCommit(handle)  # type: ignore[misc]
        self.commit(committable)  # type: ignore[attr-defined]
        return committable


class EagerKafka(Eager, KafkaSink):
    pass


class EagerS3(Eager, S3Sink):
    pass


class Recovers:
    """Knows whether a recovery calls `commit`: it does so before `validate`."""

    is_recovering = True

    def validate(self, schema: pa.Schema) -> None:
        super().validate(schema)  # type: ignore[misc]
        self.is_recovering = False


class Forgetful(Recovers, KafkaSink):
    """Commits only what this process has prepared, although a recovery asks for more."""

    def commit_many(self, committables: Sequence[Committable]) -> Sequence[SparkOnceError | None]:
        if self.is_recovering:
            return [None] * len(committables)
        return super().commit_many(committables)


class Outside(PostgresSink):
    """Writes outside of its transaction."""

    def write(self, handle: Any, batch: pa.RecordBatch) -> None:
        settings = Settings.read()
        with psycopg.connect(settings.postgres) as connection, connection.cursor() as cursor:
            insert = f"INSERT INTO {settings.name} VALUES (%(id)s, %(run)s, %(payload)s)"
            cursor.executemany(insert.encode(), batch.to_pylist())


class Copying(Recovers, S3Sink):
    """Copies its files once more when a recovery commits them again."""

    def commit(self, committable: Committable) -> None:
        super().commit(committable)
        payload: Any = committable.payload
        settings = Settings.read()
        for file in payload["files"] if self.is_recovering else ():
            source = {"Bucket": settings.bucket, "Key": file["key"]}
            key = f"{file['key']}-{uuid.uuid4().hex}.parquet"
            settings.client().copy_object(Bucket=settings.bucket, Key=key, CopySource=source)


class Repeating(Recovers, PostgresSink):
    """Writes the newest rows once more when a recovery commits them."""

    def commit(self, committable: Committable) -> None:
        super().commit(committable)
        if not self.is_recovering:
            return
        settings = Settings.read()
        with psycopg.connect(settings.postgres) as connection:
            newest = f"SELECT max(id) - 5 FROM {settings.name}"
            again = f"SELECT * FROM {settings.name} WHERE id > ({newest})"
            connection.execute(f"INSERT INTO {settings.name} {again}".encode())


BUGS: Mapping[str, type[AnySink]] = {
    kind.__name__: kind for kind in (EagerKafka, Forgetful, Repeating, Outside, EagerS3, Copying)
}


# -- the job ---------------------------------------------------------------------------------------


def pipeline() -> ExactlyOnce:
    settings = Settings.read()

    def kind(sound: Any) -> Any:
        wrong = [BUGS[bug] for bug in settings.bugs if issubclass(BUGS[bug], sound)]
        return wrong[0] if wrong else sound

    endpoint = settings.address_of("s3", settings.s3["endpoint_url"])
    return ExactlyOnce(
        "torture",
        sinks=[
            kind(KafkaSink)(
                settings.name, bootstrap_servers=settings.kafka, key="id", value_format="json"
            ),
            kind(PostgresSink)(
                settings.address_of("postgres", settings.postgres), table=settings.name
            ),
            kind(S3Sink)(
                f"s3://{settings.bucket}/rows",
                connection=S3Connection(**{**settings.s3, "endpoint_url": endpoint}),
            ),
            DeltaSink(settings.lake, create="if_missing"),
        ],
        log=settings.log,
        commit=settings.commit,
    )


def naive(df: DataFrame, batch_id: int) -> None:
    """Spark's own sink of Kafka, in foreachBatch."""
    settings = Settings.read()
    rows = df.selectExpr("string(id) AS key", "to_json(struct(*)) AS value")
    writer = rows.write.format("kafka").option("kafka.bootstrap.servers", settings.kafka)
    writer.option("topic", settings.name).save()


class KafkaRows:
    """What a read_committed consumer gets; each call reads on."""

    def __init__(self, settings: Settings) -> None:
        self._reader = checks.CommittedReader(settings.kafka, settings.name)
        self._rows: list[dict[str, Any]] = []

    def __call__(self) -> list[dict[str, Any]]:
        for message in self._reader.read_visible():
            row = json.loads(message.value or b"")
            self._rows.append({**row, "lane": f"partition {message.partition}"})
        return self._rows

    def close(self) -> None:
        self._reader.close()


class S3Rows:
    """The rows of all Parquet files; each file is read once."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._client = settings, settings.client()
        self._files: dict[str, list[dict[str, Any]]] = {}

    def __call__(self) -> list[dict[str, Any]]:
        keys = list(checks.parquet_keys(self._client, self._settings.bucket, "rows"))
        for key in keys:
            if key not in self._files:
                found = self._client.get_object(Bucket=self._settings.bucket, Key=key)
                body = pa.BufferReader(found["Body"].read())
                self._files[key] = pq.ParquetFile(body).read().to_pylist()
        return [row for key in keys for row in self._files[key]]


def delta(settings: Settings) -> list[dict[str, Any]]:
    """What deltalake reads."""
    if not DeltaTable.is_deltatable(settings.lake):
        return []
    return DeltaTable(settings.lake).to_pyarrow_table().to_pylist()


def readers() -> dict[str, Callable[[], Iterable[Mapping[str, Any]]]]:
    settings = Settings.read()

    def postgres() -> list[dict[str, Any]]:
        names = ("id", "run", "payload")
        found = checks.read_postgres(settings.postgres, settings.name)
        return [dict(zip(names, values, strict=True)) for values in found]

    return {
        "kafka": KafkaRows(settings),
        "postgres": postgres,
        "s3": S3Rows(settings),
        "delta": lambda: delta(settings),
    }


def unfinished() -> dict[str, Callable[[], list[Any]]]:
    settings = Settings.read()
    with closing(open_log(settings.log)) as log:
        ours = f"sparkonce.{log.log_id}."
    return {
        "kafka": lambda: checks.kafka_leaks(settings.kafka, ours),
        "postgres": lambda: [x for x in checks.postgres_leaks(settings.postgres) if ours in str(x)],
        "s3": lambda: list(checks.open_uploads(settings.client(), settings.bucket)),
        "delta": lambda: list(Path(settings.lake, "_sparkonce").glob("*")),
    }


def kafka_of_spark() -> dict[str, str]:
    """Spark's settings for `naive`."""
    return {"spark.jars": ",".join(map(str, spark_kafka_jars()))}


def sink_of(bug: str) -> str:
    """The name of the sink that has it."""
    names = {KafkaSink: "kafka", PostgresSink: "postgres", S3Sink: "s3"}
    return next(name for kind, name in names.items() if issubclass(BUGS[bug], kind))
