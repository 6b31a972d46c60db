"""One task: verbs in order, empty partitions, and what is left behind by a failure."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark import cloudpickle

from sparkonce.errors import ConfigurationError, PrepareRejectedError
from sparkonce.model import Owner
from sparkonce.protocol.rewriting import Rewrite
from sparkonce.sinks import FileSink
from sparkonce.spark_hooks import lanes, partition_writer
from sparkonce.spark_hooks.partition_writer import PartitionSummary, PartitionWriter
from sparkonce.txn_log.record import Incarnation
from tests.support.world import Handle, MemorySink, Process, Store, hashed

if TYPE_CHECKING:
    import pyarrow as pa

INCARNATION = Incarnation("orders", Owner("0" * 16, "5b1d"), 4)


def batches(*sizes: int) -> Iterator[pa.RecordBatch]:
    for size in sizes:
        yield hashed(range(size))


@pytest.fixture
def sinks() -> list[MemorySink]:
    return [MemorySink(Store(), Process(), name) for name in ("left", "right")]


def test_every_sink_gets_every_row_and_one_branch(sinks: list[MemorySink]) -> None:
    summary = PartitionWriter(sinks, INCARNATION, 7).write(batches(2, 0, 3), 5, 11)
    assert summary.partition == 5
    left, right = summary.parts["left"], summary.parts["right"]
    assert (left.partition, left.bytes, left.content.rows) == (5, 5 * 8, 5)
    assert left.content == right.content
    assert [left.branch, right.branch] == [c.branch_id.name for c in summary.committables]
    assert [str(c.branch_id) for c in summary.committables] == [
        "sparkonce.0000000000000000.5b1d.t4.left.p0.a11.b7.",
        "sparkonce.0000000000000000.5b1d.t4.right.p0.a11.b7.",
    ]
    for sink in sinks:
        assert sink.calls == ["beginTransaction", "write", "write", "preCommit"]
    assert PartitionSummary.decode(summary.encode()) == summary


def test_worker_with_another_version_is_refused(
    sinks: list[MemorySink], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it reads anything else, which may have other fields there."""
    sent = cloudpickle.dumps(PartitionWriter(sinks, INCARNATION, 7))
    received: PartitionWriter = cloudpickle.loads(sent)
    assert received.write(batches(2), 5, 11).parts.keys() == {"left", "right"}
    monkeypatch.setattr(partition_writer, "__version__", "0.0.1")
    with pytest.raises(ConfigurationError, match=r"on every executor"):
        cloudpickle.loads(sent)


def test_worker_that_lacks_a_module_of_a_sink_is_named(
    sinks: list[MemorySink], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = cloudpickle.dumps(PartitionWriter(sinks, INCARNATION, 7))
    monkeypatch.setitem(sys.modules, "tests.support.world", None)
    lacks = f"{socket.gethostname()} lacks the module 'tests.support.world': "
    with pytest.raises(ConfigurationError, match=f"{lacks}.*extras.*executors.*--py-files"):
        cloudpickle.loads(sent)


def test_what_a_task_waits_for_is_logged_in_a_worker(tmp_path: Path) -> None:
    """A Python worker has only the modules that come with the writer."""
    sent = tmp_path / "writer"
    sent.write_bytes(cloudpickle.dumps(PartitionWriter([FileSink(tmp_path)], INCARNATION, 7)))
    worker = "import pickle, sys; pickle.load(open(sys.argv[1], 'rb')); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", worker, str(sent)], capture_output=True, text=True, check=True
    )
    assert "sparkonce.watching" in done.stdout.split()


def test_rewrite_writes_what_is_lost_and_reads_the_rest(sinks: list[MemorySink]) -> None:
    """Only the lost partitions of the lost sink; a stateful query still sees every row read."""
    rewrite = Rewrite(1, {"right": frozenset({5})})
    writer = PartitionWriter(sinks, INCARNATION, 7, None, rewrite)
    assert writer.write(batches(2), 5, 11).parts.keys() == {"right"}
    assert [list(sink.store.prepared) for sink in sinks] == [
        [],
        ["sparkonce.0000000000000000.5b1d.t4.right.p1.a11.b7."],
    ]
    others = batches(2, 3)
    assert writer.write(others, 6, 12).parts == {}
    assert list(others) == []


