"""What the release before wrote into logs is read by this tree, and means the same.

    tests/golden/release_before.tar.xz ─► write_release_before.py ─► release_before_records.json
                                                                        │ decode ─► encode
                                                                        ▼ the same body

`integration_tests/crash/test_release_before.py` kills a pipeline of that release in doubt.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from integration_tests.crash.release_before import unpack

from sparkonce.model import BranchId, Committable
from sparkonce.sinks.kafka.branch import KafkaBranch
from sparkonce.sinks.postgres.loading.direct import Prepared
from sparkonce.sinks.postgres.merging.merge import Merge
from sparkonce.sinks.s3.writing.staged import StagedFile
from sparkonce.txn_log.record import Head, State, TransactionRecord

GOLDEN = Path(__file__).parents[1] / "golden"
WRITTEN: dict[str, Any] = json.loads((GOLDEN / "release_before_records.json").read_text())


def of_kafka(found: Committable) -> dict[str, Any]:
    return dict(KafkaBranch.of(found).committable(found.branch_id).payload)


def of_merge(found: Committable) -> dict[str, Any]:
    return dict(Merge.read(found).committable(found.branch_id).payload)


def of_prepared(found: Committable) -> dict[str, Any]:
    return dict(Prepared.read(found).committable(found.branch_id).payload)


def of_s3(found: Committable) -> dict[str, Any]:
    payload: Any = found.payload
    files = [StagedFile.from_json(value).to_json() for value in payload["files"]]
    return {**payload, "files": files}


READ: dict[str, Callable[[Committable], dict[str, Any]]] = {
    "kafka": of_kafka,
    "staged": of_merge,
    "staged_upsert": of_merge,
    "direct": of_prepared,
    "direct_upsert": of_prepared,
    "s3": of_s3,
    "files": lambda found: dict(found.payload),
}
"""How this tree reads a payload, by the recorded sink's name, and what it would write for it."""

GONE = {"attached", "leading"}
"""Fields of a merge that may go together with partitions for each load and plain updates."""


def test_recorded_is_what_the_release_before_writes(tmp_path: Path) -> None:
    tree = unpack(tmp_path)
    done = subprocess.run(
        [sys.executable, "-P", str(GOLDEN / "write_release_before.py")],
        env={**os.environ, "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert json.loads(done.stdout) == WRITTEN


@pytest.mark.parametrize("name", WRITTEN["records"])
def test_record_keeps_its_body(name: str) -> None:
    text = WRITTEN["records"][name]
    record = TransactionRecord.decode(text, name)
    states = {"amended": "decided", "ruled": "decided", "no rows": "decided"}
    assert record.state is State(states.get(name, name))
    again, before = json.loads(record.encode()), json.loads(text)
    assert again["body"] == before["body"]
    assert again["sha256"] == before["sha256"]


def test_every_state_is_recorded() -> None:
    found = {json.loads(text)["body"]["state"] for text in WRITTEN["records"].values()}
    assert found == {state.value for state in State}


@pytest.mark.parametrize("name", WRITTEN["heads"])
def test_head_keeps_its_body(name: str) -> None:
    text = WRITTEN["heads"][name]
    again, before = json.loads(Head.decode(text, name).encode()), json.loads(text)
    assert again["body"] == before["body"]
    assert again["sha256"] == before["sha256"]


@pytest.mark.parametrize("sink", READ)
def test_sink_reads_the_payload(sink: str) -> None:
    """What this tree writes for it is what it read, but for the fields of features that went."""
    record = TransactionRecord.decode(WRITTEN["records"]["decided"], "decided")
    assert record.shares.keys() == READ.keys()
    assert record.shares[sink].committables
    for committable in record.shares[sink].committables:
        read, recorded = READ[sink](committable), dict(committable.payload)
        lost = recorded.keys() - read.keys()
        assert lost <= GONE, f"{sink}: {lost} got lost"
        assert read == {name: value for name, value in recorded.items() if name not in lost}


@pytest.mark.parametrize("recorded", WRITTEN["names"], ids=lambda found: found["full"][-30:])
def test_branch_has_the_same_names(recorded: dict[str, Any]) -> None:
    branch = BranchId.from_json(recorded["branch"])
    assert branch.name == recorded["name"]
    assert str(branch) == recorded["full"]
    assert branch.short == recorded["short"]
    assert branch.owner.prefix == recorded["prefix"]
    assert branch.owner.digest == recorded["digest"]
    if branch.batch_id is not None:
        assert BranchId.from_name(recorded["full"]) == branch
    without_batch = BranchId.from_name(recorded["name"])
    assert without_batch is not None
    assert without_batch.name == branch.name
