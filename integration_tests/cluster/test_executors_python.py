"""What the executors' Python finds: nothing, another version, or what an archive brings along."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import sparkonce
from integration_tests.crash.scenario import ROOT, Scenario
from integration_tests.crash.targets import file_target
from sparkonce.testing.services import Network, start_spark_cluster

SOURCE = ROOT / "src"
ON_ALL_HOSTS = {
    "spark.cores.max": "4",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "10min",
}
"""No task runs before the driver has the executors of both hosts."""


def refusal(network: Network, folder: Path) -> str:
    """What a driver says whose query starts on the two hosts."""
    with start_spark_cluster(2, network=network) as cluster:
        target = file_target(folder / "out", "file")
        conf = {**cluster.driver_conf, **ON_ALL_HOSTS}
        scenario = Scenario(folder, [target], 1, master=cluster.master_url, conf=conf)
        with scenario:
            scenario.driver.start()
            status, said = scenario.driver.ends()
            assert status != 0
            assert not list(target.read())
    errors = [line for line in said.splitlines() if line.startswith("sparkonce.errors.")]
    assert errors, said[-3000:]
    return errors[0]


def test_host_without_sparkonce_is_named(network: Network, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    network.hosts[1].mounts[SOURCE] = empty
    error = refusal(network, tmp_path)
    assert f"host2 ({sys.executable}) lacks the module 'sparkonce'" in error
    assert "host1" not in error
    assert f"sparkonce {sparkonce.__version__} with the extras" in error


@pytest.mark.slow
def test_host_with_another_version_is_named(network: Network, tmp_path: Path) -> None:
    network.hosts[0].mounts[SOURCE] = other = tmp_path / "other"
    shutil.copytree(SOURCE, other)
    set_version(other, "0.0.9")
    error = refusal(network, tmp_path)
    assert f"host1 ({sys.executable}) has sparkonce 0.0.9, and the driver" in error
    assert "host2" not in error


def other_python() -> tuple[Path, str]:
    """An interpreter of another minor version, and that version."""
    beside = Path(sys.base_prefix).parent.glob("*/bin/python3.[0-9]*[0-9]")
    names = (f"python3.{minor}" for minor in range(15, 8, -1))
    on_path = (Path(found) for name in (*names, "pypy3") if (found := shutil.which(name)))
    show = "import sys; print('%d.%d' % sys.version_info[:2])"
    for python in (*on_path, *sorted(beside)):
        ran = subprocess.run([python, "-c", show], capture_output=True, text=True, check=False)
        version = ran.stdout.strip()
        if version.startswith("3.") and version != f"3.{sys.version_info.minor}":
            return python, version
    pytest.skip("needs an interpreter of another minor version (apt install pypy3)")


@pytest.mark.slow
@pytest.mark.parametrize("bad", [(1,), (0, 1)])
def test_host_with_another_python_is_named(
    network: Network, tmp_path: Path, bad: Sequence[int]
) -> None:
    """On one host, whose tasks Spark runs again on the other; and on both."""
    python, version = other_python()
    folder = tmp_path / "bin"
    folder.mkdir()
    wrapper = folder / Path(sys.executable).name
    wrapper.write_text(f'#!/bin/sh\nexec {python} "$@"\n')
    wrapper.chmod(0o755)
    for number in bad:
        network.hosts[number].mounts[Path(sys.executable).parent] = folder
    error = refusal(network, tmp_path)
    mine = f"{sys.version_info.major}.{sys.version_info.minor}"
    for number, host in enumerate(network.hosts):
        has_other = rf"{host.name} \(\S+\) has Python {version}, the driver {mine}"
        assert (re.search(has_other, error) is not None) == (number in bad), error
    assert "Give every executor the driver's Python version" in error


@pytest.mark.slow
def test_hosts_are_upgraded_while_a_query_runs(network: Network, tmp_path: Path) -> None:
    """New executors have another version than the driver: no row moves until both are equal."""
    installed = [tmp_path / host.name / "src" for host in network.hosts]
    for host, folder in zip(network.hosts, installed, strict=True):
        host.mounts[SOURCE] = folder
        shutil.copytree(SOURCE, folder)
    target = file_target(tmp_path / "out", "file")
    with start_spark_cluster(2, network=network) as cluster:
        conf, settings = dict(cluster.driver_conf), {"driver_rows": 0}
        with Scenario(
            tmp_path, [target], 3, master=cluster.master_url, conf=conf, settings=settings
        ) as scenario:
            driver = scenario.driver
            complete = driver.arm("complete.after", batch=0)
            driver.start(complete)
            seen = sorted(target.read())
            for folder, worker in zip(installed, cluster.workers, strict=True):
                set_version(folder, "0.0.9")
                for executor in worker.executors():
                    executor.kill()
            driver.let_go(complete)
            status, said = driver.ends()
            assert status != 0
            assert f"driver runs sparkonce {sparkonce.__version__}, and a worker on host" in said
            assert sorted(target.read()) == seen
            for folder in installed:
                set_version(folder, sparkonce.__version__)
            scenario.finish()


def set_version(folder: Path, version: str) -> None:
    init = folder / "sparkonce" / "__init__.py"
    init.write_text(
        re.sub(r"(?m)^__version__ = .*", f'__version__ = "{version}"', init.read_text())
    )


@pytest.mark.slow
def test_archive_brings_sparkonce_along(network: Network, tmp_path: Path) -> None:
    """The archive of docs/howto/install.md, and its two settings."""
    empty, packages = tmp_path / "empty", tmp_path / "packages"
    empty.mkdir()
    for host in network.hosts:
        host.mounts[SOURCE] = empty
    shutil.copytree(SOURCE / "sparkonce", packages / "sparkonce")
    archive = shutil.make_archive(str(tmp_path / "packages"), "gztar", packages)
    with start_spark_cluster(2, network=network) as cluster:
        target = file_target(tmp_path / "out", "file")
        conf = {
            **cluster.driver_conf,
            "spark.archives": f"{archive}#packages",
            "spark.executorEnv.PYTHONPATH": "./packages",
        }
        settings = {"driver_rows": 0}
        with Scenario(
            tmp_path, [target], 2, master=cluster.master_url, conf=conf, settings=settings
        ) as scenario:
            scenario.finish()
