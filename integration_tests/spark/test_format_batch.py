"""``df.write.format("sparkonce")``: a batch job with a key is in every sink once, or in none."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark import __version__ as version

from integration_tests.support.format_job import FormatJob
from integration_tests.support.spark import ids
from sparkonce import shaped
from sparkonce.sinks import FileSink
from sparkonce.testing.crash import Arm, Failpoints
from sparkonce.txn_log import open_log
from sparkonce.txn_log.record import State, TransactionRecord

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sparkonce.sinks.base import AnySink

pytestmark = pytest.mark.skipif(version < "4.1", reason="Spark 4.0 gives a data source no Arrow")


class BatchJob(FormatJob):
    """A batch job into two folders."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        super().__init__(spark, folder)
        self.right = self.sink_folder("right")
        self.sinks: list[AnySink] = [FileSink(self.out), FileSink(self.right, name="right")]

    def save(
        self,
        key: str,
        values: Iterable[int],
        shape: Callable[[DataFrame], DataFrame] = lambda df: df,
        **settings: Any,
    ) -> None:
        rows = self.spark.createDataFrame([(value,) for value in values], "id long")
        writer = shape(rows.repartition(2, "id")).write.format("sparkonce").mode("append")
        pipeline = self.publish(settings.pop("sinks", self.sinks), **settings)
        writer.option("pipeline", pipeline).option("key", key).save()

    def seen(self) -> Counter[int]:
        """The rows, which are the same in both folders."""
        assert self.visible() == self.visible(self.right)
        return self.visible()

    def records(self) -> list[TransactionRecord]:
        with closing(open_log(self.log)) as log:
            return sorted(log.history("orders"), key=lambda record: record.id.batch_id)


@pytest.fixture
def job(spark: SparkSession, tmp_path: Path) -> BatchJob:
    return BatchJob(spark, tmp_path)


def test_rows_of_a_key_are_written_once(job: BatchJob) -> None:
    """However often the job runs, whatever its rows then are, and whichever jobs come between."""
    job.save("monday", [1, 2, 3])
    job.save("monday", [1, 2, 3])
    job.save("tuesday", [4])
    job.save("monday", [9])
    assert job.seen() == Counter([1, 2, 3, 4])
    assert [record.offsets for record in job.records()] == [
        ('{"key": "monday"}',),
        ('{"key": "tuesday"}',),
    ]
    assert not job.left_over(job.out, job.right)


def test_job_without_rows_is_complete_too(job: BatchJob) -> None:
    job.save("monday", [])
    job.save("monday", [1])
    assert job.seen() == Counter()


@pytest.mark.parametrize("point", ["vote.before", "decide.before"])
def test_job_that_fails_before_its_decision_writes_nothing(job: BatchJob, point: str) -> None:
    arm = job.points.arm(point, action="error")
    with pytest.raises(Exception, match="armed at"):
        job.save("monday", [1, 2, 3])
    assert job.points.hits(arm)
    assert job.seen() == Counter()
    assert not job.left_over(job.out, job.right)
    job.points.disarm()
    job.save("monday", [1, 2, 3])
    assert job.seen() == Counter([1, 2, 3])


@pytest.mark.parametrize(
    "point", ["begin.after", "decide.before", "decide.after", "complete.before"]
)
def test_process_that_is_killed(job: BatchJob, point: str) -> None:
    """The next run with the key finishes what is decided, or writes what is not."""
    arm = job.points.arm(point)
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(job.save, "monday", [1, 2, 3])
        os.kill(_pid_at(job, arm, saving), signal.SIGKILL)
        assert saving.exception() is not None
    job.points.disarm()
    job.save("monday", [1, 2, 3])
    assert job.seen() == Counter([1, 2, 3])
    (record,) = job.records()
    assert (record.state, record.revision) == (State.COMPLETE, 0)
    assert not job.left_over(job.out, job.right)


def test_next_job_finishes_what_the_last_one_decided(job: BatchJob) -> None:
    arm = job.points.arm("decide.after", action="error")
    with pytest.raises(Exception, match="armed at"):
        job.save("monday", [1, 2])
    assert job.points.hits(arm)
    job.points.disarm()
    job.save("tuesday", [3])
    assert job.seen() == Counter([1, 2, 3])


def test_two_jobs_at_a_time(job: BatchJob) -> None:
    """The one that began last goes on; the other one has decided nothing, and may run again."""
    arm = job.points.arm("decide.before", batch=0)
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(job.save, "monday", [1, 2])
        _pid_at(job, arm, saving)
        other = BatchJob.__new__(BatchJob)
        other.__dict__.update(job.__dict__)
        other.points, other._published = Failpoints(job.folder / "other"), 100
        other.save("tuesday", [3])
        job.points.disarm()
        assert "FencedError" in str(saving.exception())
    assert job.seen() == Counter([3])
    job.save("monday", [1, 2])
    assert job.seen() == Counter([1, 2, 3])


def test_lost_branch_is_rewritten_if_the_job_runs_again(job: BatchJob) -> None:
    """With the same rows, as their hashes show; other rows are refused."""
    arm = job.points.arm("decide.after", action="error")
    hashed = lambda df: shaped(df, job.sinks)  # noqa: E731
    with pytest.raises(Exception, match="armed at"):
        job.save("monday", [1, 2, 3, 4], hashed)
    assert job.points.hits(arm)
    job.points.disarm()
    min(job.left_over(job.out)).unlink()
    with pytest.raises(Exception, match="PreparedBranchLostError"):
        job.save("monday", [1, 2, 3, 5], hashed)
    job.save("monday", [1, 2, 3, 4], hashed)
    assert job.seen() == Counter([1, 2, 3, 4])


def test_what_cannot_work_is_refused(job: BatchJob) -> None:
    rows = job.spark.range(3)
    writer = rows.write.format("sparkonce").option("pipeline", job.publish())
    with pytest.raises(Exception, match=r'option\("key", …\)'):
        writer.mode("append").save()
    with pytest.raises(Exception, match=r'use mode\("append"\)'):
        writer.option("key", "monday").mode("overwrite").save()
    with pytest.raises(Exception, match=r"pass log="):
        job.save("monday", [1], log="checkpoint")
    job.add(*ids(1))
    job.run(job.pipeline())
    with pytest.raises(Exception, match="belongs to the streaming query"):
        job.save("monday", [1])


def _pid_at(job: FormatJob, arm: Arm, saving: Future[None]) -> int:
    waiting = threading.Event()
    while not (hits := job.points.hits(arm)):
        assert not saving.done(), saving.exception()
        waiting.wait(0.05)
    return hits[0].pid
