"""`torture`: a sound pipeline passes; seeded bugs and Spark's own duplicates are found."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from integration_tests.support import torture_job
from sparkonce.testing.proxy import Proxy
from sparkonce.testing.services import Services
from sparkonce.testing.services.server import Server
from sparkonce.testing.torture.faults import Fault, Network, Stage
from sparkonce.testing.torture.query import Order
from sparkonce.testing.torture.running import Outcome, Torture

JOB = "integration_tests.support.torture_job"
HALF_AN_HOUR = 1800.0
HOURS = float(os.environ.get("TORTURE_HOURS", "0.1"))
SEED = int(os.environ.get("TORTURE_SEED", "1"))


class Restart(Fault):
    """SIGKILL a server, and start it again."""

    def __init__(self, name: str, server: Server) -> None:
        self._name, self._server = name, server

    def strike(self, stage: Stage) -> None:
        stage.calm()
        self._server.kill()
        stage.note("server", f"{self._name} was killed")
        self._server.start()
        stage.recovers()


@pytest.fixture
def tortured(
    services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Outcome]]:
    """A function that tortures the job for some seconds, or until the first anomaly."""

    def torture(
        most_s: float,
        *,
        seed: int,
        writer: str = "pipeline",
        more: Sequence[Fault] = (),
        through: Mapping[str, Proxy] | None = None,
        **settings: Any,
    ) -> Outcome:
        name = f"t{uuid.uuid4().hex[:8]}"
        made = torture_job.made(services, name, tmp_path, **settings)
        made = made.through(**{sink: proxy.port for sink, proxy in (through or {}).items()})
        for variable, value in made.to_env().items():
            monkeypatch.setenv(variable, value)
        order = Order(
            job=f"{JOB}:{writer}", cwd=str(Path.cwd()), checkpoint=str(tmp_path / "checkpoint")
        )
        readers = torture_job.readers()
        stack.callback(readers["kafka"].close)  # type: ignore[attr-defined]
        found: Any = torture_job.naive
        if writer == "naive":
            readers = {"kafka": readers["kafka"]}
            order = replace(order, conf=torture_job.kafka_of_spark())
        else:
            found = stack.enter_context(torture_job.pipeline())
        return Torture(
            found,
            order,
            readers,
            tmp_path,
            seed=seed,
            more=more,
            unfinished=torture_job.unfinished() if writer != "naive" else {},
        ).run(most_s)

    with ExitStack() as stack:
        yield torture


def port_of(address: str) -> int:
    port = urlsplit(address).port
    assert port is not None
    return port


def kinds(outcome: Outcome) -> Sequence[tuple[str, str]]:
    return [(anomaly.kind, anomaly.sink) for anomaly in outcome.anomalies]


def test_four_sinks_are_tortured(tortured: Callable[..., Outcome]) -> None:
    outcome = tortured(30, seed=5)
    assert outcome.is_clean, outcome
    assert outcome.faults.total() > 0
    assert set(outcome.rows.values()) == {outcome.batches * 20}


@pytest.mark.slow
@pytest.mark.parametrize("commit", ["immediate", "after_checkpoint"])
def test_four_sinks_their_servers_and_networks_are_tortured(
    tortured: Callable[..., Outcome], services: Services, commit: str
) -> None:
    """Six minutes, or TORTURE_HOURS, by TORTURE_SEED."""
    s3 = next(iter(services.s3.values()))
    with (
        Proxy(port_of(services.postgres.dsn)) as postgres,
        Proxy(port_of(s3.endpoint_url)) as objects,
        postgres.in_between(),
        objects.in_between(),
    ):
        servers = {"kafka": services.kafka, "postgres": services.postgres, "s3": s3}
        outcome = tortured(
            HOURS * 3600,
            seed=SEED,
            commit=commit,
            through={"postgres": postgres, "s3": objects},
            more=[
                Network("postgres", postgres),
                Network("s3", objects),
                *(Restart(name, server) for name, server in servers.items()),
            ],
        )
    print(outcome.faults, outcome.batches, outcome.rows)
    assert outcome.is_clean, outcome
    assert set(outcome.rows.values()) == {outcome.batches * 20}


@pytest.mark.slow
@pytest.mark.parametrize("bug", torture_job.BUGS)
def test_seeded_bug_is_found(tortured: Callable[..., Outcome], bug: str) -> None:
    # With seed 17 the first driver is killed right after the decision.
    outcome = tortured(HALF_AN_HOUR, seed=17, bugs=(bug,))
    assert {sink for _, sink in kinds(outcome)} == {torture_job.sink_of(bug)}, outcome.anomalies


@pytest.mark.slow
def test_duplicates_of_sparks_own_sink_are_found(tortured: Callable[..., Outcome]) -> None:
    outcome = tortured(HALF_AN_HOUR, seed=3, writer="naive")
    assert ("doubled", "kafka") in kinds(outcome)
