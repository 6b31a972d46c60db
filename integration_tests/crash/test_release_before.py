"""A pipeline that is killed in doubt under the release before is recovered by this tree.

The old driver commits batch 0 and stops at a point of batch 1. It gets SIGKILL; then either
`sparkonce recover` or a new driver works on the same checkpoint, log and targets. At the end every
row is visible once in every sink, each batch comes from one process, and nothing is left: no
prepared transaction, staging table, upload, open Kafka transaction or hidden file.

All sinks are in one pipeline. The cases vary the log, the policy, the point and the recovery.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import psycopg
import pytest
from psycopg import sql

from integration_tests.crash import release_before
from integration_tests.crash.release_before import Both, Upgrade, unpack
from integration_tests.crash.scenario import shown
from integration_tests.support.command import FINE, JOB, Operator
from sparkonce.testing.services import S3Server, Services

LogKind = Literal["sqlite", "postgres", "s3", "checkpoint"]
Policy = Literal["immediate", "after_checkpoint"]
POLICIES: tuple[Policy, ...] = ("immediate", "after_checkpoint")


@dataclass(frozen=True)
class Case:
    """The point at which the old driver is killed, and what recovers the batch.

    Attributes:
        policy: this tree's name of the commit policy; the old driver uses its old name.
        log: the log's backend.
        point: a fail point of the old release.
        sink: the sink at which to kill; the others are held before their commit.
        state: the state of the batch in the old log then.
        aborts: rows of the killed attempt may never become visible.
        is_planned: Spark has committed the batch and planned the next one.
        by: what recovers first: a new driver, or the command.
        batch: the batch in doubt; earlier batches are committed.
    """

    policy: Policy
    log: LogKind
    point: str
    sink: str | None = None
    state: str | None = None
    aborts: bool = False
    is_planned: bool = False
    by: Literal["driver", "command"] = "driver"
    batch: int = 1

    def __str__(self) -> str:
        at = f"{self.point}-{self.sink}" if self.sink else self.point
        planned = "-planned" * self.is_planned
        return f"{self.log}-{self.policy}-{at}{planned}-{self.by}"


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("release_before"))


@pytest.fixture
def log_of(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    services: Services,
    fresh_name: Callable[[], str],
    fresh_log: Callable[[S3Server], str],
) -> Callable[[LogKind], str]:
    """A function that returns the address of a fresh log, which both releases accept."""

    def in_postgres() -> str:
        schema, dsn = fresh_name(), services.postgres.dsn
        drop = sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(schema))

        def clear() -> None:
            with psycopg.connect(dsn, autocommit=True) as connection:
                connection.execute(drop)

        request.addfinalizer(clear)
        return f"{dsn}?schema={schema}"

    def in_s3() -> str:
        if "versitygw" not in services.s3:
            pytest.skip("S3Mock's conditional writes are too weak for a log")
        return fresh_log(services.s3["versitygw"])

    makers: dict[LogKind, Callable[[], str]] = {
        "sqlite": lambda: f"sqlite:///{tmp_path}/txn.db",
        "postgres": in_postgres,
        "s3": in_s3,
        "checkpoint": lambda: "checkpoint",
    }
    return lambda kind: makers[kind]()


def all_sinks(tmp_path: Path, services: Services, fresh_name: Callable[[], str]) -> list[Both]:
    return [
        release_before.kafka(services.kafka, fresh_name()),
        release_before.staged(services.postgres, fresh_name()),
        release_before.direct(services.postgres, fresh_name()),
        release_before.s3(services.s3["s3mock"], fresh_name()),
        release_before.files(tmp_path / "files"),
    ]


def upserts(tmp_path: Path, services: Services, fresh_name: Callable[[], str]) -> list[Both]:
    return [
        release_before.staged_upsert(services.postgres, fresh_name()),
        release_before.direct_upsert(services.postgres, fresh_name()),
        release_before.files(tmp_path / "files"),
    ]


def one_postgres(tmp_path: Path, services: Services, fresh_name: Callable[[], str]) -> list[Both]:
    del tmp_path
    return [release_before.staged(services.postgres, fresh_name())]


SinksOf = Callable[[Path, Services, Callable[[], str]], list[Both]]
Survives = Callable[[Case, SinksOf], None]


@pytest.fixture
def survives(
    tmp_path: Path,
    tree: Path,
    services: Services,
    fresh_name: Callable[[], str],
    log_of: Callable[[LogKind], str],
) -> Survives:
    """A function that runs a case over fresh sinks and a fresh log."""

    def run_case(case: Case, sinks_of: SinksOf) -> None:
        log = log_of(case.log)
        run(case, tmp_path, tree, sinks_of(tmp_path, services, fresh_name), log)

    return run_case


def run(case: Case, folder: Path, tree: Path, sinks: list[Both], log: str) -> None:
    """Kill the old driver as the case says, then recover with this tree and run to the end."""
    batches = case.batch + 2
    with Upgrade(folder, [new for new, _ in sinks], batches, case.policy) as scenario:
        scenario.begin(tree, [old for _, old in sinks], log)
        kill_old_driver(scenario, case)
        in_checkpoint = names_in(scenario.checkpoint)
        if case.by == "command":
            recover_by_command(scenario, case)
        scenario.finish()
        assert names_in(scenario.checkpoint) == in_checkpoint
        scenario.note(case, case.state or "no record")
        scenario.print_table("case", "the batch in the old log")


def names_in(checkpoint: Path) -> set[str]:
    """The names in the checkpoint; a new name of one of our files would hide the old file."""
    return {path.name for path in checkpoint.iterdir()}


def kill_old_driver(scenario: Upgrade, case: Case) -> None:
    """Kill it, and check what it leaves: the log's state, visible rows, prepared branches."""
    names = {target.name for target in scenario.targets}
    where = {"batch": case.batch} if case.sink is None else {"batch": case.batch, "sink": case.sink}
    stops = [(case.point, where)]
    if case.point == "commit.after":
        others = names - {case.sink}
        stops += [("commit.before", {"batch": case.batch, "sink": name}) for name in others]
    scenario.old.run_until(*stops)
    if case.is_planned:
        scenario.wait_until_old_spark_planned(case.batch + 1)
    scenario.old.kill()
    if case.aborts:
        scenario.aborted.add((case.batch, scenario.old.pid))

    assert scenario.state_of(case.batch) == case.state
    seen = scenario.visible_of(case.batch)
    standing = {leak.partition(":")[0] for leak in scenario.leaks()}
    if case.point == "commit.after":
        assert seen.pop(str(case.sink)) != "none"
        assert set(seen.values()) == {"none"}, shown(seen)
        assert standing >= names - {case.sink}
    elif case.point.startswith("complete."):
        assert set(seen.values()) == {"all"}, shown(seen)
    else:
        assert set(seen.values()) == {"none"}, shown(seen)
        assert standing >= (names if case.sink is None else {case.sink})


