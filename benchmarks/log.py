"""What a transaction log costs: decide + complete of one batch, and requests on an object store.

Then, of a Postgres sink in the log's own database: one transaction beside two phases, from the end
of the tasks to the end of the batch, its sweep included.

python benchmarks/log.py [--batches 500] [--branches 12]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import harness  # noqa: F401 - puts this folder last, whose kafka.py would hide the package `kafka`
import psycopg
import pyarrow as pa
from botocore.config import Config
from rich.console import Console
from rich.table import Table

from sparkonce.model import BranchId, Committable, TransactionId
from sparkonce.parallel import at_once
from sparkonce.protocol.driver import Driver
from sparkonce.protocol.lease import NoEntrance
from sparkonce.protocol.pipeline import Pipeline
from sparkonce.protocol.rewriting import Rewrite
from sparkonce.sinks import PostgresSink
from sparkonce.sinks.base import AnySink
from sparkonce.testing.services import ServiceKind, Services, start_services, unavailable
from sparkonce.txn_log import TransactionLog, open_log
from sparkonce.txn_log.claim import Claim
from sparkonce.txn_log.document import DocumentLog
from sparkonce.txn_log.object_store import ObjectPlace
from sparkonce.txn_log.postgres import PostgresLog
from sparkonce.txn_log.record import (
    Fingerprint,
    Incarnation,
    Part,
    Share,
    State,
    TransactionRecord,
)

KINDS: tuple[ServiceKind, ...] = ("postgres", "versitygw")
ROWS = pa.record_batch(
    {"id": pa.array(range(100), pa.int64()), "name": ["a row of the batch"] * 100}
)


def record(incarnation: Incarnation, batch_id: int, branches: int) -> TransactionRecord:
    """A batch with so many branches in one sink, each with a payload as Kafka's."""
    ids = [
        BranchId(incarnation.owner, batch_id, incarnation.token, "kafka", 0, n)
        for n in range(branches)
    ]
    payload: dict[str, Any] = {"producer_id": 4711, "producer_epoch": 3, "partitions": [0, 1, 2]}
    share = Share(
        "kafka://localhost/orders",
        tuple(Part(n, b.name, 1 << 20, Fingerprint("a/1", 1000, n)) for n, b in enumerate(ids)),
        tuple(Committable(b, payload, safe_until=2e9) for b in ids),
    )
    return TransactionRecord(
        id=TransactionId(incarnation.pipeline, incarnation.owner.query_id, batch_id),
        token=incarnation.token,
        state=State.DECIDED,
        offsets=(json.dumps({"orders": {str(n): 10**9 + batch_id for n in range(12)}}),),
        shares={"kafka": share},
    )


def begin(log: TransactionLog) -> Incarnation:
    return log.begin(Claim("orders", str(uuid.uuid4()), "run", "host:1", {"kafka": "t"}, 0))


def once(log: TransactionLog, incarnation: Incarnation, batch_id: int, branches: int) -> float:
    """Seconds of decide + complete."""
    given = record(incarnation, batch_id, branches)
    start = time.perf_counter()
    log.complete(log.decide(given), incarnation.token)
    return time.perf_counter() - start


@contextmanager
def all_logs(services: Services, folder: Path) -> Iterator[Mapping[str, TransactionLog]]:
    """One of each kind that can run here."""
    logs = {
        "sqlite": open_log(f"sqlite:///{folder}/txn.db"),
        "checkpoint (local disk)": open_log(f"checkpoint:{folder}/ckpt"),
    }
    if "postgres" not in unavailable():
        logs["postgres"] = open_log(f"{services.postgres.dsn}?schema=bench")
    for name, server in services.s3.items():
        os.environ["AWS_ACCESS_KEY_ID"] = server.access_key
        os.environ["AWS_SECRET_ACCESS_KEY"] = server.secret_key
        client = boto3.client(
            "s3",
            endpoint_url=server.endpoint_url,
            region_name=server.region,
            config=Config(s3={"addressing_style": "path"}),
        )
        client.create_bucket(Bucket="bench")
        client.close()
        settings = f"endpoint_url={server.endpoint_url}&region={server.region}&path_style=true"
        place = ObjectPlace(f"s3://bench/log?{settings}")
        logs[f"object store ({name})"] = DocumentLog(place)
    yield logs
    for log in logs.values():
        log.close()


def count_requests(log: TransactionLog, act: Callable[[], object]) -> int | None:
    """How many requests an object store gets meanwhile; None for other logs."""
    place = getattr(log, "_place", None)
    if not isinstance(place, ObjectPlace):
        act()
        return None
    sent: list[str] = []
    events = place.client.meta.events
    events.register("before-send.s3", lambda request, **_: sent.append(request.method), "count")
    act()
    events.unregister("before-send.s3", unique_id="count")
    return len(sent)


class TwoPhases(PostgresLog):
    """A log that joins no sink's transaction."""

    def why_apart(self, database: object) -> str | None:
        return "for comparison"


