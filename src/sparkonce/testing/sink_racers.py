"""Runs verbs of a sink in several processes at the same time, for `SinkRace`.

this process ── branches ──► racer     it has read them   ──► this process
             ── start    ──► racer     its verb has ended ──►
"""

from __future__ import annotations

import contextlib
import json
import pickle
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, TypeAlias

from sparkonce.errors import CommitUnresolvedError
from sparkonce.model import Committable
from sparkonce.sinks import verbs
from sparkonce.sinks.base import AnySink
from sparkonce.testing.sink_process import PATIENCE_S, OtherProcess

RaceVerb: TypeAlias = Literal["commit", "abort"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a verb ended.

    Attributes:
        kind: "done"; "unknown": a CommitUnresolvedError; or "failed": another error.
        text: of the error.
    """

    kind: str
    text: str = ""


def race(
    sink: AnySink,
    rounds: Iterable[Sequence[Committable]],
    racers: Sequence[RaceVerb],
    choice: random.Random,
) -> list[list[Outcome]]:
    """Let each racer, a process of its own, run its verb on the same branches in each round.

    A round's branches are prepared when its turn comes, since a prepared branch may expire.

    Returns:
        For each round, the outcome of each racer.

    Raises:
        AssertionError: a process failed, or a verb did not end; the message has its last output.
    """
    with contextlib.ExitStack() as stack:
        runners = [stack.enter_context(_Racer(sink, verb)) for verb in racers]
        for committables in rounds:
            for runner in runners:
                runner.give(committables)
            for runner in choice.sample(runners, len(runners)):
                runner.start(choice.random())
            for runner in runners:
                runner.await_signal()
        return [list(each) for each in zip(*(r.outcomes() for r in runners), strict=True)]


class _Racer(OtherProcess):
    def __init__(self, sink: AnySink, verb: RaceVerb) -> None:
        self._line, theirs = Pipe()
        with theirs:
            super().__init__(main, (sink, verb), theirs)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._line.close()

    def give(self, committables: Sequence[Committable]) -> None:
        """Send the branches of the next round, and wait until they have arrived."""
        self._line.send(committables)
        self.await_signal()

    def start(self, share: float) -> None:
        """Start the round; first wait for this share of a verb's usual time, from 0 to 1."""
        self._line.send(share)

    def await_signal(self) -> None:
        with contextlib.suppress(EOFError, ConnectionError):
            if self._line.poll(PATIENCE_S):
                self._line.recv()
                return
        raise AssertionError(self.failure("did not end"))

    def outcomes(self) -> list[Outcome]:
        self._line.send(None)  # there are no more rounds
        return [Outcome(*each) for each in self.report_at_end(0)]


def main(folder: Path, line: Connection) -> None:
    """Run the verb in each round as soon as it is started; write the report at the end."""
    sink, verb = pickle.loads((folder / "order").read_bytes())  # noqa: S301 - ours
    outcomes: list[tuple[str, str]] = []
    usual_s = 0.0
    while (committables := line.recv()) is not None:
        line.send("arrived")
        share = line.recv()
        begin = time.perf_counter()
        while time.perf_counter() < begin + share * usual_s:
            pass
        begin = time.perf_counter()
        outcomes.append(_outcome(sink, verb, committables))
        took_s = time.perf_counter() - begin
        usual_s = min(usual_s or took_s, took_s)
        line.send("ended")
    (folder / "report").write_text(json.dumps(outcomes))


def _outcome(sink: AnySink, verb: RaceVerb, committables: Sequence[Committable]) -> tuple[str, str]:
    if verb == "abort":
        errors: list[Exception | None] = [
            verbs.outcome_of_abort(sink, committable) for committable in committables
        ]
    else:
        errors = list(verbs.commit_many(sink, committables))
    real = [error for error in errors if error is not None]
    for error in real:
        if verb == "abort" or not isinstance(error, CommitUnresolvedError):
            return "failed", f"{type(error).__name__}: {error}"
    return ("unknown", str(real[0])) if real else ("done", "")
