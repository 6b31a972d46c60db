"""Log records and branch names as the release before writes them, as JSON on standard output.

    PYTHONPATH=TREE/src:TREE python -P write_release_before.py > release_before_records.json

TREE is the unpacked release_before.tar.xz. The committables in the records are those that the
sinks of that release returned (release_before_committables.json).
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparkonce.model import DRIVER_ATTEMPT, BranchId, Committable, Owner, TransactionId
from sparkonce.txn_log.record import (
    Fingerprint,
    Head,
    Part,
    Share,
    State,
    TransactionRecord,
)
from sparkonce.txn_log.settlement import Ruling, Settlement

QUERY = "11111111-2222-3333-4444-555555555555"
OWNERS = (Owner("0123456789abcdef", QUERY), Owner("fedcba9876543210", "0-a"))
BRANCHES = [
    BranchId(owner, batch_id, token, sink, write_pass, attempt)
    for owner in OWNERS
    for batch_id, token, sink, write_pass, attempt in [
        (0, 1, "kafka", 0, 0),
        (42, 17, "to_Postgres-2", 3, 65535),
        (10**9, 10**6, "s" * 32, 12, DRIVER_ATTEMPT),
        (None, 2, "kafka", 0, 5),
    ]
]


def share(committables: list[dict[str, Any]]) -> Share:
    found = tuple(map(Committable.from_json, committables))
    parts = tuple(
        Part(number, c.branch_id.name, 64, Fingerprint("sum/1", 2, 2**64 - number - 1))
        for number, c in enumerate(found)
    )
    return Share("target of the sink", parts, found)


def records() -> dict[str, str]:
    """A record of each state, with every sink's committables in it."""
    path = Path(__file__).with_name("release_before_committables.json")
    shares = {name: share(found) for name, found in json.loads(path.read_text()).items()}
    new = TransactionRecord(
        TransactionId("orders", QUERY, 7), 3, State.PREPARED, ('{"logOffset":7}', "{}"), shares
    )
    prepared = new.moved(State.PREPARED, 10.5)
    decided = prepared.moved(State.DECIDED, 12.25)
    kept, lost = shares["kafka"].committables[1:], shares["kafka"].committables[:1]
    again = tuple(replace(c, branch_id=replace(c.branch_id, write_pass=1, attempt=9)) for c in lost)
    amended = decided.amended(
        {"kafka": replace(shares["kafka"], committables=(*kept, *again))}, lost
    )
    ruled = replace(
        decided,
        settled=tuple(
            Settlement(str(c.branch_id), ruling, "ann@host", "bücket gone", 13.5, 4)
            for c, ruling in zip(decided.committables(), Ruling, strict=False)
        ),
    )
    found = {
        "prepared": prepared,
        "abandoned": prepared.moved(State.ABANDONED, 11.0),
        "decided": decided,
        "amended": amended,
        "ruled": ruled,
        "settled": ruled.moved(State.SETTLED, 14.5),
        "complete": amended.moved(State.COMPLETE, 15.0),
        "no rows": replace(decided, shares={"kafka": Share("topic")}),
    }
    return {name: record.encode() for name, record in found.items()}


def heads() -> dict[str, str]:
    first = Head("orders", QUERY, 3, "run", "host:1:1750000000", 1750000000.5, sinks={"kafka": "t"})
    moved = replace(first, token=4, log_id="0123456789abcdef", moved_to="s3://bucket/log?region=x")
    found = {
        "first": first,
        "bound": replace(first, checkpoint="file:/ckpt", first_batch=12, retired=("0-a", "0-b")),
        "moved away": moved,
        "reserved": replace(moved, token=0, moved_to="sqlite:////old/txn.db"),
        "moved here": replace(moved, moved_to=None, checkpoint="file:/ckpt"),
    }
    return {name: head.encode() for name, head in found.items()}


def names() -> list[dict[str, Any]]:
    return [
        {
            "branch": branch.to_json(),
            "name": branch.name,
            "full": str(branch),
            "short": branch.short,
            "prefix": branch.owner.prefix,
            "digest": branch.owner.digest,
        }
        for branch in BRANCHES
    ]


if __name__ == "__main__":
    found = {"records": records(), "heads": heads(), "names": names()}
    json.dump(found, sys.stdout, indent=1)
    print()
