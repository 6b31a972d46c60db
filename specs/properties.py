"""I1 to I8, as functions of a state or of a step; and when everything is delivered.

A function returns what is wrong, or None. `broken` asks all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from specs.state import (
    ABANDONED,
    ABORTED,
    COMPLETE,
    DECIDED,
    LOST,
    PREPARED,
    TAKEN,
    TWICE,
    UNFINISHED,
    VISIBLE,
    Branch,
    Model,
    Record,
    State,
)

Check = Callable[[Model, State, str, State], str | None]
"""What is wrong after a step: the model, the state before, the step's name, the state after."""


def records(s: State) -> list[Record]:
    return [record for log in s.logs for record in log.records if record is not None]


def agreement(m: Model, s: State, step: str, t: State) -> str | None:
    """I1: what an unfinished or complete record names ends one way, or an operator ruled on it."""
    for record in records(t):
        for branch in record.names:
            if branch.sink in record.ruled:
                continue
            how = t.how(branch)
            if record.state == COMPLETE and how not in {VISIBLE, TWICE}:
                return f"{record.batch} is complete, and {branch} is {how}"
            if record.state == DECIDED and how == ABORTED and s.how(branch) == PREPARED:
                return f"{branch} is aborted, and a decision names it"
    return None


def validity(m: Model, s: State, step: str, t: State) -> str | None:
    """I2: a visible branch is named by a decision, and a decision names what was prepared."""
    for branch, how in t.branches - s.branches:
        if how in {VISIBLE, TWICE} and branch not in _decided(s):
            return f"{branch} is visible, and no decision names it"
    for record in _changed(s, t):
        short = len({name.sink for name in record.names}) < m.sinks and not m.any_share
        if record.state in {DECIDED, PREPARED} and short:
            return f"{record} does not name a branch of every sink"
        missing = [name for name in record.names if t.how(name) is None]
        if missing and record.state in {DECIDED, PREPARED}:
            return f"{record} names {missing[0]}, which was never prepared"
    return None


def stability(m: Model, s: State, step: str, t: State) -> str | None:
    """I3: a decision changes only by an amendment, which takes out only what is lost."""
    for before, after in _pairs(s, t):
        if before.state == COMPLETE and after.state != COMPLETE:
            return f"{before} turned into {after}"
        if before.state != DECIDED or before == after:
            continue
        if after.state not in {DECIDED, COMPLETE}:
            return f"{before} turned into {after}"
        gone = set(before.names) - set(after.names)
        if any(t.how(name) in {PREPARED, VISIBLE, TWICE} for name in gone):
            return f"{before} turned into {after}, which leaves out a branch that is not lost"
        if before.names != after.names and after.revision != before.revision + 1:
            return f"{before} turned into {after} without an amendment"
    return None


def at_most_once(m: Model, s: State, step: str, t: State) -> str | None:
    """I4: a pipeline's rows of a batch are visible once in each sink, also after a rewind."""
    shown = [(b.batch, b.sink, b.pipeline) for b, how in t.branches if how in {VISIBLE, TWICE}]
    shown += [(b.batch, b.sink, b.pipeline) for b, how in t.branches if how == TWICE]
    shown += [(batch, sink, 0) for batch, sink in sorted(t.by_hand)]
    doubled = next((place for place in shown if shown.count(place) > 1), None)
    return doubled and f"batch {doubled[0]} is visible twice in sink {doubled[1]}"


def at_least_once(m: Model, s: State, step: str, t: State) -> str | None:
    """I5: Spark moves on only when the batch is safe, and no batch follows an undecided one.

    The Spark of a driver that was replaced may commit the batch that was abandoned: its next start
    is refused until an operator has closed that gap.
    """
    for now, before in zip(t.commits[s.query :], s.commits[s.query :], strict=False):
        if now <= before:
            continue
        me = s.drivers[int(step[1])]
        log = s.logs[me.log]
        record = log.records[now]
        state = None if record is None else record.state
        unsafe = {None} if log.token != me.token else {None, ABANDONED}
        unsafe |= set() if log.token != me.token or me.waits else set(UNFINISHED)
        if state in unsafe:
            return f"Spark commits batch {now}, which is {state}"
    for record in _changed(s, t):
        was = _old(s, t, record)
        is_decided = was is not None and was.state == PREPARED and record.state == DECIDED
        if is_decided and t.commits[t.query + record.pipeline] < record.batch:
            return f"{record} was prepared, and is decided before Spark commits it"
        if (other := _undecided_before(t, record)) is not None:
            return f"{record} follows {other}"
    return None


