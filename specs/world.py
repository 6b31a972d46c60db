"""What happens around the drivers: some of it is a fault, and some of it ends one.

start     a driver begins, also while others run or are paused      crash   it is gone
lose      a sink's server drops a prepared branch                   late    a write has no answer
straggle  a task that nobody waits for prepares                     land    … and is applied
rule      an operator rules on a branch of a decided batch, and ends it; or closes a gap
restore   starts use a copy of the log from now on. Drivers with the original are paused until one
          has entered with the copy: a decision that the copy lacks would be made again
rewind    an operator goes back to a savepoint: `rewinding`
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

from specs.properties import is_delivered
from specs.protocol import DRIVER, fail
from specs.rewinding import rewind
from specs.rules import write_abandoned, write_first
from specs.state import (
    ABANDONED,
    ABORTED,
    DECIDED,
    LOST,
    PREPARED,
    Branch,
    Flight,
    Model,
    Record,
    State,
    Steps,
)

STRAY = -1
"""The attempt of a branch that no driver waits for."""


def steps(m: Model, s: State) -> Steps:
    """Every step that is possible, each with its name and the state after it."""
    for d, me in enumerate(s.drivers):
        if me.at == "off":
            yield from named(d, start(m, s, d, s.pipelines))
            continue
        if s.is_paused(me):
            continue
        yield from named(d, DRIVER[me.at](m, s, d))
        yield from named(d, fail(m, s, d))
        yield f"d{d} crashes", s.stop(d)
        yield from named(d, late(m, s, d))
    yield from faults(m, s)
    yield from land(m, s)
    yield from operate(m, s)
    yield from rewind(m, s)


def quiet_steps(m: Model, s: State) -> Steps:
    """The steps when faults have stopped: running drivers go on, and the last one is restarted.

    With a fork, what is restarted is a pipeline that has something to deliver.

    A step that only a fault takes has a name that ends so. An operator rules where a loss has
    stopped the pipeline, and closes a gap that a start has refused.
    """
    if all(me.at == "off" for me in s.drivers) and s.ruling is None:
        lost = [(b, r) for b, how in s.branches if how in {LOST, ABORTED} for r in _naming(s, b)]
        if s.flight is not None:
            yield from land(m, s)
        elif s.rewind is not None:
            yield from rewind(m, s)
        elif lost and s.committed >= lost[0][1].batch:
            branch, record = lost[0]
            yield "the operator rules", _ruled(s, record, branch.sink)
        elif gap := list(close_gap(s)):
            yield from gap
        else:
            waiting = [each for each in s.pipelines if not is_delivered(m, s, *each)]
            yield from _without_faults(named(0, start(m, s, 0, waiting[:1])))
    for d, me in enumerate(s.drivers):
        if me.at != "off" and s.is_paused(me):
            yield f"d{d} never wakes", s.stop(d)
        elif me.at != "off":
            yield from _without_faults(named(d, DRIVER[me.at](m, s, d)))
    yield from end_ruling(s)


def _without_faults(found: Steps) -> Steps:
    return ((name, after) for name, after in found if not name.endswith(_FAULTS))


_FAULTS = ("fails", "no answer", "are lost", "no rows", "answer is lost", "old checkpoint")


def named(d: int, found: Steps) -> Iterator[tuple[str, State]]:
    return ((f"d{d} {name}", after) for name, after in found)


def start(m: Model, s: State, d: int, pipelines: Iterable[tuple[int, int]]) -> Steps:
    """Spark plans the batch after the last one that it has committed."""
    for waits, (query, log) in product(m.policies, pipelines):
        policy = "after_checkpoint" if waits else "immediate"
        batch = s.commits[query] + 1
        begun = s.move(d, at="look", waits=waits, batch=batch, log=log, query=query)
        yield f"starts{', the fork' * (query > s.query)}, {policy}", begun
        if s.query:
            old = begun.move(d, batch=s.commits[0] + 1, query=0)
            yield f"starts, {policy}, with the old checkpoint", old


# -- faults ------------------------------------------------------------------------------------


def faults(m: Model, s: State) -> Steps:
    if s.left("loss"):
        for branch, how in s.branches:
            if how == PREPARED:
                yield f"{branch} is lost", s.spend("loss").put(branch, LOST)
    if s.left("stray"):
        for d, me in enumerate(s.drivers):
            if me.token and me.at not in {"off", "look", "begin", "enter", "recover"}:
                for sink in m.all_sinks:
                    new = Branch(me.batch, sink, me.token, STRAY)
                    yield f"a stray task of d{d} prepares", s.spend("stray").put(new, PREPARED)
    if s.left("copy") and not any(me.at in _BETWEEN for me in s.drivers):
        yield "the log is restored from a copy", s.spend("copy")._replace(logs=s.logs * 2)


_BETWEEN = ("look", "send", "decide", "abandon", "amend")
"""Here a driver would yet begin with the original, or has made sure that nobody has entered."""


def late(m: Model, s: State, d: int) -> Steps:
    """A write of the log gets no answer, and has not landed yet.

    A start repeats its begin, so the late one lands while its own run has a token: it takes one
    that nobody uses, and fences its own driver.
    """
    me = s.drivers[d]
    if s.flight is not None or not s.left("late"):
        return
    if me.at != "begin" and me.first and me.first == s.logs[me.log].since:
        yield "a late begin lands", s.spend("late").take_token(me.log, me.first)
    if me.at == "send":
        record = Record(me.batch, PREPARED if me.waits else DECIDED, me.token, me.made)
        yield (
            "sends, no answer",
            s.spend("late")._replace(flight=Flight("first", me.log, me.token, record)),
        )
    if me.at == "abandon" and me.record is not None:
        yield (
            "abandons, no answer",
            s.spend("late")._replace(flight=Flight("abandon", me.log, me.token, me.record)),
        )


def land(m: Model, s: State) -> Steps:
    """The log applies a late write by the same rules."""
    if s.flight is None:
        return
    verb, log, token, record = s.flight
    after: State | None = s
    if s.logs[log].token == token or not m.has("a write checks the token"):
        rule = write_first if verb == "first" else write_abandoned
        after = rule(m, s, log, record)
    yield f"a late {verb} lands", (after or s)._replace(flight=None)


# -- the operator ------------------------------------------------------------------------------


def operate(m: Model, s: State) -> Steps:
    """An operator rules on a branch that is not visible, and then ends it.

    A command that reaches no sink ends nothing, so a driver in its first try of a commit would not
    notice: that is a known limit. One that tries again asks the log first.
    """
    yield from close_gap(s)
    yield from end_ruling(s)
    if s.ruling is not None or not s.left("ruling"):
        return
    for branch, how in s.branches:
        if how in {PREPARED, LOST, ABORTED}:
            for record in _naming(s, branch):
                ruled = _ruled(s.spend("ruling"), record, branch.sink)
                yield "the operator rules", ruled
                if all(me.at != "commit" or branch.sink in me.unsure for me in s.drivers):
                    place = (record.batch, branch.sink)
                    by_hand = ruled._replace(ruling=None, by_hand=s.by_hand | {place})
                    yield "the operator rules, and reaches no sink", by_hand


def _ruled(s: State, record: Record, sink: int) -> State:
    """Take a token and record the ruling; these are two writes, and nothing can come between."""
    number = len(s.logs) - 1
    after = s.take_token(number, 0).store(number, record._replace(ruled=record.ruled | {sink}))
    return after._replace(ruling=(record.batch, sink))


def end_ruling(s: State) -> Steps:
    """End the branch; if it is not visible, its rows are entered manually."""
    if s.ruling is None:
        return
    batch, sink = s.ruling
    record = s.logs[-1].records[batch]
    assert record is not None
    branch = record.branch(sink)
    s = s._replace(ruling=None)
    if branch is None:
        return
    if s.how(branch) == PREPARED:
        s = s.put(branch, ABORTED)
    if s.how(branch) in {ABORTED, LOST}:
        s = s._replace(by_hand=s.by_hand | {(batch, sink)})
    yield "the operator ends the branch", s


def close_gap(s: State) -> Steps:
    """Spark's commit log has a batch that was abandoned: the operator deletes it there.

    Drivers that were replaced may be paused meanwhile; `faults` bound how often.
    """
    is_alone = all(me.at == "off" for me in s.drivers)
    for query, log in s.pipelines:
        last = s.commits[query]
        record = s.logs[log].records[last] if last >= 0 else None
        is_gap = record is not None and record.state == ABANDONED
        if is_gap and (is_alone or s.left("gap")):
            after = s if is_alone else s.spend("gap")
            yield "the operator closes the gap", after.with_commit(query, last - 1)


def _naming(s: State, branch: Branch) -> list[Record]:
    """The decided records that name the branch, and in which no ruling ends it."""
    decided = [r for r in s.logs[-1].unfinished() if r.state == DECIDED]
    return [r for r in decided if branch in r.names and branch.sink not in r.ruled]
