"""Fills a new checkpoint from a savepoint, under a query id that no other checkpoint has.

    marker ─► files, by checksum ─► (the log) ─► the marker becomes the binding to the log

The marker is the checkpoint's binding to a log that does not exist, so the identity guard refuses
a start until all has ended. Each step can be repeated.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from sparkonce.errors import SavepointError
from sparkonce.spark_hooks.binding import bind, read_binding
from sparkonce.spark_hooks.savepoints.changes import METADATA, Changes
from sparkonce.spark_hooks.savepoints.manifest import Manifest
from sparkonce.spark_hooks.savepoints.place import Savepoints, measured
from sparkonce.storage import FileSystemFolder
from sparkonce.txn_log import TransactionLog
from sparkonce.txn_log.claim import RESTORING

_MARKER: Final = "sparkonce.json"
_OURS: Final = (_MARKER, "sparkonce.1.json", "sparkonce-log/", "sparkonce-drivers/")


@dataclass(frozen=True)
class Filling:
    """A savepoint, and the new checkpoint that is filled from it.

    Attributes:
        savepoints: where the savepoint is.
        manifest: its own.
        checkpoint: the new checkpoint's folder, which is empty.
        pipeline: name of the pipeline that goes on there.
        open_log: opens the log that it will use; a log inside the checkpoint is made there.
        source_paths: where the folders of file sources were, as URLs, and where they are now.
    """

    savepoints: Savepoints
    manifest: Manifest
    checkpoint: FileSystemFolder
    pipeline: str
    open_log: Callable[[], TransactionLog]
    source_paths: Mapping[str, str] = field(default_factory=dict)

    def lay_out(self) -> str:
        """Write the files.

        Returns:
            The query id: a new one, or that of an earlier try.

        Raises:
            SavepointError: the folder is not empty, or belongs to another restore.
        """
        checkpoint, manifest = self.checkpoint, self.manifest
        is_again = check_can_fill(checkpoint)
        changes = Changes(str(uuid.uuid4()), checkpoint.location, self.source_paths)
        if changes.source_paths:
            changes.check_source_paths(manifest.files, partial(self.savepoints.content, manifest))
        mine = {
            "log_id": RESTORING,
            "pipeline": self.pipeline,
            "savepoint": [self.savepoints.address, manifest.name, manifest.made_at],
            "query_id": changes.query_id,
            "source_paths": dict(changes.source_paths),
        }
        checkpoint.create(_MARKER, json.dumps(mine))
        there = json.loads(checkpoint.read(_MARKER) or "{}")
        if {**mine, "query_id": there.get("query_id")} != there:
            raise SavepointError(
                f"{checkpoint.address} belongs to another restore: give an empty folder"
            )
        changes = replace(changes, query_id=str(there["query_id"]))

        def content(name: str) -> Iterator[bytes]:
            return changes.applied(name, self.savepoints.content(manifest, name))

        if is_again:
            _check_only_ours(manifest, checkpoint, content)
        # The query id last: a query that is started before finds all files, or takes another id.
        for name in sorted(manifest.files, key=METADATA.__eq__):
            checkpoint.store(name, partial(content, name))
        _check_only_ours(manifest, checkpoint, content, [METADATA])
        return changes.query_id

    def bind_to(self, log: TransactionLog) -> None:
        """Let the query start: the checkpoint belongs to this log from now on."""
        seen = read_binding(self.checkpoint)
        bind(self.checkpoint, seen, log.id_of(self.pipeline), self.pipeline)


def check_is_of(manifest: Manifest, pipeline: str) -> None:
    """Refuse the savepoint of another pipeline."""
    if pipeline != manifest.head.pipeline:
        raise SavepointError(
            f"the savepoint {manifest.name} is of pipeline {manifest.head.pipeline!r}, not of "
            f"{pipeline!r}: use it with its own job, or fork it"
        )


def check_can_fill(checkpoint: FileSystemFolder) -> bool:
    """Refuse a folder with another checkpoint, or with other files.

    Returns:
        Whether this checkpoint is being filled already.

    Raises:
        SavepointError: it is refused.
    """
    bound = read_binding(checkpoint)
    if bound is not None and bound.log_id != RESTORING:
        raise SavepointError(
            f"{checkpoint.address} is a checkpoint of {bound.pipeline!r} already: start its query, "
            "or give an empty folder"
        )
    if bound is None and checkpoint.names(""):
        raise SavepointError(f"{checkpoint.address} is not empty: give an empty or a new folder")
    return bound is not None


def _check_only_ours(
    manifest: Manifest,
    checkpoint: FileSystemFolder,
    content: Callable[[str], Iterable[bytes]],
    names: Iterable[str] | None = None,
) -> None:
    """Refuse what somebody has written into the folder since the restore began; default: all."""
    for name in checkpoint.names("") if names is None else names:
        if name.startswith(_OURS):
            continue
        expected = name in manifest.files and measured(content(name))
        if not expected or measured(checkpoint.pieces(name) or ()) != expected:
            raise SavepointError(
                f"{checkpoint.address} has {name}, which is not the savepoint's: was a query "
                "started there before the restore had ended? Give an empty folder"
            )
