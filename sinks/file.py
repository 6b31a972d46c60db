"""A folder of files, each of which appears whole or not at all.

    FOLDER/_sparkonce/BRANCH.parquet   written and fsynced by preCommit
        │  commit links a second name, which replaces no file, and removes the first
        ▼
    FOLDER/BRANCH.parquet              the branch, visible
    FOLDER/_sparkonce_folder.ID        empty; created once, and named in every committable

BRANCH is the full branch id, which is unique forever, so a visible file of that name proves that
the branch was committed. A missing file proves a loss only in the folder with the same ID: any
other folder may be the empty mount point of an unmounted disk. Driver and executors must share the
folder, on one file system with hard links (a local disk, NFS).
"""

from __future__ import annotations

import hashlib
import os
import socket
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from sparkonce.datasets import Dataset
from sparkonce.errors import (
    CommitRejectedError,
    CommitUnresolvedError,
    ConfigurationError,
    PreparedBranchLostError,
    PrepareRejectedError,
    SinkUnavailableError,
    TakeBackRefusedError,
    settle_command,
)
from sparkonce.finding import Finding, Level
from sparkonce.model import BranchId, Committable, JsonValue, Owner
from sparkonce.sinks.base import Transform, TwoPhaseCommitSink
from sparkonce.sinks.capabilities import (
    AbortsDecided,
    Delivered,
    Diagnoses,
    FindsBranches,
    NamesDatasets,
    TakesBack,
    Visible,
)
from sparkonce.sinks.committables import check_all_there, check_version
from sparkonce.sinks.file_columns import NESTED, VOID, check_kinds, check_names
from sparkonce.sinks.spark_metadata import SPARK_METADATA, written_by_spark
from sparkonce.storage.local import close_durably, expanded, fsync_folder, is_there

_HIDDEN = "_sparkonce"
_ID = "_sparkonce_folder."
_PAYLOAD_VERSION = 2
"""Version 1 may lack the id of the folder."""

_SUFFIX = "parquet"  # the full branch id ends with its own dot


@dataclass(slots=True)
class FileHandle:
    """One open hidden file; the first rows give its writer a schema."""

    branch_id: BranchId
    path: Path
    file: IO[bytes]
    writer: pq.ParquetWriter | None = None


