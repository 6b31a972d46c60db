"""A table as its log had it, and what a commit of a batch adds to the log.

    commitInfo  sparkonce: {"committed": {"t3.p0": "0-42"}, "aborted": {}}
    txn         PREFIX.SINK        version 97: the newest version whose commitInfo says this
    txn         PREFIX.SINK.t3.p0  version 42: the newest batch that driver 3 has ended in pass 0

Checkpoints keep the last version of each txn for ever, unless
`delta.setTransactionRetentionDuration` is set. A version's commitInfo goes when Delta cleans up its
log, after 30 days by default. Then nobody knows how the batches up to the newest one have ended;
that later ones have not is still known.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction

from sparkonce.sinks.delta.statistics import statistics_of
from sparkonce.sinks.lakehouse.marks import Marks, file_name
from sparkonce.sinks.lakehouse.proofs import End, Kept, end_in, key_of, with_batch
from sparkonce.sinks.lakehouse.ranges import forgotten
from sparkonce.sinks.lakehouse.table import DataFile, Layout, LoadedTable

if TYPE_CHECKING:
    from sparkonce.model import BranchId
    from sparkonce.sinks.lakehouse.payloads import PreparedBatch
    from sparkonce.sinks.lakehouse.storage import Storage

MARKS: Final = "_sparkonce"
_INFO: Final = "sparkonce"
RETENTION: Final = "delta.setTransactionRetentionDuration"
_DESCRIBED_COLUMNS: Final = 32  # Delta's own default


class DeltaLayout(Layout):
    """How a Delta table wants its files: without the columns that it is partitioned by.

    Args:
        table: its newest version.
    """

    row_group = 1 << 20
    file_bytes = 128 << 20
    parquet: Mapping[str, Any] = {"compression": "snappy"}

    def __init__(self, table: DeltaTable) -> None:
        metadata = table.metadata()
        self.columns = list(metadata.partition_columns)
        self.spec = json.dumps(self.columns)
        self.is_partitioned = bool(self.columns)
        arrow: Any = table.schema().to_arrow()
        self.schema = pa.schema(arrow)
        inner = [field for field in self.schema if field.name not in self.columns]
        self.file_schema = pa.schema(inner)
        settings = metadata.configuration
        count = int(settings.get("delta.dataSkippingNumIndexedCols", _DESCRIBED_COLUMNS))
        named = settings.get("delta.dataSkippingStatsColumns")
        names = self.file_schema.names
        self._described = named.split(",") if named else names[: count if count >= 0 else None]

    def split(self, rows: pa.Table) -> Iterator[tuple[tuple[str | None, ...], pa.Table]]:
        if not self.columns:
            yield (), rows
            return
        files = rows.drop_columns(self.columns)
        numbers = pa.array(range(rows.num_rows), pa.int64())
        keys = [str(n) for n in range(len(self.columns))]
        table = pa.table([*map(rows.column, self.columns), numbers], names=[*keys, "row"])
        # Groups come in any order, so each brings the numbers of its rows.
        for group in table.group_by(keys).aggregate([("row", "list")]).to_batches():
            for n in range(group.num_rows):
                values = tuple(_as_text(group.column(key)[n].as_py()) for key in keys)
                yield values, files.take(group.column("row_list")[n].values)

    def describe(self, file: DataFile) -> Mapping[str, Any]:
        return {
            "path": file.path,
            "rows": file.footer.num_rows,
            "bytes": file.bytes,
            "partition": list(file.partition),  # type: ignore[call-overload]  # from split
            "stats": statistics_of(file.footer, self.file_schema, self._described),
        }


class DeltaVersion(LoadedTable):
    """A version of a table.

    Args:
        table: as loaded.
        storage: of its files.
    """

    forgets = (
        "Delta has cleaned up the version of its log that said so (delta.logRetentionDuration)"
    )

    def __init__(self, table: DeltaTable, storage: Storage) -> None:
        self.table = table
        self.metadata = table.metadata()
        self.id = str(self.metadata.id)
        self.marks = Marks(storage, self.id, MARKS, "")

    def layout(self, spec: int | str | None = None) -> DeltaLayout:  # noqa: ARG002 - has one
        return DeltaLayout(self.table)

    def manifest(self, branch_id: BranchId, spec: int | str) -> str:  # noqa: ARG002 - has one
        return f"{MARKS}/{branch_id}adds"

    def write_manifest(
        self, path: str, spec: int | str, files: Sequence[Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        self.marks.storage.write(path, json.dumps(files).encode())
        return {"path": path, "spec": spec}

    def end_of(self, branch_id: BranchId) -> End | Literal["unknown"] | None:
        newest = self.table.transaction_version(_app(branch_id, key_of(branch_id)))
        if branch_id.batch_id is None or newest is None or branch_id.batch_id > newest:
            return None
        kept = self._kept(branch_id)
        if not any(key_of(branch_id) in of_end for of_end in kept.values()):
            return "unknown"
        return end_in(kept, branch_id)

    def obstacle(self, prepared: PreparedBatch | None) -> str | None:
        if reason := unsupported(self.table):
            return reason
        spec = DeltaLayout(self.table).spec
        if prepared is not None and {spec} != {each["spec"] for each in prepared.manifests}:
            return f"is partitioned by {spec} now, and the batch was not"
        return None

    def commit_end(
        self, branch_id: BranchId, end: End, prepared: PreparedBatch | None = None
    ) -> bool:
        columns = self.metadata.partition_columns
        kept = self._kept(branch_id)
        proofs = {**kept, end: with_batch(kept.get(end, {}), branch_id)}
        try:
            self.table.create_write_transaction(
                [] if prepared is None else list(self._adds(prepared, columns)),
                mode="append",
                schema=self.table.schema(),
                partition_by=columns,
                commit_properties=CommitProperties(
                    custom_metadata={_INFO: json.dumps(proofs, separators=(",", ":"))},
                    max_commit_retries=0,  # so the version that was loaded must be the newest one
                    app_transactions=list(self._transactions(branch_id)),
                ),
            )
        except CommitFailedError:
            return False
        return True

    def may_name(self, task: BranchId) -> bool:
        first = f"{self.marks.data(task)}/{file_name(task.attempt, 0)}".rpartition("-")[0]
        paths: list[Any] = pa.table(self.table.get_add_actions()).column("path").to_pylist()
        return any(path.startswith(f"{first}-") for path in paths)

    def _transactions(self, branch_id: BranchId) -> Iterator[Transaction]:
        now_ms = int(time.time() * 1000)
        yield Transaction(_app(branch_id), self.table.version() + 1, now_ms)
        of_driver = _app(branch_id, key_of(branch_id))
        newest = max(self.table.transaction_version(of_driver) or 0, branch_id.batch_id or 0)
        yield Transaction(of_driver, newest, now_ms)

    def _kept(self, branch_id: BranchId) -> Mapping[End, Kept]:
        """What the newest version of this sink says of its batches."""
        version = self.table.transaction_version(_app(branch_id))
        if version is None:
            return {}
        try:
            lines = self.marks.storage.read(f"_delta_log/{version:020}.json").splitlines()
        except FileNotFoundError:
            newest = self.table.transaction_version(_app(branch_id, key_of(branch_id)))
            return {} if newest is None else {"committed": {key_of(branch_id): forgotten(newest)}}
        (info,) = [
            action["commitInfo"] for line in lines if "commitInfo" in (action := json.loads(line))
        ]
        found: Mapping[End, Kept] = json.loads(info[_INFO])
        return found

    def _adds(self, prepared: PreparedBatch, columns: Sequence[str]) -> Iterator[AddAction]:
        for manifest in prepared.manifests:
            for file in json.loads(self.marks.storage.read(manifest["path"])):
                yield AddAction(
                    path=file["path"],
                    size=file["bytes"],
                    partition_values=dict(zip(columns, file["partition"], strict=True)),
                    modification_time=int(time.time() * 1000),
                    data_change=True,
                    stats=file["stats"],
                )


_KNOWN_FEATURES: Final = {
    "appendOnly",
    "changeDataFeed",
    "checkConstraints",
    "columnMapping",
    "deletionVectors",
    "generatedColumns",
    "invariants",
    "timestampNtz",
    "v2Checkpoint",
    "vacuumProtocolCheck",
}


def unsupported(table: DeltaTable) -> str | None:
    """What about a table keeps it from taking batches, with the next step; None if nothing does.

    Nothing checks the rows of a file that is added, so a table that has rules for its rows, or
    another way to name columns, is refused.
    """
    settings = table.metadata().configuration
    if settings.get("delta.columnMapping.mode", "none") != "none":
        return (
            "maps its columns to other names (delta.columnMapping.mode): write to a table without"
        )
    if rules := [name for name in settings if name.startswith("delta.constraints.")]:
        return f"has a CHECK constraint ({rules[0]}), which nothing would check: drop it"
    if RETENTION in settings:
        return f"forgets after a while how batches ended: unset {RETENTION}"
    for field in table.schema().fields:
        if found := [name for name in field.metadata if name.startswith("delta.")]:
            return f"has a rule for the column {field.name} ({found[0]}): write to a table without"
    features = set(table.protocol().writer_features or ())
    if unknown := features - _KNOWN_FEATURES:
        return f"has the feature {min(unknown)}, which DeltaSink does not know: drop it"
    return None


def _app(branch_id: BranchId, *more: str) -> str:
    return ".".join([f"{branch_id.owner.prefix}{branch_id.sink}", *more])


def _as_text(value: object) -> str | None:
    """The value of a partition, as Delta's log has it: an empty text is null there."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return None if value is None or value == "" else str(value)
