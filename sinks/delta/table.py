"""A table as its log had it, and what a commit of a batch adds to the log.

    commitInfo  sparkonce: {"committed": {"t3.p0": "0-42"}, "aborted": {}}
    txn         PREFIX.SINK        version 97: the newest version whose commitInfo says this
    txn         PREFIX.SINK.t3.p0  version 42: the newest batch that driver 3 has ended in pass 0
    txn         PREFIX.SINK.taken_back  version 40: a rewind has removed this batch and later ones

Checkpoints keep the last version of each txn for ever, unless
`delta.setTransactionRetentionDuration` is set. A version's commitInfo goes when Delta cleans up its
log, after 30 days by default. Then nobody knows how the batches up to the newest one have ended;
that later ones have not is still known.
"""

from __future__ import annotations

import json
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, Literal

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction

from sparkonce.sinks.delta.live import live_files
from sparkonce.sinks.delta.statistics import described, is_beyond_bounds, statistics_of
from sparkonce.sinks.lakehouse.marks import Marks
from sparkonce.sinks.lakehouse.proofs import (
    TAKEN_BACK,
    End,
    Kept,
    end_in,
    is_after,
    key_of,
    taken_back_from,
    with_batch,
)
from sparkonce.sinks.lakehouse.ranges import forgotten
from sparkonce.sinks.lakehouse.table import DataFile, Layout, LiveFile, LoadedTable

if TYPE_CHECKING:
    from sparkonce.model import BranchId
    from sparkonce.sinks.lakehouse.payloads import PreparedBatch
    from sparkonce.sinks.lakehouse.storage import Storage

MARKS: Final = "_sparkonce"
_INFO: Final = "sparkonce"
_NOT_NULL: Final = " not null"
_RULES: Final = ("delta.", "__CHAR_VARCHAR_TYPE_STRING")
RETENTION: Final = "delta.setTransactionRetentionDuration"


