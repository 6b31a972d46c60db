"""Failing twins whose mistakes show only between threads or processes, or on a network.

sinks/test_twins.py has the others.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import ClassVar

import pyarrow as pa
import pytest

from sparkonce.errors import (
    CommitUnresolvedError,
    PreparedBranchLostError,
    ProtocolError,
    SparkOnceError,
)
from sparkonce.model import BranchId, Committable
from sparkonce.sinks import FileSink
from sparkonce.sinks.base import AnySink
from sparkonce.sinks.capabilities import AbortsDecided
from sparkonce.sinks.file import FileHandle
from sparkonce.sinks.verbs import outcome_of_commit
from sparkonce.testing import SinkContract, SinkWorld
from sparkonce.testing.sink_world import Stage
from tests.support.sink_worlds import caught, file_world


class ClosesForGood(FileSink):
    """Its pool takes no work after `close`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._pool = ThreadPoolExecutor(1)

    def commit(self, committable: Committable) -> None:
        self._pool.submit(super().commit, committable).result()

    def close(self) -> None:
        self._pool.shutdown()


class KeepsBranch(FileSink):
    """Keeps the branch of the call in the object, which threads share."""

    def commit(self, committable: Committable) -> None:
        self._current = committable
        time.sleep(0.2)
        super().commit(self._current)


class SharesConnection(FileSink):
    """Threads share one connection: each takes the next answer, also that of another thread."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._answers: SimpleQueue[SparkOnceError | None] = SimpleQueue()

    def commit(self, committable: Committable) -> None:
        self._answers.put(outcome_of_commit(self, committable, super().commit))
        time.sleep(random.uniform(0, 0.01))  # noqa: S311
        if answer := self._answers.get():
            raise answer


class LooksFirst(FileSink):
    """Looks for the proof, then copies the rows, then writes the proof."""

    def commit(self, committable: Committable) -> None:
        hidden = self._hidden_path(committable.branch_id)
        proof = hidden.with_suffix(".done")
        if not proof.exists():
            rows = hidden.read_bytes()
            time.sleep(0.2)
            (self._folder / f"{uuid.uuid4()}.parquet").write_bytes(rows)
            proof.touch()


class ListsByReading(FileSink):
    """Each task reads the list of the batch's files, and replaces it with a longer one."""

    def preCommit(self, handle: FileHandle) -> Committable:
        committable = super().preCommit(handle)
        listed = self._list.read_text() if self._list.exists() else ""
        time.sleep(0.2)
        self._list.write_text(f"{listed}{handle.branch_id}\n")
        return committable

    def commit(self, committable: Committable) -> None:
        if str(committable.branch_id) not in self._list.read_text():
            raise PreparedBranchLostError("not in the list", committable.branch_id)
        super().commit(committable)

    @property
    def _list(self) -> Path:
        return self._folder / "prepared.txt"


class IndexesByReading(FileSink):
    """Each task adds itself to an index of files: it reads, and replaces, without a pause."""

    def preCommit(self, handle: FileHandle) -> Committable:
        committable = super().preCommit(handle)
        index = self._folder / "index.txt"
        listed = index.read_text() if index.exists() else ""
        aside = self._folder / f"{uuid.uuid4()}.txt"
        aside.write_text(f"{listed}{handle.branch_id}\n")
        aside.replace(index)
        return committable

    def commit(self, committable: Committable) -> None:
        if str(committable.branch_id) not in (self._folder / "index.txt").read_text():
            raise PreparedBranchLostError("not in the index", committable.branch_id)
        super().commit(committable)


class NamesByProcess(FileSink):
    """Its hidden files have the number of the process in their names."""

    def _hidden_path(self, branch_id: BranchId) -> Path:
        return self._hidden / f"{os.getpid()}-{branch_id}parquet"


class ConnectsInValidate(FileSink):
    """Keeps what does not pickle, and so cannot reach the executors."""

    def validate(self, schema: pa.Schema) -> None:
        super().validate(schema)
        self._client = threading.Lock()


class LeavesBuffered(FileSink):
    """Its preCommit leaves bytes in the process, which writes them when it closes the file."""

    def preCommit(self, handle: FileHandle) -> Committable:
        handle.writer.close()  # type: ignore[union-attr]
        return Committable(handle.branch_id, {"folder": self._id}, version=2)


class MovesWhenPrepared(FileSink):
    """Writes somewhere else, and moves the complete file."""

    def preCommit(self, handle: FileHandle) -> Committable:
        committable = super().preCommit(handle)
        handle.path.rename(self._hidden_path(handle.branch_id))
        return committable


class ListsPreparedOnly(MovesWhenPrepared):
    """An open file has a name that `find_branches` does not know."""

    def beginTransaction(self, branch_id: BranchId) -> FileHandle:
        path = self._hidden_path(branch_id).with_suffix(".open")
        return FileHandle(branch_id, path, path.open("xb"))


class CountsNames(MovesWhenPrepared):
    """Its scratch files have numbers that start with 0 in each process."""

    _count: ClassVar = itertools.count()

    def beginTransaction(self, branch_id: BranchId) -> FileHandle:
        path = Path(f"{self._folder}-scratch-{next(self._count)}")
        return FileHandle(branch_id, path, path.open("wb"))


class ShowsByAnyName(FileSink):
    """The visible file, which is the proof, has a name that nobody finds again."""

    def _visible_path(self, branch_id: BranchId) -> Path:
        return self._folder / f"{uuid.uuid4()}.parquet"