def test_partition_without_rows_opens_no_branch(sinks: list[MemorySink]) -> None:
    summary = PartitionWriter(sinks, INCARNATION, 7).write(batches(0, 0), 5, 11)
    assert summary.committables == ()
    assert [sink.calls for sink in sinks] == [[], []]


def test_eager_writer_begins_while_rows_are_computed(sinks: list[MemorySink]) -> None:
    begun = [threading.Event() for _ in sinks]
    for sink, event in zip(sinks, begun, strict=True):
        sink.fail = lambda verb, event=event: verb == "beginTransaction" and event.set()  # type: ignore[misc]

    def computed() -> Iterator[pa.RecordBatch]:
        assert all(event.wait(5) for event in begun)
        yield from batches(2)

    writer = PartitionWriter(sinks, INCARNATION, 7, is_eager=True)
    assert len(writer.write(computed(), 0, 11).committables) == 2
    assert [sink.calls for sink in sinks] == [["beginTransaction", "write", "preCommit"]] * 2


def test_eager_writer_gives_up_what_gets_no_rows(sinks: list[MemorySink]) -> None:
    writer = PartitionWriter(sinks, INCARNATION, 7, is_eager=True)
    summary = writer.write(batches(0), 0, 11)
    assert (summary.parts, summary.committables) == ({}, ())
    assert [sink.calls for sink in sinks] == [["beginTransaction", "discard"]] * 2


@pytest.mark.parametrize("is_eager", [False, True])
@pytest.mark.parametrize("started", [0, 1, 2])
def test_container_that_starts_no_more_threads(
    monkeypatch: pytest.MonkeyPatch, started: int, is_eager: bool
) -> None:
    """The pids limit is met at any lane: the task fails, and nothing waits or stays behind."""
    sinks = [MemorySink(Store(), Process(), name) for name in ("left", "middle", "right")]
    start, left = threading.Thread.start, iter(range(started))

    def start_up_to_the_limit(thread: threading.Thread) -> None:
        if thread.name.startswith("sparkonce_") and next(left, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_up_to_the_limit)
    assert str(failure(sinks, is_eager=is_eager)) == "can't start new thread"
    for sink in sinks:
        assert sink.calls in ([], ["beginTransaction", "discard"])


