"""Runs verbs of a sink in several processes at the same time, for `SinkRace`.

this process ── branches ──► racer     it has read them   ──► this process
             ── start    ──► racer     its verb has ended ──►
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Literal, TypeAlias

from sparkonce.errors import CommitUnresolvedError
from sparkonce.model import Committable
from sparkonce.sinks import verbs
from sparkonce.sinks.base import AnySink
from sparkonce.testing.sink_process import PATIENCE_S, OtherProcess

RaceVerb: TypeAlias = Literal["commit", "abort"]

_SIZE = struct.Struct("I")
"""Sent before the branches of a round: their number of bytes."""

_START = struct.Struct("d")
"""Sent to start a round: how much of a verb's usual time to wait first, from 0 to 1."""


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
        self._signals, ours = os.pipe()
        super().__init__(__name__, (sink, verb), fds=[ours], stdin=subprocess.PIPE)
        os.close(ours)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        os.close(self._signals)

    def give(self, committables: Sequence[Committable]) -> None:
        """Send the branches of the next round, and wait until they have arrived."""
        branches = pickle.dumps(committables)
        self._send(_SIZE.pack(len(branches)) + branches)
        self.await_signal()

    def start(self, share: float) -> None:
        self._send(_START.pack(share))

    def _send(self, message: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(message)
        self._process.stdin.flush()

    def await_signal(self) -> None:
        ready = connection.wait([self._signals], PATIENCE_S)
        if not ready or not os.read(self._signals, 1):
            raise AssertionError(self.failure("did not end"))

    def outcomes(self) -> list[Outcome]:
        assert self._process.stdin is not None
        self._process.stdin.close()  # there are no more rounds
        return [Outcome(*each) for each in self.report_at_end(0)]


def main(folder: Path, signals: int) -> None:
    """Run the verb in each round as soon as it is started; write the report at the end."""
    sink, verb = pickle.loads((folder / "order").read_bytes())  # noqa: S301 - ours
    outcomes: list[tuple[str, str]] = []
    usual_s = 0.0
    while size := sys.stdin.buffer.read(_SIZE.size):
        committables = pickle.loads(sys.stdin.buffer.read(*_SIZE.unpack(size)))  # noqa: S301 - ours
        os.write(signals, b".")
        (share,) = _START.unpack(sys.stdin.buffer.read(_START.size))
        begin = time.perf_counter()
        while time.perf_counter() < begin + share * usual_s:
            pass
        begin = time.perf_counter()
        outcomes.append(_outcome(sink, verb, committables))
        took_s = time.perf_counter() - begin
        usual_s = min(usual_s or took_s, took_s)
        os.write(signals, b".")
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


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
