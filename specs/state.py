"""The state of the model: everything that outlives a step, as frozen values.

    logs[c].records[n]   the record of batch n          commits[q]  the highest batch in the commit
    branches             (branch, how it is) pairs                  log of query q's checkpoint
    ruling               the batch and sink of a branch that an operator ends next
    drivers[d]           where each driver is           flight      a write on its way to a log

A branch stands for all that one sink holds of one attempt to write a batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

PREPARED, DECIDED, COMPLETE, ABANDONED = "prepared", "decided", "complete", "abandoned"
VISIBLE, ABORTED, LOST, TWICE, TAKEN = "visible", "aborted", "lost", "twice", "taken back"
UNFINISHED = (PREPARED, DECIDED)
NOBODY = -1
SAVEPOINT = 0
"""The batch of a savepoint."""


class Branch(NamedTuple):
    batch: int
    sink: int
    token: int
    attempt: int = 0
    pipeline: int = 0


class Record(NamedTuple):
    """A record of the log; `ruled` are the sinks whose branch an operator has ruled out."""

    batch: int
    state: str
    token: int
    names: tuple[Branch, ...]
    revision: int = 0
    ruled: frozenset[int] = frozenset()

    def branch(self, sink: int) -> Branch | None:
        return next((name for name in self.names if name.sink == sink), None)

    @property
    def pipeline(self) -> int:
        return max((name.pipeline for name in self.names), default=0)


class Log(NamedTuple):
    """A log; `since` is the first token that the run has taken which holds it."""

    token: int
    records: tuple[Record | None, ...]
    since: int = 0

    def next_batch(self) -> int:
        known = [record for record in self.records if record is not None]
        return known[-1].batch + (known[-1].state != ABANDONED) if known else 0

    def may_forget(self, batch: int) -> bool:
        """Whether the record is complete, and not the last one that is: `forget` of the log."""
        done = [r.batch for r in self.records if r is not None and r.state == COMPLETE]
        return batch in done and batch != done[-1]

    def unfinished(self) -> list[Record]:
        return [r for r in self.records if r is not None and r.state in UNFINISHED]

    def with_record(self, record: Record) -> Log:
        before, after = self.records[: record.batch], self.records[record.batch + 1 :]
        return self._replace(records=(*before, record, *after))


class Driver(NamedTuple):
    """One driver: `at` names the step that it takes next, and `way` what follows that part.

    `record` is the record in its hands, as it last saw it; `made` what it has prepared for the
    next write of the log; `todo` the sinks that the present part has not reached; `named` what its
    sweep spares; `seen` the run, and `met` the entry, that it found before it began; `entry` its
    own; `first` the first token of its run, which stands for the run; `query` that of its
    checkpoint.
    """

    at: str = "off"
    way: str = ""
    waits: bool = False
    log: int = 0
    token: int = 0
    batch: int = 0
    seen: int = 0
    first: int = 0
    met: int = 0
    entry: int = 0
    replay: int = NOBODY
    attempts: int = 0
    record: Record | None = None
    made: tuple[Branch, ...] = ()
    todo: frozenset[int] = frozenset()
    lost: frozenset[int] = frozenset()
    unsure: frozenset[int] = frozenset()
    named: frozenset[Branch] = frozenset()
    rest: frozenset[int] = frozenset()
    query: int = 0


class Flight(NamedTuple):
    """A write of the log whose driver has no answer: it lands later, or never."""

    verb: str
    log: int
    token: int
    record: Record


class Rewind(NamedTuple):
    """A rewind: `at` is looked, stale if the log has changed since, or taking; `todo` goes."""

    at: str
    todo: frozenset[Branch]


class State(NamedTuple):
    """Where all of it is now.

    `query` is the pipeline's. The number before it is the query that a rewind has replaced; the
    one after it is the fork's. `entry` is the last one in the checkpoint: its number, its driver's
    log and run.
    """

    logs: tuple[Log, ...]
    commits: tuple[int, ...]
    branches: frozenset[tuple[Branch, str]]
    drivers: tuple[Driver, ...]
    flight: Flight | None = None
    ruling: tuple[int, int] | None = None
    by_hand: frozenset[tuple[int, int]] = frozenset()
    entry: tuple[int, int, int] = (0, 0, 0)
    faults: tuple[tuple[str, int], ...] = ()
    rewind: Rewind | None = None
    query: int = 0

    @property
    def committed(self) -> int:
        return self.commits[self.query]

    @property
    def pipelines(self) -> list[tuple[int, int]]:
        """The query and the log of the pipeline, and those of its fork."""
        if self.is_forked:
            return [(self.query, 0), (self.query + 1, 1)]
        return [(self.query, len(self.logs) - 1)]

    @property
    def is_forked(self) -> bool:
        return len(self.commits) > self.query + 1

    def pipeline_of(self, me: Driver) -> int:
        """0, or 1 for the fork."""
        return int(me.query > self.query)

    def committed_for(self, me: Driver) -> int:
        """The highest batch in the commit log of the driver's checkpoint."""
        return self.commits[me.query]

    def is_paused(self, me: Driver) -> bool:
        """Whether the driver's log is no longer the newest, with which nobody has entered yet."""
        return self.entry[1] == me.log and all(me.log != log for _, log in self.pipelines)

    def how(self, branch: Branch) -> str | None:
        return next((how for known, how in self.branches if known == branch), None)

    def put(self, branch: Branch, how: str) -> State:
        others = frozenset(pair for pair in self.branches if pair[0] != branch)
        return self._replace(branches=others | {(branch, how)})

    def with_driver(self, d: int, driver: Driver) -> State:
        return self._replace(drivers=(*self.drivers[:d], driver, *self.drivers[d + 1 :]))

    def move(self, d: int, **changes: Any) -> State:
        return self.with_driver(d, self.drivers[d]._replace(**changes))

    def stop(self, d: int) -> State:
        return self.with_driver(d, Driver())

    def take_token(self, number: int, first: int) -> State:
        """Give the log's next token to a run that has taken `first` before; 0 if it had none.

        Tokens follow the clock, so copies of a log never give the same one.
        """
        log = self.logs[number]
        token = 1 + max(known.token for known in self.logs)
        since = log.since if first and first == log.since else token
        return self.with_log(number, log._replace(token=token, since=since))

    def store(self, log: int, record: Record) -> State:
        if self.logs[log].records[record.batch] == record:
            return self
        return self.with_log(log, self.logs[log].with_record(record))

    def with_log(self, number: int, log: Log) -> State:
        logs = list(self.logs)
        logs[number] = log
        s = self._replace(logs=tuple(logs))
        if s.rewind is None or s.rewind.at != "looked":
            return s
        return s._replace(rewind=s.rewind._replace(at="stale"))

    def with_commit(self, query: int, batch: int) -> State:
        commits = list(self.commits)
        commits[query] = batch
        return self._replace(commits=tuple(commits))

    def left(self, fault: str) -> int:
        return dict(self.faults).get(fault, 0)

    def spend(self, fault: str) -> State:
        left = {name: n - (name == fault) for name, n in self.faults}
        return self._replace(faults=tuple(left.items()))


