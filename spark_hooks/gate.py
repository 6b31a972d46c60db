"""The gate in front of a pipeline's batches: `stop` closes it, so a query ends between two of them.

    foreachBatch(df, N) ─► gate ─► deliver N ─► Spark writes commits/N
                            │
      held: close ──────────┤   1. no batch is inside
            wait for ───────┤   2. Spark's commit log has every batch that the sinks have
                            │   3. the transaction log has nothing unfinished
            run an action, such as query.stop()
            open ───────────┘

A call at the closed gate waits in the JVM's ``Thread.sleep``, in the thread that Spark interrupts
when it stops the query. The call then raises what Spark recognises as its own interrupt, and the
query ends without an exception. If the query is not stopped, the call continues with its batch as
soon as the gate opens.

A replay passes the closed gate: its batch is already in the sinks or decided, and the sinks agree
with Spark only after Spark has committed it too.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from py4j.protocol import Py4JJavaError

from sparkonce.errors import ProtocolError
from sparkonce.spark_hooks.running_query import RunningQuery, query_calling
from sparkonce.spark_hooks.serving import Serving
from sparkonce.storage.hadoop import java_class
from sparkonce.txn_log.record import State

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming import StreamingQuery

logger = logging.getLogger("sparkonce")

_PAUSE_MS: Final = 20
_FIRST_POLL_S: Final = 0.01
_LONGEST_POLL_S: Final = 0.5
_FIRST_PLAN_S: Final = 10.0
"""How long Spark may plan its first batch; a source that does not respond must not block a stop."""


class _InterruptedError(Exception):
    """Spark's own interrupt, in the words that Spark looks for in a Python traceback.

    Spark looks with a regular expression that recurses at each character after these words. A
    `Py4JJavaError` shows the JVM's whole stack trace there, on which Spark 4.3 gets a
    `StackOverflowError`.
    """

    def __init__(self) -> None:
        super().__init__(
            "py4j.protocol.Py4JJavaError: An error occurred while calling the gate of sparkonce\n"
            ": java.lang.InterruptedException: the query was stopped"
        )


class Gate:
    """The gate of one pipeline.

    Attributes:
        waiting: the batch whose call waits at the closed gate; None while none does.
    """

    def __init__(self, serving: Serving) -> None:
        self.waiting: int | None = None
        self._serving = serving
        self._state = threading.Lock()  # of the three below
        self._last = math.inf  # the last batch that may pass; the gate is open for all
        self._inside = 0
        self._failed: int | None = None  # the batch of the last call, if it failed
        self._turn = threading.RLock()  # of the thread that holds the query

    # -- the side of foreachBatch ------------------------------------------------------------------

    @contextmanager
    def passing(self, batch_df: DataFrame, batch_id: int) -> Iterator[None]:
        """Deliver a batch inside of it; waits while the gate is closed for the batch.

        Raises:
            _InterruptedError: Spark has stopped the query meanwhile.
        """
        if not self._enters(batch_id):
            self._wait(batch_df, batch_id)
        try:
            yield
        except BaseException:
            if self._serving.may_serve(query_calling(batch_df)):
                self._failed = batch_id  # before it leaves
            raise
        finally:
            with self._state:
                self._inside -= 1

    def _enters(self, batch_id: int) -> bool:
        with self._state:
            self._failed = None
            if batch_id > self._last:
                return False
            self._inside += 1
            return True

    def _wait(self, batch_df: DataFrame, batch_id: int) -> None:
        """Wait until the gate opens, without any lock."""
        query = RunningQuery.calling(batch_df)
        jvm: Any = batch_df.sparkSession.sparkContext._jvm  # noqa: SLF001 - py4j is the only way
        thread = java_class(jvm, "java.lang.Thread")
        logger.info("pipeline %r: batch %d waits", self._serving.settings.name, batch_id)
        self.waiting = batch_id
        try:
            while not self._enters(batch_id):
                if query.is_stopping:
                    # The user's function may have caught Spark's own interrupt before this call.
                    thread.currentThread().interrupt()
                thread.sleep(_PAUSE_MS)
        except Py4JJavaError:
            raise _InterruptedError from None  # without the longer text of its cause
        finally:
            self.waiting = None

    # -- the side of stop --------------------------------------------------------------------------

    @contextmanager
    def held(self, query: StreamingQuery, timeout_s: float | None) -> Iterator[None]:
        """See `sparkonce.ExactlyOnce.held`."""
        running = RunningQuery.of(query)
        self._check_can_hold(running)
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        if not self._turn.acquire(timeout=min(_left(deadline), threading.TIMEOUT_MAX)):
            raise self._too_late(timeout_s, "another thread holds the query")
        before = self._last  # closed, if this thread holds the query already
        try:
            self._let_pass(min(before, -1))
            self._await_standstill(query, running, deadline, timeout_s)
            yield
        finally:  # after Ctrl-C too: a call that waits must never wait for ever
            self._let_pass(before)
            self._turn.release()

    def _let_pass(self, last: float) -> None:
        with self._state:
            self._last = last

    def _check_can_hold(self, running: RunningQuery) -> None:
        name = self._serving.settings.name
        self._serving.check_serves(running)
        bound = running.files.binding()
        if bound is not None and bound.pipeline != name:
            raise ProtocolError(
                f"the query {running.run.query_id} belongs to pipeline {bound.pipeline!r}, not to "
                f"{name!r}: stop it with the pipeline that it calls"
            )
        if running.is_this_thread:
            raise ProtocolError(
                f"pipeline {name!r} cannot be stopped or held in its query's own foreachBatch, "
                "which would wait for itself: do it in another thread, and do not wait for that"
            )
        self._check_is_newest(running)

    def _check_is_newest(self, running: RunningQuery) -> None:
        if running.is_followed:
            raise ProtocolError(
                f"the query {running.run.query_id} was started again after the run "
                f"{running.run.run_id}: pass the query that its newest start() returned"
            )

    def _await_standstill(
        self, query: StreamingQuery, running: RunningQuery, deadline: float, timeout_s: float | None
    ) -> None:
        """Wait until the query is between two batches, or has ended there."""
        wait_s, planned_by = _FIRST_POLL_S, time.monotonic() + _FIRST_PLAN_S
        while running.is_active:
            reason = self._what_runs(running, deadline)
            if reason is None and not (_left(planned_by) and self._plans_first(running)):
                return
            if _left(deadline) <= 0:
                raise self._too_late(timeout_s, reason or "Spark plans its first batch")
            time.sleep(min(wait_s, _left(deadline)))
            wait_s = min(wait_s * 1.5, _LONGEST_POLL_S)
        try:
            query.awaitTermination()  # raises what the query failed with
        finally:
            self._serving.end(running)
        self._check_is_newest(running)
        if reason := self._what_is_open(running):
            raise ProtocolError(
                f"the query of pipeline {self._serving.settings.name!r} has ended, and {reason}: "
                "query.stop() or another program stopped it during a batch. The next start "
                "continues with this batch"
            )

    def _what_runs(self, running: RunningQuery, deadline: float) -> str | None:
        """Why the query does not stand between two batches; None when it does."""
        if self._inside:
            return "a batch is being delivered"
        failed = self._failed
        if failed is not None and running.committed() < failed:  # else the user's function hid it
            return f"batch {failed} has failed, and the query has not ended yet"
        lock = self._serving.lock
        if not lock.acquire(timeout=min(_left(deadline), _LONGEST_POLL_S)):
            return "a batch is being committed"
        try:
            return self._what_is_open(running)
        finally:
            lock.release()

    def _plans_first(self, running: RunningQuery) -> bool:
        """Whether an interrupt now may make a fresh checkpoint useless.

        An interrupted write of ``offsets/0`` leaves a temporary file, and Spark 4.3 then refuses
        the checkpoint: STATE_STORE_CHECKPOINT_LOCATION_NOT_EMPTY.
        """
        return self.waiting is None and running.is_planning_first

    def _what_is_open(self, running: RunningQuery) -> str | None:
        """What the sinks, the log or Spark has still to do; None when they agree."""
        name = self._serving.settings.name
        self._serving.recover_at_start(running)
        run = self._serving.run
        if run is None or run.query.run != running.run:
            return None  # nothing was begun for this checkpoint, and no batch begins now
        if run.failure is not None:
            raise run.failure
        if run.is_taken():
            raise ProtocolError(
                f"another ExactlyOnce object {name!r} serves this run of the query "
                f"{running.run.query_id}: stop it with that object"
            )
        # Read before the log: what Spark commits meanwhile is waited for once more.
        committed = running.committed()
        newest = run.pipeline.log.newest(name, running.run.query_id)
        if newest is not None and newest.state is not State.ABANDONED:
            batch_id = newest.id.batch_id
            if batch_id > committed:
                self._let_pass(max(self._last, batch_id))
                return f"Spark's commit log does not have batch {batch_id}"
        for record in run.pipeline.log.unfinished(name):
            return f"{record.id} is {record.state}, not complete"
        return None

    def _too_late(self, timeout_s: float | None, reason: str) -> TimeoutError:
        return TimeoutError(
            f"pipeline {self._serving.settings.name!r} was not between two batches within "
            f"{timeout_s} s: {reason}. Its query continues; try again with a longer timeout"
        )


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.0)
