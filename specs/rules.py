"""What the log and a sink do with a call: the rules of `txn_log/rules.py`, and of a commit."""

from __future__ import annotations

from specs.state import (
    ABANDONED,
    ABORTED,
    LOST,
    PREPARED,
    TAKEN,
    TWICE,
    VISIBLE,
    Branch,
    Driver,
    Model,
    Record,
    State,
)


def owns(m: Model, s: State, me: Driver) -> bool:
    """The token is checked in the same step as the write."""
    return s.logs[me.log].token == me.token or not m.has("a write checks the token")


def write_abandoned(m: Model, s: State, log: int, record: Record) -> State:
    """The log's rule: only what is still prepared by the same driver is abandoned."""
    stored = s.logs[log].records[record.batch]
    if stored is None or stored.state != PREPARED:
        return s
    if stored.token != record.token and m.has("abandon names its record"):
        return s
    return s.store(log, stored._replace(state=ABANDONED))


def write_first(m: Model, s: State, log: int, record: Record) -> State | None:
    """The log's rule for a first record; None where it refuses."""
    stored = s.logs[log].records[record.batch]
    is_known = stored is not None and stored.state != ABANDONED
    if is_known and m.has("the first record holds"):
        return s
    undecided = any(other.state == PREPARED for other in s.logs[log].unfinished())
    if undecided and m.has("one undecided batch"):
        return None
    if record.batch != s.logs[log].next_batch() and not is_known and m.has("a gap is refused"):
        return None
    return s.store(log, record)


def committed(m: Model, s: State, branch: Branch) -> tuple[State, bool]:
    """The sink's part: show the branch once; whether it is proven lost."""
    how = s.how(branch)
    if how == PREPARED:
        return s.put(branch, VISIBLE), False
    if how == VISIBLE and not m.has("commit is idempotent"):
        return s.put(branch, TWICE), False
    if how == ABORTED and not m.has("an abort is final"):
        return s.put(branch, VISIBLE), False
    if how == TAKEN and not m.has("what was taken back stays away"):
        return s.put(branch, VISIBLE), False
    return s, how in {ABORTED, LOST, TAKEN, None}
