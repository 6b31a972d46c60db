"""A part of `SinkContract`: requests and answers that the network loses.

Each test runs a verb once to count its requests, and then again and again, each time with a fault
at another request. It needs `SinkWorld.proxy`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from sparkonce.testing.sink_world import Stage, branch, rows_of

if TYPE_CHECKING:
    import pyarrow as pa

LOST: Sequence[FaultKind] = ("request lost", "answer lost")


class SinkNetwork(SinkCase):
    """What `SinkContract` inherits; see there."""

    @pytest.mark.parametrize("kind", LOST)
    def test_network_fails_in_a_task(self, stage: Stage, kind: FaultKind) -> None:
        """The task fails and leaves nothing, or it has prepared all of its rows.

        A client that opens a new connection by itself may lose what it wrote on the old one.
        """
        proxy, sink = in_between(stage)
        seen: list[pa.RecordBatch] = []
        clean: list[Committable] = []
        count = requests_of(proxy, lambda: clean.extend(stage.prepare(sink, branch(0), A, B)))
        stage.abort(sink, clean)
        faults = []
        for n, at in enumerate(chosen(range(count), self.most_faults), 1):
            sink.close()
            stage.abort(sink, stage.prepare(sink, branch(2 * n, batch_id=2 * n), A))  # connects
            with proxy.fault(kind, at) as fault:
                task = run_task(stage, sink, 2 * n + 1)
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
        happened(faults)
        stage.nothing_left_by_sweep(sink)

    @pytest.mark.parametrize("end", ["commit", "abort"])
    def test_connections_end_between_two_writes(self, stage: Stage, end: str) -> None:
        """As when the server restarts: the task fails, or it has prepared all of its rows."""
        proxy, sink = in_between(stage)
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
        proxy, sink = in_between(stage)
        seen: list[pa.RecordBatch] = []

        def prepared() -> list[Committable]:
            committables = prepare_next(stage, sink, seen)
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
        for at in chosen(range(none.requests), self.most_faults):
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
        happened(faults)

    @pytest.mark.parametrize("kind", LOST)
    def test_network_fails_in_abort(self, stage: Stage, kind: FaultKind) -> None:
        """If abort returns, nothing is left; if it raises, the next sweep repeats it."""
        proxy, sink = in_between(stage)
        parts: list[pa.RecordBatch] = []
        count = requests_of(proxy, partial(stage.abort, sink, prepare_next(stage, sink, parts)))
        faults = []
        for at in chosen(range(count), self.most_faults):
            committables = prepare_next(stage, sink, parts)
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
        happened(faults)
        stage.sees()


def in_between(stage: Stage) -> tuple[Proxy, AnySink]:
    """The world's proxy, and a sink that passes it; without one the test is skipped."""
    proxy = stage.world.proxy
    if proxy is None:
        pytest.skip("the world has no proxy=")
    with proxy.in_between():
        return proxy, stage.sink()


def prepare_next(stage: Stage, sink: AnySink, seen: list[pa.RecordBatch]) -> list[Committable]:
    """Prepare the next batch with new connections, and add its rows to `seen`."""
    sink.close()
    n = len(seen)
    seen.append(A)
    return stage.prepare(sink, branch(n, batch_id=n), A)


def requests_of(proxy: Proxy, call: Callable[[], object]) -> int:
    """How many requests a call sends; if none, the test is skipped."""
    with proxy.fault() as none:
        call()
    if not none.requests:
        pytest.skip("it sends no request through world.proxy")
    return none.requests


def happened(faults: Sequence[Fault]) -> None:
    assert any(fault.has_happened for fault in faults), (
        f"no fault happened, as each call sent fewer requests than the one before: {faults}"
    )


def run_task(stage: Stage, sink: AnySink, n: int) -> Committable | None:
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