class FileSink(
    TwoPhaseCommitSink[FileHandle],
    AbortsDecided,
    FindsBranches,
    TakesBack,
    Diagnoses,
    NamesDatasets,
):
    """Writes Parquet files into a folder, one for each Spark task of a batch.

    Some readers, such as DuckDB, do not ignore names that begin with an underscore. Give those the
    pattern ``FOLDER/*.parquet``, and none that descends into subfolders: ``_sparkonce/`` holds rows
    of batches that are not committed, and may never be.

    Args:
        folder: an existing folder, at the same path on the driver and on every executor.
        name: see `TwoPhaseCommitSink`.
        select: see `TwoPhaseCommitSink`.
        transform: see `TwoPhaseCommitSink`.
        writers: see `TwoPhaseCommitSink`.
    """

    kind: ClassVar[str] = "file"

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        name: str | None = None,
        select: Sequence[str] | None = None,
        transform: Transform | None = None,
        writers: int | None = None,
    ) -> None:
        super().__init__(name=name, select=select, transform=transform, writers=writers)
        self._folder = expanded(folder).absolute()
        self._hidden = self._folder / _HIDDEN
        self._id: str | None = None

    @property
    def target(self) -> str:
        return f"folder {self._folder}"

    def dataset(self) -> Dataset:
        return Dataset.at(str(self._folder))

    def validate(self, schema: pa.Schema) -> None:
        if not schema.names:  # Parquet does not count rows without columns
            raise ConfigurationError("FileSink: the rows have no columns: add one (select=)")
        check_names("FileSink", schema)
        check_kinds("FileSink", schema, (VOID, *NESTED), "change the column (select=)")
        try:
            pq.ParquetWriter(pa.BufferOutputStream(), schema).close()
        except pa.ArrowException as error:
            raise ConfigurationError(
                f"FileSink: Parquet cannot hold these columns ({error}): change them (transform=)"
            ) from error
        if not self._folder.is_dir():
            raise ConfigurationError(
                f"FileSink: the folder {self._folder} does not exist: create it"
            )
        if (refusal := self._refusal()) is not None:
            raise refusal
        try:
            self._hidden.mkdir(exist_ok=True)
            self._id = id_of_folder(self._folder)
            probe = self._hidden / f".{uuid.uuid4().hex}"
            os.link(self._folder / f"{_ID}{self._id}", probe)
            probe.unlink()
            fsync_folder(self._folder)
        except OSError as error:
            raise ConfigurationError(
                f"FileSink: cannot write into {self._folder} ({error}): check its permissions, and "
                "that its file system has hard links"
            ) from error

    def beginTransaction(self, branch_id: BranchId) -> FileHandle:
        check_shared(self._folder, self._id, branch_id)
        path = self._hidden_path(branch_id)
        return FileHandle(branch_id, path, path.open("xb"))

    def write(self, handle: FileHandle, batch: pa.RecordBatch) -> None:
        if handle.writer is None:
            handle.writer = pq.ParquetWriter(handle.file, batch.schema)
        handle.writer.write_batch(batch)

    def preCommit(self, handle: FileHandle) -> Committable:
        if handle.writer is not None:
            handle.writer.close()
        close_durably(handle.file, self._hidden)
        payload = {"folder": self._id, **digest_of(handle.path)}
        text = f"file {self._visible_path(handle.branch_id)}"
        return Committable(handle.branch_id, payload, _PAYLOAD_VERSION, text=text)

    def discard(self, handle: FileHandle) -> None:
        if handle.writer is not None:
            handle.writer.close()
        handle.file.close()
        handle.path.unlink(missing_ok=True)

    def commit(self, committable: Committable) -> None:
        check_version(committable, _PAYLOAD_VERSION)
        branch_id = committable.branch_id
        hidden, visible = self._hidden_path(branch_id), self._visible_path(branch_id)
        try:
            os.link(hidden, visible)  # a rename would replace an existing file
        except FileExistsError:
            if not is_same(committable, hidden, visible):
                raise other_file(visible, f"{hidden} is prepared", branch_id) from None
        except FileNotFoundError:
            # Committed before, or lost. The visible file shows which, if this is the folder that
            # was written to. Check the folder first: it may be mounted at any moment, but it is not
            # unmounted.
            is_here = self._is_here(committable)
            if not is_there(visible):
                if not is_here or is_there(hidden):
                    raise CommitUnresolvedError(
                        f"{self._folder} may not be the folder into which FileSink wrote batch "
                        f"{branch_id.batch_id}: mount that one again, or, if it is permanently "
                        f"lost, {settle_command(branch_id)}",
                        branch_id,
                    ) from None
                raise PreparedBranchLostError(
                    f"FileSink: {hidden} was prepared for batch {branch_id.batch_id} and is gone, "
                    f"and {visible} does not exist: somebody deleted the file",
                    branch_id,
                ) from None
            if not is_same(committable, hidden, visible):
                raise other_file(visible, f"{hidden} is gone", branch_id) from None
        fsync_folder(self._folder)
        hidden.unlink(missing_ok=True)

    def abort(self, branch: BranchId | Committable) -> None:
        branch_id = branch_here(self._folder, branch)
        self._hidden_path(branch_id).unlink(missing_ok=True)

    def abort_decided(self, committable: Committable) -> None:
        # An operator may rule this when the folder is permanently lost. The rewritten branch has
        # another name, so this file is an orphan if the folder ever comes back.
        branch_id = committable.branch_id
        self._hidden_path(branch_id).unlink(missing_ok=True)
        if is_there(visible := self._visible_path(branch_id)):
            raise CommitRejectedError(
                f"{branch_id} is committed: {visible} exists, and a rewrite would duplicate its "
                "rows. The error of its commit says why that could not be proven; fix it, or "
                f"{settle_command(branch_id, 'committed')}",
                branch_id,
            )

    def find_delivered(self, branches: Sequence[Delivered]) -> Sequence[Visible]:
        return [self._delivered(committable) for committable, _ in branches]

    def take_back(self, branches: Sequence[Delivered]) -> None:
        for committable, rows in branches:
            branch_id = committable.branch_id
            if found := self._delivered(committable).rows:
                check_all_there(self.target, branch_id, found, rows)
                self._visible_path(branch_id).unlink(missing_ok=True)
        fsync_folder(self._folder)

    def _delivered(self, committable: Committable) -> Visible:
        check_version(committable, _PAYLOAD_VERSION)
        branch_id = committable.branch_id
        visible = self._visible_path(branch_id)
        if not self._is_here(committable):
            why = f"{self._folder} may not be the folder that has it: mount that one again"
        elif not is_there(visible):
            return Visible(0)
        elif is_same(committable, self._hidden_path(branch_id), visible):
            return Visible(pq.read_metadata(visible).num_rows, (str(visible),))
        else:
            why = f"{visible} was changed since it was committed"
        raise TakeBackRefusedError(f"{branch_id}: {why}", branch_id)

    def diagnose(self) -> Iterable[Finding]:
        if (refusal := self._refusal()) is not None:
            return [Finding(Level.ERROR, str(refusal))]
        return [folder_finding(self._folder)]

    def find_branches(self, owner: Owner) -> Iterable[Committable]:
        if not self._folder.is_dir():
            raise SinkUnavailableError(
                f"{self.target} does not exist: mount its disk, or create it"
            )
        return branches_in(self._hidden, owner, _SUFFIX)

    def _refusal(self) -> ConfigurationError | None:
        """Why the folder cannot take this sink's files, if Spark's own sink wrote into it."""
        if not (self._folder / SPARK_METADATA).is_dir():
            return None
        return written_by_spark(f"FileSink: {self._folder}", "another folder")

    def _is_here(self, committable: Committable) -> bool:
        folder = committable.payload.get("folder")  # missing in payloads of version 1
        return folder is not None and has_id(self._folder, folder)

    def _hidden_path(self, branch_id: BranchId) -> Path:
        return self._hidden / f"{branch_id}{_SUFFIX}"

    def _visible_path(self, branch_id: BranchId) -> Path:
        return self._folder / f"{branch_id}{_SUFFIX}"


