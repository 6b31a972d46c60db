"""The points of the protocol at which a driver is killed, in an order that reaches every one.

A chain is a list of kills. Each is met by the next batch, or, where it says `again`, by the
recovery from the kill before. What must be visible when the driver stands there:

    none    nothing of the batch, in any sink
    all     the whole batch, in every sink
    held    nothing in the sink of the kill; the others may be ahead
    ahead   something in the sink of the kill, nothing in the others, which are held back
"""

from __future__ import annotations

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
        seen: what must be visible then, see the module.
        sink: at which sink, where the point is one of each sink.
        again: in the recovery from the kill before, with the same batch.
        aborts: the attempt that is killed may never become visible.
        is_beside_planning: Spark plans the next batch meanwhile, in a thread of its own.
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
        """Arm the point, and what holds the pipeline's other `sinks` back meanwhile."""
        if self.point in _WITHOUT_BATCH:
            return [failpoints.arm(self.point)]
        where: dict[str, Any] = {} if self.sink is None else {"sink": self.sink}
        arms = [failpoints.arm(self.point, batch=batch, **where)]
        if self.seen == "ahead":
            others = [sink for sink in sinks if sink != self.sink]
            arms += [failpoints.arm("commit.before", batch=batch, sink=sink) for sink in others]
        return arms

    def check(self, seen: Mapping[str, str]) -> None:
        """Compare with what each sink shows of the batch: none, some or all.

        Raises:
            AssertionError: a sink shows more or less than it may.
        """
        told = f"killed at {self}, the sinks show of the batch: {dict(seen)}"
        if self.seen in {"none", "all"}:
            assert set(seen.values()) == {self.seen}, f"{told}; every sink must show {self.seen}"
            return
        others = {what for name, what in seen.items() if name != self.sink}
        if self.seen == "held":
            assert seen[str(self.sink)] == "none", f"{told}; {self.sink} is not committed yet"
        else:
            assert seen[str(self.sink)] != "none", f"{told}; {self.sink} has committed a branch"
            assert others <= {"none"}, f"{told}; the others are held before their commit"


def crash_points(
    sinks: Sequence[str],
    commit: CommitPolicy = "immediate",
    *,
    is_each: bool = True,
    is_deep: bool = True,
) -> list[Kill]:
    """Every point that a pipeline reaches whose branches do not get lost.

    Args:
        sinks: their names.
        commit: the pipeline's policy.
        is_each: the points of a sink at every sink; False: at the sinks in turn.
        is_deep: also the commits in a recovery.
    """
    turn = iter(range(1_000_000))

    def names() -> Sequence[str]:
        return sinks if is_each else [sinks[next(turn) % len(sinks)]]

    return _prepared(names, is_deep) if commit == "immediate" else _checkpoint(names, is_deep)


def sample(kills: Sequence[Kill], count: int, seed: int) -> list[Kill]:
    """Some of the kills, each with those that follow it in its recovery.

    At least one of them lets every sink's commit be repeated, where the chain has such.

    Args:
        kills: a chain.
        count: how many of its batches.
        seed: chooses them; the same one chooses the same.
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
    for point in (
        "prepare.before",
        "prepare.after",
        "vote.before",
        "vote.after",
    ):
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


def _prepared(names: _Names, is_deep: bool) -> list[Kill]:
    return [
        *_before_the_decision(names),
        Kill("decide.before", "none", aborts=True),
        Kill("decide.after", "none"),
        *_begun_again(),
        *_decided_again(names, is_deep),
        *_commits(names),
        Kill("deliver.after", "all"),
    ]


def _checkpoint(names: _Names, is_deep: bool) -> list[Kill]:
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
    """A kill at a batch that Spark has committed already."""
    return replace(kill, is_beside_planning=True)
