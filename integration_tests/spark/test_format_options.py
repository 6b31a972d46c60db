"""``format("sparkonce")`` by options only: no module, and secrets by reference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from pyspark import __version__ as version

from integration_tests.support.format_job import FormatJob
from integration_tests.support.kafka import World
from integration_tests.support.spark import ids
from sparkonce import shaped
from sparkonce.testing.crash import Failpoints
from sparkonce.testing.services import (
    KafkaServer,
    PostgresServer,
    SparkConnectServer,
    start_spark_connect,
)
from sparkonce.testing.services.process import import_path
from sparkonce.txn_log import open_log
from sparkonce.txn_log.record import State

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.skipif(version < "4.1", reason="Spark 4.0 gives a data source no Arrow")

SECRET = "the-password-that-nobody-may-see"
DSN = "ORDERS_DSN"
COMMAND = Path(sys.executable).parent / "sparkonce"
CLIENT = """
import json
import sys

from pyspark.sql import SparkSession

from sparkonce import shaped

given = json.loads(sys.argv[1])
spark = SparkSession.builder.remote(given["server"]).getOrCreate()
rows = spark.readStream.schema("id long, amount double").json(given["source"])
writer = shaped(rows, given["sinks"]).writeStream.format("sparkonce").options(**given["options"])
query = writer.trigger(availableNow=True).start()
try:
    query.awaitTermination()
finally:
    query.explain(extended=True)
    print(query.lastProgress)
"""


class Deployment:
    """A Spark Connect server whose processes have a secret, and clients that have none."""

    def __init__(self, folder: Path, kafka: KafkaServer, postgres: PostgresServer) -> None:
        self.folder, self.points = folder, Failpoints(folder / "failpoints")
        for name in ("in", "events"):
            (folder / name).mkdir()
        self.secret = {DSN: postgres.dsn.replace("@", f":{SECRET}@")}
        self.kafka = kafka
        self.printed = ""

    def serve(self) -> SparkConnectServer:
        conf = {
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": str(self.folder / "events"),
            "spark.log.level": "INFO",
        }
        return start_spark_connect(conf=conf, env={**self.secret, **self.points.environment})

    def add(self, *numbers: int) -> None:
        rows = [f'{{"id": {number}, "amount": {number}.5}}' for number in numbers]
        (self.folder / "in" / f"{numbers[0]}.json").write_text("\n".join(rows))

    def settings(self, topic: str, table: str) -> dict[str, Any]:
        kafka = {
            "type": "kafka",
            "topic": topic,
            "bootstrap_servers": self.kafka.bootstrap_servers,
            "select": ["CAST(id AS STRING) AS value"],
        }
        postgres = {"type": "postgres", "conninfo": {"env": DSN}, "table": table}
        log = f"sqlite:///{self.folder}/txn.db"
        return {"name": "orders", "log": log, "sinks": [kafka, postgres]}

    def write(self, server: SparkConnectServer, shaped_for: str, **options: str) -> str:
        """Run a client; what it printed, if it failed."""
        options["checkpointLocation"] = str(self.folder / "checkpoint")
        source = str(self.folder / "in")
        given = {
            "server": server.address,
            "source": source,
            "sinks": shaped_for,
            "options": options,
        }
        code, text = self.call(sys.executable, "-c", CLIENT, json.dumps(given))
        return text if code else ""

    def call(self, *command: str | Path, **environment: str) -> tuple[int, str]:
        """Run a command in the folder; the code and what it printed."""
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={**os.environ, **import_path(), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        self.printed += done.stdout
        return done.returncode, done.stdout

    def states(self) -> list[State]:
        with closing(open_log(f"sqlite:///{self.folder}/txn.db")) as log:
            return [record.state for record in log.history("orders")]

    def places_of_the_secret(self, server: SparkConnectServer) -> list[Path | str]:
        """Files with it: the event log, Spark's log, the checkpoint, the transaction log."""
        files = [server.runtime.log, *(path for path in self.folder.rglob("*") if path.is_file())]
        found: list[Path | str] = [path for path in files if SECRET.encode() in path.read_bytes()]
        return found + (["what the clients and commands printed"] if SECRET in self.printed else [])


