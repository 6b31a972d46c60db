"""What is checked: the bounds of each model, the states that it must reach, the guards it needs.

MODELS    every reachable state keeps I1 to I8
PROBES    states that must be reached: a check that never meets them proves nothing about them
REVERTS   each guard, with the property that fails without it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, NamedTuple

from specs.checker import Probe
from specs.state import (
    ABANDONED,
    COMPLETE,
    DECIDED,
    LOST,
    PREPARED,
    TAKEN,
    VISIBLE,
    Model,
    State,
)

IMMEDIATE, AFTER, EITHER = (False,), (True,), (False, True)

MODELS: Final[Mapping[str, Model]] = {
    "immediate": Model(policies=IMMEDIATE),
    "after_checkpoint": Model(policies=AFTER),
    "either": Model(policies=EITHER, batches=2),
    "losses": Model(policies=IMMEDIATE, batches=1, faults=(("loss", 2),)),
    "losses, after_checkpoint": Model(policies=AFTER, batches=1, faults=(("loss", 1),)),
    "strays": Model(policies=IMMEDIATE, batches=1, faults=(("stray", 1), ("interrupt", 1))),
    "late writes": Model(policies=IMMEDIATE, batches=1, faults=(("late", 1),)),
    "late writes, after_checkpoint": Model(
        policies=AFTER, batches=1, sinks=1, faults=(("late", 1),)
    ),
    "gaps": Model(policies=AFTER, batches=1, faults=(("gap", 1),)),
    "rulings": Model(
        policies=IMMEDIATE,
        batches=1,
        sinks=1,
        faults=(("ruling", 1), ("unsure", 1), ("loss", 1)),
    ),
    "copies": Model(policies=IMMEDIATE, batches=1, sinks=1, faults=(("copy", 1),), copies=True),
    "copies, after_checkpoint": Model(
        policies=AFTER, batches=1, sinks=1, faults=(("copy", 1),), copies=True
    ),
    "rewinds": Model(policies=IMMEDIATE, batches=2, sinks=1, faults=(("rewind", 1),)),
    "rewinds, after_checkpoint": Model(policies=AFTER, batches=2, sinks=1, faults=(("rewind", 1),)),
    "forks": Model(policies=IMMEDIATE, batches=2, sinks=1, forks=True),
    "forks, after_checkpoint": Model(policies=AFTER, drivers=1, batches=2, sinks=1, forks=True),
}
"""Two drivers and two sinks, or one where a check would take half an hour. The whole protocol has
three batches; a kind of fault has as many as it can reach beyond: one, since nothing but the log
carries over from batch to batch."""


def _any_record(s: State, state: str) -> bool:
    return any(r is not None and r.state == state for log in s.logs for r in log.records)


def _at(s: State, *places: str) -> list[bool]:
    newest = max(log.token for log in s.logs)
    return [me.token < newest for me in s.drivers if me.at in places]


def _partial(s: State) -> bool:
    decided = [r for r in s.logs[0].unfinished() if r.state == DECIDED]
    how = [{s.how(name) for name in r.names} for r in decided]
    return any({PREPARED, VISIBLE} <= found for found in how)


PROBES: Final[Mapping[str, Mapping[str, Probe]]] = {
    "immediate": {
        "a batch is decided, and one of two sinks is committed": _partial,
        "a driver that was replaced is about to decide": lambda s: any(_at(s, "send")),
        "a driver that was replaced is about to commit": lambda s: any(_at(s, "commit")),
        "a driver that was replaced is in a sweep": lambda s: any(_at(s, "sweep")),
        "two drivers commit one batch": lambda s: len(_at(s, "commit")) > 1,
        "all batches are complete": lambda s: all(
            r is not None and r.state == COMPLETE for r in s.logs[0].records
        ),
        "a start takes a token after another one looked": lambda s: any(
            me.at == "begin" and me.seen != s.logs[0].token for me in s.drivers
        ),
    },
    "after_checkpoint": {
        "a batch is prepared in the log": lambda s: _any_record(s, PREPARED),
        "a batch is abandoned": lambda s: _any_record(s, ABANDONED),
        "a newer driver decides what an older one prepared": lambda s: any(
            me.at == "decide" and me.record is not None and me.record.token < me.token
            for me in s.drivers
        ),
        "Spark has committed an abandoned batch": lambda s: any(
            r is not None and r.state == ABANDONED and s.committed >= r.batch
            for r in s.logs[0].records
        ),
    },
    "losses": {
        "a decided branch is lost": lambda s: any(
            s.how(name) == LOST for r in s.logs[0].unfinished() for name in r.names
        ),
        "a decision is amended": lambda s: any(r.revision == 1 for r in s.logs[0].unfinished()),
        "a decision is amended twice": lambda s: any(
            r.revision > 1 for r in s.logs[0].unfinished()
        ),
        "a driver that was replaced is about to amend": lambda s: any(_at(s, "amend")),
    },
    "late writes, after_checkpoint": {
        "an abandonment is late, and the batch is prepared again": lambda s: (
            s.flight is not None
            and s.flight.verb == "abandon"
            and any(
                r.state == PREPARED and r.token > s.flight.record.token
                for r in s.logs[0].unfinished()
            )
        ),
    },
    "gaps": {
        "an operator closes a gap while a driver runs": lambda s: not s.left("gap"),
    },
    "rewinds": {
        "a driver of the old query is about to commit what is taken back": lambda s: any(
            me.at == "commit" and me.query != s.query and TAKEN in map(s.how, me.record.names)
            for me in s.drivers
            if me.record is not None
        ),
        "the log changes while a rewind looks at the sinks": lambda s: (
            s.rewind is not None and s.rewind.at == "stale"
        ),
        "a rewind has nothing to take back": lambda s: s.query == 1 and s.commits[0] == s.committed,
        "a batch is there again after a rewind": lambda s: (
            s.query == 1 and s.committed == 1 and s.rewind is None
        ),
    },
    "forks": {
        "the pipeline and its fork commit the same batch": lambda s: (
            {me.query for me in s.drivers if me.at == "commit"} == {0, 1}
        ),
        "the fork sweeps while the pipeline has a decision": lambda s: any(
            me.at == "sweep" and me.query == 1 and s.logs[0].unfinished() for me in s.drivers
        ),
        "the pipeline sweeps while its fork has a decision": lambda s: any(
            me.at == "sweep" and me.query == 0 and s.logs[1].unfinished() for me in s.drivers
        ),
        "all batches of both are complete": lambda s: (
            s.is_forked and all(r and r.state == COMPLETE for log in s.logs for r in log.records)
        ),
    },
    "copies": {
        "a driver of the original wakes behind one with the copy": lambda s: any(
            me.at == "check" and me.log < s.entry[1] for me in s.drivers
        ),
        "a driver of the original enters late": lambda s: any(
            me.at == "enter" and me.log < s.entry[1] for me in s.drivers
        ),
    },
    "rulings": {
        "a branch is ruled on and ended": lambda s: bool(s.by_hand),
        "a driver is about to retry a commit after a ruling": lambda s: any(
            me.unsure and me.token < s.logs[0].token for me in s.drivers
        ),
        "a ruled branch is visible": lambda s: any(
            s.how(name) == VISIBLE and name.sink in r.ruled
            for r in s.logs[0].unfinished()
            for name in r.names
        ),
    },
}
"""By model, the states that it must reach."""


class Revert(NamedTuple):
    """A guard that is removed: what fails then, and the smallest model in which it does."""

    breaks: str
    model: Model


_NOW = replace(MODELS["immediate"], batches=1)
_AFTER = replace(MODELS["after_checkpoint"], batches=1)
_LOSSES = MODELS["losses"]
_REWINDS = MODELS["rewinds"]

REVERTS: Final[Mapping[str, Revert]] = {
    "a write checks the token": Revert("I6", _NOW),
    "a late start is refused": Revert("I6", _NOW),
    "a gap is refused": Revert("I5", replace(_AFTER, batches=2)),
    "a start recovers first": Revert("I8", _AFTER),
    "decide waits for Spark": Revert("I5", _AFTER),
    "abandon names its record": Revert("I5", MODELS["late writes, after_checkpoint"]),
    "every sink is prepared": Revert("I2", _NOW),
    "only the decided is committed": Revert("I2", _AFTER),
    "the first record holds": Revert("I3", MODELS["late writes"]),
    "one undecided batch": Revert("I5", replace(_AFTER, batches=2)),
    "nothing is aborted after the decision": Revert("I1", MODELS["late writes"]),
    "a loss is proven": Revert("I4", MODELS["rulings"]),
    "a retry asks the log": Revert("I4", MODELS["rulings"]),
    "commit is idempotent": Revert("I4", _NOW),
    "an abort is final": Revert("I7", MODELS["rulings"]),
    "commit comes after the amendment": Revert("I2", _LOSSES),
    "complete needs every branch": Revert("I1", _LOSSES),
    "the entry is checked": Revert("I4", MODELS["copies"]),
    "a sweep spares the prepared": Revert("I7", _AFTER),
    "a sweep spares the decided": Revert("I1", _NOW),
    "a sweep spares the younger": Revert("I6", _NOW),
    "a sweep spares other pipelines": Revert("I1", MODELS["forks"]),
    "a rewind checks what it saw": Revert("I2", _REWINDS),
    "a rewind takes a token": Revert("I4", _REWINDS),
    "a start waits for the rewind": Revert("I4", _REWINDS),
    "what was taken back stays away": Revert("I7", _REWINDS),
    "a query that was replaced is refused": Revert("I6", _REWINDS),
}
"""Each guard of the model. An I8 is a batch that never completes, or a branch that is left."""
