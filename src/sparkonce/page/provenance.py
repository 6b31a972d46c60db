"""Which batch wrote this object, has this transaction id, holds this offset?

    7                           batch 7
    orders:0:250                the batch that holds offset 250 of partition 0 of topic orders
    {"orders":{"0":300}}        the first batch whose source offsets reach these
    anything else               a part of a branch's name, of an object, table or transaction

Offsets only grow, so a bisection finds their batch. Most names contain the batch's number, so the
numbers of a name are tried first. Then a bounded number of batches is read, newest first; the
caller continues where it ended.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from sparkonce.model import BranchId, Committable, TransactionId
from sparkonce.txn_log import TransactionLog
from sparkonce.txn_log.record import Head, TransactionRecord

READ_AT_ONCE: Final = 200
"""How many records one search reads at most, newest first."""

_MOST_QUERIES: Final = 8
_MOST_NUMBERS: Final = 8
_FULL_ID: Final = re.compile(
    r"sparkonce\.[0-9a-f]{16}\.[0-9a-f-]+\.t\d+\.[\w-]+\.p\d+\.a\d+\.b\d+\."
)
_OFFSET: Final = re.compile(r"(?P<path>.*\S):\s*(?P<offset>\d+)")
_OURS: Final = re.compile(r"sparkonce[._]")

Offsets = Mapping[tuple[str, ...], int]
"""Numbers in a source's offsets, by path: ``("orders", "0")`` is partition 0 of a topic."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A batch that was found, and why."""

    record: TransactionRecord
    why: str


@dataclass(frozen=True, slots=True)
class Found:
    """What one search found.

    Attributes:
        hits: newest first.
        read: how many records it looked through one by one.
        query_id: of the query in which it may continue; None when everything was read.
        before: the batch below which it may continue.
    """

    hits: Sequence[Hit]
    read: int = 0
    query_id: str | None = None
    before: int | None = None


def queries(head: Head) -> list[str]:
    """Ids of the query and of earlier ones of the name, newest first."""
    return [head.query_id, *reversed(head.retired)][:_MOST_QUERIES]


def numbers(offset: str) -> Offsets:
    """The numbers in a source's offsets; none if the text is not JSON."""
    try:
        return dict(_numbers(json.loads(offset)))
    except ValueError:
        return {}


def _numbers(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    if isinstance(value, int) and not isinstance(value, bool):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, (*path, str(key)))


def search(
    log: TransactionLog,
    head: Head,
    text: str,
    query_id: str | None = None,
    before: int | None = None,
) -> Found:
    """Find the batches of a pipeline that the text names.

    Args:
        log: the transaction log.
        head: of the pipeline.
        text: what the reader typed.
        query_id: where an earlier search ended; default: begin.
        before: the batch at which it ended.
    """
    if query_id is not None:
        return _read(log, head, text, query_id, before)
    if text.isdecimal():
        return Found(_numbered(log, head, [int(text)], lambda _: "this is the batch's number"))
    is_there = _asked_offsets(text)
    if is_there is not None:
        reached = [hit for q in queries(head) for hit in _reaching(log, head, q, is_there)]
        if reached:
            return Found(reached)
    asked = [int(n) for n in re.findall(r"\d{1,12}", text)]
    direct = _numbered(log, head, asked[-_MOST_NUMBERS:], lambda record: why(record, text))
    if direct and _FULL_ID.search(text):
        return Found(direct)
    rest = _read(log, head, text, head.query_id, before)
    known = {hit.record.id for hit in direct}
    hits = [*direct, *(hit for hit in rest.hits if hit.record.id not in known)]
    return Found(hits, rest.read, rest.query_id, rest.before)


def _numbered(
    log: TransactionLog,
    head: Head,
    batches: Sequence[int],
    reason: Callable[[TransactionRecord], str | None],
) -> list[Hit]:
    hits = []
    for query_id in queries(head):
        for batch in sorted(set(batches), reverse=True):
            record = log.find(TransactionId(head.pipeline, query_id, batch))
            if record is not None and (found := reason(record)) is not None:
                hits.append(Hit(record, found))
    return hits


def _read(log: TransactionLog, head: Head, text: str, query_id: str, before: int | None) -> Found:
    """Look through the next records, and say where the search may continue."""
    records = log.history(head.pipeline, READ_AT_ONCE, query_id, before)
    hits = [Hit(record, found) for record in records if (found := why(record, text)) is not None]
    if len(records) == READ_AT_ONCE:
        return Found(hits, len(records), query_id, records[-1].id.batch_id)
    later = queries(head)
    here = later.index(query_id) if query_id in later else len(later)
    older = next(iter(later[here + 1 :]), None)
    return Found(hits, len(records), older)


# -- offsets ---------------------------------------------------------------------------------------


def _asked_offsets(text: str) -> Callable[[Offsets], bool] | None:
    """Whether a batch that ends with the given offsets has reached what the text asks for."""
    if asked := numbers(text) if text.startswith("{") else {}:
        return lambda ends: all(ends.get(path, -1) >= at for path, at in asked.items())
    match = _OFFSET.fullmatch(text)
    if match is None:
        return None
    path, at = tuple(match["path"].split(":")), int(match["offset"])
    if len(path) > 1 and path[-1].isdecimal():  # Kafka's end offset is the next one to read
        return lambda ends: ends.get(path, -1) > at
    return lambda ends: ends.get(path, -1) >= at


def _reaching(
    log: TransactionLog, head: Head, query_id: str, is_there: Callable[[Offsets], bool]
) -> Iterator[Hit]:
    """The first batch of the query that has reached the offsets, by bisection."""

    def at_most(batch: int) -> TransactionRecord | None:
        return next(iter(log.history(head.pipeline, 1, query_id, batch + 1)), None)

    def reaches(record: TransactionRecord) -> bool:
        return any(is_there(numbers(offset)) for offset in record.offsets)

    found = log.newest(head.pipeline, query_id)
    if found is None or not reaches(found):
        return
    low, high = 0, found.id.batch_id  # the answer is in low..high
    while low < high:
        middle = (low + high) // 2
        record = at_most(middle)
        if record is not None and reaches(record):
            found, high = record, record.id.batch_id
        else:
            low = middle + 1
    is_first = found.id.batch_id > 0 and at_most(found.id.batch_id - 1) is None
    text = "its source offsets are the first to reach it"
    if is_first:
        text += "; the log has forgotten the batches before it, and one of those may hold it"
    yield Hit(found, text)


# -- names -----------------------------------------------------------------------------------------


def why(record: TransactionRecord, text: str) -> str | None:
    """Which of the record's names contains the text, or is in it; None if none does."""
    full = _FULL_ID.search(text)
    branch_id = BranchId.from_name(full[0]) if full else None
    if branch_id is not None and branch_id.batch_id != record.id.batch_id:
        return None
    for name in _names(record):
        # A longer text, such as a URL, may contain a name of ours.
        if text in name or (_OURS.search(name) and len(name) > 20 and name in text):  # noqa: PLR2004
            return name
    return None


def _names(record: TransactionRecord) -> Iterator[str]:
    for committable in (*record.committables(), *record.lost):
        yield from (str(committable.branch_id), committable.branch_id.short)
        yield from filter(None, (committable.text, *_texts(committable)))
    yield from record.branch_names()
    yield from (offset for offset in record.offsets if len(offset) > 1)


def _texts(committable: Committable) -> Iterator[str]:
    pending: list[object] = [dict(committable.payload)]
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, list):
            pending += islice(value, 10_000)
