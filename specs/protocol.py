"""What a driver does: each function is one atomic step, named as in `protocol/transaction.py`.

    start ─► begin ─► recover ─► (deliver ─► Spark's commit)*          any step: crash or pause

    recover   look ─► PREPARED: fate ─► decide | abandon      DECIDED: commit… ─► complete ─► sweep
    deliver   find ─► prepare… ─► check ─► decide | hold ─► commit… ─► complete ─► sweep
                                                               └─ lost: prepare… ─► check ─► amend
              lost, and Spark does not replay the batch: lost ─► an operator rules

A guard reads `m.has("…")`: without it, a property of `properties` must fail (`models.REVERTS`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from specs.moves import (
    all_asked,
    fenced,
    leave_sweep,
    orphans,
    refusals,
    start_again,
    to_commit,
    to_last_sweep,
    to_sweep,
)
from specs.rules import committed, owns, write_abandoned, write_first
from specs.state import (
    ABANDONED,
    ABORTED,
    COMPLETE,
    DECIDED,
    NOBODY,
    PREPARED,
    Branch,
    Model,
    Record,
    State,
    Steps,
)

# -- the start ---------------------------------------------------------------------------------


def look(m: Model, s: State, d: int) -> Steps:
    """See which driver holds the token, and which one entered the checkpoint last."""
    log = s.logs[s.drivers[d].log]
    yield "look", s.move(d, at="begin", seen=log.since, met=s.entry[0])


def begin(m: Model, s: State, d: int) -> Steps:
    """Take the next token, unless another run has since, or batches would be skipped.

    A run that starts again keeps its first look, and its own tokens make it no other run.
    """
    me = s.drivers[d]
    if any(m.has(guard) for guard in refusals(s, me)):
        yield "is refused", s.stop(d)
        return
    after = s.take_token(me.log, me.first)
    log = after.logs[me.log]
    after = after.move(d, first=log.since)
    yield "begin, no answer", after
    after = after.move(d, at="enter", token=log.token)
    yield "begin", after if m.copies else _entered(after, d, 0)


def enter(m: Model, s: State, d: int) -> Steps:
    """Write an entry into the checkpoint, if no driver has whose run this one has not fenced."""
    me = s.drivers[d]
    number, _, run = s.entry
    if number == me.met or run in {me.first, me.seen}:
        yield "enter", _entered(s._replace(entry=(number + 1, me.log, me.first)), d, number + 1)
    else:
        yield "is overtaken", s.stop(d)


def _entered(s: State, d: int, entry: int) -> State:
    return s.move(d, at="recover", entry=entry, seen=0, met=0)


def recover(m: Model, s: State, d: int) -> Steps:
    """Read Spark's commit log; then take up the oldest record that is not finished."""
    me = s.drivers[d]
    found = s.logs[me.log].unfinished()
    if me.replay == NOBODY:
        yield "reads the checkpoint", s.move(d, replay=s.committed_for(me) + 1, way="recover")
    elif not found or not m.has("a start recovers first"):
        yield "look", to_sweep(s, d)
    elif found[0].state == PREPARED:
        yield "look", s.move(d, at="fate", record=found[0])
    else:
        yield "look", to_commit(s, d, found[0])


def fate(m: Model, s: State, d: int) -> Steps:
    """Spark's commit log shows whether a prepared batch is decided or abandoned."""
    record = s.drivers[d].record
    assert record is not None
    has_it = s.committed_for(s.drivers[d]) >= record.batch
    if m.copies and s.drivers[d].entry != s.entry[0] and m.has("the entry is checked"):
        yield "is overtaken", s.stop(d)
    elif has_it or not m.has("decide waits for Spark"):
        yield "reads the checkpoint", s.move(d, at="decide")
    else:
        yield "reads the checkpoint", s.move(d, at="abandon")


def abandon(m: Model, s: State, d: int) -> Steps:
    me = s.drivers[d]
    record = me.record
    assert record is not None
    if not owns(m, s, me):
        yield "is fenced", s.stop(d)
        return
    yield "abandon", to_sweep(write_abandoned(m, s, me.log, record), d)


def decide(m: Model, s: State, d: int) -> Steps:
    """Decide what is prepared in the log, and what Spark has committed."""
    me = s.drivers[d]
    assert me.record is not None
    stored = s.logs[me.log].records[me.record.batch]
    if not owns(m, s, me):
        yield from fenced(s, d)
    elif stored is None or stored.state == ABANDONED:
        yield "is refused", s.stop(d)
    else:
        if stored.state == PREPARED:
            stored = stored._replace(state=DECIDED)
        yield "decide", to_commit(s.store(me.log, stored), d, stored)


# -- a batch -----------------------------------------------------------------------------------