def _undecided_before(t: State, record: Record) -> str | None:
    """What is not decided of the batches before an unfinished one."""
    for log in t.logs:
        if record in log.records and record.state in UNFINISHED:
            for number, other in enumerate(log.records[: record.batch]):
                if other is None or other.state in {PREPARED, ABANDONED}:
                    return f"batch {number}, which is {other and other.state}"
    return None


def fencing(m: Model, s: State, step: str, t: State) -> str | None:
    """I6: a driver that was replaced writes nothing to its log, and aborts nothing younger.

    A query that a rewind has replaced takes no token.

    It may end what an operator has ruled out: any driver does.
    """
    if not step.startswith("d") or " " not in step or not step[1].isdigit():
        return None
    me = s.drivers[int(step[1])]
    for number, (before, after) in enumerate(zip(s.logs, t.logs, strict=False)):
        if before.records != after.records and number == me.log and me.token != before.token:
            return f"{step}, with token {me.token}, writes to a log with token {before.token}"
        if after.token != before.token and max(me.seen, me.first) < before.since:
            return f"{step}, and fences a run that began after it looked"
        if after.token != before.token and me.query < s.query:
            return f"{step}, and a rewind has replaced its query"
    ruled = {name for r in records(s) for name in r.names if name.sink in r.ruled}
    for branch, how in t.branches - s.branches:
        is_younger = branch.token > me.token and branch not in ruled
        if how == ABORTED and is_younger:
            return f"{step}, and {branch} is younger than token {me.token}"
    return None


def continuity(m: Model, s: State, step: str, t: State) -> str | None:
    """I7: what was aborted never becomes visible, and no decision names it."""
    for branch, how in t.branches - s.branches:
        if how in {VISIBLE, TWICE} and s.how(branch) in {ABORTED, LOST, TAKEN, None}:
            return f"{branch} was {s.how(branch)}, and is visible"
    for record in _changed(s, t):
        was = _old(s, t, record)
        if record.state == DECIDED and (was is None or was.state != DECIDED):
            for name in record.names:
                if t.how(name) == ABORTED:
                    return f"{name} was aborted, and is decided"
    return None


def no_leaks(m: Model, t: State) -> bool:
    """I8 and the liveness of decisions: everything is delivered, and nothing is left."""
    return (
        all(is_delivered(m, t, *each) for each in t.pipelines)
        and all(me.at == "off" for me in t.drivers)
        and t.ruling is None
        and t.flight is None
        and t.rewind is None
    )


def is_delivered(m: Model, t: State, query: int, log: int) -> bool:
    """Whether every batch of the pipeline is complete, and no branch of it is left."""
    left = [b for b, how in t.branches if how == PREPARED and t.query + b.pipeline == query]
    complete = all(r is not None and r.state == COMPLETE for r in t.logs[log].records)
    return t.commits[query] == m.batches - 1 and complete and not left


INVARIANTS: Final[Mapping[str, Check]] = {
    "I1": agreement,
    "I2": validity,
    "I3": stability,
    "I4": at_most_once,
    "I5": at_least_once,
    "I6": fencing,
    "I7": continuity,
}


def broken(m: Model, s: State, step: str, t: State) -> list[str]:
    """The invariants that the step breaks, each with what is wrong."""
    found = ((name, check(m, s, step, t)) for name, check in INVARIANTS.items())
    return [f"{name}: {what}" for name, what in found if what]


# -- shared ------------------------------------------------------------------------------------


def _decided(s: State) -> set[Branch]:
    return {n for r in records(s) if r.state in {DECIDED, COMPLETE} for n in r.names}


def _pairs(s: State, t: State) -> list[tuple[Record, Record]]:
    found = []
    for before, after in zip(s.logs, t.logs, strict=False):
        for old, new in zip(before.records, after.records, strict=True):
            if old is not None and new is not None:
                found.append((old, new))
    return found


def _changed(s: State, t: State) -> list[Record]:
    if s.logs is t.logs:
        return []
    before = set(records(s))
    return [record for record in records(t) if record not in before]


def _old(s: State, t: State, record: Record) -> Record | None:
    for before, after in zip(s.logs, t.logs, strict=False):
        if record in after.records:
            return before.records[record.batch]
    return None
