"""Moves a pipeline from one transaction log to another.

    target: head, moved_to source ──► finished records ─┐        ┌► the other records ──► head
    source: (all of it is read)                         └► closed: head, moved_to target

Until the source is closed, its driver continues to run, and the move copies only records that can
never change. Then it copies the other records, and last the head that admits drivers. So both logs
never admit drivers at the same time. Until the end, the target's head has token 0, which no driver
ever holds. That head refuses drivers, and names the copy that may write.

The branches of a pipeline carry the id of the log in which the pipeline began; so does its
checkpoint. That id moves along with the pipeline (`Head.log_id`), so all names stay valid.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from sparkonce.errors import ConfigurationError, LogUnavailableError
from sparkonce.model import TransactionId
from sparkonce.txn_log.base import Store, TransactionLog
from sparkonce.txn_log.record import OPERATOR, Head, TransactionRecord

_ALL = 10**9
_PART_CHARACTERS = 4 << 20
_NOT_YET = 0
"""The token in the target's head while a pipeline is being copied."""


def copy(
    source: TransactionLog, target: TransactionLog, pipeline: str
) -> Sequence[TransactionRecord]:
    """Move a pipeline with its unfinished transactions, and fence its driver.

    Idempotent: after any error, call it again. The move reads all records, and writes nearly all of
    them, before it closes the source. So a pipeline that cannot be copied stays usable there.

    Args:
        source: the log that has the pipeline; it refuses the pipeline's drivers afterwards.
        target: another log, which does not have the pipeline.
        pipeline: its name.

    Returns:
        The records that were moved, newest first.

    Raises:
        ConfigurationError: both are the same log; the source does not have the pipeline, or has
            moved it elsewhere; or the target has a pipeline of that name. Nothing was written.
        LogCorruptError: a record of the source is damaged.
        LogError: call it again.
    """
    if source.log_id == target.log_id:
        raise ConfigurationError(
            f"{source.address} and {target.address} are the same log, with id {source.log_id}: "
            "name another log as the target"
        )
    head = _movable(source.head(pipeline), source, target, pipeline)
    records = source.history(pipeline, _ALL)
    here = _head_of_copy(head, source)
    if not target._write(lambda store: _reserve(store, here, head, target)):  # noqa: SLF001
        return records
    there = _put_finished(target, here, records)
    del records  # a long history is in memory only once
    closed = source._write(lambda store: _close(store, pipeline, source, target))  # noqa: SLF001
    records = source.history(pipeline, _ALL)
    _put(target, here, [record for record in records if record.id not in there])
    target._write(lambda store: _open(store, here, closed, target))  # noqa: SLF001
    return records


def _head_of_copy(head: Head, source: TransactionLog) -> Head:
    """The target's head during the copy: it refuses drivers, and names this copy."""
    return replace(
        head,
        token=_NOT_YET,
        run_id=f"copy {uuid.uuid4()}",
        log_id=head.log_id or source.log_id,
        moved_to=source.address,
    )


def _put_finished(
    target: TransactionLog, here: Head, records: Iterable[TransactionRecord]
) -> set[TransactionId]:
    """Copy the records that never change again, and return their ids."""
    early = [record for record in records if record.state.is_finished]
    _put(target, here, early)
    return {record.id for record in early}


def _movable(
    head: Head | None, source: TransactionLog, target: TransactionLog, pipeline: str
) -> Head:
    """The head, if the pipeline is in the source, or was closed there for the same target."""
    if head is None:
        raise ConfigurationError(f"{source.address} has no pipeline {pipeline!r}")
    if head.moved_to not in {None, target.address}:
        raise ConfigurationError(
            f"pipeline {pipeline!r} was moved from {source.address} to {head.moved_to} before: "
            "copy it from there"
        )
    return head


def _close(store: Store, pipeline: str, source: TransactionLog, target: TransactionLog) -> Head:
    head = _movable(store.head(pipeline), source, target, pipeline)
    if head.moved_to is None:
        head = replace(
            head,
            token=head.token + 1,
            run_id=f"{OPERATOR}move to {target.address}",
            # Without its start time: `recover` would see that this process is gone, and would not
            # ask before it fences the driver, which may still run.
            driver=f"{socket.gethostname()}:{os.getpid()}",
            started_at=time.time(),
            moved_to=target.address,
        )
        store.put_head(head)
    return head


def _open(store: Store, here: Head, closed: Head, target: TransactionLog) -> None:
    _require_reserved(store, here, target)
    store.put_head(replace(closed, log_id=here.log_id, moved_to=None))


def _reserve(store: Store, here: Head, head: Head, target: TransactionLog) -> bool:
    """Keep drivers and other copies out of the target; False if the pipeline is there already."""
    found = store.head(here.pipeline)
    is_this = found is not None and found.log_id == here.log_id
    if found is None or (is_this and found.token == _NOT_YET):
        store.put_head(here)
        return True
    if is_this and found.moved_to is None and head.moved_to is not None:
        return False
    raise ConfigurationError(
        f"{target.address} already has a pipeline {here.pipeline!r}"
        + (f", which was moved to {found.moved_to}" if found.moved_to else "")
        + ": copy to a log that never had a pipeline of this name"
    )


def _put(target: TransactionLog, here: Head, records: Iterable[TransactionRecord]) -> None:
    for part in _parts(records):

        def put(store: Store, part: Sequence[TransactionRecord] = part) -> None:
            _require_reserved(store, here, target)
            for record in part:
                store.put(record)

        target._write(put)  # noqa: SLF001


def _parts(records: Iterable[TransactionRecord]) -> Iterator[list[TransactionRecord]]:
    """Split the records into parts that a server accepts in one write."""
    part: list[TransactionRecord] = []
    size = 0
    for record in records:
        part.append(record)
        size += len(record.encode())
        if size >= _PART_CHARACTERS:
            yield part
            part, size = [], 0
    if part:
        yield part


def _require_reserved(store: Store, here: Head, target: TransactionLog) -> None:
    found = store.head(here.pipeline)
    if found is None or (found.token, found.run_id) != (_NOT_YET, here.run_id):
        raise LogUnavailableError(
            f"another copy of pipeline {here.pipeline!r} to {target.address} has started or "
            "finished meanwhile; this one has stopped writing: copy again once the other finishes"
        )