class Tasks:
    """A batch for one sink; threads of this process stand for its tasks.

    Attributes:
        batch_id: which batch.
        staged_at: when its rows were staged.
    """

    location = "memory:/checkpoint"
    offsets = ("{}",)

    def __init__(self, sink: AnySink, rows: pa.RecordBatch, number: int = 1) -> None:
        self.batch_id = 0
        self.staged_at = 0.0
        self._sink = sink
        self._rows = rows
        self._number = number

    def committed(self) -> int | None:
        return self.batch_id - 1

    def has_offsets(self, batch_id: int) -> bool:
        return batch_id <= self.batch_id

    def drain(self) -> dict[str, Fingerprint]:
        raise NotImplementedError

    def write(
        self, incarnation: Incarnation, rewrite: Rewrite | None = None
    ) -> Mapping[str, Share]:
        sink, rows = self._sink, self._rows

        def task(n: int) -> tuple[Part, Committable]:
            branch = BranchId(incarnation.owner, self.batch_id, incarnation.token, sink.name, 0, n)
            handle = sink.beginTransaction(branch)
            sink.write(handle, rows)
            prepared = sink.preCommit(handle)
            content = Fingerprint("a/1", rows.num_rows, n)
            return Part(n, branch.name, rows.nbytes, content), prepared

        parts, prepared = zip(*at_once(task, range(self._number)), strict=True)
        self.staged_at = time.perf_counter()
        return {sink.name: Share(sink.target, parts, prepared)}


def phases(dsn: str, batches: int) -> Mapping[str, Sequence[float]]:
    """Seconds of each batch, in turn, by the way it is committed."""
    logs = {"one transaction": PostgresLog, "two phases": TwoPhases}
    drivers = {}
    for number, (name, kind) in enumerate(logs.items()):
        with psycopg.connect(dsn) as connection:
            connection.execute(f"CREATE TABLE bench_{number} (id bigint, name text)".encode())
        sink = PostgresSink(dsn, table=f"bench_{number}")
        sink.validate(ROWS.schema)
        claim = Claim(name.split()[0], str(uuid.uuid4()), "run", "host:1", {sink.name: "t"}, 0)
        log, batch = kind(f"{dsn}?schema=bench_phases"), Tasks(sink, ROWS)
        pipeline = Pipeline(name=claim.pipeline, sinks={sink.name: sink}, log=log, checkpoint=batch)
        driver = Driver.start(pipeline, claim, NoEntrance())
        assert (driver.two_phases is None) == (kind is PostgresLog)
        drivers[name] = driver, batch
    times: dict[str, list[float]] = {name: [] for name in logs}
    for batch_id in range(batches):
        for name, (driver, batch) in drivers.items():
            batch.batch_id = batch_id
            driver.deliver(batch)
            times[name].append(time.perf_counter() - batch.staged_at)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=500)
    parser.add_argument("--branches", type=int, default=12)
    arguments = parser.parse_args()
    batches = arguments.batches
    available = [kind for kind in KINDS if kind not in unavailable()]
    figures: dict[str, Any] = {"batches": batches, "branches": arguments.branches}
    table = Table("log", "decide + complete: median", "95th percentile", "requests per batch")
    with (
        start_services(available) as services,
        tempfile.TemporaryDirectory() as folder,
        all_logs(services, Path(folder)) as logs,
    ):
        incarnations = {name: begin(log) for name, log in logs.items()}
        times: dict[str, list[float]] = {name: [] for name in logs}
        requests: dict[str, int] = {}
        for batch_id in range(batches):  # in turn, so that a machine that drifts treats all alike
            for name, log in logs.items():

                def act(name: str = name, log: TransactionLog = log) -> None:
                    seconds = once(log, incarnations[name], batch_id, arguments.branches)  # noqa: B023
                    times[name].append(seconds)

                sent = count_requests(log, act)
                if sent is not None:
                    requests[name] = requests.get(name, 0) + sent
        ways = {} if "postgres" not in logs else phases(services.postgres.dsn, batches)
    for name, seconds in times.items():
        median, high = statistics.median(seconds) * 1e3, sorted(seconds)[int(batches * 0.95)] * 1e3
        per_batch = requests[name] / batches if name in requests else None
        shown = "" if per_batch is None else f"{per_batch:.2f}"
        table.add_row(name, f"{median:.1f} ms", f"{high:.1f} ms", shown)
        figures[name] = {"median_ms": median, "p95_ms": high, "requests": per_batch}
    Console().print(table)
    if ways:
        table = Table("sink and log in one database", "median", "95th percentile")
        for name, seconds in ways.items():
            high = sorted(seconds)[int(batches * 0.95)] * 1e3
            table.add_row(name, f"{statistics.median(seconds) * 1e3:.1f} ms", f"{high:.1f} ms")
            figures[name] = {"median_ms": statistics.median(seconds) * 1e3, "p95_ms": high}
        one, two = (statistics.median(seconds) for seconds in ways.values())
        figures["ratio_one_transaction_to_two_phases"] = one / two
        Console().print(table)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