@dataclass(frozen=True)
class Model:
    """What is checked: the bounds, and the guards that are removed.

    `faults` are how often each fault may happen; crashes and pauses are not bounded. `policies`
    are those that a driver may have: False for immediate, True for after_checkpoint. With
    `any_share`, a sink may get no rows of a batch, and steps come in any order. With `copies`,
    drivers enter the checkpoint; without, the log's token says as much. With `forks`, all begins
    after the first batch, with a fork of the pipeline: to make one changes nothing of the first.
    """

    drivers: int = 2
    sinks: int = 2
    batches: int = 3
    policies: tuple[bool, ...] = (False,)
    faults: tuple[tuple[str, int], ...] = ()
    without: frozenset[str] = frozenset()
    any_share: bool = False
    copies: bool = False
    forks: bool = False

    def has(self, guard: str) -> bool:
        """Whether the guard is in force; the names are those of `models.REVERTS`."""
        return guard not in self.without

    @property
    def all_sinks(self) -> frozenset[int]:
        return frozenset(range(self.sinks))

    def next_of(self, sinks: frozenset[int]) -> Iterable[int]:
        """The sinks that may be next: in the checker, tasks and sweeps take them in order."""
        return sinks if self.any_share else (min(sinks),)

    def first(self) -> State:
        logs, commits = [Log(0, (None,) * self.batches)], [NOBODY]
        if self.forks:
            logs = [logs[0].with_record(Record(SAVEPOINT, COMPLETE, 0, ()))] * 2
            commits = [SAVEPOINT] * 2
        drivers = (Driver(),) * self.drivers
        return State(tuple(logs), tuple(commits), frozenset(), drivers, faults=self.faults)


Steps = Iterable[tuple[str, State]]
"""The steps that are possible: a name for each, and the state that follows."""
