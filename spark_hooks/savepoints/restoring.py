"""Makes a checkpoint from a savepoint: the same pipeline continues, or another one begins there.

    marker ─► files, by checksum ─► the log ─► the marker becomes the binding to the log

    restore   the same query id: the log has nothing after the batch
    fork      a query id and a pipeline of its own, which share no target with the first ones

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
from sparkonce.spark_hooks.binding import bind, read_binding
from sparkonce.spark_hooks.savepoints.changes import METADATA, Changes
from sparkonce.spark_hooks.savepoints.manifest import Manifest
from sparkonce.spark_hooks.savepoints.place import Savepoints, measured
from sparkonce.storage import FileSystemFolder
from sparkonce.txn_log import TransactionLog
from sparkonce.txn_log.claim import RESTORING
from sparkonce.txn_log.founding import found, relocate
from sparkonce.txn_log.identity import next_batch
from sparkonce.txn_log.moving import copy
from sparkonce.txn_log.places import place_of_log
from sparkonce.txn_log.record import OPERATOR, Head

_MARKER: Final = "sparkonce.json"
_OURS: Final = (_MARKER, "sparkonce.1.json", "sparkonce-log/", "sparkonce-drivers/")

OpenLog = Callable[[], TransactionLog]
"""Opens the log that the restored pipeline will use; a log inside the checkpoint is made there."""


def restore(
    savepoints: Savepoints,
    manifest: Manifest,
    checkpoint: FileSystemFolder,
    *,
    pipeline: str,
    open_log: OpenLog,
    parent_log: TransactionLog | None,
) -> None:
    """Make a checkpoint with which the savepoint's own pipeline continues.

    Args:
        savepoints: where the savepoint is.
        manifest: its own.
        checkpoint: the new checkpoint's folder, which is empty.
        pipeline: name of the pipeline that is to continue.
        open_log: see `OpenLog`.
        parent_log: the log of the savepoint's pipeline, as it is now; None if it is lost, with the
            checkpoint that it was in. That checkpoint must never run again.

    Raises:
        SavepointError: the pipeline has delivered later batches, or has unfinished ones; or the
            folder is not empty. Nothing was changed.
        LogError: run it again.
    """
    if pipeline != manifest.head.pipeline:
        raise SavepointError(
            f"the savepoint {manifest.name} is of pipeline {manifest.head.pipeline!r}, not of "
            f"{pipeline!r}: restore it under its own name, or fork it"
        )
    if parent_log is not None:
        _check_nothing_after(parent_log, manifest)
    changes = Changes(manifest.head.query_id, checkpoint.location)
    lay_out(savepoints, manifest, checkpoint, pipeline, changes)
    log = open_log()
    if parent_log is None:
        _found_again(log, manifest, checkpoint.location)
    elif log.log_id != parent_log.log_id:
        _check_not_lost_since(parent_log, log, pipeline)
        copy(parent_log, log, pipeline)
        relocate(log, pipeline, checkpoint.location)
    bind(checkpoint, read_binding(checkpoint), log.id_of(pipeline), pipeline)


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


# -- the log ---------------------------------------------------------------------------------------


def _check_nothing_after(log: TransactionLog, manifest: Manifest) -> None:
    name, batch = manifest.head.pipeline, manifest.batch
    head = log.head(name)
    if head is None or head.query_id != manifest.head.query_id:
        bound = "does not know it" if head is None else f"has bound it to query {head.query_id}"
        raise SavepointError(
            f"the savepoint {manifest.name} is of query {manifest.head.query_id} of {name!r}, and "
            f"the log {log.address} {bound}: fork the savepoint, or rewind to it"
        )
    if head.moved_to is not None and place_of_log(log.address) is not None:
        return  # an earlier try has moved it with the checkpoint; `copy` continues, or refuses
    check_is_settled(log, head)
    if next_batch(log.newest(name, head.query_id), head) != batch + 1:
        newest = log.newest(name, head.query_id)
        upto = batch if newest is None else newest.id.batch_id
        raise SavepointError(
            f"the sinks of {name!r} have every batch up to {upto}, and the savepoint "
            f"{manifest.name} ends with batch {batch}: what came after would be delivered twice. "
            "Take a savepoint of now, rewind the sinks to this one, or fork it into other targets"
        )


def check_is_settled(log: TransactionLog, head: Head) -> None:
    """Refuse a log that the pipeline has left, or that has an unfinished batch of it."""
    if head.moved_to is not None:
        raise SavepointError(
            f"{head.pipeline!r} was moved from {log.address} to {head.moved_to}: give the job that "
            "log="
        )
    if unfinished := log.unfinished(head.pipeline):
        raise SavepointError(
            f"{unfinished[0].id} is not finished: run `sparkonce recover` first, with the job and "
            "the checkpoint that it had"
        )


def _check_not_lost_since(parent_log: TransactionLog, log: TransactionLog, pipeline: str) -> None:
    """Refuse a log that an earlier restore has moved here, and that was lost with its checkpoint.

    The move enters the pipeline here before it closes the old place, so an earlier try has left it.

    Raises:
        SavepointError: the pipeline is closed in the old place, and not here.
    """
    head = parent_log.head(pipeline)
    if head is not None and head.moved_to == log.address and log.head(pipeline) is None:
        raise SavepointError(
            f"{pipeline!r} was restored to {head.moved_to} before, and its log is lost there. The "
            f"log {parent_log.address} does not know the batches since, so they would be delivered "
            "again. If no sink has a batch after the savepoint's, pass --lost"
        )


def _found_again(log: TransactionLog, manifest: Manifest, location: str) -> None:
    """Write what the savepoint holds of a log that was lost with its checkpoint."""
    head = replace(
        manifest.head,
        token=manifest.head.token + 1,
        run_id=f"{OPERATOR}restore of {manifest.name}",
        log_id=manifest.log_id,
        moved_to=None,
        checkpoint=location,
    )
    found(log, head, [manifest.record])


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
    is_new = there.get("query_id") != manifest.head.query_id
    wanted_new = changes.query_id != manifest.head.query_id
    if {**mine, "query_id": there.get("query_id")} != there or is_new != wanted_new:
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
