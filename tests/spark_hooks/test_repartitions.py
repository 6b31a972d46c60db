"""A state that Spark has repartitioned offline: what the checkpoint proves, and what follows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from sparkonce.spark_hooks.checkpoint import open_checkpoint
from sparkonce.spark_hooks.savepoints.closure import closure_of
from sparkonce.storage import LocalFolder
from sparkonce.testing.log_cases import claim, deliver
from sparkonce.txn_log import open_log
from sparkonce.txn_log.record import State
from tests.support.savepoint_cases import checkpoint, write


def offsets(
    partitions: int | None, *sources: object, at: int = 5, version: str = "v1", **conf: Any
) -> str:
    """The text of offsets/N."""
    pinned = {} if partitions is None else {"spark.sql.shuffle.partitions": str(partitions)}
    metadata = {"batchWatermarkMs": 0, "batchTimestampMs": at, "conf": {**pinned, **conf}}
    return "\n".join([version, json.dumps(metadata), *map(json.dumps, sources or ("x",))])


def found(folder: Path, *texts: str) -> int:
    write(folder, [(f"offsets/{n}", text) for n, text in enumerate(texts)])
    write(folder, [("metadata", '{"id": "q"}')])
    return open_checkpoint(str(folder), None).repartitions_before(len(texts))


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_repartition_is_recognised(tmp_path: Path, version: str) -> None:
    texts = [offsets(number, version=version) for number in (2, 5, 3)]
    assert found(tmp_path, offsets(2, "w", at=4, version=version), *texts) == 2


@pytest.mark.parametrize(
    "after",
    [
        offsets(2),  # as a batch without input, for a watermark that has moved
        offsets(5, at=6),
        offsets(5, "y"),
        offsets(5, "x", "x"),
        offsets(5, other="setting"),
        offsets(5, version="v2"),
        offsets(None),
        offsets(5).splitlines()[0],  # torn
    ],
)
def test_other_batch_is_none(tmp_path: Path, after: str) -> None:
    assert found(tmp_path, offsets(2), after) == 0


def test_checkpoint_without_older_offsets(tmp_path: Path) -> None:
    assert found(tmp_path) == 0
    assert found(tmp_path, offsets(2)) == 0
    (tmp_path / "offsets/0").unlink()
    write(tmp_path, [("offsets/1", offsets(5))])
    assert open_checkpoint(str(tmp_path), None).repartitions_before(2) == 0


@pytest.mark.parametrize("address", ["sqlite:///{}/txn.db", "checkpoint:{}"])
def test_log_gets_a_record_without_rows(tmp_path: Path, address: str) -> None:
    """So that a savepoint can be made of the batch, and a rewind finds every batch."""
    log = open_log(address.format(tmp_path))
    incarnation = log.begin(claim())
    newest = deliver(log, incarnation, 0)
    again = claim(3, offsets={2: newest.offsets}, repartitions=2, run_id="again")
    incarnation = log.begin(again)
    deliver(log, incarnation, 3)
    records = {r.id.batch_id: r for r in log.history("orders", 9)}
    assert sorted(records) == [0, 1, 2, 3]
    for batch in (1, 2):
        assert (records[batch].state, records[batch].shares) == (State.COMPLETE, {})
        assert records[batch].offsets == newest.offsets
    head = log.head("orders")
    assert head is not None
    assert head.first_batch == 0


def test_partitions_that_a_batch_does_not_have_are_left(tmp_path: Path) -> None:
    """Spark leaves those of before, and those of a later batch are not the state of this one."""
    checkpoint(tmp_path, 4)
    for batch in range(4):
        write(tmp_path, [(f"offsets/{batch}", offsets(2 if batch < 3 else 1, {"logOffset": 2}))])
    shutil.copytree(tmp_path / "state/0/1", tmp_path / "state/0/2")
    (tmp_path / "state/0/2/1.delta").unlink()
    for batch, partitions in ((2, {"0", "1"}), (3, {"0"})):
        taken = closure_of(LocalFolder(tmp_path), batch).copied
        folders = {name.split("/")[2] for name in taken if name.startswith("state/0/")}
        assert folders == {*partitions, "_metadata"}