def find(m: Model, s: State, d: int) -> Steps:
    """What the log holds of the batch says where to continue.

    A later driver may have completed the next batch, and dropped the record of this one.
    """
    me = s.drivers[d]
    log = s.logs[me.log]
    record = log.records[me.batch]
    s = s.move(d, record=record, way="deliver")
    write = s.move(d, at="prepare", record=None, made=(), todo=m.all_sinks, attempts=0)
    if log.token != me.token and log.may_forget(me.batch):
        yield "find, and it is forgotten", write
    if record is None or record.state == ABANDONED:
        yield "find", write
    elif record.state == PREPARED or record.token > me.token:
        yield from fenced(s, d)
    elif record.state == DECIDED:
        yield "find", to_commit(s, d, record)
    else:
        yield "find", to_sweep(s, d)


def prepare(m: Model, s: State, d: int) -> Steps:
    """The tasks write into one sink and prepare; with an error, what is prepared is aborted."""
    me = s.drivers[d]
    for sink in m.next_of(me.todo):
        left = me.todo - {sink}
        at = "prepare" if left and m.has("every sink is prepared") else "check"
        new = Branch(me.batch, sink, me.token, me.attempts, s.pipeline_of(me))
        after = s.move(d, at=at, made=tuple(sorted((*me.made, new))), todo=left)
        yield f"prepare {sink}", after.put(new, PREPARED)
        if m.any_share and not me.lost:
            yield f"prepare {sink}, no rows", s.move(d, at=at, todo=left)
    if s.left("interrupt"):
        after = s.spend("interrupt").move(d, attempts=me.attempts + 1, made=())
        again = f"{me.way} again"
        yield (
            "executors are lost",
            after.move(d, at="names", way=again, todo=me.lost or m.all_sinks),
        )


def check(m: Model, s: State, d: int) -> Steps:
    """Ask the checkpoint whether another driver has continued, while all can be aborted."""
    me = s.drivers[d]
    overtaken = m.copies and me.entry != s.entry[0] and m.has("the entry is checked")
    if overtaken or s.committed_for(me) >= me.batch:
        yield from fenced(s, d)
    else:
        yield "check", s.move(d, at="amend" if me.lost else "send")


def send(m: Model, s: State, d: int) -> Steps:
    """Write the first record of the batch: from here on only the log says what holds."""
    me = s.drivers[d]
    if not owns(m, s, me):
        yield from fenced(s, d)
        return
    record = Record(me.batch, PREPARED if me.waits else DECIDED, me.token, me.made)
    after = write_first(m, s, me.log, record)
    if after is None:
        yield "is refused", to_last_sweep(s, d, "stop")
        return
    stored = after.logs[me.log].records[me.batch]
    assert stored is not None
    after = after.move(d, made=())
    if not m.has("nothing is aborted after the decision") and s.left("late"):
        yield (
            "the answer is lost",
            to_last_sweep(after, d, "stop").move(d, at="sweep", todo=m.all_sinks),
        )
    if stored.state == PREPARED and m.has("only the decided is committed"):
        yield "hold", after.move(d, at="spark commits", record=stored)
    else:
        yield "decide", to_commit(after, d, stored)


# -- after the decision ------------------------------------------------------------------------


def commit(m: Model, s: State, d: int) -> Steps:
    """Commit one sink's branch, and go on when every sink has an outcome."""
    me = s.drivers[d]
    record = me.record
    assert record is not None
    for sink in me.todo:
        branch = record.branch(sink)
        assert branch is not None
        if sink in me.unsure and not owns(m, s, me) and m.has("a retry asks the log"):
            yield from fenced(s, d)
            continue
        if sink in record.ruled:
            how = s.how(branch)
            after = s.put(branch, ABORTED) if how == PREPARED else s
            yield f"end {sink}", _asked(m, after, d, sink, is_lost=False)
            continue
        after, is_lost = committed(m, s, branch)
        yield f"commit {sink}", _asked(m, after, d, sink, is_lost=is_lost)
        if s.left("unsure"):
            for landed in (after, s):
                unsure = landed.spend("unsure").move(d, unsure=me.unsure | {sink})
                yield f"commit {sink}, no answer", unsure
            if not m.has("a loss is proven"):
                assumed = _asked(m, s.spend("unsure"), d, sink, is_lost=True)
                yield f"commit {sink}, no answer", assumed


def _asked(m: Model, s: State, d: int, sink: int, *, is_lost: bool) -> State:
    """The sink has an outcome; when all have one, the losses say where to continue."""
    me = s.drivers[d]
    assert me.record is not None
    todo, lost = me.todo - {sink}, me.lost | {sink} if is_lost else me.lost
    s = s.move(d, todo=todo, lost=lost)
    if todo:
        return s
    return all_asked(m, s, d)


def lost(m: Model, s: State, d: int) -> Steps:
    """An operator must rule, unless the log shows a newer driver, or a ruling."""
    me = s.drivers[d]
    if s.logs[me.log].token != me.token:
        yield from fenced(s, d)
    yield "needs a ruling", to_last_sweep(s, d, "stop") if me.way == "recover" else s.stop(d)


