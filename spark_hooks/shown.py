"""A pipeline in text, and as a notebook shows it: with its newest batches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from html import escape
from typing import Final

from sparkonce.errors import SparkOnceError
from sparkonce.spark_hooks.settings import Settings
from sparkonce.txn_log import IN_CHECKPOINT, TransactionLog
from sparkonce.txn_log.record import Head, TransactionRecord

_BATCHES: Final = 10


def in_text(settings: Settings, log: TransactionLog | None) -> str:
    """The pipeline in one line.

    Args:
        settings: the pipeline's.
        log: its transaction log; None before a query has shown where it is.
    """
    address = IN_CHECKPOINT if log is None else log.address
    return f"<ExactlyOnce {settings.name!r} -> {list(settings.sinks)}, log {address}>"


def in_html(settings: Settings, log: TransactionLog | None) -> str:
    """The pipeline as HTML. It reads the log, and shows the error if that fails."""
    sinks = "".join(
        f"<li>{escape(sink.name)}: {escape(sink.target)}</li>" for sink in settings.sinks
    )
    batches = "".join(_batches(settings.name, log))
    return f"<p><b>{escape(settings.name)}</b></p><ul>{sinks}</ul>{batches}"


def _batches(name: str, log: TransactionLog | None) -> Iterator[str]:
    if log is None:
        yield "<p>The log is in the checkpoint, and no query has started yet.</p>"
        return
    yield f"<p>Log: {escape(log.address)}</p>"
    try:
        head = log.head(name)
        records = [] if head is None else log.history(name, _BATCHES, head.query_id)
    except SparkOnceError as error:
        yield f"<p>The log cannot be read now: {escape(str(error))}</p>"
        return
    if head is None or not records:
        yield "<p>No batch yet.</p>"
        return
    sinks = list(dict.fromkeys(sink for record in records for sink in record.shares))
    yield "<table><thead><tr><th>batch</th><th>state</th><th>since (UTC)</th>"
    yield "".join(f"<th>rows in {escape(sink)}</th>" for sink in sinks)
    yield "</tr></thead><tbody>"
    for record in records:
        yield _row(record, head, sinks)
    yield "</tbody></table>"


def _row(record: TransactionRecord, head: Head, sinks: Sequence[str]) -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(max(record.times.values())))
    rows = (f"{record.shares[sink].rows:,}" if sink in record.shares else "" for sink in sinks)
    cells = (str(record.id.batch_id), head.state_of(record), since, *rows)
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
