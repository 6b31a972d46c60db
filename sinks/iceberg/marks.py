"""Marks: small files that show which branches exist and are not finished.

    LOCATION/_sparkonce/BRANCH.mark           a task that may have written files, or the batch
    DATA/sparkonce…BATCH./aATTEMPT-….parquet   files of a task
    METADATA/BRANCH.….avro                    a manifest of the batch

A branch makes its mark before anything else, and its mark goes last. So a list of the marks has
every branch that left something. Iceberg's procedures leave folders alone whose name begins with an
underscore.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sparkonce.model import DRIVER_ATTEMPT, BranchId, Owner
from sparkonce.sinks.iceberg.ranges import in_ranges
from sparkonce.sinks.iceberg.tables import Storage, Stored

if TYPE_CHECKING:
    from pyiceberg.table import Table

_SUFFIX = "mark"  # a branch id ends with its own dot


def batch_of(branch_id: BranchId) -> BranchId:
    """The branch of the whole batch that a task's branch is a part of."""
    return replace(branch_id, attempt=DRIVER_ATTEMPT)


class Marks:
    """The marks, and the names of the files that they stand for."""

    def __init__(self, table: Table) -> None:
        self.storage = Storage(table)
        self._folder = f"{table.location().rstrip('/')}/_sparkonce"

    def make(self, branch_id: BranchId) -> None:
        """Make the mark of a task."""
        self.storage.write(self._mark(branch_id), b"")

    def make_of_batch(self, branch_id: BranchId, attempts: str, specs: Sequence[int]) -> None:
        """Make the mark of a batch, which says whose files it has, and which manifests."""
        content = {"attempts": attempts, "specs": list(specs)}
        self.storage.write(self._mark(branch_id), json.dumps(content).encode())

    def exists(self, branch_id: BranchId) -> bool:
        return self.storage.exists(self._mark(branch_id))

    def remove(self, branch_id: BranchId) -> None:
        self.storage.remove(self._mark(branch_id))

    def try_out(self) -> None:
        """Write, list and remove a file among the marks, the data and the manifests."""
        for folder in (self._folder, self.storage.data, self.storage.metadata):
            probe = f"sparkonce-{uuid.uuid4().hex}"
            self.storage.write(f"{folder}/{probe}", b"")
            is_listed = any(file.name == probe for file in self.storage.files(folder))
            self.storage.remove(f"{folder}/{probe}")
            if not is_listed:
                raise FileNotFoundError(f"{folder}/{probe} was written and is not listed")

    def attempts(self, branch_id: BranchId) -> str:
        """The tasks of a batch, as its mark names them; none if the mark is gone."""
        return str((self._content(branch_id) or {}).get("attempts", ""))

    def remove_batch(self, branch_id: BranchId, *, keep_files: bool) -> None:
        """Remove the marks of a batch and its tasks, and perhaps their files; its own mark last."""
        content = self._content(branch_id)
        if content is None:
            return
        for task in self.of(branch_id.owner):
            is_part = task != branch_id and batch_of(task) == branch_id
            if is_part and in_ranges(content["attempts"], task.attempt):
                if not keep_files:
                    self.remove_files(task)
                self.remove(task)
        if not keep_files:
            for spec_id in content["specs"]:
                self.storage.remove(self.manifest(branch_id, spec_id))
        self.remove(branch_id)

    def of(self, owner: Owner) -> Iterator[BranchId]:
        """The owner's branches that have a mark."""
        for file in self.storage.files(self._folder):
            if file.name.startswith(owner.prefix):
                branch_id = BranchId.from_name(file.name.removesuffix(_SUFFIX))
                if branch_id is not None:
                    yield branch_id

    def path(self, branch_id: BranchId, number: int) -> str:
        """Where a task writes its file of this number."""
        return f"{self._data(branch_id)}/{_start(branch_id)}{number:05}.parquet"

    def manifest(self, branch_id: BranchId, spec_id: int) -> str:
        """Where the driver writes the batch's manifest for a partition spec."""
        return f"{self.storage.metadata}/{branch_id}s{spec_id}.avro"

    def files_of_batch(self, branch_id: BranchId) -> Iterator[tuple[int, Stored]]:
        """Every data file of the batch, with the attempt that wrote it."""
        for file in self.storage.files(self._data(branch_id)):
            attempt = file.name.removeprefix("a").partition("-")[0]
            if attempt.isdecimal():
                yield int(attempt), file

    def remove_files(self, branch_id: BranchId) -> None:
        """Delete what a task has written."""
        for file in self.storage.files(self._data(branch_id)):
            if file.name.startswith(_start(branch_id)):
                self.storage.remove(f"{self._data(branch_id)}/{file.name}")

    def _content(self, branch_id: BranchId) -> Any:
        try:
            return json.loads(self.storage.read(self._mark(branch_id)))
        except FileNotFoundError:
            return None

    def _data(self, branch_id: BranchId) -> str:
        return f"{self.storage.data}/{batch_of(branch_id)}files"

    def _mark(self, branch_id: BranchId) -> str:
        return f"{self._folder}/{branch_id}{_SUFFIX}"


def _start(branch_id: BranchId) -> str:
    return f"a{branch_id.attempt}-"
