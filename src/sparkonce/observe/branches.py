"""The steps of a task, folded: one span for each step and branch, however many calls it had.

open ─────────► a span                    write, write, … ─► one span, from the first to the last
prepare, discard ─► a span, and before it the one of `write`          idle ─► none
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from opentelemetry.trace import Status, StatusCode

from sparkonce.errors import SparkOnceError
from sparkonce.model import BranchId
from sparkonce.observe import names

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

    from sparkonce.observing import Seen

_MOST_OPEN: Final = 1_000
"""Branches whose writes are not yet shown; more only if tasks vanish without an end."""


@dataclass(frozen=True)
class Call:
    """One step of one branch, or several of the same name in a row.

    Attributes:
        name: of the step.
        branch: which one.
        partition: Spark's partition id.
        began_ns: Unix time in nanoseconds.
        ended_ns: Unix time in nanoseconds.
        busy_s: time inside the step, in seconds.
        calls: how many there were.
        error: what the last one failed with.
    """

    name: str
    branch: BranchId
    partition: object
    began_ns: int
    ended_ns: int
    busy_s: float
    calls: int = 1
    error: BaseException | None = None


class Branches:
    """Folds the steps of branches into calls."""

    def __init__(self) -> None:
        self._writing: dict[BranchId, Call] = {}

    def ended(self, seen: Seen) -> list[Call]:
        """The calls that are over, now that a step has ended."""
        ended, branch = seen.step, seen.step.of
        if not isinstance(branch, BranchId) or ended.name == "idle":
            return []
        call = Call(
            ended.name,
            branch,
            ended.where.get("partition"),
            seen.at_ns - int(ended.seconds * 1e9),
            seen.at_ns,
            ended.seconds,
            error=seen.error,
        )
        if ended.name != "write":
            writing = self._writing.pop(branch, None)
            return [call] if writing is None else [writing, call]
        before = self._writing.get(branch)
        if before is not None:
            call = replace(
                call,
                began_ns=before.began_ns,
                busy_s=before.busy_s + call.busy_s,
                calls=before.calls + 1,
            )
        if before is not None or len(self._writing) < _MOST_OPEN:
            self._writing[branch] = call
        return []


def show(call: Call, tracer: Tracer, parent: Context, attributes: Mapping[str, str | int]) -> None:
    """Make the call's span."""
    branch = call.branch
    more: dict[str, str | int | float] = {
        **attributes,
        names.STEP: call.name,
        names.SINK: branch.sink,
        names.BRANCH: branch.short,
        names.ATTEMPT: branch.attempt,
        names.BUSY: call.busy_s,
        names.CALLS: call.calls,
    }
    if isinstance(call.partition, int):
        more[names.PARTITION] = call.partition
    if branch.batch_id is not None:
        more[names.BATCH] = branch.batch_id
    span = tracer.start_span(
        f"{call.name} {branch.sink}", parent, attributes=more, start_time=call.began_ns
    )
    end(span, call.ended_ns, call.error)


def end(span: Span, at_ns: int, error: BaseException | None) -> None:
    """End a span; an error that is not ours may hold a secret, so only its type is shown."""
    if error is not None:
        span.set_attribute(names.ERROR, type(error).__name__)
        text = str(error) if isinstance(error, SparkOnceError) else type(error).__name__
        span.set_status(Status(StatusCode.ERROR, text))
    span.end(at_ns)
