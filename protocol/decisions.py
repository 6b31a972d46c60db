"""What to do with a batch, given what the log and Spark's checkpoint say of it. Nothing else.

    the log says      Spark's commit log            move
    nothing           -                             WRITE
    ABANDONED         -                             WRITE    Spark's replay makes it again
    PREPARED          has reached it                DECIDE   only this may follow: Spark moved on
                      has not, and has begun it     ABANDON  its replay makes it again
                      unreadable, or not begun      LEAVE    this checkpoint cannot show which
    DECIDED           -                             COMMIT
    COMPLETE, SETTLED -                             DRAIN    a replay is read, not written

Pure functions from values to a value, so that their tests need no world.
"""

from __future__ import annotations

from enum import StrEnum

from sparkonce.txn_log.record import State


class Move(StrEnum):
    """What happens to a batch next."""

    WRITE = "write"
    DECIDE = "decide"
    ABANDON = "abandon"
    LEAVE = "leave"
    COMMIT = "commit"
    DRAIN = "drain"


def is_checkpointed(batch_id: int, committed: int | None) -> bool | None:
    """Whether Spark's commit log has reached the batch; None where it cannot be read.

    "Has reached it", not "its file exists": Spark removes old files.
    """
    return None if committed is None else committed >= batch_id


def next_move(
    state: State | None, *, batch_id: int, committed: int | None, has_begun: bool
) -> Move:
    """What to do with a batch.

    Args:
        state: of its record; None where the log has none.
        batch_id: the batch.
        committed: the highest batch of Spark's commit log; None where it cannot be read.
        has_begun: whether the checkpoint has the batch's offsets.
    """
    match state:
        case None | State.ABANDONED:
            return Move.WRITE
        case State.DECIDED:
            return Move.COMMIT
        case State.PREPARED:
            if is_checkpointed(batch_id, committed):
                return Move.DECIDE
            if committed is None or not has_begun:
                return Move.LEAVE
            return Move.ABANDON
        case _:
            return Move.DRAIN
