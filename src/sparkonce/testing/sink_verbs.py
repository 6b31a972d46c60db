"""A part of `SinkContract`: each verb in order, twice, and aborted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

from sparkonce.errors import CommitUnresolvedError
from sparkonce.model import Committable
from sparkonce.sinks import verbs
from sparkonce.sinks.base import AnySink
from sparkonce.testing.sink_case import (
    BRANCH,
    A,
    B,
    C,
    SinkCase,
    at_the_same_time,
    must_return,
    needs_many_branches,
)
from sparkonce.testing.sink_world import GUIDE, Stage, branch


class SinkVerbs(SinkCase):
    """What `SinkContract` inherits; see there."""

    # -- the verbs in order ------------------------------------------------------------------------

    def test_rows_become_visible_by_commit_and_not_before(
        self, stage: Stage, sink: AnySink
    ) -> None:
        """Readers see nothing after begin, write and preCommit, and everything after commit."""
        early = "before commit nothing may be visible, and it is after"
        handle = stage.write(sink, BRANCH, A)
        stage.sees(why=f"{early} beginTransaction and write; ")
        sink.write(handle, stage.world.selected(B))
        stage.sees(why=f"{early} the second write; ")
        task = sink.preCommit(handle)
        stage.sees(why=f"{early} preCommit; ")
        committables = stage.vote(sink, task)
        stage.something_unfinished()
        stage.sees(why=f"{early} vote; ")
        stage.commit(sink, committables)
        stage.sees(A, B, why="commit returned, so all rows must be visible; ")

    def test_nothing_is_left_after_a_commit(self, stage: Stage, sink: AnySink) -> None:
        """After commit and the next sweep, nothing is open, prepared or staged."""
        stage.commit(sink, stage.prepare(sink, BRANCH, A))
        stage.sweep(sink)
        stage.nothing_unfinished()
        stage.sees(A)

    def test_equal_rows_are_all_kept(self, stage: Stage, sink: AnySink) -> None:
        """A sink never drops a row because it is equal to another one."""
        attempts = (1,) if stage.world.one_branch_a_batch else (1, 2)
        tasks = [stage.task(sink, branch(n), A, A) for n in attempts]
        stage.commit(sink, stage.vote(sink, *tasks))
        stage.sees(*[A, A] * len(attempts))

    def test_one_batch_after_the_other(self, stage: Stage, sink: AnySink) -> None:
        """Each commit adds its own batch and leaves earlier ones unchanged."""
        for batch_id, rows in enumerate((A, B, C)):
            stage.commit(sink, stage.prepare(sink, branch(batch_id, batch_id=batch_id), rows))
            stage.sweep(sink)
        stage.sees(A, B, C)
        stage.nothing_unfinished()

    def test_commits_come_in_another_order_than_prepares(self, stage: Stage, sink: AnySink) -> None:
        """A later branch is committed first; each commit shows only its own rows."""
        needs_many_branches(stage)
        first = stage.prepare(sink, branch(1, batch_id=1), A)
        second = stage.prepare(sink, branch(2, batch_id=2), B)
        stage.commit(sink, second)
        stage.sees_beside_open(B)
        stage.commit(sink, first)
        stage.sees(A, B)

    # -- idempotence -------------------------------------------------------------------------------

    def test_commit_twice(self, stage: Stage, sink: AnySink) -> None:
        """The second commit succeeds and changes nothing (I4)."""
        committables = stage.prepare(sink, BRANCH, A)
        stage.commit(sink, committables)
        stage.sees(A)
        for _ in range(2):
            with must_return(
                "a repeated commit must change nothing and return: look for the proof of the first "
                "one before anything else"
            ):
                stage.commit(sink, committables)
            stage.sees(A)

    def test_commit_by_another_object(self, stage: Stage, sink: AnySink) -> None:
        """A new sink object commits, more than once, a branch that another object prepared."""
        committables = stage.prepare(sink, BRANCH, A)
        sink.close()
        stage.commit(stage.sink(), committables)
        stage.commit(stage.sink(), committables)
        stage.sees(A)

    def test_commit_by_two_at_the_same_time(self, stage: Stage, sink: AnySink) -> None:
        """A paused driver and its successor commit a branch at once: its rows appear once."""
        committables = stage.prepare(sink, BRANCH, A)
        both = (sink, stage.sink())
        at_the_same_time([partial(stage.commit, each, committables) for each in both])
        stage.sees(A)

    def test_commit_after_its_left_overs_were_swept(self, stage: Stage, sink: AnySink) -> None:
        """A paused driver commits again after its successor has completed: no row appears twice."""
        committables = stage.prepare(sink, BRANCH, A)
        stage.commit(sink, committables)
        stage.sweep(sink)
        late = stage.sink()
        # It may succeed or fail: only what readers see counts, since the log refuses this driver.
        verbs.commit_many(late, committables)
        stage.sees(A)

    def test_validate_twice(self, stage: Stage, sink: AnySink) -> None:
        """Each start validates again, even while a branch is prepared."""
        committables = stage.prepare(sink, BRANCH, A)
        successor = stage.sink()
        stage.commit(successor, committables)
        stage.sees(A)

    # -- abort at each stage -----------------------------------------------------------------------

    def test_abort_of_what_never_began(self, stage: Stage, sink: AnySink) -> None:
        """Abort of an unknown branch is no error, and its name stays usable."""
        with must_return("abort of a branch that never began must change nothing and return"):
            sink.abort(stage.named(sink, BRANCH))
        stage.commit(sink, stage.prepare(sink, branch(2), A))
        stage.sees(A)

    def test_discard_of_a_branch_without_rows(self, stage: Stage, sink: AnySink) -> None:
        """A task that fails before its first write leaves nothing."""
        handle = stage.write(sink, BRANCH)
        with must_return("discard must return, also before the first write"):
            sink.discard(handle)
        stage.sweep(sink)
        stage.sees()
        stage.nothing_unfinished()

    def test_discard_of_an_open_branch(self, stage: Stage, sink: AnySink) -> None:
        """A task that fails between its writes leaves nothing."""
        handle = stage.write(sink, BRANCH, A)
        with must_return("discard must return, also between two writes"):
            sink.discard(handle)
        stage.sweep(sink)
        stage.sees()
        stage.nothing_unfinished()

    def test_abort_of_a_prepared_task(self, stage: Stage, sink: AnySink) -> None:
        """A prepared branch that no batch uses leaves no trace (I7)."""
        sink.abort(stage.task(sink, BRANCH, A))
        stage.sees(why="abort of a prepared branch returned, but its rows are visible; ")
        stage.nothing_unfinished(why="abort of a prepared branch returned, but ")

    def test_abort_of_a_prepared_batch(self, stage: Stage, sink: AnySink) -> None:
        """A prepared branch leaves no trace; the committable is all that abort needs (I7, I8)."""
        stage.abort(stage.sink(), stage.prepare(sink, BRANCH, A))
        stage.sees()
        stage.nothing_unfinished()

    def test_abort_by_the_branch_id(self, stage: Stage, sink: AnySink) -> None:
        """The branch's name is enough to abort it."""
        for committable in stage.prepare(sink, BRANCH, A):
            sink.abort(committable.branch_id)
        stage.sweep(sink)
        stage.sees()
        stage.nothing_unfinished()

    def test_abort_twice(self, stage: Stage, sink: AnySink) -> None:
        """The second abort succeeds and changes nothing."""
        committables = stage.prepare(sink, BRANCH, A)
        stage.abort(sink, committables)
        with must_return("a repeated abort must change nothing and return"):
            stage.abort(sink, committables)
        stage.sees()
        stage.nothing_unfinished()

    @pytest.mark.parametrize("end", ["abort", "abort_many", "discard"])
    @pytest.mark.parametrize(("kept", "gone"), [(1, 12), (12, 1)])
    def test_end_of_a_branch_leaves_others_alone(
        self, stage: Stage, sink: AnySink, end: str, kept: int, gone: int
    ) -> None:
        """One branch is aborted while another is prepared; all rows of the other one appear."""
        committables = stage.prepare(sink, branch(kept, batch_id=kept), A)
        other, ended = stage.sink(), branch(gone, batch_id=gone)
        if end == "discard":
            other.discard(stage.write(other, ended, B))
        elif end == "abort":
            stage.abort(other, stage.prepare(other, ended, B))
        else:
            orphans = stage.prepare(other, ended, B)
            outcomes = list(verbs.abort_many(other, orphans))
            assert outcomes == [None] * len(orphans), (
                f"abort_many returned {outcomes} for {len(orphans)} branches that it could abort: "
                "it must return None for each"
            )
        stage.commit(sink, committables)
        stage.sees(A)

    def test_abort_never_undoes_a_commit(self, stage: Stage, sink: AnySink) -> None:
        """Abort after a commit only frees resources; readers keep every row (I1)."""
        committables = stage.prepare(sink, BRANCH, A)
        stage.commit(sink, committables)
        for each in (sink, stage.sink()):
            stage.abort(each, committables)
            stage.sees(A, why="abort of a committed branch may only free what is left over; ")
        self._is_not_lost(stage.sink(), committables)
        stage.sees(A, why="commit was repeated after abort of a committed branch; ")

    def test_abort_by_the_branch_id_never_undoes_a_commit(
        self, stage: Stage, sink: AnySink
    ) -> None:
        """Readers keep every row, even if the driver knows only the branch's name."""
        committables = stage.prepare(sink, BRANCH, A)
        stage.commit(sink, committables)
        for committable in committables:
            sink.abort(committable.branch_id)
        self._is_not_lost(sink, committables)
        stage.sees(A)

    def test_replay_of_an_aborted_batch(self, stage: Stage, sink: AnySink) -> None:
        """The next incarnation writes an aborted batch again: its rows appear once."""
        stage.abort(sink, stage.prepare(sink, BRANCH, A))
        replay = stage.prepare(stage.sink(), replace(BRANCH, token=4), A)
        stage.commit(sink, replay)
        stage.sees(A)
        stage.nothing_left_by_sweep(sink)

    @staticmethod
    def _is_not_lost(sink: AnySink, committables: Sequence[Committable]) -> None:
        """Assert that the committed branches still count as committed, or as unresolved."""
        for error in verbs.commit_many(sink, committables):
            assert error is None or isinstance(error, CommitUnresolvedError), (
                "a branch that was committed and then aborted is not lost, and rewriting it would "
                f"duplicate its rows: abort must not remove the proof ({error!r}; see "
                f"{GUIDE}#checklist)"
            )
