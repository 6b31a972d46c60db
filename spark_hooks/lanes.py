"""One sink's share of a Spark task: its branch, and the thread that takes it through its verbs.

    task's thread ─► put(rows) ─► queue of one record batch ─► lane's thread: begin, write*, prepare

A slow sink holds up the others only when its queue is full.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from queue import Empty, SimpleQueue
from threading import Semaphore
from typing import TYPE_CHECKING, Any, NamedTuple

from sparkonce.errors import PrepareRejectedError, SparkOnceError
from sparkonce.model import BranchId, Committable
from sparkonce.sinks.base import AnySink
from sparkonce.sinks.committables import check_committable, check_rows
from sparkonce.steps import step
from sparkonce.txn_log.record import Fingerprint, Part

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger("sparkonce")

_BATCHES_WAITING = 1
"""The number of record batches that may wait while the sink writes another one."""

IDLE_S = 1.0
"""After how many seconds without rows the sink's `idle` is called, and how often from then on."""


class Rows(NamedTuple):
    """A record batch for one sink, and its fingerprint."""

    batch: pa.RecordBatch
    content: Fingerprint


class Branch:
    """One sink's verbs in this task, in order, with errors that name the branch.

    Attributes:
        seconds: how long each step has taken so far, by its name.
    """

    def __init__(self, sink: AnySink, branch_id: BranchId, partition: int) -> None:
        self._partition = partition
        self.sink = sink
        self.branch_id = branch_id
        self.committable: Committable | None = None
        self._handle: Any = None
        self._open = False
        self._rows = 0
        self._bytes = 0
        self._contents: list[Fingerprint] = []
        self.seconds: dict[str, float] = {}

    def begin(self) -> None:
        with self._timed("open"):
            self._handle = self._call(lambda: self.sink.beginTransaction(self.branch_id))
            self._open = True

    def write(self, rows: Rows) -> None:
        with self._timed("write"):
            self._call(lambda: self.sink.write(self._handle, rows.batch))
            self._rows += rows.batch.num_rows
            self._bytes += rows.batch.nbytes
            self._contents.append(rows.content)

    def idle(self) -> None:
        with self.step("idle"):
            self._call(lambda: self.sink.idle(self._handle))

    def end(self) -> None:
        """Prepare what was written; discard the branch where no row has come."""
        if not self._contents:
            self.discard()
            return
        with self._timed("prepare"):
            prepared = self._call(lambda: self.sink.preCommit(self._handle))
            self._open = False
            self.committable = check_committable(self.sink, prepared, self.branch_id)
            check_rows(self.sink, self.committable, self._rows)

    def part(self) -> Part:
        content = reduce(operator.add, self._contents)
        return Part(self._partition, self.branch_id.name, self._bytes, content)

    def discard(self) -> None:
        """Free the handle and abort what was prepared, if possible."""
        try:
            with self.step("discard"):
                if self._open:
                    self.sink.discard(self._handle)
                if self.committable is not None:
                    self.sink.abort(self.committable)
        except Exception:
            logger.warning("%s is left to the driver's sweep", self.branch_id, exc_info=True)

    def step(self, name: str) -> step:
        batch, sink = self.branch_id.batch_id, self.sink
        return step(name, batch=batch, sink=sink, of=self.branch_id, partition=self._partition)

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        with self.step(name) as entered:
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + entered.seconds

    def _call(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except SparkOnceError:
            raise
        except Exception as error:
            raise PrepareRejectedError(
                f"{self.sink!r} failed with {type(error).__name__}: {error}", self.branch_id
            ) from error


class Lane:
    """Takes one branch through its verbs in a thread of its own.

    Args:
        pool: runs the lane's thread.
        branch: the branch to begin, write and prepare.
        failures: shared by all lanes of the task and by the reader of its rows. After the first
            failure no lane prepares any more.
    """

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        branch: Branch,
        failures: list[BaseException],
    ) -> None:
        self.branch = branch
        self._failures = failures
        self._rows: SimpleQueue[Rows | None] = SimpleQueue()
        self._room = Semaphore(1 + _BATCHES_WAITING)
        self.done = pool.submit(self._run)

    def put(self, rows: Rows) -> None:
        """Hand rows over; wait while there is no room."""
        self._room.acquire()
        self._rows.put(rows)

    def end(self) -> None:
        """No rows come any more: prepare, unless something has failed."""
        self._rows.put(None)

    def _run(self) -> None:
        try:
            if self._failures:
                return  # no thread could be started for it: another lane's thread runs it
            self.branch.begin()
            while (rows := self._next()) is not None and not self._failures:
                self.branch.write(rows)
                self._room.release()
            if not self._failures:
                self.branch.end()
        except BaseException as error:  # noqa: BLE001 - the task raises it
            self._failures.append(error)
        finally:
            self._room.release()  # `put` must not wait for a lane that has ended

    def _next(self) -> Rows | None:
        while True:
            try:
                return self._rows.get(timeout=IDLE_S)
            except Empty:
                if self._failures:
                    return None  # the start of its thread was interrupted: nobody calls `end`
                self.branch.idle()
