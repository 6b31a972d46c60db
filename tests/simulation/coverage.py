"""What a run must reach: a simulation that never reaches a state proves nothing about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from tests.simulation.faults import COMMANDS, STEPS
from tests.simulation.simulation import Result

STATES: Final = (
    "a batch ends by an operator's ruling",
    "a create is refused",
    "a fork runs, own targets, log",
    "a fork runs, own targets, log of its own",
    "a fork runs, shared targets, log",
    "a fork runs, shared targets, log of its own",
    "a restore is refused",
    "a restored checkpoint and the old one differ",
    "a savepoint is made while a driver is paused",
    "a savepoint is restored while the old driver is paused",
    "half a checkpoint is started",
    "the user starts another checkpoint",
    "a batch is planned with a rewrite",
    "a batch is planned with nothing to write",
    "a branch is lost twice",
    "a commit asks for other branches than were planned",
    "a loss that cannot be rewritten stops the pipeline",
    "a merge is repeated from staging",
    "a merge waits for the locks of another",
    "a newer driver decides a batch that an older one prepared",
    "a plan is made that Spark has given up",
    "a plan keeps the token",
    "a planner remembers the batch before, and another run came since",
    "a planner resumes that Spark has given up",
    "a prepared branch outlives its timeout",
    "a process that aborts dies alone",
    "a process that commits dies alone",
    "a process that commits resumes behind a newer driver",
    "a process that plans dies alone",
    "a second crash inside recovery",
    "a second run shares a planner's memory",
    "a second start in one process",
    "a sweep finds a branch of an executor zombie",
    "a whole sink is rewritten",
    "a zombie resumes before its decision",
    "a zombie resumes between decision and commit",
    "a zombie resumes inside a rewrite",
    "a zombie resumes inside a sweep",
    "a zombie's Spark commits an abandoned batch",
    "an abandoned batch is replayed",
    "an abort is called after the decision",
    "an abort is called while its batch may still be decided",
    "an abort is late: another run holds the token",
    "an abort resumes behind a newer driver",
    "an open merge dies with its process",
    "an operator closes a gap",
    "an operator settles a prepared branch",
    "an operator's ruling meets a driver that retries a commit",
    "another process holds the merge that is committed",
    "decided, 1 of 3 sinks committed",
    "decided, 2 of 3 sinks committed",
    "old records are forgotten",
    "one branch is rewritten",
    "the answer to a decision is lost",
    "the front changes over an unfinished batch",
    "the policy changes over an unfinished batch",
    "three drivers are alive",
)
"""States that a few thousand seeds must reach."""

RARE_STATES: Final = (
    "a plan sees a later batch than its Spark runs",
    "a record changes between the plan of its replay and the commit",
    "a whole sink is rewritten from other partitions",
)
"""States that the full run must reach."""

PAIRS: Final = frozenset(
    (step, fault) for step, faults in (STEPS | COMMANDS).items() for fault in faults
)
"""Every (step, fault) pair; each must fire."""


@dataclass
class Coverage:
    """The faults that fired and the states that were reached, over all seeds of a run."""

    seeds: int = 0
    steps: int = 0
    replayed: int = 0
    fired: Counter[tuple[str, str]] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str]] = field(default_factory=list)

    def add(self, result: Result) -> None:
        self.seeds += 1
        self.steps += result.steps
        self.fired.update(result.fired)
        self.states.update(result.states)
        if result.failure is not None:
            self.failures.append((result.seed, result.failure))

    def join(self, other: Coverage) -> None:
        self.seeds += other.seeds
        self.steps += other.steps
        self.replayed += other.replayed
        self.fired.update(other.fired)
        self.states.update(other.states)
        self.failures = sorted(self.failures + other.failures)

    def missing(self, states: Iterable[str]) -> list[str]:
        """The pairs that never fired, and those of `states` that were never reached."""
        never = [f"{step} <- {fault}" for step, fault in sorted(PAIRS - self.fired.keys())]
        return never + [state for state in states if state not in self.states]
