"""Choices that depend on what Spark's checkpoint shows, as pure functions: tests need no fakes.

`fate_of_prepared` says what becomes of a batch that the log holds as PREPARED; every other state
leaves no choice:

    Spark's commit log            fate
    has reached the batch         DECIDE   Spark has moved on: only a decision may follow
    has not, and has begun it     ABANDON  Spark's replay writes it again
    unreadable, or not begun      LEAVE    this checkpoint cannot show which

`is_next_batch` says whether a token that has served one batch may serve another.
"""

from __future__ import annotations

from enum import StrEnum


class Fate(StrEnum):
    """What happens to a prepared batch."""

    DECIDE = "decide"
    ABANDON = "abandon"
    LEAVE = "leave"


def is_checkpointed(batch_id: int, committed: int | None) -> bool | None:
    """Whether Spark's commit log has reached the batch; None where it cannot be read.

    "Has reached it", not "its file exists": Spark removes old files.
    """
    return None if committed is None else committed >= batch_id


def fate_of_prepared(batch_id: int, *, committed: int | None, has_begun: bool) -> Fate:
    """What happens to a batch that an earlier driver prepared.

    Args:
        batch_id: the batch.
        committed: the highest batch of Spark's commit log; None where it cannot be read.
        has_begun: whether the checkpoint has the batch's offsets.
    """
    if is_checkpointed(batch_id, committed):
        return Fate.DECIDE
    if committed is None or not has_begun:
        return Fate.LEAVE
    return Fate.ABANDON


def is_next_batch(batch_id: int, *, last: int, committed: int | None) -> bool:
    """Whether this is the first attempt of a batch, right after the batch `last` has succeeded.

    A replay needs a token of its own: an earlier attempt may still be prepared, or be swept later.

    Args:
        batch_id: the batch that Spark plans now.
        last: the batch that the same process planned before.
        committed: the highest batch of Spark's commit log; None where it cannot be read.
    """
    return batch_id == last + 1 and committed == last
