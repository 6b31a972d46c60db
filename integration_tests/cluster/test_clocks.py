"""Executors whose clocks differ from the driver's, as Python and the sinks see them there."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from integration_tests.crash.scenario import ROOT, Scenario
from integration_tests.crash.targets import file_target, kafka_target
from sparkonce.testing.services import (
    Network,
    SparkCluster,
    start_services,
    start_spark_cluster,
    unavailable,
)

SOURCE = ROOT / "src"
SHIFT = """
import time
_real = time.time
time.time = lambda: _real() + {shift_s}
"""

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster_with(
    network: Network, tmp_path: Path
) -> Iterator[Callable[[float, float], SparkCluster]]:
    """A function that starts a cluster whose hosts are so many seconds ahead of the driver."""
    with ExitStack() as stack:

        def start(*shifts_s: float) -> SparkCluster:
            for host, shift_s in zip(network.hosts, shifts_s, strict=True):
                copy = tmp_path / f"source{host.address}_{shift_s}"
                shutil.copytree(SOURCE, copy)
                with (copy / "sparkonce" / "__init__.py").open("a") as init:
                    init.write(SHIFT.format(shift_s=shift_s))
                host.mounts[SOURCE] = copy
            return stack.enter_context(start_spark_cluster(2, network=network))

        yield start


@pytest.fixture
def make_scenario(
    network: Network, tmp_path: Path, fresh_name: Callable[[], str]
) -> Iterator[Callable[[SparkCluster], Scenario]]:
    if "kafka" in (missing := unavailable()):
        pytest.skip(missing["kafka"])
    with ExitStack() as stack:
        services = stack.enter_context(start_services(["kafka"], host=network.server_address))

        def make(cluster: SparkCluster) -> Scenario:
            targets = [
                file_target(tmp_path / "out", "file"),
                kafka_target(services.kafka, fresh_name()),
            ]
            return stack.enter_context(
                Scenario(
                    tmp_path,
                    targets,
                    4,
                    master=cluster.master_url,
                    conf=cluster.driver_conf,
                    settings={"driver_rows": 0},
                )
            )

        yield make


def test_clocks_that_differ_by_seconds_do_no_harm(
    cluster_with: Callable[..., SparkCluster], make_scenario: Callable[[SparkCluster], Scenario]
) -> None:
    make_scenario(cluster_with(20, -20)).finish()


@pytest.mark.parametrize("hours", [3, -3])
def test_clocks_that_differ_by_hours_are_named(
    cluster_with: Callable[..., SparkCluster],
    make_scenario: Callable[[SparkCluster], Scenario],
    hours: int,
) -> None:
    """Nobody could say until when the broker keeps a transaction, so no batch is decided."""
    scenario = make_scenario(cluster_with(hours * 3600, hours * 3600))
    scenario.driver.start()
    status, said = scenario.driver.ends()
    assert status != 0
    assert "clocks of" in said, said[-3000:]
    assert not any(list(target.read()) for target in scenario.targets)
