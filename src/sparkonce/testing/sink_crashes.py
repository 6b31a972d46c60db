"""A part of `SinkContract`: other processes that commit, abort, pause and get killed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sparkonce.model import BranchId, Committable
from sparkonce.sinks.base import AnySink
from sparkonce.testing.commit_lines import chosen
from sparkonce.testing.sink_case import (
    BRANCH,
    A,
    B,
    SinkCase,
    needs_many_branches,
)
from sparkonce.testing.sink_process import (
    commit_after_another,
    in_other_process,
    lines_of_commit,
    lines_of_precommit,
    precommit_around,
    task_around_another,
)
from sparkonce.testing.sink_world import Stage, branch

if TYPE_CHECKING:
    import pyarrow as pa

_TRIES = 5
"""How often in a row a commit may run fewer lines than before, and so miss its line."""


class SinkCrashes(SinkCase):
    """What `SinkContract` inherits; see there."""

    # -- other processes ---------------------------------------------------------------------------

    def test_sink_travels_to_the_executors(self, stage: Stage, sink: AnySink) -> None:
        """It pickles after `validate`; this process commits a branch that another one wrote."""
        from sparkonce.spark_hooks.validating import check_pickles  # noqa: PLC0415 - imports Spark

        check_pickles(sink)
        task = self._elsewhere(stage, sink, "task", stage.named(sink, BRANCH), A)
        stage.sees()
        stage.commit(sink, stage.vote(sink, *task))
        stage.sees(A)

    def test_sink_travels_after_a_commit(self, stage: Stage, sink: AnySink) -> None:
        """It still pickles for the next batch after a commit and a sweep opened connections."""
        from sparkonce.spark_hooks.validating import check_pickles  # noqa: PLC0415 - imports Spark

        stage.commit(sink, stage.prepare(sink, branch(1, batch_id=1), A))
        stage.sweep(sink)
        check_pickles(sink)
        task = self._elsewhere(stage, sink, "task", stage.named(sink, branch(2, batch_id=2)), B)
        stage.commit(sink, stage.vote(sink, *task))
        stage.sees(A, B)

    def test_two_processes_write_at_the_same_time(self, stage: Stage, sink: AnySink) -> None:
        """As executors on one machine do: what is unique in a process may not be so outside."""
        needs_many_branches(stage)
        tasks: list[Committable] = []

        def other() -> None:
            tasks.extend(self._elsewhere(stage, sink, "task", stage.named(sink, branch(2)), B))

        rows = stage.world.selected(A)
        tasks.append(task_around_another(sink, stage.named(sink, branch(1)), rows, other))
        stage.commit(sink, stage.vote(sink, *tasks))
        stage.sees(A, B)

    def test_task_runs_while_another_one_prepares(self, stage: Stage, sink: AnySink) -> None:
        """Wherever in preCommit a task is paused while another one runs, all rows appear once.

        Both are processes of their own, as on executors. If each task reads an index of the batch
        and replaces it, the entry of one of them is lost.
        """
        needs_many_branches(stage)
        rows = stage.world.selected(A)

        def id_of(attempt: int, batch_id: int) -> BranchId:
            return stage.named(sink, branch(attempt, batch_id=batch_id))

        def around(batch_id: int, line: int) -> bool:
            tasks: list[Committable] = []
            task, has_paused = precommit_around(
                sink,
                id_of(1, batch_id),
                rows,
                line,
                lambda: tasks.append(stage.task(stage.sink(), id_of(2, batch_id), B)),
                longest_pause_s=self.longest_pause_s,
            )
            stage.commit(sink, stage.vote(sink, task, *tasks))
            return has_paused

        # The first task in a target may have more to do than later ones.
        stage.commit(sink, stage.prepare(sink, id_of(1, 0), A))
        places = lines_of_precommit(sink, id_of(1, 1), rows)
        stage.sweep(sink)
        seen, pauses = [A], 0
        for n, line in enumerate(chosen(places, self.most_faults), 2):
            pauses += around(n, line)
            seen += [A, B]
            stage.sees(*seen, why=f"a task ran while another one was at line {line} of preCommit; ")
        assert pauses, "each preCommit ended before the line at which it should be paused"
        stage.nothing_left_by_sweep(sink)

    def test_process_killed_after_precommit(self, stage: Stage, sink: AnySink) -> None:
        """The prepared branch survives, and this process commits it."""
        task = self._elsewhere(stage, sink, "task", stage.named(sink, BRANCH), A, is_killed=True)
        stage.sees()
        stage.commit(sink, stage.vote(sink, *task))
        stage.sees(A)

    def test_process_killed_while_it_writes(self, stage: Stage, sink: AnySink) -> None:
        """None of its rows ever become visible; a sweep removes what it left open."""
        self._elsewhere(stage, sink, "write", stage.named(sink, BRANCH), A, is_killed=True)
        stage.sees()
        stage.commit(sink, stage.prepare(sink, branch(2), B))
        stage.nothing_left_by_sweep(sink)
        stage.sees(B)

    def test_other_process_commits(self, stage: Stage, sink: AnySink) -> None:
        """The next driver commits what this one prepared, while this one still runs."""
        committables = stage.prepare(sink, BRANCH, A)
        sink.close()  # a driver that died holds no connection
        self._elsewhere(stage, sink, "commit", *committables)
        stage.sees(A)
        stage.commit(stage.sink(), committables)
        stage.sees(A)

    def test_process_killed_after_commit(self, stage: Stage, sink: AnySink) -> None:
        """A process dies before the log records its commit; the next one commits again."""
        committables = stage.prepare(sink, BRANCH, A)
        sink.close()
        self._elsewhere(stage, sink, "commit", *committables, is_killed=True)
        successor = stage.sink()
        stage.commit(successor, committables)
        stage.sees(A)
        stage.nothing_left_by_sweep(successor)

    def test_process_killed_between_the_lines_of_commit(self, stage: Stage, sink: AnySink) -> None:
        """Wherever in the sink's code a commit is killed, the rows appear once after a retry."""

        def killed(committables: list[Committable], line: int) -> list[int]:
            places = lines_of_commit(sink, committables, killed_at=line)
            stage.commit(sink, committables)
            return places

        self._at_each_line(stage, sink, killed)

    def test_commit_that_resumes_after_another_one(self, stage: Stage, sink: AnySink) -> None:
        """A paused driver resumes in the middle of its commit, after its successor's next batch.

        Wherever in the sink's code it was paused, the rows of both batches appear once.
        """
        successor = stage.sink()
        overtakings = 0

        def paused(committables: list[Committable], line: int) -> list[int]:
            def complete_and_deliver_next() -> None:
                stage.commit(successor, committables)
                stage.sweep(successor)
                n = 1 + (committables[0].branch_id.batch_id or 0)
                stage.commit(successor, stage.prepare(successor, branch(n, batch_id=n), B))
                stage.sweep(successor)

            nonlocal overtakings
            places, is_overtaken = commit_after_another(
                sink,
                committables,
                line,
                complete_and_deliver_next,
                longest_pause_s=self.longest_pause_s,
            )
            overtakings += is_overtaken
            if places:  # it ran once, and its outcome may be unknown
                complete_and_deliver_next()
            return places

        self._at_each_line(stage, sink, paused, B)
        assert overtakings, (
            "wherever a commit was paused, another commit of the same branch did not end within "
            f"{self.longest_pause_s} s. It waits for something that the paused one holds, such as "
            "a lock: a driver that is frozen would block its successor. Or the store is slow: then "
            "set a higher longest_pause_s in the class"
        )
        stage.nothing_left_by_sweep(sink)

    def test_other_process_aborts(self, stage: Stage, sink: AnySink) -> None:
        """The next driver aborts a branch that was never decided."""
        committables = stage.prepare(sink, BRANCH, A)
        sink.close()
        self._elsewhere(stage, sink, "abort", *committables)
        stage.sees()
        stage.nothing_unfinished()

    def test_sink_that_was_never_validated(self, stage: Stage) -> None:
        """A recovery lists, aborts and commits without knowing a schema, even in a new target."""
        stage.sweep(stage.bare_sink())
        bare = stage.bare_sink()
        bare.abort(stage.named(bare, BRANCH))
        sink = stage.sink()
        gone, left = (stage.prepare(sink, branch(n, batch_id=n), A) for n in (1, 2))
        stage.found(stage.bare_sink())
        stage.abort(stage.bare_sink(), gone)
        stage.commit(stage.bare_sink(), left)
        stage.sees(A)
        stage.nothing_left_by_sweep(stage.bare_sink())

    # -- helpers -----------------------------------------------------------------------------------

    def _at_each_line(
        self,
        stage: Stage,
        sink: AnySink,
        meet: Callable[[list[Committable], int], list[int]],
        *then: pa.RecordBatch,
    ) -> None:
        """Interrupt commits, each before a different line of the sink's own code.

        Args:
            stage: of the test.
            sink: prepares the branches.
            meet: starts a commit in another process, interrupts it before the given line, and
                commits here. If that process ended before the line, it returns its lines.
            then: the rows that `meet` commits as the next batch.
        """
        # The first commit in a target may have more to do than later ones.
        stage.commit(sink, stage.prepare(sink, branch(0, batch_id=0), A))
        committables = stage.prepare(sink, branch(1, batch_id=1), A)
        sink.close()
        places = lines_of_commit(sink, committables)
        seen = [A, A]
        for chosen_line in chosen(places, self.most_faults):
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
                    f"{_TRIES} commits ended before the line at which they should be interrupted: "
                    f"each ran fewer lines than the one before, the last one {len(ended)}, so "
                    "nothing is proven: make commits of equal branches run the same lines"
                )

    @staticmethod
    def _elsewhere(
        stage: Stage, sink: AnySink, verb: Any, *args: Any, is_killed: bool = False
    ) -> list[Committable]:
        selected = stage.world.selected
        return in_other_process(sink, verb, *args, is_killed=is_killed, selected=selected)
