"""What each page shows, as values for its template."""

from __future__ import annotations

from typing import Any, Final

from sparkonce import facts
from sparkonce.errors import SavepointError
from sparkonce.facts import Facts
from sparkonce.model import TransactionId
from sparkonce.page.provenance import Found, numbers, queries, search
from sparkonce.page.source import Source, ways_out
from sparkonce.page.timeline import duration, took, waterfall
from sparkonce.protocol.operating import head_of
from sparkonce.txn_log.record import Head, TransactionRecord

BATCHES: Final = 50
PIPELINES: Final = 20
SAVEPOINTS: Final = 50
BRANCHES: Final = 200
"""How many of each one page shows."""


def index(source: Source, page: int) -> Facts:
    """Every pipeline, in short."""
    names = list(source.names())
    shown = names[page * PIPELINES : (page + 1) * PIPELINES]
    heads = [(name, source.log.head(name)) for name in shown]
    return {
        "pipelines": [facts.pipeline(source.log, head) for _, head in heads if head is not None],
        "unknown": [name for name, head in heads if head is None],
        "log_id": source.log.log_id,
        "page": page,
        "has_more": len(names) > (page + 1) * PIPELINES,
    }


def pipeline(source: Source, name: str, query_id: str | None, before: int | None) -> Facts:
    """One pipeline: its state, what is unfinished, and a page of its batches."""
    head = head_of(source.log, name)
    of = query_id or head.query_id
    found = source.log.history(name, BATCHES + 1, of, before)
    records, has_older = found[:BATCHES], len(found) > BATCHES
    whole = max(map(duration, records), default=0.0)
    first = records[0].id.batch_id if records else -1
    newest = source.log.newest(name, of)
    status = facts.pipeline(source.log, head)
    return {
        "pipeline": status,
        "ways_out": [ways_out(batch, source.job) for batch in status["unfinished"]],
        "batches": [_row(record, head, whole) for record in records],
        "whole": took(whole),
        "query_id": of,
        "queries": queries(head),
        "older": records[-1].id.batch_id if has_older else None,
        "newer": first + 1 + BATCHES if newest and newest.id.batch_id > first else None,
    }


def _row(record: TransactionRecord, head: Head, whole: float) -> Facts:
    found = facts.record(record, head)
    counts = [sink["rows"] for sink in found["sinks"]]
    return found | {
        "rows": "/".join(f"{n:,}" for n in (counts if len(set(counts)) > 1 else counts[:1])) or "0",
        "bytes": sum(sink["bytes"] for sink in found["sinks"]),
        "branches": sum(len(sink["branches"]) for sink in found["sinks"]),
        "since": found["times"].get(record.state.value) or min(found["times"].values()),
        "spans": waterfall(record, whole=whole),
        "took": took(duration(record)) if len(record.times) > 1 else None,
    }


def batch(source: Source, name: str, query_id: str, number: int, first: int) -> Facts | None:
    """One batch, from its source to what its branches are; None if the log has no such batch."""
    head = head_of(source.log, name)
    record = source.log.find(TransactionId(name, query_id, number))
    if record is None:
        return None
    before = next(iter(source.log.history(name, 1, query_id, number)), None)
    is_next = before is not None and before.id.batch_id == number - 1
    found = facts.record(record, head)
    found["times"] = dict(sorted(found["times"].items(), key=lambda item: record.times[item[0]]))
    most = max((len(sink["branches"]) for sink in found["sinks"]), default=0)
    for sink in found["sinks"]:
        sink["number"] = len(sink["branches"])
        sink["branches"] = sink["branches"][first : first + BRANCHES]
    return {
        "batch": found,
        "ways_out": ways_out(facts.record(record), source.job),
        "spans": waterfall(record, before if is_next else None),
        "ranges": ranges(record, before if is_next else None),
        "before": None if before is None else before.id.batch_id,
        "after": number + 1 if source.log.find(TransactionId(name, query_id, number + 1)) else None,
        "first": first,
        "next_branches": first + BRANCHES if most > first + BRANCHES else None,
    }


def ranges(record: TransactionRecord, before: TransactionRecord | None) -> list[Facts]:
    """What the batch read of each partition of each source that has numbers as offsets."""
    found = []
    for n, offset in enumerate(record.offsets):
        has_before = before is not None and n < len(before.offsets)
        starts = numbers(before.offsets[n]) if before is not None and has_before else {}
        for path, end in numbers(offset).items():
            start = starts.get(path)
            found.append(
                {
                    "source": n,
                    "path": ":".join(path),
                    "start": start,
                    "end": end,
                    "number": None if start is None else end - start,
                    "search": f"{':'.join(path)}:{end if start is None else start}",
                }
            )
    return found


def search_page(
    source: Source, name: str, text: str, query_id: str | None, before: int | None
) -> Facts:
    """Answers to a search in one pipeline."""
    head = head_of(source.log, name)
    found = search(source.log, head, text, query_id, before) if text else Found([])
    return {
        "hits": [(facts.record(hit.record, head), hit.why) for hit in found.hits],
        "read": found.read,
        "continue_in": found.query_id,
        "continue_before": found.before,
    }


def savepoints(source: Source, page: int) -> Facts:
    """The savepoints, by name; a damaged one shows what is wrong with it."""
    if source.savepoints is None:
        return {"address": None, "savepoints": [], "page": 0, "has_more": False}
    names = source.savepoints.names()
    shown: list[dict[str, Any]] = []
    for name in names[page * SAVEPOINTS : (page + 1) * SAVEPOINTS]:
        try:
            found = facts.savepoint(source.savepoints.read(name))
        except SavepointError as error:
            found = {"name": name, "error": str(error)}
        shown.append(found)
    return {
        "address": source.savepoints.address,
        "savepoints": shown,
        "page": page,
        "has_more": len(names) > (page + 1) * SAVEPOINTS,
    }
