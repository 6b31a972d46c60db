"""YARN, in client and in cluster mode: its containers have only what an archive brings along.

The interpreter of driver and executors is the one that made the virtual environment, so it has no
sparkonce by itself. The checkpoint is on HDFS.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Protocol

import psutil
import pyspark
import pytest
from packaging.requirements import Requirement

from integration_tests.cluster.conftest import three_targets
from integration_tests.crash.scenario import ROOT, Driver, Scenario
from sparkonce.failpoints import ENVIRONMENT_VARIABLE
from sparkonce.testing.crash import Arm, Hit
from sparkonce.testing.quick_spark import jvm_options
from sparkonce.testing.services import Hdfs, Services, Yarn, YarnNode, start_hdfs, start_yarn

pytestmark = pytest.mark.slow

PYTHON = str(Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}"))
SPARK = Path(pyspark.__file__).parent
JOB = ROOT / "integration_tests" / "crash" / "job.py"
EXECUTOR = "org.apache.spark.executor.YarnCoarseGrainedExecutorBackend"
DRIVER = "org.apache.spark.deploy.yarn.ApplicationMaster"
"""In cluster mode, the JVM of the driver."""


@dataclass(frozen=True)
class Site:
    """A YARN, the servers of the sinks, and an archive with sparkonce and its clients."""

    hdfs: Hdfs
    yarn: Yarn
    services: Services
    archive: Path

    def conf(self, failpoints: Path) -> dict[str, str]:
        """Spark's settings, as docs/howto/install.md has them for an archive."""
        mine = {
            "PYTHONPATH": "./packages",
            "PYSPARK_PYTHON": PYTHON,
            ENVIRONMENT_VARIABLE: str(failpoints),
        }
        return {
            "spark.archives": f"{self.archive}#packages",
            **{f"spark.executorEnv.{key}": value for key, value in mine.items()},
            **{f"spark.yarn.appMasterEnv.{key}": value for key, value in mine.items()},
            "spark.yarn.jars": f"local:{SPARK}/jars/*",
            "spark.yarn.maxAppAttempts": "4",
            "spark.executor.instances": "2",
            "spark.executor.memory": "512m",
            "spark.driver.memory": "512m",
            "spark.yarn.am.memory": "512m",
            "spark.driver.extraJavaOptions": jvm_options(),
            "spark.executor.extraJavaOptions": jvm_options(),
            "spark.yarn.report.interval": "500ms",
            "spark.yarn.scheduler.heartbeat.interval-ms": "500",
            "spark.network.timeout": "20s",
            "spark.network.timeoutInterval": "5s",
            "spark.executor.heartbeatInterval": "2s",
        }

    def kill_container(self, main: str, hit: Hit) -> None:
        """SIGKILL the container's JVM whose child process hit the point."""
        self._around(main, hit)[1].kill()

    def kill_node(self, main: str, hit: Hit) -> None:
        """SIGKILL the node of that container with all its containers, and start it again."""
        node, _ = self._around(main, hit)
        node.kill()
        node.start()

    def _around(self, main: str, hit: Hit) -> tuple[YarnNode, psutil.Process]:
        around = {process.pid for process in psutil.Process(hit.pid).parents()}
        return next(
            (node, process)
            for node in self.yarn.nodes
            for process in node.containers(main)
            if process.pid in around
        )


