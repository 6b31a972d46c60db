"""What the demo writes to S3: files, or a table of files.

Each has the sink, and what plain clients see of it.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from botocore.exceptions import ClientError

from sparkonce import sinks
from sparkonce.demo.settings import Job
from sparkonce.testing.checks import (
    Leak,
    keys_in,
    open_uploads,
    parquet_keys,
    read_s3_parquet,
    s3_client,
)
from sparkonce.testing.services import S3Server

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

    from sparkonce.sinks import TwoPhaseCommitSink

NAME: Final = "s3"
"""Of the sink, whatever it is."""


class Lake(ABC):
    """What is in the bucket.

    Attributes:
        readers: how the comparison reads it.
    """

    readers: str

    def __init__(self, job: Job) -> None:
        self.job = job

    @abstractmethod
    def sink(self) -> TwoPhaseCommitSink[Any]:
        """A sink that writes to it, named `NAME`."""

    @abstractmethod
    def count(self, client: S3Client) -> int:
        """How many rows readers get now."""

    @abstractmethod
    def rows(self, server: S3Server) -> list[dict[str, Any]]:
        """The rows that readers get."""

    @abstractmethod
    def unfinished(self, client: S3Client) -> Iterator[Leak]:
        """What is open or prepared."""


class Files(Lake):
    """Parquet files in folders, without a table."""

    readers = "s3, Parquet files"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._counted: dict[str, int] = {}

    def sink(self) -> TwoPhaseCommitSink[Any]:
        job = self.job
        connection = sinks.S3Connection(
            endpoint_url=job.s3_endpoint,
            region_name=job.s3_region,
            aws_access_key_id=job.s3_access_key,
            aws_secret_access_key=job.s3_secret_key,
        )
        url = f"s3://{job.bucket}/{job.prefix}"
        return sinks.S3Sink(url, name=NAME, partition_by=["day"], connection=connection)

    def count(self, client: S3Client) -> int:
        job = self.job
        for key in parquet_keys(client, job.bucket, job.prefix):
            if key not in self._counted:
                try:
                    body = client.get_object(Bucket=job.bucket, Key=key)["Body"].read()
                except ClientError:
                    continue  # renamed since it was listed: S3A renames by copy and delete
                self._counted[key] = pq.ParquetFile(pa.BufferReader(body)).metadata.num_rows
        return sum(self._counted.values())

    def rows(self, server: S3Server) -> list[dict[str, Any]]:
        return read_s3_parquet(server, self.job.bucket, self.job.prefix)

    def unfinished(self, client: S3Client) -> Iterator[Leak]:
        return open_uploads(client, self.job.bucket)


class _Table(Lake):
    """A table; its client library leaves uploads of killed tasks to the bucket's lifecycle rule."""

    def unfinished(self, client: S3Client) -> Iterator[Leak]:
        for key in keys_in(client, self.job.bucket, self.job.prefix):
            if key.endswith(".mark"):
                yield Leak("unfinished branch of a table", key)


class Iceberg(_Table):
    """An Iceberg table, whose catalog is in the job's folder."""

    readers = "Iceberg table, pyiceberg"
    _TABLE = "shop.orders"

    def _catalog(self) -> Mapping[str, str]:
        job = self.job
        return {
            "type": "sql",
            "uri": f"sqlite:///{job.folder}/catalog.db",
            "warehouse": f"s3://{job.bucket}/{job.prefix}",
            "s3.endpoint": job.s3_endpoint,
            "s3.region": job.s3_region,
            "s3.access-key-id": job.s3_access_key,
            "s3.secret-access-key": job.s3_secret_key,
        }

    def sink(self) -> TwoPhaseCommitSink[Any]:
        return sinks.IcebergSink(
            self._TABLE, name=NAME, catalog=self._catalog(), create="if_missing"
        )

    def count(self, client: S3Client) -> int:  # noqa: ARG002 - asks the catalog
        return len(self._read())

    def rows(self, server: S3Server) -> list[dict[str, Any]]:  # noqa: ARG002
        return self._read().to_pylist()

    def _read(self) -> pa.Table:
        from pyiceberg.catalog import load_catalog  # noqa: PLC0415 - needs the extra
        from pyiceberg.exceptions import NoSuchTableError  # noqa: PLC0415

        with contextlib.closing(load_catalog("default", **self._catalog())) as catalog:
            try:
                return catalog.load_table(self._TABLE).scan().to_arrow()
            except NoSuchTableError:
                return pa.table({})


class Delta(_Table):
    """A Delta table."""

    readers = "Delta table, deltalake"

    def _options(self) -> Mapping[str, str]:
        job = self.job
        return {
            "AWS_ENDPOINT_URL": job.s3_endpoint,
            "AWS_REGION": job.s3_region,
            "AWS_ACCESS_KEY_ID": job.s3_access_key,
            "AWS_SECRET_ACCESS_KEY": job.s3_secret_key,
            "AWS_ALLOW_HTTP": "true",
        }

    @property
    def _uri(self) -> str:
        return f"s3://{self.job.bucket}/{self.job.prefix}"

    def sink(self) -> TwoPhaseCommitSink[Any]:
        options = self._options()
        return sinks.DeltaSink(self._uri, name=NAME, storage_options=options, create="if_missing")

    def count(self, client: S3Client) -> int:  # noqa: ARG002 - asks the table
        return len(self._read())

    def rows(self, server: S3Server) -> list[dict[str, Any]]:  # noqa: ARG002
        return self._read().to_pylist()

    def _read(self) -> pa.Table:
        from deltalake import DeltaTable  # noqa: PLC0415 - needs the extra
        from deltalake.exceptions import TableNotFoundError  # noqa: PLC0415

        try:
            table = DeltaTable(self._uri, storage_options=dict(self._options()))
        except TableNotFoundError:
            return pa.table({})
        return table.to_pyarrow_table()


LAKES: Final[Mapping[str, type[Lake]]] = {"files": Files, "iceberg": Iceberg, "delta": Delta}


def lake_of(job: Job) -> Lake:
    """What the job writes to S3."""
    return LAKES[job.lake](job)


def leaks_in(job: Job, server: S3Server) -> list[Leak]:
    """What is left over in the bucket."""
    with contextlib.closing(s3_client(server)) as client:
        return list(lake_of(job).unfinished(client))
