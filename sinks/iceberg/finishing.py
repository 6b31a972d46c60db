"""The end of a batch: one conditional commit of the table, which adds the files or rules them out.

    load the table ─► proof? ─┬─ committed ─► remove the marks
          ▲                   ├─ aborted ───► lost
          │                   └─ none: is everything there that was prepared?
          │                         yes ─► commit: files and proof        ─┐ only if no snapshot
          │                         no ──► commit: no files, proof "aborted" ┘ came in between
          └──────── one did ─────────────────────────────────────────────────┘

The order matters: the table is loaded before the mark is read. A mark goes after its proof came, so
a driver that still sees the mark of a batch that was committed holds a table that is too old, and
its commit fails.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pyiceberg.exceptions import CommitFailedException, NoSuchTableError
from pyiceberg.table.snapshots import Operation, Summary, update_snapshot_summaries
from pyiceberg.table.update import AssertTableUUID, SetPropertiesUpdate
from pyiceberg.table.update.snapshot import _FastAppendFiles

from sparkonce.errors import CommitUnresolvedError, PreparedBranchLostError, settle_command
from sparkonce.model import BranchId
from sparkonce.sinks.iceberg import proofs
from sparkonce.sinks.iceberg.files import PreparedBatch, manifest_file
from sparkonce.sinks.iceberg.marks import Marks
from sparkonce.sinks.iceberg.ranges import in_ranges
from sparkonce.sinks.iceberg.tables import Tables

if TYPE_CHECKING:
    from pyiceberg.manifest import ManifestFile
    from pyiceberg.table import Table

PATIENCE_S: Final = 60.0
_FIRST_WAIT_S: Final = 0.02
_LONGEST_WAIT_S: Final = 2.0


class Ending:
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
        for table in self._table_again():
            self._check_same(table, prepared)
            marks = Marks(table)
            match proofs.end_of(table, self._branch_id):
                case "committed":
                    marks.remove_batch(self._branch_id, keep_files=True)
                    return
                case "aborted":
                    raise self._lost("it was aborted, or its files were gone")
                case "unknown":
                    raise self._unknown()
            if self._is_whole(marks, prepared):
                if self._add(table, "committed", prepared):
                    marks.remove_batch(self._branch_id, keep_files=True)
                    return
            elif self._add(table, "aborted"):
                raise self._lost("files that it had prepared are gone: somebody deleted them")

    def abort(self) -> bool:
        """Rule the batch out, unless it is committed. Idempotent.

        Returns:
            Whether it is ruled out; False if it is committed.

        Raises:
            CommitUnresolvedError: the outcome is unknown.
        """
        for table in self._table_again():
            marks = Marks(table)
            match proofs.end_of(table, self._branch_id):
                case "committed":
                    marks.remove_batch(self._branch_id, keep_files=True)
                    return False
                case "unknown":
                    raise self._unknown()
                case None if not marks.exists(self._branch_id):
                    return True  # it was never prepared
                case None if not self._add(table, "aborted"):
                    continue
            marks.remove_batch(self._branch_id, keep_files=False)
            return True
        raise AssertionError("the table is loaded until it is known")  # pragma: no cover

    # -- helpers -----------------------------------------------------------------------------------

    def _table_again(self) -> Iterator[Table]:
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

    def _add(self, table: Table, end: proofs.End, prepared: PreparedBatch | None = None) -> bool:
        """Commit a snapshot with the proof of an end; False if another snapshot came first."""
        append = _Append(table, prepared)
        updates, requirements = append._commit()  # noqa: SLF001
        proof = SetPropertiesUpdate(updates=proofs.proof(table, self._branch_id, end))
        is_same = AssertTableUUID(uuid=table.metadata.table_uuid)
        try:
            # Table.commit_transaction would repeat it on a newer table, where another driver may
            # have added the same files.
            table.catalog.commit_table(table, (*requirements, is_same), (*updates, proof))
        except CommitFailedException:
            # Also the answer to a request that the client repeated after the first one worked.
            if self._tables.load().metadata.snapshot_by_id(append.snapshot_id) is None:
                append.remove_list(Marks(table))
                return False
        return True

    def _is_whole(self, marks: Marks, prepared: PreparedBatch) -> bool:
        if not marks.exists(self._branch_id):
            return False
        if not all(marks.storage.exists(each["path"]) for each in prepared.manifests):
            return False
        sizes = [
            file.bytes
            for attempt, file in marks.files_of_batch(self._branch_id)
            if in_ranges(prepared.attempts, attempt)
        ]
        return (len(sizes), sum(sizes)) == (prepared.files, prepared.bytes)

    def _check_same(self, table: Table, prepared: PreparedBatch) -> None:
        if str(table.metadata.table_uuid) != prepared.table:
            raise self._unresolved(
                f"{self._where} is another table now (UUID {table.metadata.table_uuid}) than the "
                f"one that the batch was prepared for ({prepared.table}): bring that one back, or "
                f"{settle_command(self._branch_id)}"
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


class _Append(_FastAppendFiles):
    """A snapshot that adds manifests which exist already, or nothing."""

    def __init__(self, table: Table, prepared: PreparedBatch | None) -> None:
        super().__init__(Operation.APPEND, table.transaction(), table.io)
        self._prepared = prepared

    def _manifests(self) -> list[ManifestFile]:
        added: Sequence[Mapping[str, Any]] = self._prepared.manifests if self._prepared else ()
        ours = [manifest_file(each, self._snapshot_id) for each in added]
        return ours + self._existing_manifests()

    def _summary(self, snapshot_properties: Mapping[str, str] = {}) -> Summary:
        added = {}
        if self._prepared is not None:
            added = {
                "added-data-files": str(self._prepared.files),
                "added-records": str(self._prepared.rows),
                "added-files-size": str(self._prepared.bytes),
            }
        parent = self._parent_snapshot_id
        before = None if parent is None else self._transaction.table_metadata.snapshot_by_id(parent)
        return update_snapshot_summaries(
            Summary(self._operation, **added, **snapshot_properties),
            before.summary if before is not None else None,
        )

    def remove_list(self, marks: Marks) -> None:
        """Delete the manifest list of a commit that failed; the manifests stay."""
        for path in self._written_manifest_lists:
            marks.storage.remove(path)
