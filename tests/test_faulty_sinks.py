"""Sinks with one mistake each, and the test of the contract that sees it.

The sinks that they are made from pass all of it (test_sink_contracts.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from examples.sqlite_sink import SqliteSink, Staged

from sparkonce.errors import PreparedBranchLostError, SparkOnceError
from sparkonce.model import BranchId, Committable, Owner
from sparkonce.sinks import FileSink
from sparkonce.sinks.file import FileHandle
from sparkonce.testing import SinkContract, SinkWorld
from sparkonce.testing.sink_world import SCHEMA, Stage
from tests.test_sink_contracts import file_world, sqlite_world


def caught(
    world: SinkWorld, test: Callable[[SinkContract, Stage], None], *errors: type[Exception]
) -> None:
    """That a test of the contract is red."""
    with closing(Stage(world)) as stage:
        with pytest.raises((AssertionError, SparkOnceError, *errors)):
            test(SinkContract(), stage)


@pytest.mark.parametrize(
    ("part", "constant"),
    [
        ("batch", {"batch_id": None}),
        ("token", {"token": 0}),
        ("pass", {"write_pass": 0}),
        ("log", {"owner": Owner("0" * 16, "11111111-2222-3333-4444-555555555555")}),
        ("query", {"owner": Owner("0123456789abcdef", "0")}),
    ],
)
def test_part_of_the_branch_id_is_left_out(
    tmp_path: Path, part: str, constant: dict[str, Any]
) -> None:
    """A later branch takes the visible name, which is the proof, of an earlier one."""

    class ShortNames(FileSink):
        def _visible_path(self, branch_id: BranchId) -> Path:
            return super()._visible_path(replace(branch_id, **constant))

    caught(
        file_world(tmp_path, ShortNames),
        lambda contract, stage: contract.test_branches_one_part_apart(stage, stage.sink(), part),
    )


@pytest.mark.parametrize(
    "copy",
    [lambda hidden, visible: visible.write_bytes(hidden.read_bytes()), shutil.copyfile],
    ids=["pathlib", "shutil"],
)
def test_commit_is_a_copy(tmp_path: Path, copy: Callable[[Path, Path], object]) -> None:
    """The copy is there, and so the proof, before its rows are."""

    class Copies(FileSink):
        def commit(self, committable: Committable) -> None:
            hidden = self._hidden_path(committable.branch_id)
            visible = self._visible_path(committable.branch_id)
            if not visible.exists():
                copy(hidden, visible)
                hidden.unlink()

    def killed(contract: SinkContract, stage: Stage) -> None:
        contract.test_process_killed_between_the_lines_of_commit(stage, stage.sink())

    caught(file_world(tmp_path, Copies), killed, pa.ArrowInvalid)


def test_outcome_of_a_batch_is_that_of_all(tmp_path: Path) -> None:
    """One statement for the batch, and one count of its rows: a lost branch is called committed."""

    class Joint(SqliteSink):
        def commitBatch(
            self, committables: Sequence[Committable]
        ) -> Sequence[SparkOnceError | None]:
            branches = [str(c.branch_id) for c in committables]
            marks = ", ".join("?" * len(branches))
            with self._transaction() as db:
                moved = db.execute(
                    f'INSERT INTO "{self._table}" (id, name) SELECT id, name '
                    f'FROM "{self._staging}" WHERE sparkonce_branch IN ({marks})',
                    branches,
                ).rowcount
            lost = moved == 0 and sum(Staged.of(c).rows for c in committables) > 0
            return [
                PreparedBranchLostError("gone", c.branch_id) if lost else None for c in committables
            ]

    def one_is_gone(contract: SinkContract, stage: Stage) -> None:
        contract.test_commit_of_a_batch_gives_an_outcome_for_each(stage, stage.sink())

    caught(sqlite_world(tmp_path / "shop.db", SCHEMA, Joint), one_is_gone)


def test_vote_counts_on_a_task(tmp_path: Path) -> None:
    class FirstOf(FileSink):
        def prepareBatch(
            self, branch_id: BranchId, committables: Sequence[Committable]
        ) -> Sequence[Committable]:
            assert committables[0].version == 1
            return committables

    def without_rows(contract: SinkContract, stage: Stage) -> None:
        contract.test_batch_without_rows(stage, stage.sink())

    caught(file_world(tmp_path, FirstOf), without_rows, IndexError)


def test_commit_counts_on_validate(tmp_path: Path) -> None:
    """A recovery would write files without columns."""

    class Columns(FileSink):
        _columns: tuple[str, ...] = ()

        def validate(self, schema: pa.Schema) -> None:
            super().validate(schema)
            self._columns = tuple(schema.names)

        def commit(self, committable: Committable) -> None:
            hidden = self._hidden_path(committable.branch_id)
            if hidden.exists():
                pq.write_table(pq.read_table(hidden).select(self._columns), hidden)
            super().commit(committable)

    caught(file_world(tmp_path, Columns), SinkContract.test_sink_that_was_never_validated)


class AbortsByPrefix(FileSink):
    """`a1` ends `a12` too."""

    def abort(self, branch: BranchId | Committable) -> None:
        branch_id = branch.branch_id if isinstance(branch, Committable) else branch
        for path in self._hidden.glob(branch_id.name.rstrip(".") + "*"):
            path.unlink()


class AbortsAll(FileSink):
    """One order for all of an owner's branches, whichever were asked for."""

    def abortBatch(self, found: Sequence[Committable]) -> Sequence[Exception | None]:
        return super().abortBatch([c for b in found for c in self.find_branches(b.branch_id.owner)])


class AbortsSilently(FileSink):
    """Gives no outcomes."""

    def abortBatch(self, found: Sequence[Committable]) -> Sequence[Exception | None]:
        return super().abortBatch(found)[:0]


class DiscardsAll(FileSink):
    """Tidies the temporary folder up."""

    def discard(self, handle: FileHandle) -> None:
        super().discard(handle)
        for path in self._hidden.iterdir():
            path.unlink()


@pytest.mark.parametrize(
    ("sink", "end"),
    [
        (AbortsByPrefix, "abort"),
        (AbortsAll, "abortBatch"),
        (AbortsSilently, "abortBatch"),
        (DiscardsAll, "discard"),
    ],
)
def test_end_of_a_branch_ends_others(tmp_path: Path, sink: type[FileSink], end: str) -> None:
    def neighbours(contract: SinkContract, stage: Stage) -> None:
        contract.test_end_of_a_branch_leaves_others_alone(stage, stage.sink(), end, 12, 1)

    caught(file_world(tmp_path, sink), neighbours)
