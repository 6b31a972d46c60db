"""A folder in a bucket, through boto3 and through S3A at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark import SparkContext
from tests.support.binding_cases import assert_bound_once
from tests.support.savepoint_cases import Stage
from tests.support.storage_cases import assert_reads_what_spark_writes, assert_stores_bytes

from sparkonce.errors import ConfigurationError, LogUnavailableError, SavepointError
from sparkonce.spark_hooks.checkpoint import checkpoint_folder
from sparkonce.spark_hooks.data_source.planned_query import PlannedQuery
from sparkonce.spark_hooks.savepoints import Savepoints
from sparkonce.storage import FileSystemFolder
from sparkonce.storage.hadoop import HadoopFolder
from sparkonce.testing import checks
from sparkonce.testing.services import S3Server, ServiceKind, Services
from sparkonce.txn_log.folder import check_create

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from pyspark.sql import SparkSession


@pytest.fixture
def server(
    start_kind: Callable[[ServiceKind], Services], monkeypatch: pytest.MonkeyPatch
) -> S3Server:
    """A server that keeps conditions; boto3 finds it in the environment."""
    server = start_kind("versitygw").s3["versitygw"]
    server.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.endpoint_url)
    monkeypatch.setenv("AWS_REGION", server.region)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_key)
    return server


@pytest.fixture
def client(server: S3Server) -> Iterator[S3Client]:
    with closing(checks.s3_client(server)) as client:
        yield client


@pytest.fixture
def bucket(client: S3Client, fresh_name: Callable[[], str]) -> str:
    name = fresh_name()
    client.create_bucket(Bucket=name)
    return name


def by_boto3(location: str) -> FileSystemFolder:
    return checkpoint_folder(location, by_boto3=True)


def by_s3a(server: S3Server, location: str) -> HadoopFolder:
    context = SparkContext._active_spark_context
    conf = context._jvm.org.apache.hadoop.conf.Configuration(context._jsc.hadoopConfiguration())
    settings = {
        "endpoint": server.endpoint_url,
        "endpoint.region": server.region,
        "access.key": server.access_key,
        "secret.key": server.secret_key,
        "path.style.access": "true",
    }
    for name, value in settings.items():
        conf.set(f"fs.s3a.{name}", value)
    return HadoopFolder(location, context._gateway, conf, f"checkpoint:{location}")


def stored(client: S3Client, bucket: str, prefix: str) -> dict[str, bytes]:
    """Every object by its key below the prefix, without the markers of empty folders."""
    listed = client.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])
    keys = [found["Key"] for found in listed if not found["Key"].endswith("/")]
    return {
        key.removeprefix(prefix): client.get_object(Bucket=bucket, Key=key)["Body"].read()
        for key in keys
    }


def test_folder_in_a_bucket_reads_what_spark_writes(client: S3Client, bucket: str) -> None:
    def put(name: str, text: str) -> None:
        client.put_object(Bucket=bucket, Key=f"a b/%20/{name}", Body=text.encode())

    assert_reads_what_spark_writes(by_boto3(f"s3a://{bucket}/a b//./%20/"), put)


def test_folder_without_files_is_its_marker(client: S3Client, bucket: str) -> None:
    """S3A's own, which is a folder and no file; a hidden file is not listed."""
    for key in ("ck/state/", "ck/commits/", "ck/commits/.0.tmp", "ck/commits/0"):
        client.put_object(Bucket=bucket, Key=key, Body=b"")
    folder = by_boto3(f"s3a://{bucket}/ck")
    assert folder.exists("state")
    assert folder.files("state") == folder.names("state") == []
    assert set(folder.files("commits")) == {".0.tmp", "0"}
    assert folder.names("") == ["commits/0"]


def test_checkpoint_in_a_bucket_is_bound_once(server: S3Server, bucket: str) -> None:
    assert_bound_once(by_boto3(f"s3a://{bucket}/ck"))


def test_both_ways_write_the_same_bytes_at_the_same_keys(
    spark: SparkSession, server: S3Server, client: S3Client, bucket: str
) -> None:
    """Each reads and lists what the other has written, and does not create it again."""
    texts = {"sparkonce.json": '{"log_id": "ä€"}', "sparkonce-log/orders/head/0001.json": "{}"}
    for prefix, folder in (
        ("a/", by_boto3(f"s3a://{bucket}/a")),
        ("b/", by_s3a(server, f"s3a://{bucket}/b")),
    ):
        assert all(folder.create(name, text) for name, text in texts.items())
        assert stored(client, bucket, prefix) == {n: text.encode() for n, text in texts.items()}
    for folder in (by_s3a(server, f"s3a://{bucket}/a"), by_boto3(f"s3a://{bucket}/b")):
        for name, text in texts.items():
            assert folder.read(name) == text
            assert not folder.create(name, "other")
        assert set(folder.names("")) == texts.keys()
        assert folder.files("sparkonce-log/orders/head") == ["0001.json"]
        folder.delete("sparkonce.json")
        assert not folder.exists("sparkonce.json")
    assert by_boto3(f"s3a://{bucket}/a").location == by_s3a(server, f"s3a://{bucket}/a/").location


class BothWays:
    """A folder whose racing writers come through boto3 and through S3A, in turn."""

    def __init__(self, one: FileSystemFolder, other: FileSystemFolder) -> None:
        self.address, self._ways = one.address, (one, other)
        self.delete = one.delete

    def create(self, name: str, text: str) -> bool:
        return self._ways[int(text) % 2].create(name, text)


def test_one_of_both_ways_wins_a_race(spark: SparkSession, server: S3Server, bucket: str) -> None:
    """As a driver with foreachBatch and one with the format that start at the same time."""
    location = f"s3a://{bucket}/race"
    check_create(BothWays(by_boto3(location), by_s3a(server, location)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("location", "variable", "value", "expected"),
    [
        ("s3a://{bucket}/ck", "AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9", LogUnavailableError),
        ("s3a://{bucket}/ck", "AWS_SECRET_ACCESS_KEY", "wrong", LogUnavailableError),
        ("s3://{bucket}-other/ck", "AWS_REGION", "us-east-1", LogUnavailableError),
        ("s3a://{bucket}/ck", "AWS_REGION", "us-east-1", ConfigurationError),
    ],
    ids=["endpoint", "secret", "bucket", "no checkpoint"],
)
def test_checkpoint_that_boto3_does_not_find(
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
    location: str,
    variable: str,
    value: str,
    expected: type[Exception],
) -> None:
    """Spark's own settings may be right: the error names those that count here."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(expected, match=r"does not see Spark's settings \(fs\.s3a\.\*\)"):
        PlannedQuery(location.format(bucket=bucket), "run")


@pytest.mark.parametrize("way", ["boto3", "S3A"])
def test_savepoint_in_a_bucket(
    spark: SparkSession, server: S3Server, bucket: str, tmp_path: Path, way: str
) -> None:
    """Made, read, verified and deleted; the checkpoint of it is on a disk."""
    del spark  # S3A needs its JVM
    location = f"s3a://{bucket}/savepoints"
    folder = by_boto3(location) if way == "boto3" else by_s3a(server, location)
    assert_stores_bytes(folder)
    for name in list(folder.names("")):
        folder.delete(name)
    stage = Stage(tmp_path, 3)
    made = stage.create(folder, "first")
    place = Savepoints(folder)
    assert place.names() == ["first"]
    assert place.read("first") == made
    assert not list(place.verify(made))
    with pytest.raises(SavepointError, match="already"):
        stage.create(folder, "first")
    assert place.delete("first") == len({file.sha256 for file in made.files.values()})
    assert folder.names("") == []
