"""`assert_exactly_once` with sinks of the examples: real queries, real kills."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pyarrow as pa
import pytest
from examples.http_sink import Api, HttpSink, serve
from pyspark import TaskContext
from tests.support.guides import write_the_guides_files
from tests.support.sink_worlds import outcome

from sparkonce import ExactlyOnce
from sparkonce.model import Committable
from sparkonce.sinks import SqliteSink
from sparkonce.sinks.sqlite import Staging
from sparkonce.testing import Kill, assert_exactly_once, crash_points
from sparkonce.testing.job import Front

ROWS = 20


def batches(count: int) -> list[pa.Table]:
    return [
        pa.table({"id": pa.array(range(n * ROWS, (n + 1) * ROWS), pa.int64())})
        for n in range(count)
    ]


class Shop:
    """Two targets that have nothing in common, and what their readers get."""

    def __init__(self, folder: Path, api: Api) -> None:
        self.path, self.stage, self.url = folder / "shop.db", folder / "stage", api.url
        self.stage.mkdir()
        self._ask("CREATE TABLE orders (id INTEGER)")
        self.readers = {"sqlite": self.in_sqlite, "http": self.in_api}
        self.unfinished = {
            "sqlite": lambda: self._ask("SELECT * FROM sparkonce_staging_orders"),
            "http": lambda: list(self.stage.glob("*.arrow")),
        }

    def _ask(self, query: str) -> list[Any]:
        with contextlib.closing(sqlite3.connect(self.path, timeout=60)) as db:
            return db.execute(query).fetchall()

    def in_sqlite(self) -> list[dict[str, Any]]:
        return [{"id": id_} for (id_,) in self._ask("SELECT id FROM orders")]

    def in_api(self) -> list[dict[str, Any]]:
        with urlopen(f"{self.url}/rows") as answer:  # noqa: S310 - our own server
            return json.load(answer)


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    api = serve()
    yield Shop(tmp_path, api)
    api.shutdown()
    api.server_close()


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(
            [Kill("decide.after", "none"), Kill("commit.after", "ahead", "http", again=True)],
            id="some",
        ),
        pytest.param(crash_points(["sqlite", "http"]), id="all", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("front", [pytest.param("foreachBatch", marks=pytest.mark.slow), "format"])
def test_staged_and_idempotent_sink_in_one_pipeline(
    shop: Shop, tmp_path: Path, kills: Sequence[Kill], front: Front
) -> None:
    """Killed at points of the protocol, both hold every row once and nothing is left over."""
    path, stage, url = shop.path, shop.stage, shop.url
    assert_exactly_once(
        lambda log: ExactlyOnce(
            "shop", sinks=[SqliteSink(path, "orders"), HttpSink(url, stage=stage)], log=log
        ),
        batches(sum(not kill.again for kill in kills) + 1),
        shop.readers,
        kills,
        unfinished=shop.unfinished,
        folder=tmp_path / "run",
        front=front,
    )


@pytest.mark.slow
def test_pipeline_that_waits_for_sparks_checkpoint(shop: Shop, tmp_path: Path) -> None:
    """The kills around Spark's commit, under commit="after_checkpoint"."""
    path = shop.path
    assert_exactly_once(
        lambda log: ExactlyOnce(
            "shop", sinks=[SqliteSink(path, "orders")], log=log, commit="after_checkpoint"
        ),
        batches(2),
        {"sqlite": shop.in_sqlite},
        [
            Kill("hold.after", "none", aborts=True),
            Kill("abandon.after", "none", again=True),
        ],
        folder=tmp_path / "run",
    )


class LosingSink(SqliteSink):
    """Drops the rows of one task in its second batch."""

    def write_rows(self, handle: Staging, rows: Sequence[Mapping[str, Any]]) -> None:
        super().write_rows(handle, [row for row in rows if row["id"] != ROWS + 3])


def test_report_tells_row_batch_and_kill(shop: Shop, tmp_path: Path) -> None:
    """A lost row is named with its batch, and with the kill after which it was missed."""
    path = shop.path
    with pytest.raises(AssertionError) as failure:
        assert_exactly_once(
            lambda log: ExactlyOnce("shop", sinks=[LosingSink(path, "orders")], log=log),
            batches(3),
            {"sqlite": shop.in_sqlite},
            [Kill("decide.after", "none"), Kill("deliver.after", "all")],
            folder=tmp_path / "run",
        )
    told = str(failure.value)
    assert "killed at deliver.after" in told
    assert "{'sqlite': 'some'}" in told
    assert "kill 2 of 2: batch 1, deliver.after" in told
    assert "kill 1 of 2: batch 0, decide.after" in told


class RepeatingSink(SqliteSink):
    """Its commit looks for no proof, and leaves the staged rows to the sweep."""

    def commit(self, committable: Committable) -> None:
        with self._transaction() as db:
            db.execute(
                f'INSERT INTO "{self._table}" (id) '
                f'SELECT id FROM "{self._staging}" WHERE sparkonce_branch = ?',
                [str(committable.branch_id)],
            )


class TasksSink(SqliteSink):
    """Writes all rows in a task of Spark's only."""

    def write_rows(self, handle: Staging, rows: Sequence[Mapping[str, Any]]) -> None:
        super().write_rows(handle, rows if TaskContext.get() else rows[1:])


@pytest.mark.parametrize(
    ("sink", "kills", "told"),
    [
        pytest.param(RepeatingSink, 1, r"[1-9]\d* too often", id="commit", marks=pytest.mark.slow),
        pytest.param(TasksSink, [Kill("deliver.after", "all")], r"[1-9]\d* rows lost", id="driver"),
    ],
)
def test_mistake_that_only_a_query_shows(
    shop: Shop, tmp_path: Path, sink: type[SqliteSink], kills: int | Sequence[Kill], told: str
) -> None:
    """Whatever kills are chosen, a commit is repeated, and the driver writes a batch itself."""
    path = shop.path
    with pytest.raises(AssertionError, match=told):
        assert_exactly_once(
            lambda log: ExactlyOnce("shop", sinks=[sink(path, "orders")], log=log),
            batches(2),
            {"sqlite": shop.in_sqlite},
            kills,
            folder=tmp_path / "run",
        )


def test_source_with_too_few_batches(tmp_path: Path) -> None:
    """Refused before anything starts, with the number that is needed."""
    with pytest.raises(ValueError, match="source has 2 batches, and these kills need 4"):
        assert_exactly_once(
            lambda log: ExactlyOnce("shop", sinks=[], log=log), batches(2), {"sqlite": list}, 3
        )


def test_reader_of_a_sink_that_is_not_there_is_named(shop: Shop, tmp_path: Path) -> None:
    path = shop.path
    with pytest.raises(
        AssertionError,
        match=r"\A.*: ValueError: readers= names \('sqlight',\), and the pipeline's sinks are "
        r"\['sqlite'\]",
    ):
        assert_exactly_once(
            lambda log: ExactlyOnce("shop", sinks=[SqliteSink(path, "orders")], log=log),
            batches(2),
            {"sqlight": shop.in_sqlite},
            kills=1,
            folder=tmp_path / "run",
        )


def test_query_of_the_guide(tmp_path: Path) -> None:
    """docs/howto/testing-a-pipeline.md kills a query into its own sink, as the page shows it."""
    write_the_guides_files(tmp_path)
    failed, said = outcome(tmp_path, "exactly_once")
    assert not failed, said[-3000:]
    assert said.splitlines()[-1].startswith("1 passed")
