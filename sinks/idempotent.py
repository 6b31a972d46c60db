"""A base for stores that take a key instead of a transaction.

    STAGE/BRANCH.arrow   written and fsynced by preCommit: the rows, for as long as a decision needs
        │  put(branch_id, rows), again and again until it has returned once
        ▼
    the store, which takes rows under one key once; the file goes when the batch is complete

What it guarantees, and what it does not:

* Exactly once **if `put` is idempotent**: the store remembers the key for as long as a commit may
  be repeated, that is until the batch is complete, however long the driver is down. Also when two
  processes call it at the same time, and when an older one calls it after a newer one did: one
  that stood still in its `put`, say with a suspended machine, may go on when the batch is long
  complete. So let the store keep keys for longer than that may last.
* A batch that is aborted never reaches the store, since nothing does before the decision.
* As atomic as `put` is: where it takes several requests, readers may see a part of the branch
  until the commit has been repeated.
* The stage must outlive the driver: a folder that driver and executors share. If it is lost while
  a decision needs it, `has` tells whether the store has the rows all the same.
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
from sparkonce.model import BranchId, Committable, Owner
from sparkonce.sinks.base import Transform, TwoPhaseCommitSink
from sparkonce.sinks.capabilities import AbortsDecided, FindsBranches
from sparkonce.sinks.file import (
    branch_here,
    branches_in,
    check_shared,
    close_durably,
    has_id,
    id_of_folder,
)
from sparkonce.sinks.payload import Payload
from sparkonce.storage.local import expanded

_SUFFIX = "arrow"  # the full branch id ends with its own dot


@dataclass(slots=True)
class StagedRows:
    """One open file of the stage; its writer is made with the schema of the first rows."""

    branch_id: BranchId
    path: Path
    file: BufferedWriter
    rows: int = 0
    writer: pa.ipc.RecordBatchStreamWriter | None = None

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        self.file.close()


@dataclass(frozen=True)
class Staged(Payload):
    """What a decision says of a staged branch.

    Attributes:
        rows: number of rows.
        folder: id of the stage into which they were written; None where nobody has looked.
    """

    VERSION = 2

    rows: int
    folder: str | None

    @classmethod
    def upgrade(cls, fields: dict[str, Any], version: int) -> dict[str, Any]:
        return fields if version > 1 else {**fields, "folder": None}


class IdempotentSink(TwoPhaseCommitSink[StagedRows], AbortsDecided, FindsBranches):
    """Stages rows in files, and hands each branch to `put` once it is decided.

    Args:
        stage: an existing folder of this sink alone, at the same path on the driver and on every
            executor. Where the store takes no long outage of the driver, it must be as durable as
            the transaction log.
        name: see `TwoPhaseCommitSink`.
        select: see `TwoPhaseCommitSink`.
        transform: see `TwoPhaseCommitSink`.
        writers: see `TwoPhaseCommitSink`; 1 makes the whole batch one branch. Stores that know a
            number that grows instead of a key (Delta's txnAppId and txnVersion) need it: then
            `branch_id.owner.prefix` with the sink's name is the one and `batch_id` the other.
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

        Where the staged file was cut, `rows` raises in place of its end: let the error pass.

        It returns when the rows are there for good. Called until then, by any process, maybe by two
        at a time, and again after it has returned.

        Raises:
            CommitRejectedError: the store refuses the rows for good; an operator settles it. Any
                other error is an unknown outcome: `put` is called again.
        """

    def has(self, branch_id: BranchId) -> bool | None:  # noqa: ARG002 - optional
        """Whether the store has the branch.

        Asked where its staged file is gone, and before it is written again under another key.

        Returns:
            True if the store has all of its rows; False if it has none of them, and no `put` of
            it can still be on its way; None (the default) if it cannot tell, or has a part.
        """
        return None

    def check(self, batch: pa.RecordBatch) -> None:
        """Refuse rows that the store will not take. Called in the task, before the decision.

        What `put` refuses is decided already: only an operator can settle that, and other sinks
        have their rows.

        Raises:
            PrepareRejectedError: naming what is wrong; the batch is aborted in every sink.
        """

    @property
    def target(self) -> str:
        return f"{self.kind or self.name} by stage {self._stage}"

    def validate(self, schema: pa.Schema) -> None:  # noqa: ARG002 - Arrow's own files hold any
        if not self._stage.is_dir() or not os.access(self._stage, os.W_OK):
            raise ConfigurationError(
                f"{self.name}: stage={str(self._stage)!r} is no folder that can be written to: "
                "make it, at the same path for the driver and every executor"
            )
        self._id = id_of_folder(self._stage)

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
        handle.close()
        handle.path.unlink(missing_ok=True)

    # -- in any process --------------------------------------------------------------------------

    def commit(self, committable: Committable) -> None:
        branch_id, staged = committable.branch_id, Staged.of(committable)
        try:
            file = self._path(branch_id).open("rb")
        except FileNotFoundError:
            self._settle(branch_id, staged)
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
        if rows != staged.rows:  # a file that was cut between two messages ends like a whole one
            raise CommitUnresolvedError(
                f"{self._path(branch_id)} holds {rows} of the {staged.rows} rows that {self.name} "
                "has staged: restore the file, or look into the store",
                branch_id,
            )

    def _settle(self, branch_id: BranchId, staged: Staged) -> None:
        """The staged file is gone: the store alone can tell the outcome."""
        what = f"the rows that {self.name} staged as {self._path(branch_id)} are gone"
        has, known = self.has(branch_id), staged.folder
        if has:
            return
        if not (self._stage.is_dir() if known is None else has_id(self._stage, known)):
            raise CommitUnresolvedError(
                f"{what} with their folder: mount it again, or, if it is gone for good, "
                f"{settle_command(branch_id)}",
                branch_id,
            )
        if has is None:
            raise CommitUnresolvedError(
                f"{what}, and the store cannot tell whether it has them: restore the file, or look "
                "into the store",
                branch_id,
            )
        raise PreparedBranchLostError(f"{what}, and the store has not got them", branch_id)

    def abort(self, branch: BranchId | Committable) -> None:
        # Only the stage: what was put stays.
        branch_id = branch_here(self._stage, branch)
        self._path(branch_id).unlink(missing_ok=True)

    def abort_decided(self, committable: Committable) -> None:
        """Free its rows to be written again, which a replay does under another key.

        Raises:
            CommitRejectedError: the store has them, or may have: see `has`.
        """
        branch_id = committable.branch_id
        has = self.has(branch_id)
        if has is not False:
            told = "has them" if has else "cannot tell whether it has them"
            raise CommitRejectedError(
                f"{branch_id}: written again, its rows would have another key, and the store "
                f"{told}. Start the query, which puts them under the same key once more; or, if "
                f"they are there, {settle_command(branch_id, 'committed')}",
                branch_id,
            )
        # Also where the stage is gone for good: what is written again has another name.
        self._path(branch_id).unlink(missing_ok=True)

    def find_branches(self, owner: Owner) -> Iterable[Committable]:
        return branches_in(self._stage, owner, _SUFFIX)

    def _path(self, branch_id: BranchId) -> Path:
        return self._stage / f"{branch_id}{_SUFFIX}"
