"""Failing twins: each sink makes one mistake, and turns one test of the contract red.

sinks/test_faulty.py and sinks/test_twins_processes.py have others; docs/contributing/twins.md lists
all of them.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sparkonce.errors import PreparedBranchLostError
from sparkonce.model import BranchId, Committable, Owner
from sparkonce.sinks import FileSink, SqliteSink
from sparkonce.sinks.capabilities import Delivered, Visible, Votes
from sparkonce.sinks.file import FileHandle
from sparkonce.sinks.sqlite import Staged, Staging
from sparkonce.testing import SinkContract
from sparkonce.testing.sink_world import SCHEMA, Stage
from tests.support.sink_worlds import caught, file_world, sqlite_world
from tests.support.twins import name_of, twins_on

if TYPE_CHECKING:
    import pyarrow as pa


# -- abort and discard -----------------------------------------------------------------------------


class AbortsByPayload(FileSink):
    """Finds what to remove in the payload, which a branch id does not have."""

    def abort(self, branch: BranchId | Committable) -> None:
        if isinstance(branch, Committable) and "sha256" in branch.payload:
            super().abort(branch)


class KnowsItsOwn(FileSink):
    """Keeps in the object what it has prepared, and takes all else for unknown."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._prepared: set[BranchId] = set()

    def preCommit(self, handle: FileHandle) -> Committable:
        self._prepared.add(handle.branch_id)
        return super().preCommit(handle)

    def abort(self, branch: BranchId | Committable) -> None:
        branch_id = branch.branch_id if isinstance(branch, Committable) else branch
        if branch_id in self._prepared:
            super().abort(branch)

    def commit(self, committable: Committable) -> None:
        if committable.branch_id not in self._prepared:
            raise PreparedBranchLostError("not prepared here", committable.branch_id)
        super().commit(committable)


class AbortsVoted(FileSink, Votes):
    """Needs what the vote adds to the payload."""

    def vote(
        self, branch_id: BranchId, committables: Sequence[Committable]
    ) -> Sequence[Committable]:
        return [replace(c, payload={**c.payload, "is_voted": True}) for c in committables]

    def abort(self, branch: BranchId | Committable) -> None:
        if isinstance(branch, Committable) and "is_voted" in branch.payload:
            super().abort(branch)


class AbortsWhatIsThere(FileSink):
    """Takes a file that is gone for an error."""

    def abort(self, branch: BranchId | Committable) -> None:
        branch_id = branch.branch_id if isinstance(branch, Committable) else branch
        self._hidden_path(branch_id).unlink()


class AbortsBatches(FileSink):
    """Removes what the batch has, whatever its token, pass and attempt."""

    def abort(self, branch: BranchId | Committable) -> None:
        branch_id = branch.branch_id if isinstance(branch, Committable) else branch
        for path in self._hidden.glob(f"*.b{branch_id.batch_id}.parquet"):
            path.unlink()


class AbortsForGood(FileSink):
    """Notes that the batch is aborted, and not the branch."""

    def abort(self, branch: BranchId | Committable) -> None:
        super().abort(branch)
        branch_id = branch.branch_id if isinstance(branch, Committable) else branch
        (self._folder / f"_aborted-{branch_id.batch_id}").touch()

    def commit(self, committable: Committable) -> None:
        if (self._folder / f"_aborted-{committable.branch_id.batch_id}").exists():
            raise PreparedBranchLostError("the batch was aborted", committable.branch_id)
        super().commit(committable)


class DiscardsWhatIsThere(FileSink):
    """Takes a file that is gone for an error."""

    def discard(self, handle: FileHandle) -> None:
        if handle.writer is not None:
            handle.writer.close()
        handle.file.close()
        handle.path.unlink()


class DiscardsWriter(FileSink):
    """Counts on a writer, which the first rows make."""

    def discard(self, handle: FileHandle) -> None:
        super().discard(handle)
        handle.writer.close()  # type: ignore[union-attr]


