"""A query whose state Spark has repartitioned offline goes on, and so do its savepoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark import __version__ as version

from integration_tests.support.savepoints import aggregated, counted, delivered, rows
from integration_tests.support.spark import Job
from sparkonce.cli.main import run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.skipif(version < "4.2", reason="older Spark repartitions no state")

STATE = "spark.sql.streaming.stateStore."
STORES = {
    "rocksdb": {},
    "changelog": {"rocksdb.changelogCheckpointing.enabled": "true"},
    "format2": {
        "rocksdb.changelogCheckpointing.enabled": "true",
        "checkpointFormatVersion": "2",
    },
}


class Story:
    """A query, and its savepoints by the command line."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder, self.job = spark, folder, Job(spark, folder)
        sink = {"type": "file", "folder": str(self.job.out)}
        described = {"name": "orders", "log": f"sqlite:///{folder}/txn.db", "sinks": [sink]}
        (folder / "orders.json").write_text(json.dumps(described))

    def run(self, files: range) -> None:
        for n in files:
            self.job.add(*rows(n))
        with self.job.pipeline() as pipeline:
            self.job.run(pipeline, aggregated)
        assert delivered(self.job.out) == counted(range(self.job.files))

    def repartition(self, number: int) -> None:
        self.spark._streamingCheckpointManager.repartition(self.job.location, number)

    def command(self, verb: str, *arguments: str) -> int:
        job, root = str(self.folder / "orders.json"), str(self.folder / "savepoints")
        return run(["savepoint", verb, job, root, *arguments])

    def continue_in(self, verb: str, name: str, *more: str) -> None:
        into = f"{verb}-{name}"
        assert self.command(verb, name, "--into", str(self.folder / into), *more) == 0
        self.job.checkpoint = into

    def batches(self) -> list[int]:
        with self.job.pipeline() as pipeline:
            return sorted(r.id.batch_id for r in pipeline.log.history("orders", 99))


@pytest.mark.parametrize(
    "store", [s if s == "rocksdb" else pytest.param(s, marks=pytest.mark.slow) for s in STORES]
)
def test_repartitioned_query_continues(
    spark: SparkSession, tmp_path: Path, set_conf: Callable[[str, str], None], store: str
) -> None:
    """To more partitions and to fewer, without a word of the user; a savepoint may be of before."""
    provider = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    for key, value in {"providerClass": provider, **STORES[store]}.items():
        set_conf(STATE + key, value)
    set_conf("spark.sql.shuffle.partitions", "2")
    story = Story(spark, tmp_path)
    story.run(range(2))
    assert story.command("create", "--name", "before") == 0
    story.repartition(3)
    assert story.command("create", "--name", "between") == 0
    story.run(range(2, 4))
    assert story.batches() == [0, 1, 2, 3, 4]
    assert story.command("create", "--name", "more") == 0
    story.continue_in("restore", "more", "--yes")
    story.repartition(1)
    story.run(range(4, 6))
    assert story.command("create", "--name", "fewer") == 0
    story.continue_in("restore", "fewer", "--yes")
    story.run(range(6, 7))
    story.continue_in("rewind", "before", "--yes")
    assert delivered(story.job.out) == counted(range(2))
    story.run(range(7, 8))
