"""An executor is killed in the middle of a batch with random columns: the query goes on.

A kill between two passes destroys a part of the snapshot. A kill while rows are distributed
destroys a part of the shuffle.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from integration_tests.crash.scenario import ROOT
from sparkonce.testing.crash import DriverProcess, Failpoints
from sparkonce.testing.quick_spark import submit_args

ROWS = 200

JOB = """
import os, sys, uuid
os.environ["PYSPARK_PYTHON"] = sys.executable
from pyspark.sql import SparkSession
from pyspark.sql.functions import udf
from sparkonce import ExactlyOnce
from sparkonce.sinks import FileSink

folder, kind, is_checked = sys.argv[1:]


class DealingSink(FileSink):
    distribute_by = ("name",)


if kind != "dealt":
    sinks = [
        FileSink(folder + "/left", name="left"),
        FileSink(folder + "/right", name="right", transform=lambda df: df.where("id >= 0")),
    ]
else:
    sinks = [DealingSink(folder + "/left", name="left", writers=6)]
os.chdir(folder)  # Spark puts its work folder here
spark = (
    SparkSession.builder.master("local-cluster[2,1,1024]")
    .config("spark.ui.enabled", "false")
    .config("spark.driver.host", "127.0.0.1")
    .config("spark.driver.bindAddress", "127.0.0.1")
    .config("spark.executorEnv.PYTHONPATH", os.environ["PYTHONPATH"])
    .config("spark.sql.shuffle.orderIndependentChecksum.enabled", is_checked)
    .config("spark.sql.shuffle.orderIndependentChecksum.enableFullRetryOnMismatch", is_checked)
    .getOrCreate()
)
pipeline = ExactlyOnce("executor", sinks=sinks, log="sqlite:///" + folder + "/txn.db")
# Spark's own uuid() gives the same values when a partition is computed again; this one does not.
name = udf(lambda: uuid.uuid4().hex).asNondeterministic()
rows = spark.readStream.schema("id long").json(folder + "/in").select("id", name().alias("name"))
if kind == "stateful":
    rows = rows.dropDuplicates(["id"])
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
    """The executor's JVM, whose Python worker this is."""
    for process in psutil.Process(worker).parents():
        if "CoarseGrainedExecutorBackend" in " ".join(process.cmdline()):
            return process
    raise AssertionError("the worker has no executor: is this a local cluster?")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the rows of one batch."""
    for name in ("in", "left", "right"):
        (tmp_path / name).mkdir()
    for number in range(2):
        write_rows(tmp_path, number, range(number * ROWS, (number + 1) * ROWS))
    return tmp_path


def write_rows(folder: Path, number: int, ids: range) -> None:
    (folder / "in" / f"{number}.json").write_text("\n".join(json.dumps({"id": n}) for n in ids))


def kill_executor(folder: Path, case: Sequence[str], sinks: Sequence[str], **arm: Any) -> None:
    """Kill it when a branch is prepared: the query goes on, and its rows are visible once.

    A second run of the query gets some of the rows again, and some new ones.
    """
    failpoints = Failpoints(folder / "failpoints")
    driver = DriverProcess(
        [sys.executable, "-c", JOB, str(folder), *case],
        failpoints,
        log=folder / "driver.log",
        env={
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}",
            "PYSPARK_SUBMIT_ARGS": submit_args(),
        },
    )

    def seen() -> list[tuple[int, str]]:
        first, *others = (rows_of(folder / name) for name in sinks)
        assert all(rows == first for rows in others)
        return first

    with contextlib.closing(driver):
        armed = failpoints.arm("prepare.after", **arm)
        driver.start()
        hit, *_ = driver.wait_for(armed)
        executor_of(hit.pid).kill()
        failpoints.disarm()
        status = driver.wait()
        rows = seen()
        print(f"{case}, killed at {armed}: the query ended with {status}, {len(rows)} rows")
        assert status == 0, driver.log.read_text()[-3000:]
        assert [row[0] for row in rows] == list(range(2 * ROWS))
        write_rows(folder, 2, again := range(ROWS, 3 * ROWS))
        driver.start()
        assert driver.wait() == 0, driver.log.read_text()[-3000:]
    wanted = range(3 * ROWS) if case[0] == "stateful" else [*range(2 * ROWS), *again]
    assert [row[0] for row in seen()] == sorted(wanted)
    for name in sinks:
        assert not list((folder / name / "_sparkonce").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["two passes", "stateful"])
@pytest.mark.parametrize("sink", ["left", "right"])
def test_executor_killed_in_a_pass_over_a_batch_with_random_columns(
    folder: Path, sink: str, kind: str
) -> None:
    """The batch is aborted and written again; both sinks have the same random values."""
    kill_executor(folder, [kind, "true"], ["left", "right"], sink=sink)


@pytest.mark.slow
@pytest.mark.parametrize("is_checked", ["true", "false"])
def test_executor_killed_while_rows_are_dealt_out_by_a_random_column(
    folder: Path, is_checked: str
) -> None:
    """If Spark does not verify that a recomputed shuffle is equal, sparkonce takes a snapshot."""
    kill_executor(folder, ["dealt", is_checked], ["left"], skip=1)
