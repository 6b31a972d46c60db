"""The data files of batches that a table names now, and a snapshot without them.

A batch's own manifests are read first: the table names them until somebody rewrites them. Only if
files are missing there, all other manifests of the same partition specs are read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pyiceberg.manifest import (
    DataFileContent,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    write_manifest,
)
from pyiceberg.table.delete_file_index import DeleteFileIndex
from pyiceberg.table.snapshots import Operation

from sparkonce.parallel import at_once
from sparkonce.sinks.iceberg.appending import Conditional
from sparkonce.sinks.iceberg.files import FORMAT_VERSION
from sparkonce.sinks.lakehouse.marks import attempt_of
from sparkonce.sinks.lakehouse.ranges import numbers_in
from sparkonce.sinks.lakehouse.table import LiveFile

if TYPE_CHECKING:
    from pyiceberg.io import FileIO
    from pyiceberg.partitioning import PartitionSpec
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table

    from sparkonce.sinks.lakehouse.payloads import PreparedBatch

_Found = tuple[ManifestFile, ManifestEntry]


def live_files(table: Table, batches: Sequence[PreparedBatch]) -> list[list[LiveFile]]:
    """The data files of each batch that the current snapshot names."""
    snapshot = table.current_snapshot()
    manifests = [] if snapshot is None else snapshot.manifests(table.io)
    found = _entries(table.io, manifests, batches)
    deletes = _Deletes(table.io, manifests, (e for some in found for _, e in some))
    return [
        [
            LiveFile(
                entry.data_file.file_path,
                entry.data_file.file_size_in_bytes,
                deletes.may_apply_to(entry),
                (manifest, entry),
            )
            for manifest, entry in some
        ]
        for some in found
    ]


def _entries(
    io: FileIO, manifests: Iterable[ManifestFile], batches: Sequence[PreparedBatch]
) -> list[list[_Found]]:
    attempts = {batch.data: numbers_in(batch.attempts) for batch in batches}
    found: dict[str, list[_Found]] = {batch.data: [] for batch in batches}

    def read(manifest: ManifestFile) -> list[tuple[str, _Found]]:
        some = []
        for entry in manifest.fetch_manifest_entry(io):
            folder, _, name = entry.data_file.file_path.rpartition("/")
            if attempt_of(name) in attempts.get(folder, ()):
                some.append((folder, (manifest, entry)))
        return some

    def read_all(some: Iterable[ManifestFile]) -> None:
        for folder, entry in itertools.chain.from_iterable(at_once(read, some)):
            found[folder].append(entry)

    specs = {each["spec"] for batch in batches for each in batch.manifests}
    names = {each["path"] for batch in batches for each in batch.manifests}
    likely = [
        manifest
        for manifest in manifests
        if manifest.content == ManifestContent.DATA and manifest.partition_spec_id in specs
    ]
    read_all(each for each in likely if each.manifest_path in names)
    if any(len(found[batch.data]) < batch.files for batch in batches):
        read_all(each for each in likely if each.manifest_path not in names)
    return [found[batch.data] for batch in batches]


class _Deletes:
    """The delete files of a snapshot that are newer than some data files.

    Args:
        io: of the table.
        manifests: of the snapshot.
        entries: the data files.
    """

    def __init__(
        self, io: FileIO, manifests: Iterable[ManifestFile], entries: Iterable[ManifestEntry]
    ) -> None:
        self._by_position = DeleteFileIndex()
        self._by_value = -1
        oldest = min((entry.sequence_number or 0 for entry in entries), default=None)
        for manifest in manifests:
            if manifest.content == ManifestContent.DATA or oldest is None:
                continue
            if manifest.sequence_number >= oldest:
                self._read(manifest.fetch_manifest_entry(io))

    def _read(self, entries: Iterable[ManifestEntry]) -> None:
        for entry in entries:
            if entry.data_file.content == DataFileContent.POSITION_DELETES:
                self._by_position.add_delete_file(entry, entry.data_file.partition)
            else:
                self._by_value = max(self._by_value, entry.sequence_number or 0)

    def may_apply_to(self, entry: ManifestEntry) -> bool:
        """Whether rows of the data file may be deleted; any value may be among them."""
        file, number = entry.data_file, entry.sequence_number or 0
        return self._by_value >= number or bool(
            self._by_position.for_data_file(number, file, file.partition)
        )


class Removal(Conditional):
    """Removes data files.

    Args:
        table: as loaded.
        files: all that `live_files` found in it of some batches.
    """

    def __init__(self, table: Table, files: Sequence[LiveFile]) -> None:
        found: Sequence[_Found] = [file.part_of for file in files]
        changes = {
            "deleted-data-files": len(files),
            "deleted-records": sum(entry.data_file.record_count for _, entry in found),
            "removed-files-size": sum(file.bytes for file in files),
        }
        super().__init__(Operation.DELETE, table, changes)
        self._found = found
        self._paths = {file.path for file in files}

    def _manifests(self) -> list[ManifestFile]:
        touched = {manifest.manifest_path for manifest, _ in self._found}
        existing = self._existing_manifests()
        rest = [each for each in existing if each.manifest_path not in touched]
        rewritten = at_once(
            self._without, (each for each in existing if each.manifest_path in touched)
        )
        removed: dict[int, list[ManifestEntry]] = {}
        for manifest, entry in self._found:
            removed.setdefault(manifest.partition_spec_id, []).append(entry)
        gone = [
            self._written(spec, ManifestEntryStatus.DELETED, entries)
            for spec, entries in removed.items()
        ]
        return [*gone, *itertools.chain.from_iterable(rewritten), *rest]

    def _without(self, manifest: ManifestFile) -> list[ManifestFile]:
        """The manifest with its other files; nothing if it has none."""
        entries = manifest.fetch_manifest_entry(self._io)
        rest = [entry for entry in entries if entry.data_file.file_path not in self._paths]
        if not rest:
            return []
        return [self._written(manifest.partition_spec_id, ManifestEntryStatus.EXISTING, rest)]

    def _written(
        self, spec: int, status: ManifestEntryStatus, entries: Iterable[ManifestEntry]
    ) -> ManifestFile:
        with write_manifest(
            format_version=FORMAT_VERSION,
            spec=self.spec(spec),
            schema=_schema_with_columns_of(self._table, self.spec(spec)),
            output_file=self.new_manifest_output(),
            snapshot_id=self._snapshot_id,
            avro_compression=self._compression,
        ) as writer:
            for entry in entries:
                if status is ManifestEntryStatus.DELETED:
                    writer.delete(entry)
                else:
                    writer.existing(entry)
        return writer.to_manifest_file()


def _schema_with_columns_of(table: Table, spec: PartitionSpec) -> Schema:
    """A schema that has the columns of old partitions, of which the current one may lack some."""
    wanted = {field.source_id for field in spec.fields}
    newest_first = [each for _, each in sorted(table.schemas().items(), reverse=True)]
    known = (s for s in (table.schema(), *newest_first) if wanted <= s.field_ids)
    return next(known, table.schema())
