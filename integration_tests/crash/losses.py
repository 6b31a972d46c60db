"""Branches that are destroyed."""

from __future__ import annotations

from collections.abc import Collection

from integration_tests.crash.scenario import Scenario
from sparkonce.model import Committable


def lose(scenario: Scenario, lost: Collection[Committable]) -> None:
    for committable in lost:
        scenario.target(committable.branch_id.sink).lose(committable)


def names_of(committables: Collection[Committable]) -> set[str]:
    return {committable.branch_id.name for committable in committables}
