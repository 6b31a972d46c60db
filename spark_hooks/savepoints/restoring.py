"""Makes a checkpoint from a savepoint, under a query id that no other checkpoint has.

    marker ─► files, by checksum ─► the log ─► the marker becomes the binding to the log

    fork           another pipeline begins there, which shares no target with the first one
    restore_lost   the same pipeline, whose log was lost with its checkpoint
    rewinding      the same pipeline, with its log

The marker is the checkpoint's binding to a log that does not exist, so the identity guard refuses
a start until the restore has ended. Each step can be repeated: run the command again.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

from sparkonce.errors import SavepointError
from sparkonce.protocol.processes import this_driver
from sparkonce.spark_hooks.binding import bind, read_binding
from sparkonce.spark_hooks.savepoints.changes import METADATA, Changes
from sparkonce.spark_hooks.savepoints.manifest import Manifest
from sparkonce.spark_hooks.savepoints.place import Savepoints, measured
from sparkonce.storage import FileSystemFolder
from sparkonce.txn_log import TransactionLog
from sparkonce.txn_log.claim import RESTORING
from sparkonce.txn_log.founding import found
from sparkonce.txn_log.record import OPERATOR
from sparkonce.txn_log.rewinding import head_after

_MARKER: Final = "sparkonce.json"
_OURS: Final = (_MARKER, "sparkonce.1.json", "sparkonce-log/", "sparkonce-drivers/")

OpenLog = Callable[[], TransactionLog]
"""Opens the log that the pipeline will use; a log inside the checkpoint is made there."""


def restore_lost(
    savepoints: Savepoints,
    manifest: Manifest,
    checkpoint: FileSystemFolder,
    *,
    pipeline: str,
    source_paths: Mapping[str, str] | None = None,
    open_log: OpenLog,
) -> str:
    """Make a checkpoint with which the pipeline goes on, whose own was lost with the log in it.

    What it has delivered after the savepoint is not known, and comes again. The lost checkpoint
    must never run again.

    Args:
        savepoints: where the savepoint is.
        manifest: its own.
        checkpoint: the new checkpoint's folder, which is empty.
        pipeline: name of the pipeline that is to go on.
        source_paths: see `fork`.
        open_log: see `OpenLog`.

    Returns:
        The new query id.

    Raises:
        SavepointError: the savepoint is of another pipeline, or the folder is not empty. Nothing
            was changed.
        LogError: run it again.
    """
    check_is_of(manifest, pipeline)
    changes = Changes(str(uuid.uuid4()), checkpoint.location, source_paths or {})
    query_id = lay_out(savepoints, manifest, checkpoint, pipeline, changes)
    log = open_log()
    following = replace(
        manifest.head,
        query_id=query_id,
        run_id=f"{OPERATOR}return to {manifest.name}",
        driver=this_driver(),
        started_at=time.time(),
        log_id=manifest.log_id,
        moved_to=None,
        checkpoint=checkpoint.location,
    )
    head = head_after(manifest.head, manifest.record.id, following)
    found(log, head, [manifest.record])
    bind(checkpoint, read_binding(checkpoint), log.id_of(pipeline), pipeline)
    return query_id


def fork(
    savepoints: Savepoints,
    manifest: Manifest,
    checkpoint: FileSystemFolder,
    *,
    pipeline: str,
    targets: Mapping[str, str],
    shared: Iterable[str] = (),
    source_paths: Mapping[str, str] | None = None,
    open_log: OpenLog,
) -> str:
    """Make a checkpoint with which another pipeline begins after the savepoint's batch.

    Args:
        savepoints: where the savepoint is.
        manifest: its own.
        checkpoint: the new checkpoint's folder, which is empty.
        pipeline: name of the new pipeline.
        targets: of its sinks, by name.
        shared: names of sinks that may write into a target of the savepoint's pipeline.
        source_paths: where the folders of file sources were, as URLs, and where they are now.
        open_log: see `OpenLog`.

    Returns:
        The new query id.

    Raises:
        SavepointError: a target is shared, the name is known to the log, or the folder is not
            empty. Nothing was changed.
        LogError: run it again.
    """
    if pipeline == manifest.head.pipeline:
        raise SavepointError(
            f"the fork must have a name of its own, not {pipeline!r}: that of the savepoint's "
            "pipeline, which goes on. To continue that one, restore the savepoint"
        )
    _check_targets(manifest, targets, shared)
    changes = Changes(str(uuid.uuid4()), checkpoint.location, source_paths or {})
    query_id = lay_out(savepoints, manifest, checkpoint, pipeline, changes)
    log = open_log()
    head = replace(
        manifest.head,
        pipeline=pipeline,
        query_id=query_id,
        token=1,
        run_id=f"{OPERATOR}fork of {manifest.name}",
        started_at=time.time(),
        first_batch=manifest.batch + 1,
        sinks=dict(targets),
        retired=(),
        rewound={},
        log_id=None,
        moved_to=None,
        checkpoint=checkpoint.location,
    )
    found(log, head)
    bind(checkpoint, read_binding(checkpoint), log.id_of(pipeline), pipeline)
    return query_id


def _check_targets(manifest: Manifest, targets: Mapping[str, str], shared: Iterable[str]) -> None:
    theirs = set(manifest.head.sinks.values())
    for name, target in targets.items():
        if target in theirs and name not in shared:
            raise SavepointError(
                f"the sink {name!r} writes to {target}, as the savepoint's pipeline does, so its "
                f"rows would be there twice: give it another target, or pass --share {name} if "
                "that is meant"
            )


def check_is_of(manifest: Manifest, pipeline: str) -> None:
    """Refuse the savepoint of another pipeline."""
    if pipeline != manifest.head.pipeline:
        raise SavepointError(
            f"the savepoint {manifest.name} is of pipeline {manifest.head.pipeline!r}, not of "
            f"{pipeline!r}: use it with its own job, or fork it"
        )


# -- the checkpoint --------------------------------------------------------------------------------


def lay_out(
    savepoints: Savepoints,
    manifest: Manifest,
    checkpoint: FileSystemFolder,
    pipeline: str,
    changes: Changes,
) -> str:
    """Write the files; returns the query id, which is that of an earlier try if there was one."""
    is_again = is_laid_out(checkpoint)
    if changes.source_paths:
        changes.check_source_paths(manifest.files, partial(savepoints.content, manifest))
    mine = {
        "log_id": RESTORING,
        "pipeline": pipeline,
        "savepoint": [savepoints.address, manifest.name, manifest.made_at],
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
        return changes.applied(name, savepoints.content(manifest, name))

    if is_again:
        _check_is_ours(manifest, checkpoint, content)
    # The query id last: a query that is started before finds all files, or takes another id.
    for name in sorted(manifest.files, key=METADATA.__eq__):
        checkpoint.store(name, partial(content, name))
    _check_is_ours(manifest, checkpoint, content, [METADATA])
    return changes.query_id


def is_laid_out(checkpoint: FileSystemFolder) -> bool:
    """Whether a checkpoint is being restored there.

    Raises:
        SavepointError: there is another checkpoint, or there are other files.
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


def _check_is_ours(
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
