"""A part of `SinkContract`: each verb in and out of order, twice, aborted, and failing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Barrier
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from sparkonce.errors import (
    CommitUnresolvedError,
    PreparedBranchLostError,
    ProtocolError,
    SparkOnceError,
)
from sparkonce.model import Committable
from sparkonce.sinks import verbs
from sparkonce.sinks.base import AnySink
from sparkonce.testing.sink_world import SCHEMA, SinkWorld, Stage, branch, rows_of

if TYPE_CHECKING:
    import pyarrow as pa

A, B, C = rows_of(range(3)), rows_of(range(3, 8)), rows_of(range(8, 10))
BRANCH = branch(1)


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """Make the calls at the same time, each in a thread; what they return."""
    gate = Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        gate.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [done.result() for done in [pool.submit(run, call) for call in calls]]


def needs_many_branches(stage: Stage) -> None:
    if stage.world.one_branch_a_batch:
        pytest.skip("the target takes one branch of each batch, in their order")


class SinkVerbs:
    """What `SinkContract` inherits; see there."""

    large_rows: ClassVar[int] = 50_000
    parallel: ClassVar[int] = 4
    most_kills: ClassVar[int] = 12
    stands_s: ClassVar[float] = 1.0

    @pytest.fixture
    def make_world(self) -> Callable[[pa.Schema], SinkWorld]:
        """Override it: a function from a schema to the `SinkWorld` of an empty target for it."""
        pytest.fail(f"{type(self).__name__}: give the fixture make_world (see SinkContract)")

    @pytest.fixture
    def stage(self, make_world: Callable[[pa.Schema], SinkWorld]) -> Iterator[Stage]:
        stage = Stage(make_world(SCHEMA))
        yield stage
        stage.close()

    @pytest.fixture
    def sink(self, stage: Stage) -> AnySink:
        return stage.sink()

    # -- the verbs in order ----------------------------------------------------------------------

    def test_rows_become_visible_by_commit_and_not_before(
        self, stage: Stage, sink: AnySink
    ) -> None:
        """Nothing to see after begin, write and preCommit; everything after commit."""
        handle = stage.write(sink, BRANCH, A)
        stage.sees()
        sink.write(handle, stage.world.shaped(B))
        stage.sees()
        task = sink.preCommit(handle)
        stage.sees()
        committables = stage.vote(sink, task)
        stage.something_stands()
        stage.sees()
        stage.commit(sink, committables)
        stage.sees(A, B)

    def test_nothing_is_left_after_a_commit(self, stage: Stage, sink: AnySink) -> None:
        """After commit and the sweep that follows it, nothing is open, prepared or staged."""
        stage.commit(sink, stage.prepare(sink, BRANCH, A))
        stage.sweep(sink)
        stage.nothing_stands()
        stage.sees(A)

    def test_equal_rows_are_all_kept(self, stage: Stage, sink: AnySink) -> None:
        """A sink drops no row because it has one like it."""
        attempts = (1,) if stage.world.one_branch_a_batch else (1, 2)
        tasks = [stage.task(sink, branch(n), A, A) for n in attempts]
        stage.commit(sink, stage.vote(sink, *tasks))
        stage.sees(*[A, A] * len(attempts))

    def test_one_batch_after_the_other(self, stage: Stage, sink: AnySink) -> None:
        """Each commit adds its own batch and leaves those before it alone."""
        for batch_id, rows in enumerate((A, B, C)):
            stage.commit(sink, stage.prepare(sink, branch(batch_id, batch_id=batch_id), rows))
            stage.sweep(sink)
        stage.sees(A, B, C)
        stage.nothing_stands()

    def test_commits_come_in_another_order_than_prepares(self, stage: Stage, sink: AnySink) -> None:
        """A later branch is committed first; each commit shows its own rows only."""
        needs_many_branches(stage)
        first = stage.prepare(sink, branch(1, batch_id=1), A)
        second = stage.prepare(sink, branch(2, batch_id=2), B)
        stage.commit(sink, second)
        stage.sees_beside_open(B)
        stage.commit(sink, first)
        stage.sees(A, B)

    # -- idempotence -----------------------------------------------------------------------------

    def test_commit_twice(self, stage: Stage, sink: AnySink) -> None:
        """The second commit succeeds and changes nothing (I4)."""
        committables = stage.prepare(sink, BRANCH, A)
        stage.commit(sink, committables)
        stage.sees(A)
        for _ in range(2):
            try:
                stage.commit(sink, committables)
            except SparkOnceError as error:
                raise AssertionError(
                    "a commit that is repeated must change nothing and return: look for the proof "
                    f"of the first one before anything else ({type(error).__name__}: {error})"
                ) from error
            stage.sees(A)

    def test_commit_by_another_object(self, stage: Stage, sink: AnySink) -> None:
        """A sink that has just been made commits what another one prepared; both may."""
        committables = stage.prepare(sink, BRANCH, A)
        sink.close()
        stage.commit(stage.sink(), committables)
        stage.commit(stage.sink(), committables)
        stage.sees(A)

    def test_commit_by_two_at_the_same_time(self, stage: Stage, sink: AnySink) -> None:
        """A paused driver and its successor commit one branch at once: its rows come once."""
        committables = stage.prepare(sink, BRANCH, A)
        both = (sink, stage.sink())
        at_once([partial(stage.commit, each, committables) for each in both])
        stage.sees(A)

    def test_commit_after_its_left_overs_were_swept(self, stage: Stage, sink: AnySink) -> None:
        """A paused driver commits again after its successor has completed: no rows twice."""
        committables = stage.prepare(sink, BRANCH, A)
        stage.commit(sink, committables)
        stage.sweep(sink)
        late = stage.sink()
        # It may succeed or fail: only what readers see counts, since the log refuses this driver.
        verbs.commit_many(late, committables)
        stage.sees(A)

    def test_validate_twice(self, stage: Stage, sink: AnySink) -> None:
        """Each start validates again, also beside a branch that is prepared."""
        committables = stage.prepare(sink, BRANCH, A)
        successor = stage.sink()
        stage.commit(successor, committables)
        stage.sees(A)

    # -- abort at each stage ---------------------------------------------------------------------

    def test_abort_of_what_never_began(self, stage: Stage, sink: AnySink) -> None:
        """Nothing to do is no error, and keeps nobody from the name later."""
        sink.abort(stage.named(sink, BRANCH))
        stage.commit(sink, stage.prepare(sink, branch(2), A))
        stage.sees(A)

    def test_discard_of_a_branch_without_rows(self, stage: Stage, sink: AnySink) -> None:
        """A task that fails before its first write leaves nothing."""
        sink.discard(stage.write(sink, BRANCH))
        stage.sweep(sink)
        stage.sees()
        stage.nothing_stands()

    def test_discard_of_an_open_branch(self, stage: Stage, sink: AnySink) -> None:
        """A task that fails between its writes leaves nothing."""
        sink.discard(stage.write(sink, BRANCH, A))
        stage.sweep(sink)
        stage.sees()
        stage.nothing_stands()

    def test_abort_of_a_prepared_task(self, stage: Stage, sink: AnySink) -> None:
        """What a task prepared and no batch took goes without a trace (I7)."""
        sink.abort(stage.task(sink, BRANCH, A))
        stage.sees()
        stage.nothing_stands()

    def test_abort_of_a_prepared_batch(self, stage: Stage, sink: AnySink) -> None:
        """What is prepared goes without a trace, by the committable alone (I7, I8)."""
        stage.abort(stage.sink(), stage.prepare(sink, BRANCH, A))
        stage.sees()
        stage.nothing_stands()

    def test_abort_by_the_branch_id(self, stage: Stage, sink: AnySink) -> None:
        """The same where only the branch's name is known."""
        for committable in stage.prepare(sink, BRANCH, A):
            sink.abort(committable.branch_id)
        stage.sweep(sink)
        stage.sees()
        stage.nothing_stands()

    def test_abort_twice(self, stage: Stage, sink: AnySink) -> None:
        """The second abort succeeds and changes nothing."""
        committables = stage.prepare(sink, BRANCH, A)
        for _ in range(2):
            stage.abort(sink, committables)
        stage.sees()
        stage.nothing_stands()

    @pytest.mark.parametrize("end", ["abort", "abort_many", "discard"])
    @pytest.mark.parametrize(("kept", "gone"), [(1, 12), (12, 1)])
    def test_end_of_a_branch_leaves_others_alone(
        self, stage: Stage, sink: AnySink, end: str, kept: int, gone: int
    ) -> None:
        """One branch ends while another one is prepared; that one is committed whole."""
        committables = stage.prepare(sink, branch(kept, batch_id=kept), A)
        other, ended = stage.sink(), branch(gone, batch_id=gone)
        if end == "discard":
            other.discard(stage.write(other, ended, B))
        elif end == "abort":
            stage.abort(other, stage.prepare(other, ended, B))
        else:
            orphans = stage.prepare(other, ended, B)
            assert list(verbs.abort_many(other, orphans)) == [None] * len(orphans)
        stage.commit(sink, committables)
        stage.sees(A)

    def test_abort_never_undoes_a_commit(self, stage: Stage, sink: AnySink) -> None:
        """After a commit, abort frees what is left over, and readers keep every row (I1)."""
        committables = stage.prepare(sink, BRANCH, A)
        stage.commit(sink, committables)
        stage.abort(sink, committables)
        stage.abort(stage.sink(), committables)
        self._is_not_lost(stage.sink(), committables)
        stage.sees(A)

    def test_abort_by_the_branch_id_never_undoes_a_commit(
        self, stage: Stage, sink: AnySink
    ) -> None:
        """The same where only the branch's name is known."""
        committables = stage.prepare(sink, BRANCH, A)
        stage.commit(sink, committables)
        for committable in committables:
            sink.abort(committable.branch_id)
        self._is_not_lost(sink, committables)
        stage.sees(A)

    def test_replay_of_an_aborted_batch(self, stage: Stage, sink: AnySink) -> None:
        """A batch is aborted and written again by the next incarnation: its rows come once."""
        stage.abort(sink, stage.prepare(sink, BRANCH, A))
        replay = stage.prepare(stage.sink(), replace(BRANCH, token=4), A)
        stage.commit(sink, replay)
        stage.sees(A)
        stage.nothing_left_by_sweep(sink)

    # -- verbs out of order ----------------------------------------------------------------------

    def test_commit_after_abort(self, stage: Stage, sink: AnySink) -> None:
        """It raises, and shows nothing: success would be a lie."""
        committables = stage.prepare(sink, BRANCH, A)
        stage.abort(sink, committables)
        for error in verbs.commit_many(sink, committables):
            assert isinstance(error, SparkOnceError), (
                "commit of an aborted branch returned as if it had succeeded: where nothing is "
                "prepared and nothing proves an earlier commit, raise PreparedBranchLostError"
            )
        stage.sees()

    def test_commit_before_precommit(self, stage: Stage, sink: AnySink) -> None:
        """A handle or a branch id is no committable: ProtocolError says what to call first."""
        handle: Any = stage.write(sink, BRANCH, A)
        wrongs: list[Any] = [handle, stage.named(sink, BRANCH), None]
        for wrong in wrongs:
            with pytest.raises(ProtocolError, match="preCommit"):
                sink.commit(wrong)
        sink.discard(handle)
        stage.sees()

    def test_discard_after_the_sweep(self, stage: Stage, sink: AnySink) -> None:
        """A zombie task frees a branch that was aborted under it: no error, nothing left."""
        handle = stage.write(sink, BRANCH, A)
        sink.abort(stage.named(sink, BRANCH))
        sink.discard(handle)
        stage.sweep(sink)
        stage.sees()
        stage.nothing_stands()

    # -- what the world can do ---------------------------------------------------------------------

    def test_lost_branch_is_told(self, stage: Stage, sink: AnySink) -> None:
        """A prepared branch that somebody destroyed is lost, and never called committed."""
        lose = stage.world.lose
        if lose is None:
            pytest.skip("the world gives no lose=")
        committables = stage.prepare(sink, BRANCH, A)
        for committable in committables:
            lose(committable)
        with pytest.raises(PreparedBranchLostError):
            stage.commit(stage.sink(), committables)
        stage.sees()

    def test_answer_to_a_commit_is_lost(self, stage: Stage, sink: AnySink) -> None:
        """The commit has landed and says that it does not know; asked again, it proves it."""
        lost_answer = stage.world.lost_answer
        if lost_answer is None:
            pytest.skip("the world gives no lost_answer=")
        committables = stage.prepare(sink, BRANCH, A)
        with lost_answer() as lost:
            outcomes = verbs.commit_many(sink, committables)
        assert lost or any(outcomes), (
            "no answer was lost: world.lost_answer() must lose those to the client of commit"
        )
        assert all(e is None or isinstance(e, CommitUnresolvedError) for e in outcomes), outcomes
        stage.sees(A)
        stage.commit(sink, committables)
        stage.sees(A)

    def test_target_that_is_away(self, stage: Stage, sink: AnySink) -> None:
        """What is prepared stays so; what cannot be prepared says it; no outcome is made up."""
        away = stage.world.away
        if away is None:
            pytest.skip("the world gives no away=")
        decided, gone = (stage.prepare(sink, branch(n, batch_id=n), A) for n in (1, 2))
        sink.close()
        late: list[Committable] = []
        with away():
            with suppress(Exception):
                late = stage.prepare(sink, branch(3, batch_id=3), B)
            for error in verbs.commit_many(sink, decided):
                assert isinstance(error, CommitUnresolvedError), (
                    f"commit said {error!r} while the target was away: whether it has the rows is "
                    "not known, so raise CommitUnresolvedError, or let the client's error pass"
                )
            with suppress(Exception):  # then it is aborted again
                stage.abort(sink, gone)
        sink.close()
        stage.commit(sink, decided)
        stage.commit(sink, late)
        stage.abort(sink, gone)
        stage.sees(A, *([B] if late else ()))
        stage.nothing_left_by_sweep(sink)

    @staticmethod
    def _is_not_lost(sink: AnySink, committables: Sequence[Committable]) -> None:
        """That what was committed is still committed, or not known."""
        for error in verbs.commit_many(sink, committables):
            assert error is None or isinstance(error, CommitUnresolvedError), (
                "a branch that was committed, and then aborted, is not lost, and its rows must not "
                f"be written again: abort has to leave the proof alone ({error!r})"
            )
