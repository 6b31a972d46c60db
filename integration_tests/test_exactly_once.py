"""`ExactlyOnce` under a real streaming query, with folders as sinks: starts, replays, shapes."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkonce import ExactlyOnce, failpoints
from sparkonce.errors import ConfigurationError
from sparkonce.sinks import FileSink
from sparkonce.txn_log.record import State

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery


class Job:
    """A query over a folder of JSON files, one file a batch, into folders."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark = spark
        self.folder = folder
        self.source = folder / "in"
        self.source.mkdir()
        self.out = self.sink_folder("out")
        self.checkpoint = "ckpt"
        self.files = 0

    def sink_folder(self, name: str) -> Path:
        path = self.folder / name
        path.mkdir(exist_ok=True)
        return path

    def add(self, *rows: str) -> None:
        """One file of rows, and so one batch."""
        hidden = self.folder / "hidden"
        hidden.write_text("\n".join(rows))
        os.utime(hidden, (self.files, self.files))  # Spark takes the oldest first, in seconds
        hidden.rename(self.source / f"{self.files:05d}.json")
        self.files += 1

    def pipeline(self, **settings: Any) -> ExactlyOnce:
        defaults: dict[str, Any] = {
            "sinks": [FileSink(self.out)],
            "log": f"sqlite:///{self.folder}/txn.db",
        }
        return ExactlyOnce("orders", **{**defaults, **settings})

    def run(
        self,
        pipeline: ExactlyOnce,
        shape: Callable[[DataFrame], DataFrame] = lambda df: df,
    ) -> StreamingQuery:
        """Process all files; raises what the query failed with."""
        rows = (
            self.spark.readStream.schema("id long, at timestamp")
            .option("maxFilesPerTrigger", 1)
            .json(str(self.source))
        )
        query = (
            shape(rows)
            .writeStream.foreachBatch(pipeline)
            .option("checkpointLocation", str(self.folder / self.checkpoint))
            .outputMode("update")
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return query

    def forget_commit(self) -> None:
        """Leave the checkpoint as a driver leaves it that dies before Spark commits the batch."""
        commits = self.folder / self.checkpoint / "commits"
        newest = max(int(path.name) for path in commits.iterdir() if path.name.isdigit())
        (commits / str(newest)).unlink()
        (commits / f".{newest}.crc").unlink(missing_ok=True)

    def visible(self, folder: Path | None = None, column: str = "id") -> Counter[Any]:
        files = (folder or self.out).glob("*.parquet")
        return Counter(value for path in files for value in pq.read_table(path)[column].to_pylist())


@pytest.fixture
def job(spark: SparkSession, tmp_path: Path) -> Job:
    return Job(spark, tmp_path)


def ids(*values: int) -> list[str]:
    return [f'{{"id": {value}, "at": "2026-01-01T00:00:{value % 60:02d}Z"}}' for value in values]


def test_rows_of_every_batch_arrive_once_in_every_sink(job: Job) -> None:
    """Sinks with their own columns share one pass; a transform gets a pass of its own."""
    job.add(*ids(1, 2, 3))
    job.add(*ids(4, 5))
    texts, evens = job.sink_folder("texts"), job.sink_folder("evens")
    pipeline = job.pipeline(
        sinks=[
            FileSink(job.out),
            FileSink(texts, name="texts", select=["to_json(struct(id)) AS value"]),
            FileSink(evens, name="evens", transform=lambda df: df.where("id % 2 = 0")),
        ]
    )
    job.run(pipeline)
    assert job.visible() == Counter([1, 2, 3, 4, 5])
    assert job.visible(evens) == Counter([2, 4])
    assert job.visible(texts, "value") == Counter(f'{{"id":{n}}}' for n in range(1, 6))
    newest, *_ = pipeline.log.history("orders")
    assert newest.state is State.COMPLETE
    assert {name: share.rows for name, share in newest.shares.items()} == {
        "file": 2,
        "texts": 2,
        "evens": 1,
    }
    assert newest.offsets == ('{"logOffset":1}',)


def test_replayed_batch_is_not_written_again(job: Job) -> None:
    """commits/N is missing, as after a crash: the batch is read to its end and not written."""
    job.add(*ids(1, 2))
    job.run(job.pipeline())
    job.forget_commit()
    job.add(*ids(3))
    job.run(job.pipeline())
    assert job.visible() == Counter([1, 2, 3])
    assert not list((job.out / "_sparkonce").iterdir())


@pytest.mark.parametrize(
    ("provider", "version"), [("HDFSBacked", 1), ("RocksDB", 1), ("RocksDB", 2)]
)
@pytest.mark.parametrize("shape", ["aggregate", "deduplicate"])
def test_stateful_query_stays_right_over_a_drained_replay(
    job: Job, shape: str, provider: str, version: int
) -> None:
    """Skipping the rows of a replay would break Spark's state for good; draining does not."""
    kinds = {
        "HDFSBacked": "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider",
        "RocksDB": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    }
    settings = {
        "spark.sql.streaming.stateStore.providerClass": kinds[provider],
        "spark.sql.streaming.stateStore.checkpointFormatVersion": str(version),
    }
    shapes: dict[str, Callable[[DataFrame], DataFrame]] = {
        "aggregate": lambda df: df.groupBy((df.id % 2).alias("id")).count(),
        "deduplicate": lambda df: df.dropDuplicates(["id"]),
    }
    for key, value in settings.items():
        job.spark.conf.set(key, value)
    try:
        for _ in range(3):
            job.add(*ids(1, 2, 3, 4 + job.files))
            job.run(job.pipeline(), shapes[shape])
            job.forget_commit()
        job.add(*ids(1))
        job.run(job.pipeline(), shapes[shape])
    finally:
        for key in settings:
            job.spark.conf.unset(key)
    if shape == "deduplicate":
        assert job.visible() == Counter([1, 2, 3, 4, 5, 6])
    else:
        # The running counts of odd and even: 2 2, then 5 3, then 7 5, and 8 for the single 1.
        assert job.visible(column="count") == Counter([2, 2, 5, 3, 7, 5, 8])


def test_transform_that_drops_every_row_does_not_starve_a_stateful_query(job: Job) -> None:
    """Spark would prune the whole batch away, and its state with it; the snapshot prevents that."""
    nothing = job.sink_folder("nothing")
    for batch in range(3):
        job.add(*ids(1, 2, 10 + batch))
        job.run(
            job.pipeline(sinks=[FileSink(nothing, transform=lambda df: df.where("1 = 0"))]),
            lambda df: df.dropDuplicates(["id"]),
        )
    assert job.visible(nothing) == Counter()


def test_second_start_in_one_process_is_a_new_incarnation(job: Job) -> None:
    """One ExactlyOnce object may be started again: it takes a new token and recovers."""
    pipeline = job.pipeline()
    for value in (1, 2):
        job.add(*ids(value))
        job.run(pipeline)
    head = pipeline.log.head("orders")
    assert head is not None
    assert head.token == 2
    assert job.visible() == Counter([1, 2])


def test_failing_batch_is_aborted_and_replayed(job: Job) -> None:
    """A transform fails once: nothing of the batch is visible, and the next start delivers it."""
    job.add(*ids(1, 2, 3))
    broken = job.pipeline(
        sinks=[
            FileSink(job.out),
            FileSink(
                job.sink_folder("bad"),
                name="bad",
                select=["id", "CASE WHEN id = 3 THEN raise_error('no') END AS oops"],
            ),
        ]
    )
    with pytest.raises(Exception, match="no"):
        job.run(broken)
    assert job.visible() == Counter()
    assert not list((job.out / "_sparkonce").iterdir())
    job.run(job.pipeline())
    assert job.visible() == Counter([1, 2, 3])


def test_decided_batch_is_committed_before_the_sinks_are_checked(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sink that cannot be written to now does not let what was decided expire."""

    def fail(point: str, where: object) -> None:
        if point == "decide.after":
            raise failpoints.InjectedError(point)

    class Refusing(FileSink):
        def validate(self, schema: pa.Schema) -> None:
            raise ConfigurationError("no rows today")

    job.add(*ids(1, 2))
    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "handler", fail)
        with pytest.raises(Exception, match=r"decide\.after"):
            job.run(job.pipeline())
    assert job.visible() == Counter()
    assert "no rows today" in refused(job, job.pipeline(sinks=[Refusing(job.out)]))
    assert job.visible() == Counter([1, 2])


def test_collections_after_a_task_do_not_walk_all_modules(job: Job) -> None:
    """PySpark collects after every task, which would cost more than a small batch itself."""

    def count(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in rows:
            pass
        yield pa.RecordBatch.from_pydict({"frozen": [gc.get_freeze_count()]})

    job.add(*ids(1, 2, 3))
    job.run(job.pipeline())
    counted = job.spark.range(2).mapInArrow(count, "frozen long").collect()
    assert max(row.frozen for row in counted) > 10_000


def refused(job: Job, pipeline: ExactlyOnce) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - Spark wraps the error it got
        job.run(pipeline)
    assert ConfigurationError.__name__ in str(caught.value)
    return str(caught.value)


def test_fresh_checkpoint_under_an_old_name_is_refused(job: Job) -> None:
    """It would deliver everything again; replaces= allows it, once."""
    job.add(*ids(1))
    pipeline = job.pipeline()
    job.run(pipeline)
    head = pipeline.log.head("orders")
    assert head is not None
    job.checkpoint = "fresh"
    assert f'replaces=\\"{head.query_id}\\"'.replace("\\", "") in refused(job, job.pipeline())
    assert job.visible() == Counter([1])
    job.run(job.pipeline(replaces=head.query_id))
    assert job.visible() == Counter([1, 1])


def test_fresh_log_for_an_old_checkpoint_is_refused(job: Job) -> None:
    """Another working directory or host: the whole path of the log is shown."""
    job.add(*ids(1))
    job.run(job.pipeline())
    job.add(*ids(2))
    other = f"sqlite:///{job.folder}/other.db"
    message = refused(job, job.pipeline(log=other))
    assert f"log= is {other}" in message
    assert job.visible() == Counter([1])


def test_checkpoint_that_ran_without_us_needs_adopt(job: Job) -> None:
    job.add(*ids(1))
    query = (
        job.spark.readStream.schema("id long, at timestamp")
        .json(str(job.source))
        .writeStream.foreachBatch(lambda _df, _batch_id: None)
        .option("checkpointLocation", str(job.folder / job.checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    job.add(*ids(2))
    assert "adopt=True" in refused(job, job.pipeline())
    job.run(job.pipeline(adopt=True))
    job.add(*ids(3))
    job.run(job.pipeline())
    assert job.visible() == Counter([2, 3])


def test_setting_that_cannot_work_is_refused_before_data_moves(job: Job) -> None:
    """The sink's own check runs before a token is taken."""
    job.add(*ids(1))
    pipeline = job.pipeline(sinks=[FileSink(job.folder / "nowhere")])
    assert "nowhere does not exist" in refused(job, pipeline)
    assert pipeline.log.head("orders") is None


def test_call_outside_foreach_batch_says_so(job: Job) -> None:
    with pytest.raises(ConfigurationError, match="foreachBatch"):
        job.pipeline()(job.spark.range(3), 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sinks": []}, "at least one sink"),
        ({"sinks": ["kafka"]}, "no TwoPhaseCommitSink"),
        ({"retain": 0}, "retain=0"),
        ({"log": "mysql://"}, "sqlite:///"),
    ],
)
def test_wrong_setting_is_named(job: Job, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        job.pipeline(**settings)


def test_two_sinks_of_one_name_are_refused(job: Job) -> None:
    with pytest.raises(ConfigurationError, match="two sinks are named 'file'"):
        job.pipeline(sinks=[FileSink(job.out), FileSink(job.out)])
