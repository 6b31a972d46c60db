"""The benchmark that engines can join sees which of them lose or double records."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from benchmarks.exactly_once.engines import Engine
from benchmarks.exactly_once.readers import FolderReader
from benchmarks.exactly_once.report import write_report
from benchmarks.exactly_once.running import Load, Run, run
from benchmarks.exactly_once.workload import value

from integration_tests.support import copying_engine

if TYPE_CHECKING:
    from sparkonce.testing.services import KafkaServer

PROGRAM = Path(copying_engine.__file__)
LOAD = Load(
    records=5_000, rate=500, seconds=2, kills=2, seed=3, warm_s=1, lost_after_s=8, quiet_s=3
)


def engine(mode: str) -> Engine:
    return Engine(mode, PROGRAM, mode)


def filing(mode: str) -> Engine:
    return Engine(mode, PROGRAM, mode, writes_files=True)


@pytest.mark.parametrize("engine", [engine, filing])
def test_right(kafka: KafkaServer, tmp_path: Path, engine: Callable[[str], Engine]) -> None:
    result = run(engine("right"), kafka.bootstrap_servers, tmp_path, LOAD)
    assert (result.lost, result.duplicated) == (0, 0)
    assert len(result.recovery_s) == LOAD.kills
    assert all(seconds > 0 for seconds in result.recovery_s)
    assert result.rows_per_s > 0
    assert 0 < result.latency.p50 <= result.latency.p99 <= result.latency.most
    page = tmp_path / "report.html"
    write_report(page, LOAD, {"right": result}, {"right": engine("right")})
    assert "each row once" in page.read_text()


@pytest.mark.parametrize("wrong", [engine("doubles"), engine("loses"), filing("doubles")])
def test_wrong(kafka: KafkaServer, tmp_path: Path, wrong: Engine) -> None:
    _, lost, duplicated, sent = Run(kafka.bootstrap_servers, wrong, tmp_path).killed(LOAD)
    print(f"{lost=} {duplicated=} {sent=}, seed {LOAD.seed}")
    assert (lost > 0, duplicated > 0) == (wrong.name == "loses", wrong.name == "doubles")


def test_reader_of_a_folder_follows_the_log_of_sparks_file_sink(tmp_path: Path) -> None:
    """Files that the log does not name belong to a batch that failed."""
    for number in range(3):
        (tmp_path / f"part {number}.txt").write_bytes(value(number, 0.0) + b"\n")
    (tmp_path / "_spark_metadata").mkdir()
    named = json.dumps({"path": (tmp_path / "part 1.txt").as_uri(), "size": 112})
    (tmp_path / "_spark_metadata" / "0").write_text(f"v1\n{named}\n")
    with closing(FolderReader(tmp_path)) as reader:
        deadline = time.monotonic() + 30
        while not reader.seen.at_s and time.monotonic() < deadline:
            reader.check()
            time.sleep(0.01)
    assert list(reader.seen.at_s) == [1]


def test_engine_that_ends(kafka: KafkaServer, tmp_path: Path) -> None:
    program = tmp_path / "ends.py"
    program.write_text("raise SystemExit('no such topic')")
    one = Run(kafka.bootstrap_servers, Engine("ends", program, "right"), tmp_path)
    with pytest.raises(RuntimeError, match="has ended with 1: no such topic"):
        one.backlog(10)
