"""``spark-pipelines run`` of examples/declarative_pipeline: killed, run again, fully refreshed."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pyarrow.dataset as ds
import pytest
from pyspark import __version__ as version

from sparkonce.testing.crash import DriverProcess, Failpoints
from sparkonce.testing.quick_spark import jvm_options
from sparkonce.testing.services import start_spark_connect
from sparkonce.testing.services.process import import_path
from sparkonce.txn_log import open_log
from sparkonce.txn_log.record import State

pytestmark = pytest.mark.skipif(version < "4.1", reason="Spark 4.0 has no declarative pipelines")

EXAMPLE = Path(__file__).parents[2] / "examples" / "declarative_pipeline"
FLOWS = """
import json

from pyspark import pipelines as dp
from pyspark.sql import SparkSession

spark = SparkSession.active()
SINKS = [
    {"type": "file", "folder": "/tmp/orders/out"},
    {"type": "sqlite", "path": {"env": "SHOP"}, "table": "orders"},
]
LOG = "sqlite:////tmp/orders/txn.db"
OPTIONS = {"name": "orders", "log": LOG, "sinks": json.dumps(SINKS)}
dp.create_sink("orders_out", "sparkonce", OPTIONS)


@dp.append_flow(target="orders_out")
def orders_flow():
    return spark.readStream.schema("id long, customer string, amount double").json("/tmp/orders/in")
"""
"""Flows of a project that has no module with a pipeline."""

COMMAND = Path(sys.executable).with_name("spark-pipelines")


class Project:
    """The example, with its rows in a folder of the test."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "orders"
        for name in ("in", "out"):
            (self.data / name).mkdir(parents=True)
        self._code = folder / "project"
        shutil.copytree(EXAMPLE, self._code, ignore=shutil.ignore_patterns("__pycache__"))
        for path in self._code.iterdir():
            path.write_text(path.read_text().replace("/tmp/orders", str(self.data)))  # noqa: S108
        self.points = Failpoints(folder / "failpoints")
        self.environment = {
            **self.points.environment,
            "PYTHONPATH": f"{self._code}{os.pathsep}{import_path()['PYTHONPATH']}",
            "PYSPARK_PYTHON": sys.executable,
        }
        warehouse = f"spark.sql.warehouse.dir={folder}/warehouse"
        self.options = ["--conf", warehouse, "--conf", "spark.ui.enabled=false"]
        self._folder, self._runs = folder, 0

    def has_options_only(self) -> None:
        (self._code / "jobs.py").unlink()
        flows = FLOWS.replace("/tmp/orders", str(self.data))  # noqa: S108
        (self._code / "flows.py").write_text(flows)
        self.environment["SHOP"] = str(self.data / "shop.db")

    def add(self, *ids: int) -> None:
        """One file of orders."""
        lines = [f'{{"id": {i}, "customer": "customer {i}", "amount": {i}.5}}' for i in ids]
        (self.data / "in" / f"{ids[0]}.json").write_text("\n".join(lines))

    @contextmanager
    def begin(self, *arguments: str) -> Iterator[DriverProcess]:
        """A run, which ends here at the latest."""
        self._runs += 1
        spec = self._code / "spark-pipeline.yml"
        process = DriverProcess(
            [str(COMMAND), *self.options, "run", "--spec", str(spec), *arguments],
            self.points,
            log=self._folder / f"run{self._runs}.log",
            env={
                **self.environment,
                "JAVA_TOOL_OPTIONS": jvm_options(),  # its JVM ignores --driver-java-options
                "SPARK_TESTING": "1",  # Spark Connect takes a free port in place of 15002
            },
        )
        try:
            process.start()
            yield process
        finally:
            process.close()

    def run(self, *arguments: str) -> str:
        """A run that succeeds, and its log."""
        with self.begin(*arguments) as process:
            assert process.wait() == 0, process.log.read_text()[-3000:]
        return process.log.read_text()

    def refused(self, *arguments: str) -> str:
        """A run that fails, and its log."""
        with self.begin(*arguments) as process:
            assert process.wait() == 1
        return process.log.read_text()

    def delivered(self) -> Counter[int]:
        """The ids of the orders in the files, which are those in the table."""
        files = ds.dataset(self.data / "out", format="parquet").to_table()
        with closing(sqlite3.connect(self.data / "shop.db")) as database:
            table = Counter(number for (number,) in database.execute("SELECT id FROM orders"))
        assert table == Counter(files["id"].to_pylist())
        return table

    def states(self) -> list[State]:
        with closing(open_log(f"sqlite:///{self.data}/txn.db")) as log:
            records = sorted(log.history("orders"), key=lambda record: record.id.batch_id)
        return [record.state for record in records]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.mark.slow
def test_every_order_arrives_once_through_kills(project: Project) -> None:
    """The program dies after a decision, and so does one Python process of Spark's driver."""
    project.add(1, 2)
    project.run()
    assert project.delivered() == Counter([1, 2])
    project.add(3)
    arm = project.points.arm("decide.after", batch=1)
    with project.begin() as process:
        process.wait_for(arm)
        process.kill()
    assert project.delivered() == Counter([1, 2])
    assert project.states() == [State.COMPLETE, State.DECIDED]
    project.points.disarm()
    project.add(4)
    arm = project.points.arm("decide.after", batch=2)
    with project.begin() as process:
        (hit,) = process.wait_for(arm)
        assert project.delivered() == Counter([1, 2, 3])
        os.kill(hit.pid, signal.SIGKILL)
        project.points.disarm()
        assert process.wait() == 0, "Spark did not start the flow again"
    assert project.delivered() == Counter([1, 2, 3, 4])
    assert project.states() == [State.COMPLETE] * 3


def test_pipeline_of_options_only_through_a_kill(project: Project) -> None:
    """`create_sink` gives the sinks, and refers to the driver's environment for one path."""
    project.has_options_only()
    project.add(1, 2)
    arm = project.points.arm("decide.after", batch=0)
    with project.begin() as process:
        process.wait_for(arm)
        process.kill()
    assert project.states() == [State.DECIDED]
    project.points.disarm()
    project.add(3)
    project.run()
    assert project.delivered() == Counter([1, 2, 3])
    assert project.states() == [State.COMPLETE] * 2


@pytest.mark.slow
def test_full_refresh_is_refused_and_can_be_taken_back(project: Project) -> None:
    """It begins with a new checkpoint, which stays the newest until somebody deletes it.

    All runs are on one Spark Connect server.
    """
    conf = {"spark.sql.pipelines.maxFlowRetryAttempts": "0"}
    with closing(start_spark_connect(conf=conf, env=project.environment)) as server:
        project.options = ["--remote", server.address]
        project.add(1)
        project.run()
        project.run()
        assert project.delivered() == Counter([1]), "without new files"
        assert "EXCLUDED" in project.run("--full-refresh", "orders_out"), "it is for tables"
        project.add(2)
        for arguments in (["--full-refresh-all"], []):
            log = project.refused(*arguments)
            assert "A fresh checkpoint reads its sources from the start" in log
            assert 'replaces="' in log
        assert project.delivered() == Counter([1])
        shutil.rmtree(project.data / "storage/_checkpoints/orders_out/orders_flow/1")
        project.run()
        assert project.delivered() == Counter([1, 2])
