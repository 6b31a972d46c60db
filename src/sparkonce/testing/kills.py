"""The points of the protocol at which a driver is killed, in an order that reaches every one.

A chain is a list of kills. Each kill hits the next batch, or, with `again`, the recovery from the
kill before. What must be visible while the driver is paused there:

    none    nothing of the batch, in any sink
    all     the whole batch, in every sink
    held    nothing in the sink of the kill; the others may be ahead
    ahead   something in the sink of the kill, nothing in the others, which the kill holds back
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from sparkonce.testing.crash import Arm, Failpoints

Seen: TypeAlias = Literal["none", "all", "held", "ahead"]

CommitPolicy: TypeAlias = Literal["immediate", "after_checkpoint"]

_WITHOUT_BATCH = {"begin.before", "begin.after", "recover.after"}


@dataclass(frozen=True)
class Kill:
    """A point at which a driver is killed.

    Attributes:
        point: a name of `sparkonce.steps.POINTS`.
        seen: what must be visible then: "none", "all", "held" or "ahead", see the module.
        sink: the sink at which to kill, if each sink reaches the point.
        again: kill in the recovery from the kill before, at the same batch.
        aborts: rows of the killed attempt may never become visible.
        is_beside_planning: Spark plans the next batch at the same time, in another thread.
    """

    point: str
    seen: Seen
    sink: str | None = None
    again: bool = False
    aborts: bool = False
    is_beside_planning: bool = False

    def __str__(self) -> str:
        at = "" if self.sink is None else f" of {self.sink}"
        return f"{self.point}{at}{' in the recovery' * self.again}"

    def arm(self, failpoints: Failpoints, batch: int, sinks: Iterable[str]) -> list[Arm]:
        """Arm the point, and the points that hold back the pipeline's other `sinks`."""
        if self.point in _WITHOUT_BATCH:
            return [failpoints.arm(self.point)]
        where: dict[str, Any] = {} if self.sink is None else {"sink": self.sink}
        arms = [failpoints.arm(self.point, batch=batch, **where)]
        if self.seen == "ahead":
            others = [sink for sink in sinks if sink != self.sink]
            arms += [failpoints.arm("commit.before", batch=batch, sink=sink) for sink in others]
        return arms

    def check(self, seen: Mapping[str, str]) -> None:
        """Compare `seen`: how much of the batch ("none", "some" or "all") each sink shows.

        Raises:
            AssertionError: a sink shows more or less than it may.
        """
        shown = f"killed at {self}, the sinks show of the batch: {dict(seen)}"
        if self.seen in {"none", "all"}:
            assert set(seen.values()) == {self.seen}, f"{shown}; every sink must show {self.seen}"
            return
        others = {what for name, what in seen.items() if name != self.sink}
        if self.seen == "held":
            assert seen[str(self.sink)] == "none", f"{shown}; {self.sink} is not committed yet"
        else:
            assert seen[str(self.sink)] != "none", f"{shown}; {self.sink} has committed a branch"
            assert others <= {"none"}, f"{shown}; the others are held before their commit"


def crash_points(
    sinks: Sequence[str],
    commit: CommitPolicy = "immediate",
    *,
    is_each: bool = True,
    is_deep: bool = True,
) -> list[Kill]:
    """Every point that a pipeline reaches as long as it loses no branch.

    Args:
        sinks: the names of the pipeline's sinks.
        commit: the pipeline's policy.
        is_each: kill at every sink; False: each point at one sink, the sinks in turn.
        is_deep: also kill at the commits of a recovery.
    """
    turn = itertools.cycle(sinks)

    def names() -> Sequence[str]:
        return sinks if is_each else [next(turn)]

    chain = _immediate if commit == "immediate" else _after_checkpoint
    return chain(names, is_deep)


def sample(kills: Sequence[Kill], count: int, seed: int) -> list[Kill]:
    """The kills of `count` batches of the chain, each with the kills in its recovery.

    The same seed gives the same choice. At least one of the kills makes every sink repeat its
    commit, if the chain has such a kill.
    """
    groups: list[list[Kill]] = []
    for kill in kills:
        if kill.again:
            groups[-1].append(kill)
        else:
            groups.append([kill])
    choice = random.Random(seed)  # noqa: S311
    chosen = choice.sample(groups, min(count, len(groups)))
    repeating = [group for group in groups if any(k.point == "complete.before" for k in group)]
    if repeating and not any(group in repeating for group in chosen):
        chosen[:1] = [choice.choice(repeating)]
    return [kill for group in chosen for kill in group]


_Names: TypeAlias = Callable[[], Sequence[str]]


def _before_the_decision(names: _Names) -> Iterator[Kill]:
    for point in ("open.after", "write.after"):
        yield Kill(point, "none", aborts=True)
    for point in ("prepare.before", "prepare.after", "vote.before", "vote.after"):
        for sink in names():
            yield Kill(point, "none", sink, aborts=True)


def _commits(names: _Names) -> Iterator[Kill]:
    seen: Seen
    for point, seen in (("commit.before", "held"), ("commit.after", "ahead")):
        for sink in names():
            yield Kill(point, seen, sink)
    for point in ("complete.before", "complete.after"):
        yield Kill(point, "all")


def _begun_again() -> list[Kill]:
    return [Kill(point, "none", again=True) for point in ("begin.before", "begin.after")]


def _decided_again(names: _Names, is_deep: bool) -> list[Kill]:
    committed = [
        Kill("commit.before", "held", names()[0], again=True),
        Kill("complete.before", "all", again=True),
        Kill("complete.after", "all", again=True),
    ]
    return [
        Kill("finish.before", "none", again=True),
        *(committed if is_deep else ()),
        Kill("recover.after", "all", again=True),
    ]


def _immediate(names: _Names, is_deep: bool) -> list[Kill]:
    return [
        *_before_the_decision(names),
        Kill("decide.before", "none", aborts=True),
        Kill("decide.after", "none"),
        *_begun_again(),
        *_decided_again(names, is_deep),
        *_commits(names),
        Kill("deliver.after", "all"),
    ]


def _after_checkpoint(names: _Names, is_deep: bool) -> list[Kill]:
    return [
        *_before_the_decision(names),
        Kill("hold.before", "none", aborts=True),
        Kill("hold.after", "none", aborts=True),
        *_begun_again(),
        Kill("abandon.before", "none", again=True),
        Kill("abandon.after", "none", again=True),
        Kill("recover.after", "none", again=True),
        Kill("deliver.after", "none", aborts=True),
        beside_planning(Kill("decide.before", "none")),
        *_begun_again(),
        Kill("decide.before", "none", again=True),
        Kill("decide.after", "none", again=True),
        *_decided_again(names, is_deep),
        beside_planning(Kill("decide.after", "none")),
        *map(beside_planning, _commits(names)),
    ]


def beside_planning(kill: Kill) -> Kill:
    """The kill at a batch that Spark has committed already, while it plans the next one."""
    return replace(kill, is_beside_planning=True)
