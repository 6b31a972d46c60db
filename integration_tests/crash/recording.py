"""Writes down what the drivers of a run read and changed, for the replay through `specs.traces`.

    job ─► step ends ─► one line of FOLDER/trace.jsonl ─► events ─► `replay`: the model allows each

A step's line is written before the fail point after it, so a driver that is killed there has it.
The drivers must run one after the other: then the end of a step is as good as its effect. What a
task has prepared is seen when a record names it.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from specs.traces import Event, replay

from sparkonce import steps
from sparkonce.steps import step
from sparkonce.txn_log.record import TransactionRecord

_FILE: Final = "trace.jsonl"
_OF_A_RECORD: Final = {"decide", "hold", "abandon", "complete", "amend"}


class Recorder:
    """One driver's hook at the steps."""

    def __init__(self, file: Path, checkpoint: Path, *, waits: bool) -> None:
        self._file = file
        self._commits = checkpoint / "commits"
        self._lock = threading.RLock()
        before = list(events_in(file))
        self._known = {(e.what, e.details.get("name"), e.details.get("batch")) for e in before}
        self._states = {
            e.details["batch"]: e.details["state"] for e in before if e.what == "record"
        }
        self._driver = sum(event.what == "plan" for event in before)
        self._records: dict[int, TransactionRecord] = {}
        self._is_delivering = False
        self._note_commits(self._driver - 1)
        self._note("plan", waits=waits)
        self._note("look")

    # -- the hook ----------------------------------------------------------------------------------

    def started(self, entered: step) -> None:
        with self._lock:
            self._note_commits(self._driver)
            if entered.name == "deliver":
                self._is_delivering = True

    def ended(self, entered: step, error: BaseException | None) -> None:
        with self._lock:
            if entered.name == "deliver":
                self._is_delivering = False
            if error is None:
                self._see(entered)

    def _see(self, entered: step) -> None:
        result: Any = entered.result
        for record in result if isinstance(result, list | tuple) else [result]:
            if isinstance(record, TransactionRecord):
                self._records[record.id.batch_id] = record
        if entered.name == "begin":
            self._note("begin")
        elif entered.name == "look" and entered.batch is None:
            self._note("unfinished")
        elif entered.name == "look" and self._is_delivering:
            self._note("find")
        elif entered.name in _OF_A_RECORD:
            self._note_record(result)
        elif entered.name == "commit":
            assert entered.sink is not None
            assert entered.batch is not None
            for branch in self._records[entered.batch].shares[entered.sink.name].committables:
                self._note_once("show", name=str(branch.branch_id))

    # -- what is written ---------------------------------------------------------------------------

    def _note_record(self, record: TransactionRecord) -> None:
        batch, state = record.id.batch_id, str(record.state)
        if self._states.get(batch) == state:
            return
        self._states[batch] = state
        parts: Counter[str] = Counter()
        names = []
        for branch_id in (committable.branch_id for committable in record.committables()):
            sink, name = branch_id.sink, str(branch_id)
            self._note_once("prepare", name=name, batch=batch, sink=sink, part=parts[sink])
            parts[sink] += 1
            names.append(name)
        self._note("record", batch=batch, state=state, names=sorted(names))

    def _note_commits(self, driver: int) -> None:
        """What Spark has committed since, which was before this driver's next step."""
        if self._commits.is_dir():
            for batch in sorted(int(p.name) for p in self._commits.iterdir() if p.name.isdigit()):
                self._note_once("spark", driver, batch=batch)

    def _note_once(self, what: str, driver: int | None = None, **details: object) -> None:
        key = (what, details.get("name"), details.get("batch"))
        if key not in self._known:
            self._known.add(key)
            self._note(what, driver, **details)

    def _note(self, what: str, driver: int | None = None, **details: object) -> None:
        line = json.dumps([self._driver if driver is None else driver, what, details])
        descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, f"{line}\n".encode())
        os.close(descriptor)


def enable(folder: Path) -> None:
    """Let the drivers of this folder be recorded."""
    (folder / _FILE).touch()


def record(folder: Path, checkpoint: Path, *, waits: bool) -> None:
    """Write down the steps of this process from now on, if a test has enabled that."""
    if (folder / _FILE).exists():
        steps.add_hook(Recorder(folder / _FILE, checkpoint, waits=waits))


def events_in(file: Path) -> Iterator[Event]:
    """What the drivers have written so far, in order."""
    for line in file.read_text().splitlines():
        yield Event(*json.loads(line))


def check_run(folder: Path, batches: int) -> None:
    """Assert that the model allows what the drivers did.

    Raises:
        Impossible: it does not; the message names the first such event.
    """
    events = list(events_in(folder / _FILE))
    replay(events, first_batch=0, batches=batches)
    print(f"{len(events)} events of {len({e.driver for e in events})} drivers fit the model")