def recover_by_command(scenario: Upgrade, case: Case) -> None:
    """`sparkonce recover` commits or aborts everything without Spark, and leaves nothing."""
    sparkonce = Operator(scenario)
    inside = ["--checkpoint", str(scenario.checkpoint)]
    assert sparkonce("recover", JOB, *inside).code == FINE
    seen = scenario.visible_of(case.batch)
    assert set(seen.values()) == {"none" if case.aborts else "all"}, shown(seen)
    assert scenario.leaks() == []
    expected = {None, "abandoned"} if case.aborts else {"complete"}
    assert scenario.state_of(case.batch) in expected


NAMES = ("kafka", "staged", "direct", "s3", "files")
LOGS: tuple[LogKind, ...] = ("checkpoint", "s3", "sqlite", "postgres")

QUICK = [
    Case("immediate", "sqlite", "commit.after", "kafka", "decided"),
    Case("after_checkpoint", "postgres", "prepared.after", state="prepared", aborts=True),
]


def all_cases() -> Iterator[Case]:
    """Every point that `QUICK` leaves out, with the logs in turn; `recover` on each log."""
    logs = itertools.cycle(LOGS)
    yield Case("immediate", "s3", "decide.after", state="decided", by="command")
    yield Case("after_checkpoint", "checkpoint", "decide.before", state="prepared", is_planned=True)
    yield Case("immediate", "checkpoint", "prepare_batch.after", "staged", aborts=True)
    for point, sink in [("precommit.after", "kafka"), ("prepare_batch.after", "direct")]:
        for policy in POLICIES:
            yield Case(policy, next(logs), point, sink, aborts=True)
    yield Case("immediate", next(logs), "decide.before", aborts=True)
    yield Case("immediate", next(logs), "decide.before", aborts=True, by="command")
    yield Case("after_checkpoint", next(logs), "prepared.before", aborts=True)
    for policy in POLICIES:
        is_planned = policy == "after_checkpoint"
        for sink in NAMES:
            yield Case(policy, next(logs), "commit.after", sink, "decided", is_planned=is_planned)
        for point, state in [("complete.before", "decided"), ("complete.after", "complete")]:
            yield Case(policy, next(logs), point, state=state, is_planned=is_planned)
        for log in LOGS:
            yield Case(
                policy,
                log,
                "decide.after",
                state="decided",
                is_planned=is_planned,
                by="command" if (log in LOGS[:2]) == is_planned else "driver",
            )
    held = Case("after_checkpoint", "sqlite", "", state="prepared", by="command")
    for log in LOGS:
        yield replace(held, log=log, point="decide.before", is_planned=True)
        yield replace(held, log=log, point="prepared.after", aborts=True)


@pytest.mark.parametrize(
    "case",
    [*QUICK, *(pytest.param(c, marks=pytest.mark.slow) for c in all_cases() if c not in QUICK)],
    ids=str,
)
def test_killed_under_the_release_before(case: Case, survives: Survives) -> None:
    survives(case, all_sinks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("immediate", "sqlite", "precommit.after", "direct", aborts=True),
        Case("immediate", "sqlite", "decide.after", state="decided"),
        Case("immediate", "sqlite", "commit.after", "staged", "decided", by="command"),
        Case("after_checkpoint", "sqlite", "decide.before", state="prepared", is_planned=True),
    ],
    ids=str,
)
def test_upserts(case: Case, survives: Survives) -> None:
    """Upserts into Postgres, with both ways of loading."""
    survives(case, upserts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("immediate", "sqlite", "precommit.after", "kafka", aborts=True, batch=4),
        Case("immediate", "s3", "decide.after", state="decided", batch=4),
        Case("after_checkpoint", "postgres", "prepared.after", None, "prepared", True, batch=4),
    ],
    ids=str,
)
def test_small_batches(case: Case, survives: Survives) -> None:
    """The old driver wrote the batch in doubt itself; such branches have other attempt numbers."""
    survives(case, all_sinks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("immediate", "postgres", "decide.before", aborts=True),
        Case("immediate", "postgres", "decide.before", aborts=True, by="command"),
        Case("immediate", "postgres", "complete.after", state="complete"),
    ],
    ids=str,
)
def test_one_transaction_for_rows_and_log(case: Case, survives: Survives) -> None:
    """One Postgres sink whose database also holds the log."""
    survives(case, one_postgres)
