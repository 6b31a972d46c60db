"""How a driver goes from one part of the protocol to the next: from its start to its end."""

from __future__ import annotations

from collections.abc import Iterator

from specs.state import NOBODY, PREPARED, Branch, Driver, Model, Record, State, Steps


def refusals(s: State, me: Driver) -> Iterator[str]:
    """The guards that refuse the driver's start."""
    log = s.logs[me.log]
    if me.seen < log.since and not (me.first and me.first == log.since):
        yield "a late start is refused"
    if me.batch > log.next_batch():
        yield "a gap is refused"
    if me.query < s.query:
        yield "a query that was replaced is refused"
    if s.rewind is not None and s.rewind.at == "taking":
        yield "a start waits for the rewind"


def orphans(m: Model, s: State, d: int, sink: int) -> list[Branch]:
    """What the driver aborts in the sink: its pipeline's, prepared, not younger, and not named."""
    me = s.drivers[d]
    oldest = me.token if me.way == "fenced" else 0
    newest = me.token if m.has("a sweep spares the younger") else 10**6
    spares_others, own = m.has("a sweep spares other pipelines"), s.pipeline_of(me)
    return [
        branch
        for branch, how in s.branches
        if how == PREPARED
        and branch.sink == sink
        and (branch.pipeline == own or not spares_others)
        and oldest <= branch.token <= newest
        and branch not in me.named
    ]


def leave_sweep(m: Model, s: State, d: int) -> State:
    me = s.drivers[d]
    s = s.move(d, named=frozenset(), todo=me.rest, rest=frozenset())
    if me.way.endswith("again"):
        return s.move(d, at="prepare", way="deliver")
    if me.way == "deliver":
        return s.move(d, at="spark commits")
    if me.way == "recover" and me.batch < m.batches:
        return s.move(d, at="find")
    if me.way == "pending" and me.batch + 1 < m.batches:
        return s.move(d, at="find", batch=me.batch + 1)
    if me.way == "abort" and s.logs[me.log].token != me.token:
        return to_last_sweep(s, d, "fenced")
    return s.stop(d)


def to_commit(s: State, d: int, record: Record) -> State:
    todo = frozenset(name.sink for name in record.names)
    if not todo:
        return s.move(d, at="complete", record=record, made=())
    return s.move(
        d,
        at="commit",
        record=record,
        todo=todo,
        made=(),
        attempts=0,
        lost=frozenset(),
        unsure=frozenset(),
    )


def all_asked(m: Model, s: State, d: int) -> State:
    """Every branch of the record has an outcome: complete it, or go on with what is lost."""
    me = s.drivers[d]
    assert me.record is not None
    if not me.lost or not m.has("complete needs every branch"):
        return s.move(d, at="complete", unsure=frozenset(), lost=frozenset())
    if me.way == "deliver":  # Spark's replay: the lost branches are written again
        attempts = me.record.revision + 1
        return s.move(d, at="prepare", todo=me.lost, attempts=attempts, unsure=frozenset())
    if me.way == "recover" and me.record.batch == me.replay:
        return to_sweep(s, d)
    return s.move(d, at="lost", unsure=frozenset())


def to_sweep(s: State, d: int) -> State:
    return s.move(d, at="names", record=None, lost=frozenset(), replay=NOBODY)


def to_last_sweep(s: State, d: int, way: str) -> State:
    """Sweep, and stop: the driver keeps only what it needs for that."""
    me = s.drivers[d]
    return s.with_driver(d, Driver("names", way, log=me.log, token=me.token, query=me.query))


def start_again(s: State, d: int) -> State:
    """Begin once more in the same run, with the batch that Spark has planned for it."""
    me = s.drivers[d]
    again = Driver("begin", waits=me.waits, log=me.log, batch=me.batch, first=me.first)
    return s.with_driver(d, again._replace(met=me.entry, query=me.query))


def fenced(s: State, d: int) -> Steps:
    """A newer driver holds the pipeline: abort what is prepared under the own token, and stop."""
    me = s.drivers[d]
    yield "is fenced", s.stop(d)
    if me.way in {"deliver", "pending"} and s.logs[me.log].token != me.token:
        yield "is fenced, and sweeps", to_last_sweep(s, d, "fenced")
