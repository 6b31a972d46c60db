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
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from pyiceberg.exceptions import CommitFailedException, NoSuchTableError

from sparkonce.errors import CommitUnresolvedError, PreparedBranchLostError, settle_command
from sparkonce.model import BranchId
from sparkonce.sinks.iceberg import proofs
from sparkonce.sinks.iceberg.appending import Append
from sparkonce.sinks.iceberg.files import PreparedBatch, attempts_in
from sparkonce.sinks.iceberg.marks import Marks, batch_of
from sparkonce.sinks.iceberg.tables import Tables

if TYPE_CHECKING:
    from pyiceberg.table import Table

PATIENCE_S: Final = 60.0
_FIRST_WAIT_S: Final = 0.02
_LONGEST_WAIT_S: Final = 2.0


class BatchEnd:
    """Ends one batch of one sink.

    Args:
        tables: loads the table.
        where: the table, for messages.
        branch_id: of the batch.
    """

    def __init__(self, tables: Tables, where: str, branch_id: BranchId) -> None:
        self._tables = tables
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
            marks = Marks(table)
            match proofs.end_of(table, self._branch_id):
                case "committed":
                    marks.remove_batch(self._branch_id, prepared.mark, keep_files=True)
                    return
                case "aborted":
                    raise self._lost("it was aborted, or its files were gone")
                case "unknown":
                    raise self._unknown()
            self._check_specs(table, prepared)
            if self._everything_exists(marks, prepared):
                if self._commit_end(table, "committed", prepared):
                    marks.remove_batch(self._branch_id, prepared.mark, keep_files=True)
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
        for table in self._reloaded_tables():
            marks = Marks(table)
            mark = marks.read(self._branch_id) if prepared is None else prepared.mark
            if mark is None:
                return True  # never prepared, or ended since the table was loaded
            self._check_same(table, mark.table)
            end = proofs.end_of(table, self._branch_id)
            if end == "unknown":
                raise self._unknown()
            if end is None and not self._commit_end(table, "aborted"):
                continue
            is_committed = end == "committed"
            marks.remove_batch(self._branch_id, mark, keep_files=is_committed)
            return not is_committed
        raise AssertionError("the table is loaded until it is known")  # pragma: no cover

    # -- helpers -----------------------------------------------------------------------------------

    def _reloaded_tables(self) -> Iterator[Table]:
        """The table as it is now, again and again while other writers come first."""
        deadline, wait_s = time.monotonic() + PATIENCE_S, _FIRST_WAIT_S
        while True:
            try:
                table = self._tables.load()
            except NoSuchTableError as error:
                raise self._unresolved(
                    f"{self._where} does not exist, and a batch is prepared for it: bring it "
                    "back under this name"
                ) from error
            yield table
            if time.monotonic() > deadline:
                raise self._unresolved(f"other writers of {self._where} came first each time")
            time.sleep(random.uniform(0, wait_s))  # noqa: S311 - so that writers part
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _commit_end(
        self, table: Table, end: proofs.End, prepared: PreparedBatch | None = None
    ) -> bool:
        """Commit a snapshot with the proof of an end; False if another snapshot came first."""
        if table.current_snapshot() is None:
            raise self._unresolved(
                f"{self._where} has no snapshot, though the start had made one: was it replaced? "
                f"Start the query again; if the batch's rows are wanted in the new table, "
                f"{settle_command(self._branch_id)}"
            )
        proof = proofs.proof(table, self._branch_id, end)
        try:
            Append(table, prepared).commit_if_unchanged(proof)
        except CommitFailedException:
            # A client that repeats a request by itself gets this answer although the first request
            # succeeded, or will succeed later. So the manifest list stays.
            return False
        return True

    def _everything_exists(self, marks: Marks, prepared: PreparedBatch) -> bool:
        if marks.read(self._branch_id) is None:
            return False
        if not all(marks.storage.exists(each["path"]) for each in prepared.manifests):
            return False
        sizes = [file.bytes for file in marks.files(prepared.data, prepared.attempts)]
        return (len(sizes), sum(sizes)) == (prepared.files, prepared.bytes)

    def _check_same(self, table: Table, expected: str) -> None:
        if str(table.metadata.table_uuid) != expected:
            raise self._unresolved(
                f"{self._where} is another table now (UUID {table.metadata.table_uuid}) than the "
                f"one that the batch was prepared for ({expected}): bring that one back, or "
                f"{settle_command(self._branch_id)}"
            )

    def _check_specs(self, table: Table, prepared: PreparedBatch) -> None:
        if gone := [m["spec"] for m in prepared.manifests if m["spec"] not in table.specs()]:
            raise self._unresolved(
                f"{self._where} no longer has the partition spec {gone[0]}, in which the batch was "
                f"written: {settle_command(self._branch_id)}"
            )

    def _lost(self, why: str) -> PreparedBranchLostError:
        return PreparedBranchLostError(
            f"{self._where}: batch {self._branch_id.batch_id} is not in the table and will not be: "
            f"{why}",
            self._branch_id,
        )

    def _unknown(self) -> CommitUnresolvedError:
        return self._unresolved(
            f"{self._where} no longer shows how batch {self._branch_id.batch_id} ended: it keeps "
            f"that of the newest {proofs.KEPT} drivers. Was the log restored from a backup? Look "
            f"for the batch's rows, then {settle_command(self._branch_id)}"
        )

    def _unresolved(self, why: str) -> CommitUnresolvedError:
        return CommitUnresolvedError(why, self._branch_id)


class TaskEnd:
    """Aborts one task of one sink, which no decision names. See `BatchEnd` for the arguments."""

    def __init__(self, tables: Tables, where: str, branch_id: BranchId) -> None:
        self._tables = tables
        self._where = where
        self._branch_id = branch_id

    def abort(self) -> None:
        """Delete what the task has written, unless its batch is committed with it. Idempotent.

        Raises:
            CommitUnresolvedError: the files belong to another table.
        """
        table = self._tables.load()
        marks = Marks(table)
        mark = marks.read(self._branch_id)
        if mark is None:
            return  # it has ended
        if mark.table != marks.table:
            raise CommitUnresolvedError(
                f"{self._where} is another table now than the one that {self._branch_id} was "
                f"written for: delete its files in {mark.data}, and its mark",
                self._branch_id,
            )
        if not self._may_be_committed(table, marks):
            marks.remove_files(mark.data, str(self._branch_id.attempt))
        marks.remove(self._branch_id)

    def _may_be_committed(self, table: Table, marks: Marks) -> bool:
        """Whether readers may need the files; they stay where nobody can tell."""
        batch = batch_of(self._branch_id)
        if proofs.end_of(table, batch) in {"aborted", None}:
            return False
        paths = [marks.manifest(batch, spec) for spec in table.specs()]
        attempts = attempts_in(table, filter(marks.storage.exists, paths))
        return not attempts or self._branch_id.attempt in attempts
