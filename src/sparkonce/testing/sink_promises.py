"""A part of `SinkContract`: what the sink and its world promise is true."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest

from sparkonce.errors import CommitUnresolvedError, TakeBackRefusedError
from sparkonce.model import Committable
from sparkonce.sinks import verbs
from sparkonce.sinks.base import AnySink
from sparkonce.sinks.capabilities import Delivered, ForgetsProofs, TakesBack
from sparkonce.testing.sink_branches import APART
from sparkonce.testing.sink_case import BRANCH, A, B, SinkCase
from sparkonce.testing.sink_world import Stage, branch, shortened


class SinkPromises(SinkCase):
    """What `SinkContract` inherits; see there."""

    def test_old_proofs_are_forgotten(self, stage: Stage, sink: AnySink) -> None:
        """Readers keep every row; the proofs of newer batches and of other queries stay.

        A driver that was frozen in the commit of an old batch shows its rows no second time.
        """
        if not isinstance(sink, ForgetsProofs):
            pytest.skip("the sink keeps its proofs for ever: it has no forget_proofs")
        owners = [APART[part]["owner"] for part in ("log", "query")]
        others = [branch(n, batch_id=1, owner=owner) for n, owner in enumerate(owners, 3)]
        ids = [branch(1, batch_id=1), branch(2, batch_id=2), *others]
        prepared = [stage.prepare(sink, branch_id, A) for branch_id in ids]
        for committables in prepared:
            stage.commit(sink, committables)
        for committables in prepared:
            stage.sweep(sink, committables[0].branch_id.owner)
        for _ in range(2):
            sink.forget_proofs(prepared[0][0].branch_id.owner, 2)
        stage.sees(*[A] * len(ids))
        old, *kept = prepared
        verbs.commit_many(stage.sink(), old)
        for committables in kept:
            self._is_still_proven(stage.sink(), committables)
        stage.sees(*[A] * len(ids))

    @staticmethod
    def _is_still_proven(sink: AnySink, committables: Sequence[Committable]) -> None:
        for error in verbs.commit_many(sink, committables):
            assert error is None or isinstance(error, CommitUnresolvedError), (
                f"forget_proofs removed the proof of {committables[0].branch_id}, and may remove "
                f"only those of the owner's batches below 2 ({error!r})"
            )

    # -- what the world and the sink claim ---------------------------------------------------------

    def test_one_branch_a_batch_is_true(self, stage: Stage, sink: AnySink) -> None:
        """If the target takes two branches of a batch, a false claim would skip tests."""
        if not stage.world.one_branch_a_batch:
            pytest.skip("the world does not claim it")
        for n, rows in enumerate((A, B)):
            verbs.commit_many(sink, stage.prepare(sink, branch(n), rows))
        assert stage.count() < A.num_rows + B.num_rows, (
            "readers get the rows of two branches of one batch: set one_branch_a_batch=False, so "
            "that more tests run"
        )

    def test_reads_in_order_is_true(self, stage: Stage, sink: AnySink) -> None:
        """If readers get rows behind an open branch, a false claim would skip checks."""
        if not stage.world.reads_in_order:
            pytest.skip("the world does not claim it")
        handle = stage.write(sink, branch(0, batch_id=0), A)
        sink.idle(handle)
        other = stage.sink()
        is_held_back = False
        for n in range(1, 20):  # each may go into another partition than the open one
            stage.commit(other, stage.prepare(other, branch(n, batch_id=n), A))
            if is_held_back := stage.count() < n * A.num_rows:
                break
        sink.discard(handle)
        assert is_held_back, (
            "readers get every row that is committed behind an open branch: set "
            "reads_in_order=False, so that more is checked"
        )

    def test_batch_is_taken_back(self, stage: Stage, sink: AnySink) -> None:
        """Its rows go, and no others; a late commit of a paused driver does not show them again."""
        if not isinstance(sink, TakesBack):
            pytest.skip("the sink takes no rows back: it has no take_back")
        other = APART["query"]["owner"]
        ids = [branch(1, batch_id=1), branch(2, batch_id=2), branch(3, batch_id=2, owner=other)]
        prepared = [stage.prepare(sink, branch_id, A) for branch_id in ids]
        for committables in prepared:
            stage.commit(sink, committables)
        taken = [Delivered(c, A.num_rows) for c in prepared[1]]
        fresh: Any = stage.sink()
        try:
            found = fresh.find_delivered(taken)
        except TakeBackRefusedError as refusal:
            stage.sees(A, A, A)
            pytest.skip(f"the sink refuses to take rows back: {shortened(refusal)}")
        assert sum(visible.rows for visible in found) == A.num_rows, (
            f"find_delivered returned {found} for a branch of {A.num_rows} rows"
        )
        changed = [delivered._replace(rows=A.num_rows + 1) for delivered in taken]
        with suppress(TakeBackRefusedError):
            fresh.take_back(changed)
            raise AssertionError(
                "take_back removed a branch that has one row less than the log knows of: somebody "
                "has changed it, so raise TakeBackRefusedError"
            )
        stage.sees(A, A, A, why="take_back refused a branch with other rows than the log has; ")
        for each in (fresh, sink):
            each.take_back(taken)
            stage.sees(A, A, why="batch 2 was taken back; ")
        assert not any(visible.rows for visible in fresh.find_delivered(taken)), (
            "find_delivered finds rows of a branch that was taken back"
        )
        verbs.commit_many(sink, prepared[1])
        stage.sees(A, A, why="commit of a branch that was taken back was called late; ")

    def test_lists_uncommitted_only_is_true(self, stage: Stage, sink: AnySink) -> None:
        """A sweep commits again what such a sink lists of a complete batch."""
        if not verbs.lists_uncommitted_only(sink):
            pytest.skip("the sink does not claim it")
        committables = stage.prepare(sink, BRANCH, A)
        stage.commit(sink, committables)
        listed = {found.branch_id for found in stage.found(sink)}
        assert not listed & {c.branch_id for c in committables}, (
            "find_branches lists a committed branch: set lists_uncommitted_only = False"
        )
