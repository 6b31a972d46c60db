"""Failing twins whose mistakes show only at the sizes that Spark sends by default."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sparkonce.errors import PrepareRejectedError, SparkOnceError
from sparkonce.model import BranchId, Committable
from sparkonce.sinks import FileSink, SqliteSink
from sparkonce.sinks.base import AnySink
from sparkonce.sinks.capabilities import CommitsMany, Votes
from sparkonce.sinks.file import FileHandle
from sparkonce.sinks.sqlite import Staging
from sparkonce.sinks.verbs import commit_each
from sparkonce.testing import SinkContract
from sparkonce.testing.sink_world import SCHEMA, Stage
from tests.support.sink_worlds import caught, file_world, sqlite_world

if TYPE_CHECKING:
    import pyarrow as pa


class CommitsFirst25(FileSink, CommitsMany):
    """The store's API takes 25 branches; the sink calls the others committed too."""

    def commit_many(self, committables: Sequence[Committable]) -> Sequence[SparkOnceError | None]:
        done = commit_each(self, committables[:25])
        return [*done, *[None] * (len(committables) - len(done))]


class VotesFor100(FileSink, Votes):
    """The store's merge takes 100 tasks."""

    def vote(
        self, branch_id: BranchId, committables: Sequence[Committable]
    ) -> Sequence[Committable]:
        for committable in committables[100:]:
            self.abort(committable)
        return committables[:100]


class WritesChunk(FileSink):
    """A client sends at most 8,192 rows in one call."""

    def write(self, handle: FileHandle, batch: pa.RecordBatch) -> None:
        super().write(handle, batch.slice(0, 8192))


@pytest.mark.parametrize(
    ("sink", "test", "says"),
    [
        (CommitsFirst25, SinkContract.test_many_branches, "should get 120 rows and get 25"),
        (VotesFor100, SinkContract.test_many_branches, "should get 120 rows and get 100"),
        (WritesChunk, SinkContract.test_uneven_record_batches, "should get 16127 rows and get"),
    ],
)
def test_part_of_what_spark_sends_is_lost(
    tmp_path: Path,
    sink: type[FileSink],
    test: Callable[[SinkContract, Stage, AnySink], None],
    says: str,
) -> None:
    world = file_world(tmp_path, sink)
    caught(world, lambda contract, stage: test(contract, stage, stage.sink()), says=says)


class CutsText(SqliteSink):
    """A column of 65,535 characters, without the strict mode."""

    def write_rows(self, handle: Staging, rows: Sequence[Mapping[str, Any]]) -> None:
        super().write_rows(handle, [{**row, "name": _cut(row["name"])} for row in rows])


class RefusesLongText(SqliteSink):
    def write_rows(self, handle: Staging, rows: Sequence[Mapping[str, Any]]) -> None:
        if any(row["name"] != _cut(row["name"]) for row in rows):
            raise PrepareRejectedError("too long", handle.branch_id)
        super().write_rows(handle, rows)


def _cut(text: str | None) -> str | None:
    return text and text[:65_535]


def test_long_text_is_cut(tmp_path: Path) -> None:
    world = sqlite_world(tmp_path / "shop.db", SCHEMA, CutsText)
    says = "the task may refuse it, but never cut it"
    caught(world, lambda c, stage: c.test_long_text(stage, stage.sink()), says=says)


def test_long_text_may_be_refused(tmp_path: Path) -> None:
    world = sqlite_world(tmp_path / "shop.db", SCHEMA, RefusesLongText)
    with closing(Stage(world)) as stage:
        with pytest.raises(pytest.skip.Exception, match="refuses a text of 100,000 characters"):
            SinkContract().test_long_text(stage, stage.sink())
