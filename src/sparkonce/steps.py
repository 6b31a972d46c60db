"""The named moments of the protocol, declared once, in order.

    with step("decide", batch=7, pipeline="orders"):
        …
     │                        │
     ├─ before: fail point    ├─ after: fail point (not after an error)
     ├─ observers: started    ├─ observers: finished or failed, with the seconds it took
     └─ "no response yet" …   └─ one line in the log, at level DEBUG

Everything that follows the protocol uses this list: tests stop or kill a process at a fail point, a
step that takes long is logged, and `observe` shows the steps to metrics, traces or a page.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol, Self

from sparkonce import failpoints

logger = logging.getLogger("sparkonce")


@dataclass(frozen=True, slots=True)
class Declared:
    """One step of the protocol.

    Attributes:
        process: where it runs, driver or executor.
        does: what it does, as an infinitive: "commit" reads as "commit batch 7".
        before: the state that a process killed before the step leaves; empty where that is the
            state after the step before.
        after: the state that a process killed after the step leaves; empty as above.
        is_long: whether it may take long without a fault: it holds other steps, or waits for tasks.
    """

    process: str
    does: str
    before: str = ""
    after: str = ""
    is_long: bool = False


STEPS: Final[Mapping[str, Declared]] = {
    "begin": Declared(
        "driver",
        "take a fencing token before",
        before="the incarnation is about to take its token",
        after="the token is taken, nothing is recovered yet",
    ),
    "look": Declared("driver", "read the transaction log"),
    "recover": Declared(
        "driver",
        "finish what earlier drivers left",
        is_long=True,
        after="all that was decided is committed, orphans are not yet aborted",
    ),
    "finish": Declared(
        "driver",
        "finish",
        is_long=True,
        before="an unfinished transaction was found and will be committed",
    ),
    "open": Declared(
        "executor",
        "begin",
        after="the task has its first rows, the branch is open (per sink)",
    ),
    "write": Declared(
        "executor",
        "write",
        after="one Arrow record batch went into the branch (per sink)",
    ),
    "prepare": Declared(
        "executor",
        "prepare",
        before="all rows of the task are written (per sink)",
        after="the branch is prepared, the driver does not know (per sink)",
    ),
    "tasks": Declared("driver", "run the tasks of", is_long=True),
    "vote": Declared(
        "driver",
        "vote on",
        before="every task is prepared, the vote is next (per sink)",
        after="this sink has voted (per sink)",
    ),
    "hold": Declared(
        "driver",
        "record as prepared",
        before='everything is prepared, the log does not know (commit="after_checkpoint")',
        after='the log holds the batch as prepared (commit="after_checkpoint")',
    ),
    "abandon": Declared(
        "driver",
        "abandon",
        before="a prepared batch that Spark did not commit is about to be abandoned",
        after="the log has the batch as abandoned, nothing is aborted yet",
    ),
    "decide": Declared(
        "driver",
        "decide",
        before="everything is prepared, nothing is decided",
        after="the decision is durable, nothing is committed; one transaction with the log: all is",
    ),
    "commit": Declared(
        "driver",
        "commit",
        before="the commit of this sink's branches is next (per sink)",
        after="this sink's branches are committed (per sink)",
    ),
    "publish": Declared("driver", "publish"),
    "rewrite": Declared(
        "driver",
        "rewrite the lost branches of",
        is_long=True,
        before="decided branches are lost and will be rewritten",
    ),
    "amend": Declared(
        "driver",
        "amend the decision on",
        before="the new branches are prepared, the decision still names the lost ones",
        after="the decision names the new branches, they are not committed yet",
    ),
    "complete": Declared(
        "driver",
        "complete",
        before="every branch is committed, the log does not know",
        after="the log knows, losers and left-overs are not swept yet",
    ),
    "sweep": Declared("driver", "abort left-over branches"),
    "end": Declared("driver", "end the ruled branches of"),
    "deliver": Declared(
        "driver",
        "deliver",
        is_long=True,
        after="all is done, Spark has not written commits/N",
    ),
    "drain": Declared("driver", "read the replay of", is_long=True),
    "discard": Declared("executor", "discard"),
    "idle": Declared("executor", "keep alive"),
    "validate": Declared("driver", "check the settings, server and schema"),
    "probe": Declared("driver", "check the executors' Python"),
    "checkpoint": Declared("driver", "reach the checkpoint"),
    "list": Declared("driver", "list branches"),
}
"""Every step, in the order of the protocol; the last ones may occur at any time."""

POINTS: Final[Mapping[str, str]] = {
    f"{name}.{moment}": f"{declared.process}: {state}"
    for name, declared in STEPS.items()
    for moment, state in (("before", declared.before), ("after", declared.after))
    if state
}
"""The moments at which a crash leaves a state of its own, each with that state."""


class Named(Protocol):
    """What a step may concern: a sink."""

    name: str


class Hook(Protocol):
    """Called in the step's own thread, so it must return at once and never raise."""

    def started(self, entered: step) -> None: ...

    def ended(self, entered: step, error: BaseException | None) -> None: ...


