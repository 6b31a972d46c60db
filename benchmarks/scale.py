"""How cost grows with the tasks of a batch, and with the batches and pipelines of a log.

1. One batch of many tasks into each sink, whose driver dies once it is decided: what its vote, its
   decision and its recovery by the next driver take. One row a task; threads stand for the tasks.
2. A log that holds many batches: opening it, and taking a token.
3. A log that holds 200 pipelines: one batch of each, 16 at a time.

python benchmarks/scale.py [--tasks 1000] [--batches 1000000] [--plot scale.svg]
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import statistics
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import boto3
import harness  # noqa: F401 - puts this folder last, whose kafka.py would hide the package `kafka`
import psycopg
import pyarrow as pa
from botocore.config import Config
from confluent_kafka.admin import AdminClient, NewTopic
from log import Tasks, begin, once, record
from plot import panels
from rich.console import Console
from rich.table import Table

from sparkonce import failpoints, steps
from sparkonce.parallel import at_once
from sparkonce.protocol.driver import Driver
from sparkonce.protocol.lease import NoEntrance
from sparkonce.protocol.pipeline import Pipeline
from sparkonce.sinks import FileSink, KafkaSink, PostgresSink, S3Connection, S3Sink, SqliteSink
from sparkonce.sinks.base import AnySink
from sparkonce.testing.services import Services, start_services, unavailable
from sparkonce.txn_log import open_log
from sparkonce.txn_log.claim import Claim
from sparkonce.txn_log.record import State

ROW = pa.record_batch({"key": ["1"], "value": ["a row of the batch"]})
PIPELINES = 200
INSERTED_AT_ONCE = 10_000


@dataclass
class Times:
    """A hook that adds up the seconds of each step."""

    seconds: dict[str, float] = field(default_factory=dict)

    def started(self, entered: steps.step) -> None: ...

    def ended(self, entered: steps.step, error: BaseException | None) -> None:
        del error
        self.seconds[entered.name] = self.seconds.get(entered.name, 0.0) + entered.seconds


class DiedError(Exception):
    """The driver is dead."""


def die_when_decided(point: str, where: Mapping[str, object]) -> None:
    del where
    if point == "decide.after":
        raise DiedError


def settle(sink: AnySink, tasks: int, folder: Path) -> dict[str, float]:
    """Seconds of vote, decision and recovery of one batch, and the size of its record."""
    with closing(open_log(f"sqlite:///{folder}/{sink.name}-{tasks}.db")) as log:
        claim = Claim("scale", str(uuid.uuid4()), "run", "host:1", {sink.name: sink.target}, 0)
        batch = Tasks(sink, ROW, tasks)
        pipeline = Pipeline(name="scale", sinks={sink.name: sink}, log=log, checkpoint=batch)
        sink.validate(ROW.schema)
        times = Times()
        steps.add_hook(times)
        failpoints.handler = die_when_decided
        try:
            Driver.start(pipeline, claim, NoEntrance()).deliver(batch)
            raise AssertionError("the driver did not die")
        except DiedError:
            pass
        finally:
            failpoints.handler = None
        (found,) = log.unfinished("scale")
        began = time.perf_counter()
        Driver.start(pipeline, replace(claim, run_id="next"), NoEntrance()).recover()
        recovered = time.perf_counter() - began
        steps.remove_hook(times)
        (done,) = log.history("scale")
        assert done.state is State.COMPLETE
        return {
            "vote_s": times.seconds["vote"],
            "decide_s": times.seconds["decide"],
            "record_kb": len(found.encode()) / 1000,
            "recover_s": recovered,
        }


def plots_of(settled: Mapping[str, Mapping[int, Mapping[str, float]]]) -> str:
    """What `settle` found, by sink and number of tasks, as an SVG."""

    def lines(*steps: str) -> dict[str, list[tuple[float, float]]]:
        return {
            sink: [(tasks, sum(found[step] for step in steps)) for tasks, found in each.items()]
            for sink, each in settled.items()
        }

    plots = {
        "Vote and decision": lines("vote_s", "decide_s"),
        "Recovery by the next driver": lines("recover_s"),
    }
    return panels(plots, "tasks of the batch")


@contextmanager
def all_sinks(services: Services, folder: Path) -> Iterator[Mapping[str, AnySink]]:
    (out := folder / "out").mkdir()
    dsn = services.postgres.dsn
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE scale (key text, value text)")
    admin = AdminClient({"bootstrap.servers": services.kafka.bootstrap_servers})
    admin.create_topics([NewTopic("scale", num_partitions=2)])["scale"].result(30)
    sinks: dict[str, AnySink] = {
        "files": FileSink(out),
        "SQLite": SqliteSink(folder / "shop.db", table="scale"),
        "Postgres": PostgresSink(dsn, table="scale"),
        "Kafka": KafkaSink("scale", bootstrap_servers=services.kafka.bootstrap_servers),
    }
    for server in services.s3.values():
        client = boto3.client(
            "s3",
            endpoint_url=server.endpoint_url,
            region_name=server.region,
            aws_access_key_id=server.access_key,
            aws_secret_access_key=server.secret_key,
            config=Config(s3={"addressing_style": "path"}),
        )
        client.create_bucket(Bucket="scale")
        client.close()
        sinks["S3"] = S3Sink("s3://scale/out", connection=S3Connection(**server.boto3_settings))
    yield sinks
    for sink in sinks.values():
        sink.close()


def fill(address: str, batches: int) -> None:
    """Complete batches of the pipeline "orders", written into the tables of the log."""
    with closing(open_log(address)) as log:
        incarnation = begin(log)
        times = {State.DECIDED: 1.7e9, State.COMPLETE: 1.7e9 + 0.25}
        template = replace(record(incarnation, 0, 3), state=State.COMPLETE, times=times)

        def rows(first: int) -> list[tuple[str, str, int, str, str]]:
            numbers = range(first, min(first + INSERTED_AT_ONCE, batches))
            found = (replace(template, id=replace(template.id, batch_id=n)) for n in numbers)
            return [
                (r.id.pipeline, r.id.query_id, r.id.batch_id, r.state.value, r.encode())
                for r in found
            ]

        if address.startswith("sqlite:"):
            with closing(sqlite3.connect(address.removeprefix("sqlite:///"))) as database:
                for first in range(0, batches, INSERTED_AT_ONCE):
                    with database:
                        database.executemany(
                            "INSERT INTO sparkonce_records VALUES (?, ?, ?, ?, ?)", rows(first)
                        )
            return
        dsn, _, schema = address.partition("?schema=")
        with psycopg.connect(dsn) as connection, connection.cursor() as cursor:
            for first in range(0, batches, INSERTED_AT_ONCE):
                with cursor.copy(f"COPY {schema}.records FROM STDIN".encode()) as copy:
                    for row in rows(first):
                        copy.write_row(row)


def opened_ms(address: str, rounds: int = 5) -> float:
    """Milliseconds until the log is open and a token is taken; the median."""
    took = []
    for n in range(rounds):
        began = time.perf_counter()
        with closing(open_log(address)) as log:
            head = log.head("orders")
            assert head is not None
            newest = log.newest("orders", head.query_id)
            assert newest is not None
            batch = newest.id.batch_id + 1
            offsets = {newest.id.batch_id: newest.offsets}
            log.begin(Claim("orders", head.query_id, f"run {n}", "host:1", {}, batch, offsets))
            took.append(time.perf_counter() - began)
    return 1000 * statistics.median(took)


def pipelines_s(address: str) -> float:
    """Seconds of one batch of each of 200 pipelines, 16 at a time."""
    with closing(open_log(address)) as log:
        incarnations = [
            log.begin(Claim(f"p{n}", str(uuid.uuid4()), "run", "host:1", {"kafka": "t"}, 0))
            for n in range(PIPELINES)
        ]
        began = time.perf_counter()
        at_once(lambda incarnation: once(log, incarnation, 0, 12), incarnations)
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--batches", type=int, default=1_000_000)
    parser.add_argument("--plot", type=Path, help="an SVG of the first part")
    given = parser.parse_args()
    figures: dict[str, Any] = {"tasks": given.tasks, "batches": given.batches}
    console = Console()
    s3 = "s3mock" if "versitygw" in unavailable() else "versitygw"
    with (
        tempfile.TemporaryDirectory() as name,
        start_services(["kafka", "postgres", s3]) as services,
    ):
        folder = Path(name)
        table = Table("sink", "vote", "decision", "record", "recovery", title="many tasks")
        fewer = [tasks for tasks in (10, 100) if tasks < given.tasks]
        settled: dict[str, dict[int, dict[str, float]]] = {}
        with all_sinks(services, folder) as sinks:
            for sink_name, sink in sinks.items():
                found = {n: settle(sink, n, folder) for n in (*fewer, given.tasks)}
                settled[sink_name], figures[sink_name] = found, found[given.tasks]
                values = found[given.tasks].values()
                table.add_row(sink_name, *(f"{value:,.2f}" for value in values))
        if given.plot is not None:
            given.plot.write_text(plots_of(settled))
        console.print(table)
        addresses = {
            "SQLite": "sqlite:///" + str(folder / "{}.db"),
            "Postgres": services.postgres.dsn + "?schema={}",
        }
        table = Table("log", "ten batches", f"{given.batches:,} batches", f"{PIPELINES} pipelines")
        for log_name, address in addresses.items():
            fill(address.format("few"), 10)
            fill(address.format("many"), given.batches)
            few, many = opened_ms(address.format("few")), opened_ms(address.format("many"))
            pipelines = pipelines_s(address.format("pipelines"))
            figures[f"log {log_name}"] = {"ms": few, "many_ms": many, "pipelines_s": pipelines}
            table.add_row(log_name, f"{few:.1f} ms", f"{many:.1f} ms", f"{pipelines:.2f} s")
        console.print(table)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