@pytest.fixture(scope="module")
def site(services: Services, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    archive = tmp_path_factory.mktemp("archive") / "packages.tgz"
    write_archive(archive)
    with contextlib.ExitStack() as stack:
        hdfs = stack.enter_context(start_hdfs())
        yield Site(hdfs, stack.enter_context(start_yarn(hdfs)), services, archive)


def write_archive(file: Path) -> None:
    """What `pip install --target` of the wheel with its extras leaves, without PySpark."""
    with tarfile.open(file, "w:gz", compresslevel=1, dereference=True) as archive:
        archive.add(ROOT / "src" / "sparkonce", "sparkonce")
        for name in needed("sparkonce", {"kafka", "postgres", "s3"}) - {"sparkonce", "pyspark"}:
            made = distribution(name)
            for path in made.files or ():
                if ".." not in path.parts and (place := Path(str(path.locate()))).exists():
                    archive.add(place, str(path), recursive=False)


def needed(name: str, extras: set[str]) -> set[str]:
    """The distribution and all that it needs, PySpark's needs left out."""
    found = {name}
    for text in distribution(name).requires or () if name != "pyspark" else ():
        need = Requirement(text)
        if need.marker is None or any(need.marker.evaluate({"extra": e}) for e in extras or {""}):
            found |= needed(need.name.lower(), set(need.extras))
    return found


class OnYarn(Protocol):
    """Makes a scenario of three sinks on YARN, with its checkpoint on HDFS."""

    def __call__(self, *, is_cluster_mode: bool) -> Scenario: ...


@pytest.fixture
def on_yarn(site: Site, tmp_path: Path, fresh_name: Callable[[], str]) -> Iterator[OnYarn]:
    name = fresh_name()
    conf = site.conf(tmp_path / "driver-0" / "failpoints")
    with contextlib.ExitStack() as stack:

        def make(*, is_cluster_mode: bool) -> Scenario:
            command, env = cluster_mode(conf) if is_cluster_mode else client_mode()
            scenario = Scenario(
                tmp_path,
                three_targets(site.services, fresh_name),
                4,
                master="yarn",
                # Set by the job itself, it would replace what spark-submit adds to PYTHONPATH.
                conf={} if is_cluster_mode else conf,
                settings={"driver_rows": 0},
                command=command,
                env={**env, **site.yarn.env},
                log_address=f"{site.services.postgres.dsn}?schema={name}",
                checkpoint_url=f"{site.hdfs.url}/{name}",
            )
            return stack.enter_context(scenario)

        yield make
    for node in site.yarn.nodes:  # pytest shows it if the test fails
        for file in sorted(node.folder.glob("logs/*/*/std*")):
            print(f"{file}:", *file.read_text(errors="replace").splitlines()[-80:], sep="\n")


def client_mode() -> tuple[list[str], dict[str, str]]:
    """How a driver program is started, and what it imports."""
    paths = map(str, (ROOT, ROOT / "src", *sys.path))
    command = [PYTHON, "-m", "integration_tests.crash.job"]
    return command, {"PYTHONPATH": os.pathsep.join(paths)}


def cluster_mode(conf: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """How a driver program is sent to YARN, which starts it."""
    submit = [f"{SPARK}/bin/spark-submit", "--master", "yarn", "--deploy-mode", "cluster"]
    settings = [word for key, value in conf.items() for word in ("--conf", f"{key}={value}")]
    return [*submit, *settings, str(JOB)], {}


def reached(driver: Driver, arm: Arm) -> Hit:
    """YARN places containers slowly, and a node's first container waits for the archive."""
    return driver.process.wait_for(arm, timeout_s=600)[0]


def kill_at(driver: Driver, arm: Arm, kill: Callable[[str, Hit], None], main: str) -> None:
    """Kill what runs around the process that reaches the point, and let the others continue."""
    kill(main, reached(driver, arm))
    driver.let_go(arm)


def test_client_mode(site: Site, on_yarn: OnYarn) -> None:
    """An executor, a node and the driver are killed."""
    scenario = on_yarn(is_cluster_mode=False)
    driver = scenario.driver
    arms = [driver.arm("prepare.after", batch=0), driver.arm("write.after", batch=1)]
    last = driver.arm("decide.after", batch=2)
    driver.start()
    kill_at(driver, arms[0], site.kill_container, EXECUTOR)
    kill_at(driver, arms[1], site.kill_node, EXECUTOR)
    reached(driver, last)
    driver.kill()
    assert set(scenario.visible_of(2).values()) == {"none"}
    scenario.finish()


def test_cluster_mode(site: Site, on_yarn: OnYarn) -> None:
    """An executor, the driver, and the node with the next driver are killed."""
    scenario = on_yarn(is_cluster_mode=True)
    driver = scenario.driver
    arms = [
        driver.arm("prepare.after", batch=0),
        driver.arm("decide.after", batch=1),
        driver.arm("vote.after", batch=2),
    ]
    driver.start()
    kill_at(driver, arms[0], site.kill_container, EXECUTOR)
    kill_at(driver, arms[1], site.kill_container, DRIVER)
    kill_at(driver, arms[2], site.kill_node, DRIVER)
    status, said = driver.ends()
    assert status == 0, said[-3000:]
    scenario.check_end()
