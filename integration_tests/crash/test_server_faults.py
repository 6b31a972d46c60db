"""Servers and workers are killed, and connections cut, while the driver is paused at a point.

driver pauses at a point of batch N ─► server killed ─┬─ started ─► driver resumes
                                                      └─ driver resumes, hits the fault ─► started
─► batch N is committed, or aborted and replayed by the next driver; never half
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from integration_tests.crash.faults import POINTS_OF_FAULTS, Fault, break_servers
from integration_tests.crash.scenario import POLICIES, Scenario, Target, shown
from integration_tests.crash.targets import kafka_target, postgres_target, real_targets, s3_target
from integration_tests.support.proxy import (
    KafkaProxy,
    Picks,
    Proxy,
    holds,
    http_request,
    kafka_request,
)
from sparkonce.protocol.pipeline import CommitPolicy
from sparkonce.testing.services import ServiceKind, Services, start_services
from sparkonce.testing.services.containers import choose_backend
from sparkonce.testing.services.process import free_port

END_TXN = 26


def test_each_server_killed_once(
    tmp_path: Path, services: Services, fresh_name: Callable[[], str]
) -> None:
    """One fault for each server, on both sides of the decision."""
    kinds = sorted({"kafka", "postgres", *services.s3})
    points = ("decide.after", "commit.before", "prepare.after", "complete.before")
    faults = [
        Fault(kind, point, is_back_first=False)  # type: ignore[arg-type]
        for kind, point in zip(kinds, points, strict=False)
    ]
    targets = real_targets(services, fresh_name)
    with Scenario(tmp_path, targets, len(faults) + 1) as scenario:
        break_servers(scenario, services, faults)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["kafka", "postgres", "s3mock", "versitygw"])
def test_server_killed_at_every_point(
    tmp_path: Path,
    services: Services,
    fresh_name: Callable[[], str],
    kind: ServiceKind,
    policy: CommitPolicy,
) -> None:
    """Each server at each point, started again before and after the driver resumed."""
    faults = [Fault(kind, point, first) for point in POINTS_OF_FAULTS for first in (True, False)]
    targets = real_targets(services, fresh_name)
    with Scenario(tmp_path, targets, len(faults) + 1, policy) as scenario:
        break_servers(scenario, services, faults)


@pytest.mark.parametrize(
    ("master", "is_retried"),
    [("local[2,2]", True), pytest.param("local[2]", False, marks=pytest.mark.slow)],
)
def test_python_worker_killed(
    tmp_path: Path,
    services: Services,
    fresh_name: Callable[[], str],
    master: str,
    is_retried: bool,
) -> None:
    """The task is retried and its first branches are orphans, or the query fails."""
    targets = real_targets(services, fresh_name)
    with Scenario(tmp_path, targets, 3, master=master) as scenario:
        driver = scenario.driver
        arm = driver.arm("prepare.after", batch=1, sink="kafka")
        driver.start(arm)
        seen = scenario.visible_of(1)
        worker = driver.failpoints.hits(arm)[0].pid
        assert worker != driver.pid
        os.kill(worker, signal.SIGKILL)
        driver.let_go()
        status, said = driver.ends()
        assert (status == 0) == is_retried, said[-3000:]
        scenario.note(master, shown(seen), "task retried" if is_retried else "query failed")
        if is_retried:
            scenario.check_end()
        else:
            scenario.finish()
        scenario.print_table("master", "visible at the kill", "then")


# -- connections that are cut at the commit --------------------------------------------------------


@dataclass
class Cut:
    """A sink behind a proxy, and the request whose answer gets lost."""

    target: Target
    proxy: Proxy
    request: Picks


@pytest.fixture
def cuts(services: Services, fresh_name: Callable[[], str]) -> Iterator[list[Cut]]:
    """Every sink behind a proxy; Kafka's sink has its own broker, which advertises the proxy."""
    with contextlib.ExitStack() as stack:

        def proxy_of(port: int, kind: type[Proxy] = Proxy) -> Proxy:
            return stack.enter_context(contextlib.closing(kind(port)))

        made = []
        if choose_backend() != "docker":  # a container advertises its published address
            port = free_port()
            proxy = proxy_of(port, KafkaProxy)
            advertised = {"advertised.listeners": f"PLAINTEXT://127.0.0.1:{proxy.port}"}
            own = stack.enter_context(
                start_services(["kafka"], ports={"kafka": port}, kafka_config=advertised)
            )
            target = kafka_target(own.kafka, fresh_name())
            made.append(Cut(target, proxy, kafka_request(END_TXN)))
        dsn = services.postgres.dsn
        port = int(dsn.rpartition(":")[2].partition("/")[0])
        proxy = proxy_of(port)
        dsn = dsn.replace(f":{port}/", f":{proxy.port}/")
        target = postgres_target(services.postgres, fresh_name(), dsn=dsn)
        made.append(Cut(target, proxy, holds(b"COMMIT PREPARED")))
        for name, server in services.s3.items():
            proxy = proxy_of(int(server.endpoint_url.rpartition(":")[2]))
            url = f"http://127.0.0.1:{proxy.port}"
            target = s3_target(server, fresh_name(), name, endpoint_url=url)
            made.append(Cut(target, proxy, http_request(b"POST ")))
        yield made


@pytest.mark.parametrize(
    "policy", ["immediate", pytest.param("after_checkpoint", marks=pytest.mark.slow)]
)
def test_answer_of_the_commit_is_lost(
    tmp_path: Path, cuts: list[Cut], policy: CommitPolicy
) -> None:
    """The commit landed, but its outcome is unknown: a proof in each target resolves it."""
    targets = [cut.target for cut in cuts]
    with Scenario(tmp_path, targets, len(cuts) + 1, policy) as scenario:
        driver = scenario.driver
        arms = [driver.arm("decide.after", batch=batch) for batch in range(len(cuts) + 1)]
        driver.start(arms[0])
        for batch, cut in enumerate(cuts):
            cut.proxy.lose = cut.request
            driver.let_go(arms[batch])
            driver.process.wait_for(arms[batch + 1])
            assert cut.proxy.lost == 1, f"{cut.target.name}: no answer was lost"
            seen = scenario.visible_of(batch + 1)
            assert set(seen.values()) == {"none"}
            scenario.note(policy, batch, cut.target.name, cut.proxy.lost, "all")
        driver.let_go()
        status, said = driver.ends()
        assert status == 0, said[-3000:]
        scenario.check_end()
        scenario.print_table("policy", "batch", "cut at the commit", "answers lost", "then")
