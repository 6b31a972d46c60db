"""Branches on which an operator has ruled: committed or aborted manually, or to be rewritten.

A proof, either way, overrides a ruling: the ruling is older, and knows nothing of a commit whose
answer was lost.

A branch that was ruled committed or aborted must not become visible (I7):

    abort ─┬─► commit ─┬─ proven lost ──► ENDED
           │           ├─ returns ──────► VISIBLE: committed before, and an abort undoes no commit
           │           └─ anything else ► UNKNOWN
           └─ fails ────────────────────► UNKNOWN; no commit, which might show the branch

After an abort has returned, a commit shows nothing (`SinkContract.test_commit_after_abort`). It
only asks for the outcome, in the one way that every sink answers with a proof.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from sparkonce.errors import CommitUnresolvedError, PreparedBranchLostError, SparkOnceError
from sparkonce.model import Committable
from sparkonce.sinks import verbs
from sparkonce.sinks.base import AnySink
from sparkonce.sinks.capabilities import AbortsDecided


class End(StrEnum):
    """What has become of a branch that had to end."""

    ENDED = "ended"
    """Nobody has committed it, and nobody can."""
    VISIBLE = "visible"
    """It was committed before: its rows are in the target."""
    UNKNOWN = "unknown"
    """It may still exist, and a driver that commits it makes it visible."""


class Ended(NamedTuple):
    """What has become of the branch, and why that is unknown."""

    how: End
    why: str = ""


def end_ruled(sink: AnySink | None, committable: Committable, target: str) -> Ended:
    """Abort a branch, and ask for the proof of its end.

    Args:
        sink: the branch's sink; None where the pipeline has none of that name.
        committable: of the branch.
        target: the sink's target when the branch was recorded.
    """
    if sink is None:
        name = committable.branch_id.sink
        return Ended(End.UNKNOWN, f"{name!r} is not among the pipeline's sinks; it was in {target}")
    moved = f"it was in {target}, and the sink has {sink.target} now"
    try:
        sink.abort(committable)
        if sink.target != target:
            return Ended(End.UNKNOWN, moved)
        sink.commit(committable)
    except PreparedBranchLostError:
        return Ended(End.ENDED)
    except Exception as error:  # noqa: BLE001 - its server may be gone for good
        why = str(error) or type(error).__name__
        return Ended(End.UNKNOWN, why if sink.target == target else f"{moved}: {why}")
    return Ended(End.VISIBLE)


def ask_again_by_ruling(sink: AnySink, committable: Committable) -> SparkOnceError | None:
    """The outcome of a branch that an operator has ruled to be rewritten.

    Its commit is tried first only if the sink's own `abort_decided` sees what has become of it.

    Returns:
        None when it is committed after all; `PreparedBranchLostError` when it has ended and can be
        rewritten; any other error as its commit would give it.
    """
    error: SparkOnceError | None = CommitUnresolvedError("it was ended before a commit was tried")
    if isinstance(sink, AbortsDecided):
        (error,) = verbs.commit_many(sink, [committable])
    return end_for_rewrite(sink, committable, error)


def end_for_rewrite(
    sink: AnySink, committable: Committable, error: SparkOnceError | None
) -> SparkOnceError | None:
    """End a branch that could not be committed, and ask again; see `ask_again_by_ruling`."""
    if error is None or isinstance(error, PreparedBranchLostError):
        return error
    try:
        verbs.abort_decided(sink, committable)
    except Exception as failure:  # noqa: BLE001 - repeated, as any unknown outcome
        unresolved = CommitUnresolvedError(
            f"{sink!r}: an operator ruled that {committable.branch_id} is rewritten, and it "
            f"cannot be ended now: {failure}",
            committable.branch_id,
        )
        unresolved.__cause__ = failure
        return unresolved
    (proven,) = verbs.commit_many(sink, [committable])
    if proven is None or isinstance(proven, PreparedBranchLostError):
        return proven
    lost = PreparedBranchLostError(
        f"an operator ruled that it is rewritten; before: {error}", committable.branch_id
    )
    lost.__cause__ = error
    return lost
