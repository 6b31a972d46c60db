"""The crashes with one Postgres database for both the rows and the log.

A batch and its record are committed in one transaction. So no driver can be killed between decided
and complete, and a paused driver does not block another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from integration_tests.crash.chains import batches_of, kill_at_every_step
from integration_tests.crash.pauses import Pause, take_over_one_after_the_other
from integration_tests.crash.scenario import Scenario
from integration_tests.crash.targets import postgres_target
from sparkonce.testing.kills import Kill
from sparkonce.testing.services import PostgresServer

KILLS = [
    Kill("begin.before", "none"),
    Kill("begin.after", "none", again=True),
    Kill("recover.after", "none", again=True),
    Kill("open.after", "none", "postgres", aborts=True),
    Kill("write.after", "none", "postgres", aborts=True),
    Kill("prepare.before", "none", "postgres", aborts=True),
    Kill("prepare.after", "none", "postgres", aborts=True),
    Kill("vote.before", "none", "postgres", aborts=True),
    Kill("vote.after", "none", "postgres", aborts=True),
    Kill("decide.before", "none", aborts=True),
    Kill("recover.after", "none", again=True),
    Kill("decide.after", "all"),
    Kill("recover.after", "all", again=True),
    Kill("deliver.after", "all"),
]


class OnePhase(Scenario):
    """A table and a log in one database."""

    @classmethod
    def of(cls, folder: Path, server: PostgresServer, log_schema: str, batches: int) -> OnePhase:
        scenario = cls(folder, [postgres_target(server, f"rows_{log_schema}")], batches)
        scenario.log_address = f"{server.dsn}?schema={log_schema}"
        scenario.write_config("config", scenario.checkpoint)
        return scenario

    def check_end(self) -> None:
        """Also assert that each record has the transaction id of its marker row."""
        super().check_end()
        dsn, _, schema = self.log_address.partition("?schema=")
        query = sql.SQL(
            "SELECT batch_id, r.xmin = c.xmin FROM {} AS r"
            " JOIN sparkonce_commits AS c USING (query_id, batch_id) ORDER BY 1"
        ).format(sql.Identifier(schema, "records"))
        with psycopg.connect(dsn) as connection:
            found = connection.execute(query).fetchall()
        assert found == [(batch, True) for batch in range(self.batches)]


@pytest.fixture
def log_schema(postgres: PostgresServer, fresh_name: Callable[[], str]) -> Iterator[str]:
    yield (name := fresh_name())
    with psycopg.connect(postgres.dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(name)))


def test_driver_killed_around_the_commit(
    tmp_path: Path, postgres: PostgresServer, log_schema: str
) -> None:
    kills = [Kill("decide.before", "none", aborts=True), Kill("decide.after", "all")]
    with OnePhase.of(tmp_path, postgres, log_schema, batches_of(kills)) as scenario:
        kill_at_every_step(scenario, kills)
        assert "are committed in one transaction" in scenario.driver.said()


@pytest.mark.slow
def test_driver_killed_at_every_point(
    tmp_path: Path, postgres: PostgresServer, log_schema: str
) -> None:
    with OnePhase.of(tmp_path, postgres, log_schema, batches_of(KILLS)) as scenario:
        kill_at_every_step(scenario, KILLS)


@pytest.mark.slow
def test_newer_driver_takes_over_at_every_pause(
    tmp_path: Path, postgres: PostgresServer, log_schema: str
) -> None:
    """It takes over even from a driver that is frozen with an open merge, which it ends."""
    pauses = [
        Pause("prepare.after", "postgres"),
        Pause("vote.after"),
        Pause("decide.before"),
        Pause("decide.before", is_frozen=True),
        Pause("decide.after", is_frozen=True),
    ]
    with OnePhase.of(tmp_path, postgres, log_schema, len(pauses) + 1) as scenario:
        take_over_one_after_the_other(scenario, pauses)
