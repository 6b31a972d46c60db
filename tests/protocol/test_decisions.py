"""The whole table of `fate_of_prepared`: what becomes of a batch in doubt."""

from __future__ import annotations

import pytest

from sparkonce.protocol.decisions import Fate, fate_of_prepared, is_checkpointed


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
