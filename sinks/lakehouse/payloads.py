"""What a committable says of a task's files, and of a batch's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparkonce.sinks.lakehouse.marks import Mark
from sparkonce.sinks.payload import Payload


@dataclass(frozen=True)
class WrittenFiles(Payload):
    """What one task wrote.

    Attributes:
        table: the table's id.
        data: the folder of the batch's files.
        spec: how the files are partitioned, as the table's format names it; of Delta also the
            columns that the table had.
        files: of each file what the table's format must know, among it `rows` and `bytes`.
    """

    table: str
    data: str
    spec: int | str
    files: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class PreparedBatch(Payload):
    """A batch that one commit adds to the table.

    Attributes:
        table: the table's id.
        data: the folder of its data files.
        attempts: of the tasks whose files these are, such as ``"12-15,20"``.
        files: how many data files.
        rows: how many rows.
        bytes: of all data files.
        manifests: of each manifest, a file that names data files, its `path`, its `spec`, and what
            else the table's format must know.
    """

    table: str
    data: str
    attempts: str
    files: int
    rows: int
    bytes: int
    manifests: tuple[Mapping[str, Any], ...]

    @property
    def mark(self) -> Mark:
        """What the batch's mark says."""
        paths = [each["path"] for each in self.manifests]
        return Mark(self.table, self.data, self.attempts, paths)
