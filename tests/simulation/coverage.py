"""What a run has to have met: a simulation that never reaches a state proves nothing about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from tests.simulation.faults import STEPS
from tests.simulation.simulation import Result

STATES: Final = (
    "a batch ends by an operator's word",
    "a branch is lost twice",
    "a loss that cannot be made good stops the pipeline",
    "a merge is made again from staging",
    "a merge waits for the locks of another",
    "a newer driver decides what an older one prepared",
    "a prepared branch outlives its timeout",
    "a second crash inside recovery",
    "a second start in one process",
    "a sweep finds what an executor zombie prepared",
    "a whole sink is written again",
    "a zombie wakes before its decision",
    "a zombie wakes between decision and commit",
    "a zombie wakes inside a redo",
    "a zombie wakes inside a sweep",
    "a zombie's Spark commits what is abandoned",
    "an abandoned batch is replayed",
    "an open merge dies with its process",
    "an operator closes a gap",
    "an operator settles a branch that stands",
    "an operator's word meets a driver that repeats a commit",
    "another process holds the merge that is committed",
    "decided, 1 of 3 sinks committed",
    "decided, 2 of 3 sinks committed",
    "old records are forgotten",
    "one branch is written again",
    "the answer to a decision is lost",
    "the policy changes over an unfinished batch",
    "three drivers are alive",
)
"""States that have to be reached by some thousand seeds."""

RARE_STATES: Final = ("a whole sink is written again from other partitions",)
"""States that have to be reached by the full run."""

PAIRS: Final = frozenset((step, fault) for step, faults in STEPS.items() for fault in faults)
"""Every (step, fault) pair; each has to fire."""


@dataclass
class Coverage:
    """What the seeds of a run have met together."""

    seeds: int = 0
    steps: int = 0
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
        self.fired.update(other.fired)
        self.states.update(other.states)
        self.failures = sorted(self.failures + other.failures)

    def missing(self, states: Iterable[str]) -> list[str]:
        """What never happened and should have, in words."""
        never = [f"{step} <- {fault}" for step, fault in sorted(PAIRS - self.fired.keys())]
        return never + [state for state in states if state not in self.states]
