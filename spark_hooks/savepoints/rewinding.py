"""Takes a pipeline back to a savepoint's batch, in the same sinks.

    look: each sink has exactly the rows of the later batches, and can remove them
      ─► the new checkpoint, under the marker of a restore     no start is admitted there
      ─► the head, in one conditional write                    the old query never runs again
      ─► each sink takes its branches back
      ─► the head: that has ended
      ─► the marker becomes the binding to the log             the new query may start

Nothing is changed before every check has passed. From the head's write on, only this command can
finish what it began, and no start is admitted until it has. Each step can be repeated.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from sparkonce.errors import SavepointError, SinkError, TakeBackRefusedError
from sparkonce.protocol.processes import this_driver
from sparkonce.protocol.taking_back import Removal, look, take_back
from sparkonce.sinks.base import AnySink
from sparkonce.spark_hooks.binding import bind, read_binding
from sparkonce.spark_hooks.savepoints.changes import Changes
from sparkonce.spark_hooks.savepoints.manifest import Manifest
from sparkonce.spark_hooks.savepoints.place import Savepoints
from sparkonce.spark_hooks.savepoints.restoring import (
    OpenLog,
    check_is_settled,
    is_laid_out,
    lay_out,
)
from sparkonce.storage import FileSystemFolder
from sparkonce.txn_log import TransactionLog
from sparkonce.txn_log.moving import copy
from sparkonce.txn_log.places import place_of_log
from sparkonce.txn_log.record import OPERATOR, Head, TransactionRecord
from sparkonce.txn_log.rewinding import batches_after, end_rewind, head_after, replace_query


@dataclass(frozen=True)
class Rewind:
    """What a rewind would do.

    Attributes:
        manifest: of the savepoint.
        head: of its pipeline, as the log has it.
        records: of the batches that go, newest first.
        removals: what goes from each sink, and what stays.
    """

    manifest: Manifest
    head: Head
    records: Sequence[TransactionRecord]
    removals: Sequence[Removal]

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        log: TransactionLog,
        *,
        pipeline: str,
        sinks: Mapping[str, AnySink],
        kept: Collection[str] = (),
    ) -> Self:
        """Look at the log and the sinks; changes nothing.

        Args:
            manifest: of the savepoint.
            log: of its pipeline, as it is now.
            pipeline: name of the pipeline that is to go back.
            sinks: the pipeline's, by name, also those that were removed.
            kept: names of sinks whose rows stay.

        Raises:
            SavepointError: the log does not allow it.
        """
        head = _head_of(manifest, log, pipeline)
        records = batches_after(log, head, manifest.record.id)
        if not records:
            raise SavepointError(
                f"the sinks of {pipeline!r} have nothing after batch {manifest.batch}, with which "
                f"the savepoint {manifest.name} ends: restore it"
            )
        return cls(manifest, head, records, look(head, records, sinks, kept))

    def check(self) -> None:
        """Refuse what a sink cannot prove.

        Raises:
            SavepointError: naming each such sink.
        """
        refused = [f"{r.name}: {r.refusal}" for r in self.removals if r.refusal is not None]
        if refused:
            raise SavepointError(
                f"not every sink can go back to batch {self.manifest.batch}, so none was touched: "
                f"{'; '.join(refused)}. Put that right; or fork the savepoint into other targets; "
                "or pass --keep SINK: its rows stay, and the batches that run again add theirs"
            )


def rewind(
    savepoints: Savepoints,
    manifest: Manifest,
    checkpoint: FileSystemFolder,
    *,
    pipeline: str,
    sinks: Mapping[str, AnySink],
    kept: Collection[str] = (),
    source_paths: Mapping[str, str] | None = None,
    open_log: OpenLog,
    parent_log: TransactionLog,
) -> tuple[str, Rewind]:
    """Take the later batches out of the sinks, and make a checkpoint that continues after it.

    Args:
        savepoints: where the savepoint is.
        manifest: its own.
        checkpoint: the new checkpoint's folder, which is empty.
        pipeline: see `Rewind.of`.
        sinks: see `Rewind.of`.
        kept: see `Rewind.of`.
        source_paths: see `restoring.fork`.
        open_log: see `restoring.OpenLog`.
        parent_log: the log of the savepoint's pipeline, as it is now.

    Returns:
        The new query id, and what was done.

    Raises:
        SavepointError: it is refused, and no sink was changed.
        TakeBackRefusedError: a sink has refused in the middle of it: run it again.
        SinkError: run it again.
        LogError: run it again.
    """
    is_laid_out(checkpoint)
    log = parent_log
    if _has_moved(parent_log, pipeline):  # an earlier try has moved it into the new checkpoint
        log = _moved(parent_log, open_log(), pipeline)
    done = Rewind.of(manifest, log, pipeline=pipeline, sinks=sinks, kept=kept)
    done.check()
    changes = Changes(str(uuid.uuid4()), checkpoint.location, source_paths or {})
    query_id = lay_out(savepoints, manifest, checkpoint, pipeline, changes)
    if log is parent_log:
        log = _moved(parent_log, open_log(), pipeline)
    _replace_query(log, done, query_id, checkpoint.location)
    try:
        take_back(done.removals)
    except SinkError as error:
        raise TakeBackRefusedError(
            f"the rewind to {manifest.name} has begun and is not finished: {error}. No start is "
            "admitted until it is: run the same command again; with --keep SINK, if this cannot be "
            "put right, it leaves what is left in that sink",
            error.branch_id,
        ) from error
    end_rewind(log, pipeline, query_id)
    bind(checkpoint, read_binding(checkpoint), log.id_of(pipeline), pipeline)
    return query_id, done


# -- the log ---------------------------------------------------------------------------------------


def _head_of(manifest: Manifest, log: TransactionLog, pipeline: str) -> Head:
    if pipeline != manifest.head.pipeline:
        raise SavepointError(
            f"the savepoint {manifest.name} is of pipeline {manifest.head.pipeline!r}, not of "
            f"{pipeline!r}: rewind it with its own job"
        )
    head = log.head(pipeline)
    if head is None:
        raise SavepointError(f"the log {log.address} does not know {pipeline!r}")
    check_is_settled(log, head)
    if log.id_of(pipeline) != manifest.log_id:
        raise SavepointError(
            f"the savepoint {manifest.name} was made with the log {manifest.log}, and "
            f"{log.address} is another one: fork the savepoint"
        )
    return head


def _has_moved(log: TransactionLog, pipeline: str) -> bool:
    head = log.head(pipeline)
    return head is not None and head.moved_to is not None and place_of_log(log.address) is not None


def _moved(parent: TransactionLog, log: TransactionLog, pipeline: str) -> TransactionLog:
    """The log in which the pipeline goes on; a log in the old checkpoint is closed for good."""
    if log.log_id != parent.log_id:
        copy(parent, log, pipeline)
    return log


def _replace_query(log: TransactionLog, done: Rewind, query_id: str, location: str) -> None:
    manifest, name = done.manifest, done.head.pipeline
    head = log.head(name)
    if head is None or query_id in head.retired:
        raise SavepointError(
            f"{location} was being filled by an earlier rewind of {name!r}, which a later one has "
            "replaced: give an empty folder"
        )
    if head.query_id == query_id:  # an earlier try has got this far
        return
    following = replace(
        head,
        query_id=query_id,
        run_id=f"{OPERATOR}rewind to {manifest.name}",
        driver=this_driver(),
        started_at=time.time(),
        checkpoint=location,
        rewinding_to=manifest.name,
    )
    if batches_after(log, head, manifest.record.id) != done.records:
        raise SavepointError(f"{name!r} has continued meanwhile: stop its query, and run it again")
    replace_query(log, head, done.records, head_after(head, manifest.record.id, following))
