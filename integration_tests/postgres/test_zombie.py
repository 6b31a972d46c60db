"""A driver that was fenced while it was paused, and what it prepared when it woke up.

    driver A   older     batch 0 begins ── paused ─────── prepares it ─► fenced
    driver B   newer                         sweeps ──────────────────── merges batch 0

B's sweep ran before A prepared, so A's prepared transaction holds row locks that B's own merge of
the batch waits for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest

from integration_tests.support.one_phase import NoCheckpoint, OneBatch, at
from integration_tests.support.postgres import (
    COLUMNS,
    DEADLINE_S,
    ROWS,
    World,
    merge_of,
    prepare,
    stage,
    task,
)
from sparkonce.errors import FencedError, PrepareRejectedError
from sparkonce.protocol.driver import Driver
from sparkonce.protocol.lease import NoEntrance
from sparkonce.protocol.pipeline import Patience, Pipeline
from sparkonce.protocol.rewriting import Rewrite
from sparkonce.sinks import PostgresSink
from sparkonce.testing.log_cases import claim
from sparkonce.txn_log import open_log
from sparkonce.txn_log.base import TransactionLog
from sparkonce.txn_log.record import Incarnation, Share

LOADS = ("staged", "direct")
KEYED = "id bigint PRIMARY KEY, name text"


class Paused(OneBatch):
    """A batch whose driver is paused before it writes."""

    def __init__(self, sink: PostgresSink, batch_id: int, meanwhile: Callable[[], object]) -> None:
        super().__init__(sink, batch_id)
        self._meanwhile = meanwhile

    def write(
        self, incarnation: Incarnation, rewrite: Rewrite | None = None
    ) -> Mapping[str, Share]:
        self._meanwhile()
        return super().write(incarnation, rewrite)


class Pair:
    """Two drivers of one pipeline, one after the other."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world = world
        self._address = f"sqlite:///{folder}/log.db"
        self.logs: list[TransactionLog] = []

    def sink(self, **options: Any) -> PostgresSink:
        return self.world.ready(**{"lock_timeout_s": 1.0, **options})

    def driver(self, sink: PostgresSink, run_id: str) -> Driver:
        self.logs.append(open_log(self._address))
        sinks, offsets = {sink.name: sink.target}, {0: OneBatch.offsets}
        claimed = claim(run_id=run_id, sinks=sinks, offsets=offsets)
        pipeline = Pipeline(
            name=claimed.pipeline,
            sinks={sink.name: sink},
            log=self.logs[-1],
            checkpoint=NoCheckpoint(),
            commit_timeout_s=20.0,
            patience=Patience(20.0),
        )
        driver = Driver.start(pipeline, claimed, NoEntrance())
        driver.recover()
        return driver


@pytest.fixture
def pair(prepared: World, tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(prepared, tmp_path)
    yield pair
    for log in pair.logs:
        log.close()


def constrained(world: World, key: list[str] | None) -> None:
    """The rows meet those of the zombie in a key, or in a unique index only."""
    world.table(KEYED if key else f"{COLUMNS}, UNIQUE (id)")


@pytest.mark.parametrize("key", [["id"], None])
@pytest.mark.parametrize("load", LOADS)
def test_fenced_driver_does_not_stall_its_successor(
    pair: Pair, load: str, key: list[str] | None
) -> None:
    """It ends its own branches, by name, before it goes."""
    constrained(pair.world, key)
    older, newer = pair.sink(load=load, key=key), pair.sink(load=load, key=key)
    first = pair.driver(older, "1")
    successors: list[Driver] = []
    with pytest.raises(FencedError, match="took token"):
        first.deliver(Paused(older, 0, lambda: successors.append(pair.driver(newer, "2"))))
    successors[0].deliver(OneBatch(newer, 0))
    assert pair.world.rows() == [(1, "a"), (2, "b"), (3, None)]
    assert (pair.world.gids(), pair.world.staging()) == ([], [])


@pytest.mark.parametrize("key", [["id"], None])
def test_living_driver_sweeps_and_votes_again(pair: Pair, key: list[str] | None) -> None:
    """The zombie is paused again, or dead: only its successor can end what it prepared."""
    constrained(pair.world, key)
    older, newer = pair.sink(key=key), pair.sink(key=key)
    first = pair.driver(older, "1")
    successors: list[Driver] = []
    is_prepared, goes_on = threading.Event(), threading.Event()

    def stop() -> None:
        is_prepared.set()
        assert goes_on.wait(DEADLINE_S)

    paused = Paused(older, 0, lambda: successors.append(pair.driver(newer, "2")))
    with at("decide.before", stop), ThreadPoolExecutor(1) as pool:
        zombie = pool.submit(first.deliver, paused)
        try:
            assert is_prepared.wait(DEADLINE_S)
            successors[0].deliver(OneBatch(newer, 0))
        finally:
            goes_on.set()
        with pytest.raises(FencedError, match="took token"):
            zombie.result(DEADLINE_S)
    assert pair.world.rows() == [(1, "a"), (2, "b"), (3, None)]


# -- what the error says ---------------------------------------------------------------------------


@pytest.mark.parametrize("key", [["id"], None])
@pytest.mark.parametrize("load", LOADS)
def test_lock_timeout_names_the_transaction_that_a_driver_left_prepared(
    prepared: World, load: str, key: list[str] | None
) -> None:
    constrained(prepared, key)
    zombie, sink = (
        prepared.ready(load=load, key=key, lock_timeout_s=0.5, **options) for options in ({}, {})
    )
    left = task(token=1) if load == "direct" else merge_of(token=1)
    zombie.vote(merge_of(token=1), [stage(zombie, ROWS, task(token=1))])
    with pytest.raises(PrepareRejectedError) as caught:
        sink.vote(merge_of(token=2), [stage(sink, ROWS, task(token=2))])
    said = str(caught.value)
    assert "lock_timeout_s=0.5" in said
    assert f"the prepared transaction {left} of this query's driver with token 1" in said
    assert "`sparkonce recover JOB`" in said


def test_lock_timeout_names_the_other_sink_of_the_pipeline(prepared: World) -> None:
    """A start would not help: both sinks write the same keys in every try."""
    constrained(prepared, ["id"])
    first, second = (
        prepared.ready(key=["id"], lock_timeout_s=0.5, name=name) for name in ("first", "second")
    )
    first.vote(merge_of(sink="first"), [stage(first, ROWS, task(sink="first"))])
    staged = stage(second, ROWS, task(sink="second"))
    with pytest.raises(
        PrepareRejectedError, match="'first' has prepared of the same batch"
    ) as said:
        second.vote(merge_of(sink="second"), [staged])
    assert "recover" not in str(said.value)


def test_lock_timeout_names_no_transaction_of_another_table_or_application(prepared: World) -> None:
    prepared.table(KEYED)
    other = prepared.table(KEYED, "other")
    prepare(prepared.ready(table=other, key=["id"], name="other"), batch=7)
    sink = prepared.ready(key=["id"], lock_timeout_s=0.5)
    with psycopg.connect(prepared.dsn) as rival:
        rival.execute(f"INSERT INTO {prepared.schema}.orders VALUES (2, 'rival')".encode())
        with pytest.raises(PrepareRejectedError, match="pg_locks and pg_prepared_xacts") as caught:
            prepare(sink)
    assert "sparkonce.0" not in str(caught.value)
