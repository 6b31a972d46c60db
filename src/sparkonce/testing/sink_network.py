"""A part of `SinkContract`: requests and answers that the network loses or delays.

Each test runs a verb once to count its requests, and then again and again, each time with a fault
at another request. It needs `SinkWorld.proxy`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from sparkonce.errors import CommitUnresolvedError, SparkOnceError
from sparkonce.model import BranchId, Committable
from sparkonce.sinks import verbs
from sparkonce.sinks.base import AnySink
from sparkonce.testing.commit_lines import chosen
from sparkonce.testing.proxy import Fault, FaultKind, Proxy
from sparkonce.testing.sink_case import BRANCH, A, B, SinkCase
from sparkonce.testing.sink_world import Stage, branch, lists_branches, rows_of

if TYPE_CHECKING:
    import pyarrow as pa

LOST: Sequence[FaultKind] = ("request lost", "answer lost")
LATE: Sequence[FaultKind] = ("request late", "answer late")
_POLL_S = 0.01

_LATER = 1_000
"""So many batches later, a task has the number of an earlier one again."""


class SinkNetwork(SinkCase):
    """What `SinkContract` inherits; see there."""

    @pytest.mark.parametrize("kind", LOST)
    def test_network_fails_in_a_task(self, stage: Stage, kind: FaultKind) -> None:
        """The task fails and leaves nothing, or it has prepared all of its rows.

        A client that opens a new connection by itself may lose what it wrote on the old one.
        """
        proxy, sink = _in_between(stage)
        seen: list[pa.RecordBatch] = []
        clean: list[Committable] = []
        count = _requests(proxy, lambda: clean.extend(stage.prepare(sink, branch(0), A, B)))
        stage.abort(sink, clean)
        faults = []
        for n, at in enumerate(self._chosen(count), 1):
            sink.close()
            stage.abort(sink, stage.prepare(sink, branch(2 * n, batch_id=2 * n), A))  # connects
            with proxy.fault(kind, at) as fault:
                task = _task(stage, sink, 2 * n + 1)
            faults.append(fault)
            sink.close()
            if task is None:
                stage.sees(*seen, why=f"the task failed after {fault}; ")
                stage.sweep(sink)
            elif (count - at) % 2 == 0:  # the last one is preCommit's
                stage.commit(sink, stage.vote(sink, task))
                seen += [A, B]
                stage.sees(*seen, why=f"preCommit returned in spite of {fault}; ")
            else:
                sink.abort(task)
                stage.sees(*seen, why=f"the task was aborted after {fault}; ")
        _happened(faults)
        stage.nothing_left_by_sweep(sink)

    @pytest.mark.parametrize("end", ["commit", "abort"])
    def test_connections_end_between_two_writes(self, stage: Stage, end: str) -> None:
        """As when the server restarts: the task fails, or it has prepared all of its rows."""
        proxy, sink = _in_between(stage)
        many = rows_of(range(1000, 1000 + self.large_rows // 10))
        handle = stage.write(sink, BRANCH, many)
        proxy.cut()
        task = _end_of_task(stage, sink, BRANCH, handle, many, B)
        sink.close()
        if task is None:
            stage.sees(why="the task failed when its connection ended; ")
        elif end == "commit":
            stage.commit(sink, stage.vote(sink, task))
            stage.sees(many, B, why="preCommit returned though the connection had ended; ")
        else:
            sink.abort(task)
            stage.sees(why="the task was aborted after its connection had ended; ")
        stage.nothing_left_by_sweep(sink)

    @pytest.mark.parametrize("is_repeated", [False, True], ids=["first", "repeated"])
    @pytest.mark.parametrize("kind", LOST)
    def test_network_fails_in_commit(
        self, stage: Stage, kind: FaultKind, is_repeated: bool
    ) -> None:
        """If commit returns, readers get the rows; if it raises, the outcome is unknown.

        A repeated commit reads the proof of the first one. Silence does not show its absence.
        """
        proxy, sink = _in_between(stage)
        seen: list[pa.RecordBatch] = []

        def prepared() -> list[Committable]:
            committables = self._prepare_next(stage, sink, seen)
            if is_repeated:
                stage.commit(sink, committables)
            return committables

        stage.commit(sink, prepared())  # the first one in a target may have more to do
        committables = prepared()
        with proxy.fault() as none:
            stage.commit_all(sink, committables)
        assert none.requests, (
            "commit sent no request through world.proxy: let world.sink() read proxy.address in "
            "each call, and connect to it"
        )
        faults = []
        for at in self._chosen(none.requests):
            committables = prepared()
            with proxy.fault(kind, at) as fault:
                outcomes = verbs.commit_many(sink, committables)
            faults.append(fault)
            for error in filter(None, outcomes):
                assert isinstance(error, CommitUnresolvedError), (
                    f"commit raised {error!r} after {fault}: a broken connection shows neither "
                    "loss nor refusal, so raise CommitUnresolvedError, or let the client's error "
                    "pass"
                )
            if not any(outcomes):
                stage.sees(*seen, why=f"commit returned in spite of {fault}; ")
            stage.commit(sink, committables)
            stage.sees(*seen, why=f"commit was repeated after {fault}; ")
        _happened(faults)

    @pytest.mark.parametrize("kind", LOST)
    def test_network_fails_in_abort(self, stage: Stage, kind: FaultKind) -> None:
        """If abort returns, nothing is left; if it raises, the next sweep repeats it."""
        proxy, sink = _in_between(stage)
        parts: list[pa.RecordBatch] = []
        count = _requests(proxy, partial(stage.abort, sink, self._prepare_next(stage, sink, parts)))
        faults = []
        for at in self._chosen(count):
            committables = self._prepare_next(stage, sink, parts)
            has_returned = False
            with proxy.fault(kind, at) as fault, suppress(Exception):
                stage.abort(sink, committables)
                has_returned = True
            faults.append(fault)
            sink.close()
            if has_returned:
                stage.nothing_unfinished(why=f"abort returned in spite of {fault}, but ")
            stage.abort(sink, committables)
            stage.nothing_unfinished(why=f"abort was repeated after {fault}, but ")
            for error in verbs.commit_many(sink, committables):
                assert isinstance(error, SparkOnceError), (
                    f"commit of a branch that was aborted in spite of {fault} returned"
                )
        _happened(faults)
        stage.sees()

    @pytest.mark.parametrize("kind", LATE)
    def test_request_of_commit_is_late(self, stage: Stage, kind: FaultKind) -> None:
        """It arrives, or its answer, when another driver has committed this batch and the next.

        By then a branch of the same name, but for the batch, is prepared, and stays so. Until then
        the late one's session is open in the server, perhaps with locks.
        """
        proxy, sink = _in_between(stage)
        successor = stage.sink()  # connects to the server itself
        seen: list[pa.RecordBatch] = []
        stage.commit(sink, self._prepare_next(stage, sink, seen))
        ready = self._prepare_next(stage, sink, seen)
        count = _requests(proxy, partial(stage.commit_all, sink, ready))

        def overtake(committables: Sequence[Committable]) -> list[Committable]:
            attempt = len(seen) - 1
            stage.commit(successor, committables)
            stage.sweep(successor)
            stage.commit(successor, self._prepare_next(stage, successor, seen))
            stage.sweep(successor)
            return _prepare_again(stage, successor, attempt)

        faults = []
        for at in self._chosen(count):
            ready = self._prepare_next(stage, sink, seen)
            with proxy.fault(kind, at) as fault, ThreadPoolExecutor(2) as pool:
                late = pool.submit(verbs.commit_many, sink, ready)
                _reached(fault, late)
                other = pool.submit(overtake, ready)
                wait([other], self.longest_pause_s)  # it may need a lock of the late one
                fault.release()
                late.result()  # success or not: the log refuses this driver
                again = other.result()
            faults.append(fault)
            stage.sees(*seen, why=f"another driver committed during {fault}; ")
            stage.commit(successor, again)
            seen.append(B)
            stage.sees(*seen, why=f"a branch of the same name was committed after {fault}; ")
        _happened(faults)
        stage.nothing_left_by_sweep(sink)

    def test_request_of_abort_is_late(self, stage: Stage) -> None:
        """It arrives when a branch of the same name, but for the batch, is prepared: that stays."""
        proxy, sink = _in_between(stage)
        successor = stage.sink()
        first = self._prepare_next(stage, sink, [])
        first = stage.found(sink) if lists_branches(sink) else first
        count = _requests(proxy, partial(stage.abort, sink, first))
        faults = []
        seen: list[pa.RecordBatch] = []

        def overtake(committables: Sequence[Committable], attempt: int) -> list[Committable]:
            stage.abort(successor, committables)
            return _prepare_again(stage, successor, attempt)

        for n, at in enumerate(self._chosen(count), 1):
            sink.close()
            ready = stage.prepare(sink, branch(n, batch_id=n), A)
            listed = stage.found(sink) if lists_branches(sink) else ready  # as a sweep aborts
            with proxy.fault("request late", at) as fault, ThreadPoolExecutor(2) as pool:
                late = pool.submit(_abort_all, sink, listed)
                _reached(fault, late)
                other = pool.submit(overtake, ready, n)
                wait([other], self.longest_pause_s)
                fault.release()
                late.result()
                again = other.result()
            faults.append(fault)
            stage.sees(*seen, why=f"another driver aborted during {fault}; ")
            stage.commit(successor, again)
            seen.append(B)
            stage.sees(*seen, why=f"a branch of the same name was committed after {fault}; ")
        _happened(faults)
        stage.nothing_left_by_sweep(sink)

    def test_request_of_a_task_is_late(self, stage: Stage) -> None:
        """It arrives when a newer driver has swept the task and delivered its batch.

        The late task's rows stay hidden, and the next sweep leaves nothing of them.
        """
        proxy, sink = _in_between(stage)
        successor = stage.sink()
        if not lists_branches(successor):
            pytest.skip("the sink lists no branches, so nothing sweeps the task")
        clean: list[Committable] = []
        count = _requests(proxy, lambda: clean.extend(stage.prepare(sink, branch(0), A, B)))
        stage.abort(sink, clean)
        faults = []
        seen: list[pa.RecordBatch] = []

        def overtake(n: int) -> None:
            stage.sweep(successor)
            newer = branch(n, batch_id=n, token=branch().token + 1)
            stage.commit(successor, stage.prepare(successor, newer, A))
            stage.sweep(successor)

        for n, at in enumerate(self._chosen(count), 1):
            sink.close()
            stage.abort(sink, stage.prepare(sink, branch(2 * n, batch_id=2 * n), A))  # connects
            with proxy.fault("request late", at) as fault, ThreadPoolExecutor(2) as pool:
                late = pool.submit(_task, stage, sink, 2 * n + 1)
                _reached(fault, late)
                other = pool.submit(overtake, 2 * n + 1)
                wait([other], self.longest_pause_s)
                fault.release()
                late.result()
                other.result()
            faults.append(fault)
            seen.append(A)
            sink.close()
            stage.sees(*seen, why=f"a newer driver delivered the batch during {fault}; ")
            stage.sweep(successor)
            stage.sees(*seen, why=f"a sweep followed {fault}; ")
        _happened(faults)
        stage.nothing_left_by_sweep(successor)

    # -- helpers -----------------------------------------------------------------------------------

    def _chosen(self, count: int) -> Sequence[int]:
        return chosen(range(count), self.most_faults)

    @staticmethod
    def _prepare_next(stage: Stage, sink: AnySink, seen: list[pa.RecordBatch]) -> list[Committable]:
        """Prepare the next batch with new connections, and add its rows to `seen`."""
        sink.close()
        n = len(seen)
        seen.append(A)
        return stage.prepare(sink, branch(n, batch_id=n), A)


def _in_between(stage: Stage) -> tuple[Proxy, AnySink]:
    """The world's proxy, and a sink that passes it; without one the test is skipped."""
    proxy = stage.world.proxy
    if proxy is None:
        pytest.skip("the world has no proxy=")
    with proxy.in_between():
        return proxy, stage.sink()


