"""Replays what a run of the real code did through the model: each step must be possible there.

    events of a run ─► for each: the driver's own silent steps, then one with this outcome ─► …
                         └─ no state is left: the code did what the model does not allow

A run shows what it reads and what it changes. What a driver does in between is silent: a check, a
choice, a sweep that is skipped. So the replay keeps every state that fits the events so far. A
driver that was killed is one that takes no more steps.

Each partition of a sink takes part as a sink of the model, so that one may be lost without others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, NamedTuple

from specs.moves import leave_sweep, orphans
from specs.protocol import DRIVER, fail
from specs.state import (
    ABORTED,
    LOST,
    PREPARED,
    VISIBLE,
    Branch,
    Driver,
    Model,
    State,
)
from specs.world import close_gap, land, late


class Event(NamedTuple):
    """Something that a driver has read or changed.

    Attributes:
        driver: which driver; they are numbered from 0.
        what: plan, look, begin, unfinished, find, prepare, record, show, abort, lost, stray,
            spark or gap, each a method of `Replay`.
        details: of the event; JSON values.
    """

    driver: int
    what: str
    details: Mapping[str, Any]


class Impossible(Exception):  # noqa: N818 - what the model says of a step
    """The model does not allow what the run did."""


_SILENT: Final[Mapping[str, tuple[str, ...]]] = {
    "prepare": ("executors are lost",),
    "names": ("the log is not read",),
    "recover": ("reads",),
    **dict.fromkeys(("fate", "check", "lost"), ("",)),
    **dict.fromkeys(("abandon", "decide", "send", "amend", "complete"), ("",)),
    "spark commits": ("Spark refuses",),
}
"""By place, how the steps begin that a run does not show."""
_MOST_SILENT: Final = 24

Match = Callable[[State, str, State], bool]


@dataclass
class Replay:
    """The states of the model that fit the events so far."""

    model: Model
    first_batch: int
    states: list[State]
    branches: dict[str, Branch] = field(default_factory=dict)
    places: dict[tuple[str, object], int] = field(default_factory=dict)
    plans: dict[int, tuple[bool, int]] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    firsts: dict[int, int] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: count(1000))

    @classmethod
    def of(cls, events: Sequence[Event], first_batch: int, batches: int) -> Replay:
        drivers = 1 + max((event.driver for event in events), default=0)
        places: dict[tuple[str, object], int] = {}
        for event in events:
            if event.what == "prepare":
                place = event.details["sink"], event.details["part"]
                places.setdefault(place, len(places))
        model = Model(
            drivers=drivers,
            sinks=max(1, len(places)),
            batches=batches,
            policies=(False, True),
            faults=(("interrupt", 1), ("late", 1), ("gap", 1)),
            any_share=True,
        )
        return cls(model, first_batch, [model.first()], places=places)

    def take(self, event: Event) -> None:
        """Keep the states in which the event may happen.

        Raises:
            Impossible: there is none.
        """
        found = getattr(self, f"_{event.what}")(event.driver, **event.details)
        states = list(dict.fromkeys(found))
        if not states:
            d = event.driver
            where = {(s.drivers[d].at, s.drivers[d].way) for s in self.states if d < len(s.drivers)}
            raise Impossible(
                f"{event}: the driver is at {sorted(where)} in {len(self.states)} states"
            )
        self.states = states

    def _after(self, d: int, match: Match, *, may_skip: bool = False) -> Iterator[State]:
        """Every state after some silent steps of the driver and one step that matches."""
        for first in self.states:
            if may_skip:
                yield first
            seen, todo = {first}, [(first, 0)]
            while todo:
                state, depth = todo.pop()
                me = state.drivers[d]
                if me.at == "off" or depth > _MOST_SILENT:
                    continue
                for name, after in DRIVER[me.at](self.model, state, d):
                    if match(state, name, after):
                        yield after
                for after in _silent(self.model, state, d):
                    if after not in seen:
                        seen.add(after)
                        todo.append((after, depth + 1))

    # -- reads ---------------------------------------------------------------------------------

    def _plan(self, d: int, *, waits: bool) -> Iterable[State]:
        self.plans[d] = waits, self.states[0].committed + 1
        for s in self.states:
            yield _begun(s, d, waits=waits, batch=s.committed + 1)

    def _look(self, d: int) -> Iterable[State]:
        """A run may start once more, with the batch that it planned and what it first saw."""
        waits, batch = self.plans[d]
        seen = self.seen.setdefault(d, self.states[0].logs[0].token)
        for s in self.states:
            begun = _begun(s, d, waits=waits, batch=batch)
            for _, after in DRIVER["look"](self.model, begun, d):
                yield after.move(d, seen=seen, first=self.firsts.get(d, 0))

    def _unfinished(self, d: int) -> Iterable[State]:
        return self._after(
            d, lambda s, name, t: _at(s, d) in {"recover", "names"} and name in {"look", "names"}
        )

    def _find(self, d: int) -> Iterable[State]:
        return self._after(d, lambda s, name, t: _at(s, d) == "find")

    # -- the log -------------------------------------------------------------------------------

    def _begin(self, d: int) -> Iterable[State]:
        begun = list(self._after(d, lambda s, name, t: t.logs[0].token == s.logs[0].token + 1))
        if first := self.firsts.get(d):  # or an earlier try lands now
            landed = [s for s in self.states if s.logs[0].since == first and _at(s, d) != "begin"]
            begun += [s.take_token(0, first) for s in landed]
        elif begun:
            self.firsts[d] = begun[0].logs[0].since
        yield from begun
        for s in begun:  # it may be paused after it has read the checkpoint, before it looks
            if _at(s, d) == "recover":
                yield from _silent(self.model, s, d)

    def _record(self, d: int, *, batch: int, state: str, names: Sequence[str]) -> Iterable[State]:
        named = {self.branches[name] for name in names}
        number = batch - self.first_batch

        def fits(s: State, name: str, t: State) -> bool:
            record = t.logs[0].records[number]
            return (
                t.logs != s.logs
                and record is not None
                and record.state == state
                and set(record.names) == named
            )

        self.states = [_with_no_rows(state, d) for state in self.states]
        yield from self._after(d, fits)
        for before in self.states:
            yield from (after for _, after in land(self.model, before) if fits(before, "", after))

    # -- the sinks -----------------------------------------------------------------------------

    def _prepare(self, d: int, *, batch: int, sink: str, part: object, name: str) -> list[State]:
        place = self.places[sink, part]
        found: list[State] = []
        for state in self.states:
            again = [b for b in state.drivers[d].made if b.sink == place]
            # Spark ran the task again: its first branch counts as ended.
            found.append(_without(state, d, again[0]) if again else state)
            if again:
                self.branches = {n: b for n, b in self.branches.items() if b != again[0]}
        self.states = found
        wanted = (batch - self.first_batch, place)

        def fits(s: State, step: str, t: State) -> bool:
            added = [b for b, how in t.branches - s.branches if how == PREPARED]
            return [b[:2] for b in added] == [wanted]

        return [self._renamed(d, state, place, name) for state in self._after(d, fits)]

    def _renamed(self, d: int, s: State, place: int, name: str) -> State:
        """Give the new branch a number of its own, which the whole replay knows it by."""
        me = s.drivers[d]
        made = next(b for b in me.made if b.sink == place)
        number = next(self.numbers) if name not in self.branches else self.branches[name][3]
        new = self.branches.setdefault(name, made._replace(attempt=number))
        others = frozenset(pair for pair in s.branches if pair[0] != made)
        s = s._replace(branches=others | {(new, PREPARED)})
        return s.move(d, made=tuple(sorted(new if b == made else b for b in me.made)))

    def _stray(self, d: int, *, batch: int, sink: str, name: str) -> Iterable[State]:
        place = next((n for (other, _), n in self.places.items() if other == sink), 0)
        token = max(s.drivers[d].token for s in self.states)
        new = Branch(batch - self.first_batch, place, token, next(self.numbers))
        self.branches[name] = new
        return [s.put(new, PREPARED) for s in self.states]

    def _show(self, d: int, *, name: str) -> Iterable[State]:
        branch = self.branches[name]
        return self._after(d, lambda s, step, t: (branch, VISIBLE) in t.branches - s.branches)

    def _lost(self, d: int, *, name: str) -> Iterable[State]:
        """A commit found that the branch is gone; when it went does not matter to anybody else."""
        branch = self.branches[name]
        states = [s.put(branch, LOST) if s.how(branch) == PREPARED else s for s in self.states]
        self.states = [s for s in states if s.how(branch) != VISIBLE]
        yield from (s for s in self.states if branch.sink in s.drivers[d].lost)  # asked again
        step = f"commit {branch.sink}"
        yield from self._after(d, lambda s, name, t: name == step and _is_lost(s, branch))

    def _abort(self, d: int, *, name: str) -> Iterable[State]:
        branch = self.branches.get(name)
        if branch is None:  # a task that failed has aborted its own
            return self.states
        found: list[State] = []
        for state in self._after(d, lambda *_: False, may_skip=True):
            me = state.drivers[d]
            if me.at == "prepare" and branch in me.made:  # its task has failed, and aborts it
                found.append(_without(state, d, branch))
                continue
            if me.at == "sweep" and branch in orphans(self.model, state, d, branch.sink):
                found.append(state.put(branch, ABORTED))
        return found

    # -- Spark ---------------------------------------------------------------------------------

    def _spark(self, d: int, *, batch: int) -> Iterable[State]:
        number = batch - self.first_batch
        return self._after(d, lambda s, name, t: t.committed == number != s.committed)

    def _gap(self, d: int) -> Iterable[State]:
        """An operator has closed the gap that has refused the driver."""
        return [t._replace(faults=s.faults) for s in self.states for _, t in close_gap(s)]


def _without(s: State, d: int, branch: Branch) -> State:
    """A task of the driver is run again."""
    me = s.drivers[d]
    made = tuple(b for b in me.made if b != branch)
    after = s.put(branch, ABORTED)
    return after.move(d, at="prepare", made=made, todo=me.todo | {branch.sink})


def _is_lost(s: State, branch: Branch) -> bool:
    return s.how(branch) in {LOST, ABORTED}


def _at(s: State, d: int) -> str:
    return s.drivers[d].at


def _begun(s: State, d: int, *, waits: bool, batch: int) -> State:
    return s.with_driver(d, Driver(at="look", waits=waits, batch=batch))


def _silent(m: Model, s: State, d: int) -> Iterator[State]:
    """What the driver may do and a run does not show; of several equal orders only one."""
    me = s.drivers[d]
    if me.at == "sweep":
        yield leave_sweep(m, s.move(d, todo=frozenset()), d)
        yield from (after for _, after in fail(m, s, d))
        return
    if me.at == "commit":
        assert me.record is not None
        shown = [k for k in sorted(me.todo) if _how(s, me, k) == VISIBLE]
        wanted: tuple[str, ...] = (*(f"commit {k}" for k in shown[:1]), "is fenced")
    else:
        wanted = _SILENT.get(me.at, ())
    if me.at == "names" and me.way.endswith("again"):
        wanted = ()  # a silent interrupt: `_prepare` sees that tasks are run again
    if me.at == "abandon":  # its answer may be lost, and the write land later
        yield from (after._replace(faults=s.faults) for _, after in late(m, s, d))
    for name, after in DRIVER[me.at](m, s, d):
        is_same = after.logs == s.logs and after.branches == s.branches
        if is_same and after.committed == s.committed and name.startswith(wanted):
            same = after.move(d, attempts=me.attempts) if me.at == "prepare" else after
            yield same._replace(faults=s.faults)  # branches get numbers of their own here
    yield from (after for _, after in fail(m, s, d))


def _how(s: State, me: Driver, sink: int) -> str | None:
    branch = None if me.record is None else me.record.branch(sink)
    return None if branch is None else s.how(branch)


def _with_no_rows(s: State, d: int) -> State:
    """The sinks that have not prepared when the record is written got no rows."""
    me = s.drivers[d]
    if me.at != "prepare" or me.lost:
        return s
    return s.move(d, at="check", todo=frozenset())


def replay(events: Sequence[Event], *, first_batch: int, batches: int) -> None:
    """Replay a run.

    Raises:
        Impossible: the model does not allow an event.
    """
    going = Replay.of(events, first_batch, batches)
    for number, event in enumerate(events):
        try:
            going.take(event)
        except Impossible as impossible:
            raise Impossible(f"event {number}: {impossible}") from None
