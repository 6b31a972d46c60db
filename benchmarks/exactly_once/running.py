"""Three runs of an engine: through a backlog, at a steady rate, and killed at random times."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final

from benchmarks.exactly_once.readers import FolderReader, Latency, Reader, TopicReader
from benchmarks.exactly_once.workload import Sender, make_topics

from sparkonce.testing.services.process import Command, Guard, log_tail

if TYPE_CHECKING:
    from benchmarks.exactly_once.engines import Engine

PATIENCE_S: Final = 300.0
_LONGEST_TRANSACTION_S: Final = 960.0
"""Longer than an engine's transactions may stay open."""


@dataclass(frozen=True)
class Load:
    """What the engines have to do.

    Attributes:
        records: of the backlog.
        rate: records a second, in the other two runs.
        seconds: of the run at a steady rate.
        kills: how many SIGKILLs.
        seed: of their times.
        warm_s: seconds of the run at a steady rate that do not count.
        lost_after_s: after so many seconds without a new record, what is missing is lost.
        quiet_s: how long the output is watched after it is complete: duplicates come late.
    """

    records: int
    rate: int
    seconds: int
    kills: int
    seed: int
    warm_s: int = 15
    lost_after_s: int = 60
    quiet_s: int = 10


@dataclass
class Result:
    """What one engine did.

    Attributes:
        rows_per_s: through the backlog, from the first append until the last record is visible.
        start_s: from the start until the first record of the backlog is visible.
        latency: at the steady rate.
        recovery_s: from each kill until the next record is visible.
        lost: records of the run with kills that never became visible.
        duplicated: records that became visible more than once.
        sent: records of that run.
    """

    rows_per_s: float
    start_s: float
    latency: Latency
    recovery_s: list[float]
    lost: int
    duplicated: int
    sent: int


class Program:
    """An engine's program, which ends with this process at the latest."""

    def __init__(self, argv: list[str], env: dict[str, str], log: Path) -> None:
        self._command, self._guard = Command(argv, log=log, env=env), Guard()

    def start(self) -> None:
        self._guard.start(self._command)

    def kill(self) -> None:
        """SIGKILL to it and to all its children, such as a JVM and Python workers."""
        self._guard.end()

    def close(self) -> None:
        self._guard.close()

    def check(self) -> None:
        """Return if it runs.

        Raises:
            RuntimeError: it has ended; with the end of its log.
        """
        if (code := self._guard.status()) is not None:
            raise RuntimeError(f"the engine has ended with {code}: {log_tail(self._command.log)}")


@dataclass(frozen=True)
class Run:
    """One engine on fresh topics."""

    servers: str
    engine: Engine
    folder: Path

    @contextmanager
    def fresh(self) -> Iterator[tuple[Sender, Reader, Program]]:
        name = uuid.uuid4().hex[:10]
        source, target = f"in-{name}", f"out-{name}"
        make_topics(self.servers, source, target)
        (state := self.folder / name).mkdir()
        if self.engine.writes_files:
            (output := state / "output").mkdir()
            reader, target = FolderReader(output), output.as_uri()
        else:
            reader = TopicReader(self.servers, target)
        argv = self.engine.argv(self.servers, source, target, state)
        program = Program(argv, {**os.environ, **self.engine.env()}, state / "log")
        with closing(reader), closing(program):
            yield Sender(self.servers, source), reader, program

    def backlog(self, records: int) -> tuple[float, float]:
        """Rows a second, and seconds until the first is visible."""
        with self.fresh() as (sender, reader, program):
            sender.send(records)
            sender.flush()
            began = time.time()
            program.start()
            self._await_all(records, reader, program)
            seen = reader.seen
            return records / (seen.last_s - seen.began_s), min(seen.at_s.values()) - began

    def steady(self, load: Load) -> Latency:
        with self.fresh() as (sender, reader, program):
            program.start()
            sender.send(1)
            sender.flush()
            self._await_all(1, reader, program)
            began = time.time()
            deadline = began + load.warm_s + load.seconds
            sender.send_at(load.rate, lambda: time.time() > deadline)
            self._await_all(sender.sent, reader, program)
            return Latency.of(sender.made_s, reader.seen, after_s=began + load.warm_s)

    def killed(self, load: Load) -> tuple[list[float], int, int, int]:
        """Seconds of each recovery; records that are lost, duplicated, and sent."""
        rng, recoveries = Random(load.seed), list[float]()  # noqa: S311 - times, no secrets
        with self.fresh() as (sender, reader, program):
            seen = reader.seen
            program.start()
            for _ in range(load.kills):
                # Only an engine that delivers can be harmed: wait for a record, then a while.
                self._send_until_seen(load, sender, reader, program)
                until = time.time() + rng.uniform(0.5, 5.0)
                sender.send_at(load.rate, lambda until=until: time.time() > until)  # type: ignore[misc]
                program.kill()
                killed_s = time.time()
                program.start()
                # Records of before may still become visible without the engine; new ones may not.
                number = self._send_until_seen(load, sender, reader, program)
                recoveries.append(seen.at_s[number] - killed_s)
            sender.flush()
            self._await_most(sender.sent, load, reader, program)
            return recoveries, sender.sent - len(seen.at_s), len(seen.again), sender.sent

    def _send_until_seen(self, load: Load, sender: Sender, reader: Reader, program: Program) -> int:
        """Send until the first record of these is visible; returns its id."""
        number, deadline = sender.sent, time.time() + PATIENCE_S

        def is_seen() -> bool:
            reader.check()
            program.check()
            if time.time() > deadline:
                raise RuntimeError(f"{self.engine.name} did not recover in {PATIENCE_S:.0f} s")
            return number in reader.seen.at_s

        sender.send_at(load.rate, is_seen)
        return number

    def _await_all(self, count: int, reader: Reader, program: Program) -> None:
        seen, deadline = reader.seen, time.time() + PATIENCE_S
        while len(seen.at_s) < count:
            reader.check()
            program.check()
            if time.time() > deadline:
                raise RuntimeError(
                    f"{self.engine.name}: {len(seen.at_s):,} of {count:,} records are visible "
                    f"after {PATIENCE_S:.0f} s"
                )
            time.sleep(0.02)

    def _await_most(self, count: int, load: Load, reader: Reader, program: Program) -> None:
        """Wait until all is visible, or nothing more can come; then a while for duplicates.

        A transaction that was left open holds back records until its timeout.
        """
        seen, deadline = reader.seen, time.time() + _LONGEST_TRANSACTION_S
        while time.time() < deadline:
            reader.check()
            program.check()
            is_quiet = time.time() - seen.last_s > load.lost_after_s
            if (len(seen.at_s) >= count or is_quiet) and not reader.hides_any():
                break
            time.sleep(1)
        time.sleep(load.quiet_s)


def run(engine: Engine, servers: str, folder: Path, load: Load) -> Result:
    """All three runs of an engine."""
    one = Run(servers, engine, folder)
    rows_per_s, start_s = one.backlog(load.records)
    latency = one.steady(load)
    recovery_s, lost, duplicated, sent = one.killed(load)
    return Result(rows_per_s, start_s, latency, recovery_s, lost, duplicated, sent)
