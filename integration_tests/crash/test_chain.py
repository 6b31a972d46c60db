"""One driver after the other is killed, each at the next point of the protocol."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from integration_tests.crash.scenario import Scenario
from integration_tests.crash.targets import file_target, kafka_target, postgres_target, s3_target
from sparkonce.failpoints import POINTS
from sparkonce.testing.services import Services

UNDECIDED = [
    "write.first",
    "write.batch",
    "precommit.before",
    "precommit.after",
    "prepare_batch.before",
    "prepare_batch.after",
    "decide.before",
]
DECIDED = ["decide.after", "commit.before", "commit.after"]
COMPLETE = ["complete.before", "complete.after", "return.before"]
AT_START = ["begin.before", "begin.after", "recover.before_finish", "recover.before_sweep"]


def kill_at_every_point(scenario: Scenario) -> None:
    """Batch 0 meets the first point, batch 1 the second, and so on; then check everything."""
    batch = 0
    first, *_, last = [target.name for target in scenario.targets]
    for point in UNDECIDED:
        scenario.start(scenario.failpoints.arm(point, batch=batch))
        seen = scenario.visible_of(batch)
        scenario.kill()
        note(scenario, point, batch, seen)
        assert set(seen.values()) == {"none"}
        batch += 1
    for point in DECIDED:
        arms = [scenario.failpoints.arm(point, batch=batch, sink=first)]
        if point == "decide.after":
            arms = [scenario.failpoints.arm(point, batch=batch)]
        if point == "commit.after":  # the others must not go on meanwhile
            arms += [
                scenario.failpoints.arm("commit.before", batch=batch, sink=target.name)
                for target in scenario.targets[1:]
            ]
        scenario.start(*arms)
        seen = scenario.visible_of(batch)
        scenario.kill()
        note(scenario, point, batch, seen)
        if point == "commit.after":
            assert seen[first] != "none"
            assert seen[last] == "none"
        if point == "decide.after":
            assert set(seen.values()) == {"none"}
            # Recovery finds it unfinished: kill the recovery too, then the next one.
            for recovery in AT_START:
                scenario.start(scenario.failpoints.arm(recovery))
                scenario.kill()
                note(scenario, recovery, batch, seen)
        batch += 1
    for point in COMPLETE:
        scenario.start(scenario.failpoints.arm(point, batch=batch))
        seen = scenario.visible_of(batch)
        scenario.kill()
        note(scenario, point, batch, seen)
        assert set(seen.values()) == {"all"}
        batch += 1
    scenario.finish()
    fired = {hit.point for hit in scenario.failpoints.hits()}
    assert fired == set(POINTS)
    print(*scenario.table, sep="\n")


def note(scenario: Scenario, point: str, batch: int, seen: dict[str, str]) -> None:
    shown = ", ".join(f"{name} {what}" for name, what in seen.items())
    scenario.table.append(f"batch {batch:2} killed at {point:24} visible then: {shown}")


BATCHES = len(UNDECIDED) + len(DECIDED) + len(COMPLETE) + 2


def test_driver_killed_at_every_point_with_all_real_sinks(
    tmp_path: Path, services: Services, fresh_name: Callable[[], str]
) -> None:
    """Kafka, Postgres and each S3 server in one pipeline: every row is visible once in each."""
    targets = [
        kafka_target(services.kafka, fresh_name()),
        postgres_target(services.postgres, fresh_name()),
        *(s3_target(server, fresh_name(), kind) for kind, server in services.s3.items()),
    ]
    with Scenario(tmp_path, targets, BATCHES) as scenario:
        kill_at_every_point(scenario)


@pytest.mark.slow
def test_driver_killed_at_every_point_with_folders_as_sinks(tmp_path: Path) -> None:
    """The same with the simplest sinks, to tell a fault of the protocol from one of a sink."""
    targets = [file_target(tmp_path / name, name) for name in ("left", "right")]
    with Scenario(tmp_path, targets, BATCHES) as scenario:
        kill_at_every_point(scenario)
