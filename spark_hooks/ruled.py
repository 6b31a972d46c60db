"""The end of a branch that an operator has given up or put in by hand: it must not show (I7).

    abort ─┬─► commit ─┬─ proven lost ──► ENDED
           │           ├─ returns ──────► VISIBLE: committed before, and an abort undoes no commit
           │           └─ anything else ► UNKNOWN
           └─ fails ────────────────────► UNKNOWN, and commit is not asked: it might show the branch

Behind an abort that has returned a commit shows nothing (`SinkContract.test_commit_after_abort`),
so there it only asks what holds, in the one way that every sink can answer with its proof.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from sparkonce.errors import PreparedBranchLostError
from sparkonce.model import Committable
from sparkonce.sinks.base import AnySink


class End(StrEnum):
    """What has become of a branch that was to end."""

    ENDED = "ended"
    """Nobody has committed it, and nobody can."""
    VISIBLE = "visible"
    """It was committed before: its rows are in the target."""
    UNKNOWN = "unknown"
    """It may stand, and whoever commits it shows it."""


class Ended(NamedTuple):
    """What has become of the branch, and why that is unknown."""

    how: End
    why: str = ""


def end_ruled(sink: AnySink | None, committable: Committable, target: str) -> Ended:
    """End what stands of a branch, and ask for the proof.

    Args:
        sink: of the branch's name; None where the pipeline has none.
        committable: of the branch.
        target: in which the record says that it stands.
    """
    if sink is None:
        name = committable.branch_id.sink
        return Ended(
            End.UNKNOWN, f"{name!r} is not among the pipeline's sinks; it stood in {target}"
        )
    moved = f"it stood in {target}, and the sink has {sink.target} now"
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
