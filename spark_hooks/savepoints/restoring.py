"""Begins with a savepoint in a log that does not know its pipeline.

    fork           another pipeline begins there, which shares no target with the first one
    restore_lost   the same pipeline, whose log was lost with its checkpoint

`rewinding` has what the pipeline does with its own log. Each step can be repeated: run the command
again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from sparkonce.errors import SavepointError
from sparkonce.protocol.processes import this_driver
from sparkonce.spark_hooks.savepoints.filling import Filling, check_is_of
from sparkonce.spark_hooks.savepoints.manifest import Manifest
from sparkonce.txn_log.founding import found
from sparkonce.txn_log.record import OPERATOR
from sparkonce.txn_log.rewinding import head_after


def restore_lost(filling: Filling) -> str:
    """Make a checkpoint with which the pipeline goes on, whose own was lost with the log in it.

    What it has delivered after the savepoint is not known, and comes again. The lost checkpoint
    must never run again.

    Returns:
        The new query id.

    Raises:
        SavepointError: the savepoint is of another pipeline, or the folder is not empty. Nothing
            was changed.
        LogError: run it again.
    """
    manifest = filling.manifest
    check_is_of(manifest, filling.pipeline)
    query_id = filling.lay_out()
    log = filling.open_log()
    following = replace(
        manifest.head,
        query_id=query_id,
        run_id=f"{OPERATOR}return to {manifest.name}",
        driver=this_driver(),
        started_at=time.time(),
        log_id=manifest.log_id,
        moved_to=None,
        checkpoint=filling.checkpoint.location,
    )
    head = head_after(manifest.head, manifest.record.id, following)
    found(log, head, [manifest.record])
    filling.bind_to(log)
    return query_id


def fork(filling: Filling, targets: Mapping[str, str], shared: Iterable[str] = ()) -> str:
    """Make a checkpoint with which another pipeline begins after the savepoint's batch.

    Args:
        filling: with the name of the new pipeline.
        targets: of its sinks, by name.
        shared: names of sinks that may write into a target of the savepoint's pipeline.

    Returns:
        The new query id.

    Raises:
        SavepointError: a target is shared, the name is known to the log, or the folder is not
            empty. Nothing was changed.
        LogError: run it again.
    """
    manifest, pipeline = filling.manifest, filling.pipeline
    if pipeline == manifest.head.pipeline:
        raise SavepointError(
            f"the fork must have a name of its own, not {pipeline!r}: that of the savepoint's "
            "pipeline, which goes on. To continue that one, restore the savepoint"
        )
    _check_targets(manifest, targets, shared)
    query_id = filling.lay_out()
    log = filling.open_log()
    head = replace(
        manifest.head,
        pipeline=pipeline,
        query_id=query_id,
        token=1,
        run_id=f"{OPERATOR}fork of {manifest.name}",
        driver=this_driver(),
        starts=1,
        started_at=time.time(),
        first_batch=manifest.batch + 1,
        sinks=dict(targets),
        retired=(),
        rewound={},
        log_id=None,
        moved_to=None,
        checkpoint=filling.checkpoint.location,
    )
    found(log, head)
    filling.bind_to(log)
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
