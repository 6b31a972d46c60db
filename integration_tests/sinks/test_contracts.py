"""The sinks of the project on real servers, proven by the kit that users have."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import psycopg
import pyarrow as pa
import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from kafka.admin import KafkaAdminClient
from psycopg import sql
from psycopg.conninfo import make_conninfo

from integration_tests.support.postgres import commits_hang
from sparkonce.errors import PreparedBranchLostError
from sparkonce.model import Committable
from sparkonce.sinks import KafkaSink, PostgresSink, S3Connection, S3Sink
from sparkonce.sinks.base import AnySink
from sparkonce.sinks.kafka.connecting.settings import KafkaSettings
from sparkonce.sinks.kafka.finishing.finisher import Finisher
from sparkonce.sinks.s3.finishing import outcome
from sparkonce.testing import Proxy, SinkContract, SinkWorld, checks
from sparkonce.testing.services import start_services
from sparkonce.testing.services.containers import choose_backend
from sparkonce.testing.services.process import free_port
from sparkonce.testing.sink_late import LATE, SinkLate
from sparkonce.testing.sink_network import SinkNetwork
from sparkonce.testing.sink_world import OWNER, Stage

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

    from sparkonce.testing.proxy import FaultKind
    from sparkonce.testing.services import KafkaServer, PostgresServer, S3Server
    from sparkonce.testing.services.kafka import KafkaVersion
    from sparkonce.testing.services.server import Server

LAG_S = 20.0
SECRET = "s3cr3t"
"""A password, which the local Postgres does not ask for."""

_ENDING = ["PrepareCommit", "PrepareAbort", "PrepareEpochFence"]
"""States of a transaction whose markers are not written yet."""


@contextlib.contextmanager
def stopped(server: Server) -> Iterator[None]:
    server.stop()
    yield
    server.start()


@contextlib.contextmanager
def kafka_world(servers: str, topic: str, proxy: Proxy | None = None) -> Iterator[SinkWorld]:
    """One message per row; the broker sends clients of the proxy back to it."""
    admin = KafkaAdminClient(bootstrap_servers=servers)

    def refresh() -> None:
        deadline = time.monotonic() + LAG_S
        while any(admin.list_transactions(state_filters=_ENDING).values()):
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def visible() -> list[Any]:
        with checks.CommittedReader(servers, topic) as reader:
            return [json.loads(message.value or b"") for message in reader.read_visible()]

    def selected(batch: pa.RecordBatch) -> pa.RecordBatch:
        values = [json.dumps(row) for row in batch.to_pylist()]
        return pa.record_batch({"value": pa.array(values, pa.string())})

    def lose(committable: Committable) -> None:
        payload: Any = committable.payload
        producer = payload["producer_id"], payload["producer_epoch"]
        finisher = Finisher(KafkaSettings(servers))
        finisher.end(payload["transactional_id"], *producer, commit=False)
        finisher.close()

    yield SinkWorld(
        sink=lambda: KafkaSink(
            topic, bootstrap_servers=servers if proxy is None else proxy.address
        ),
        visible=visible,
        unfinished=lambda: checks.kafka_leaks(servers, f"sparkonce.{OWNER.log_id}."),
        selected=selected,
        lose=lose,
        proxy=proxy,
        reads_in_order=True,
        refresh=refresh,
    )
    admin.close()


class TestKafkaSink(SinkContract):
    """One message per row, as Spark's `to_json` would make it."""

    large_rows = 20_000
    race_rounds = 40

    @pytest.fixture
    def make_world(
        self, kafka: KafkaServer, fresh_topic: Callable[..., str]
    ) -> Iterator[Callable[[pa.Schema], SinkWorld]]:
        with kafka_world(kafka.bootstrap_servers, fresh_topic(2)) as world:
            yield lambda schema: world

    @pytest.mark.parametrize("name", [])
    def test_rows_of_type(self, name: str) -> None:
        """The rows of this sink are bytes; Spark makes them (kafka/test_typed.py)."""


class TestPostgresSink(SinkContract):
    race_rounds = 40
    types: ClassVar = {
        "bool": "boolean",
        "int8": "smallint",
        "int16": "smallint",
        "int32": "integer",
        "int64": "bigint",
        "float": "real",
        "double": "double precision",
        "decimal128(20, 4)": "numeric(20, 4)",
        "string": "text",
        "binary": "bytea",
        "date32[day]": "date",
        "timestamp[us, tz=UTC]": "timestamptz",
        "timestamp[us, tz=America/New_York]": "timestamptz",
        "timestamp[us]": "timestamp",
        "list<item: string>": "text[]",
        "struct<a: int64, b: string>": "jsonb",
    }

    @pytest.fixture
    def make_world(
        self, postgres: PostgresServer, fresh_schema: str
    ) -> Iterator[Callable[[pa.Schema], SinkWorld]]:
        table = f"{fresh_schema}.orders"
        port = psycopg.conninfo.conninfo_to_dict(postgres.dsn)["port"]
        proxy = Proxy(int(str(port)))

        def make(schema: pa.Schema) -> SinkWorld:
            columns = ", ".join(f"{f.name} {self.types[str(f.type)]}" for f in schema)
            with psycopg.connect(postgres.dsn, autocommit=True) as connection:
                connection.execute(f"CREATE TABLE {table} ({columns})".encode())
            return SinkWorld(
                sink=lambda: PostgresSink(
                    make_conninfo(postgres.dsn, port=proxy.port, password=SECRET),
                    table=table,
                    lock_timeout_s=10.0,
                ),
                visible=lambda: [
                    dict(zip(schema.names, row, strict=True))
                    for row in checks.read_postgres(postgres.dsn, table)
                ],
                unfinished=unfinished,
                lose=lose,
                proxy=proxy,
                away=lambda: stopped(postgres),
                stalled=lambda: commits_hang(postgres.dsn),
                secrets=[SECRET],
            )

        def unfinished() -> list[checks.Leak]:
            ours = f"sparkonce.{OWNER.log_id}.", fresh_schema
            leaks = checks.postgres_leaks(postgres.dsn)
            return [leak for leak in leaks if any(name in leak.name for name in ours)]

        def lose(committable: Committable) -> None:
            payload: Any = committable.payload
            with psycopg.connect(postgres.dsn, autocommit=True) as connection:
                gid = sql.Literal(str(committable.branch_id))
                connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(gid))
                for name in payload["staging"]:
                    staging = sql.Identifier(payload["schema"], name)
                    connection.execute(sql.SQL("DROP TABLE {}").format(staging))

        yield make
        proxy.close()