def test_interrupt_while_a_thread_starts(
    sinks: list[MemorySink], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread runs, and nobody knows of its lane: it ends all the same, and prepares nothing."""
    start, begun, threads = threading.Thread.start, threading.Event(), list[threading.Thread]()
    sinks[1].fail = lambda verb: verb == "beginTransaction" and begun.set()  # type: ignore[assignment,func-returns-value]

    def start_and_be_interrupted(thread: threading.Thread) -> None:
        start(thread)
        threads.append(thread)
        if thread.name == "sparkonce_1":
            assert begun.wait(5)
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start_and_be_interrupted)
    monkeypatch.setattr(lanes, "IDLE_S", 0.01)
    assert isinstance(failure(sinks), KeyboardInterrupt)
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert [sink.store.prepared for sink in sinks] == [{}, {}]


def failure(sinks: list[MemorySink], *, is_eager: bool = False) -> BaseException:
    """How a task fails, in a thread of its own: so that a test need not wait where it hangs."""
    writer = PartitionWriter(sinks, INCARNATION, 7, is_eager=is_eager)
    failed: list[BaseException] = []

    def write() -> None:
        try:
            writer.write(batches(2, 3), 5, 11)
        except BaseException as error:  # noqa: BLE001 - returned
            failed.append(error)

    task = threading.Thread(target=write, daemon=True)
    task.start()
    task.join(20)
    assert failed, "the task hangs"
    return failed[0]


@pytest.mark.parametrize("verb", ["beginTransaction", "write", "preCommit"])
def test_failing_sink_is_named_and_nothing_stays_behind(sinks: list[MemorySink], verb: str) -> None:
    """Whatever fails: open handles are discarded, and what a neighbour prepared is aborted."""

    def fail(called: str) -> None:
        if called == verb:
            raise OSError("no route")

    sinks[1].fail = fail
    with pytest.raises(PrepareRejectedError, match="right.*OSError: no route") as caught:
        PartitionWriter(sinks, INCARNATION, 7).write(batches(2, 3), 5, 11)
    assert caught.value.branch_id is not None
    assert caught.value.branch_id.sink == "right"
    assert [sink.store.prepared for sink in sinks] == [{}, {}]
    opened = [sink for sink in sinks if not (sink is sinks[1] and verb == "beginTransaction")]
    for sink in opened:
        assert sink.calls[-1] in {"discard", "abort"}


def test_sink_is_told_while_no_rows_come(
    sinks: list[MemorySink], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {sink.name: threading.Event() for sink in sinks}

    class Patient(MemorySink):
        def idle(self, handle: Handle) -> None:
            assert handle.branch_id.sink == self.name
            told[self.name].set()

    def rows() -> Iterator[pa.RecordBatch]:
        yield from batches(2)
        assert all(event.wait(5) for event in told.values())
        yield from batches(3)

    monkeypatch.setattr(lanes, "IDLE_S", 0.01)
    patient = [Patient(sink.store, sink.process, sink.name) for sink in sinks]
    PartitionWriter(patient, INCARNATION, 7).write(rows(), 5, 11)
    assert [len(sink.store.prepared) for sink in patient] == [1, 1]


def test_slow_sink_holds_no_other_one_back(sinks: list[MemorySink]) -> None:
    """Kafka needs several round trips to begin; meanwhile the others write and prepare."""
    prepared = threading.Event()

    def wait_for_the_other(verb: str) -> None:
        if verb == "beginTransaction" and not prepared.wait(5):
            raise TimeoutError("the other sink waits for this one")

    def tell(verb: str) -> None:
        if verb == "preCommit":
            prepared.set()

    sinks[0].fail, sinks[1].fail = wait_for_the_other, tell
    PartitionWriter(sinks, INCARNATION, 7).write(batches(2), 5, 11)
    assert [len(sink.store.prepared) for sink in sinks] == [1, 1]


def test_rows_wait_for_the_slowest_sink(sinks: list[MemorySink]) -> None:
    """Memory is bounded: no more than one record batch waits behind the one being written."""
    taken = []

    def rows() -> Iterator[pa.RecordBatch]:
        for batch in batches(*[1] * 9):
            taken.append(sinks[0].calls.count("write"))
            yield batch

    def be_slow(verb: str) -> None:
        if verb == "write":
            time.sleep(0.01)

    sinks[0].fail = be_slow
    PartitionWriter(sinks, INCARNATION, 7).write(rows(), 5, 11)
    ahead = [number - written for number, written in enumerate(taken)]
    assert max(ahead) <= 3, ahead  # one in the reader's hand, one that waits, one begun


def test_failing_sink_ends_the_task_while_rows_still_come(sinks: list[MemorySink]) -> None:
    """The rows of a large partition are not read to their end for nothing."""
    left = iter(range(1000))

    def fail(verb: str) -> None:
        if verb == "write":
            raise OSError("disk full")

    sinks[1].fail = fail
    with pytest.raises(PrepareRejectedError, match="disk full"):
        PartitionWriter(sinks, INCARNATION, 7).write((hashed([n]) for n in left), 5, 11)
    assert next(left) < 900


def test_failing_source_discards_every_branch(sinks: list[MemorySink]) -> None:
    """The rows themselves fail (a user's function): no handle is left open."""

    def rows() -> Iterator[pa.RecordBatch]:
        yield from batches(2)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        PartitionWriter(sinks, INCARNATION, 7).write(rows(), 5, 11)
    assert [sink.calls[-1] for sink in sinks] == ["discard", "discard"]


def test_sink_that_prepared_fewer_rows_than_it_got_is_refused(sinks: list[MemorySink]) -> None:
    """If it counts them. A batch with too few rows must never be decided."""
    right = sinks[1]
    prepare = right.preCommit

    def counting(count: int) -> None:
        right.preCommit = lambda handle: replace(prepare(handle), rows=count)  # type: ignore[method-assign]

    counting(5)
    assert len(PartitionWriter(sinks, INCARNATION, 6).write(batches(2, 3), 0, 1).committables) == 2
    counting(4)
    with pytest.raises(PrepareRejectedError, match="prepared 4 rows of the 5 that it got"):
        PartitionWriter(sinks, INCARNATION, 7).write(batches(2, 3), 0, 1)
    assert [len(sink.store.prepared) for sink in sinks] == [1, 1]
    assert right.calls[-1] == "abort"