@pytest.mark.parametrize(
    ("sink", "test", "says"),
    [
        (
            ClosesForGood,
            SinkContract.test_closed_sink_can_be_used_again,
            "cannot schedule new futures",
        ),
        (KeepsBranch, SinkContract.test_commits_in_parallel, "for one that was|readers should get"),
        (SharesConnection, SinkContract.test_commits_in_parallel, "answer of another thread"),
        (
            LooksFirst,
            SinkContract.test_commit_by_two_at_the_same_time,
            "should get 3 rows and get 6",
        ),
        (ListsByReading, SinkContract.test_concurrent_branches, "not in the list"),
        (
            IndexesByReading,
            SinkContract.test_task_runs_while_another_one_prepares,
            "not in the index",
        ),
        (NamesByProcess, SinkContract.test_other_process_commits, "is gone"),
        (NamesByProcess, SinkContract.test_other_process_aborts, "something is still open"),
        (ConnectsInValidate, SinkContract.test_sink_travels_to_the_executors, "does not pickle"),
        (LeavesBuffered, SinkContract.test_process_killed_after_precommit, "file size is 0 bytes"),
        (
            ListsPreparedOnly,
            SinkContract.test_process_killed_while_it_writes,
            "something is still open",
        ),
        (ShowsByAnyName, SinkContract.test_process_killed_after_commit, "is gone"),
        (CountsNames, SinkContract.test_two_processes_write_at_the_same_time, "scratch|should get"),
    ],
)
def test_mistake_shows_between_two(
    tmp_path: Path,
    sink: type[FileSink],
    test: Callable[[SinkContract, Stage, AnySink], None],
    says: str,
) -> None:
    def run(contract: SinkContract, stage: Stage) -> None:
        test(contract, stage, stage.sink())

    caught(file_world(tmp_path, sink), run, pa.ArrowInvalid, says=says)


class RollsBack(FileSink):
    """Takes a commit that has not removed the hidden file yet for one that has failed."""

    def abort(self, branch: BranchId | Committable) -> None:
        branch_id = branch.branch_id if isinstance(branch, Committable) else branch
        if self._hidden_path(branch_id).exists():
            time.sleep(0.003)
            self._visible_path(branch_id).unlink(missing_ok=True)
        super().abort(branch)


class Races(SinkContract):
    race_rounds = 20


def test_abort_rolls_a_commit_back(tmp_path: Path) -> None:
    """An abort looks at a branch, and acts on what it saw while a commit has finished."""

    def raced(_: SinkContract, stage: Stage) -> None:
        Races().test_commit_races_an_abort(stage, stage.sink())

    says = r"commit of batch \d+ returned, and readers get its rows \[0\] times"
    caught(file_world(tmp_path, RollsBack), raced, says=says)


class CommitsInSteps(FileSink, AbortsDecided):
    """A session takes the branch away, and ends it: in between the branch has no name."""

    def _taken(self, branch_id: BranchId) -> Path:
        return self._hidden / f"{branch_id}taken"

    def commit(self, committable: Committable) -> None:
        branch_id = committable.branch_id
        taken = self._taken(branch_id)
        try:
            self._hidden_path(branch_id).rename(taken)
        except FileNotFoundError as error:
            if taken.exists():
                raise CommitUnresolvedError("another session has it", branch_id) from error
            super().commit(committable)
            return
        while (self._folder / "stalled").exists():
            time.sleep(0.01)
        taken.rename(self._visible_path(branch_id))

    def abort(self, branch: BranchId | Committable) -> None:
        branch_id = branch.branch_id if isinstance(branch, Committable) else branch
        if self._taken(branch_id).exists():
            raise CommitUnresolvedError("another session has it", branch_id)
        super().abort(branch)

    def abort_decided(self, committable: Committable) -> None:
        self.abort(committable)
        if self._visible_path(committable.branch_id).exists():
            raise ProtocolError("it is visible")


class NoSuchBranchIsGone(CommitsInSteps):
    """Its abort takes a branch that another session commits for one that is gone."""

    def abort(self, branch: BranchId | Committable) -> None:
        FileSink.abort(self, branch)


class WaitsAndTakesItForGone(CommitsInSteps):
    """Its abort_decided waits for the other session, and does not look at what that one did."""

    def abort_decided(self, committable: Committable) -> None:
        while self._taken(committable.branch_id).exists():
            time.sleep(0.01)
        self.abort(committable)


def stalling_world(folder: Path, sink: Callable[[Path], AnySink]) -> SinkWorld:
    @contextmanager
    def stalled() -> Iterator[None]:
        (folder / "stalled").touch()
        yield
        (folder / "stalled").unlink()

    return replace(file_world(folder, sink), stalled=stalled)


class Stalls(SinkContract):
    longest_pause_s = 0.3


def abort_in_a_stall(stage: Stage, end: str) -> None:
    Stalls().test_abort_while_a_commit_hangs(stage, stage.sink(), end)


@pytest.mark.parametrize(
    ("sink", "end"),
    [
        (NoSuchBranchIsGone, "abort"),
        (NoSuchBranchIsGone, "abort_decided"),
        (WaitsAndTakesItForGone, "abort_decided"),
    ],
)
def test_branch_that_hangs_is_taken_for_gone(
    tmp_path: Path, sink: type[FileSink], end: str
) -> None:
    """A rewrite of it and the commit that hangs would both show the rows."""
    says = f"{end} returned while another session was committing"
    world = stalling_world(tmp_path, sink)
    caught(world, lambda _, stage: abort_in_a_stall(stage, end), says=says)


@pytest.mark.parametrize("end", ["abort", "abort_decided"])
def test_abort_that_raises_or_waits_is_right(tmp_path: Path, end: str) -> None:
    for n, sink in enumerate((CommitsInSteps, WaitsAndTakesItForGone)[: 1 + (end == "abort")]):
        (folder := tmp_path / str(n)).mkdir()
        with closing(Stage(stalling_world(folder, sink))) as stage:
            abort_in_a_stall(stage, end)