class DeltaLayout(Layout):
    """How a Delta table wants its files: without the columns that it is partitioned by.

    Args:
        table: its newest version.

    Attributes:
        columns: the ones that it is partitioned by.
        kinds: all columns, and what their values may be.
    """

    columns: list[str]
    kinds: Mapping[str, str]

    row_group = 1 << 20
    file_bytes = 128 << 20
    parquet: Mapping[str, Any] = {"compression": "snappy"}

    def __init__(self, table: DeltaTable) -> None:
        metadata = table.metadata()
        self.columns = list(metadata.partition_columns)
        self.is_partitioned = bool(self.columns)
        arrow: Any = table.schema().to_arrow()
        self.schema = pa.schema(arrow)
        self.kinds = {f.name: f"{f.type}{'' if f.nullable else _NOT_NULL}" for f in self.schema}
        self.spec = json.dumps({"partitioned_by": self.columns, "kinds": self.kinds})
        inner = [field for field in self.schema if field.name not in self.columns]
        self.file_schema = pa.schema(inner)
        self._described = described(metadata.configuration, self.file_schema.names)
        self._without_bounds: set[Hashable] = set()

    def split(self, rows: pa.Table) -> Iterator[tuple[tuple[str | None, ...], pa.Table]]:
        for partition, part in self._parts(rows):
            columns = map(part.column, self._described)
            if partition not in self._without_bounds and any(map(is_beyond_bounds, columns)):
                self._without_bounds.add(partition)
            yield partition, part

    def _parts(self, rows: pa.Table) -> Iterator[tuple[tuple[str | None, ...], pa.Table]]:
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
                values = tuple(
                    _partition_value(group.column(key)[n], column)
                    for key, column in zip(keys, self.columns, strict=True)
                )
                self._check_required(values)
                yield values, files.take(group.column("row_list")[n].values)

    def _check_required(self, values: tuple[str | None, ...]) -> None:
        for column, value in zip(self.columns, values, strict=True):
            if value is None and not self.schema.field(column).nullable:
                raise pa.ArrowInvalid(
                    f"column {column} is required, and a row has an empty text there, which is "
                    "null in a column that a Delta table is partitioned by"
                )

    def describe(self, file: DataFile) -> Mapping[str, Any]:
        return {
            "path": file.path,
            "rows": file.footer.num_rows,
            "bytes": file.bytes,
            "partition": list(file.partition),  # type: ignore[call-overload]  # from split
            "stats": statistics_of(
                file.footer,
                self.file_schema,
                self._described,
                has_bounds=file.partition not in self._without_bounds,
            ),
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
        self._transaction_version = cache(table.transaction_version)  # each call reads the log

    def layout(self, spec: int | str | None = None) -> DeltaLayout:  # noqa: ARG002 - one at a time
        return DeltaLayout(self.table)

    def manifest(self, branch_id: BranchId, spec: int | str) -> str:
        return f"{MARKS}/{branch_id}{sha256(str(spec).encode()).hexdigest()[:12]}.adds"

    def write_manifest(
        self, path: str, spec: int | str, files: Sequence[Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        self.marks.storage.write(path, json.dumps(files).encode())
        return {"path": path, "spec": spec}

    def end_of(self, branch_id: BranchId) -> End | Literal["unknown"] | None:
        newest = self._newest(branch_id)
        if branch_id.batch_id is None or newest is None or branch_id.batch_id > newest:
            return None
        kept = self._kept(branch_id)
        return end_in(kept, branch_id) if _knows(kept, branch_id) else "unknown"

    def obstacle(self, prepared: PreparedBatch | None) -> str | None:
        if reason := unsupported(self.table):
            return reason
        now = DeltaLayout(self.table)
        for manifest in prepared.manifests if prepared else ():
            then = json.loads(manifest["spec"])
            if then["partitioned_by"] != now.columns:
                return f"is partitioned by {now.columns} now, and the batch was not"
            if changed := _changed(then["kinds"], now.kinds):
                return f"has other columns than the batch was written with: {changed}"
        return None

    def commit_end(
        self, branch_id: BranchId, end: End, prepared: PreparedBatch | None = None
    ) -> bool:
        columns = self.metadata.partition_columns
        kept = self._kept(branch_id)
        if self._newest(branch_id) is not None and not _knows(kept, branch_id):
            kept = {**kept, **self._forgotten(branch_id, kept)}
        proofs = {**kept, end: with_batch(kept.get(end, {}), branch_id)}
        return self._is_committed(
            () if prepared is None else self._adds(prepared, columns),
            {_INFO: json.dumps(proofs, separators=(",", ":"))},
            self._transactions(branch_id),
        )

    def _is_committed(
        self,
        actions: Iterable[AddAction | RemoveAction],
        info: dict[str, Any],
        transactions: Iterable[Transaction],
    ) -> bool:
        try:
            self.table.create_write_transaction(
                list(actions),
                mode="append",
                schema=self.table.schema(),
                partition_by=self.metadata.partition_columns,
                commit_properties=CommitProperties(
                    custom_metadata=info,
                    max_commit_retries=0,  # so the version that was loaded must be the newest one
                    app_transactions=list(transactions),
                ),
            )
        except CommitFailedError as error:
            if "nsupported" in str(error):  # no other version came first: it will not take any
                raise
            return False
        return True

    def may_name(self, task: BranchId) -> bool:  # noqa: ARG002
        """Always: after OPTIMIZE older versions name a batch's files; VACUUM deletes others."""
        return True

    def is_taken_back(self, branch_id: BranchId) -> bool:
        return is_after(self._first_taken_back(branch_id), branch_id)

    def keeps_files(self) -> str | None:
        if self.metadata.configuration.get("delta.appendOnly") == "true":
            return "takes no removal of files: unset delta.appendOnly"
        return unsupported(self.table)

    def live_files(self, batches: Sequence[PreparedBatch]) -> Sequence[Sequence[LiveFile]]:
        return live_files(self.table, batches)

    def commit_removal(self, branch_ids: Sequence[BranchId], files: Sequence[LiveFile]) -> bool:
        now_ms = int(time.time() * 1000)
        removes = [
            RemoveAction(
                path=file.path,
                data_change=True,
                deletion_timestamp=now_ms,
                size=file.bytes,
                partition_values={name: _as_text(value) for name, value in file.part_of.items()},
            )
            for file in files
        ]
        proofs = [
            Transaction(_app(branch_id, TAKEN_BACK), first, now_ms)
            for branch_id, first in taken_back_from(branch_ids, self._first_taken_back)
        ]
        return self._is_committed(removes, {}, proofs)

    def _first_taken_back(self, branch_id: BranchId) -> int | None:
        """From which batch on all of the query are taken back."""
        return self._transaction_version(_app(branch_id, TAKEN_BACK))

    def _transactions(self, branch_id: BranchId) -> Iterator[Transaction]:
        now_ms = int(time.time() * 1000)
        yield Transaction(_app(branch_id), self.table.version() + 1, now_ms)
        newest = max(self._newest(branch_id) or 0, branch_id.batch_id or 0)
        yield Transaction(_app(branch_id, key_of(branch_id)), newest, now_ms)

    def _newest(self, branch_id: BranchId) -> int | None:
        """The newest batch of the driver and write pass that has ended."""
        return self._transaction_version(_app(branch_id, key_of(branch_id)))

    def _kept(self, branch_id: BranchId) -> Mapping[End, Kept]:
        """What the newest version of this sink says of its batches; nothing if it is gone."""
        version = self._transaction_version(_app(branch_id))
        if version is None:
            return {}
        try:
            lines = self.marks.storage.read(f"_delta_log/{version:020}.json").splitlines()
        except FileNotFoundError:
            return {}
        likely = [
            json.loads(line) for line in lines if b"commitInfo" in line
        ]  # most lines are files
        infos = [action["commitInfo"] for action in likely if "commitInfo" in action]
        found: Mapping[End, Kept] = json.loads(infos[0].get(_INFO, "{}")) if infos else {}
        return found

    def _forgotten(self, branch_id: BranchId, kept: Mapping[End, Kept]) -> Mapping[End, Kept]:
        """Nothing is known of the driver's batches up to its newest one."""
        newest = self._newest(branch_id) or 0
        return {"committed": {**kept.get("committed", {}), key_of(branch_id): forgotten(newest)}}

    def _adds(self, prepared: PreparedBatch, columns: Sequence[str]) -> Iterator[AddAction]:
        now_ms = int(time.time() * 1000)
        for manifest in prepared.manifests:
            for file in json.loads(self.marks.storage.read(manifest["path"])):
                yield AddAction(
                    path=file["path"],
                    size=file["bytes"],
                    partition_values=dict(zip(columns, file["partition"], strict=True)),
                    modification_time=now_ms,
                    data_change=True,
                    stats=file["stats"],
                )


def _knows(kept: Mapping[End, Kept], branch_id: BranchId) -> bool:
    """Whether anything is known of the driver's batches in this write pass."""
    return any(key_of(branch_id) in of_end for of_end in kept.values())


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
}
_NEWEST_LEGACY_WRITER: Final = 5
_WITH_FEATURES: Final = 7


def unsupported(table: DeltaTable) -> str | None:
    """What about a table keeps it from taking batches, with the next step; None if nothing does.

    Nothing checks the rows of a file that is added, so a table that has rules for its rows, or
    another way to name columns, is refused.
    """
    return _unsupported_setting(table.metadata().configuration) or _unsupported_protocol(table)


def _unsupported_setting(settings: Mapping[str, Any]) -> str | None:
    if settings.get("delta.columnMapping.mode", "none") != "none":
        return (
            "maps its columns to other names (delta.columnMapping.mode): write to a table without"
        )
    if rules := [name for name in settings if name.startswith("delta.constraints.")]:
        return f"has a CHECK constraint ({rules[0]}), which nothing would check: drop it"
    if RETENTION in settings:
        return f"forgets after a while how batches ended: unset {RETENTION}"
    return None


def _unsupported_protocol(table: DeltaTable) -> str | None:
    if rule := next(_rules(json.loads(table.schema().to_json())), None):
        return f"has a rule for the values of a column ({rule}): write to a table without"
    version = table.protocol().min_writer_version
    if _NEWEST_LEGACY_WRITER < version < _WITH_FEATURES:
        return f"has writer version {version}, which deltalake does not write: upgrade it to 7"
    features = set(table.protocol().writer_features or ())
    if unknown := features - _KNOWN_FEATURES:
        return f"has the feature {min(unknown)}, which DeltaSink does not know: drop it"
    return None


def _rules(schema: Any) -> Iterator[str]:
    """Names of rules for values, at any depth of a schema in JSON."""
    if isinstance(schema, Mapping):
        yield from (key for key in schema.get("metadata", ()) if key.startswith(_RULES))
        for value in schema.values():
            yield from _rules(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _rules(value)


def _changed(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """The first column whose values may not fit any more; empty if all do."""
    for name, kind in then.items():
        if now.get(name) not in {kind, kind.removesuffix(_NOT_NULL)}:
            return f"{name} was {kind}, and is {now.get(name, 'gone')}"
    required = (name for name, kind in now.items() if name not in then and kind.endswith(_NOT_NULL))
    return next((f"{name} is required now" for name in required), "")


def _app(branch_id: BranchId, *more: str) -> str:
    return ".".join([f"{branch_id.owner.prefix}{branch_id.sink}", *more])


def _partition_value(value: pa.Scalar[Any], column: str) -> str | None:
    try:
        return _as_text(value.as_py())
    except OverflowError as error:
        raise pa.ArrowInvalid(
            f"column {column}, which the table is partitioned by, has a date before the year 1 or "
            "after the year 9999: leave such rows out of the query"
        ) from error


def _as_text(value: object) -> str | None:
    """The value of a partition, as Delta's log has it: an empty text is null there."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return None if value is None or value == "" else str(value)
