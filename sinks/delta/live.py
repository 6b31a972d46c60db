"""The data files of batches that a version of a table names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sparkonce.sinks.lakehouse.marks import attempt_of
from sparkonce.sinks.lakehouse.ranges import numbers_in
from sparkonce.sinks.lakehouse.table import LiveFile

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from sparkonce.sinks.lakehouse.payloads import PreparedBatch


def live_files(table: DeltaTable, batches: Sequence[PreparedBatch]) -> list[list[LiveFile]]:
    """The data files of each batch, with the values of their partitions as `part_of`."""
    attempts = {batch.data: numbers_in(batch.attempts) for batch in batches}
    found: dict[str, list[LiveFile]] = {batch.data: [] for batch in batches}
    with_vector = _with_vector(table)
    adds = pa.table(table.get_add_actions())
    paths: list[Any] = adds.column("path").to_pylist()
    for n, path in enumerate(paths):
        folder, _, name = path.rpartition("/")
        if attempt_of(name) in attempts.get(folder, ()):
            size = adds.column("size_bytes")[n].as_py()
            values = adds.column("partition")[n].as_py() if "partition" in adds.schema.names else {}
            found[folder].append(LiveFile(path, size, f"{folder}/{name}" in with_vector, values))
    return [found[batch.data] for batch in batches]


def _with_vector(table: DeltaTable) -> set[str]:
    """The folder and name of each file that has a deletion vector."""
    if "deletionVectors" not in (table.protocol().writer_features or ()):
        return set()
    paths: list[Any] = pa.table(table.deletion_vectors()).column("filepath").to_pylist()
    return {"/".join(PurePosixPath(path).parts[-2:]) for path in paths}
