"""A Spark standalone cluster of two workers, and servers that its executors reach.

As root on Linux, each worker is a host of its own: see `sparkonce.testing.services.network`. The
servers then listen on an address of the network, and localhost is wrong on every executor.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from integration_tests.crash.scenario import Scenario, Target
from integration_tests.crash.targets import kafka_target, postgres_target, s3_target
from sparkonce.failpoints import ENVIRONMENT_VARIABLE
from sparkonce.testing.crash import Hit
from sparkonce.testing.quick_spark import jvm_options
from sparkonce.testing.services import (
    Network,
    Services,
    SparkCluster,
    SparkWorker,
    start_services,
    start_spark_cluster,
    unavailable,
    why_no_network,
)

WORKERS = 2


@dataclass(frozen=True)
class Farm:
    """The cluster, its network, its servers, and a folder that all hosts share."""

    cluster: SparkCluster
    network: Network | None
    services: Services
    shared: Path

    def conf(self, failpoints: Path) -> dict[str, str]:
        """Spark's settings for a driver whose executors reach the fail points too."""
        return {
            **self.cluster.driver_conf,
            "spark.executor.memory": "768m",
            "spark.executor.extraJavaOptions": jvm_options(),
            f"spark.executorEnv.{ENVIRONMENT_VARIABLE}": str(failpoints),
            "spark.task.maxFailures": "8",
            "spark.network.timeout": "20s",
            "spark.network.timeoutInterval": "5s",
            "spark.executor.heartbeatInterval": "2s",
        }


@pytest.fixture(scope="session")
def farm() -> Iterator[Farm]:
    missing = unavailable()
    for kind in ("kafka", "postgres", "versitygw"):
        if kind in missing:
            pytest.skip(f"{kind}: {missing[kind]}")
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sparkonce-cluster-")))
        shared = root / "shared"
        shared.mkdir()
        network, where = None, {}
        if why_no_network() is None:
            network = Network(WORKERS, root)
            stack.callback(network.close)
            where = {"host": network.server_address}
            for host in network.hosts:
                host.mounts[shared] = shared
        services = stack.enter_context(start_services(["kafka", "postgres", "versitygw"], **where))
        cluster = stack.enter_context(start_spark_cluster(WORKERS, network=network))
        yield Farm(cluster, network, services, shared)


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    """Two hosts of the test's own, which share its folder; start a cluster on them."""
    if (why := why_no_network()) is not None:
        pytest.skip(why)
    made = Network(WORKERS, tmp_path)
    for host in made.hosts:
        host.mounts[tmp_path] = tmp_path
    yield made
    made.close()


@pytest.fixture
def make_scenario(
    farm: Farm, request: pytest.FixtureRequest, fresh_name: Callable[[], str]
) -> Iterator[Callable[..., Scenario]]:
    """A function that makes a scenario on the cluster, with three sinks unless told otherwise."""
    with contextlib.ExitStack() as stack:

        def make(
            batches: int,
            *targets: Target,
            conf: Mapping[str, str] | None = None,
            job: str = "integration_tests.crash.job",
            is_tagged: bool = True,
            **settings: object,
        ) -> Scenario:
            folder = farm.shared / fresh_name()
            folder.mkdir()
            scenario = Scenario(
                folder,
                targets or three_targets(farm.services, fresh_name),
                batches,
                master=farm.cluster.master_url,
                conf={**farm.conf(folder / "driver-0" / "failpoints"), **(conf or {})},
                settings={"driver_rows": 0, **settings},
                command=(sys.executable, "-m", job),
                is_tagged=is_tagged,
            )
            return stack.enter_context(scenario)

        yield make


@pytest.fixture
def dice() -> random.Random:
    """Chances that `SPARKONCE_SEED` repeats; its seed is printed."""
    seed = int(os.environ.get("SPARKONCE_SEED") or random.SystemRandom().randrange(1_000_000))
    print(f"SPARKONCE_SEED={seed}")
    return random.Random(seed)  # noqa: S311 - to be repeated, not to be secret


def three_targets(
    services: Services, fresh_name: Callable[[], str], settings: Mapping[str, object] | None = None
) -> list[Target]:
    server = services.s3["versitygw"]
    return [
        kafka_target(services.kafka, fresh_name(), **(settings or {})),
        postgres_target(services.postgres, fresh_name(), **(settings or {})),
        s3_target(server, fresh_name(), "s3"),
    ]


def worker_of(farm: Farm, hit: Hit) -> SparkWorker:
    """The worker on which the process runs that hit the point; any worker for a driver's hit."""
    parents = {process.pid for process in psutil.Process(hit.pid).parents()}
    for worker in farm.cluster.workers:
        if parents & {executor.pid for executor in worker.executors()}:
            return worker
    return farm.cluster.workers[hit.pid % len(farm.cluster.workers)]