class ClosesToKeep(FileSink):
    """Closes its client, which saves what was written."""

    def discard(self, handle: FileHandle) -> None:
        self.commit(self.preCommit(handle))


class SweepsProofs(SqliteSink):
    """Leaves staged rows to the sweep, which removes the proof before them."""

    def _drop(self, db: Any, branch_id: BranchId) -> None:
        proof = "SELECT 1 FROM sparkonce_commits WHERE branch = ?"
        if db.execute(proof, [str(branch_id)]).fetchone() is None:
            super()._drop(db, branch_id)

    def abort(self, branch: BranchId | Committable) -> None:
        super().abort(branch)
        branch_id = branch.branch_id if isinstance(branch, Committable) else branch
        with self._transaction() as db:
            db.execute("DELETE FROM sparkonce_commits WHERE branch = ?", [str(branch_id)])


# -- commit ----------------------------------------------------------------------------------------


class GoneIsCommitted(FileSink):
    """Takes a branch that is gone for one that was committed before."""

    def commit(self, committable: Committable) -> None:
        with suppress(PreparedBranchLostError):
            super().commit(committable)


class PreparesOnDemand:
    """Prepares the branch itself if it gets a handle."""

    def commit(self: Any, committable: Any) -> None:
        if isinstance(committable, FileHandle):
            committable = self.preCommit(committable)
        super().commit(committable)  # type: ignore[misc]


class CommitsHandles(PreparesOnDemand, FileSink):
    """Gets its commit from a class that is no sink, so nothing checks what that takes."""


class SkipsOlderBatches(FileSink):
    """Keeps the number of the last batch, and takes an older one for committed."""

    def commit(self, committable: Committable) -> None:
        names = [path.name.removesuffix("parquet") for path in self._folder.glob("*.parquet")]
        done = [branch.batch_id for name in names if (branch := BranchId.from_name(name))]
        if not any(batch > committable.branch_id.batch_id for batch in done):  # type: ignore[operator]
            super().commit(committable)


class CommitsBatches(FileSink):
    """Shows all that the batch has, also what no decision names."""

    def commit(self, committable: Committable) -> None:
        super().commit(committable)
        for path in self._hidden.glob(f"*.b{committable.branch_id.batch_id}.parquet"):
            path.rename(self._folder / path.name)


class JoinsBatches(FileSink):
    """Adds what comes late to the batch that is already visible."""

    def preCommit(self, handle: FileHandle) -> Committable:
        committable = super().preCommit(handle)
        if any(self._folder.glob(f"*.b{handle.branch_id.batch_id}.parquet")):
            self.commit(committable)
        return committable


class Overwrites(FileSink):
    """Replaces the table, as a mode called overwrite does."""

    def commit(self, committable: Committable) -> None:
        for path in self._folder.glob("*.parquet"):
            if path != self._visible_path(committable.branch_id):
                path.unlink()
        super().commit(committable)


class TidiesAtStart(FileSink):
    """Takes what it finds at its start for garbage."""

    def validate(self, schema: pa.Schema) -> None:
        super().validate(schema)
        for path in self._hidden.iterdir():
            path.unlink()


# -- rows ------------------------------------------------------------------------------------------


