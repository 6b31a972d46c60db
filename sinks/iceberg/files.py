"""A task's data files, and the batch's manifests, in a form that a committable can hold.

task    a data file ─► to_json ─► the committable ─► the driver
vote    all tasks' files ─► prepared_manifest ─► the record
commit  the record ─► manifest_file
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pyiceberg.conversions import from_bytes, to_bytes
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    PartitionFieldSummary,
    write_manifest,
)
from pyiceberg.typedef import Record
from pyiceberg.types import PrimitiveType

from sparkonce.sinks.lakehouse.marks import attempt_of

if TYPE_CHECKING:
    from pyiceberg.partitioning import PartitionSpec
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table

FORMAT_VERSION: Final = 2
"""Of the table. Manifests of version 1 need the snapshot's id before there is a snapshot."""

_UNASSIGNED = -1
_COUNTS = ("column_sizes", "value_counts", "null_value_counts", "nan_value_counts")
_BOUNDS = ("lower_bounds", "upper_bounds")


def to_json(file: DataFile, spec: PartitionSpec, schema: Schema) -> Mapping[str, Any]:
    """Describe a data file; the values of its partition become bytes, as Iceberg stores bounds."""
    kinds = _kinds(spec, schema)
    values = [file.partition[n] for n in range(len(kinds))]
    return {
        "path": file.file_path,
        "rows": file.record_count,
        "bytes": file.file_size_in_bytes,
        "schema": schema.schema_id,
        "partition": [
            None if value is None else to_bytes(kind, value)
            for kind, value in zip(kinds, values, strict=True)
        ],
        "split_offsets": list(file.split_offsets or []),
        **{name: _texts(getattr(file, name)) for name in (*_COUNTS, *_BOUNDS)},
    }


def from_json(value: Mapping[str, Any], spec: PartitionSpec, schema: Schema) -> DataFile:
    """The data file that `to_json` described."""
    partition = [
        None if part is None else from_bytes(kind, part)
        for kind, part in zip(_kinds(spec, schema), value["partition"], strict=True)
    ]
    numbers: dict[str, Any] = {
        name: {int(field): item for field, item in value[name].items()}
        for name in (*_COUNTS, *_BOUNDS)
    }
    return DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=value["path"],
        file_format=FileFormat.PARQUET,
        partition=Record(*partition),
        record_count=value["rows"],
        file_size_in_bytes=value["bytes"],
        split_offsets=value["split_offsets"],
        sort_order_id=None,
        equality_ids=None,
        key_metadata=None,
        **numbers,
    )


def prepared_manifest(
    table: Table, spec_id: int, files: Sequence[Mapping[str, Any]], location: str
) -> Mapping[str, Any]:
    """Write the manifest of a batch's files, which belongs to no snapshot yet, and describe it.

    The snapshot that will name it gives it its sequence number and id (inheritance, in Iceberg's
    specification).
    """
    schema, spec = table.schema(), table.specs()[spec_id]
    with write_manifest(
        format_version=FORMAT_VERSION,
        spec=spec,
        schema=schema,
        output_file=table.io.new_output(location),
        snapshot_id=None,  # type: ignore[arg-type]  # inherited
        avro_compression="deflate",
    ) as writer:
        for file in files:
            entry = ManifestEntry.from_args(
                status=ManifestEntryStatus.ADDED,
                snapshot_id=None,
                sequence_number=None,
                file_sequence_number=None,
                data_file=from_json(file, spec, schema),
            )
            writer.add_entry(entry)
    written = writer.to_manifest_file()
    return {
        "path": location,
        "bytes": written.manifest_length,
        "spec": spec_id,
        "schemas": sorted({file["schema"] for file in files}),
        "files": written.added_files_count,
        "rows": written.added_rows_count,
        "partitions": [
            [part.contains_null, part.contains_nan, part.lower_bound, part.upper_bound]
            for part in written.partitions or []
        ],
    }


def manifest_file(value: Mapping[str, Any], snapshot_id: int) -> ManifestFile:
    """The entry of a manifest list for a manifest that `prepared_manifest` described."""
    names = ("contains_null", "contains_nan", "lower_bound", "upper_bound")
    return ManifestFile.from_args(
        manifest_path=value["path"],
        manifest_length=value["bytes"],
        partition_spec_id=value["spec"],
        content=ManifestContent.DATA,
        sequence_number=_UNASSIGNED,
        min_sequence_number=_UNASSIGNED,
        added_snapshot_id=snapshot_id,
        added_files_count=value["files"],
        existing_files_count=0,
        deleted_files_count=0,
        added_rows_count=value["rows"],
        existing_rows_count=0,
        deleted_rows_count=0,
        partitions=[
            PartitionFieldSummary.from_args(**dict(zip(names, part, strict=True)))
            for part in value["partitions"]
        ],
        key_metadata=None,
    )


def attempts_in(table: Table, manifests: Iterable[str]) -> set[int]:
    """The task attempts whose files these manifests add."""
    found: set[int] = set()
    for path in manifests:
        manifest = manifest_file({"path": path, **_ANY_MANIFEST}, 0)
        entries = manifest.fetch_manifest_entry(table.io)
        names = [entry.data_file.file_path.rpartition("/")[2] for entry in entries]
        found |= {attempt for attempt in map(attempt_of, names) if attempt is not None}
    return found


_ANY_MANIFEST: Mapping[str, Any] = {"bytes": 0, "spec": 0, "files": 0, "rows": 0, "partitions": ()}


def _kinds(spec: PartitionSpec, schema: Schema) -> Sequence[PrimitiveType]:
    kinds = [field.field_type for field in spec.partition_type(schema).fields]
    return [kind for kind in kinds if isinstance(kind, PrimitiveType)]


def _texts(values: Mapping[int, Any] | None) -> dict[str, Any]:
    return {str(field): value for field, value in (values or {}).items()}
