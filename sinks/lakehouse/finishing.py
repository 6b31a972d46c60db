"""The end of a batch: one conditional commit of the table, which adds the files or rules them out.

    load the table ─► proof? ─┬─ committed ─► remove the marks
          ▲                   ├─ aborted ───► lost
          │                   └─ none: does everything exist that was prepared?
          │                         yes ─► commit: files and proof          ─┐ only if main has
          │                         no ──► commit: no files, proof "aborted" ─┘ the same snapshot
          └──────── main has another one ─────────────────────────────────────┘ as at the load

The order matters: the table is loaded before the mark is read. A mark goes after its proof came, so
a driver that still sees the mark of a batch that was committed has loaded the table before, and its
commit fails. A missing mark proves nothing by itself.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Final

from sparkonce.errors import CommitUnresolvedError, PreparedBranchLostError, settle_command
from sparkonce.model import BranchId
from sparkonce.sinks.lakehouse.marks import Mark, batch_of
from sparkonce.sinks.lakehouse.payloads import PreparedBatch
from sparkonce.sinks.lakehouse.proofs import End
from sparkonce.sinks.lakehouse.table import LoadedTable

PATIENCE_S: Final = 60.0
_FIRST_WAIT_S: Final = 0.02
_LONGEST_WAIT_S: Final = 2.0


class BatchEnd:
    """Ends one batch of one sink.

    Args:
        load: loads the table; None if there is none.
        where: the table, for messages.
        branch_id: of the batch.
    """

    def __init__(
        self, load: Callable[[], LoadedTable | None], where: str, branch_id: BranchId
    ) -> None:
        self._load = load
        self._where = where
        self._branch_id = branch_id

    def commit(self, prepared: PreparedBatch) -> None:
        """Add the batch to the table. Idempotent.

        Raises:
            CommitUnresolvedError: call it again.
            PreparedBranchLostError: proven: it was not added and will not be.
        """
        for table in self._reloaded_tables():
            self._check_same(table, prepared.table)
            match table.end_of(self._branch_id):
                case "committed":
                    table.marks.remove_batch(self._branch_id, prepared.mark, keep_files=True)
                    return
                case "aborted":
                    raise self._lost("it was aborted, or its files were gone")
                case "unknown":
                    raise self._unknown(table)
            if self._everything_exists(table, prepared):
                if self._commit_end(table, "committed", prepared):
                    table.marks.remove_batch(self._branch_id, prepared.mark, keep_files=True)
                    return
            elif self._commit_end(table, "aborted"):
                raise self._lost("files that it had prepared are gone: somebody deleted them")

    def abort(self, prepared: PreparedBatch | None) -> bool:
        """Rule the batch out, unless it is committed. Idempotent.

        Args:
            prepared: the batch; None if only its mark can say what there is.

        Returns:
            Whether it is ruled out; False if it is committed.

        Raises:
            CommitUnresolvedError: the outcome is unknown.
        """
        if prepared is None and self._load() is None:
            return True  # no start has created it yet
        for table in self._reloaded_tables():
            marks = table.marks
            mark = marks.read(self._branch_id) if prepared is None else prepared.mark
            if mark is None:
                return True  # never prepared, or ended since the table was loaded
            if mark.table != table.id:
                raise _left_in_another_table(table, mark, self._where, self._branch_id)
            end = table.end_of(self._branch_id)
            if end == "unknown":
                raise self._unknown(table)
            if end is None and not self._commit_end(table, "aborted"):
                continue
            is_committed = end == "committed"
            marks.remove_batch(self._branch_id, mark, keep_files=is_committed)
            return not is_committed
        raise AssertionError("the table is loaded until it is known")  # pragma: no cover

    def abort_ruled(self, prepared: PreparedBatch) -> bool:
        """The same where an operator wants the rows written again, into the table as it is now.

        A batch that was prepared for another table is not in this one, and will not be.
        """
        table = self._load()
        return (table is not None and table.id != prepared.table) or self.abort(prepared)

    # -- helpers -----------------------------------------------------------------------------------

    def _reloaded_tables(self) -> Iterator[LoadedTable]:
        """The table as it is now, again and again while other writers come first."""
        for _ in attempts():
            table = self._load()
            if table is None:
                raise self._unresolved(
                    f"{self._where} does not exist, and a batch is prepared for it: bring it "
                    "back under this name"
                )
            yield table
        raise self._unresolved(f"other writers of {self._where} came first each time")

    def _commit_end(
        self, table: LoadedTable, end: End, prepared: PreparedBatch | None = None
    ) -> bool:
        """Commit the end of the batch; False if another commit came first."""
        if obstacle := table.obstacle(prepared):
            # A redo commits the proof of an abort first.
            rulings = "committed|aborted" if table.obstacle(None) else "committed|aborted|redo"
            raise self._unresolved(
                f"{self._where} {obstacle}; if the rows of batch {self._branch_id.batch_id} are "
                "not to be in it as they were prepared, "
                f"{settle_command(self._branch_id, rulings)}"
            )
        return table.commit_end(self._branch_id, end, prepared)

    def _everything_exists(self, table: LoadedTable, prepared: PreparedBatch) -> bool:
        marks = table.marks
        if marks.read(self._branch_id) is None:
            return False
        if not all(marks.storage.exists(each["path"]) for each in prepared.manifests):
            return False
        sizes = [file.bytes for file in marks.files(prepared.data, prepared.attempts)]
        return (len(sizes), sum(sizes)) == (prepared.files, prepared.bytes)

    def _check_same(self, table: LoadedTable, expected: str) -> None:
        if table.id != expected:
            raise self._unresolved(
                f"{self._where} is another table now ({table.id}) than the one that the batch was "
                f"prepared for ({expected}): bring that one back, or "
                f"{settle_command(self._branch_id)}"
            )

    def _lost(self, why: str) -> PreparedBranchLostError:
        return PreparedBranchLostError(
            f"{self._where}: batch {self._branch_id.batch_id} is not in the table and will not be: "
            f"{why}",
            self._branch_id,
        )

    def _unknown(self, table: LoadedTable) -> CommitUnresolvedError:
        return self._unresolved(
            f"{self._where} no longer shows how batch {self._branch_id.batch_id} ended: "
            f"{table.forgets}. Look for the batch's rows, then {settle_command(self._branch_id)}"
        )

    def _unresolved(self, why: str) -> CommitUnresolvedError:
        return CommitUnresolvedError(why, self._branch_id)


def attempts() -> Iterator[None]:
    """Once, and again after a while as long as patience lasts."""
    deadline, wait_s = time.monotonic() + PATIENCE_S, _FIRST_WAIT_S
    while True:
        yield
        if time.monotonic() > deadline:
            return
        time.sleep(random.uniform(0, wait_s))  # noqa: S311 - so that writers part
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


class TaskEnd:
    """Aborts one task of one sink, which no decision names.

    Args:
        table: as loaded.
        where: the table, for messages.
        branch_id: of the task.
    """

    def __init__(self, table: LoadedTable, where: str, branch_id: BranchId) -> None:
        self._table = table
        self._where = where
        self._branch_id = branch_id

    def abort(self) -> None:
        """Delete what the task has written, unless its batch is committed with it. Idempotent.

        Raises:
            CommitUnresolvedError: the files belong to another table.
        """
        marks = self._table.marks
        mark = marks.read(self._branch_id)
        if mark is None:
            return  # it has ended
        if mark.table != self._table.id:
            raise _left_in_another_table(self._table, mark, self._where, self._branch_id)
        if not self._may_be_committed():
            marks.remove_files(mark.data, str(self._branch_id.attempt))
        marks.remove(self._branch_id)

    def _may_be_committed(self) -> bool:
        """Whether readers may need the files; they stay where nobody can tell.

        Older versions of the table name those of a batch that was taken back.
        """
        batch = batch_of(self._branch_id)
        if self._table.end_of(batch) in {"aborted", None}:
            return False
        return self._table.is_taken_back(batch) or self._table.may_name(self._branch_id)


def _left_in_another_table(
    table: LoadedTable, mark: Mark, where: str, branch_id: BranchId
) -> CommitUnresolvedError:
    return CommitUnresolvedError(
        f"{where} is another table now ({table.id}) than the one that {branch_id} was written for "
        f"({mark.table}): if that one is gone for good, delete the folder {mark.data} and the file "
        f"{table.marks.path(branch_id)}",
        branch_id,
    )
