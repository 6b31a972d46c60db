"""Marks: small files that show which branches exist and are not finished.

    LOCATION/_sparkonce/BRANCH.mark            a task that may have written files, or the batch
    DATA/sparkonce…BATCH.files/aATTEMPT-….parquet    files of a task

A branch writes its mark first and deletes it last. So a list of the marks has every branch that
left something. A mark holds what is needed to clean up: the table's id, and where the files are.
The maintenance of table formats leaves folders alone whose name begins with an underscore.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from sparkonce.model import DRIVER_ATTEMPT, BranchId, Owner
from sparkonce.sinks.lakehouse.ranges import numbers_in
from sparkonce.sinks.lakehouse.storage import Storage, Stored

_SUFFIX = "mark"  # a branch id ends with its own dot


def batch_of(branch_id: BranchId) -> BranchId:
    """The branch of the whole batch that a task's branch is a part of."""
    return replace(branch_id, attempt=DRIVER_ATTEMPT)


@dataclass(frozen=True)
class Mark:
    """What a mark says.

    Attributes:
        table: id of the table.
        data: the folder of the batch's data files.
        attempts: of the tasks whose files the batch has; empty in a task's mark.
        manifests: of the batch; empty in a task's mark.
    """

    table: str
    data: str
    attempts: str = ""
    manifests: Sequence[str] = ()


class Marks:
    """The marks, and the files that they stand for.

    Args:
        storage: of the table.
        table: id of the table.
        folder: of the marks.
        data: folder of the table's data, with a slash at its end if it is not empty.
    """

    def __init__(self, storage: Storage, table: str, folder: str, data: str) -> None:
        self.storage = storage
        self.table = table
        self.folder = folder
        self._data = data

    def write(self, branch_id: BranchId, mark: Mark | None = None) -> None:
        """Write a batch's mark, or that of a task."""
        content = asdict(mark or Mark(self.table, self.data(branch_id)))
        self.storage.write(self.path(branch_id), json.dumps(content).encode())

    def ensure(self, branch_id: BranchId) -> None:
        """Write the mark of a task again if it is gone.

        A mark that exists is not replaced: ext4 then writes it out at once, and the deletion of a
        batch's marks waits for that, up to a millisecond for each.
        """
        if not self.storage.exists(self.path(branch_id)):
            self.write(branch_id)

    def read(self, branch_id: BranchId) -> Mark | None:
        """What the mark says; None if there is none.

        A torn mark is that of a writer that was killed, or found the disk full: it came to nothing
        that the mark stands for.
        """
        try:
            return Mark(**json.loads(self.storage.read(self.path(branch_id))))
        except FileNotFoundError:
            return None
        except ValueError:
            return Mark(self.table, self.data(branch_id))

    def remove(self, branch_id: BranchId) -> None:
        self.storage.remove(self.path(branch_id))

    def of(self, owner: Owner) -> Iterator[BranchId]:
        """The owner's branches that have a mark."""
        for file in self.storage.files(self.folder):
            if file.name.startswith(owner.prefix):
                branch_id = BranchId.from_name(file.name.removesuffix(_SUFFIX))
                if branch_id is not None:
                    yield branch_id

    def try_out(self, *folders: str) -> None:
        """Write, list and remove a file in each of the folders.

        Raises:
            FileNotFoundError: what was written is not listed.
        """
        for folder in folders:
            probe = f"sparkonce-{uuid.uuid4().hex}"
            self.storage.write(f"{folder}/{probe}", b"")
            is_listed = any(file.name == probe for file in self.storage.files(folder))
            self.storage.remove(f"{folder}/{probe}")
            if not is_listed:
                raise FileNotFoundError(f"{folder}/{probe} was written and is not listed")

    # -- the files ---------------------------------------------------------------------------------

    def data(self, branch_id: BranchId) -> str:
        """The folder for the data files of a batch."""
        return f"{self._data}{batch_of(branch_id)}files"

    def files(self, folder: str, attempts: str) -> Iterator[Stored]:
        """The data files in a batch's folder that these attempts have written."""
        wanted = numbers_in(attempts)
        return (file for file in self.storage.files(folder) if attempt_of(file.name) in wanted)

    def remove_files(self, folder: str, attempts: str) -> None:
        self.storage.remove_all(f"{folder}/{file.name}" for file in self.files(folder, attempts))

    def remove_batch(self, branch_id: BranchId, mark: Mark, *, keep_files: bool) -> None:
        """Remove the marks of a batch and its tasks, and perhaps their files; its own mark last."""
        if not keep_files:
            self.remove_files(mark.data, mark.attempts)
        for path in mark.manifests:
            if not keep_files or path.startswith(f"{self.folder}/"):  # else it is the table's now
                self.storage.remove(path)
        # A thousand branch ids would take ten times as long as these strings.
        before, _, after = self.path(branch_id).rpartition(f".a{branch_id.attempt}.")
        attempts = numbers_in(mark.attempts)
        self.storage.remove_all(f"{before}.a{n}.{after}" for n in attempts)
        self.remove(branch_id)

    def path(self, branch_id: BranchId) -> str:
        """Where a branch's mark is."""
        return f"{self.folder}/{branch_id}{_SUFFIX}"


def file_name(attempt: int, number: int) -> str:
    """The name of a task's data file of this number."""
    return f"a{attempt}-{number:05}.parquet"


def attempt_of(name: str) -> int | None:
    """The attempt that wrote a data file; None if the name is not one of ours."""
    attempt = name.removeprefix("a").partition("-")[0]
    return int(attempt) if attempt.isdecimal() else None
