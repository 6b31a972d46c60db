"""Pipelines of one Postgres table whose log is in its database."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from integration_tests.support.postgres import ROWS, World, stage
from sparkonce import failpoints
from sparkonce.model import BranchId
from sparkonce.protocol.driver import Driver
from sparkonce.protocol.lease import NoEntrance
from sparkonce.protocol.pipeline import Patience
from sparkonce.protocol.pipeline import Pipeline as TheirPipeline
from sparkonce.protocol.rewriting import Rewrite
from sparkonce.sinks import PostgresSink
from sparkonce.testing.log_cases import claim
from sparkonce.txn_log.postgres import PostgresLog
from sparkonce.txn_log.record import Fingerprint, Incarnation, Part, Share

OFFSETS = ('it\'s {0} 100% \\ "名"',)


class OneBatch:
    """A batch of two tasks."""

    offsets = OFFSETS

    def __init__(self, sink: PostgresSink, batch_id: int, rows: Any = ROWS) -> None:
        self.batch_id = batch_id
        self.drained = False
        self._sink = sink
        self._rows = rows

    def write(
        self, incarnation: Incarnation, rewrite: Rewrite | None = None
    ) -> Mapping[str, Share]:
        assert rewrite is None
        ids = [
            BranchId(incarnation.owner, self.batch_id, incarnation.token, self._sink.name, 0, n)
            for n in range(2)
        ]
        halves = self._rows.slice(0, 1), self._rows.slice(1)
        staged = tuple(stage(self._sink, rows, b) for b, rows in zip(ids, halves, strict=True))
        parts = tuple(
            Part(n, b.name, 64, Fingerprint("a/1", len(halves[n]), n)) for n, b in enumerate(ids)
        )
        return {self._sink.name: Share(self._sink.target, parts, staged)}

    def drain(self) -> dict[str, Fingerprint]:
        self.drained = True
        return {}


@dataclass
class NoCheckpoint:
    location: str = "memory:/checkpoint"

    def committed(self) -> int | None:
        return -1

    def has_offsets(self, batch_id: int) -> bool:
        return batch_id == 0


class Pipeline:
    """Drivers of one pipeline; the log is in a schema beside the target's."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.schema = f"{world.schema}_log"
        self.logs: list[PostgresLog] = []

    def address(self, dsn: str | None = None) -> str:
        return f"{dsn or self.world.dsn}?schema={self.schema}"

    def log(self, address: str | None = None) -> PostgresLog:
        self.logs.append(PostgresLog(address or self.address()))
        return self.logs[-1]

    def driver(self, sink: PostgresSink, log: PostgresLog | None = None, **changes: Any) -> Driver:
        log = log or self.log()
        claimed = claim(sinks={sink.name: sink.target}, offsets={0: OFFSETS}, **changes)
        pipeline = TheirPipeline(
            name=claimed.pipeline,
            sinks={sink.name: sink},
            log=log,
            checkpoint=NoCheckpoint(),
            commit_timeout_s=20.0,
            retain=10,
            patience=Patience(20.0),
        )
        driver = Driver.start(pipeline, claimed, NoEntrance())
        driver.recover()
        return driver

    def xids(self) -> list[tuple[int, bool]]:
        """By batch: whether one transaction has written the record and the marker row."""
        rows: list[tuple[int, bool]] = self.world.run(
            f"SELECT r.batch_id, r.xmin = c.xmin FROM {self.schema}.records AS r "
            f"JOIN {self.world.schema}.sparkonce_commits AS c USING (query_id, batch_id) "
            "WHERE r.state = 'complete' ORDER BY 1"
        )
        return rows


def piped(world: World) -> Iterator[Pipeline]:
    world.table()
    pipeline = Pipeline(world)
    yield pipeline
    world.server.start()
    for log in pipeline.logs:
        log.close()
    world.run(f"DROP SCHEMA IF EXISTS {pipeline.schema} CASCADE")


@contextlib.contextmanager
def at(point: str, action: Callable[[], object]) -> Iterator[None]:
    """Act once, when the protocol gets there."""
    todo = [action]

    def handle(reached: str, where: Mapping[str, object]) -> None:
        del where
        if reached == point and todo:
            todo.pop()()

    failpoints.handler = handle
    try:
        yield
    finally:
        failpoints.handler = None
    assert not todo, f"{point} was not reached"


def port_of(dsn: str) -> int:
    return int(dsn.rpartition(":")[2].partition("/")[0])
