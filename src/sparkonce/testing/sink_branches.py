"""A part of `SinkContract`: branches that must not be confused, many at once, and none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import chain, product
from typing import TYPE_CHECKING, Any

import pytest

from sparkonce.errors import CommitUnresolvedError, SparkOnceError
from sparkonce.model import MAX_BRANCH_ID, Committable, Owner
from sparkonce.sinks import verbs
from sparkonce.sinks.base import AnySink
from sparkonce.testing.sink_case import (
    BRANCH,
    A,
    B,
    C,
    SinkCase,
    apart,
    at_the_same_time,
    needs_listing,
    needs_many_branches,
)
from sparkonce.testing.sink_world import (
    OWNER,
    Stage,
    branch,
    check_number,
    lists_branches,
    rows_of,
)

if TYPE_CHECKING:
    import pyarrow as pa

APART: Mapping[str, Mapping[str, Any]] = {
    "batch": {"batch_id": 12},
    "token": {"token": 30},
    "pass": {"write_pass": 1},
    "log": {"owner": Owner("f" * 16, OWNER.query_id)},
    "query": {"owner": Owner(OWNER.log_id, OWNER.query_id + "0")},
}
"""How another branch differs from `BRANCH`. Two branches that differ only in the attempt belong to
one batch: `SinkVerbs.test_equal_rows_are_all_kept`."""

SIDE_BY_SIDE: Mapping[str, Mapping[str, Any]] = {
    "token": {"token": 30},
    "pass": {"write_pass": 10},
    "sink": {},
    "log": {"owner": Owner("f" * 16, OWNER.query_id)},
    "query": {"owner": Owner(OWNER.log_id, OWNER.query_id + "0")},
}
"""How another branch of the same batch, prepared at the same time, differs from `BRANCH`."""


class SinkBranches(SinkCase):
    """What `SinkContract` inherits; see there."""

    # -- attempts, passes and tokens ---------------------------------------------------------------

    @pytest.mark.parametrize(("lost", "won"), [(1, 12), (12, 1)])
    def test_two_attempts_of_one_task(
        self, stage: Stage, sink: AnySink, lost: int, won: int
    ) -> None:
        """Both prepare, one is decided: its rows appear once, and the loser's are removed."""
        with apart("attempt"):
            loser = stage.task(sink, branch(lost), A)
            winner = stage.task(stage.sink(), branch(won), A)
            stage.commit(sink, stage.vote(sink, winner))
            stage.sees_beside_open(A)
            sink.abort(loser)
            stage.sweep(sink)
            stage.sees(A)
            stage.nothing_unfinished()

    def test_attempt_that_prepares_after_the_commit(self, stage: Stage, sink: AnySink) -> None:
        """A speculative attempt that finishes late is an orphan; its rows never appear."""
        late = stage.sink()
        handle = stage.write(late, branch(2), A)
        stage.commit(sink, stage.prepare(sink, branch(1), A))
        orphan = late.preCommit(handle)
        stage.sees_beside_open(A)
        sink.abort(orphan)
        stage.sees(A)
        stage.nothing_left_by_sweep(sink)

    def test_older_token_never_hits_a_younger_branch(self, stage: Stage, sink: AnySink) -> None:
        """Abort by the older name leaves the younger branch prepared (I6)."""
        older = stage.prepare(sink, BRANCH, A)
        younger = stage.prepare(stage.sink(), replace(BRANCH, token=30), B)
        stage.abort(sink, older)
        for committable in older:
            sink.abort(committable.branch_id)
        stage.commit(sink, younger)
        stage.sees(B)

    def test_rewrite_has_a_name_of_its_own(self, stage: Stage, sink: AnySink) -> None:
        """A branch of pass 1 is independent of the branch of pass 0 with the same numbers."""
        first = stage.prepare(sink, BRANCH, A)
        rewrite = stage.prepare(sink, replace(BRANCH, write_pass=1), A)
        stage.abort(sink, first)
        stage.commit(sink, rewrite)
        stage.sees(A)

    @pytest.mark.parametrize("part", APART)
    def test_branches_one_part_apart(self, stage: Stage, sink: AnySink, part: str) -> None:
        """A branch's rows and proof are never taken for another branch's, whatever differs."""
        if part in {"token", "pass"}:
            needs_many_branches(stage)
        with apart(part):
            stage.commit(sink, stage.prepare(sink, BRANCH, A))
            stage.sweep(sink)
            stage.commit(sink, stage.prepare(sink, replace(BRANCH, **APART[part]), B))
            stage.sees(A, B)

    @pytest.mark.parametrize("part", SIDE_BY_SIDE)
    def test_branches_side_by_side(self, stage: Stage, part: str) -> None:
        """Two prepared branches, one part apart, end independently, and are listed correctly."""
        needs_many_branches(stage)
        sinks = stage.sink(), stage.sink("other" if part == "sink" else None)
        with apart(part):
            seen: list[pa.RecordBatch] = []
            for n, (end, first) in enumerate(product(("commit", "abort"), (0, 1))):
                ours = replace(BRANCH, batch_id=n)
                tasks = [
                    stage.task(sinks[0], ours, A),
                    stage.task(sinks[1], replace(ours, **SIDE_BY_SIDE[part]), B),
                ]
                prepared = [stage.vote(sink, task) for sink, task in zip(sinks, tasks, strict=True)]
                made = {c.branch_id.name for c in (*tasks, *chain(*prepared))}
                for sink, task in zip(sinks, tasks, strict=True):
                    found = {c.branch_id.name for c in stage.found(sink, task.branch_id.owner)}
                    assert found <= made, f"find_branches lists {found - made}, which do not exist"
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
        """After years the numbers in a name are long; two names differ in the last digit."""
        sink = stage.sink("s" * 32)
        long = branch(81_920, token=100_000_000, write_pass=10, batch_id=1_000_000_001)
        assert len(str(stage.named(sink, long))) == MAX_BRANCH_ID
        stage.commit(sink, stage.prepare(sink, long, A))
        stage.sweep(sink)
        stage.commit(sink, stage.prepare(sink, replace(long, batch_id=1_000_000_002), B))
        if lists_branches(sink):
            stage.task(sink, replace(long, batch_id=1_000_000_003), A)
        stage.nothing_left_by_sweep(sink)
        stage.sees(A, B)

    # -- commits again -----------------------------------------------------------------------------

    def test_commits_are_repeated_in_another_order(self, stage: Stage, sink: AnySink) -> None:
        """A driver repeats commits that it had not recorded before it crashed or paused.

        Each branch keeps its own proof, whichever branch was committed last.
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
        """Lost branches are rewritten, and committed together with those committed before."""
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

    # -- many and none -----------------------------------------------------------------------------

    def test_concurrent_branches(self, stage: Stage, sink: AnySink) -> None:
        """Tasks write at the same time, each with its own sink object: every row appears once."""
        needs_many_branches(stage)
        sinks = [stage.sink() for _ in range(self.parallel)]
        parts = [rows_of(range(n * 10, n * 10 + 10)) for n in range(self.parallel)]
        with apart("attempt"):
            begun = enumerate(zip(sinks, parts, strict=True))
            tasks = at_the_same_time(
                [partial(stage.task, each, branch(n), part, part) for n, (each, part) in begun]
            )
            stage.sees()
            stage.commit(sink, stage.vote(sink, *tasks))
            stage.sees(*parts, *parts)

    def test_many_branches(self, stage: Stage, sink: AnySink) -> None:
        """One vote and one commit take the branches of many tasks, as after a shuffle in Spark."""
        needs_many_branches(stage)
        parts = [rows_of([n]) for n in range(self.many_branches)]

        def run_tasks(first: int) -> list[Committable]:
            executor = stage.sink()
            numbers = range(first, len(parts), self.parallel)
            return [stage.task(executor, branch(n), parts[n]) for n in numbers]

        tasks = at_the_same_time([partial(run_tasks, n) for n in range(self.parallel)])
        committables = stage.vote(sink, *chain(*tasks))
        why = f"a batch has {len(parts)} branches: does the store's API take fewer at a time? "
        stage.sees(why=why)
        stage.commit(sink, committables)
        stage.sees(*parts, why=why)
        stage.nothing_left_by_sweep(sink)

    def test_commit_of_a_batch_gives_an_outcome_for_each(self, stage: Stage, sink: AnySink) -> None:
        """One branch of a batch is gone: its outcome says so, and the others are committed."""
        needs_many_branches(stage)
        parts = {1: A, 2: B}
        tasks = [stage.task(sink, branch(attempt), rows) for attempt, rows in parts.items()]
        committables = stage.vote(sink, *tasks)
        gone, *left = committables
        sink.abort(gone)
        outcomes = list(verbs.commit_many(sink, committables))
        check_number(outcomes, committables, "commit_many")
        error, *others = outcomes
        assert isinstance(error, SparkOnceError), (
            f"commit_many returned {error!r} for a branch that was aborted, and not its error"
        )
        assert all(e is None or isinstance(e, CommitUnresolvedError) for e in others), (
            f"commit_many returned {others} for branches of the same batch that are still there: "
            "it must commit them, whatever happened to the others"
        )
        stage.commit(sink, left)
        stage.sees(*(parts[committable.branch_id.attempt] for committable in left))
        check_number(list(verbs.commit_many(sink, [])), [], "commit_many")

    def test_batch_without_rows(self, stage: Stage, sink: AnySink) -> None:
        """If no task has rows for the sink, it still votes on an empty batch."""
        stage.commit(sink, stage.vote(sink))
        stage.sees()
        stage.nothing_left_by_sweep(sink)

    # -- orphans -----------------------------------------------------------------------------------

    def test_orphans_are_found_and_aborted(self, stage: Stage, sink: AnySink) -> None:
        """The sink lists the branches of a dead driver, and abort removes them (I8)."""
        needs_listing(sink)
        prepared = [stage.task(sink, branch(n), A) for n in (1, 2)]
        successor = stage.sink()
        names = {p.branch_id.name for p in prepared}
        found = {b.name for b in stage.sweep(successor)}
        assert names <= found, (
            f"find_branches does not list {names - found}, which are prepared: it must list "
            "whatever any driver has left"
        )
        stage.sees()
        stage.nothing_unfinished()

    def test_orphans_of_others_are_not_listed(self, stage: Stage, sink: AnySink) -> None:
        """Branches of another log or query are not listed, even if its id starts with ours."""
        needs_listing(sink)
        others = [Owner(OWNER.log_id, OWNER.query_id + "0"), Owner("f" * 16, OWNER.query_id)]
        kept = [stage.prepare(sink, branch(n, owner=owner), A) for n, owner in enumerate(others)]
        assert (found := stage.sweep(sink)) == [], (
            "find_branches lists branches of another log or query, which would be aborted: "
            f"{', '.join(map(str, found))}"
        )
        for committables in kept:
            stage.commit(sink, committables)
        stage.sees(*[A] * len(others))

    def test_listing_names_token_and_sink(self, stage: Stage, sink: AnySink) -> None:
        """A listed branch has the identity it was made with; the driver compares the two."""
        needs_listing(sink)
        task = stage.task(sink, replace(BRANCH, token=7, write_pass=1), A)
        ids = {c.branch_id for c in stage.found(sink)}
        assert len(ids) == 1, (
            f"find_branches must list the one branch that is prepared, and lists {len(ids)}: {ids}"
        )
        (found,) = ids
        made = task.branch_id
        assert found in {made, replace(made, batch_id=None)}, (
            f"find_branches lists {made} as {found}: the driver could not recognise it"
        )
