"""A part of `SinkContract`: verbs out of order, lost branches, unreachable targets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TypeAlias

import pytest

from sparkonce.errors import (
    CommitUnresolvedError,
    PreparedBranchLostError,
    ProtocolError,
    SparkOnceError,
)
from sparkonce.model import BranchId, Committable
from sparkonce.sinks import verbs
from sparkonce.sinks.base import AnySink
from sparkonce.testing.sink_case import BRANCH, A, B, SinkCase, must_return
from sparkonce.testing.sink_world import GUIDE, Stage, branch

_CHAIN = 30
"""How many texts of errors in a chain are read, at most."""


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

    @pytest.mark.parametrize("how", ["away", "proxy"])
    def test_unreachable_target(self, stage: Stage, sink: AnySink, how: str) -> None:
        """Prepared branches stay prepared; failures are reported; no outcome is invented.

        A server that ends connections is not enough: it may also answer, with an error.
        """
        away, sink = _away(stage, sink, how)
        if away is None:
            pytest.skip(f"the world has no {how}=")
        decided, gone = (stage.prepare(sink, branch(n, batch_id=n), A) for n in (1, 2))
        listed = seen = _ids(stage.found(sink))
        sink.close()
        late: list[Committable] = []
        is_aborted = False
        with away():
            with suppress(Exception):
                late = stage.prepare(sink, branch(3, batch_id=3), B)
            for error in verbs.commit_many(sink, decided):
                assert isinstance(error, CommitUnresolvedError), (
                    f"commit returned {error!r} while the target was unreachable: whether it has "
                    "the rows is unknown, so raise CommitUnresolvedError, or let the client's "
                    "error pass"
                )
            with suppress(Exception):
                seen = _ids(stage.found(sink))
            with suppress(Exception):
                stage.abort(sink, gone)
                is_aborted = True
        sink.close()
        left = _ids(stage.found(sink))
        _check_no_silence(hidden=listed - seen, kept=left & _ids(gone) if is_aborted else set())
        stage.commit(sink, decided)
        stage.commit(sink, late)
        stage.abort(sink, gone)
        stage.sees(A, *([B] if late else ()))
        stage.nothing_left_by_sweep(sink)

    def test_no_secret_shows(self, stage: Stage, sink: AnySink) -> None:
        """Names, committables and errors reach logs and the transaction log, without secrets."""
        secrets = stage.world.secrets
        if not secrets:
            pytest.skip("the world has no secrets=")
        away, sink = _away(stage, sink, "away" if stage.world.away else "proxy")
        prepared = stage.prepare(sink, BRANCH, A)
        seen = {"repr": repr(sink), "str": str(sink), "target": sink.target, "name": sink.name}
        seen |= {f"committable {n}": str(c.to_json()) for n, c in enumerate(prepared)}
        sink.close()
        with away() if away else nullcontext():
            if away:
                for verb, call in _calls(stage, sink, prepared).items():
                    seen[f"an error of {verb} while the target is unreachable"] = _said(call)
        sink.close()
        stage.commit(sink, prepared)
        gone = stage.prepare(sink, branch(2, batch_id=2), B)
        stage.abort(sink, gone)
        seen["an error of commit of an aborted branch"] = _said(lambda: sink.commit(gone[0]))
        shows = [what for what, text in seen.items() if any(secret in text for secret in secrets)]
        assert not shows, (
            f"a secret of the world shows in: {', '.join(shows)}. These reach logs, Spark's UI and "
            "the transaction log: leave it out, also of the client's errors that you chain "
            f"({GUIDE}#checklist)"
        )


def _ids(committables: Iterable[Committable]) -> set[BranchId]:
    return {committable.branch_id for committable in committables}


def _check_no_silence(*, hidden: set[BranchId], kept: set[BranchId]) -> None:
    """Nothing was swallowed that a sweep goes by."""
    assert not hidden, (
        f"find_branches returned while the target was unreachable, and did not list {hidden}: a "
        "sweep takes that for proof that nothing is left, so let the client's error pass"
    )
    assert not kept, (
        f"abort returned while the target was unreachable, and {kept} is still prepared: let the "
        "client's error pass, and a later sweep aborts it"
    )


Away: TypeAlias = "Callable[[], AbstractContextManager[object]]"


def _away(stage: Stage, sink: AnySink, how: str) -> tuple[Away | None, AnySink]:
    """A context in which the target is unreachable, if the world has one, and a sink for it."""
    world = stage.world
    if how == "away" or world.proxy is None:
        return world.away if how == "away" else None, sink
    with world.proxy.in_between():
        return world.proxy.away, stage.sink()


def _calls(
    stage: Stage, sink: AnySink, prepared: list[Committable]
) -> Mapping[str, Callable[[], object]]:
    """Each verb that reaches the target, as a call."""
    return {
        "validate": lambda: sink.validate(stage.schema),
        "a task": lambda: stage.prepare(sink, branch(2, batch_id=2), B),
        "commit": lambda: [sink.commit(committable) for committable in prepared],
        "abort": lambda: sink.abort(stage.named(sink, branch(3, batch_id=3))),
        "find_branches": lambda: stage.found(sink),
    }


def _said(call: Callable[[], object]) -> str:
    """The texts of the error that a call raises, and of those that led to it."""
    texts: list[str] = []
    try:
        call()
    except Exception as raised:  # noqa: BLE001 - its text is all that counts
        error: BaseException | None = raised
        while error is not None and len(texts) < _CHAIN:
            texts += [repr(error), str(error), *getattr(error, "__notes__", ())]
            error = error.__cause__ or error.__context__
    return "\n".join(texts)
