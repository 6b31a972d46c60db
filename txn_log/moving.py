"""Takes pipelines from one transaction log to another.

    source: head ──moved_to──► nothing is written here any more, drivers are told where it went
    target:                    all records and the head, in one write

The branches of a pipeline carry the id of the log in which it began, in Kafka, Postgres, S3 and in
its checkpoint. So that id goes along with the pipeline (`Head.log_id`), and they stay valid.

The source is closed first. After a crash between the two writes the pipeline is in neither, no
driver can start, and `copy` again finishes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sparkonce.errors import ConfigurationError
from sparkonce.txn_log.base import Store, TransactionLog
from sparkonce.txn_log.record import Head, TransactionRecord

_ALL = 10**9


def copy(
    source: TransactionLog, target: TransactionLog, pipeline: str
) -> Sequence[TransactionRecord]:
    """Move a pipeline, with what is unfinished, and fence its driver.

    Idempotent: after any error, call it again.

    Args:
        source: has the pipeline, and refuses it after this.
        target: another log, that does not have it.
        pipeline: its name.

    Returns:
        The records that are in the target now, newest first.

    Raises:
        ConfigurationError: both are one log, the source does not have the pipeline or has moved it
            elsewhere, or the target has one of that name. Nothing was written.
        LogError: call it again.
    """
    if source.log_id == target.log_id:
        raise ConfigurationError(
            f"{source.address} and {target.address} are one log, with id {source.log_id}: name "
            "another one to move to"
        )
    _check_target(target.head(pipeline), source, target, pipeline)
    head = source._write(lambda store: _close(store, pipeline, source, target))  # noqa: SLF001
    records = source.history(pipeline, _ALL)
    here = replace(head, log_id=head.log_id or source.log_id, moved_to=None)

    def put(store: Store) -> None:
        standing = store.head(pipeline)
        _check_target(standing, source, target, pipeline)
        if standing is None:
            for record in records:
                store.put(record)
            store.put_head(here)

    target._write(put)  # noqa: SLF001
    return records


def _close(store: Store, pipeline: str, source: TransactionLog, target: TransactionLog) -> Head:
    head = store.head(pipeline)
    if head is None:
        raise ConfigurationError(f"{source.address} does not know the pipeline {pipeline!r}")
    if head.moved_to not in {None, target.address}:
        raise ConfigurationError(
            f"pipeline {pipeline!r} was moved from {source.address} to {head.moved_to} before: "
            "copy it from there"
        )
    if head.moved_to is None:
        head = replace(head, token=head.token + 1, moved_to=target.address)
        store.put_head(head)
    return head


def _check_target(
    standing: Head | None, source: TransactionLog, target: TransactionLog, pipeline: str
) -> None:
    """It is new there, or it is this one: then an earlier call has come as far as that."""
    moved = source.head(pipeline)
    if standing is None or moved is None:
        return
    is_this = standing.log_id == (moved.log_id or source.log_id) and moved.moved_to is not None
    if not is_this or standing.moved_to is not None:
        raise ConfigurationError(
            f"{target.address} has a pipeline {pipeline!r} already"
            + (f", that was moved to {standing.moved_to}" if standing.moved_to else "")
            + ": copy to a log that never had one of this name"
        )
