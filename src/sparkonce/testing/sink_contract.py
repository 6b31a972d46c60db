"""What every sink has to hold, as tests that a sink's own test file inherits.

    class TestMySink(SinkContract):
        @pytest.fixture
        def make_world(self, tmp_path):
            def make(schema):                        # makes an empty target for rows of this schema
                return SinkWorld(sink=…, visible=…, standing=…)
            return make

After each verb the target is looked at from outside. Each docstring is what the sink has to do; a
test that needs what a sink or its world does not offer is skipped, with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain, product
from typing import TYPE_CHECKING, Any

import pytest

from sparkonce.errors import (
    CommitUnresolvedError,
    SparkOnceError,
)
from sparkonce.model import Committable, Owner
from sparkonce.sinks import verbs
from sparkonce.sinks.base import AnySink
from sparkonce.testing.commit_lines import chosen
from sparkonce.testing.sink_process import (
    commit_behind_another,
    in_other_process,
    lines_of_commit,
)
from sparkonce.testing.sink_rows import SinkRows
from sparkonce.testing.sink_verbs import BRANCH, A, B, C, at_once, needs_many_branches
from sparkonce.testing.sink_world import OWNER, Stage, branch, lists_branches, rows_of

if TYPE_CHECKING:
    import pyarrow as pa

_HUNDRED_YEARS_S = 100 * 366 * 24 * 3600
_TRIES = 5
"""How often a commit may run fewer lines than the one before, and so miss its line."""

APART: Mapping[str, Mapping[str, Any]] = {
    "batch": {"batch_id": 12},
    "token": {"token": 30},
    "pass": {"write_pass": 1},
    "log": {"owner": Owner("f" * 16, OWNER.query_id)},
    "query": {"owner": Owner(OWNER.log_id, OWNER.query_id + "0")},
}
"""What differs in a branch that is another one than `BRANCH`. Two that differ in the attempt alone
are of one batch: `SinkVerbs.test_equal_rows_are_all_kept`."""


BESIDE: Mapping[str, Mapping[str, Any]] = {
    "token": {"token": 30},
    "pass": {"write_pass": 10},
    "sink": {},
    "log": {"owner": Owner("f" * 16, OWNER.query_id)},
    "query": {"owner": Owner(OWNER.log_id, OWNER.query_id + "0")},
}
"""What differs in a branch of the same batch that is prepared beside `BRANCH`."""


class SinkContract(SinkRows):
    """Subclass it in a test file and give the fixture `make_world`.

    Attributes:
        large_rows: in the largest branch.
        parallel: how many branches are written at once.
        most_kills: at how many lines of `commit` a process is killed, or stands still.
        stands_s: how long it stands there for another commit, which may have to wait for it.
    """

    # -- attempts, passes and tokens ---------------------------------------------------------------

    @pytest.mark.parametrize(("lost", "won"), [(1, 12), (12, 1)])
    def test_two_attempts_of_one_task(
        self, stage: Stage, sink: AnySink, lost: int, won: int
    ) -> None:
        """Both prepare, one is decided: its rows come once, and the loser's go."""
        loser = stage.task(sink, branch(lost), A)
        winner = stage.task(stage.sink(), branch(won), A)
        stage.commit(sink, stage.vote(sink, winner))
        stage.sees_beside_open(A)
        sink.abort(loser)
        stage.sweep(sink)
        stage.sees(A)
        stage.nothing_stands()

    def test_attempt_that_prepares_after_the_commit(self, stage: Stage, sink: AnySink) -> None:
        """A speculative attempt that comes late is an orphan, and harms nothing."""
        late = stage.sink()
        handle = stage.write(late, branch(2), A)
        stage.commit(sink, stage.prepare(sink, branch(1), A))
        orphan = late.preCommit(handle)
        stage.sees_beside_open(A)
        sink.abort(orphan)
        stage.sees(A)
        stage.nothing_left_by_sweep(sink)

    def test_older_token_never_hits_a_younger_branch(self, stage: Stage, sink: AnySink) -> None:
        """Abort by the older name leaves the younger branch prepared, and the reverse (I6)."""
        older = stage.prepare(sink, BRANCH, A)
        younger = stage.prepare(stage.sink(), replace(BRANCH, token=30), B)
        stage.abort(sink, older)
        for committable in older:
            sink.abort(committable.branch_id)
        stage.commit(sink, younger)
        stage.sees(B)

    def test_rewrite_has_a_name_of_its_own(self, stage: Stage, sink: AnySink) -> None:
        """The branch of pass 1 is another one than that of pass 0 with the same numbers."""
        first = stage.prepare(sink, BRANCH, A)
        rewrite = stage.prepare(sink, replace(BRANCH, write_pass=1), A)
        stage.abort(sink, first)
        stage.commit(sink, rewrite)
        stage.sees(A)

    @pytest.mark.parametrize("part", APART)
    def test_branches_one_part_apart(self, stage: Stage, sink: AnySink, part: str) -> None:
        """Neither the rows nor the proof of a branch stand for another one, whatever differs."""
        if part in {"token", "pass"}:
            needs_many_branches(stage)
        stage.commit(sink, stage.prepare(sink, BRANCH, A))
        stage.sweep(sink)
        stage.commit(sink, stage.prepare(sink, replace(BRANCH, **APART[part]), B))
        stage.sees(A, B)

    @pytest.mark.parametrize("part", BESIDE)
    def test_branches_side_by_side(self, stage: Stage, part: str) -> None:
        """Of two that are prepared and one part apart, each ends alone, and is listed as it is."""
        needs_many_branches(stage)
        sinks = stage.sink(), stage.sink("other" if part == "sink" else None)
        seen: list[pa.RecordBatch] = []
        for n, (end, first) in enumerate(product(("commit", "abort"), (0, 1))):
            ours = replace(BRANCH, batch_id=n)
            tasks = [
                stage.task(sinks[0], ours, A),
                stage.task(sinks[1], replace(ours, **BESIDE[part]), B),
            ]
            prepared = [stage.vote(sink, task) for sink, task in zip(sinks, tasks, strict=True)]
            made = {c.branch_id.name for c in (*tasks, *chain(*prepared))}
            for sink, task in zip(sinks, tasks, strict=True):
                found = {c.branch_id.name for c in verbs.find_branches(sink, task.branch_id.owner)}
                assert found <= made, f"find_branches lists {found - made}, which nobody made"
            if end == "abort":
                stage.abort(sinks[first], prepared[first])
            else:
                stage.commit(sinks[first], prepared[first])
                seen.append((A, B)[first])
                stage.sees_beside_open(*seen)
            stage.commit(sinks[1 - first], prepared[1 - first])
            seen.append((A, B)[1 - first])
            stage.sees(*seen)
            for sink, task in zip(sinks, tasks, strict=True):
                stage.sweep(sink, task.branch_id.owner)

    def test_long_names(self, stage: Stage) -> None:
        """After years the numbers of a branch are long: two that differ in the last digit."""
        sink = stage.sink("s" * 32)
        long = branch(81_920, token=100_000, write_pass=10, batch_id=1_000_000_001)
        stage.commit(sink, stage.prepare(sink, long, A))
        stage.sweep(sink)
        stage.commit(sink, stage.prepare(sink, replace(long, batch_id=1_000_000_002), B))
        if lists_branches(sink):
            stage.task(sink, replace(long, batch_id=1_000_000_003), A)
        stage.nothing_left_by_sweep(sink)
        stage.sees(A, B)

    # -- commits again -----------------------------------------------------------------------------

    def test_commits_are_repeated_in_another_order(self, stage: Stage, sink: AnySink) -> None:
        """A driver that died before it could say so commits all again; one that stood still, too.

        Each branch has a proof of its own, whichever was committed last.
        """
        older = stage.prepare(sink, branch(3, batch_id=1), C)
        stage.commit(sink, older)
        attempts = (1,) if stage.world.one_branch_a_batch else (1, 2)
        batch = stage.vote(sink, *[stage.task(sink, branch(n, batch_id=2), A) for n in attempts])
        stage.commit(sink, batch)
        for again in (batch, batch[::-1], *([committable] for committable in batch)):
            stage.commit_all(stage.sink(), again)
            stage.sees(C, *[A] * len(attempts))
        # It may succeed or fail: only what readers see counts, since the log refuses this driver.
        verbs.commit_many(stage.sink(), older)
        stage.sees(C, *[A] * len(attempts))

    def test_amended_batch(self, stage: Stage, sink: AnySink) -> None:
        """What is lost of a batch is written again, and committed with all that was committed."""
        needs_many_branches(stage)
        parts = {1: A, 2: B}
        tasks = [stage.task(sink, branch(attempt), rows) for attempt, rows in parts.items()]
        *left, gone = stage.vote(sink, *tasks)
        sink.abort(gone)
        verbs.commit_many(sink, [*left, gone])
        stage.commit_all(sink, left)
        lost = parts.keys() - {committable.branch_id.attempt for committable in left}
        again = stage.prepare(sink, branch(3, write_pass=1), *(parts[n] for n in sorted(lost)))
        stage.commit(stage.sink(), [*left, *again])
        stage.sees(A, B)

    # -- other processes ---------------------------------------------------------------------------

    def test_sink_travels_to_the_executors(self, stage: Stage, sink: AnySink) -> None:
        """It pickles after `validate`, and what is written there is committed here."""
        from sparkonce.spark_hooks.batch import check_pickles  # noqa: PLC0415 - imports Spark

        check_pickles(sink)
        task = self._elsewhere(stage, sink, "task", stage.named(sink, BRANCH), A)
        stage.sees()
        stage.commit(sink, stage.vote(sink, *task))
        stage.sees(A)

    def test_sink_travels_after_a_commit(self, stage: Stage, sink: AnySink) -> None:
        """What a commit or a sweep opened keeps it from no executor of the next batch."""
        from sparkonce.spark_hooks.batch import check_pickles  # noqa: PLC0415 - imports Spark

        stage.commit(sink, stage.prepare(sink, branch(1, batch_id=1), A))
        stage.sweep(sink)
        check_pickles(sink)
        task = self._elsewhere(stage, sink, "task", stage.named(sink, branch(2, batch_id=2)), B)
        stage.commit(sink, stage.vote(sink, *task))
        stage.sees(A, B)

    def test_process_killed_after_precommit(self, stage: Stage, sink: AnySink) -> None:
        """What it prepared outlives it, and is committed from here."""
        task = self._elsewhere(stage, sink, "task", stage.named(sink, BRANCH), A, is_killed=True)
        stage.sees()
        stage.commit(sink, stage.vote(sink, *task))
        stage.sees(A)

    def test_process_killed_while_it_writes(self, stage: Stage, sink: AnySink) -> None:
        """Nothing of it is ever visible; a sweep ends what it left open."""
        self._elsewhere(stage, sink, "write", stage.named(sink, BRANCH), A, is_killed=True)
        stage.sees()
        stage.commit(sink, stage.prepare(sink, branch(2), B))
        stage.nothing_left_by_sweep(sink)
        stage.sees(B)

    def test_other_process_commits(self, stage: Stage, sink: AnySink) -> None:
        """The next driver commits what this one prepared, while this one is still there."""
        committables = stage.prepare(sink, BRANCH, A)
        sink.close()  # a driver that died holds no connection
        self._elsewhere(stage, sink, "commit", *committables)
        stage.sees(A)
        stage.commit(stage.sink(), committables)
        stage.sees(A)

    def test_process_killed_after_commit(self, stage: Stage, sink: AnySink) -> None:
        """A process dies before it can tell of its commit; the next one commits again."""
        committables = stage.prepare(sink, BRANCH, A)
        sink.close()
        self._elsewhere(stage, sink, "commit", *committables, is_killed=True)
        successor = stage.sink()
        stage.commit(successor, committables)
        stage.sees(A)
        stage.nothing_left_by_sweep(successor)

    def test_process_killed_between_the_lines_of_commit(self, stage: Stage, sink: AnySink) -> None:
        """Wherever in its own code a commit is killed, the next one brings the rows once."""

        def killed(committables: list[Committable], line: int) -> list[int]:
            places = lines_of_commit(sink, committables, killed_at=line)
            stage.commit(sink, committables)
            return places

        self._at_each_line(stage, sink, killed)

    def test_commit_that_goes_on_behind_another_one(self, stage: Stage, sink: AnySink) -> None:
        """A paused driver goes on from the middle of its commit, behind its successor's next batch.

        Wherever in its own code it stood still, the rows of both batches come once.
        """
        successor = stage.sink()
        gone_by = 0

        def behind(committables: list[Committable], line: int) -> list[int]:
            def complete_and_go_on() -> None:
                stage.commit(successor, committables)
                stage.sweep(successor)
                n = 1 + (committables[0].branch_id.batch_id or 0)
                stage.commit(successor, stage.prepare(successor, branch(n, batch_id=n), B))
                stage.sweep(successor)

            nonlocal gone_by
            places, is_gone_by = commit_behind_another(
                sink, committables, line, complete_and_go_on, stands_s=self.stands_s
            )
            gone_by += is_gone_by
            if places:  # it was made once, and may not know its outcome
                complete_and_go_on()
            return places

        self._at_each_line(stage, sink, behind, B)
        assert gone_by, (
            f"wherever a commit stood still, another one of the same branch took {self.stands_s} s "
            "or more, so nothing is proven: give the contract a higher stands_s"
        )
        stage.nothing_left_by_sweep(sink)

    def test_other_process_aborts(self, stage: Stage, sink: AnySink) -> None:
        """The next driver aborts what nobody decided."""
        committables = stage.prepare(sink, BRANCH, A)
        sink.close()
        self._elsewhere(stage, sink, "abort", *committables)
        stage.sees()
        stage.nothing_stands()

    def test_sink_that_was_never_validated(self, stage: Stage) -> None:
        """A recovery lists, aborts and commits before it knows a schema, also in a new target."""
        stage.sweep(stage.bare_sink())
        bare = stage.bare_sink()
        bare.abort(stage.named(bare, BRANCH))
        sink = stage.sink()
        gone, left = (stage.prepare(sink, branch(n, batch_id=n), A) for n in (1, 2))
        list(verbs.find_branches(stage.bare_sink(), OWNER))
        stage.abort(stage.bare_sink(), gone)
        stage.commit(stage.bare_sink(), left)
        stage.sees(A)
        stage.nothing_left_by_sweep(stage.bare_sink())

    # -- many and none -----------------------------------------------------------------------------

    def test_concurrent_branches(self, stage: Stage, sink: AnySink) -> None:
        """Tasks that write side by side, each with its own object: every row comes once."""
        needs_many_branches(stage)
        sinks = [stage.sink() for _ in range(self.parallel)]
        parts = [rows_of(range(n * 10, n * 10 + 10)) for n in range(self.parallel)]
        tasks = at_once(
            [partial(stage.task, sinks[n], branch(n), part, part) for n, part in enumerate(parts)]
        )
        stage.sees()
        stage.commit(sink, stage.vote(sink, *tasks))
        stage.sees(*parts, *parts)

    def test_commits_in_parallel(self, stage: Stage, sink: AnySink) -> None:
        """One object commits many batches' branches from several threads."""
        needs_many_branches(stage)
        parts = [rows_of(range(n * 10, n * 10 + 10)) for n in range(self.parallel)]
        prepared = [
            stage.prepare(sink, branch(n, batch_id=n), part) for n, part in enumerate(parts)
        ]
        at_once([partial(stage.commit, sink, committables) for committables in prepared])
        stage.sees(*parts)

    def test_commit_of_a_batch_gives_an_outcome_for_each(self, stage: Stage, sink: AnySink) -> None:
        """Of a batch one branch is gone: its outcome says so, and the others are committed."""
        needs_many_branches(stage)
        parts = {1: A, 2: B}
        tasks = [stage.task(sink, branch(attempt), rows) for attempt, rows in parts.items()]
        committables = stage.vote(sink, *tasks)
        gone, *left = committables
        sink.abort(gone)
        error, *others = verbs.commit_many(sink, committables)
        assert isinstance(error, SparkOnceError), (
            f"commit_many returned {error!r} for a branch that was aborted, and not its error"
        )
        assert len(others) == len(left)
        assert all(e is None or isinstance(e, CommitUnresolvedError) for e in others), others
        stage.commit(sink, left)
        stage.sees(*(parts[committable.branch_id.attempt] for committable in left))
        assert list(verbs.commit_many(sink, [])) == []

    def test_batch_without_rows(self, stage: Stage, sink: AnySink) -> None:
        """No task had rows for the sink: it is asked for its vote all the same, over nothing."""
        stage.commit(sink, stage.vote(sink))
        stage.sees()
        stage.nothing_left_by_sweep(sink)

    # -- orphans -----------------------------------------------------------------------------------

    def test_orphans_are_found_and_aborted(self, stage: Stage, sink: AnySink) -> None:
        """What a dead driver prepared is listed by its own names, and abort ends it (I8)."""
        self._needs_listing(sink)
        prepared = [stage.task(sink, branch(n), A) for n in (1, 2)]
        successor = stage.sink()
        assert {p.branch_id.name for p in prepared} <= {b.name for b in stage.sweep(successor)}
        stage.sees()
        stage.nothing_stands()

    def test_orphans_of_others_are_not_listed(self, stage: Stage, sink: AnySink) -> None:
        """Neither those of another log or query, nor of one whose id starts with ours."""
        self._needs_listing(sink)
        others = [Owner(OWNER.log_id, OWNER.query_id + "0"), Owner("f" * 16, OWNER.query_id)]
        kept = [stage.prepare(sink, branch(n, owner=owner), A) for n, owner in enumerate(others)]
        assert (found := stage.sweep(sink)) == [], (
            f"find_branches lists branches of another log or query, which would be aborted: {found}"
        )
        for committables in kept:
            stage.commit(sink, committables)
        stage.sees(*[A] * len(others))

    def test_listing_tells_token_and_sink(self, stage: Stage, sink: AnySink) -> None:
        """Each found branch has the identity of the one that was made: the coordinator compares."""
        self._needs_listing(sink)
        task = stage.task(sink, replace(BRANCH, token=7, write_pass=1), A)
        (found,) = {c.branch_id for c in verbs.find_branches(sink, OWNER)}
        made = task.branch_id
        assert replace(found, batch_id=made.batch_id) == made
        assert found.batch_id in {None, made.batch_id}

    # -- what lasts --------------------------------------------------------------------------------

    def test_name_and_target_are_lasting(self, stage: Stage) -> None:
        """Two objects with the same settings have one name and one target."""
        first, second = stage.world.sink(), stage.world.sink()
        assert (first.name, first.target) == (second.name, second.target), (
            "name and target are kept in the log: they must not be made anew in each process"
        )

    def test_closed_sink_can_be_used_again(self, stage: Stage, sink: AnySink) -> None:
        """`close` frees connections, twice too; whatever comes next opens its own."""
        committables = stage.prepare(sink, BRANCH, A)
        sink.close()
        sink.close()
        stage.commit(sink, committables)
        stage.sees(A)

    def test_promise_lasts_long_enough(self, stage: Stage, sink: AnySink) -> None:
        """`safe_until`, where a sink sets it, is Unix time in seconds and lies ahead."""
        for committable in stage.prepare(sink, BRANCH, A):
            safe_until = committable.safe_until
            if safe_until is not None:
                ahead_s = safe_until - time.time()
                assert 0 < ahead_s < _HUNDRED_YEARS_S, f"safe_until lies {ahead_s:.0f} s ahead"

    def test_text_for_people_is_one_line(self, stage: Stage, sink: AnySink) -> None:
        """`text`, where a sink sets it, is a line that `sparkonce log show` can print."""
        for committable in stage.prepare(sink, BRANCH, A):
            text = committable.text
            assert len(text.splitlines()) <= 1, f"text has several lines: {text!r}"
            assert text.isprintable(), f"text has characters that no terminal prints: {text!r}"

    # -- helpers -----------------------------------------------------------------------------------

    def _at_each_line(
        self,
        stage: Stage,
        sink: AnySink,
        meet: Callable[[list[Committable], int], list[int]],
        *then: pa.RecordBatch,
    ) -> None:
        """Let commits meet something, each before another line of the sink's own code.

        Args:
            stage: of the test.
            sink: prepares.
            meet: has the branches committed, and a commit of them in another process meet it
                before the line. It returns that one's places where it ended before the line.
            then: what it commits as the next batch.
        """
        # The first one in a target may have more to do than those that follow.
        stage.commit(sink, stage.prepare(sink, branch(0, batch_id=0), A))
        committables = stage.prepare(sink, branch(1, batch_id=1), A)
        sink.close()
        places = lines_of_commit(sink, committables)
        seen = [A, A]
        for chosen_line in chosen(places, self.most_kills):
            line = chosen_line
            for _ in range(_TRIES):
                n = len(seen)
                committables = stage.prepare(sink, branch(n, batch_id=n), A)
                sink.close()
                ended = meet(committables, line)
                seen += [A, *then]
                stage.sees(*seen)
                if not ended:
                    break
                line = min(line, len(ended))  # a poll takes more or fewer lines
            else:
                raise AssertionError(
                    f"{_TRIES} commits ended before the line at which they were to be met: each "
                    f"ran fewer lines than the one before, the last one {len(ended)}, so nothing "
                    "is proven: let commits of equal branches take equal steps"
                )

    @staticmethod
    def _elsewhere(
        stage: Stage, sink: AnySink, verb: Any, *args: Any, is_killed: bool = False
    ) -> list[Committable]:
        shaped = stage.world.shaped
        return in_other_process(sink, verb, *args, is_killed=is_killed, shaped=shaped)

    @staticmethod
    def _needs_listing(sink: AnySink) -> None:
        if not lists_branches(sink):
            pytest.skip("the sink has no find_branches: what dead processes leave stays")