def folder_finding(folder: Path) -> Finding:
    """Whether the folder exists and can be written to, for `sparkonce doctor`."""
    if not folder.is_dir():
        return Finding(
            Level.ERROR, f"the folder {folder} does not exist", "mount its disk, or create it"
        )
    if not os.access(folder, os.W_OK):
        return Finding(
            Level.ERROR,
            f"the folder {folder} cannot be written to",
            "give the right to the user that runs the driver and the executors",
        )
    return Finding(Level.OK, f"the folder {folder} can be written to")


def id_of_folder(folder: Path) -> str:
    """Return an id of the folder; create one if there is none.

    Two starts at once may create two ids; both stay valid.
    """
    for path in folder.glob(f"{_ID}*"):
        return path.name.removeprefix(_ID)
    made = uuid.uuid4().hex
    (folder / f"{_ID}{made}").touch()
    fsync_folder(folder)
    return made


def has_id(folder: Path, expected: JsonValue) -> bool:
    """Whether the folder has this id; the empty mount point of an unmounted disk does not."""
    return is_there(folder / f"{_ID}{expected}")


def check_shared(folder: Path, expected: str | None, branch_id: BranchId) -> None:
    """Refuse a folder of the same name on an executor's own disk, which the driver cannot see.

    Args:
        folder: the path in this process.
        expected: the folder's id on the driver; None if the sink was never validated.
        branch_id: of the branch that the task writes there.

    Raises:
        PrepareRejectedError: it is another folder.
    """
    if expected is not None and not has_id(folder, expected):
        raise PrepareRejectedError(
            f"the folder {folder} on {socket.gethostname()} is not the one that the driver uses: "
            "put it on a file system that driver and executors share, at the same path",
            branch_id,
        )


def branch_here(folder: Path, branch: BranchId | Committable) -> BranchId:
    """Return the id of the branch to abort, after checking that it was written into `folder`.

    Call it before looking for files there: the folder may be mounted at any moment.

    Raises:
        CommitUnresolvedError: the branch was written into another folder.
    """
    if isinstance(branch, BranchId):
        return branch
    expected = branch.payload.get("folder")  # None if the sink was never validated
    if expected is not None and not has_id(folder, expected):
        raise CommitUnresolvedError(
            f"{branch.branch_id} cannot be aborted: {folder} on {socket.gethostname()} is not the "
            "folder into which it was written: mount that one again",
            branch.branch_id,
        )
    return branch.branch_id


def digest_of(path: Path) -> dict[str, JsonValue]:
    """The file's size and the digest of its bytes, which identify its content."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def is_same(committable: Committable, hidden: Path, visible: Path) -> bool:
    """Whether the visible file is the one that was prepared.

    It is if both names belong to one file, as after a crash between the two steps of a commit. It
    also is if its bytes are those that were prepared, as after a restore from a copy.
    """
    try:
        if hidden.samefile(visible):
            return True
        is_committed = False
    except FileNotFoundError:
        is_committed = True  # committables of older versions have no other proof than the name
    expected = committable.payload
    if "sha256" not in expected:
        return is_committed
    is_as_long = visible.stat().st_size == expected["bytes"]
    return is_as_long and digest_of(visible)["sha256"] == expected["sha256"]


def other_file(visible: Path, prepared: str, branch_id: BranchId) -> CommitRejectedError:
    """The error for a visible name that another file has; nothing was replaced."""
    return CommitRejectedError(
        f"FileSink: {visible} exists with other rows than batch {branch_id.batch_id} has prepared "
        f"under that name ({prepared}), and was not replaced. Two runs have used one name: a "
        "checkpoint was copied, and both copies ran. Stop the wrong run. If the visible file is "
        "that run's, move it out of the folder, and start again; otherwise "
        f"{settle_command(branch_id)}",
        branch_id,
    )


def branches_in(folder: Path, owner: Owner, suffix: str) -> Iterator[Committable]:
    """List the owner's branches that have a file in `folder`, named BRANCH with `suffix`."""
    try:
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return
    for name in names:
        if name.startswith(owner.prefix) and name.endswith(suffix):
            branch_id = BranchId.from_name(name.removesuffix(suffix))
            if branch_id is not None:
                yield Committable(branch_id)
