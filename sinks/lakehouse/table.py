"""What a table format must tell of a table, and do to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sparkonce.model import BranchId
from sparkonce.sinks.lakehouse.marks import Marks
from sparkonce.sinks.lakehouse.payloads import PreparedBatch
from sparkonce.sinks.lakehouse.proofs import End

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq


@dataclass(frozen=True)
class DataFile:
    """A Parquet file that is complete.

    Attributes:
        path: where it is.
        partition: what `Layout.split` gave for its rows.
        bytes: its size.
        footer: what Parquet says of it.
    """

    path: str
    partition: Hashable
    bytes: int
    footer: pq.FileMetaData


@dataclass(frozen=True)
class LiveFile:
    """A data file that readers of the table see.

    Attributes:
        path: where it is.
        bytes: its size.
        lacks_rows: whether the table marks rows of it as deleted, or may do so.
        part_of: what the table's format needs to remove it.
    """

    path: str
    bytes: int
    lacks_rows: bool
    part_of: Any


class Layout(ABC):
    """How a table wants its data files.

    Attributes:
        spec: how they are partitioned, and perhaps more, as `WrittenFiles` has it.
        schema: the table's columns.
        file_schema: the columns of a file.
        is_partitioned: whether a task may write several files at once.
        parquet: more arguments of `pq.ParquetWriter`.
        row_group: the most rows of a row group.
        file_bytes: a file of this size is followed by another.
    """

    spec: int | str
    schema: pa.Schema
    file_schema: pa.Schema
    is_partitioned: bool
    parquet: Mapping[str, Any]
    row_group: int
    file_bytes: int

    @abstractmethod
    def split(self, rows: pa.Table) -> Iterator[tuple[Hashable, pa.Table]]:
        """Rows of the table's schema by partition, as rows of the files' schema."""

    @abstractmethod
    def describe(self, file: DataFile) -> Mapping[str, Any]:
        """What a manifest must say of a file, among it `rows` and `bytes`, for JSON."""


class LoadedTable(ABC):
    """A table as it was when it was loaded.

    Attributes:
        id: of the table; another table under the same name has another one.
        marks: of branches that write to it.
        forgets: why it may not know any more how a batch ended, for messages.
    """

    id: str
    marks: Marks
    forgets: str

    @abstractmethod
    def layout(self, spec: int | str | None = None) -> Layout:
        """How to write files; in the table's newest partitioning, or in this one."""

    @abstractmethod
    def manifest(self, branch_id: BranchId, spec: int | str) -> str:
        """Where the batch's manifest for a partitioning is."""

    @abstractmethod
    def write_manifest(
        self, path: str, spec: int | str, files: Sequence[Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        """Write a manifest of files that `Layout.describe` described, and describe it."""

    @abstractmethod
    def end_of(self, branch_id: BranchId) -> End | Literal["unknown"] | None:
        """How the batch ended; None if it has not; "unknown" if that is no longer kept."""

    @abstractmethod
    def obstacle(self, prepared: PreparedBatch | None) -> str | None:
        """Why a batch, or the proof of an abort, cannot be added now, and what to do about it."""

    @abstractmethod
    def commit_end(
        self, branch_id: BranchId, end: End, prepared: PreparedBatch | None = None
    ) -> bool:
        """Commit the proof of a batch's end, along with its files, in one conditional commit.

        Returns:
            False if the table is no longer as it was loaded, or may not be.
        """

    @abstractmethod
    def may_name(self, task: BranchId) -> bool:
        """Whether the table may name files of a task whose batch is, or may be, committed."""

    # -- a rewind ----------------------------------------------------------------------------------

    @abstractmethod
    def is_taken_back(self, branch_id: BranchId) -> bool:
        """Whether a rewind has removed the batch's files."""

    @abstractmethod
    def keeps_files(self) -> str | None:
        """Why no file can be removed, and what to do about it; None if files can be."""

    @abstractmethod
    def live_files(self, batches: Sequence[PreparedBatch]) -> Sequence[Sequence[LiveFile]]:
        """The data files of each batch that the table names now."""

    @abstractmethod
    def commit_removal(self, branch_ids: Sequence[BranchId], files: Sequence[LiveFile]) -> bool:
        """Remove the files of batches, along with a proof of that, in one conditional commit.

        The files stay where they are, for readers of older versions.

        Args:
            branch_ids: of the batches.
            files: all that `live_files` found of them.

        Returns:
            False if the table is no longer as it was loaded, or may not be.
        """