class LeavesEmptyOut(FileSink):
    """Keeps no file without rows."""

    def write(self, handle: FileHandle, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            super().write(handle, batch)

    def preCommit(self, handle: FileHandle) -> Committable:
        committable = super().preCommit(handle)
        if handle.writer is None:
            handle.path.unlink()
        return committable


class EndsAtEmpty(FileSink):
    """Takes a record batch without rows for the end of the rows."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._ended: set[BranchId] = set()

    def write(self, handle: FileHandle, batch: pa.RecordBatch) -> None:
        if handle.branch_id not in self._ended:
            super().write(handle, batch)
        if not batch.num_rows:
            self._ended.add(handle.branch_id)


class LeavesEqualOut(SqliteSink):
    """Inserts what the table does not have yet."""

    def _move(self, db: Any, committable: Committable) -> int:
        db.execute(
            f'INSERT INTO "{self._table}" SELECT id, name FROM "{self._staging}" '
            f'WHERE sparkonce_branch = ? EXCEPT SELECT id, name FROM "{self._table}"',
            [str(committable.branch_id)],
        )
        return Staged.of(committable).rows


class CutsLongBranches(SqliteSink):
    """Its client keeps no more than a number of rows, and does not report the others."""

    def write_rows(self, handle: Staging, rows: Sequence[Mapping[str, Any]]) -> None:
        super().write_rows(handle, rows[: 20_000 - handle.rows])


# -- names, promises and listings ------------------------------------------------------------------


class TargetOfObject(FileSink):
    """Its target has the object's address in memory."""

    @property
    def target(self) -> str:
        return f"folder {self._folder} of {id(self):x}"


class TargetOfProcess(FileSink):
    @property
    def target(self) -> str:
        return f"folder {self._folder} of process {os.getpid()}"


class PromisesMilliseconds(FileSink):
    def preCommit(self, handle: FileHandle) -> Committable:
        return replace(super().preCommit(handle), safe_until=(time.time() + 3600) * 1000)


class ListsOldOnly(FileSink):
    """Takes a young branch for that of a living driver."""

    def find_branches(self, owner: Owner) -> Iterable[Committable]:
        oldest = time.time() - 3600
        found = super().find_branches(owner)
        return [c for c in found if self._hidden_path(c.branch_id).stat().st_mtime < oldest]


class ListsByPrefix(FileSink):
    """Lists what begins with the query's id, without the dot that ends it."""

    def find_branches(self, owner: Owner) -> Iterable[Committable]:
        names = [path.name.removesuffix("parquet") for path in self._hidden.iterdir()]
        ours = [name for name in names if name.startswith(owner.prefix.rstrip("."))]
        return [Committable(branch) for name in ours if (branch := BranchId.from_name(name))]


class ListsWithoutToken(FileSink):
    def find_branches(self, owner: Owner) -> Iterable[Committable]:
        return [Committable(replace(c.branch_id, token=0)) for c in super().find_branches(owner)]


C = SinkContract
OPEN = "something is still open, prepared or staged"
TWICE = "readers should get 3 rows and get 6"
PAIRS: list[tuple[type[FileSink | SqliteSink], Callable[..., None], str]] = [
    (AbortsByPayload, C.test_abort_by_the_branch_id, OPEN),
    (KnowsItsOwn, C.test_abort_of_a_prepared_batch, OPEN),
    (AbortsVoted, C.test_abort_of_a_prepared_task, OPEN),
    (AbortsWhatIsThere, C.test_abort_of_what_never_began, "abort of a branch that never began"),
    (AbortsWhatIsThere, C.test_abort_twice, "a repeated abort must"),
    (AbortsBatches, C.test_older_token_never_hits_a_younger_branch, "was prepared .* and is gone"),
    (AbortsBatches, C.test_rewrite_has_a_name_of_its_own, "was prepared .* and is gone"),
    (AbortsForGood, C.test_replay_of_an_aborted_batch, "the batch was aborted"),
    (DiscardsWhatIsThere, C.test_discard_after_the_sweep, "discard of a branch that a sweep"),
    (DiscardsWriter, C.test_discard_of_a_branch_without_rows, "also before the first write"),
    (ClosesToKeep, C.test_discard_of_an_open_branch, "should get 0 rows and get 3"),
    (SweepsProofs, C.test_commit_after_its_left_overs_were_swept, TWICE),
    (GoneIsCommitted, C.test_commit_after_abort, "commit of an aborted branch returned"),
    (GoneIsCommitted, C.test_lost_branch_is_reported, "that was destroyed returned"),
    (CommitsHandles, C.test_commit_before_precommit, "a FileHandle and returned"),
    (KnowsItsOwn, C.test_commit_by_another_object, "not prepared here"),
    (
        SkipsOlderBatches,
        C.test_commits_come_in_another_order_than_prepares,
        "should get 8 rows and get 5",
    ),
    (CommitsBatches, partial(C.test_two_attempts_of_one_task, lost=1, won=12), TWICE),
    (JoinsBatches, C.test_attempt_that_prepares_after_the_commit, TWICE),
    (Overwrites, C.test_one_batch_after_the_other, "should get 10 rows and get 2"),
    (TidiesAtStart, C.test_validate_twice, "was prepared .* and is gone"),
    (LeavesEmptyOut, C.test_branch_without_rows, "was prepared .* and is gone"),
    (EndsAtEmpty, C.test_empty_record_batches, "should get 3 rows and get 0"),
    (LeavesEqualOut, C.test_equal_rows_are_all_kept, "should get 12 rows and get 3"),
    (CutsLongBranches, C.test_large_branch, "should get 50000 rows and get 20000"),
    (TargetOfObject, C.test_name_and_target_are_permanent, "the log keeps name and target"),
    (TargetOfProcess, C.test_name_and_target_are_permanent, "must be the same in every process"),
    (PromisesMilliseconds, C.test_promise_lasts_long_enough, "must be a Unix time in seconds"),
    (ListsOldOnly, C.test_orphans_are_found_and_aborted, "find_branches does not list"),
    (ListsByPrefix, C.test_orphans_of_others_are_not_listed, "of another log or query"),
    (ListsWithoutToken, C.test_listing_names_token_and_sink, "could not recognise it"),
]


@pytest.mark.parametrize(
    ("sink", "test", "says"),
    PAIRS,
    ids=[f"{sink.__name__}-{name_of(test)}" for sink, test, _ in PAIRS],
)
def test_mistake_turns_a_test_red(
    tmp_path: Path, sink: type[FileSink | SqliteSink], test: Callable[..., None], says: str
) -> None:
    def run(contract: SinkContract, stage: Stage) -> None:
        takes_sink = "sink" in signature(test).parameters
        test(contract, stage, *([stage.sink()] if takes_sink else []))

    if issubclass(sink, SqliteSink):
        caught(sqlite_world(tmp_path / "shop.db", SCHEMA, sink), run, says=says)
    else:
        caught(file_world(tmp_path, sink), run, says=says)


def test_every_test_of_the_contract_has_a_twin() -> None:
    """The page names a mistake for each, and the test that makes it: both exist."""
    assert list(twins_on("twins.md", SinkContract))


class TakesAll(FileSink):
    """Takes the whole folder back."""

    def take_back(self, branches: Sequence[Delivered]) -> None:
        super().take_back(branches)
        for path in self._folder.glob("*.parquet"):
            path.unlink()


class TakesWithoutCounting(FileSink):
    """Removes whatever has the branch's name."""

    def take_back(self, branches: Sequence[Delivered]) -> None:
        for committable, _ in branches:
            self._visible_path(committable.branch_id).unlink(missing_ok=True)


class FindsWhatTheLogHas(FileSink):
    """Does not look at the target."""

    def find_delivered(self, branches: Sequence[Delivered]) -> Sequence[Visible]:
        return [Visible(rows) for _, rows in branches]


class ShowsAgain(FileSink):
    """The staged file stays, so that a late commit finds it."""

    def commit(self, committable: Committable) -> None:
        visible = self._visible_path(committable.branch_id)
        kept = visible.with_suffix(".kept")
        if not kept.exists():
            super().commit(committable)
            shutil.copy(visible, kept)
        shutil.copy(kept, visible)


@pytest.mark.parametrize(
    ("sink", "says"),
    [
        (TakesAll, "batch 2 was taken back"),
        (TakesWithoutCounting, "take_back removed a branch that has one row less"),
        (FindsWhatTheLogHas, "find_delivered finds rows of a branch that was taken back"),
        (ShowsAgain, "commit of a branch that was taken back was called late"),
    ],
)
def test_too_much_or_too_little_is_taken_back(
    tmp_path: Path, sink: type[FileSink], says: str
) -> None:
    caught(
        file_world(tmp_path, sink),
        lambda contract, stage: contract.test_batch_is_taken_back(stage, stage.sink()),
        says=says,
    )
