"""``format("sparkonce")`` over Spark Connect, with real sinks: each of its processes is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from pyspark import __version__ as version

from integration_tests.crash.chains import batches_of
from integration_tests.crash.format_job import CONFIG, SERVER
from integration_tests.crash.scenario import ROWS_PER_BATCH, Scenario, shown
from integration_tests.crash.targets import Target, file_target, real_targets
from sparkonce.failpoints import ENVIRONMENT_VARIABLE
from sparkonce.testing.crash import POLL_S
from sparkonce.testing.kills import Kill, crash_points
from sparkonce.testing.services import Services, SparkConnectServer, start_spark_connect

pytestmark = pytest.mark.skipif(version < "4.1", reason="Spark 4.0 gives a data source no Arrow")

CLIENT = (sys.executable, "-m", "integration_tests.crash.format_job")
CONF = {"spark.sql.codegen.wholeStage": "false", "spark.sql.session.timeZone": "UTC"}


@contextlib.contextmanager
def over_connect(
    folder: Path, targets: Sequence[Target], batches: int
) -> Iterator[tuple[Scenario, SparkConnectServer]]:
    """A scenario whose driver program is a client of a server of its own."""
    env = {
        ENVIRONMENT_VARIABLE: str(folder / "driver-0" / "failpoints"),  # the first client's
        CONFIG: str(folder / "config.json"),
    }
    server = start_spark_connect(conf=CONF, env=env)
    try:
        client = {SERVER: server.address}
        with Scenario(folder, targets, batches, command=CLIENT, env=client) as scenario:
            yield scenario, server
    finally:
        server.close()


def kill_at_every_step(
    scenario: Scenario, server: SparkConnectServer, steps: Sequence[Kill]
) -> None:
    """Kill at each of the steps, then check everything.

    In turn, SIGKILL for the one Python process of the driver that has reached the point, and for
    the whole server.
    """
    batch, client = -1, scenario.driver
    names = [target.name for target in scenario.targets]
    for number, step in enumerate(steps):
        batch += not step.again
        client.process.start()
        (hit, *_) = client.process.wait_for(*step.arm(client.failpoints, batch, names))
        seen, pid = scenario.visible_of(batch), client.pid
        if number % 2 == 0:
            os.kill(hit.pid, signal.SIGKILL)
            assert client.process.wait() != 0, "Spark did not fail the query"
        else:
            server.kill()
            client.process.kill()  # it would try to reach the server for minutes
            server.start()
        client.failpoints.disarm()
        victim = "server" if number % 2 else "process"
        scenario.note(batch, f"{step.point}{' again' * step.again}", victim, shown(seen))
        step.check(seen)
        if step.aborts:
            scenario.aborted.add((batch, pid))
    scenario.finish()
    scenario.print_table("batch", "paused at", "killed", "visible then")
    fired = {hit.point for hit in client.failpoints.hits()}
    assert fired >= {step.point for step in steps}


@pytest.mark.slow
def test_driver_process_and_server_killed_with_all_real_sinks(
    tmp_path: Path, services: Services, fresh_name: Callable[[], str]
) -> None:
    """Kafka, Postgres and each S3 server, written by a client of Spark Connect."""
    targets = real_targets(services, fresh_name)
    steps = crash_points([target.name for target in targets], is_each=False)
    with over_connect(tmp_path, targets, batches_of(steps)) as (scenario, server):
        kill_at_every_step(scenario, server, steps)


def test_query_outlives_its_client(tmp_path: Path) -> None:
    """The server goes on without the client, and a new client finds everything delivered."""
    targets = [file_target(tmp_path / "left", "left")]
    with over_connect(tmp_path, targets, batches=2) as (scenario, _):
        client = scenario.driver
        client.start(client.arm("decide.after", batch=0))
        client.kill()
        tick = threading.Event()
        while len(list(targets[0].read())) < 2 * ROWS_PER_BATCH:
            tick.wait(POLL_S)
        scenario.finish()