@pytest.fixture
def deployment(tmp_path: Path, kafka: KafkaServer, postgres: PostgresServer) -> Deployment:
    return Deployment(tmp_path, kafka, postgres)


@pytest.fixture
def server(deployment: Deployment) -> Iterator[SparkConnectServer]:
    with closing(deployment.serve()) as server:
        yield server


def test_options_recover_and_no_secret_is_shown(
    deployment: Deployment,
    server: SparkConnectServer,
    postgres: PostgresServer,
    fresh_topic: Callable[..., str],
    fresh_table: Callable[[str], str],
) -> None:
    """Kafka and Postgres: the commit fails after the decision, and the command line finishes it.

    The next start has the same pipeline as a file, and goes on.
    """
    topic, table = fresh_topic(), fresh_table("id bigint, amount float8")
    settings = deployment.settings(topic, table)
    sinks = json.dumps(settings["sinks"])
    options = {"name": settings["name"], "log": settings["log"], "sinks": sinks}
    path = deployment.folder / "orders.json"
    path.write_text(json.dumps(settings))
    world = World(deployment.kafka, topic)

    def delivered() -> tuple[list[bytes | None], list[int]]:
        with psycopg.connect(postgres.dsn) as connection:
            rows = connection.execute(f"SELECT id FROM {table} ORDER BY id".encode()).fetchall()
        return sorted(world.values()), [number for (number,) in rows]

    deployment.add(1, 2)
    arm = deployment.points.arm("decide.after", action="error")
    assert "armed at decide.after" in deployment.write(server, sinks, **options)
    assert deployment.points.hits(arm)
    assert (deployment.states(), delivered()) == ([State.DECIDED], ([], []))
    deployment.points.disarm()

    recover = (COMMAND, "recover", "orders.json", "--yes")
    code, text = deployment.call(*recover)
    assert code == 1
    assert f"the environment variable {DSN} is not set" in text
    code, text = deployment.call(*recover, **deployment.secret)
    assert code == 0, text
    assert delivered() == ([b"1", b"2"], [1, 2])

    deployment.add(3)
    failed = deployment.write(server, sinks, pipeline=str(path))
    assert not failed, failed[-3000:]
    assert delivered() == ([b"1", b"2", b"3"], [1, 2, 3])
    assert set(deployment.states()) == {State.COMPLETE}

    deployment.add(4)
    gone = json.dumps([{**settings["sinks"][1], "table": "no_such_table"}])
    failed = deployment.write(server, gone, **{**options, "sinks": gone})
    assert "no_such_table" in failed
    world.close()
    assert list((deployment.folder / "events").iterdir()), "there is an event log"
    assert "no_such_table" in server.runtime.log.read_text()
    assert "WriteToMicroBatchDataSource" in deployment.printed, "the plan was printed"
    assert not deployment.places_of_the_secret(server)


def test_one_sink_and_a_batch_job(spark: SparkSession, tmp_path: Path) -> None:
    """Each of its parameters is an option, and the key of the job is not the sink's."""
    job = FormatJob(spark, tmp_path)
    writer = (
        spark.createDataFrame([(1,), (2,)], "id long")
        .write.format("sparkonce")
        .mode("append")
        .option("name", "orders")
        .option("log", job.log)
        .option("sink.type", "file")
        .option("sink.folder", str(job.out))
        .option("key", "monday")
    )
    writer.save()
    writer.save()
    assert job.visible() == Counter([1, 2])
    with pytest.raises(Exception, match=r"sinks\[0\]\.folder is a secret as plain text"):
        writer.option("sink.folder", f"s3://u:{SECRET}@lake").save()
    assert job.visible() == Counter([1, 2])


def test_stream_with_a_column_of_sql(spark: SparkSession, tmp_path: Path) -> None:
    """`shaped` makes the columns from the same JSON; the plan is that of the options."""
    job = FormatJob(spark, tmp_path)
    job.add(*ids(1, 2))
    sinks = json.dumps({"type": "file", "folder": str(job.out), "select": ["id * 2 AS twice"]})
    query = (
        shaped(job.rows(), sinks)
        .writeStream.format("sparkonce")
        .option("name", "orders")
        .option("log", job.log)
        .option("sinks", sinks)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .queryName("orders_by_options")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert job.visible(column="twice") == Counter([2, 4])
