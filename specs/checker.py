"""Every reachable state, breadth first, and the shortest way to a state that breaks a property.

    first ─► steps ─► tidy: one form for states that differ in nothing that matters ─► seen? ─► …
    quiet: the graph of the steps without faults has no circle, and ends where all is delivered

`tidy` keeps the graph finite without a bound on restarts: tokens are only compared, so they are
renumbered; a branch that nothing names can only be swept, so equal ones are one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from specs.properties import broken, no_leaks, records
from specs.state import (
    COMPLETE,
    NOBODY,
    PREPARED,
    VISIBLE,
    Branch,
    Driver,
    Log,
    Model,
    Record,
    State,
)
from specs.world import quiet_steps, steps


@dataclass
class Result:
    """What a check found.

    Attributes:
        problem: the first broken property; None if all hold.
        path: the steps that lead to it.
        reached: by probe, the number of steps after which it was first reached.
    """

    states: int = 0
    steps: int = 0
    depth: int = 0
    seconds: float = 0.0
    problem: str | None = None
    path: list[str] = field(default_factory=list)
    reached: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        size = f"{self.states:,} states, {self.steps:,} steps, depth {self.depth}"
        return f"{size}, {self.seconds:.0f} s: {self.problem or 'all properties hold'}"


Probe = Callable[[State], bool]


def check(
    m: Model,
    probes: Mapping[str, Probe] | None = None,
    *,
    is_live: bool = True,
    most: int = 10**9,
    expect: str = "",
) -> Result:
    """Visit every state of the model, up to `most`; end at the first broken property.

    With `expect`, only a property whose name begins so ends it.
    """
    began = time.process_time()
    found = Result()
    first = tidy(m, m.first())
    parents: dict[State, tuple[State, str] | None] = {first: None}
    level, missing = [first], dict(probes or {})
    while level and found.problem is None and len(parents) < most:
        following: list[State] = []
        for state in level:
            for name, probe in list(missing.items()):
                if probe(state):
                    found.reached[name] = found.depth
                    del missing[name]
            problem = _expand(m, state, parents, following, found, expect=expect)
            if problem is not None:
                found.problem, last = problem
                found.path = [*_path(parents, state), last]
                break
        level = following
        found.depth += 1
    if found.problem is None and is_live and expect in {"", "I8"}:
        _check_quiet(m, parents, found)
    found.states = len(parents)
    found.seconds = time.process_time() - began
    return found


def _expand(
    m: Model,
    state: State,
    parents: dict[State, tuple[State, str] | None],
    following: list[State],
    found: Result,
    *,
    expect: str,
) -> tuple[str, str] | None:
    for name, after in steps(m, state):
        found.steps += 1
        is_same = after.branches is state.branches and after.logs is state.logs
        if not is_same or after.commits != state.commits or after.by_hand is not state.by_hand:
            problems = [p for p in broken(m, state, name, after) if p.startswith(expect)]
            if problems and expect != "I8":
                return problems[0], name
        new = tidy(m, after)
        if new not in parents:
            parents[new] = (state, name)
            following.append(new)
    return None


def _path(parents: Mapping[State, tuple[State, str] | None], state: State) -> list[str]:
    names: list[str] = []
    while (before := parents[state]) is not None:
        state, name = before
        names.append(name)
    return names[::-1]


# -- liveness ----------------------------------------------------------------------------------


def _check_quiet(
    m: Model, parents: Mapping[State, tuple[State, str] | None], found: Result
) -> None:
    """From every state, each way without faults is finite and ends with all delivered."""
    known: dict[State, bool] = {}  # True once every way from it is known to end well
    for root in parents:
        if root not in known and (bad := _quiet_from(m, root, known)) is not None:
            way, why = bad
            found.problem = f"I8: {why}"
            found.path = [*_path(parents, root), "-- faults stop --", *way]
            return


def _quiet_from(m: Model, root: State, known: dict[State, bool]) -> tuple[list[str], str] | None:
    stack: list[tuple[str, State, Iterator[tuple[str, State]]]] = []

    def enter(name: str, state: State) -> None:
        known[state] = False
        stack.append((name, state, _quiet(m, state)))

    enter("", root)
    while stack:
        _, state, ways = stack[-1]
        name, after = next(ways, ("", None))
        if after is None:
            known[state] = True
            stack.pop()
        elif after not in known:
            enter(name, after)
            if no_leaks(m, after):
                known[after] = True
                stack.pop()
            elif next(_quiet(m, after), None) is None:
                return [n for n, _, _ in stack[1:]], "it stops, and not all is delivered"
        elif not known[after]:
            return [*(n for n, _, _ in stack[1:]), name], "it runs for ever"
    return None


def _quiet(m: Model, state: State) -> Iterator[tuple[str, State]]:
    if no_leaks(m, state):
        return
    for name, after in quiet_steps(m, state):
        yield name, tidy(m, after)


# -- one form for equal states -----------------------------------------------------------------


def tidy(m: Model, s: State) -> State:
    """The one form of all states that differ only in names that nothing can tell apart."""
    s = _renumber(_merge_tokens(_forget(s)))
    if m.drivers > 1:
        drivers = sorted(s.drivers, key=_order)
        if tuple(drivers) != s.drivers:
            s = s._replace(drivers=tuple(drivers))
    return s


def _order(me: Driver) -> tuple[object, ...]:
    return (me.token, me.at, me.way, me.seen, me.batch, me.query, me.waits, sorted(me.todo))


def _in_hand(s: State) -> list[Record]:
    held = [me.record for me in s.drivers if me.record is not None]
    return held if s.flight is None else [*held, s.flight.record]


def _forget(s: State) -> State:
    """Drop ended branches that nothing names, and make unnamed prepared ones strays."""
    held = _in_hand(s)
    named = {name for record in (*records(s), *held) for name in record.names}
    named |= {name for me in s.drivers for name in me.made}
    named |= {name for me in s.drivers for name in me.named}
    named |= frozenset() if s.rewind is None else s.rewind.todo
    tokens = {me.token for me in s.drivers}
    kept = set()
    for branch, how in s.branches:
        if branch in named or how != PREPARED:
            if branch in named or how == VISIBLE:
                kept.add((branch, how))
        else:
            token = branch.token if branch.token in tokens else 0
            stray = Branch(NOBODY, branch.sink, token, pipeline=branch.pipeline)
            kept.add((stray, how))
    branches = s.branches if kept == s.branches else frozenset(kept)
    if branches is s.branches and not any(me.named for me in s.drivers):
        return s
    prepared = {branch for branch, how in kept if how == PREPARED}
    drivers = tuple(me._replace(named=me.named & prepared) if me.named else me for me in s.drivers)
    return s._replace(branches=branches, drivers=drivers)


def _merge_tokens(s: State) -> State:
    """One token stands for all of the run that holds a log; a run that nobody will meet is 0."""
    newest = {log.since: log.token for log in s.logs}
    known = {s.entry[2]} | {me.first for me in s.drivers if me.at == "enter"}

    def one(run: int) -> int:
        return newest.get(run, run if run in known else 0)

    number, entered, run = s.entry
    return s._replace(
        logs=tuple(log._replace(since=one(log.since)) for log in s.logs),
        drivers=tuple(me._replace(seen=one(me.seen), first=one(me.first)) for me in s.drivers),
        entry=(number, entered, one(run)),
    )


def _renumber(s: State) -> State:
    """Give tokens their rank; a finished batch that nobody holds keeps no token."""
    held = _in_hand(s)
    batches = frozenset(record.batch for record in held)
    finished = [r for r in records(s) if r.state == COMPLETE]
    old = frozenset(name for r in finished if r.batch not in batches for name in r.names)
    every = [b for b, _ in s.branches] + [b for r in (*records(s), *held) for b in r.names]
    every += [b for me in s.drivers for b in (*me.made, *me.named)]
    used = {0, s.entry[2]} | {token for log in s.logs for token in (log.token, log.since)}
    used |= {token for me in s.drivers for token in (me.token, me.seen, me.first)}
    used |= {b.token for b in every if b not in old}
    used |= {r.token for r in (*records(s), *held) if r.state != COMPLETE or r.batch in batches}
    used |= set() if s.flight is None else {s.flight.token}
    entries = {s.entry[0]} | {entry for me in s.drivers for entry in (me.met, me.entry)}
    is_tidy = len(used) == max(used) + 1 and not any(b.token or b.attempt for b in old)
    if is_tidy and entries <= {0, 1}:
        return s
    return _Ranks({token: n for n, token in enumerate(sorted(used))}, old, batches).of(s)


@dataclass(frozen=True)
class _Ranks:
    """By token its rank; the branches that keep no token, and the batches in a driver's hands."""

    rank: Mapping[int, int]
    old: frozenset[Branch]
    batches: frozenset[int]

    def of(self, s: State) -> State:
        flight, (number, entered, run) = s.flight, s.entry
        if flight is not None:
            record = self.of_record(flight.record)
            flight = flight._replace(token=self.rank[flight.token], record=record)
        rewind = s.rewind
        if rewind is not None:
            rewind = rewind._replace(todo=frozenset(map(self.of_branch, rewind.todo)))
        return s._replace(
            logs=tuple(map(self.of_log, s.logs)),
            branches=frozenset((self.of_branch(b), how) for b, how in s.branches),
            drivers=tuple(self.of_driver(me, number) for me in s.drivers),
            entry=(int(number > 0), entered, self.rank[run]),
            flight=flight,
            rewind=rewind,
        )

    def of_log(self, log: Log) -> Log:
        found = tuple(None if r is None else self.of_record(r) for r in log.records)
        return Log(self.rank[log.token], found, self.rank[log.since])

    def of_branch(self, b: Branch) -> Branch:
        if b in self.old:
            return b._replace(token=0, attempt=0)
        return b._replace(token=self.rank[b.token])

    def of_record(self, r: Record) -> Record:
        names = tuple(self.of_branch(b) for b in r.names)
        if r.state == COMPLETE and r.batch not in self.batches:
            return Record(r.batch, r.state, 0, names, 0, r.ruled)
        return r._replace(token=self.rank[r.token], names=names)

    def of_driver(self, me: Driver, last: int) -> Driver:
        return me._replace(
            token=self.rank[me.token],
            seen=self.rank[me.seen],
            first=self.rank[me.first],
            met=int(last == me.met > 0),
            entry=int(last == me.entry > 0),
            record=None if me.record is None else self.of_record(me.record),
            made=tuple(self.of_branch(b) for b in me.made),
            named=frozenset(self.of_branch(b) for b in me.named),
        )
