"""What `torture` calls an anomaly, and the page that shows it."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkonce import ExactlyOnce
from sparkonce.errors import ConfigurationError
from sparkonce.sinks import FileSink
from sparkonce.spark_hooks.jobs import load_writer
from sparkonce.testing.torture import faults, running
from sparkonce.testing.torture.checking import Anomaly, Checker, payload
from sparkonce.testing.torture.faults import Command, Fault, Stage
from sparkonce.testing.torture.query import Order
from sparkonce.testing.torture.report import write_report
from sparkonce.testing.torture.running import Event, Outcome, Torture

SIZE = 10


def rows_of(*batches: int, run: int = 1, **more: Any) -> list[dict[str, Any]]:
    return [
        {"id": number, "run": run, "payload": payload(number), **more}
        for batch in batches
        for number in range(batch * SIZE, (batch + 1) * SIZE)
    ]


def kinds(
    *looks: Mapping[str, Sequence[Mapping[str, Any]]], complete: int = 2, planned: int = 3
) -> list[tuple[str, str]]:
    checker = Checker(SIZE)
    found: list[Anomaly] = []
    for rows in looks:
        found += checker.look(rows, complete=complete, planned=planned)
    return [(anomaly.kind, anomaly.sink) for anomaly in found]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (rows_of(0, 1), []),
        (rows_of(0, 1, 2), []),
        (rows_of(0, 1, 2)[:-3], []),
        (rows_of(0, 1)[:-1], ["lost"]),
        (rows_of(1, 2), ["lost"]),
        (rows_of(0, 1) + rows_of(1)[:1], ["doubled"]),
        (rows_of(0, 1, 2) + rows_of(2)[:1], ["doubled"]),
        (rows_of(0, 1, 3), ["foreign"]),
        ([*rows_of(0, 1), {"id": -1}], ["foreign"]),
        ([*rows_of(0, 1)[:-1], {"id": 19, "run": 1, "payload": "cut"}], ["torn"]),
        (rows_of(0, 1)[:-1] + rows_of(1, run=2)[-1:], ["aborted"]),
        (rows_of(0, run=1) + rows_of(1, run=2), []),
        (rows_of(1, 0), []),
        (rows_of(1, lane="p") + rows_of(0, lane="q"), []),
        (rows_of(1, 0, lane="p"), ["reordered"]),
        ([{"id": number} for number in range(20)], []),
    ],
)
def test_look_finds(rows: list[dict[str, Any]], expected: list[str]) -> None:
    assert kinds({"sink": rows}) == [(kind, "sink") for kind in expected]


def test_rows_that_vanish_are_lost_although_their_batch_is_not_complete() -> None:
    assert kinds({"sink": rows_of(0, 1, 2)}, {"sink": rows_of(0, 1)}) == [("lost", "sink")]


def test_sinks_that_show_a_batch_of_different_drivers_disagree() -> None:
    assert kinds({"a": rows_of(0, 1), "b": rows_of(0) + rows_of(1, run=2)}) == [("aborted", "")]


def test_sink_that_has_both_drivers_is_named() -> None:
    rows = {"a": rows_of(0, 1)[:-1] + rows_of(1, run=2)[-1:], "b": rows_of(0, 1)}
    assert kinds(rows) == [("aborted", "a")]


def test_rows_of_another_driver_are_noticed_in_a_later_look() -> None:
    found = kinds({"sink": rows_of(0, 1)}, {"sink": rows_of(0) + rows_of(1, run=2)})
    assert found == [("aborted", "sink")]


def test_report_has_the_anomaly_its_history_and_the_record(tmp_path: Path) -> None:
    events = [Event(float(n), "kill", f"event {n}") for n in range(100)]
    wrong = Anomaly("doubled", "kafka", "rows 1 are there <more> than once", [7])
    ended = Event(100.0, "anomaly", str(wrong))
    outcome = Outcome(7, [*events, ended], [wrong], 9, {"kafka": 91}, {"batch": 7})
    write_report(tmp_path / "report.html", "jobs:pipeline", outcome)
    page = (tmp_path / "report.html").read_text()
    assert "&lt;more&gt;" in page
    assert page.count("event 99") == 2  # in the history, and among all events
    assert page.count("event 3<") == 1
    assert "&#34;batch&#34;: 7" in page


def test_report_of_a_clean_run_says_so(tmp_path: Path) -> None:
    outcome = Outcome(7, [Event(1.0, "kill", "driver 1")], [], 9, {"kafka": 90})
    write_report(tmp_path / "report.html", "jobs:pipeline", outcome)
    page = (tmp_path / "report.html").read_text()
    assert "clean" in page
    assert "What is wrong" not in page


def torture_of(folder: Path, reads: Sequence[Sequence[dict[str, Any]]]) -> Torture:
    """Whose reader gets these rows, one after the other, and the last ones from then on."""
    left = list(reads)
    return Torture(
        lambda df, batch_id: None,
        Order(job="jobs:naive", cwd="/", checkpoint="/", batch_rows=SIZE),
        {"sink": lambda: left.pop(0) if len(left) > 1 else left[0]},
        folder,
        progress=lambda line: None,
    )


@pytest.mark.parametrize(
    ("reads", "expected"),
    [
        ([rows_of(0), rows_of(0, 1)], []),
        ([rows_of(0), rows_of(0, 1) + rows_of(1)], ["doubled"]),
        ([rows_of(0, 0), rows_of(0, 1)], ["lost", "doubled"]),
        ([rows_of(0)], ["lost"]),
    ],
)
def test_row_that_is_late_is_not_lost_and_one_too_many_is_seen_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reads: Sequence[Sequence[dict[str, Any]]],
    expected: Sequence[str],
) -> None:
    monkeypatch.setattr(running, "_SETTLE_S", 0.5)
    drivers: Any = SimpleNamespace(progress=SimpleNamespace(complete=2, planned=3))
    found = torture_of(tmp_path, reads)._look(drivers)
    assert [anomaly.kind for anomaly in found] == expected


def test_batch_is_late_by_one_after_the_checkpoint(tmp_path: Path) -> None:
    """It is committed once Spark has it, perhaps only by the next driver."""
    (tmp_path / "lake").mkdir()
    sink, log = FileSink(tmp_path / "lake"), f"sqlite:///{tmp_path}/log.db"
    one = torture_of(tmp_path, [rows_of(0)])
    drivers: Any = SimpleNamespace(progress=SimpleNamespace(complete=2, planned=3))
    with ExactlyOnce("orders", sinks=[sink], log=log, commit="after_checkpoint") as pipeline:
        one.writer = pipeline
        assert one._look(drivers) == []


class Calm(Stage):
    """A stage without drivers."""

    def __init__(self) -> None:
        self.noted: list[str] = []
        self.note = lambda kind, text: self.noted.append(kind)

    def calm(self, batches: int = 1) -> None: ...

    def recovers(self) -> None:
        self.noted.append("recovers")


def test_command_may_leave_a_server_that_holds_its_output(tmp_path: Path) -> None:
    stage = Calm()
    Command("server", f"sleep 60 & echo $! > {tmp_path}/pid").strike(stage)
    assert stage.noted == ["command", "recovers"]
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)  # it has not ended meanwhile


def test_command_that_fails_is_quoted() -> None:
    with pytest.raises(ConfigurationError, match="--fault server ended with 7: no such server"):
        Command("server", "echo no such server >&2; exit 7").strike(Calm())


def test_command_that_takes_too_long_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_COMMAND_S", 0.2)
    with pytest.raises(ConfigurationError, match="took more than"):
        Command("server", "sleep 60").strike(Calm())


class Wrong(Fault):
    def __init__(self, error: BaseException) -> None:
        self._error = error

    def strike(self, stage: Stage) -> None:
        raise self._error


@pytest.mark.parametrize("error", [ConfigurationError("no such server"), KeyboardInterrupt()])
def test_what_ends_a_torture_early_is_in_its_report(tmp_path: Path, error: BaseException) -> None:
    one = torture_of(tmp_path, [[]])
    one.more = [Wrong(error)] * 1000  # so that one of them is chosen
    outcome = one.run(60)
    assert outcome.failure is error
    assert not outcome.is_clean
    write_report(tmp_path / "report.html", "jobs:naive", outcome)
    assert "not finished" in (tmp_path / "report.html").read_text()


JOBS = """
from pathlib import Path

from sparkonce import ExactlyOnce
from sparkonce.sinks import FileSink


def naive(df, batch_id):
    pass


def made(folder=".", debug=False):
    return ExactlyOnce("orders", sinks=[FileSink(folder)])


one = made()
number = 7
"""


@pytest.mark.parametrize(
    ("name", "kind"), [("naive", "function"), ("made", "ExactlyOnce"), ("one", "ExactlyOnce")]
)
def test_job_is_a_pipeline_or_its_factory_or_a_function_for_foreachbatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    (tmp_path / f"jobs_{name}.py").write_text(JOBS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert type(load_writer(f"jobs_{name}:{name}")).__name__ == kind


def test_job_of_another_type_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jobs_number.py").write_text(JOBS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match="is of type int"):
        load_writer("jobs_number:number")
