"""Makes a savepoint of one batch, also while the query runs.

    newest batch that is complete in the log and committed in Spark's checkpoint
        ─► its closure ─► each file is kept ─► manifest

Spark may purge a file meanwhile. Then a newer batch is complete, and is tried instead.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.metadata import version
from typing import Final

from sparkonce import __version__
from sparkonce.errors import SavepointError
from sparkonce.model import TransactionId
from sparkonce.spark_hooks.checkpoint import CheckpointFiles
from sparkonce.spark_hooks.savepoints.closure import closure_of
from sparkonce.spark_hooks.savepoints.gone import FileGoneError
from sparkonce.spark_hooks.savepoints.manifest import Manifest, Stored
from sparkonce.spark_hooks.savepoints.place import NAME, Progress, Savepoints
from sparkonce.txn_log import TransactionLog
from sparkonce.txn_log.record import Head, TransactionRecord
from sparkonce.txn_log.rules import id_of

logger = logging.getLogger("sparkonce")

_TRIES: Final = 4
_ENOUGH: Final = 100
"""Records to look through for the newest complete batch: at most two are unfinished."""

Hold = Callable[[], AbstractContextManager[None]]
"""Holds the query between two batches while the context is entered."""


def create(
    savepoints: Savepoints,
    log: TransactionLog,
    pipeline: str,
    checkpoint: CheckpointFiles,
    *,
    name: str | None = None,
    batch: int | None = None,
    progress: Progress = lambda _kept, _all: None,
    hold: Hold = nullcontext,
) -> Manifest:
    """Make a savepoint.

    Args:
        savepoints: where.
        log: the pipeline's transaction log.
        pipeline: its name.
        checkpoint: of its query, which may be running.
        name: of the savepoint; default: the pipeline's, the batch and the time.
        batch: the last batch that it holds; default: the newest one.
        progress: see `Progress`.
        hold: see `Hold`; used for the last try.

    Raises:
        SavepointError: the batch is not complete, or Spark has purged it; the checkpoint is not the
            pipeline's; or there is a savepoint of this name. Nothing was made.
        LogError: the log, the checkpoint or the place of savepoints cannot be used now.
    """
    _check_name(name)
    head = _head_of(log, pipeline)
    _check_is_of(checkpoint, head, log_id := id_of(head, log.log_id))
    gone: list[str] = []
    for attempt in range(_TRIES):
        with hold() if attempt == _TRIES - 1 else nullcontext():
            record = _complete(log, head, checkpoint, batch)
            try:
                files, settings = _keep(savepoints, checkpoint, record.id.batch_id, progress)
            except FileGoneError as error:
                logger.info("savepoint: Spark has purged %s of %s", error, record.id)
                gone.append(f"{error} of batch {record.id.batch_id}")
                continue
        made_at = time.time()
        manifest = Manifest(
            name=name or _default_name(record, made_at),
            made_at=made_at,
            head=head,
            record=record,
            log_id=log_id,
            log=log.address,
            spark=version("pyspark"),
            sparkonce=__version__,
            settings=settings,
            files=files,
        )
        savepoints.publish(manifest)
        return manifest
    raise _purged(f"no savepoint of {pipeline!r} was made: {checkpoint.location}", gone, batch)


def _purged(what: str, gone: Sequence[str], batch: int | None) -> SavepointError:
    fix = "Spark has purged that batch: take a newer one"
    if batch is None:
        fix = (
            "Spark purges files faster than they can be copied: raise "
            "spark.sql.streaming.minBatchesToRetain, or stop the query with a savepoint"
        )
    return SavepointError(f"{what} lacks {'; '.join(gone)}. {fix}")


def _check_name(name: str | None) -> None:
    """Refuse a name that is no file name everywhere.

    Raises:
        SavepointError: it is none.
    """
    if name is not None and not NAME.fullmatch(name):
        raise SavepointError(
            f"{name!r} is no name for a savepoint: use up to 100 letters, digits, - and _, "
            "beginning with a letter or a digit"
        )


def _head_of(log: TransactionLog, pipeline: str) -> Head:
    head = log.head(pipeline)
    if head is None:
        raise SavepointError(f"{log.address} has no pipeline {pipeline!r}: has its query run yet?")
    return head


def _check_is_of(checkpoint: CheckpointFiles, head: Head, log_id: str) -> None:
    """Refuse a checkpoint that is not the pipeline's own."""
    query_id, binding = checkpoint.query_id(), checkpoint.binding()
    if query_id != head.query_id:
        raise SavepointError(
            f"{checkpoint.location} is the checkpoint of query {query_id}, and {head.pipeline!r} "
            f"is bound to query {head.query_id}: give the location of that one's"
        )
    if binding is None or (binding.log_id, binding.pipeline) != (log_id, head.pipeline):
        raise SavepointError(
            f"{checkpoint.location} does not belong to {head.pipeline!r} and its log, with id "
            f"{log_id}: start its query once, which checks and binds it"
        )


def _complete(
    log: TransactionLog, head: Head, checkpoint: CheckpointFiles, batch: int | None
) -> TransactionRecord:
    """The record of the batch, which is complete and committed; default: the newest such one."""
    committed = checkpoint.committed()
    if committed is None:
        raise SavepointError(f"the checkpoint {checkpoint.location} is not there")
    if batch is not None:
        record = log.find(TransactionId(head.pipeline, head.query_id, batch))
        if record is None or not record.state.is_finished or batch > committed:
            state = "not in the log" if record is None else record.state.value
            raise SavepointError(
                f"batch {batch} of {head.pipeline!r} is {state}, and Spark has committed batch "
                f"{committed}: a savepoint holds a batch that is complete and committed"
            )
        return record
    for record in log.history(head.pipeline, _ENOUGH, head.query_id):
        if record.state.is_finished and record.id.batch_id <= committed:
            return record
    raise SavepointError(
        f"{head.pipeline!r} has no batch yet that is complete and committed by Spark: nothing "
        "would be in the savepoint"
    )


def _keep(
    savepoints: Savepoints, checkpoint: CheckpointFiles, batch: int, progress: Progress
) -> tuple[dict[str, Stored], dict[str, str]]:
    folder = checkpoint.folder
    closure = closure_of(folder, batch)
    number = len(closure.copied) + len(closure.rewritten)
    files: dict[str, Stored] = {}
    for name in closure.copied:
        files[name] = savepoints.keep(name, partial(folder.pieces, name))
        progress(len(files), number)
    for name, text in closure.rewritten.items():
        files[name] = savepoints.keep(name, partial(list, [text.encode()]))
        progress(len(files), number)
    return files, dict(closure.settings)


def _default_name(record: TransactionRecord, made_at: float) -> str:
    stamp = time.strftime("%Y%m%d%H%M%S", time.gmtime(made_at))
    millis = int(made_at % 1 * 1_000)
    return f"{record.id.pipeline}-{record.id.batch_id}-{stamp}{millis:03d}"
