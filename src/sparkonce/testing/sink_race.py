"""A part of `SinkContract`: commits and aborts at the same time, in processes and in threads.

prepare ─┬─ commit ─┬─ prepare ─┬─ commit …      In each round, a process first waits for a
         └─ commit ─┘           └─ commit …      random part of the time that its verb takes.
                                                 So the rounds together cover all offsets.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import chain
from threading import Event
from typing import TYPE_CHECKING

import pytest

from sparkonce.errors import CommitUnresolvedError, PreparedBranchLostError, SparkOnceError
from sparkonce.model import Committable
from sparkonce.sinks import verbs
from sparkonce.sinks.base import AnySink
from sparkonce.sinks.capabilities import AbortsDecided
from sparkonce.testing.sink_case import SinkCase, needs_many_branches
from sparkonce.testing.sink_racers import Outcome, RaceVerb, race
from sparkonce.testing.sink_world import GUIDE, Stage, branch, canonical, rows_of

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS = 3
_RACERS = 3
_NOT_STALLED = (
    "commit returned in world.stalled(), so nothing is proven: it must let the server begin a "
    "commit, and not end it"
)


class SinkRace(SinkCase):
    """What `SinkContract` inherits; see there."""

    def test_commits_race(self, stage: Stage, sink: AnySink) -> None:
        """Several drivers commit one branch at once: each succeeds, or its outcome is unknown."""
        rounds, said = self._race(stage, sink, ["commit"] * _RACERS)
        wrong = [[o.text for o in outcomes if o.kind == "failed"] for outcomes in said]
        assert not any(wrong), (
            f"in {sum(map(bool, wrong))} of {len(rounds)} rounds a commit failed while others "
            "committed the same branch. A lock that another session holds, or a proof that cannot "
            "be read yet, shows no loss: raise CommitUnresolvedError. The errors: "
            f"{dict(Counter(chain(*wrong)).most_common(3))}"
        )
        for committables in rounds:
            stage.commit_all(sink, committables)
        rows = map(_rows, range(len(rounds)))
        stage.sees(*rows, why=f"{_RACERS} processes committed each branch at once; ")

    def test_commit_races_an_abort(self, stage: Stage, sink: AnySink) -> None:
        """One of them wins, and readers see what commit says."""
        rounds, said = self._race(stage, sink, ["commit", "abort"])
        commits = [
            _again(sink, committables) if commit.kind == "unknown" else commit
            for committables, (commit, _) in zip(rounds, said, strict=True)
        ]
        stage.let_readers_see()
        visible = Counter(map(canonical, stage.world.visible()))
        for n, commit in enumerate(commits):
            rows = [canonical(stage.world.expected(row)) for row in _rows(n).to_pylist()]
            counts = {visible[row] for row in rows}
            assert counts == ({1} if commit.kind == "done" else {0}), (
                f"while an abort ran, commit of batch {n} "
                f"{'returned' if commit.kind == 'done' else f'raised {commit.text}'}, and readers "
                f"get its rows {sorted(counts)} times: let the store decide which of them wins"
            )

    def test_commit_while_another_one_hangs(self, stage: Stage, sink: AnySink) -> None:
        """The server has begun a commit of the branch: it is neither lost nor committed yet."""
        stalled = stage.world.stalled
        if stalled is None:
            pytest.skip("the world has no stalled=")
        committables = stage.prepare(sink, branch(1), rows := _rows(1))
        sinks = sink, stage.sink()
        with ThreadPoolExecutor(2) as pool:
            with stalled():
                calls = []
                for each in sinks:  # the first one hangs in the server when the second one begins
                    calls.append(pool.submit(verbs.commit_many, each, committables))
                    wait(calls, self.longest_pause_s)
                assert not calls[0].done(), _NOT_STALLED
            outcomes = [error for call in calls for error in call.result() if error]
        assert all(isinstance(error, CommitUnresolvedError) for error in outcomes), (
            f"commit raised {outcomes} while another session was committing the branch: it is not "
            "lost, so wait for that session, or raise CommitUnresolvedError"
        )
        stage.commit_all(stage.sink(), committables)
        stage.sees(rows)

    @pytest.mark.parametrize("end", ["abort", "abort_decided"])
    def test_abort_while_a_commit_hangs(self, stage: Stage, sink: AnySink, end: str) -> None:
        """Abort raises, waits, or prevents the commit: its rows never appear after it returned."""
        stalled = stage.world.stalled
        if stalled is None:
            pytest.skip("the world has no stalled=")
        if end == "abort_decided" and not isinstance(sink, AbortsDecided):
            pytest.skip("the sink has no abort_decided")
        committables = stage.prepare(sink, branch(1), rows := _rows(1))
        other = stage.sink()
        with ThreadPoolExecutor(2) as pool:
            with stalled():
                commit = pool.submit(verbs.commit_many, sink, committables)
                wait([commit], self.longest_pause_s)
                assert not commit.done(), _NOT_STALLED
                abort = pool.submit(_aborted, other, committables, end)
                wait([abort], self.longest_pause_s)
                # A committed branch may be aborted: only rows that come later are wrong.
                is_early = abort.done() and not stage.count()
            commit.result()
            has_returned = not any(abort.result())
        is_committed = _is_committed(stage, committables)
        if has_returned and (is_early or end == "abort_decided"):
            stage.sees(
                why=f"{end} returned while another session was committing the branch, which was "
                'then committed, so a rewrite would double its rows. "No such branch" does not '
                f"prove that it is gone: read the proof with a lock, and raise ({GUIDE}#checklist);"
                " "
            )
        shown = [rows] if is_committed else []
        stage.sees(*shown, why=f"commit was repeated after {end}, and not what it said is true; ")

    def test_commits_in_parallel(self, stage: Stage, sink: AnySink) -> None:
        """One sink object commits branches from several threads: each call gets its own outcome.

        Every fourth branch was aborted before. A client that threads share may mix up answers.
        """
        needs_many_branches(stage)
        parts = [rows_of(range(n * 3, n * 3 + 3)) for n in range(self.parallel * 10)]
        prepared = [
            stage.prepare(sink, branch(n, batch_id=n), part) for n, part in enumerate(parts)
        ]
        for committables in prepared[::4]:
            stage.abort(sink, committables)
        alone = next(iter(verbs.commit_many(sink, prepared[0])), None)
        assert alone is not None, (
            "commit of an aborted branch returned as if it had succeeded: where nothing proves a "
            f"commit, raise PreparedBranchLostError ({GUIDE}#checklist)"
        )
        is_unsure = isinstance(alone, CommitUnresolvedError)  # it never will tell
        wanted = CommitUnresolvedError if is_unsure else PreparedBranchLostError

        over = Event()

        def mistake(n: int) -> str:
            """What commit said of a branch if it is wrong. After one mistake no more are tried."""
            if over.is_set():
                return ""
            if n % 4 or not is_unsure:
                error = stage.outcome(sink, prepared[n])
            else:
                error = next(iter(verbs.commit_many(sink, prepared[n])), None)
            if error is None if n % 4 else isinstance(error, wanted):
                return ""
            over.set()
            return _mixed_up("aborted" if n % 4 == 0 else "prepared", error)

        with ThreadPoolExecutor(self.parallel) as pool:
            mistakes = list(filter(None, pool.map(mistake, range(len(prepared)))))
        assert not mistakes, mistakes[0]
        shown = [part for n, part in enumerate(parts) if n % 4]
        stage.sees(*shown, why=f"{self.parallel} threads committed {len(parts)} branches; ")

    # -- helpers -----------------------------------------------------------------------------------

    def _race(
        self, stage: Stage, sink: AnySink, racers: Sequence[RaceVerb]
    ) -> tuple[list[list[Committable]], list[list[Outcome]]]:
        """Prepare a branch in each round, and let the racers run their verbs on it."""
        seed = random.randrange(1 << 32)  # noqa: S311
        print(f"seed of the race: {seed}")  # noqa: T201 - pytest shows it if the test fails
        rounds: list[list[Committable]] = []

        def prepared() -> Iterator[list[Committable]]:
            for n in range(self.race_rounds):
                rounds.append(stage.prepare(sink, branch(n, batch_id=n), _rows(n)))
                yield rounds[-1]

        said = race(sink, prepared(), racers, random.Random(seed))  # noqa: S311
        return rounds, said


def _again(sink: AnySink, committables: Sequence[Committable]) -> Outcome:
    """Commit once more, since the outcome is unknown."""
    errors = list(filter(None, verbs.commit_many(sink, committables)))
    return Outcome("failed", str(errors[0])) if errors else Outcome("done")


def _aborted(
    sink: AnySink, committables: Sequence[Committable], abort: str
) -> list[Exception | None]:
    """Abort the branches with the sink's verb of that name; return each outcome."""
    return [verbs.outcome_of_abort(sink, c, getattr(sink, abort)) for c in committables]


def _is_committed(stage: Stage, committables: Sequence[Committable]) -> bool:
    """Whether a repeated commit returns."""
    try:
        stage.commit_all(stage.sink(), committables)
    except SparkOnceError:
        return False
    return True


def _mixed_up(what: str, error: Exception | None) -> str:
    said = f"raised {error!r}" if error else "returned"
    return (
        f"several threads committed a branch each, and commit {said} for one that was {what}: does "
        "it get the answer of another thread? Give each call a connection of its own, or a lock "
        f"({GUIDE}#checklist)"
    )


def _rows(n: int) -> pa.RecordBatch:
    """The rows of a round."""
    return rows_of(range(n * _ROWS, (n + 1) * _ROWS))