class step:  # noqa: N801 - reads as a phrase in a with statement
    """One step, while it runs: ``with step("commit", batch=7, sink=sink): …``.

    Args:
        name: one of `STEPS`.
        batch: the micro-batch; None where the step concerns none.
        sink: the sink; None where it concerns none.
        pipeline: the pipeline's name.
        of: what else the messages name, such as a branch or a location.
        where: what else a fail point may be armed for, such as the token or the partition.

    Attributes:
        seconds: how long the step took, once it has ended.
        result: what the step came to, for observers: the record that the log holds, the fencing
            token, the number of branches; None where they need nothing.
        retries: how often its call was repeated.
    """

    __slots__ = (
        "_began",
        "batch",
        "name",
        "of",
        "pipeline",
        "result",
        "retries",
        "seconds",
        "sink",
        "where",
    )

    def __init__(
        self,
        name: str,
        *,
        batch: int | None = None,
        sink: Named | None = None,
        pipeline: str | None = None,
        of: object = None,
        **where: object,
    ) -> None:
        self.name = name
        self.batch = batch
        self.sink = sink
        self.pipeline = pipeline
        self.of = of
        self.where = where
        self.seconds = 0.0
        self.result: object = None
        self.retries = 0

    def __enter__(self) -> Self:
        if failpoints.handler is not None:
            self._reach("before")
        self._began = time.monotonic()
        for hook in _hooks:
            hook.started(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.seconds = time.monotonic() - self._began
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s %s after %.3f s", self, "failed" if error else "done", self.seconds)
        for hook in _hooks:
            hook.ended(self, error)
        if error is None and failpoints.handler is not None:
            self._reach("after")

    def __str__(self) -> str:
        """As an infinitive: "commit batch 7 of pipeline 'orders' in <KafkaSink …>"."""
        return "".join(
            (
                STEPS[self.name].does,
                "" if self.of is None else f" {self.of}",
                "" if self.batch is None or self.of is not None else f" batch {self.batch}",
                "" if self.pipeline is None else f" of pipeline {self.pipeline!r}",
                "" if self.sink is None else f" in {self.sink!r}",
            )
        )

    def _reach(self, moment: str) -> None:
        point = f"{self.name}.{moment}"
        if point in POINTS:
            concerned = {"batch": self.batch, "sink": getattr(self.sink, "name", None)}
            known = {key: value for key, value in concerned.items() if value is not None}
            failpoints.reach(point, **known, **self.where)


_hooks: tuple[Hook, ...] = ()
"""Replaced as a whole, never changed: a step may be entered in any thread meanwhile."""


def add_hook(hook: Hook) -> None:
    """Call the hook at each step of this process from now on."""
    global _hooks  # noqa: PLW0603 - see there
    _hooks = (*_hooks, hook)


def remove_hook(hook: Hook) -> None:
    """Undo `add_hook`; no error when it is not there."""
    global _hooks  # noqa: PLW0603 - see there
    _hooks = tuple(each for each in _hooks if each is not hook)
