"""What takes long is said while it does, so that an operator sees what a query waits for."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
from tenacity import RetryCallState, Retrying

from sparkonce import ExactlyOnce
from sparkonce.errors import PrepareRejectedError
from sparkonce.once import once
from sparkonce.protocol.operating import look_for_orphans
from sparkonce.spark_hooks.checkpoint import CheckpointFiles
from sparkonce.spark_hooks.partition_writer import PartitionWriter
from sparkonce.steps import step
from sparkonce.testing.log_cases import claim
from sparkonce.testing.sink_world import OWNER, branch
from sparkonce.txn_log.record import Incarnation
from sparkonce.txn_log.sqlite import SqliteLog
from sparkonce.watching import EVERY_S, Watch, still_trying
from tests.support.world import MemorySink, Process, Store, World, hashed

CHILD_OF_A_PROCESS_THAT_WAITS = """
import os, signal, threading, time
from sparkonce.steps import step
from sparkonce.once import once
from sparkonce.watching import EVERY_S, Watch

watch = once(Watch)
begun = threading.Event()

def wait():
    with step("commit", batch=6):
        begun.set()
        threading.Event().wait()

threading.Thread(target=wait, daemon=True).start()
begun.wait()
child = os.fork()
if child:
    os._exit(os.WTERMSIG(os.waitpid(child, 0)[1]))
signal.alarm(20)
with step("commit", batch=7):
    watch.log_slow(time.monotonic() + EVERY_S)
    print(*(thread.name for thread in threading.enumerate()))
"""


def said(caplog: pytest.LogCaptureFixture, *, after_s: float) -> list[str]:
    caplog.clear()
    once(Watch).log_slow(time.monotonic() + after_s)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("verb", "told"),
    [
        ("commit", "commit batch 0 of pipeline 'orders' in <MemorySink 'left' -> memory>"),
        ("vote", "vote on batch 0 of pipeline 'orders' in <MemorySink 'left' -> memory>"),
        ("publish", "publish batch 0 of pipeline 'orders' in <MemorySink 'left' -> memory>"),
        (
            "find_branches",
            "abort left-over branches of pipeline 'orders' in <MemorySink 'left' -> memory>",
        ),
    ],
)
def test_verb_of_a_sink_that_does_not_return(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, verb: str, told: str
) -> None:
    """Its name, its batch and its sink are said, and no more once it has returned."""
    world, heard = World(tmp_path, [[[1]]]), list[str]()

    def listen(called: str) -> None:
        if called == verb:
            heard.extend(said(caplog, after_s=EVERY_S))

    def prepare(sinks: list[MemorySink]) -> None:
        sinks[0].fail = listen

    world.prepare_sinks = prepare
    world.start(Process())
    world.check()
    assert f"no response yet, after 30 s, to: {told}" in heard
    assert said(caplog, after_s=EVERY_S) == []


@pytest.mark.parametrize(
    ("verb", "told"), [("beginTransaction", "begin"), ("write", "write"), ("preCommit", "prepare")]
)
def test_verb_of_a_sink_that_does_not_return_in_a_task(
    caplog: pytest.LogCaptureFixture, verb: str, told: str
) -> None:
    sink, heard = MemorySink(Store(), Process(), "left"), list[str]()
    sink.fail = lambda called: heard.extend(said(caplog, after_s=30) if called == verb else ())
    incarnation = Incarnation("orders", OWNER, 4)
    PartitionWriter([sink], incarnation, 7).write(iter([hashed([1, 2])]), 0, 11)
    named = (
        f"{told} {branch(11, batch_id=7, token=4, sink='left')} in <MemorySink 'left' -> memory>"
    )
    assert heard == [f"no response yet, after 30 s, to: {named}"]


def test_task_that_fails_and_gives_up_what_it_has_open(caplog: pytest.LogCaptureFixture) -> None:
    sink, heard = MemorySink(Store(), Process(), "left"), list[str]()

    def fail(called: str) -> None:
        if called == "write":
            raise OSError("disk full")
        heard.extend(said(caplog, after_s=30) if called == "discard" else ())

    sink.fail = fail
    with pytest.raises(PrepareRejectedError, match="disk full"):
        PartitionWriter([sink], Incarnation("orders", OWNER, 4), 7).write(
            iter([hashed([1, 2])]), 0, 11
        )
    (told,) = heard
    assert told.startswith("no response yet, after 30 s, to: discard sparkonce.")


def test_short_wait_is_not_said(caplog: pytest.LogCaptureFixture) -> None:
    with step("commit", batch=7):
        assert said(caplog, after_s=0) == []
        assert said(caplog, after_s=90) == ["no response yet, after 90 s, to: commit batch 7"]
        assert "sparkonce-watch" in {thread.name for thread in threading.enumerate()}


def test_wait_that_fails_is_over(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConnectionError), step("commit", batch=7):
        raise ConnectionError
    assert said(caplog, after_s=90) == []


def test_sink_that_is_asked_for_orphans_and_does_not_return(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator who looks hears which sink keeps the answer back."""
    heard: list[str] = []
    sink = MemorySink(Store(), Process(), "left")
    sink.fail = lambda called: heard.extend(said(caplog, after_s=EVERY_S))
    job = ExactlyOnce("orders", sinks=[sink], log=SqliteLog(tmp_path / "log.db"))
    job.log.begin(claim())
    assert look_for_orphans(job, {}) == []
    told = "list branches of pipeline 'orders' in <MemorySink 'left' -> memory>"
    assert heard == [f"no response yet, after 30 s, to: {told}"]
    job.log.close()


