"""Goes back to a batch in the log: later ones no longer count, and a new query follows.

    batches_after ─► the sinks are looked at ─► replace_query ─► rows are taken back ─► end_rewind
                                                 └► the old queries never run again

The records stay: they name what must be taken out of the sinks. `Head.rewound` shows that they no
longer count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from sparkonce.errors import SavepointError
from sparkonce.model import TransactionId
from sparkonce.txn_log.base import Store, TransactionLog
from sparkonce.txn_log.identity import next_batch
from sparkonce.txn_log.record import Head, TransactionRecord

_ALL: Final = 10**9


def batches_after(
    log: TransactionLog, head: Head, last: TransactionId
) -> Sequence[TransactionRecord]:
    """Every batch that the pipeline has delivered after `last`, the newest first.

    Those that an earlier rewind has taken back are among them.

    Raises:
        SavepointError: the log does not have all of them, or `last` is not the pipeline's past.
    """
    queries = _queries_since(head, last)
    found: list[TransactionRecord] = []
    for query_id in reversed(queries):
        above = last.batch_id if query_id == last.query_id else -1
        records = log.history(head.pipeline, _ALL, query_id)
        found += [r for r in records if r.state.is_finished and r.id.batch_id > above]
    newest = next_batch(log.newest(head.pipeline, head.query_id), head) - 1
    there = sorted(record.id.batch_id for record in found if not head.is_rewound(record.id))
    if there != list(range(last.batch_id + 1, newest + 1)):
        raise SavepointError(
            f"the log {log.address} lacks records of the batches {last.batch_id + 1} to {newest} "
            f"of {head.pipeline!r} (retain=), so what they delivered is not known: fork the "
            "savepoint into other targets"
        )
    return found


def replace_query(
    log: TransactionLog, seen: Head, newest: TransactionRecord | None, following: Head
) -> None:
    """Write the head of the query that follows, if nothing has changed since `seen`.

    Args:
        log: has the pipeline.
        seen: the head for which the batches were checked.
        newest: the record of its highest batch then.
        following: see `head_after`.

    Raises:
        SavepointError: a driver has continued. Nothing was written.
    """
    name, query_id = seen.pipeline, seen.query_id

    def write(store: Store) -> None:
        head = store.head(name)
        if head == following:  # an earlier try of this call
            return
        if head != seen or store.unfinished(name) or store.newest(name, query_id) != newest:
            raise SavepointError(
                f"{name!r} has continued meanwhile, and nothing was changed: stop its query, and "
                "run the command again"
            )
        store.put_head(following)

    log._write(write)  # noqa: SLF001 - of this package


def end_rewind(log: TransactionLog, pipeline: str, query_id: str) -> None:
    """Note that every sink has given its rows back; nothing if a later start or rewind came."""

    def write(store: Store) -> None:
        head = store.head(pipeline)
        if head is not None and head.query_id == query_id and head.rewinding_to:
            store.put_head(replace(head, rewinding_to=""))

    log._write(write)  # noqa: SLF001 - of this package


def head_after(head: Head, last: TransactionId, following: Head) -> Head:
    """The head of the query that follows `last` in place of the present one.

    Args:
        head: as it is.
        last: the last batch that counts.
        following: has the new query id, run id, driver, time and checkpoint, and what it goes to.
    """
    ended = dict.fromkeys(_queries_since(head, last), last.batch_id)
    return replace(
        following,
        token=head.token + 1,
        first_batch=last.batch_id + 1,
        retired=(*head.retired, head.query_id),
        rewound={**head.rewound, **ended},
    )


def _queries_since(head: Head, last: TransactionId) -> list[str]:
    """The queries that had the pipeline from `last` on, each of which began with a rewind."""
    queries = [*head.retired, head.query_id]
    if last.query_id not in queries:
        raise SavepointError(
            f"the savepoint is of query {last.query_id} of {head.pipeline!r}, which this log does "
            "not know: fork the savepoint"
        )
    since = queries[queries.index(last.query_id) :]
    if replaced := [query_id for query_id in since[:-1] if query_id not in head.rewound]:
        raise SavepointError(
            f"{head.pipeline!r} was bound to another checkpoint (replaces=) after its query "
            f"{replaced[0]}, whose batches have other numbers: fork the savepoint"
        )
    if head.is_rewound(last):
        raise SavepointError(
            f"a rewind went back to batch {head.rewound[last.query_id]}, and the savepoint ends "
            f"with batch {last.batch_id}, which it has taken back: fork the savepoint"
        )
    return since
