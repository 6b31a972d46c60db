"""Drivers that are paused while another one takes over."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from integration_tests.crash.scenario import Driver, Scenario, first_match, shown
from sparkonce.testing.crash import Arm

TOKEN_TAKEN = r"took token \d+|was taken over by \S+|another driver has continued from"
SPARKS_OWN = r"CONCURRENT_STREAM_LOG_UPDATE|[Mm]ultiple streaming queries are concurrently"
WHO_TOOK_OVER = f"{TOKEN_TAKEN}|{SPARKS_OWN}"


@dataclass(frozen=True)
class Pause:
    """The point at which a driver is paused while another takes over."""

    point: str
    sink: str | None = None
    is_frozen: bool = False

    def arm(self, driver: Driver, batch: int) -> Arm:
        return driver.arm(self.point, batch=batch, sink=self.sink)

    def __str__(self) -> str:
        return self.point + " frozen" * self.is_frozen


def take_over_one_after_the_other(scenario: Scenario, pauses: Sequence[Pause]) -> None:
    """Batch 0 is taken from the first driver, batch 1 from the second, and so on."""
    older = scenario.driver
    older.start(pauses[0].arm(older, 0))
    for batch, pause in enumerate(pauses):
        newer = scenario.new_driver()
        following = pauses[batch + 1 : batch + 2]
        with older.frozen() if pause.is_frozen else contextlib.nullcontext():
            newer.start(*(next_pause.arm(newer, batch + 1) for next_pause in following))
            if not following:
                assert newer.ends()[0] == 0, newer.said()[-3000:]
            older.let_go()
        status, said = older.ends()
        seen = scenario.visible_of(batch + 1)  # which asserts that this batch is visible once
        scenario.note(scenario.commit, batch, pause, status, reported(said), shown(seen))
        assert status != 0, "the older driver ends as if all were well"
        first_match(WHO_TOOK_OVER, said)
        older = newer
    scenario.check_end()
    scenario.print_table("policy", "batch", "A pauses at", "A ends", "A reports", "visible next")


def reported(said: str) -> str:
    for pattern in (TOKEN_TAKEN, SPARKS_OWN):
        with contextlib.suppress(AssertionError):
            return first_match(pattern, said)
    return "?"
