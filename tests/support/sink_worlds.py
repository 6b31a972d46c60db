"""Worlds of the sinks that need no server; that a test of the contract is red for a sink."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from examples.http_sink import HttpSink, _Handler, serve

from sparkonce.errors import SparkOnceError
from sparkonce.model import Committable
from sparkonce.sinks import FileSink, SqliteSink
from sparkonce.sinks.base import AnySink
from sparkonce.testing import Proxy, SinkContract, SinkWorld
from sparkonce.testing.sink_world import Stage

ROOT = Path(__file__).parents[2]


def file_world(folder: Path, sink: Callable[[Path], AnySink] = FileSink) -> SinkWorld:
    hidden = folder / "_sparkonce"

    def visible() -> list[dict[str, Any]]:
        files = folder.glob("*.parquet")
        return [row for path in files for row in pq.read_table(path).to_pylist()]

    def lose(committable: Committable) -> None:
        (hidden / f"{committable.branch_id}parquet").unlink()

    @contextlib.contextmanager
    def away() -> Iterator[None]:
        aside = folder.with_name(f"{folder.name}-aside")
        folder.rename(aside)
        yield
        aside.rename(folder)

    return SinkWorld(
        sink=lambda: sink(folder),
        visible=visible,
        unfinished=lambda: [path.name for path in hidden.iterdir()],
        lose=lose,
        away=away,
    )


@contextlib.contextmanager
def http_errors(status: int) -> Iterator[None]:
    """Let the API of `examples/http_sink.py` answer this to each request of a sink."""

    def answer(handler: _Handler) -> None:
        handler.rfile.read(int(handler.headers.get("Content-Length", 0)))  # else it is a reset
        handler._answer(status)

    with pytest.MonkeyPatch.context() as patch:
        for verb in ("do_PUT", "do_HEAD"):
            patch.setattr(_Handler, verb, answer)
        yield


@contextlib.contextmanager
def http_world(folder: Path, sink: type[HttpSink]) -> Iterator[SinkWorld]:
    """The API of `examples/http_sink.py` behind a proxy, with the stage in the folder."""
    with serve() as api, Proxy(api.server_port) as proxy:
        yield SinkWorld(
            sink=lambda: sink(f"http://{proxy.address}", stage=folder),
            visible=lambda: [row for rows in api.batches.values() for row in rows],
            unfinished=lambda: list(folder.glob("*.arrow")),
            proxy=proxy,
            away=lambda: http_errors(503),
        )
        api.shutdown()


def sqlite_world(
    path: Path, schema: pa.Schema, sink: Callable[[Path, str], AnySink] = SqliteSink
) -> SinkWorld:
    columns = ", ".join(f'"{field.name}"' for field in schema)

    def asked(query: str) -> list[Any]:
        with contextlib.closing(sqlite3.connect(path, timeout=60)) as db, db:
            return db.execute(query).fetchall()

    def lose(_: Committable) -> None:
        asked("DELETE FROM sparkonce_staging_orders")

    @contextlib.contextmanager
    def away() -> Iterator[None]:
        aside = path.with_suffix(".aside")
        path.rename(aside)
        path.mkdir()  # where there is nothing, SQLite makes a new database
        yield
        path.rmdir()
        aside.rename(path)

    asked(f"CREATE TABLE orders ({columns})")
    return SinkWorld(
        sink=lambda: sink(path, "orders"),
        visible=lambda: [
            dict(zip(schema.names, row, strict=True))
            for row in asked(f"SELECT {columns} FROM orders")
        ],
        unfinished=lambda: asked("SELECT DISTINCT sparkonce_branch FROM sparkonce_staging_orders"),
        expected=as_sqlite,
        lose=lose,
        away=away,
    )


def as_sqlite(row: Mapping[str, Any]) -> dict[str, Any]:
    """Lists and structs as JSON, booleans as numbers, what SQLite has no type for as text.

    Not a number is null.
    """

    def plain(value: object) -> object:
        if isinstance(value, list | dict):
            return json.dumps(value)
        if isinstance(value, bool):
            return int(value)
        if value != value:  # noqa: PLR0124 - of NaN alone
            return None
        return (
            value if value is None or isinstance(value, int | float | str | bytes) else str(value)
        )

    return {name: plain(value) for name, value in row.items()}


def caught(
    world: SinkWorld,
    test: Callable[[SinkContract, Stage], None],
    *errors: type[Exception],
    says: str | None = None,
) -> None:
    """That a test of the contract is red, and what it says."""
    with contextlib.closing(Stage(world, patience_s=2)) as stage:
        with pytest.raises((AssertionError, SparkOnceError, *errors), match=says):
            _run(test, stage)


def _run(test: Callable[[SinkContract, Stage], None], stage: Stage) -> None:
    try:
        test(SinkContract(), stage)
    except pytest.skip.Exception as skipped:
        pytest.fail(f"it is skipped: {skipped}")


def outcome(folder: Path, chosen: str) -> tuple[set[str], str]:
    """Run the tests of a folder; which failed, and what pytest said."""
    report = folder / "report.xml"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src"), str(folder)])
    pytest_ = [sys.executable, "-m", "pytest"]
    done = subprocess.run(
        [*pytest_, "-q", "-p", "no:cacheprovider", "-k", chosen, f"--junitxml={report}"],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": paths,
            "PYTEST_ADDOPTS": "",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # Hypothesis and others take a second
        },
        capture_output=True,
        text=True,
        check=False,
    )
    cases = ET.parse(report).iter("testcase")  # noqa: S314 - of our own run
    failed = {str(case.get("name")) for case in cases if case.find("failure") is not None}
    return failed, done.stdout
