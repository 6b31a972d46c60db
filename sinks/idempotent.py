"""A base class for stores that take a key instead of a transaction.

    STAGE/BRANCH.arrow   preCommit writes and fsyncs the rows; they stay while a decision needs them
        │  put(branch_id, rows), repeated until it has returned once
        ▼
    the store, which accepts each key once; a sweep removes the file when the batch is complete

What it guarantees, and what it does not:

* Rows arrive exactly once **if `put` is idempotent**: the store must remember the key until the
  batch is complete, however long the driver is down. That must hold when two processes call `put`
  at the same time, and when an older process calls it after a newer one. A process that was paused
  in its `put`, on a suspended machine for example, may continue long after the batch is complete.
  So the store must keep keys for longer than such a pause may last.
* An aborted batch never reaches the store, because nothing does before the decision.
* A commit is as atomic as `put`: if `put` takes several requests, readers may see a part of the
  branch until the commit has been repeated.
* The stage must outlive the driver: use a folder that driver and executors share. If it is lost
  while a decision needs it, `has` can still report whether the store has the rows.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Any

import pyarrow as pa

from sparkonce.errors import (
    CommitRejectedError,
    CommitUnresolvedError,
    ConfigurationError,
    PreparedBranchLostError,
    settle_command,
)
from sparkonce.finding import Finding
from sparkonce.model import BranchId, Committable, Owner
from sparkonce.sinks.base import Transform, TwoPhaseCommitSink
from sparkonce.sinks.capabilities import AbortsDecided, Diagnoses, FindsBranches
from sparkonce.sinks.file import (
    branch_here,
    branches_in,
    check_shared,
    folder_finding,
    has_id,
    id_of_folder,
)
from sparkonce.sinks.payload import Payload
from sparkonce.storage.local import close_durably, expanded

_SUFFIX = "arrow"  # the full branch id ends with its own dot


@dataclass(slots=True)
class StagedRows:
    """One open file of the stage; the first rows give its writer a schema."""

    branch_id: BranchId
    path: Path
    file: BufferedWriter
    rows: int = 0
    writer: pa.ipc.RecordBatchStreamWriter | None = None


@dataclass(frozen=True)
class Staged(Payload):
    """What a decision records about a staged branch.

    Attributes:
        rows: number of rows.
        folder: id of the stage that has them; None if the sink was never validated.
    """

    VERSION = 2

    rows: int
    folder: str | None

    @classmethod
    def upgrade(cls, fields: dict[str, Any], version: int) -> dict[str, Any]:
        return fields if version > 1 else {**fields, "folder": None}


class IdempotentSink(TwoPhaseCommitSink[StagedRows], AbortsDecided, FindsBranches, Diagnoses):
    """Stages rows in files, and passes each branch to `put` once it is decided.

    Args:
        stage: an existing folder that only this sink uses, at the same path on the driver and on
            every executor. It must be as durable as the transaction log.
        name: see `TwoPhaseCommitSink`.
        select: see `TwoPhaseCommitSink`.
        transform: see `TwoPhaseCommitSink`.
        writers: see `TwoPhaseCommitSink`; 1 makes the whole batch one branch. A store that
            remembers a growing number instead of a key (Delta's txnAppId and txnVersion) needs 1:
            the application is `branch_id.owner.prefix` with the sink's name, the number is
            `batch_id`.
    """

    def __init__(
        self,
        stage: str | os.PathLike[str],
        *,
        name: str | None = None,
        select: Sequence[str] | None = None,
        transform: Transform | None = None,
        writers: int | None = None,
    ) -> None:
        super().__init__(name=name, select=select, transform=transform, writers=writers)
        self._stage = expanded(stage).absolute()
        self._id: str | None = None

    @abstractmethod
    def put(self, branch_id: BranchId, rows: Iterator[pa.RecordBatch]) -> None:
        """Write all rows of a decided branch. Idempotent by `str(branch_id)`.

        Return when the rows are durable in the store. Any process may call it, two may call it at
        the same time, and it is called again after an error and even after it has returned.

        If the staged file was truncated, the iterator `rows` raises before its end. Do not catch
        that error.

        Raises:
            CommitRejectedError: the store permanently refuses the rows; an operator settles it.
                After any other error the outcome is unknown, and `put` is called again.
        """

    def has(self, branch_id: BranchId) -> bool | None:  # noqa: ARG002 - optional
        """Whether the store has the branch.

        The driver asks when the staged file is gone, and before a rewrite under another key.

        Returns:
            True if the store has all rows; False if it has none, and no earlier `put` can still
            arrive; None (the default) if that is unknown, or if it has only some of them.
        """
        return None

    def check(self, batch: pa.RecordBatch) -> None:
        """Refuse rows that the store will not take. Called in the task, before the decision.

        When `put` refuses rows, the batch is already decided: other sinks have their rows, and
        only an operator can settle it.

        Raises:
            PrepareRejectedError: naming what is wrong; the batch is aborted in every sink.
        """

    @property
    def target(self) -> str:
        return f"{self.kind or self.name} by stage {self._stage}"

    def validate(self, schema: pa.Schema) -> None:  # noqa: ARG002 - Arrow's own files hold any schema
        if not self._stage.is_dir() or not os.access(self._stage, os.W_OK):
            raise ConfigurationError(
                f"{self.name}: stage={str(self._stage)!r} is no folder that can be written to: "
                "create it, at the same path on the driver and every executor"
            )
        self._id = id_of_folder(self._stage)

    def diagnose(self) -> Iterable[Finding]:
        return [folder_finding(self._stage)]

    # -- on the executors ------------------------------------------------------------------------

    def beginTransaction(self, branch_id: BranchId) -> StagedRows:
        check_shared(self._stage, self._id, branch_id)
        path = self._path(branch_id)
        return StagedRows(branch_id, path, path.open("xb"))

    def write(self, handle: StagedRows, batch: pa.RecordBatch) -> None:
        self.check(batch)
        if handle.writer is None:
            handle.writer = pa.ipc.new_stream(handle.file, batch.schema)
        handle.writer.write_batch(batch)
        handle.rows += batch.num_rows

    def preCommit(self, handle: StagedRows) -> Committable:
        if handle.writer is not None:
            handle.writer.close()
        close_durably(handle.file, self._stage)
        return Staged(handle.rows, self._id).committable(
            handle.branch_id, text=f"{handle.rows} rows staged in {handle.path}"
        )

    def discard(self, handle: StagedRows) -> None:
        if handle.writer is not None:
            handle.writer.close()
        handle.file.close()
        handle.path.unlink(missing_ok=True)

    # -- in any process --------------------------------------------------------------------------

    def commit(self, committable: Committable) -> None:
        branch_id, staged = committable.branch_id, Staged.of(committable)
        try:
            file = self._path(branch_id).open("rb")
        except FileNotFoundError:
            self._resolve_missing(branch_id, staged)
            return
        with file:
            self.put(branch_id, self._read(file, branch_id, staged) if staged.rows else iter(()))

    def _read(
        self, file: BufferedReader, branch_id: BranchId, staged: Staged
    ) -> Iterator[pa.RecordBatch]:
        rows = 0
        with pa.ipc.open_stream(file) as reader:
            for batch in reader:
                rows += batch.num_rows
                yield batch
        if rows != staged.rows:  # a file truncated between two Arrow messages looks complete
            raise CommitUnresolvedError(
                f"{self._path(branch_id)} holds {rows} of the {staged.rows} rows that {self.name} "
                "has staged: restore the file, or look into the store",
                branch_id,
            )

    def _resolve_missing(self, branch_id: BranchId, staged: Staged) -> None:
        """Find out what a missing file means; only the store knows whether it has the rows."""
        what = f"the rows that {self.name} staged as {self._path(branch_id)} are gone"
        has, known = self.has(branch_id), staged.folder
        if has:
            return
        if not (self._stage.is_dir() if known is None else has_id(self._stage, known)):
            raise CommitUnresolvedError(
                f"{what} with their folder: mount it again, or, if it is permanently lost, "
                f"{settle_command(branch_id)}",
                branch_id,
            )
        if has is None:
            raise CommitUnresolvedError(
                f"{what}, and the store cannot tell whether it has them: restore the file, or look "
                "into the store",
                branch_id,
            )
        raise PreparedBranchLostError(f"{what}, and the store does not have them", branch_id)

    def abort(self, branch: BranchId | Committable) -> None:
        # Remove only the staged file: rows that the store has must stay.
        branch_id = branch_here(self._stage, branch)
        self._path(branch_id).unlink(missing_ok=True)

    def abort_decided(self, committable: Committable) -> None:
        """Abort the branch so that a replay can write its rows under another key.

        Raises:
            CommitRejectedError: the store has the rows, or may have them: see `has`.
        """
        branch_id = committable.branch_id
        has = self.has(branch_id)
        if has is not False:
            answer = "has them" if has else "cannot tell whether it has them"
            raise CommitRejectedError(
                f"{branch_id}: a rewrite would give its rows another key, and the store {answer}. "
                "Start the query, which puts them under the same key once more; or, if the store "
                f"has them, {settle_command(branch_id, 'committed')}",
                branch_id,
            )
        # The stage may be permanently lost; the rewritten branch has another name anyway.
        self._path(branch_id).unlink(missing_ok=True)

    def find_branches(self, owner: Owner) -> Iterable[Committable]:
        return branches_in(self._stage, owner, _SUFFIX)

    def _path(self, branch_id: BranchId) -> Path:
        return self._stage / f"{branch_id}{_SUFFIX}"