def amend(m: Model, s: State, d: int) -> Steps:
    """Replace the lost branches in the decision, if it is still the one that was read."""
    me = s.drivers[d]
    record = me.record
    assert record is not None
    kept = [name for name in record.names if name.sink not in me.lost]
    revision = record.revision + 1
    amended = record._replace(names=tuple(sorted((*kept, *me.made))), revision=revision)
    if not m.has("commit comes after the amendment"):
        yield "commits first", to_commit(s, d, amended)
    stored = s.logs[me.log].records[me.batch]
    if not owns(m, s, me):
        yield from fenced(s, d)
    elif stored is None or stored.state != DECIDED or stored.revision != record.revision:
        yield "is refused", s.stop(d)
    else:
        amended = amended._replace(ruled=stored.ruled)
        yield "amend", to_commit(s.store(me.log, amended), d, amended)


def complete(m: Model, s: State, d: int) -> Steps:
    me = s.drivers[d]
    assert me.record is not None
    stored = s.logs[me.log].records[me.record.batch]
    if not owns(m, s, me):
        yield from fenced(s, d)
    elif stored is None or stored.state not in {DECIDED, COMPLETE}:
        yield "is refused", s.stop(d)
    else:
        after = s.store(me.log, stored._replace(state=COMPLETE))
        yield "complete", to_sweep(after, d)


# -- sweeps ------------------------------------------------------------------------------------


def names(m: Model, s: State, d: int) -> Steps:
    """Read which branches the unfinished records name.

    If there is nothing to abort now, the checker takes the whole sweep as one step: what is
    prepared before the sweep ends could as well have been prepared before it began.
    """
    me = s.drivers[d]
    spared = [PREPARED] * m.has("a sweep spares the prepared")
    spared += [DECIDED] * m.has("a sweep spares the decided")
    unfinished = [r for r in s.logs[me.log].unfinished() if r.state in spared]
    named = frozenset(name for record in unfinished for name in record.names)
    todo = me.todo if me.way.endswith("again") else frozenset[int]()
    after = s.move(d, at="sweep", named=named, todo=m.all_sinks, rest=todo)
    if m.any_share or any(orphans(m, after, d, sink) for sink in m.all_sinks):
        yield "names", after
    else:
        yield "names, nothing to sweep", leave_sweep(m, after, d)
        return
    yield "the log is not read, and the sweep fails", leave_sweep(m, after, d)


def sweep(m: Model, s: State, d: int) -> Steps:
    """Abort one sink's branches that no unfinished record names; it may fail, and fails nothing."""
    me = s.drivers[d]
    for sink in m.next_of(me.todo):
        after = s
        for branch in orphans(m, s, d, sink):
            after = after.put(branch, ABORTED)
        todo = me.todo - {sink}
        for name, swept in ((f"sweep {sink}", after), (f"sweep {sink} fails", s)):
            left = swept.move(d, todo=todo)
            yield name, left if todo else leave_sweep(m, left, d)
            if after is s:
                break


# -- shared ------------------------------------------------------------------------------------


def fail(m: Model, s: State, d: int) -> Steps:
    """A call fails for good. Before the decision, and in a start, a sweep follows.

    The same run starts again when Spark has a batch for it, if it was its start that failed.

    Later, only a driver that sees that it was replaced sweeps, and only its own branches. Any other
    error ends the driver at once, like a crash.
    """
    me = s.drivers[d]
    is_replaced = s.logs[me.log].token != me.token
    is_start = me.way == "recover" and me.at in _OF_A_RECORD
    if is_start and me.batch < m.batches:
        yield "fails, and starts again", start_again(s, d)
    if is_start or me.at in {"prepare", "check"}:
        yield "fails", to_last_sweep(s, d, "stop" if is_start else "abort")
    elif is_replaced and me.way in {"deliver", "pending"}:
        yield "fails, and is fenced", to_last_sweep(s, d, "fenced")


_OF_A_RECORD: Final = ("fate", "abandon", "decide", "commit", "lost", "complete")


def spark_commits(m: Model, s: State, d: int) -> Steps:
    """Spark writes commits/N once, after the batch has returned; then the next batch begins."""
    me = s.drivers[d]
    if s.committed_for(me) != me.batch - 1:
        yield "Spark refuses", s.stop(d)
        return
    after = s.with_commit(me.query, me.batch)
    if me.record is not None:
        yield "Spark commits", after.move(d, at="fate", way="pending")
        if not m.has("one undecided batch") and me.batch + 1 < m.batches:
            yield "Spark commits", after.move(d, at="find", batch=me.batch + 1, record=None)
    elif me.batch + 1 < m.batches:
        yield "Spark commits", after.move(d, at="find", batch=me.batch + 1)
    else:
        yield "Spark commits", after.stop(d)


DRIVER: Final[Mapping[str, Callable[[Model, State, int], Steps]]] = {
    "look": look,
    "begin": begin,
    "enter": enter,
    "recover": recover,
    "fate": fate,
    "abandon": abandon,
    "decide": decide,
    "find": find,
    "prepare": prepare,
    "check": check,
    "send": send,
    "commit": commit,
    "lost": lost,
    "amend": amend,
    "complete": complete,
    "names": names,
    "sweep": sweep,
    "spark commits": spark_commits,
}
"""What a driver does next, by `Driver.at`."""