@pytest.mark.parametrize(
    "ask",
    [
        CheckpointFiles.committed,
        CheckpointFiles.binding,
        lambda files: files.offsets(7, str),
        lambda files: files.bind(None, "log", "orders"),
        CheckpointFiles.has_state,
    ],
)
def test_checkpoint_that_does_not_answer(
    caplog: pytest.LogCaptureFixture, ask: Callable[[CheckpointFiles], object]
) -> None:
    """Its file system may be away, at a start and at every batch; the wait says which it is."""
    heard: list[str] = []

    def hang(*_: object) -> NoReturn:
        heard.extend(said(caplog, after_s=EVERY_S))
        raise TimeoutError

    folder = SimpleNamespace(read=hang, create=hang, exists=hang, files=hang)
    with pytest.raises(TimeoutError):
        ask(CheckpointFiles(folder, "hdfs://host/ckpt"))  # type: ignore[arg-type]
    assert heard == ["no response yet, after 30 s, to: reach the checkpoint hdfs://host/ckpt"]


def test_wait_of_a_forked_child() -> None:
    """It is told in the child, which has no thread of its parent's, and nothing of the parent's."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD_OF_A_PROCESS_THAT_WAITS],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["MainThread", "sparkonce-watch"]
    assert done.stderr == "no response yet, after 30 s, to: commit batch 7\n"


def tries(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, errors: dict[float, str]
) -> list[str]:
    """What is logged of tries that fail at these times, in seconds."""
    log, told = still_trying("commit batch 7"), []
    for attempt, (at, error) in enumerate(errors.items(), start=1):
        caplog.clear()
        monkeypatch.setattr(time, "monotonic", lambda at=at: 1000 + at)
        state = RetryCallState(Retrying(), None, (), {})
        state.attempt_number = attempt
        state.set_exception((ConnectionError, ConnectionError(error), None))
        log(state)
        told += [record.getMessage() for record in caplog.records]
    return told


def test_error_that_stays_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error may be long, and tries are frequent: the first line has it, later ones are short."""
    away = "no route to db:5432, after {} ms; check the address" + " and the network" * 20
    errors = {at: away.format(int(at * 100)) for at in (0.0, 3.0, 29.0, 31.0, 34.0, 60.0, 61.5)}
    assert tries(caplog, monkeypatch, errors) == [
        f"still trying to commit batch 7, attempt 1: {away.format(0)}",
        "still trying to commit batch 7, attempt 4, after 31 s: the same error",
        "still trying to commit batch 7, attempt 7, after 62 s: the same error",
    ]


def test_error_that_changes_is_told_at_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = {0.0: "no route to db", 3.0: "no route to db", 6.0: "starting up", 9.0: "starting up"}
    assert tries(caplog, monkeypatch, errors) == [
        "still trying to commit batch 7, attempt 1: no route to db",
        "still trying to commit batch 7, attempt 3: starting up",
    ]
