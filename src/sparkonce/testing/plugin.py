"""Fixtures for pytest: real Kafka, Postgres and S3 servers, and one Spark session.

    pytest_plugins = ["sparkonce.testing.plugin"]        in the conftest.py of the root folder

Each server starts when a test first uses it, and ends with the run. pytest does not load this
plugin by itself, so runs that do not use it start as fast as before. Under pytest-xdist each worker
has its own servers and session.

| fixture | is |
|---|---|
| `kafka`, `postgres` | the server, for the whole run |
| `s3` | each S3 server in turn |
| `services` | every kind that can run here |
| `spark` | a session with Spark's Kafka connector and S3A, if they exist for this PySpark |
| `fresh_name` | a function that returns new names for topics, tables and buckets |
| `fresh_topic`, `fresh_schema`, `fresh_table`, `fresh_bucket` | made for the test |
| `s3_client` | a boto3 client of the current S3 server |
"""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from pyspark.sql import SparkSession

    from sparkonce.testing.services import (
        KafkaServer,
        PostgresServer,
        S3Server,
        ServiceKind,
        Services,
    )

_S3_KINDS: tuple[ServiceKind, ...] = ("s3mock", "versitygw")
_LEFT_OUT = "sparkonce_left_out"
_LEFT_OUT_KEY = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def start_kind() -> Iterator[Callable[[ServiceKind], Services]]:
    """A function that starts a server at its first call, or skips the test with the reason."""
    from sparkonce.testing.services import start_services, unavailable

    running: dict[ServiceKind, Services] = {}
    reasons = unavailable()
    with contextlib.ExitStack() as stack:

        def start(kind: ServiceKind) -> Services:
            if kind in reasons:
                pytest.skip(f"{kind}: {reasons[kind]}")
            if kind not in running:
                running[kind] = stack.enter_context(start_services([kind]))
            return running[kind]

        yield start


@pytest.fixture(scope="session")
def services(start_kind: Callable[[ServiceKind], Services]) -> Services:
    """Every kind that can run here."""
    from sparkonce.testing.services import KINDS, Services, unavailable

    available = [kind for kind in KINDS if kind not in unavailable()]
    return Services({kind: start_kind(kind)[kind] for kind in available})


@pytest.fixture(scope="session")
def kafka(start_kind: Callable[[ServiceKind], Services]) -> KafkaServer:
    """A Kafka broker."""
    return start_kind("kafka").kafka


@pytest.fixture(scope="session")
def postgres(start_kind: Callable[[ServiceKind], Services]) -> PostgresServer:
    """A Postgres server that allows prepared transactions."""
    return start_kind("postgres").postgres


@pytest.fixture(scope="session", params=_S3_KINDS)
def s3(request: pytest.FixtureRequest, start_kind: Callable[[ServiceKind], Services]) -> S3Server:
    """Each S3 server in turn."""
    return start_kind(request.param).s3[request.param]


@pytest.fixture(scope="session")
def spark(pytestconfig: pytest.Config) -> Iterator[SparkSession]:
    """The test run's session, with Spark's Kafka connector and S3A if they fit this PySpark."""
    from pyspark.sql import SparkSession

    from sparkonce.testing.quick_spark import jvm_options
    from sparkonce.testing.services import ServiceError, s3a_jars, spark_kafka_jars

    jars: list[Path] = []
    for wanted in (spark_kafka_jars, s3a_jars):
        try:
            jars += wanted()
        except ServiceError as error:  # most tests do not need them
            _left_out(pytestconfig).append(str(error))
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    session = (
        SparkSession.builder.master("local[2]")
        .appName("sparkonce-tests")
        .config("spark.jars", ",".join(map(str, jars)))
        .config("spark.driver.extraJavaOptions", jvm_options())
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    yield session
    session.stop()


def _left_out(config: pytest.Config) -> list[str]:
    """Why connectors are missing, one sentence for each."""
    return config.stash.setdefault(_LEFT_OUT_KEY, [])


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the reasons of a pytest-xdist worker to the process that prints the summary."""
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[_LEFT_OUT] = _left_out(session.config)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Collect them there; a worker that was killed sent nothing."""
    reasons: list[str] = getattr(node, "workeroutput", {}).get(_LEFT_OUT, [])
    known = _left_out(node.config)
    known.extend(reason for reason in reasons if reason not in known)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report which connectors the session lacks, and why."""
    for reason in _left_out(terminalreporter.config):
        terminalreporter.write_line(f"The fixture spark runs without some jars: {reason}")


@pytest.fixture
def fresh_name() -> Callable[[], str]:
    """A function that returns a unique name, valid for topics, tables and buckets."""
    return lambda: f"t{uuid.uuid4().hex[:16]}"


@pytest.fixture
def fresh_topic(kafka: KafkaServer, fresh_name: Callable[[], str]) -> Callable[..., str]:
    """`fresh_topic(partitions=1)` makes a topic and returns its name."""
    from confluent_kafka.admin import AdminClient, NewTopic

    def make(partitions: int = 1) -> str:
        name = fresh_name()
        kafka.start()  # an earlier test may have killed it
        admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
        # -1: the brokers' default.
        topic = NewTopic(name, num_partitions=partitions, replication_factor=-1)
        admin.create_topics([topic])[name].result(timeout=30)
        return name

    return make


@pytest.fixture
def fresh_schema(postgres: PostgresServer, fresh_name: Callable[[], str]) -> Iterator[str]:
    """A schema for the test. It is dropped at the end, and prepared transactions rolled back."""
    import psycopg
    from psycopg import sql

    name = fresh_name()
    postgres.start()  # an earlier test may have killed it
    with psycopg.connect(postgres.dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(name)))
    yield name
    postgres.start()
    with psycopg.connect(postgres.dsn, autocommit=True) as connection:
        for (gid,) in connection.execute("SELECT gid FROM pg_prepared_xacts").fetchall():
            connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))
        # A connection that the test left open must not hang the run.
        connection.execute("SET lock_timeout = '10s'")
        connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(name)))


@pytest.fixture
def fresh_table(
    postgres: PostgresServer, fresh_schema: str, fresh_name: Callable[[], str]
) -> Callable[[str], str]:
    """`fresh_table("id int PRIMARY KEY, …")` makes a table and returns its name, schema.table."""
    import psycopg

    def make(columns: str) -> str:
        name = f"{fresh_schema}.{fresh_name()}"
        with psycopg.connect(postgres.dsn, autocommit=True) as connection:
            connection.execute(f"CREATE TABLE {name} ({columns})".encode())
        return name

    return make


@pytest.fixture
def s3_client(s3: S3Server) -> Iterator[S3Client]:
    """A boto3 client of the current S3 server."""
    from sparkonce.testing import checks

    s3.start()  # an earlier test may have killed it
    with contextlib.closing(checks.s3_client(s3)) as client:
        yield client


@pytest.fixture
def fresh_bucket(s3_client: S3Client, fresh_name: Callable[[], str]) -> str:
    """An empty bucket for the test."""
    name = fresh_name()
    s3_client.create_bucket(Bucket=name)
    return name
