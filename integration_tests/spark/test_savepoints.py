"""Savepoints of real queries: what was delivered before and after is what one query delivers."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException

from integration_tests.support.savepoints import aggregated, counted, delivered, rows
from integration_tests.support.spark import Job, numbered_by_state
from sparkonce import ExactlyOnce
from sparkonce.cli.main import ERROR, run
from sparkonce.errors import LogUnavailableError, SavepointError
from sparkonce.protocol.pipeline import targets_of
from sparkonce.sinks import FileSink
from sparkonce.spark_hooks.checkpoint import open_checkpoint
from sparkonce.spark_hooks.savepoints import (
    Filling,
    Manifest,
    Savepoints,
    create,
    fork,
    restore,
)
from sparkonce.storage import open_folder
from sparkonce.txn_log import moving
from sparkonce.txn_log.claim import RESTORING
from sparkonce.txn_log.record import State

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

    from sparkonce.protocol.pipeline import CommitPolicy
    from sparkonce.testing.services import KafkaServer

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
LIVE = {"format2-changelog"}
"""Stores whose running query is copied in `make test`; the slow suite makes 200 copies."""

BEFORE, AFTER = 7, 4
"""Files, and so batches, before and after the savepoint."""

BACKLOG = 4
"""Files that wait for a running query, so that it never pauses."""


def distinct(df: DataFrame) -> DataFrame:
    return df.selectExpr("id % 20 AS id").dropDuplicates(["id"])


def watermarked(df: DataFrame) -> DataFrame:
    return df.withWatermark("at", "1 hour").dropDuplicatesWithinWatermark(["id"]).select("id")


def joined(df: DataFrame) -> DataFrame:
    left, right = df.selectExpr("id % 20 AS id"), df.selectExpr("id % 30 AS id2")
    return left.join(right, left.id == right.id2).select("id")


def mode_of(shape: Callable[..., Any]) -> str:
    return "append" if shape is joined else "update"  # Spark 4.0 joins in no other mode


QUICK = {
    ("aggregated", "rocksdb"),
    ("joined", "format2-changelog"),
}
SHAPES = {f.__name__: f for f in (aggregated, distinct, watermarked, joined, numbered_by_state)}


class Story:
    """A query of the tests, its savepoints, and what it has to have delivered."""

    def __init__(self, spark: SparkSession, folder: Path, shape: Callable[..., Any]) -> None:
        self.spark, self.folder, self.shape = spark, folder, shape
        (folder / "job").mkdir()
        self.job = Job(spark, folder / "job")
        self.savepoints = Savepoints.at(str(folder / "savepoints"), create=True)
        self.mode = mode_of(shape)

    def run(self, job: Job, files: range, pipeline: ExactlyOnce | None = None) -> None:
        for n in files:
            job.add(*rows(n))
        job.run(pipeline or job.pipeline(), self.shape, self.mode)

    @property
    def checkpoint(self) -> str:
        return str(self.job.folder / self.job.checkpoint)

    def create(self, pipeline: ExactlyOnce | None = None, **settings: Any) -> Manifest:
        log = (pipeline or self.job.pipeline()).log
        files = open_checkpoint(self.checkpoint, None)
        return create(self.savepoints, log, "orders", files, **settings)

    def restore(self, manifest: Manifest) -> None:
        log = self.job.pipeline().log
        location = str(self.job.folder / "restored")
        folder = open_folder(location, create=True)
        restore(Filling(self.savepoints, manifest, folder, "orders", lambda: log), log)
        self.job.checkpoint = "restored"

    def forked(
        self, manifest: Manifest, name: str, source_paths: Mapping[str, str] | None = None
    ) -> tuple[Counter[Any], ExactlyOnce]:
        """Fork it, and run the fork over all files; what it has delivered."""
        job = self.job
        sink = FileSink(job.sink_folder(name))
        pipeline = ExactlyOnce(name, sinks=[sink], log=f"sqlite:///{job.folder}/{name}.db")
        location = str(job.folder / f"ckpt-{name}")
        folder, paths = open_folder(location, create=True), source_paths or {}
        filling = Filling(
            self.savepoints, manifest, folder, name, lambda: pipeline.log, source_paths=paths
        )
        fork(filling, targets_of([sink]))
        before, job.checkpoint = job.checkpoint, f"ckpt-{name}"
        job.run(pipeline, self.shape, self.mode)
        job.checkpoint = before
        return delivered(job.folder / name), pipeline


def start(job: Job, pipeline: ExactlyOnce) -> StreamingQuery:
    """A query that runs until it is stopped."""
    return (
        aggregated(job.rows())
        .writeStream.foreachBatch(pipeline)
        .option("checkpointLocation", str(job.folder / job.checkpoint))
        .outputMode("update")
        .start()
    )


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
        job.run(job.pipeline(), SHAPES[shape], mode_of(SHAPES[shape]))
        return delivered(job.out)

    return of


@pytest.mark.parametrize(
    ("shape", "store"),
    [
        pytest.param(shape, store, marks=[] if (shape, store) in QUICK else [pytest.mark.slow])
        for shape, store in itertools.product(SHAPES, STORES)
        if (shape, store) != ("numbered_by_state", "hdfs")  # Spark needs RocksDB for it
    ],
)
def test_restored_query_continues(
    spark: SparkSession,
    tmp_path: Path,
    states: Callable[[str], None],
    truth: Callable[[str], Counter[Any]],
    shape: str,
    store: str,
) -> None:
    states(store)
    expected = truth(shape)
    story = Story(spark, tmp_path, SHAPES[shape])
    story.run(story.job, range(BEFORE))
    manifest = story.create()
    assert manifest.batch >= BEFORE - 1
    assert not list(story.savepoints.verify(manifest))
    shutil.rmtree(story.checkpoint)
    story.restore(manifest)
    story.run(story.job, range(BEFORE, BEFORE + AFTER))
    assert delivered(story.job.out) == expected


def test_state_of_transform_with_state_moves(
    spark: SparkSession, tmp_path: Path, states: Callable[[str], None]
) -> None:
    """Spark keeps the absolute path of its schema."""
    states("rocksdb")
    story = Story(spark, tmp_path, numbered_by_state)
    story.run(story.job, range(1))
    manifest = story.create()
    shutil.rmtree(story.checkpoint)
    story.restore(manifest)
    story.run(story.job, range(1))
    assert delivered(story.job.out) == Counter({(1,): 4, (2,): 1 + 4, (4,): 1})


def test_fork_and_its_parent_go_on(
    spark: SparkSession, tmp_path: Path, states: Callable[[str], None]
) -> None:
    """Also from a past batch; what both deliver after it is equal, and each has its own."""
    states("hdfs")
    story = Story(spark, tmp_path, aggregated)
    story.run(story.job, range(BEFORE))
    newest, past = story.create(name="newest"), story.create(name="past", batch=BEFORE - 3)
    story.run(story.job, range(BEFORE, BEFORE + AFTER))
    for manifest in (newest, past):
        found, pipeline = story.forked(manifest, manifest.name)
        assert found == counted(range(manifest.batch + 1, BEFORE + AFTER))
        assert pipeline.log.unfinished(manifest.name) == []
    story.run(story.job, range(BEFORE + AFTER, BEFORE + AFTER + 1))
    assert delivered(story.job.out) == counted(range(BEFORE + AFTER + 1))


def test_fork_reads_its_input_at_a_new_place(
    spark: SparkSession, tmp_path: Path, states: Callable[[str], None]
) -> None:
    """Without the paths of its new place, Spark takes each old file for a new one."""
    states("hdfs")
    story = Story(spark, tmp_path, aggregated)
    story.run(story.job, range(12))  # Spark compacts the log of a file source after ten
    manifest = story.create()
    old, story.job.source = story.job.source, tmp_path / "moved"
    old.rename(story.job.source)
    story.job.add(*rows(12))
    found, _ = story.forked(manifest, "moved-too", {old.as_uri(): story.job.source.as_uri()})
    assert found == counted(range(12, 13))


def no_answer(*_: object) -> None:
    raise LogUnavailableError("no answer")


@pytest.mark.parametrize("is_lost", [False, True])
def test_log_inside_the_checkpoint_comes_along(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_lost: bool,
) -> None:
    """By the command line. The old checkpoint is refused from then on, or is lost."""
    story = Story(spark, tmp_path, aggregated)
    job = story.job
    story.run(job, range(3), job.pipeline(log="checkpoint"))
    module = tmp_path / "job_with_log_inside.py"
    module.write_text(
        "from sparkonce import ExactlyOnce\nfrom sparkonce.sinks import FileSink\n"
        f'pipeline = ExactlyOnce("orders", sinks=[FileSink("{job.out}")])\n'
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    name = "job_with_log_inside:pipeline"
    root, into = str(tmp_path / "savepoints"), str(job.folder / "restored")
    command = ["savepoint", "create", name, root, "--checkpoint", story.checkpoint, "--name", "s"]
    assert run(command) == 0
    assert run(["savepoint", "verify", root, "s"]) == 0
    restoring = ["savepoint", "restore", name, root, "s", "--into", into, "--yes"]
    assert run([*restoring, "--lost"]) == ERROR, "it is not lost"
    if not is_lost:
        with monkeypatch.context() as patch:  # the log is in the middle of its move
            patch.setattr(moving, "_open", no_answer)
            assert run(restoring) == ERROR
        elsewhere = [*restoring[:5], "--into", str(job.folder / "elsewhere"), "--yes", "--lost"]
        capsys.readouterr()
        assert run(elsewhere) == ERROR
        assert "was being moved" in capsys.readouterr().err
    if is_lost:
        shutil.rmtree(story.checkpoint)
        assert run(restoring) == ERROR
        restoring.append("--lost")
    assert run(restoring) == 0
    job.add(*rows(3))
    if not is_lost:
        with pytest.raises(StreamingQueryException, match="was moved"):
            job.run(job.pipeline(log="checkpoint"), aggregated)
    job.checkpoint = "restored"
    job.run(job.pipeline(log="checkpoint"), aggregated)
    assert delivered(job.out) == counted(range(4))
    if not is_lost:  # it is impossible, so nobody is asked whether to fence the driver
        again = ["savepoint", "restore", name, root, "s", "--into", str(job.folder / "again")]
        assert run(again) == ERROR
        assert "have every batch up to 3" in capsys.readouterr().err
    assert run(["savepoint", "delete", root, "s"]) == 0
    assert not list((tmp_path / "savepoints" / "files").iterdir())


def test_start_before_the_restore_has_ended_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    story = Story(spark, tmp_path, aggregated)
    story.run(story.job, range(2))
    manifest = story.create()
    marker = {"log_id": RESTORING, "pipeline": "orders"}
    story.restore(manifest)
    for path in Path(story.checkpoint).glob("sparkonce*.json"):
        path.unlink()
    (Path(story.checkpoint) / "sparkonce.json").write_text(json.dumps(marker))
    story.job.add(*rows(2))
    with pytest.raises(StreamingQueryException, match="a savepoint is being restored"):
        story.job.run(story.job.pipeline(), aggregated)
    assert delivered(story.job.out) == counted(range(2))


@pytest.mark.parametrize(
    "store",
    [s if s in LIVE else pytest.param(s, marks=pytest.mark.slow) for s in STORES],
)
@pytest.mark.parametrize(
    ("runs", "copies"), [(1, 3), pytest.param(2, 20, marks=pytest.mark.slow)], ids=str
)
def test_savepoints_of_a_running_query(
    spark: SparkSession,
    tmp_path: Path,
    states: Callable[[str], None],
    store: str,
    runs: int,
    copies: int,
) -> None:
    """Taken while Spark writes and purges: each is restored, and continues as the query did."""
    states(store)
    for n in range(runs):
        (tmp_path / str(n)).mkdir()
        copy_while_it_runs(Story(spark, tmp_path / str(n), aggregated), copies)


def copy_while_it_runs(story: Story, copies: int) -> None:
    """Run the query until it has so many savepoints, of different batches; then fork each."""
    job = story.job
    job.add(*rows(0))
    pipeline = job.pipeline()
    query = start(job, pipeline)
    made: dict[int, Manifest] = {}
    files = 1
    try:
        while len(made) < copies:
            newest = pipeline.log.newest("orders", str(query.id))
            while files < BACKLOG + (0 if newest is None else newest.id.batch_id):
                job.add(*rows(files))
                files += 1
            with contextlib.suppress(SavepointError):  # before the first batch
                manifest = story.create(pipeline)
                made[manifest.batch] = manifest
        query.processAllAvailable()
    finally:
        query.stop()
    for batch, manifest in made.items():
        found, _ = story.forked(manifest, f"fork-{batch}")
        assert found == counted(range(batch + 1, files))


@pytest.mark.parametrize("commit", ["immediate", "after_checkpoint"])
def test_query_is_stopped_with_a_savepoint(
    spark: SparkSession, tmp_path: Path, commit: CommitPolicy
) -> None:
    """It holds the last batch that the sinks have: nothing comes after it."""
    story = Story(spark, tmp_path, aggregated)
    job = story.job
    for n in range(BEFORE):
        job.add(*rows(n))
    pipeline = job.pipeline(commit=commit)
    root = str(tmp_path / "savepoints")
    query = start(job, pipeline)
    try:
        while (newest := pipeline.log.newest("orders", str(query.id))) is None or (
            newest.id.batch_id < 2
        ):
            assert query.isActive
        lived = pipeline.savepoint(query, root, name="lived")
        assert query.isActive
        name = pipeline.stop_with_savepoint(query, root)
    finally:
        query.stop()
    assert (query.isActive, query.exception()) == (False, None)
    manifest = story.savepoints.read(name)
    assert story.savepoints.read(lived).batch <= manifest.batch
    newest = pipeline.log.newest("orders", str(query.id))
    assert newest is not None
    assert (newest.id.batch_id, newest.state) == (manifest.batch, State.COMPLETE)
    shutil.rmtree(story.checkpoint)
    story.restore(manifest)
    with job.pipeline(commit=commit) as pipeline:
        job.run(pipeline, aggregated)
    assert delivered(job.out) == counted(range(BEFORE))


def test_query_over_kafka_continues(
    spark: SparkSession, tmp_path: Path, kafka: KafkaServer, fresh_topic: Callable[..., str]
) -> None:
    """Its checkpoint holds the first offsets of the source, and those of the last batch."""
    if "spark-sql-kafka" not in spark.conf.get("spark.jars", ""):
        pytest.skip("the session has no Kafka connector")
    topic, job = fresh_topic(2), Job(spark, tmp_path)
    story_root = Savepoints.at(str(tmp_path / "savepoints"), create=True)
    address = {"kafka.bootstrap.servers": kafka.bootstrap_servers}

    def produce(values: range) -> None:
        frame = spark.range(values.start, values.stop).selectExpr("CAST(id AS STRING) AS value")
        options = {"topic": topic, "kafka.client.id": topic}
        frame.write.format("kafka").options(**address, **options).save()

    def run_all(checkpoint: Path) -> None:
        rows = spark.readStream.format("kafka").options(
            **address, subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger="20"
        )
        values = rows.load().selectExpr("CAST(CAST(value AS STRING) AS LONG) AS id")
        writer = values.dropDuplicates(["id"]).writeStream.foreachBatch(job.pipeline())
        writer = writer.option("checkpointLocation", str(checkpoint)).outputMode("update")
        writer.trigger(availableNow=True).start().awaitTermination()

    produce(range(50))
    run_all(tmp_path / "ckpt")
    log = job.pipeline().log
    manifest = create(story_root, log, "orders", open_checkpoint(str(tmp_path / "ckpt"), None))
    shutil.rmtree(tmp_path / "ckpt")
    produce(range(40, 90))
    into = open_folder(str(tmp_path / "restored"), create=True)
    restore(Filling(story_root, manifest, into, "orders", lambda: log), log)
    run_all(tmp_path / "restored")
    assert job.visible() == Counter(range(90))