@pytest.mark.parametrize(
    "s3",
    ["versitygw", pytest.param("s3mock", marks=pytest.mark.slow)],
    indirect=True,
    scope="session",
)
class TestS3Sink(SinkContract):
    race_rounds = 10
    most_faults = 6

    @pytest.mark.slow  # each loss takes `PATIENCE_S`, in another process
    def test_commit_races_an_abort(self, stage: Stage, sink: AnySink) -> None:
        super().test_commit_races_an_abort(stage, sink)

    @pytest.fixture(autouse=True)
    def _lost_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing here completes in the background, so that no test has to wait for it."""
        monkeypatch.setattr(outcome, "PATIENCE_S", 0.0)

    @pytest.fixture
    def make_world(
        self, s3: S3Server, s3_client: S3Client, fresh_bucket: str
    ) -> Iterator[Callable[[pa.Schema], SinkWorld]]:
        def lose(committable: Committable) -> None:
            payload: Any = committable.payload
            for file in payload["files"]:
                s3_client.abort_multipart_upload(
                    Bucket=fresh_bucket, Key=file["key"], UploadId=file["upload_id"]
                )

        proxy = Proxy(int(s3.endpoint_url.rpartition(":")[2]))

        def connection() -> S3Connection:
            settings = {**s3.boto3_settings, "endpoint_url": f"http://{proxy.address}"}
            return S3Connection(**settings)

        yield lambda schema: SinkWorld(
            sink=lambda: S3Sink(f"s3://{fresh_bucket}/out", connection=connection()),
            visible=lambda: checks.read_s3_parquet(s3, fresh_bucket, "out"),
            unfinished=lambda: checks.s3_leaks(s3, fresh_bucket),
            lose=lose,
            proxy=proxy,
            away=lambda: stopped(s3),
            secrets=[str(s3.boto3_settings["aws_secret_access_key"])],
        )
        proxy.close()


@pytest.fixture(scope="module")
def proxied() -> Iterator[tuple[str, Proxy]]:
    """A broker with a listener that sends its clients to a proxy."""
    with behind_proxy("4.3") as found:
        yield found


@pytest.fixture(scope="module")
def proxied_old() -> Iterator[tuple[str, Proxy]]:
    """The same before Kafka 4.0."""
    with behind_proxy("3.9") as found:
        yield found


@contextlib.contextmanager
def behind_proxy(version: KafkaVersion) -> Iterator[tuple[str, Proxy]]:
    direct, behind, controller = (free_port() for _ in range(3))
    local = "127.0.0.1"
    with Proxy(behind) as proxy:
        with proxy.in_between():
            advertised = proxy.address
        listeners = f"PLAINTEXT://{local}:{direct},PROXIED://{local}:{behind}"
        config = {
            "listeners": f"{listeners},CONTROLLER://{local}:{controller}",
            "controller.quorum.voters": f"1@{local}:{controller}",
            "advertised.listeners": f"PLAINTEXT://{local}:{direct},PROXIED://{advertised}",
            "listener.security.protocol.map": ",".join(
                f"{name}:PLAINTEXT" for name in ("PLAINTEXT", "PROXIED", "CONTROLLER")
            ),
        }
        with start_services(
            ["kafka"], ports={"kafka": direct}, kafka_version=version, kafka_config=config
        ) as services:
            yield services.kafka.bootstrap_servers, proxy


@pytest.mark.skipif(choose_backend() == "docker", reason="a container advertises its own address")
class TestKafkaSinkOnABadNetwork(SinkNetwork, SinkLate):
    """What the broker does not answer is neither a commit nor a loss."""

    large_rows = 20_000
    most_faults = 4

    @pytest.fixture
    def make_world(
        self, proxied: tuple[str, Proxy], fresh_name: Callable[[], str]
    ) -> Iterator[Callable[[pa.Schema], SinkWorld]]:
        servers, proxy = proxied
        topic = fresh_name()
        admin = AdminClient({"bootstrap.servers": servers})
        admin.create_topics([NewTopic(topic, num_partitions=2)])[topic].result(timeout=30)
        with kafka_world(servers, topic, proxy) as world:
            yield lambda schema: world


@pytest.mark.slow
class TestKafkaSinkOnABadNetworkOfAnOldBroker(TestKafkaSinkOnABadNetwork):
    """The same before Kafka 4.0, whose EndTxn does not fence."""

    @pytest.fixture
    def proxied(self, proxied_old: tuple[str, Proxy]) -> tuple[str, Proxy]:
        return proxied_old

    @pytest.mark.parametrize("kind", LATE)
    def test_request_of_commit_is_late(self, stage: Stage, kind: FaultKind) -> None:
        """A commit ends with a request that fences whatever has the name when it arrives.

        65,536 tasks later that is another branch. It is lost, which is proven and reported.
        """
        with pytest.raises(PreparedBranchLostError, match="another producer has taken its"):
            super().test_request_of_commit_is_late(stage, kind)
