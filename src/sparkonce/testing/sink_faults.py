"""A part of `SinkContract`: verbs out of order, lost branches, unreachable targets."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

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
from sparkonce.testing.sink_case import BRANCH, A, B, SinkCase, must_return
from sparkonce.testing.sink_world import Stage, branch


class SinkFaults(SinkCase):
    """What `SinkContract` inherits; see there."""

    # -- verbs out of order ------------------------------------------------------------------------

    def test_commit_after_abort(self, stage: Stage, sink: AnySink) -> None:
        """It raises an error and shows no rows: they are gone."""
        committables = stage.prepare(sink, BRANCH, A)
        stage.abort(sink, committables)
        for error in verbs.commit_many(sink, committables):
            assert isinstance(error, SparkOnceError), (
                "commit of an aborted branch returned as if it had succeeded: where nothing is "
                "prepared and nothing proves an earlier commit, raise PreparedBranchLostError"
            )
        stage.sees()

    def test_commit_before_precommit(self, stage: Stage, sink: AnySink) -> None:
        """A handle or a branch id is no committable: ProtocolError names the verb to call first."""
        handle: Any = stage.write(sink, BRANCH, A)
        wrongs: list[Any] = [handle, stage.named(sink, BRANCH), None]
        for wrong in wrongs:
            said: Exception | None = None
            try:
                sink.commit(wrong)
            except Exception as error:  # noqa: BLE001 - compared below
                said = error
            assert isinstance(said, ProtocolError) and "preCommit" in str(said), (  # noqa: PT018
                f"commit got a {type(wrong).__name__} and "
                f"{f'raised {said!r}' if said else 'returned'}: it must raise a ProtocolError that "
                "says to call preCommit first"
            )
        sink.discard(handle)
        stage.sees()

    def test_discard_after_the_sweep(self, stage: Stage, sink: AnySink) -> None:
        """A zombie task discards a branch that a sweep has aborted: no error, nothing left."""
        handle = stage.write(sink, BRANCH, A)
        sink.abort(stage.named(sink, BRANCH))
        with must_return("discard of a branch that a sweep has aborted must return"):
            sink.discard(handle)
        stage.sweep(sink)
        stage.sees()
        stage.nothing_unfinished()

    # -- faults of the target ----------------------------------------------------------------------

    def test_lost_branch_is_reported(self, stage: Stage, sink: AnySink) -> None:
        """A prepared branch that was destroyed is reported as lost, never as committed."""
        lose = stage.world.lose
        if lose is None:
            pytest.skip("the world has no lose=")
        committables = stage.prepare(sink, BRANCH, A)
        for committable in committables:
            lose(committable)
        try:
            stage.commit(stage.sink(), committables)
        except PreparedBranchLostError:
            pass
        else:
            raise AssertionError(
                "commit of a prepared branch that was destroyed returned as if it had succeeded: "
                "where nothing proves an earlier commit, raise PreparedBranchLostError"
            )
        stage.sees()

    def test_unreachable_target(self, stage: Stage, sink: AnySink) -> None:
        """Prepared branches stay prepared; failures are reported; no outcome is invented."""
        world = stage.world
        away = world.away
        if away is None:
            if world.proxy is None:
                pytest.skip("the world has no away= and no proxy=")
            away = world.proxy.away
            with world.proxy.in_between():
                sink = stage.sink()
        decided, gone = (stage.prepare(sink, branch(n, batch_id=n), A) for n in (1, 2))
        sink.close()
        late: list[Committable] = []
        with away():
            with suppress(Exception):
                late = stage.prepare(sink, branch(3, batch_id=3), B)
            for error in verbs.commit_many(sink, decided):
                assert isinstance(error, CommitUnresolvedError), (
                    f"commit returned {error!r} while the target was unreachable: whether it has "
                    "the rows is unknown, so raise CommitUnresolvedError, or let the client's "
                    "error pass"
                )
            with suppress(Exception):  # it is aborted again below
                stage.abort(sink, gone)
        sink.close()
        stage.commit(sink, decided)
        stage.commit(sink, late)
        stage.abort(sink, gone)
        stage.sees(A, *([B] if late else ()))
        stage.nothing_left_by_sweep(sink)
