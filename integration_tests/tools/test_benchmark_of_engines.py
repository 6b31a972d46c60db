"""The benchmark that engines can join sees which of them lose or double records."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from benchmarks.exactly_once.engines import Engine
from benchmarks.exactly_once.report import write_report
from benchmarks.exactly_once.running import Load, Run, run

from integration_tests.support import copying_engine

if TYPE_CHECKING:
    from sparkonce.testing.services import KafkaServer

PROGRAM = Path(copying_engine.__file__)
LOAD = Load(
    records=5_000, rate=500, seconds=2, kills=2, seed=3, warm_s=1, lost_after_s=8, quiet_s=3
)


def engine(mode: str) -> Engine:
    return Engine(mode, PROGRAM, mode)


def test_right(kafka: KafkaServer, tmp_path: Path) -> None:
    result = run(engine("right"), kafka.bootstrap_servers, tmp_path, LOAD)
    assert (result.lost, result.duplicated) == (0, 0)
    assert len(result.recovery_s) == LOAD.kills
    assert all(seconds > 0 for seconds in result.recovery_s)
    assert result.rows_per_s > 0
    assert 0 < result.latency.p50 <= result.latency.p99 <= result.latency.most
    page = tmp_path / "report.html"
    write_report(page, LOAD, {"right": result}, {"right": engine("right")})
    assert "each row once" in page.read_text()


@pytest.mark.parametrize("mode", ["doubles", "loses"])
def test_wrong(kafka: KafkaServer, tmp_path: Path, mode: str) -> None:
    _, lost, duplicated, sent = Run(kafka.bootstrap_servers, engine(mode), tmp_path).killed(LOAD)
    print(f"{lost=} {duplicated=} {sent=}, seed {LOAD.seed}")
    assert (lost > 0, duplicated > 0) == (mode == "loses", mode == "doubles")


def test_engine_that_ends(kafka: KafkaServer, tmp_path: Path) -> None:
    program = tmp_path / "ends.py"
    program.write_text("raise SystemExit('no such topic')")
    one = Run(kafka.bootstrap_servers, Engine("ends", program, "right"), tmp_path)
    with pytest.raises(RuntimeError, match="has ended with 1: no such topic"):
        one.backlog(10)
