"""Takes pipelines from one transaction log to another.

    target: head, moved_to source ──► finished records ─┐        ┌► the other records ──► head
    source: (all of it is read)                         └► closed: head, moved_to target

Until the source is closed its driver runs on, and nothing but what can never change any more goes
over. Then what is left does, and the head that admits drivers comes last: at no moment does more
than one log admit any. Before its own, the target has a head with token 0, which no driver ever
has: it refuses drivers, and names the copy that may write.

The branches of a pipeline carry the id of the log in which it began, in Kafka, Postgres, S3 and in
its checkpoint. So that id goes along with the pipeline (`Head.log_id`), and they stay valid.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from sparkonce.errors import ConfigurationError, LogUnavailableError
from sparkonce.txn_log.base import Store, TransactionLog
from sparkonce.txn_log.record import Head, TransactionRecord

_ALL = 10**9
_PART_CHARACTERS = 4 << 20
_NOT_YET = 0
"""The token of the head of a pipeline that is being copied here."""


def copy(
    source: TransactionLog, target: TransactionLog, pipeline: str
) -> Sequence[TransactionRecord]:
    """Move a pipeline, with what is unfinished, and fence its driver.

    Idempotent: after any error, call it again. All records are read before the source is closed
    and nearly all are written by then, so that what cannot be copied stays usable where it is.

    Args:
        source: has the pipeline, and refuses it after this.
        target: another log, that does not have it.
        pipeline: its name.

    Returns:
        The records that were moved, newest first.

    Raises:
        ConfigurationError: both are one log, the source does not have the pipeline or has moved it
            elsewhere, or the target has one of that name. Nothing was written.
        LogCorruptError: a record of the source is damaged.
        LogError: call it again.
    """
    if source.log_id == target.log_id:
        raise ConfigurationError(
            f"{source.address} and {target.address} are one log, with id {source.log_id}: name "
            "another one to move to"
        )
    head = _movable(source.head(pipeline), source, target, pipeline)
    records = source.history(pipeline, _ALL)
    here = replace(
        head,
        token=_NOT_YET,
        run_id=f"copy {uuid.uuid4()}",
        log_id=head.log_id or source.log_id,
        moved_to=source.address,
    )
    if not target._write(lambda store: _reserve(store, here, head, target)):  # noqa: SLF001
        return records
    early = [record for record in records if record.state.is_finished]  # so none changes any more
    _put(target, here, early)
    there = {record.id for record in early}
    del early, records  # once is enough for the memory of a long history
    closed = source._write(lambda store: _close(store, pipeline, source, target))  # noqa: SLF001
    records = source.history(pipeline, _ALL)
    _put(target, here, [record for record in records if record.id not in there])

    def open_here(store: Store) -> None:
        _require_reserved(store, here, target)
        store.put_head(replace(closed, log_id=here.log_id, moved_to=None))

    target._write(open_here)  # noqa: SLF001
    return records


def _movable(
    head: Head | None, source: TransactionLog, target: TransactionLog, pipeline: str
) -> Head:
    """The head, if the pipeline is in the source, or was closed there for this very target."""
    if head is None:
        raise ConfigurationError(f"{source.address} does not know the pipeline {pipeline!r}")
    if head.moved_to not in {None, target.address}:
        raise ConfigurationError(
            f"pipeline {pipeline!r} was moved from {source.address} to {head.moved_to} before: "
            "copy it from there"
        )
    return head


def _close(store: Store, pipeline: str, source: TransactionLog, target: TransactionLog) -> Head:
    head = _movable(store.head(pipeline), source, target, pipeline)
    if head.moved_to is None:
        head = replace(head, token=head.token + 1, moved_to=target.address)
        store.put_head(head)
    return head


def _reserve(store: Store, here: Head, head: Head, target: TransactionLog) -> bool:
    """Keep drivers and other copies out of the target; False when it has the pipeline already."""
    standing = store.head(here.pipeline)
    is_this = standing is not None and standing.log_id == here.log_id
    if standing is None or (is_this and standing.token == _NOT_YET):
        store.put_head(here)
        return True
    if is_this and standing.moved_to is None and head.moved_to is not None:
        return False
    raise ConfigurationError(
        f"{target.address} has a pipeline {here.pipeline!r} already"
        + (f", that was moved to {standing.moved_to}" if standing.moved_to else "")
        + ": copy to a log that never had one of this name"
    )


def _put(target: TransactionLog, here: Head, records: Iterable[TransactionRecord]) -> None:
    for part in _parts(records):

        def put(store: Store, part: Sequence[TransactionRecord] = part) -> None:
            _require_reserved(store, here, target)
            for record in part:
                store.put(record)

        target._write(put)  # noqa: SLF001


def _parts(records: Iterable[TransactionRecord]) -> Iterator[list[TransactionRecord]]:
    """No write is larger than a server takes at once, and in its time, by more than a record."""
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
    standing = store.head(here.pipeline)
    if standing is None or (standing.token, standing.run_id) != (_NOT_YET, here.run_id):
        raise LogUnavailableError(
            f"another copy of pipeline {here.pipeline!r} to {target.address} has begun since, or "
            "is done, and nothing more was written: copy again once it has ended"
        )
