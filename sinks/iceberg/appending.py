"""A snapshot that is committed only if the table is as it was loaded, together with a proof."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pyiceberg.exceptions import CommitFailedException
from pyiceberg.table.snapshots import Operation, Summary, update_snapshot_summaries
from pyiceberg.table.update import (
    AddSnapshotUpdate,
    AssertTableUUID,
    SetPropertiesUpdate,
    SetSnapshotRefUpdate,
)
from pyiceberg.table.update.snapshot import _FastAppendFiles

from sparkonce.sinks.iceberg.files import manifest_file
from sparkonce.sinks.lakehouse.payloads import PreparedBatch

if TYPE_CHECKING:
    from pyiceberg.manifest import ManifestFile
    from pyiceberg.table import Table
    from pyiceberg.table.update import TableUpdate


def ahead_s(table: Table) -> float:
    """How far the newest time of the table is in the future by this machine's clock, in seconds."""
    return _newest_ms(table) / 1000 - time.time()


def _newest_ms(table: Table) -> int:
    newest = table.metadata.snapshot_log[-1:]
    return max([table.metadata.last_updated_ms, *(entry.timestamp_ms for entry in newest)])


class Conditional(_FastAppendFiles):
    """The next snapshot of a table as it was loaded; a subclass says what it changes.

    Args:
        operation: what a reader calls it.
        table: as loaded.
        changes: for the snapshot's summary.
    """

    def __init__(self, operation: Operation, table: Table, changes: Mapping[str, int]) -> None:
        super().__init__(operation, table.transaction(), table.io)
        self._table = table
        self._changes = {name: str(number) for name, number in changes.items()}

    def commit_if_unchanged(self, properties: Mapping[str, str]) -> None:
        """Commit the snapshot and the properties, if main still has the snapshot of the load.

        `Table.commit_transaction` would repeat an append on a newer table, where another driver may
        have added the same files.

        Raises:
            CommitFailedException: it has another one.
        """
        updates, requirements = self._commit()
        updates = tuple(self._with_retention(self._in_order(each)) for each in updates)
        is_same = AssertTableUUID(uuid=self._table.metadata.table_uuid)
        more = (SetPropertiesUpdate(updates=dict(properties)),) if properties else ()
        self._table.catalog.commit_table(self._table, (*requirements, is_same), (*updates, *more))

    def _in_order(self, update: TableUpdate) -> TableUpdate:
        """Make the snapshot younger than the table, which another clock may have written.

        Iceberg's library for Java, and with it Spark, reads no table whose times go back by more
        than a minute.
        """
        if not isinstance(update, AddSnapshotUpdate):
            return update
        at_ms = max(update.snapshot.timestamp_ms, _newest_ms(self._table) + 1)
        snapshot = update.snapshot.model_copy(update={"timestamp_ms": at_ms})
        return update.model_copy(update={"snapshot": snapshot})

    def _with_retention(self, update: TableUpdate) -> TableUpdate:
        """Keep how long the branch and its snapshots stay, which pyiceberg would unset."""
        if not isinstance(update, SetSnapshotRefUpdate):
            return update
        kept = self._table.metadata.refs.get(update.ref_name)
        names = ("min_snapshots_to_keep", "max_snapshot_age_ms", "max_ref_age_ms")
        return update.model_copy(update={name: getattr(kept, name, None) for name in names})

    def _summary(self, snapshot_properties: Mapping[str, str] = {}) -> Summary:
        parent = self._parent_snapshot_id
        before = None if parent is None else self._transaction.table_metadata.snapshot_by_id(parent)
        return update_snapshot_summaries(
            Summary(self._operation, **self._changes, **snapshot_properties),
            before.summary if before is not None else None,
        )


class Append(Conditional):
    """Adds manifests that exist already.

    Args:
        table: as loaded.
        prepared: the batch; None adds nothing.
    """

    def __init__(self, table: Table, prepared: PreparedBatch | None = None) -> None:
        changes = {}
        if prepared is not None:
            changes = {
                "added-data-files": prepared.files,
                "added-records": prepared.rows,
                "added-files-size": prepared.bytes,
            }
        super().__init__(Operation.APPEND, table, changes)
        self._prepared = prepared

    def _manifests(self) -> list[ManifestFile]:
        added: Sequence[Mapping[str, Any]] = self._prepared.manifests if self._prepared else ()
        ours = [manifest_file(each, self._snapshot_id) for each in added]
        return ours + self._existing_manifests()


def begin(table: Table) -> None:
    """Give a table that has no snapshot an empty one.

    Not every catalog refuses a commit whose condition is that there is no snapshot yet (Nessie 0.99
    accepts it), so a batch and its abort could both succeed. There, this commit would also erase
    what another writer has committed since the load: it must follow a load at once.
    """
    if table.current_snapshot() is None and table.refresh().current_snapshot() is None:
        with suppress(CommitFailedException):  # somebody else made one
            Append(table).commit_if_unchanged({})