def _prepare_again(stage: Stage, sink: AnySink, attempt: int) -> list[Committable]:
    """Prepare a branch of a later batch with the same name, as after 65,536 tasks."""
    return stage.prepare(sink, branch(attempt, batch_id=attempt + _LATER), B)


def _abort_all(sink: AnySink, committables: Sequence[Committable]) -> None:
    """Abort them; success or not, for a driver that is replaced."""
    list(verbs.abort_many(sink, committables))


def _requests(proxy: Proxy, call: Callable[[], object]) -> int:
    """How many requests a call sends; if none, the test is skipped."""
    with proxy.fault() as none:
        call()
    if not none.requests:
        pytest.skip("it sends no request through world.proxy")
    return none.requests


def _happened(faults: Sequence[Fault]) -> None:
    assert any(fault.has_happened for fault in faults), (
        f"no fault happened, as each call sent fewer requests than the one before: {faults}"
    )


def _reached(fault: Fault, call: Future[Any]) -> None:
    """Wait until the fault has happened, or the call has ended."""
    while not (fault.has_happened or call.done()):
        wait([call], _POLL_S)


def _task(stage: Stage, sink: AnySink, n: int) -> Committable | None:
    """Run a task; None if it fails."""
    branch_id = branch(n, batch_id=n)
    try:
        handle = stage.write(sink, branch_id, A)
    except Exception:  # noqa: BLE001 - Spark would run the task again
        return None
    return _end_of_task(stage, sink, branch_id, handle, A, B)


def _end_of_task(
    stage: Stage, sink: AnySink, branch_id: BranchId, handle: Any, *batches: pa.RecordBatch
) -> Committable | None:
    """Write the last one of the task's batches, and prepare; None if it fails."""
    try:
        sink.write(handle, stage.world.selected(batches[-1]))
        return stage.checked(sink, branch_id, sink.preCommit(handle), *batches)
    except Exception:  # noqa: BLE001 - Spark would run the task again
        with suppress(Exception):
            sink.discard(handle)
        return None
