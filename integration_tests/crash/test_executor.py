"""An executor is killed between two passes over one batch: a snapshot, or no batch at all."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from integration_tests.crash.scenario import ROOT
from sparkonce.testing.crash import DriverProcess, Failpoints

ROWS = 200

JOB = """
import os, sys, uuid
os.environ["PYSPARK_PYTHON"] = sys.executable
from pyspark.sql import SparkSession
from pyspark.sql.functions import udf
from sparkonce import ExactlyOnce
from sparkonce.sinks import FileSink

folder = sys.argv[1]
os.chdir(folder)  # Spark puts its work folder here
spark = (
    SparkSession.builder.master("local-cluster[2,1,1024]")
    .config("spark.ui.enabled", "false")
    .config("spark.driver.host", "127.0.0.1")
    .config("spark.driver.bindAddress", "127.0.0.1")
    .config("spark.executorEnv.PYTHONPATH", os.environ["PYTHONPATH"])
    .getOrCreate()
)
pipeline = ExactlyOnce(
    "executor",
    sinks=[
        FileSink(folder + "/left", name="left"),
        FileSink(folder + "/right", name="right", transform=lambda df: df.where("id >= 0")),
    ],
    log="sqlite:///" + folder + "/txn.db",
)
# Spark's own uuid() gives the same values when a partition is computed again; this one does not.
name = udf(lambda: uuid.uuid4().hex).asNondeterministic()
rows = spark.readStream.schema("id long").json(folder + "/in").select("id", name().alias("name"))
rows.writeStream.foreachBatch(pipeline).option("checkpointLocation", folder + "/ckpt").trigger(
    availableNow=True
).start().awaitTermination()
"""


def rows_of(folder: Path) -> list[tuple[int, str]]:
    return sorted(
        (row["id"], row["name"])
        for path in folder.glob("*.parquet")
        for row in pq.read_table(path).to_pylist()
    )


def executor_of(worker: int) -> psutil.Process:
    """The JVM that the Python worker serves."""
    for process in psutil.Process(worker).parents():
        if "CoarseGrainedExecutorBackend" in " ".join(process.cmdline()):
            return process
    raise AssertionError("the worker has no executor: is this a local cluster?")


@pytest.mark.slow
@pytest.mark.parametrize("sink", ["left", "right"])
def test_executor_killed_in_a_pass_over_a_batch_with_random_columns(
    tmp_path: Path, sink: str
) -> None:
    """Both sinks hold the same random values, or the batch is aborted in both and replayed."""
    for name in ("in", "left", "right"):
        (tmp_path / name).mkdir()
    for number in range(2):
        lines = (json.dumps({"id": n}) for n in range(number * ROWS, (number + 1) * ROWS))
        (tmp_path / "in" / f"{number}.json").write_text("\n".join(lines))
    failpoints = Failpoints(tmp_path / "failpoints")
    driver = DriverProcess(
        [sys.executable, "-c", JOB, str(tmp_path)],
        failpoints,
        log=tmp_path / "driver.log",
        env={"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"},
    )
    try:
        arm = failpoints.arm("precommit.after", sink=sink)
        driver.start()
        hit, *_ = driver.wait_for(arm)
        executor_of(hit.pid).kill()
        failpoints.disarm()
        status = driver.wait()
        left, right = (rows_of(tmp_path / name) for name in ("left", "right"))
        assert left == right
        assert len(left) == (2 * ROWS if status == 0 else 0)
        print(f"killed in the pass of {sink}: the query ended with {status}, {len(left)} rows")
        driver.start()
        assert driver.wait() == 0, driver.log.read_text()[-3000:]
    finally:
        driver.close()
    left, right = (rows_of(tmp_path / name) for name in ("left", "right"))
    assert left == right
    assert [row[0] for row in left] == list(range(2 * ROWS))
    for name in ("left", "right"):
        assert not list((tmp_path / name / "_sparkonce").iterdir())
