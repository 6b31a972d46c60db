"""The base of the simulation: one clock, one random generator, and one place for every call.

    driver (greenlet) ─► World.call(step, effect) ─► fault? ─► effect on the simulated systems
                              └─ pause: back to the scheduler, which runs another driver

Nothing here sleeps, starts a thread or reads the machine's clock, so a seed replays exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import TYPE_CHECKING, Final, TypeVar

from greenlet import greenlet
from specs.traces import Event

from sparkonce.errors import DecisionUnknownError, LogUnavailableError, SparkOnceError
from sparkonce.failpoints import InjectedError
from tests.simulation.faults import Plan

if TYPE_CHECKING:
    from tests.simulation.drivers import Driver
    from tests.simulation.ledger import Ledger
    from tests.simulation.lines import Line
    from tests.simulation.systems import System

ResultT = TypeVar("ResultT")

STEP_S = 0.01
READS: Final[Mapping[str, str]] = {
    "log.head": "look",
    "log.unfinished": "unfinished",
    "log.find": "find",
}
"""The event of `specs.traces` for each step that reads what others change."""
OTHER_ROWS = 10_000
"""A replay adds this to a row to give it another value; the remainder is the row's key."""


class Crash(BaseException):
    """The process is gone. A BaseException, so that no clean-up code catches it."""


class Violation(BaseException):
    """An invariant does not hold."""


class TaskFailed(Exception):  # noqa: N818
    """A verb on an executor failed, or its answer was lost."""


class World:
    """The state that all drivers of one seed share.

    Attributes:
        pipelines: by name; the first one and, after a fork, its fork.
        chosen: the pipeline that the scheduler looks at.
    """

    def __init__(self, seed: int, *, trace: bool) -> None:
        self.seed = seed
        self.rng = Random(seed)  # noqa: S311 - it makes schedules, no secrets
        self.clock = 1000.0
        self.plan = Plan(self.rng)
        self.systems: dict[str, System] = {}
        self.driver: Driver | None = None
        self.drivers: list[Driver] = []
        self.scheduler = greenlet.getcurrent()
        self.late: list[tuple[int, Callable[[], None]]] = []
        self.steps = 0
        self.states: set[str] = set()
        self.lines: list[str] | None = [] if trace else None
        self.events: list[Event] = []
        self.violation: Violation | None = None
        self.pipelines: dict[str, Line] = {}
        self.chosen: Line

    @property
    def line(self) -> Line:
        """The pipeline of the running driver."""
        return self.chosen if self.driver is None else self.driver.line

    @property
    def ledger(self) -> Ledger:
        return self.line.ledger

    # -- trace and failures ------------------------------------------------------------------------

    def trace(self, text: str) -> None:
        if self.lines is not None:
            who = "-" if self.driver is None else str(self.driver)
            self.lines.append(f"{self.steps:5d} {self.clock:9.2f}s {who:12s} {text}")

    def note(self, what: str, by: Driver | None = None, **details: object) -> None:
        """Record what the running driver has done, or `by`, for the replay through the spec."""
        driver = by or self.driver
        if driver is not None:
            self.events.append(Event(driver.number, what, details))

    def fail(self, text: str) -> None:
        """Record a broken invariant, if it is the first, and end this driver at once."""
        violation = Violation(f"seed {self.seed}, step {self.steps}: {text}")
        if self.violation is None:
            self.violation = violation
        self.trace(f"VIOLATION {text}")
        raise violation

    def require(self, condition: object, text: str) -> None:
        if not condition:
            self.fail(text)

    # -- steps -------------------------------------------------------------------------------------

    def call(self, step: str, effect: Callable[[], ResultT]) -> ResultT:
        """Let the running driver take `step`, with the fault that the plan has for it, if any."""
        driver = self.driver
        assert driver is not None
        if not driver.process.alive:
            raise Crash
        self.steps += 1
        self.clock += STEP_S
        if self.late:
            self.fire_late(self.steps)
        fault = self.plan.at(step, others_alive=len(self.drivers) > 1)
        if self.lines is not None:
            self.trace(step + (f"  <- {fault}" if fault else ""))
        effect = self._noting(step, effect)
        if fault is None:
            return effect()
        return self._faulty(driver, step, fault, effect)

    def _noting(self, step: str, effect: Callable[[], ResultT]) -> Callable[[], ResultT]:
        """Note what the step reads, when it has read it."""
        what = READS.get(step)
        if what is None:
            return effect

        def noted() -> ResultT:
            result = effect()
            self.note(what)
            return result

        return noted

    def _faulty(
        self, driver: Driver, step: str, fault: str, effect: Callable[[], ResultT]
    ) -> ResultT:
        match fault:
            case "crash":
                driver.crash()
            case "error":
                raise _error_of(step)
            case "delay":
                self.clock += self.rng.choice((5.0, 300.0, 1000.0))
            case "drop":
                self.drop()
            case "pause":
                driver.pause(step)
            case "torn":
                raise DecisionUnknownError("the answer is lost")
            case "late":
                self._land_later(driver, step, effect)
                raise DecisionUnknownError("the answer is lost")
            case "lost" | "crash_after" | "pause_after" | "twice":
                return self._after(driver, step, fault, effect)
            case _:
                driver.fault = fault  # the step's effect applies it itself
        return effect()

    def _after(
        self, driver: Driver, step: str, fault: str, effect: Callable[[], ResultT]
    ) -> ResultT:
        try:
            result = effect()
        except Exception:
            if fault == "crash_after":
                driver.crash()
            if fault == "lost":
                raise _lost_answer_of(step) from None
            raise
        if fault == "crash_after":
            driver.crash()
        if fault == "pause_after":
            driver.pause(step)
        if fault == "twice":
            return effect()
        if fault == "lost":
            if step == "log.decide":
                self.states.add("the answer to a decision is lost")
            raise _lost_answer_of(step)
        return result

    def _land_later(self, driver: Driver, step: str, effect: Callable[[], object]) -> None:
        def land() -> None:
            running, self.driver = self.driver, driver
            try:
                self.trace(f"{step} lands now")
                effect()
            except SparkOnceError as error:
                self.trace(f"{step} is refused: {error!r:.80}")
            finally:
                self.driver = running

        self.late.append((self.steps + self.rng.choice((1, 5, 20, 30, 40)), land))

    def drop(self) -> None:
        """Let a random system lose branches that it had promised to keep."""
        holding = [system for system in self.systems.values() if system.prepared]
        if holding:
            self.rng.choice(holding).drop(self.rng)

    def reach(self, point: str, where: object) -> None:
        """A fail point of the code under test."""
        del where
        self.call(point, lambda: None)

    # -- late effects ------------------------------------------------------------------------------

    def fire_late(self, until: int) -> None:
        """Let executor zombies act, and delayed writes land, whose step has come."""
        due = [entry for entry in self.late if entry[0] <= until]
        for entry in due:
            self.late.remove(entry)
            entry[1]()


def _error_of(step: str) -> Exception:
    place, _, verb = step.partition(".")
    if place in {"log", "folder"}:
        return LogUnavailableError("unreachable; nothing was written")
    if verb == "precommit":
        return TaskFailed(step)
    if place in {"plain", "kafka", "postgres", "spark"}:
        return ConnectionError(f"{step} failed")
    return InjectedError(step)


def _lost_answer_of(step: str) -> Exception:
    if step.startswith(("log.", "folder.")):
        return DecisionUnknownError("the answer is lost")
    return TaskFailed(step) if step.endswith("precommit") else ConnectionError("no answer")
