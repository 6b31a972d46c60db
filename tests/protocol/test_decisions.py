"""The whole tables of the decisions: what becomes of a batch in doubt, and who keeps a token."""

from __future__ import annotations

import pytest

from sparkonce.protocol.decisions import (
    Fate,
    fate_of_prepared,
    is_checkpointed,
    is_next_batch,
)


@pytest.mark.parametrize(
    ("committed", "has_begun", "fate"),
    [
        (7, True, Fate.DECIDE),
        (7, False, Fate.DECIDE),  # Spark removes old offsets
        (9, True, Fate.DECIDE),  # and old commits
        (6, True, Fate.ABANDON),
        (-1, True, Fate.ABANDON),
        (6, False, Fate.LEAVE),  # a copy that is older than the batch
        (None, True, Fate.LEAVE),
        (None, False, Fate.LEAVE),
    ],
)
def test_what_is_in_doubt_goes_by_the_checkpoint(
    committed: int | None, has_begun: bool, fate: Fate
) -> None:
    """Only a checkpoint that has begun the batch proves that Spark did not commit it (I5)."""
    assert fate_of_prepared(7, committed=committed, has_begun=has_begun) is fate


@pytest.mark.parametrize(
    ("committed", "expected"), [(None, None), (-1, False), (6, False), (7, True), (8, True)]
)
def test_checkpoint_has_reached_a_batch(committed: int | None, expected: bool | None) -> None:
    assert is_checkpointed(7, committed) is expected


@pytest.mark.parametrize(
    ("batch_id", "committed", "expected"),
    [
        (8, 7, True),
        (7, 7, False),
        (7, 6, False),  # a replay
        (9, 8, False),  # another process planned batch 8
        (8, 6, False),
        (8, 8, False),
        (8, None, False),
    ],
)
def test_next_batch_is_right_after_one_that_succeeded(
    batch_id: int, committed: int | None, expected: bool
) -> None:
    assert is_next_batch(batch_id, last=7, committed=committed) is expected
