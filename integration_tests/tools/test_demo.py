"""`make demo` in small, and the checks that it and other tests rest on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from confluent_kafka import Producer

from sparkonce.testing.checks import (
    CommittedReader,
    Leak,
    StuckError,
    find_leaks,
    read_kafka_committed,
)
from sparkonce.testing.services import KafkaServer, PostgresServer, S3Server

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

LAST_LINE = r"rows (\d+) \| kills (\d+) \| lost (\d+) \| duplicated (\d+) \| leaked (\d+)"


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder for temporary files that Postgres' own user may enter; empty at the end."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)
        assert list(Path(folder).iterdir()) == []


def start_demo(scratch: Path, arguments: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "sparkonce.demo", *arguments],
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )


@pytest.mark.usefixtures("services")  # downloads come before the demo's own time
@pytest.mark.parametrize(
    "lake",
    [
        "files",
        pytest.param("iceberg", marks=pytest.mark.slow),
        pytest.param("delta", marks=pytest.mark.slow),
    ],
)
def test_the_demo_loses_duplicates_and_leaks_nothing(scratch: Path, lake: str) -> None:
    """Four kills at four states, and every sink equals the source; nothing stays behind."""
    with start_demo(scratch, ["--rows", "20000", "--lake", lake]) as demo:
        out, err = demo.communicate(timeout=900)
    print(out)
    assert demo.returncode == 0, err
    found = re.fullmatch(LAST_LINE, out.splitlines()[-1])
    assert found is not None
    assert tuple(map(int, found.groups())) == (20_000, 4, 0, 0, 0)
    assert out.count("recovery: ") == 4
    assert all(character.isprintable() or character == "\n" for character in out)


@pytest.mark.usefixtures("services")
def test_an_interrupted_demo_ends_all_that_it_started(scratch: Path) -> None:
    """One sentence, and no process and no file is left."""
    with start_demo(scratch, ["--rows", "20000"]) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if "on their way" in line:
                break
        demo.send_signal(signal.SIGINT)
        out, err = demo.communicate(timeout=120)
    assert demo.returncode == 130, err
    assert out.splitlines()[-1].startswith("sparkonce: interrupted")
    assert "Traceback" not in err


def test_an_open_transaction_is_found_and_holds_readers_back(
    kafka: KafkaServer, fresh_topic: Callable[..., str]
) -> None:
    """The reader says where it is stuck instead of waiting, and reads on when it is over."""
    topic = fresh_topic()
    producer = Producer(
        {"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": f"sparkonce.{topic}."}
    )
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, b"1", b"key")
    assert producer.flush(30) == 0
    prefix = f"sparkonce.{topic}"
    leak = Leak("Kafka transaction", f"{prefix}.")
    assert find_leaks(kafka=kafka.bootstrap_servers, kafka_prefix=prefix) == [leak]
    with CommittedReader(kafka.bootstrap_servers, topic, stuck_after_s=1) as reader:
        assert list(reader.read_visible()) == []
        with pytest.raises(StuckError, match="partition 0 stuck at offset 0 of 1"):
            list(reader.read_all())
        producer.commit_transaction(30)
        assert list(reader.read_all()) == [(b"key", b"1", 0)]
    assert read_kafka_committed(kafka.bootstrap_servers, topic) == [(b"key", b"1", 0)]


def test_a_prepared_transaction_is_found(
    postgres: PostgresServer, fresh_name: Callable[[], str]
) -> None:
    name = fresh_name()
    with psycopg.connect(postgres.dsn, autocommit=True) as connection:
        connection.execute("BEGIN")
        connection.execute(f"PREPARE TRANSACTION '{name}'".encode())
        assert Leak("prepared transaction", name) in find_leaks(postgres=postgres.dsn)
        connection.execute(f"ROLLBACK PREPARED '{name}'".encode())
    assert Leak("prepared transaction", name) not in find_leaks(postgres=postgres.dsn)


def test_an_open_upload_is_found(s3: S3Server, s3_client: S3Client, fresh_bucket: str) -> None:
    s3_client.create_multipart_upload(Bucket=fresh_bucket, Key="orders/x.parquet")
    assert find_leaks(s3=(s3, fresh_bucket)) == [Leak("open upload", "orders/x.parquet")]
