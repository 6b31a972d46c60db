"""The ways to bring sparkonce to the executors that docs/howto/install.md prints, run as printed.

The executors' Python is the one that made the virtual environment, so it has no sparkonce and no
client library by itself. Images are not built here: what they amount to, a Python with sparkonce on
each host, is what the other tests of this folder run on.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from integration_tests.crash.scenario import ROOT
from sparkonce.testing.services import Network, start_spark_cluster

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "howto" / "install.md"
PYTHON = str(Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}"))
ROWS = 200
CLIENTS = ("sparkonce", "confluent_kafka", "psycopg", "boto3")
JOB = f"""
import importlib
import sys
from pyspark.sql import SparkSession
from sparkonce import ExactlyOnce
from sparkonce.sinks import FileSink

FOLDER = sys.path[0].removesuffix("/jobs")
pipeline = ExactlyOnce(
    "orders", sinks=[FileSink(FOLDER + "/out")], log=f"sqlite:///{{FOLDER}}/txn.db", driver_rows=0
)


def places(_):
    return [importlib.import_module(name).__file__ for name in {CLIENTS}]


if __name__ == "__main__":
    spark = SparkSession.builder.getOrCreate()
    for found in spark.sparkContext.parallelize(range(8), 8).map(places).collect():
        print("imported:", *found)
    rows = spark.readStream.schema("id long").json(FOLDER + "/in")
    query = rows.writeStream.foreachBatch(pipeline).trigger(availableNow=True)
    query.option("checkpointLocation", FOLDER + "/checkpoint").start().awaitTermination()
"""


def block(title: str, shared: Path) -> str:
    """The commands below this title, with a folder of the test in the place of /shared."""
    text = PAGE.read_text().partition(f"**{title}**")[2]
    found = re.search(r"(?ms)^```sh\n(.*?)^```$", text)
    assert found, f"{PAGE} has no commands for {title}"
    return found[1].replace("/shared/", f"{shared}/")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder)]
    subprocess.run(build, check=True, cwd=ROOT, capture_output=True)
    return folder


@pytest.fixture
def project(tmp_path: Path, dist: Path) -> Path:
    """A folder with the wheel, the job and a source, which all hosts share."""
    folder = tmp_path / "project"
    for name in ("jobs", "in", "out", "conf"):
        (folder / name).mkdir(parents=True)
    (folder / "jobs" / "orders.py").write_text(JOB)
    for number in range(2):
        ids = range(number, ROWS, 2)
        (folder / "in" / f"{number}.json").write_text("\n".join(f'{{"id": {n}}}' for n in ids))
    shutil.copytree(dist, folder / "dist")
    return folder


def run_as_printed(commands: str, project: Path, settings: Mapping[str, str]) -> str:
    """Run them as a user does whose environment and spark-defaults.conf name the cluster."""
    lines = [f"{key} {value}" for key, value in settings.items()]
    (project / "conf" / "spark-defaults.conf").write_text("\n".join(lines) + "\n")
    ours = {"PYTHONPATH", "PYSPARK_SUBMIT_ARGS"}
    env = {
        **{key: value for key, value in os.environ.items() if key not in ours},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "SPARK_CONF_DIR": str(project / "conf"),
        "PYSPARK_PYTHON": PYTHON,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
    }
    shell = ["sh", "-eux", "-c", commands]
    ran = subprocess.run(shell, cwd=project, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-5000:]
    return ran.stdout


@pytest.mark.parametrize(
    ("title", "found_in"),
    [
        ("In an archive.", r"/work/app-[^ ]*/packages/"),
        ("In a shared folder.", r"/shared/packages/"),
    ],
)
def test_way_that_the_page_prints(
    network: Network, tmp_path: Path, project: Path, title: str, found_in: str
) -> None:
    """Executors of both hosts import sparkonce and the clients from it, and write the rows."""
    alone = [PYTHON, "-c", "import sparkonce"]
    assert subprocess.run(alone, check=False, env={}, capture_output=True).returncode != 0
    (shared := tmp_path / "shared").mkdir()
    with start_spark_cluster(2, network=network, env={"PYTHONPATH": ""}) as cluster:
        settings = {
            **cluster.driver_conf,
            "spark.master": cluster.master_url,
            "spark.ui.enabled": "false",
            "spark.cores.max": "4",
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "10min",
        }
        said = run_as_printed(block(title, shared), project, settings)
    imported = re.findall(r"(?m)^imported: (.*)$", said)
    assert len(imported) == 8
    for places in imported:
        assert len(re.findall(found_in, places)) == len(CLIENTS), places
    rows = (pq.read_table(file).column("id").to_pylist() for file in project.glob("out/*.parquet"))
    assert Counter(chain.from_iterable(rows)) == Counter(range(ROWS))
