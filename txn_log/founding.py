"""Puts a pipeline into a log in which it did not begin, as a savepoint does."""

from __future__ import annotations

from collections.abc import Iterable

from sparkonce.errors import SavepointError
from sparkonce.txn_log.base import Store, TransactionLog
from sparkonce.txn_log.record import Head, TransactionRecord


def found(log: TransactionLog, head: Head, records: Iterable[TransactionRecord] = ()) -> None:
    """Write the first head of a pipeline, with records that it begins with. Idempotent.

    Raises:
        SavepointError: the log has the name already, for another query. Nothing was written.
    """

    def write(store: Store) -> None:
        there = store.head(head.pipeline)
        if there is None:
            store.put_head(head)
            for record in records:
                store.put(record)
        elif there.query_id != head.query_id:
            raise SavepointError(
                f"{log.address} has a pipeline {head.pipeline!r} already: give the fork another "
                "name"
            )

    log._write(write)  # noqa: SLF001 - of this package
