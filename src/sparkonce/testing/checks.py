"""What an outsider sees in Kafka, Postgres and S3, for tests and the demo.

    read_*               every row that a reader may see, by a plain client
    multiset_difference  rows that are missing, and rows that appear too often
    find_leaks           transactions, uploads and tables left open, prepared or staged

Nothing here uses a sink or Spark, so a mistake in one of them cannot hide itself.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar
from urllib.parse import unquote

import boto3
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
from botocore.config import Config
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition
from kafka.admin import KafkaAdminClient
from psycopg import sql

from sparkonce.testing.services.server import S3Server

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

RowT = TypeVar("RowT", bound=Hashable)

NAMES_PREFIX = "sparkonce."
"""Every name that sparkonce creates in Kafka and S3 starts with this."""

_ASK_TIMEOUT_S = 20.0
_CHUNK = 10_000
_NULL_FOLDER = "__HIVE_DEFAULT_PARTITION__"


# -- rows ------------------------------------------------------------------------------------------


class KafkaMessage(NamedTuple):
    key: bytes | None
    value: bytes | None
    partition: int = 0


class StuckError(Exception):
    """An open transaction keeps a read_committed consumer from the end of a topic.

    Attributes:
        at: for each stuck partition, the offset that was reached and the end offset.
    """

    def __init__(self, topic: str, at: Mapping[int, tuple[int, int]]) -> None:
        where = ", ".join(f"partition {p} stuck at offset {a} of {e}" for p, (a, e) in at.items())
        super().__init__(f"{topic}: {where}; an open transaction blocks read_committed consumers")
        self.at = dict(at)


class CommittedReader:
    """A read_committed consumer of a whole topic, from its beginning.

    Args:
        bootstrap_servers: addresses of the brokers.
        topic: an existing topic.
        stuck_after_s: seconds without a message, short of the end, after which it is stuck.
    """

    def __init__(self, bootstrap_servers: str, topic: str, *, stuck_after_s: float = 10.0) -> None:
        self.topic = topic
        self._stuck_after_s = stuck_after_s
        settings = {
            "bootstrap.servers": bootstrap_servers,
            "group.id": f"checks-{uuid.uuid4().hex}",  # never joined: partitions are assigned
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "check.crcs": True,
            "fetch.wait.max.ms": 50,
        }
        self._consumer = Consumer({**settings, "isolation.level": "read_committed"})
        self._everything = Consumer({**settings, "isolation.level": "read_uncommitted"})
        found = self._consumer.list_topics(topic, timeout=_ASK_TIMEOUT_S).topics[topic]
        self._partitions = sorted(found.partitions)
        self._reached = dict.fromkeys(self._partitions, 0)
        self._consumer.assign(
            [TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in self._partitions]
        )

    def read_visible(self) -> Iterator[KafkaMessage]:
        """New messages up to the last stable offset at the time of the call."""
        return self._read(self._ends(self._consumer))

    def read_all(self) -> Iterator[KafkaMessage]:
        """New messages up to the end of every partition.

        Raises:
            StuckError: an open transaction blocks the consumer.
        """
        return self._read(self._ends(self._everything))

    def _ends(self, consumer: Consumer) -> dict[int, int]:
        # read_committed gets the last stable offset, read_uncommitted the high watermark.
        return {
            partition: consumer.get_watermark_offsets(
                TopicPartition(self.topic, partition), timeout=_ASK_TIMEOUT_S
            )[1]
            for partition in self._partitions
        }

    def _read(self, ends: Mapping[int, int]) -> Iterator[KafkaMessage]:
        deadline = time.monotonic() + self._stuck_after_s
        while unread := [p for p in self._partitions if self._reached[p] < ends[p]]:
            messages = self._consumer.consume(_CHUNK, 0.1)
            for message in messages:
                error = message.error()
                if error is None:
                    # Transaction markers have offsets too; the end-of-partition event shows that
                    # they were passed.
                    self._reached[message.partition()] = message.offset() + 1
                    yield KafkaMessage(message.key(), message.value(), message.partition())
                    deadline = time.monotonic() + self._stuck_after_s
                elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001  # its public name
                    self._reached[message.partition()] = message.offset()
            if time.monotonic() > deadline:
                raise StuckError(self.topic, {p: (self._reached[p], ends[p]) for p in unread})

    def close(self) -> None:
        self._consumer.close()
        self._everything.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_kafka_committed(bootstrap_servers: str, topic: str) -> list[KafkaMessage]:
    """Every message of the topic that a read_committed consumer gets.

    Raises:
        StuckError: an open transaction blocks the consumer.
    """
    with CommittedReader(bootstrap_servers, topic) as reader:
        return list(reader.read_all())


def read_postgres(dsn: str, table: str) -> list[tuple[Any, ...]]:
    """Every row of a table, which may be named with its schema."""
    with psycopg.connect(dsn) as connection:
        query = sql.SQL("SELECT * FROM {}").format(sql.Identifier(*table.split(".")))
        return connection.execute(query).fetchall()


def s3_client(server: S3Server, *, connections: int = 10) -> S3Client:
    """A plain boto3 client of the server, with a pool of `connections`."""
    return boto3.client(
        "s3",
        **server.boto3_settings,
        config=Config(
            s3={"addressing_style": "path"},
            retries={"mode": "standard"},
            max_pool_connections=connections,
        ),
    )


def parquet_keys(client: S3Client, bucket: str, prefix: str) -> Iterator[str]:
    """Keys of the Parquet files below `prefix`, without hidden ones (starting with _ or a dot)."""
    folder = f"{prefix.rstrip('/')}/" if prefix else ""
    for key in keys_in(client, bucket, folder):
        segments = key.removeprefix(folder).split("/")
        hidden = any(segment.startswith(("_", ".")) for segment in segments)
        if segments[-1].endswith(".parquet") and not hidden:
            yield key


def keys_in(client: S3Client, bucket: str, prefix: str = "") -> Iterator[str]:
    """Every key that begins with `prefix`."""
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for item in page.get("Contents", ()):
            yield item["Key"]


def read_s3_parquet(server: S3Server, bucket: str, prefix: str) -> list[dict[str, Any]]:
    """Every row of the Parquet files of a folder, with the partition columns of its subfolders.

    Partition columns are text, or None.
    """
    rows: list[dict[str, Any]] = []
    with contextlib.closing(s3_client(server)) as client:
        for key in parquet_keys(client, bucket, prefix):
            body = client.get_object(Bucket=bucket, Key=key)["Body"].read()
            table = pq.ParquetFile(pa.BufferReader(body)).read()
            folders = folder_values(key)
            rows.extend({**row, **folders} for row in table.to_pylist())
    return rows


def folder_values(key: str) -> dict[str, str | None]:
    """``orders/day=2026-01-01/x.parquet`` gives ``{"day": "2026-01-01"}``."""
    pairs = [segment.split("=", 1) for segment in key.split("/")[:-1] if "=" in segment]
    return {
        unquote(name): None if value == _NULL_FOLDER else unquote(value) for name, value in pairs
    }


def multiset_difference(
    expected: Iterable[RowT], actual: Iterable[RowT]
) -> tuple[Counter[RowT], Counter[RowT]]:
    """Lost rows, and rows that are duplicated or were never sent, each with its count."""
    wanted, found = Counter(expected), Counter(actual)
    return wanted - found, found - wanted


# -- what was left over ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leak:
    """Something that sparkonce left open in an external system.

    Attributes:
        kind: such as "Kafka transaction" or "open upload".
        name: as the system lists it.
    """

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def kafka_leaks(bootstrap_servers: str, prefix: str = NAMES_PREFIX) -> list[Leak]:
    """Open and still ending transactions whose transactional id starts with `prefix`."""
    admin = KafkaAdminClient(bootstrap_servers=bootstrap_servers.split(","))
    try:
        return list(open_transactions(admin, prefix))
    finally:
        admin.close()


def open_transactions(admin: Any, prefix: str = NAMES_PREFIX) -> Iterator[Leak]:
    """The same, through an open kafka-python admin client."""
    states = ["Ongoing", "PrepareCommit", "PrepareAbort", "PrepareEpochFence"]
    for found in admin.list_transactions(state_filters=states).values():
        for transaction in found:
            if transaction.transactional_id.startswith(prefix):
                yield Leak("Kafka transaction", transaction.transactional_id)


def postgres_leaks(dsn: str) -> list[Leak]:
    """Prepared transactions of the database, and staging tables of any schema."""
    with psycopg.connect(dsn) as connection:
        return list(prepared_and_staged(connection))


def prepared_and_staged(connection: psycopg.Connection) -> Iterator[Leak]:
    """The same, through an open connection."""
    prepared = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
    for (gid,) in connection.execute(prepared):
        yield Leak("prepared transaction", gid)
    tables = (
        "SELECT format('%I.%I', schemaname, tablename) FROM pg_tables"
        " WHERE tablename ~ '^sparkonce_[0-9a-f]{12}_'"
    )
    for (table,) in connection.execute(tables):
        yield Leak("staging table", table)


def s3_leaks(server: S3Server, bucket: str, prefix: str = "") -> list[Leak]:
    """Multipart uploads that are neither completed nor aborted."""
    with contextlib.closing(s3_client(server)) as client:
        return list(open_uploads(client, bucket, prefix))


def open_uploads(client: S3Client, bucket: str, prefix: str = "") -> Iterator[Leak]:
    """The same, through an open client."""
    marker = ""
    while True:
        page = client.list_multipart_uploads(Bucket=bucket, Prefix=prefix, KeyMarker=marker)
        uploads = page.get("Uploads", ())
        for upload in uploads:
            yield Leak("open upload", upload["Key"])
        if not page.get("IsTruncated") or not uploads:
            return
        marker = uploads[-1]["Key"]


def find_leaks(
    *,
    kafka: str | None = None,
    postgres: str | None = None,
    s3: tuple[S3Server, str] | None = None,
    kafka_prefix: str = NAMES_PREFIX,
) -> list[Leak]:
    """Everything left open in the given systems.

    Args:
        kafka: bootstrap servers.
        postgres: connection string.
        s3: server and bucket.
        kafka_prefix: only transactional ids that start with it count.
    """
    return [
        *(kafka_leaks(kafka, kafka_prefix) if kafka else ()),
        *(postgres_leaks(postgres) if postgres else ()),
        *(s3_leaks(*s3) if s3 else ()),
    ]
