"""Savepoints of real queries: what was delivered before and after is what one query delivers."""

from __future__ import annotations

import functools
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from integration_tests.support.spark import Job, ids
from sparkonce import ExactlyOnce
from sparkonce.spark_hooks.checkpoint import open_checkpoint
from sparkonce.spark_hooks.savepoints import Manifest, Savepoints, create, restore
from sparkonce.storage import open_folder
from sparkonce.txn_log import TransactionLog

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

STATE = "spark.sql.streaming.stateStore."
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
STORES = {
    "hdfs": {},
    "rocksdb": {"providerClass": ROCKSDB},
    "changelog": {
        "providerClass": ROCKSDB,
        "rocksdb.changelogCheckpointing.enabled": "true",
    },
    "format2": {"providerClass": ROCKSDB, "checkpointFormatVersion": "2"},
    "format2-changelog": {
        "providerClass": ROCKSDB,
        "rocksdb.changelogCheckpointing.enabled": "true",
        "checkpointFormatVersion": "2",
    },
}
BEFORE, AFTER = 7, 4
"""Files, and so batches, before and after the savepoint."""


def rows(n: int) -> list[str]:
    return ids(*(n * 7 + i for i in range(5)), n % 3)


def aggregated(df: DataFrame) -> DataFrame:
    return df.selectExpr("id % 3 AS id").groupBy("id").count()


def distinct(df: DataFrame) -> DataFrame:
    return df.selectExpr("id % 20 AS id").dropDuplicates(["id"])


def watermarked(df: DataFrame) -> DataFrame:
    return df.withWatermark("at", "1 hour").dropDuplicatesWithinWatermark(["id"]).select("id")


def joined(df: DataFrame) -> DataFrame:
    left, right = df.selectExpr("id % 20 AS id"), df.selectExpr("id % 30 AS id2")
    return left.join(right, left.id == right.id2).select("id")


SHAPES = {f.__name__: f for f in (aggregated, distinct, watermarked, joined)}


class Story:
    """A query of the tests, its savepoints, and what it has to have delivered."""

    def __init__(self, spark: SparkSession, folder: Path, shape: Callable[..., Any]) -> None:
        self.spark, self.folder, self.shape = spark, folder, shape
        (folder / "job").mkdir()
        self.job = Job(spark, folder / "job")
        self.savepoints = Savepoints.at(str(folder / "savepoints"), create=True)

    def run(self, job: Job, files: range, pipeline: ExactlyOnce | None = None) -> None:
        for n in files:
            job.add(*rows(n))
        job.run(pipeline or job.pipeline(), self.shape)

    @property
    def checkpoint(self) -> str:
        return str(self.job.folder / self.job.checkpoint)

    def create(self, pipeline: ExactlyOnce | None = None, **settings: Any) -> Manifest:
        log = (pipeline or self.job.pipeline()).log
        files = open_checkpoint(self.checkpoint, None)
        return create(self.savepoints, log, "orders", files, **settings)

    def restore(
        self,
        manifest: Manifest,
        place: str = "restored",
        pipeline: str = "orders",
        parent: TransactionLog | None = None,
    ) -> None:
        location = str(self.job.folder / place)
        log = parent or self.job.pipeline().log
        folder = open_folder(location, create=True)
        restore(
            self.savepoints,
            manifest,
            folder,
            location,
            pipeline=pipeline,
            open_log=lambda: log,
            parent_log=log,
        )
        self.job.checkpoint = place


def delivered(folder: Path) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for path in folder.glob("*.parquet"):
        found.update(tuple(row.values()) for row in pq.read_table(path).to_pylist())
    return found


@pytest.fixture
def states(set_conf: Callable[[str, str], None]) -> Callable[[str], None]:
    """A function that chooses the state store, which purges and writes snapshots soon."""

    def choose(store: str) -> None:
        set_conf("spark.sql.streaming.minBatchesToRetain", "3")
        set_conf(STATE + "minDeltasForSnapshot", "3")
        set_conf(STATE + "maintenanceInterval", "100ms")
        set_conf("spark.sql.shuffle.partitions", "2")
        for key, value in STORES[store].items():
            set_conf(STATE + key, value)

    return choose


@pytest.fixture(scope="module")
def truth(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Counter[Any]]:
    """What one query delivers that nobody has stopped."""

    @functools.cache
    def of(shape: str) -> Counter[Any]:
        job = Job(spark, tmp_path_factory.mktemp("truth"))
        for n in range(BEFORE + AFTER):
            job.add(*rows(n))
        job.run(job.pipeline(), SHAPES[shape])
        return delivered(job.out)

    return of


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("shape", SHAPES)
def test_restored_query_continues(
    spark: SparkSession,
    tmp_path: Path,
    states: Callable[[str], None],
    truth: Callable[[str], Counter[Any]],
    shape: str,
    store: str,
) -> None:
    expected = truth(shape)
    states(store)
    story = Story(spark, tmp_path, SHAPES[shape])
    story.run(story.job, range(BEFORE))
    manifest = story.create()
    assert manifest.batch >= BEFORE - 1
    assert not list(story.savepoints.verify(manifest))
    shutil.rmtree(story.checkpoint)
    story.restore(manifest)
    story.run(story.job, range(BEFORE, BEFORE + AFTER))
    assert delivered(story.job.out) == expected
