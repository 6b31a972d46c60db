"""Logs with batches in every state, and a browser that follows every link."""

from __future__ import annotations

import html
import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from starlette.testclient import TestClient

from sparkonce.model import BranchId, Committable, TransactionId
from sparkonce.page.app import make_app
from sparkonce.page.source import Source
from sparkonce.testing.log_cases import claim, part
from sparkonce.txn_log import TransactionLog
from sparkonce.txn_log.record import Incarnation, Share, State, TransactionRecord
from sparkonce.txn_log.settlement import Ruling, Settlement

BASE = "http://localhost"


def batch_record(
    incarnation: Incarnation, batch: int, *, files: str = "files", topic: str = "orders"
) -> TransactionRecord:
    """A batch of files and of Kafka; it has read 100 offsets of each of two partitions."""
    by = BranchId(incarnation.owner, batch, incarnation.token, files, 0, 2 * batch)
    kafka = BranchId(incarnation.owner, batch, incarnation.token, "kafka", 0, 7)
    written = Committable(by, {"file": f"{by}parquet"}, text=f"file /srv/out/{by}parquet")
    sent = Committable(
        kafka, {"transactional_id": kafka.name, "producer": 9}, safe_until=4e9, text=kafka.name
    )
    ends = {topic: {"0": 100 * (batch + 1), "1": 1000 + 100 * (batch + 1)}}
    tasks = tuple(replace(part(n), branch=by.name, partition=n) for n in (1200, 34))
    return TransactionRecord(
        id=TransactionId(incarnation.pipeline, incarnation.owner.query_id, batch),
        token=incarnation.token,
        state=State.DECIDED,
        offsets=(json.dumps(ends),),
        shares={
            files: Share("folder /srv/out", tasks, (written,)),
            "kafka": Share("topic out", (replace(part(8), branch=kafka.name),), (sent,)),
        },
        times={State.DECIDED: 1.7e9 + batch},
    )


def fill(log: TransactionLog, pipeline: str = "orders", **names: str) -> Incarnation:
    """Five batches: complete, prepared first and complete, settled, amended, decided."""
    incarnation = log.begin(claim(pipeline=pipeline, sinks={"kafka": "topic out"}))
    token = incarnation.token
    records = [batch_record(incarnation, n, **names) for n in range(5)]
    log.complete(log.decide(records[0]), token)
    log.complete(log.decide(log.prepare(records[1]), token), token)
    decided = log.decide(records[2])
    (branch, _) = decided.committables()
    ruling = Settlement(str(branch.branch_id), Ruling.ABORTED, "ann@host", "no disk", 7.5, token)
    log.complete(log.settle(decided.id, [ruling], token), token)
    decided = log.decide(records[3])
    name, share = next(iter(decided.shares.items()))
    (lost,) = share.committables
    again = replace(lost, branch_id=replace(lost.branch_id, write_pass=1))
    amended = decided.amended({name: replace(share, committables=(again,))}, [lost])
    log.complete(log.amend(amended, token), token)
    log.decide(records[4])
    return incarnation


def fill_far(path: Path, incarnation: Incarnation, batches: int) -> None:
    """Complete batches, written into the tables of SQLite in one transaction."""
    times = {State.DECIDED: 1.7e9, State.COMPLETE: 1.7e9 + 0.25}
    records = (
        replace(batch_record(incarnation, n), state=State.COMPLETE, times=times)
        for n in range(batches)
    )
    with closing(sqlite3.connect(path)) as database, database:
        database.executemany(
            "INSERT INTO sparkonce_records VALUES (?, ?, ?, ?, ?)",
            (
                (r.id.pipeline, r.id.query_id, r.id.batch_id, r.state.value, r.encode())
                for r in records
            ),
        )


def browser(source: Source, token: str | None = None, base: str = BASE) -> TestClient:
    return TestClient(make_app(source, token), base_url=base, follow_redirects=False)


def links(text: str) -> list[str]:
    return [html.unescape(link) for link in re.findall(r'href="([^"]+)"', text)]


def text_of(page: str) -> str:
    """What a reader sees, with single spaces."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).split())


def walk(client: TestClient, most: int = 300) -> Iterator[tuple[str, int, str]]:
    """Every page that links lead to, from the first one on: address, status, content."""
    pending, seen = ["/"], {"/"}
    while pending and len(seen) < most:
        address = pending.pop(0)
        answer = client.get(address)
        yield address, answer.status_code, answer.text
        for link in links(answer.text):
            if link.startswith("/") and link not in seen:
                seen.add(link)
                pending.append(link)


__all__ = ["batch_record", "browser", "fill", "fill_far", "links", "text_of", "walk"]
