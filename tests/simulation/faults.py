"""Every step of the simulation with its possible faults, and the plan of faults of a seed.

A seed makes a `Plan`. Some of its faults hit the nth step of the whole run, so busy parts of the
protocol get many. Others hit the nth time of a named step. A `Theme` leads the run to a part of the
protocol that only faults reach, and hits it there again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Final

POINT: Final = ("crash", "error", "pause", "delay", "drop")
READ: Final = ("crash", "error", "pause", "delay", "drop")
WRITE: Final = (
    "crash",
    "crash_after",
    "error",
    "lost",
    "torn",
    "twice",
    "late",
    "pause",
    "pause_after",
)
""""torn": the answer is lost and nothing was written; "late": the same, but it lands later."""
SINK: Final = ("crash", "crash_after", "error", "lost", "twice", "pause", "pause_after", "drop")
TASK: Final = ("crash", "crash_after", "error", "lost", "pause", "pause_after", "zombie", "delay")
"""The faults of a task's verb: "error" fails the task, and Spark runs it again; "zombie" runs the
task twice, and the second attempt prepares much later."""

DRIVER_POINTS: Final = (
    "begin.before",
    "begin.after",
    "finish.before",
    "recover.after",
    "vote.before",
    "vote.after",
    "hold.before",
    "hold.after",
    "abandon.before",
    "abandon.after",
    "decide.before",
    "decide.after",
    "commit.before",
    "commit.after",
    "rewrite.before",
    "amend.before",
    "amend.after",
    "complete.before",
    "complete.after",
    "deliver.after",
)
_PYTHON: Final = ("crash", "pause", "delay", "drop")
SINKS: Final = ("plain", "kafka", "postgres")

STEPS: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(DRIVER_POINTS, POINT),
    **dict.fromkeys(("log.head", "log.find", "log.unfinished", "log.check_token"), READ),
    **dict.fromkeys(
        [
            f"log.{verb}"
            for verb in ("begin", "prepare", "decide", "abandon", "amend", "complete", "forget")
        ],
        WRITE,
    ),
    **{f"{sink}.{verb}": SINK for sink in SINKS for verb in ("commit", "abort")},
    "commit.waits": ("crash", "pause", "delay", "drop"),
    **{f"{sink}.find_branches": READ for sink in SINKS},
    **{f"{sink}.precommit": TASK for sink in SINKS},
    "postgres.prepare_batch": ("crash", "crash_after", "error", "lost", "pause", "drop"),
    **dict.fromkeys(("python.plan", "python.abort"), _PYTHON),
    "python.commit": (*_PYTHON, "other_job"),
    "python.answer": ("crash", "pause"),
    "spark.plan": ("crash", "pause", "delay"),
    "spark.offsets": ("crash", "pause", "error"),
    "spark.write": ("crash", "error", "pause", "delay", "repartition", "other_rows"),
    "spark.drain": ("crash", "error", "pause"),
    "spark.commit": ("crash", "crash_after", "error", "pause", "pause_after"),
}
"""Every step with its faults: the pairs that a run must fire."""


COMMANDS: Final[dict[str, tuple[str, ...]]] = {
    "folder.change": ("crash", "crash_after", "error", "lost", "pause", "pause_after"),
    **dict.fromkeys(("log.found", "log.replace_query", "log.end_rewind"), WRITE),
    "log.newest": ("crash", "error", "pause"),
    "log.history": ("crash", "error", "pause"),
}
"""Steps of the savepoint commands only. A plan does not name them: chance hits them."""

_COMMAND_RATE: Final = 0.06


@dataclass(frozen=True, slots=True)
class Theme:
    """A first fault that leads to a part of the protocol, and the steps of that part.

    Attributes:
        openings: one of these (step, fault) pairs comes first.
        steps: some of these steps get a fault.
        policy: the commit policy that the part needs; None for any.
        faults: if given, the steps get only these faults.
        is_of_format: whether the part is of `writeStream.format("sparkonce")`.
    """

    openings: tuple[tuple[str, str], ...]
    steps: tuple[str, ...]
    policy: str | None = None
    faults: tuple[str, ...] = ()
    is_of_format: bool = False


_ENDS: Final = ("crash", "pause", "error")

THEMES: Final = (
    Theme(  # branches are lost after the decision
        (("decide.after", "drop"), ("commit.before", "drop"), ("log.decide", "crash_after")),
        ("rewrite.before", "amend.before", "amend.after", *["log.amend"] * 4, "spark.write"),
    ),
    Theme(  # branches are lost, and the replay differs
        (("decide.after", "drop"), ("decide.before", "drop"), ("commit.before", "drop")),
        ("spark.write", "spark.write", "commit.before", "amend.after"),
        faults=("other_rows", "repartition", "drop"),
    ),
    Theme(  # a write is under way while the log is unreachable
        (
            ("log.decide", "late"),
            ("log.decide", "late"),
            ("log.prepare", "late"),
            ("log.complete", "late"),
        ),
        ("decide.after", "spark.commit", "log.unfinished", "commit.before"),
    ),
    Theme(  # Spark does not commit the prepared batch
        (
            ("hold.after", "crash"),
            ("hold.after", "pause"),
            ("deliver.after", "crash"),
            ("deliver.after", "error"),
            ("spark.commit", "pause"),
            ("spark.commit", "crash"),
        ),
        ("abandon.before", "abandon.after", *["log.abandon"] * 3, "hold.after"),
        "after_checkpoint",
    ),
    Theme(  # an abandonment lands after the replay
        (("hold.after", "crash"), ("deliver.after", "crash")),
        ("log.abandon",),
        "after_checkpoint",
        faults=("late",),
    ),
    Theme(  # Spark commits, and the driver dies before it decides
        (("spark.commit", "crash_after"), ("spark.commit", "pause_after"), ("log.decide", "crash")),
        ("log.decide", "decide.before", "decide.after", "finish.before", "commit.before"),
        "after_checkpoint",
    ),
    Theme(  # the outcome of a commit is unknown, and other drivers run before the retry
        tuple((f"{sink}.commit", fault) for sink in SINKS for fault in ("error", "lost")),
        ("commit.waits", "commit.waits", "log.check_token"),
        faults=("pause", "error"),
    ),
    Theme(  # branches are aborted
        (
            ("decide.before", "error"),
            ("decide.before", "pause"),
            ("vote.after", "crash"),
            ("vote.after", "pause"),
            ("postgres.prepare_batch", "error"),
            ("kafka.precommit", "zombie"),
        ),
        tuple(f"{sink}.{verb}" for sink in SINKS for verb in ("abort", "find_branches")),
    ),
    Theme(  # the process that commits a batch dies or stands still, and Spark aborts the batch
        (
            *((f"decide.{when}", fault) for when in ("before", "after") for fault in _ENDS),
            *(("log.decide", fault) for fault in ("crash_after", "late", "late", "lost", "pause")),
            ("commit.before", "crash"),
            ("complete.after", "crash"),
            ("python.answer", "crash"),
            ("python.commit", "pause"),
            ("postgres.prepare_batch", "error"),
        ),
        (
            *["python.abort"] * 3,
            "python.answer",
            "log.unfinished",
            *(f"{sink}.{verb}" for sink in SINKS for verb in ("abort", "find_branches")),
        ),
        faults=("pause", "crash", "delay"),
        is_of_format=True,
    ),
    Theme(  # what is planned is not what the batch needs when it is committed
        (("decide.after", "drop"), ("decide.after", "crash"), ("commit.before", "drop")),
        (*["python.commit"] * 3, "python.plan", "spark.write", "commit.before", "recover.after"),
        faults=("pause", "drop", "crash", "other_job"),
        is_of_format=True,
    ),
    Theme(  # planners and drivers of either front overtake each other
        (
            ("python.plan", "pause"),
            ("python.answer", "pause"),
            ("spark.commit", "pause_after"),
            ("spark.offsets", "pause"),
            ("log.check_token", "pause"),
            ("begin.before", "pause"),
            ("begin.after", "crash"),
        ),
        ("python.plan", "python.commit", "python.answer", "spark.commit", "spark.plan"),
        faults=("pause", "crash"),
        is_of_format=True,
    ),
)

_NAMES: Final = tuple(STEPS)
_ERRORS_IN_A_ROW: Final = (1, 1, 1, 6)
_STEPS_OF_A_RUN: Final = 260


class Plan:
    """The faults of one seed.

    Attributes:
        fired: the (step, fault) pairs that happened.
        is_on: False once faults have stopped.
        policy: the commit policy that its theme needs, if any.
        is_of_format: whether its theme is of `writeStream.format("sparkonce")`.
        command_rng: for the steps of `COMMANDS`.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = self.command_rng = rng
        self._by_number: set[int] = set()
        self._by_name: dict[str, list[tuple[int, str]]] = {}
        self._outages: dict[str, int] = {}
        self._seen: Counter[str] = Counter()
        self._pause_rate = rng.choice((0.0, 0.0, 0.0, 0.02, 0.15))
        self._steps = 0
        self.fired: list[tuple[str, str]] = []
        self.is_on = True
        self.policy: str | None = None
        self.is_of_format = False
        if rng.random() < 0.7:
            self._follow(rng.choice(THEMES))
        for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4, 6))):
            if rng.random() < 0.4:
                self._by_number.add(int(rng.random() * _STEPS_OF_A_RUN))
            else:
                step = _NAMES[int(rng.random() * len(_NAMES))]
                fault = rng.choice(STEPS[step])
                nth = 1 + int(rng.random() ** 2 * 5)
                self._by_name.setdefault(step, []).append((nth, fault))

    def _follow(self, theme: Theme) -> None:
        rng = self._rng
        self.policy = theme.policy
        self.is_of_format = theme.is_of_format
        step, fault = rng.choice(theme.openings)
        nth = rng.choice((1, 1, 1, 2, 3))
        self._by_name.setdefault(step, []).append((nth, fault))
        for _ in range(rng.choice((0, 1, 1, 2, 2))):
            step = rng.choice(theme.steps)
            after = nth if step == theme.openings[0][0] else 0
            at = after + rng.choice((1, 1, 1, 2, 3))
            faults = [fault for fault in STEPS[step] if fault in theme.faults or not theme.faults]
            self._by_name.setdefault(step, []).append((at, rng.choice(faults)))

    def at(self, step: str, *, others_alive: bool) -> str | None:
        """The fault that hits this step now, if any."""
        if not self.is_on:
            return None
        if step in COMMANDS:
            return self._at_command(step)
        self._steps += 1
        seen = self._seen[step] = self._seen[step] + 1
        fault: str | None = None
        if self._steps in self._by_number:
            fault = self._rng.choice(STEPS[step])
        elif step in self._by_name:
            fault = next((fault for nth, fault in self._by_name[step] if nth == seen), None)
        if fault is None and self._outages and self._outages.get(step, 0):
            self._outages[step] -= 1
            fault = "error"
        elif fault == "error":
            self._outages[step] = self._rng.choice(_ERRORS_IN_A_ROW) - 1
        elif fault in {"lost", "torn", "late"}:  # often the log stays unreachable for a while
            self._outages[step] = self._rng.choice((0, 6))
        is_switch = fault is None and others_alive and "pause" in STEPS[step]
        if is_switch and self._pause_rate and self._rng.random() < self._pause_rate:
            fault = "pause"
        if fault is not None:
            self.fired.append((step, fault))
        return fault

    def _at_command(self, step: str) -> str | None:
        rate = _COMMAND_RATE if step == "folder.change" else 4 * _COMMAND_RATE
        if self.command_rng.random() >= rate:
            return None
        fault = self.command_rng.choice(COMMANDS[step])
        self.fired.append((step, fault))
        return fault
