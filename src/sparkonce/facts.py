"""What the log and the sinks know, as JSON values: for `--json`, for the screen, for the page.

Nothing here knows a vendor: a committable carries its own line of text.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

from sparkonce.model import Committable
from sparkonce.protocol import keys
from sparkonce.protocol.operating import Orphan
from sparkonce.protocol.processes import is_running
from sparkonce.protocol.taking_back import Removal
from sparkonce.txn_log import TransactionLog
from sparkonce.txn_log.identity import has_finished
from sparkonce.txn_log.record import Head, Share, State, TransactionRecord

if TYPE_CHECKING:
    from sparkonce.spark_hooks.savepoints import Manifest

Facts: TypeAlias = "dict[str, Any]"


def utc(at: float | None) -> str | None:
    """Unix time in seconds as ISO 8601."""
    return None if at is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def status(log: TransactionLog, heads: Iterable[Head]) -> Facts:
    """Every pipeline: which driver holds it, what is complete, what is not."""
    pipelines = [pipeline(log, head) for head in heads]
    return {"log": log.address, "log_id": log.log_id, "pipelines": pipelines}


def pipeline(log: TransactionLog, head: Head) -> Facts:
    unfinished = log.unfinished(head.pipeline)
    states = {record.state for record in unfinished}
    last = log.newest(head.pipeline, head.query_id)
    # 100 records reach past the unfinished ones.
    finished = [found for found in newest(log, head, 100) if found.state.is_finished]
    abandoned = last.id.batch_id if last is not None and last.state is State.ABANDONED else None
    return {
        "name": head.pipeline,
        "moved_to": head.moved_to,
        "rewinding_to": head.rewinding_to or None,
        "state": "moved"
        if head.moved_to is not None
        else "rewinding"
        if head.rewinding_to
        else "in doubt"
        if State.PREPARED in states
        else "unfinished"
        if states
        else "abandoned"
        if abandoned is not None
        else "fine",
        "query_id": head.query_id,
        "checkpoint": head.checkpoint or None,
        "is_of_batch_jobs": head.query_id == keys.query_of(head.pipeline),
        "holder": holder(log, head),
        "last_complete": next((record(found) for found in finished if head.counts(found.id)), None),
        "starts_since_last_batch": 0 if has_finished(head, finished) else head.starts,
        "abandoned": abandoned,
        "unfinished": [record(found) for found in unfinished],
    }


def holder(log: TransactionLog, head: Head) -> Facts:
    """What holds the token: a driver, or an operator's command; and the latest write of a batch."""
    by_operator = head.is_of_operator
    newest = log.newest(head.pipeline, head.query_id)
    wrote = None if newest is None else max(newest.times.values())
    return {
        "token": head.token,
        "by": "operator" if by_operator else "driver",
        "driver": head.driver,
        "run_id": head.run_id,
        "since": utc(head.started_at),
        "last_write": utc(wrote),
        "is_running": None if by_operator else is_running(head.driver),
    }


def newest(log: TransactionLog, head: Head, limit: int) -> list[TransactionRecord]:
    """The query's records, highest batch first; then those of each earlier query of the name."""
    found: list[TransactionRecord] = []
    for query_id in (head.query_id, *reversed(head.retired)):
        if len(found) < limit:
            found += log.history(head.pipeline, limit - len(found), query_id)
    return found


def record(found: TransactionRecord, head: Head | None = None) -> Facts:
    """One batch: offsets or key, rows, branches, what they are in the targets, times.

    With the head, the state of a batch that a rewind took out of the sinks is "rewound".
    """
    return {
        "batch": found.id.batch_id,
        "pipeline": found.id.pipeline,
        "query_id": found.id.query_id,
        "state": found.state.value if head is None else head.state_of(found),
        "token": found.token,
        "revision": found.revision,
        "offsets": list(found.offsets),
        "key": keys.key_of(found),
        "times": {state.value: utc(at) for state, at in found.times.items()},
        "sinks": [_share(found, name, share) for name, share in found.shares.items()],
        "lost": [c.branch_id.short for c in found.lost],
        "settled": [
            {**s.to_json(), "ruling": s.ruling.value, "at": utc(s.at)} for s in found.settled
        ],
    }


def _share(found: TransactionRecord, name: str, share: Share) -> Facts:
    return {
        "name": name,
        "target": share.target,
        "rows": share.rows,
        "bytes": share.bytes,
        "branches": [
            {
                "branch": c.branch_id.short,
                "full": str(c.branch_id),
                "rows": share.rows_of(c),
                "safe_until": utc(c.safe_until),
                "ruling": None if (ruling := found.ruling(c)) is None else ruling.value,
                "stands_for": stands_for(c),
            }
            for c in share.committables
        ],
    }


def stands_for(committable: Committable) -> list[str]:
    """What a branch is in the external system, in lines for people.

    A sink describes its branches itself. Records of older versions, and sinks that describe
    nothing, show the payload, which never holds a secret.
    """
    if committable.text:
        return [committable.text]
    return [f"{key} {value}" for key, value in committable.payload.items()]


def orphan(found: Orphan) -> Facts:
    branch_id = found.branch.branch_id
    return {
        "sink": found.sink.name,
        "target": found.sink.target,
        "branch": branch_id.short,
        "full": branch_id.name if branch_id.batch_id is None else str(branch_id),
        "batch": branch_id.batch_id,
        "token": branch_id.token,
        "may_be_written": found.may_be_written,
        "is_committed": found.is_committed,
    }


def removal(found: Removal) -> Facts:
    """What a rewind does to one sink."""
    return {
        "sink": found.name,
        "target": found.target,
        "batches": list(found.batches),
        "branches": [str(committable.branch_id) for committable, _ in found.branches],
        "rows": found.rows,
        "files": list(found.names),
        "kept": found.is_kept,
        "refusal": found.refusal,
    }


def savepoint(manifest: Manifest) -> Facts:
    return {
        "name": manifest.name,
        "pipeline": manifest.head.pipeline,
        "batch": manifest.batch,
        "made_at": utc(manifest.made_at),
        "query_id": manifest.head.query_id,
        "checkpoint": manifest.head.checkpoint,
        "log": manifest.log,
        "sinks": dict(manifest.head.sinks),
        "files": len(manifest.files),
        "bytes": manifest.bytes,
        "spark": manifest.spark,
        "sparkonce": manifest.sparkonce,
    }
