"""Takes a pipeline back to a savepoint's batch: a new query goes on there, in the same sinks.

    restore  nothing was delivered after the batch
    rewind   each sink has exactly the rows of the later batches, and can remove them

      ─► the new checkpoint, under the marker of a restore     no start is admitted there
      ─► a log in the old checkpoint moves into the new one    the old place is closed
      ─► the head, in one conditional write                    the old query never runs again
      ─► each sink takes its branches back                     (rewind)
      ─► the head: that has ended                              (rewind)
      ─► the marker becomes the binding to the log             the new query may start

Nothing is changed before every check has passed. From the head's write on, only this command can
finish what it began, and no start is admitted until it has. Each step can be repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from sparkonce.errors import SavepointError, SinkError, TakeBackRefusedError
from sparkonce.protocol.processes import this_driver
from sparkonce.protocol.taking_back import Removal, look, take_back
from sparkonce.sinks.base import AnySink
from sparkonce.spark_hooks.savepoints.filling import Filling, check_can_fill, check_is_of
from sparkonce.spark_hooks.savepoints.manifest import Manifest
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


def restore(
    filling: Filling, parent_log: TransactionLog, confirm: Callable[[], object] = lambda: None
) -> str:
    """Make a checkpoint with which the savepoint's own pipeline goes on.

    Args:
        filling: the savepoint and the checkpoint.
        parent_log: the log of the savepoint's pipeline, as it is now.
        confirm: called when nothing forbids it, before anything is changed; raises to stop it.

    Returns:
        The new query id.

    Raises:
        SavepointError: the pipeline has delivered later batches, or has unfinished ones; or the
            folder is not empty. Nothing was changed.
        LogError: run it again.
    """
    manifest, pipeline = filling.manifest, filling.pipeline
    check_can_fill(filling.checkpoint)
    log = _log_now(parent_log, filling)
    head = _head_of(manifest, log, pipeline)
    records = batches_after(log, head, manifest.record.id)
    if head.rewinding_to:
        raise SavepointError(
            f"a rewind of {pipeline!r} to the savepoint {head.rewinding_to} has not ended: run "
            "that again"
        )
    if later := [record.id.batch_id for record in records if not head.is_rewound(record.id)]:
        raise SavepointError(
            f"the sinks of {pipeline!r} have every batch up to {max(later)}, and the savepoint "
            f"{manifest.name} ends with batch {manifest.batch}: what came after would be delivered "
            "twice. Take a savepoint of now, rewind the sinks to this one, or fork it into other "
            "targets"
        )
    confirm()
    return _go_back(filling, Rewind(manifest, head, records, removals=()), log)


def rewind(
    filling: Filling,
    parent_log: TransactionLog,
    sinks: Mapping[str, AnySink],
    kept: Collection[str] = (),
    confirm: Callable[[], object] = lambda: None,
) -> tuple[str, Rewind]:
    """Take the later batches out of the sinks, and make a checkpoint that continues after it.

    Args:
        filling: the savepoint and the checkpoint.
        parent_log: see `restore`.
        sinks: see `Rewind.of`.
        kept: see `Rewind.of`.
        confirm: see `restore`.

    Returns:
        The new query id, and what was done.

    Raises:
        SavepointError: it is refused, and no sink was changed.
        TakeBackRefusedError: a sink has refused in the middle of it: run it again.
        SinkError: run it again.
        LogError: run it again.
    """
    check_can_fill(filling.checkpoint)
    log = _log_now(parent_log, filling)
    done = Rewind.of(filling.manifest, log, pipeline=filling.pipeline, sinks=sinks, kept=kept)
    done.check()
    confirm()
    return _go_back(filling, done, log), done


def _go_back(filling: Filling, done: Rewind, log: TransactionLog) -> str:
    manifest, pipeline = filling.manifest, filling.pipeline
    query_id = filling.lay_out()
    log = _moved(log, filling.open_log(), pipeline)
    _replace_query(log, done, query_id, filling.checkpoint.location)
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
    filling.bind_to(log)
    return query_id


# -- the log ---------------------------------------------------------------------------------------


def _head_of(manifest: Manifest, log: TransactionLog, pipeline: str) -> Head:
    check_is_of(manifest, pipeline)
    head = log.head(pipeline)
    if head is None:
        raise SavepointError(f"the log {log.address} does not know {pipeline!r}")
    if head.moved_to is not None:
        raise SavepointError(
            f"{pipeline!r} was moved from {log.address} to {head.moved_to}: give the job that log="
        )
    if unfinished := log.unfinished(pipeline):
        raise SavepointError(
            f"{unfinished[0].id} is not finished: run `sparkonce recover` first, with the job and "
            "the checkpoint that it had"
        )
    if log.id_of(pipeline) != manifest.log_id:
        raise SavepointError(
            f"the savepoint {manifest.name} was made with the log {manifest.log}, and "
            f"{log.address} is another one: fork the savepoint"
        )
    return head


def _log_now(parent: TransactionLog, filling: Filling) -> TransactionLog:
    """The log that has the pipeline; an earlier try may have moved it into the new checkpoint."""
    head = parent.head(filling.pipeline)
    has_moved = head is not None and head.moved_to is not None
    if has_moved and place_of_log(parent.address) is not None:
        return _moved(parent, filling.open_log(), filling.pipeline)
    return parent


def _moved(parent: TransactionLog, log: TransactionLog, pipeline: str) -> TransactionLog:
    """The log in which the pipeline goes on; a log in the old checkpoint is closed for good.

    Raises:
        SavepointError: the pipeline was moved there before, and that log is lost.
    """
    if log.log_id == parent.log_id:
        return log
    head = parent.head(pipeline)
    # The move enters the pipeline there before it closes the old place.
    if head is not None and head.moved_to == log.address and log.head(pipeline) is None:
        raise SavepointError(
            f"{pipeline!r} was restored to {head.moved_to} before, and its log is lost there. The "
            f"log {parent.address} does not know the batches since, so they would be delivered "
            "again. If no sink has a batch after the savepoint's, pass --lost to `sparkonce "
            "savepoint restore`"
        )
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
        run_id=f"{OPERATOR}return to {manifest.name}",
        driver=this_driver(),
        started_at=time.time(),
        checkpoint=location,
        rewinding_to=manifest.name if done.removals else "",
    )
    newest = log.newest(name, head.query_id)
    if batches_after(log, head, manifest.record.id) != done.records:
        raise SavepointError(f"{name!r} has continued meanwhile: stop its query, and run it again")
    replace_query(log, head, newest, head_after(head, manifest.record.id, following))
