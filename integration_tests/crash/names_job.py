"""Prepares, or commits, one fixed branch of each sink, under any release.

    PYTHONPATH=TREE/src:TREE python -P names_job.py prepare|commit CONFIG.json COMMITTABLES.json

It uses only verbs that both releases have, so a test can compare the names that an outsider sees.
CONFIG holds each sink's `kind`, `target` and `settings`, and the `columns` of its rows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa

from sparkonce import sinks
from sparkonce.model import DRIVER_ATTEMPT, BranchId, Committable, Owner

OWNER = Owner("0123456789abcdef", "11111111-2222-3333-4444-555555555555")
TEXTS = pa.array(["a", "b"])
VALUES = {"day": TEXTS, "name": TEXTS, "value": TEXTS}


def branch(sink: str, attempt: int) -> BranchId:
    return BranchId(OWNER, batch_id=7, token=3, sink=sink, write_pass=0, attempt=attempt)


def prepare(sink: Any, columns: list[str]) -> list[Any]:
    """Prepare a batch by two tasks and the driver's vote; return the committables as JSON."""
    tasks = {}
    for attempt in (5, 6):
        values = {**VALUES, "id": pa.array([attempt, attempt + 10])}
        tasks[attempt] = pa.RecordBatch.from_pydict({name: values[name] for name in columns})
    sink.validate(tasks[5].schema)
    committables = []
    for attempt, rows in tasks.items():
        handle = sink.beginTransaction(branch(sink.name, attempt))
        sink.write(handle, rows)
        committables.append(sink.preCommit(handle))
    vote = next(
        (getattr(sink, name) for name in ("vote", "prepareBatch") if hasattr(sink, name)),
        lambda _branch_id, prepared: prepared,  # a sink that does not vote
    )
    voted = vote(branch(sink.name, DRIVER_ATTEMPT), committables)
    return [committable.to_json() for committable in voted]


def main(step: str, config: list[dict[str, Any]], path: Path) -> None:
    for sink in config:
        if "connection" in sink["settings"]:
            sink["settings"]["connection"] = sinks.S3Connection(**sink["settings"]["connection"])
    made = {
        sink["settings"]["name"]: getattr(sinks, sink["kind"])(*sink["target"], **sink["settings"])
        for sink in config
    }
    columns = {sink["settings"]["name"]: sink["columns"] for sink in config}
    if step == "prepare":
        found = {name: prepare(sink, columns[name]) for name, sink in made.items()}
        path.write_text(json.dumps(found))
    else:
        for name, committables in json.loads(path.read_text()).items():
            for committable in committables:
                made[name].commit(Committable.from_json(committable))
    for sink in made.values():
        sink.close()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3]))
