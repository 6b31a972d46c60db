"""A part of `SinkContract`: requests that arrive late, when another driver has gone on.

    driver    ── request ──► proxy holds it ──────────────────► it arrives, and changes nothing
    successor ─────► commits or aborts the same, prepares more ─┘

Each test runs a verb once to count its requests, and then again and again, each time with another
request late. It needs `SinkWorld.proxy`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import pytest

from sparkonce.model import Committable
from sparkonce.sinks import verbs
from sparkonce.sinks.base import AnySink
from sparkonce.testing.commit_lines import chosen
from sparkonce.testing.proxy import Fault, FaultKind
from sparkonce.testing.sink_case import A, B, SinkCase
from sparkonce.testing.sink_network import (
    happened,
    in_between,
    prepare_next,
    requests_of,
    run_task,
)
from sparkonce.testing.sink_world import Stage, branch, lists_branches

if TYPE_CHECKING:
    import pyarrow as pa

ResultT = TypeVar("ResultT")

LATE: Sequence[FaultKind] = ("request late", "answer late")
_POLL_S = 0.01

_LATER = 1_000
"""So many batches later, a task has the number of an earlier one again."""


class SinkLate(SinkCase):
    """What `SinkContract` inherits; see there."""

    @pytest.mark.parametrize("kind", LATE)
    def test_request_of_commit_is_late(self, stage: Stage, kind: FaultKind) -> None:
        """It arrives, or its answer, when another driver has committed this batch and the next.

        By then a branch of the same name, but for the batch, is prepared, and stays so. Until then
        the late one's session is open in the server, perhaps with locks.
        """
        proxy, sink = in_between(stage)
        successor = stage.sink()  # connects to the server itself
        seen: list[pa.RecordBatch] = []
        stage.commit(sink, prepare_next(stage, sink, seen))
        ready = prepare_next(stage, sink, seen)
        count = requests_of(proxy, partial(stage.commit_all, sink, ready))

        def overtake(committables: Sequence[Committable]) -> list[Committable]:
            attempt = len(seen) - 1
            stage.commit(successor, committables)
            stage.sweep(successor)
            stage.commit(successor, prepare_next(stage, successor, seen))
            stage.sweep(successor)
            return _prepare_again(stage, successor, attempt)

        faults = []
        for at in chosen(range(count), self.most_faults):
            ready = prepare_next(stage, sink, seen)
            with proxy.fault(kind, at) as fault:
                commit = partial(verbs.commit_many, sink, ready)
                again = self._overtaken(fault, commit, partial(overtake, ready))
            faults.append(fault)
            _still_commits(stage, successor, again, seen, fault)
        happened(faults)
        stage.nothing_left_by_sweep(sink)

    def test_request_of_abort_is_late(self, stage: Stage) -> None:
        """It arrives when a branch of the same name, but for the batch, is prepared: that stays."""
        proxy, sink = in_between(stage)
        successor = stage.sink()
        first = _to_abort(stage, sink, prepare_next(stage, sink, []))
        count = requests_of(proxy, partial(stage.abort, sink, first))
        faults = []
        seen: list[pa.RecordBatch] = []

        def overtake(committables: Sequence[Committable], attempt: int) -> list[Committable]:
            stage.abort(successor, committables)
            return _prepare_again(stage, successor, attempt)

        for n, at in enumerate(chosen(range(count), self.most_faults), 1):
            sink.close()
            ready = stage.prepare(sink, branch(n, batch_id=n), A)
            abort = partial(_abort_all, sink, _to_abort(stage, sink, ready))
            with proxy.fault("request late", at) as fault:
                again = self._overtaken(fault, abort, partial(overtake, ready, n))
            faults.append(fault)
            _still_commits(stage, successor, again, seen, fault)
        happened(faults)
        stage.nothing_left_by_sweep(sink)

    def test_request_of_a_task_is_late(self, stage: Stage) -> None:
        """It arrives when a newer driver has swept the task and delivered its batch.

        The late task's rows stay hidden, and the next sweep leaves nothing of them.
        """
        proxy, sink = in_between(stage)
        successor = stage.sink()
        if not lists_branches(successor):
            pytest.skip("the sink lists no branches, so nothing sweeps the task")
        clean: list[Committable] = []
        count = requests_of(proxy, lambda: clean.extend(stage.prepare(sink, branch(0), A, B)))
        stage.abort(sink, clean)
        faults = []
        seen: list[pa.RecordBatch] = []

        def overtake(n: int) -> None:
            stage.sweep(successor)
            newer = branch(n, batch_id=n, token=branch().token + 1)
            stage.commit(successor, stage.prepare(successor, newer, A))
            stage.sweep(successor)

        for n, at in enumerate(chosen(range(count), self.most_faults), 1):
            sink.close()
            stage.abort(sink, stage.prepare(sink, branch(2 * n, batch_id=2 * n), A))  # connects
            with proxy.fault("request late", at) as fault:
                task = partial(run_task, stage, sink, 2 * n + 1)
                self._overtaken(fault, task, partial(overtake, 2 * n + 1))
            faults.append(fault)
            seen.append(A)
            sink.close()
            stage.sees(*seen, why=f"a newer driver delivered the batch during {fault}; ")
            stage.sweep(successor)
            stage.sees(*seen, why=f"a sweep followed {fault}; ")
        happened(faults)
        stage.nothing_left_by_sweep(successor)

    def _overtaken(
        self, fault: Fault, act: Callable[[], object], overtake: Callable[[], ResultT]
    ) -> ResultT:
        """Let `overtake` run while a request of `act` is held back."""
        with ThreadPoolExecutor(2) as pool:
            late = pool.submit(act)
            while not (fault.has_happened or late.done()):
                wait([late], _POLL_S)
            other = pool.submit(overtake)
            wait([other], self.longest_pause_s)  # it may need a lock of the late one
            fault.release()
            late.result()  # success or not: the log refuses this driver
            return other.result()


def _prepare_again(stage: Stage, sink: AnySink, attempt: int) -> list[Committable]:
    """Prepare a branch of a later batch with the same name, as after 65,536 tasks."""
    return stage.prepare(sink, branch(attempt, batch_id=attempt + _LATER), B)


def _still_commits(
    stage: Stage,
    sink: AnySink,
    committables: Sequence[Committable],
    seen: list[pa.RecordBatch],
    fault: Fault,
) -> None:
    """The branch of `_prepare_again` is hidden after the fault, and can be committed."""
    stage.sees(*seen, why=f"another driver went on during {fault}; ")
    stage.commit(sink, committables)
    seen.append(B)
    stage.sees(*seen, why=f"a branch of the same name was committed after {fault}; ")


def _to_abort(
    stage: Stage, sink: AnySink, committables: Sequence[Committable]
) -> Sequence[Committable]:
    """What a sweep would abort; the committables where the sink lists no branches."""
    return stage.found(sink) if lists_branches(sink) else committables


def _abort_all(sink: AnySink, committables: Sequence[Committable]) -> None:
    """Abort them; success or not, for a driver that is replaced."""
    list(verbs.abort_many(sink, committables))
