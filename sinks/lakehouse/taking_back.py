"""Removes the data files of committed batches from a table, and proves that only those go.

    load the table ─► its files in each batch's folder ─► as many files and bytes as were prepared?
          ▲             yes ─────────────────► one commit: without the files, proof "taken back" ─┐
          │             none, and the proof ─► it is gone                                         │
          │             else ────────────────► refused                                            │
          └──────────────────────────────── another commit came first ────────────────────────────┘

Data files never change, and no other batch has files in that folder. A writer that compacts the
table or deletes rows puts other files in their place, or marks the rows as deleted elsewhere. If a
batch has no files, only the proof shows that a rewind has removed them. The batch stays committed:
a driver that is still in the middle of its commit finds that, and adds nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sparkonce.errors import SinkUnavailableError, SparkOnceError, TakeBackRefusedError
from sparkonce.model import BranchId
from sparkonce.sinks.capabilities import Delivered, Visible
from sparkonce.sinks.committables import check_all_there
from sparkonce.sinks.lakehouse.finishing import attempts
from sparkonce.sinks.lakehouse.payloads import PreparedBatch
from sparkonce.sinks.lakehouse.table import LiveFile, LoadedTable


@dataclass(frozen=True)
class Remover:
    """Finds and removes committed batches; see `TakesBack`.

    Attributes:
        load: loads the table; None if there is none.
        where: the table, for messages.
        sink: name of the sink, for messages.
    """

    load: Callable[[], LoadedTable | None]
    where: str
    sink: str

    def find(self, branches: Sequence[Delivered]) -> list[Visible]:
        """What the table has now of each batch."""
        with self._with_our_errors():
            _, found = self._look(branches)
        return [
            Visible(PreparedBatch.of(c).rows if files else 0, tuple(f.path for f in files))
            for (c, _), files in zip(branches, found, strict=True)
        ]

    def take_back(self, branches: Sequence[Delivered]) -> None:
        """Remove the files of all batches in one commit."""
        with self._with_our_errors():
            for _ in attempts():
                table, found = self._look(branches)
                left = [
                    (branch, files) for branch, files in zip(branches, found, strict=True) if files
                ]
                for (committable, rows), _files in left:
                    prepared = PreparedBatch.of(committable)
                    check_all_there(self.where, committable.branch_id, prepared.rows, rows)
                if not left or table.commit_removal(
                    [branch.committable.branch_id for branch, _ in left],
                    [file for _, files in left for file in files],
                ):
                    return
        raise SinkUnavailableError(f"other writers of {self.where} came first each time")

    def _look(
        self, branches: Sequence[Delivered]
    ) -> tuple[LoadedTable, Sequence[Sequence[LiveFile]]]:
        """The table as it is now, and the files of each batch: all of them, or none."""
        table = self.load()
        if table is None:
            raise TakeBackRefusedError(
                f"{self.where} does not exist: bring it back, or pass --keep {self.sink}"
            )
        if why := table.keeps_files():
            raise TakeBackRefusedError(f"{self.where} {why}; or {self._instead}")
        prepared = [PreparedBatch.of(committable) for committable, _ in branches]
        found = table.live_files(prepared)
        for (committable, _), batch, files in zip(branches, prepared, found, strict=True):
            if why := _why_not(table, committable.branch_id, batch, files):
                raise TakeBackRefusedError(
                    f"{self.where} {why}, so nothing proves which rows of it are those of batch "
                    f"{committable.branch_id.batch_id}; {self._instead}",
                    committable.branch_id,
                )
        return table, found

    @property
    def _instead(self) -> str:
        return (
            f"roll the table back to before this batch yourself, and pass --keep {self.sink}; or "
            "fork the savepoint into a new table"
        )

    @contextlib.contextmanager
    def _with_our_errors(self) -> Iterator[None]:
        try:
            yield
        except SparkOnceError:
            raise
        except Exception as error:  # the next call finds the proof, if the commit has landed
            raise SinkUnavailableError(f"{self.where}: {type(error).__name__}: {error}") from error


def _why_not(
    table: LoadedTable, branch_id: BranchId, prepared: PreparedBatch, files: Sequence[LiveFile]
) -> str | None:
    """Why the files do not prove what the table has of the batch; None if they do."""
    if table.id != prepared.table:
        return f"is another table now ({table.id}) than the one with the batch ({prepared.table})"
    if not files and table.is_taken_back(branch_id):
        return None
    if table.end_of(branch_id) in {None, "aborted"}:
        return "does not show that the batch was committed"
    if (len(files), sum(file.bytes for file in files)) != (prepared.files, prepared.bytes):
        return (
            f"has {len(files)} of the batch's {prepared.files} data files: another writer has "
            "compacted, changed or removed some since"
        )
    if any(file.lacks_rows for file in files):
        return "marks rows in the batch's data files as deleted: another writer did that since"
    return None
