"""An operator takes the pipeline back to a savepoint of its first batch; see ADR 31.

    look: every later batch is complete, and its rows are there
      ─► the head: a new query, a token, and the later records no longer count
      ─► each branch is taken back ─► the new query may start

With no later batch it is a restore. The command may be paused anywhere. One that was killed is run
again, and goes on from the head. Any write of the log after the look makes it stale:
`State.with_log`.
"""

from __future__ import annotations

from specs.state import COMPLETE, SAVEPOINT, TAKEN, VISIBLE, Branch, Model, Rewind, State, Steps


def rewind(m: Model, s: State) -> Steps:
    going = s.rewind
    if going is None:
        if s.left("rewind") and (branches := _later(s)) is not None:
            yield "the operator looks", s._replace(rewind=Rewind("looked", branches))
    elif going.at == "stale" and m.has("a rewind checks what it saw"):
        yield "the rewind is refused", s._replace(rewind=None)
    elif going.at != "taking":
        yield "the operator replaces the query", _replaced(m, s, going)
    elif going.todo:
        branch = min(going.todo)
        left = going._replace(todo=going.todo - {branch})
        yield f"{branch} is taken back", s.put(branch, TAKEN)._replace(rewind=left)
    else:
        yield "the rewind ends", s._replace(rewind=None)


def _later(s: State) -> frozenset[Branch] | None:
    """What goes; None if the savepoint cannot be made, or the sinks do not have just that."""
    first, *later = s.logs[0].records
    if (
        first is None
        or first.state != COMPLETE
        or s.committed < SAVEPOINT
        or s.logs[0].unfinished()
    ):
        return None
    names = frozenset(name for r in later if r and r.state == COMPLETE for name in r.names)
    return names if all(s.how(name) == VISIBLE for name in names) else None


def _replaced(m: Model, s: State, going: Rewind) -> State:
    """One conditional write of the head, which is the point of no return."""
    if m.has("a rewind takes a token"):
        s = s.take_token(0, 0)
    log = s.logs[0]
    later = (None,) * (len(log.records) - 1)
    s = s.with_log(0, log._replace(records=(log.records[SAVEPOINT], *later))).spend("rewind")
    taking = Rewind("taking", going.todo)
    return s._replace(query=s.query + 1, commits=(*s.commits, SAVEPOINT), rewind=taking)
