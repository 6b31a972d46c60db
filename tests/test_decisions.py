"""The whole table of `next_move`: what to do with a batch."""

from __future__ import annotations

import pytest

from sparkonce.protocol.decisions import Move, is_checkpointed, next_move
from sparkonce.txn_log.record import State

CHECKPOINTS = [(None, False), (None, True), (6, True), (7, True), (9, False)]


@pytest.mark.parametrize(
    ("state", "move"),
    [
        (None, Move.WRITE),
        (State.ABANDONED, Move.WRITE),
        (State.DECIDED, Move.COMMIT),
        (State.COMPLETE, Move.DRAIN),
        (State.SETTLED, Move.DRAIN),
    ],
)
@pytest.mark.parametrize(("committed", "has_begun"), CHECKPOINTS)
def test_what_is_not_in_doubt_does_not_depend_on_the_checkpoint(
    state: State | None, move: Move, committed: int | None, has_begun: bool
) -> None:
    assert next_move(state, batch_id=7, committed=committed, has_begun=has_begun) is move


@pytest.mark.parametrize(
    ("committed", "has_begun", "move"),
    [
        (7, True, Move.DECIDE),
        (7, False, Move.DECIDE),  # Spark removes old offsets
        (9, True, Move.DECIDE),  # and old commits
        (6, True, Move.ABANDON),
        (-1, True, Move.ABANDON),
        (6, False, Move.LEAVE),  # a copy that is older than the batch
        (None, True, Move.LEAVE),
        (None, False, Move.LEAVE),
    ],
)
def test_what_is_in_doubt_goes_by_the_checkpoint(
    committed: int | None, has_begun: bool, move: Move
) -> None:
    """Only a checkpoint that has begun the batch proves that Spark did not commit it (I5)."""
    found = next_move(State.PREPARED, batch_id=7, committed=committed, has_begun=has_begun)
    assert found is move


@pytest.mark.parametrize(
    ("committed", "expected"), [(None, None), (-1, False), (6, False), (7, True), (8, True)]
)
def test_checkpoint_has_reached_a_batch(committed: int | None, expected: bool | None) -> None:
    assert is_checkpointed(7, committed) is expected
