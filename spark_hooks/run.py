"""One run of one query: what is alive between its start and its end.

    first batch, or the query's start ─► validate ─► lease ─► recover
    each batch                        ─► deliver
    Spark writes commits/N            ─► commit N       (commit="after_checkpoint")
    any error                         ─► the lease is released; what comes next takes another

If a decided batch is unfinished, recovery comes first and the sinks are validated after it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tenacity import Retrying, retry_if_not_exception_type, wait_exponential

from sparkonce.errors import (
    CommitRejectedError,
    ConfigurationError,
    FencedError,
    LogCorruptError,
    LogError,
    PreparedBranchLostError,
    ProtocolError,
)
from sparkonce.protocol.driver import Driver
from sparkonce.protocol.pipeline import Pipeline
from sparkonce.spark_hooks.aggregates import check_aggregates
from sparkonce.spark_hooks.batch import Learned, SparkBatch
from sparkonce.spark_hooks.describing import facts_of
from sparkonce.spark_hooks.entering import CheckpointEntrance
from sparkonce.spark_hooks.running_query import RunningQuery
from sparkonce.spark_hooks.settings import Settings
from sparkonce.spark_hooks.sink_use import User, check_are_free, free, take
from sparkonce.spark_hooks.small_batches import SmallBatches
from sparkonce.spark_hooks.validating import patiently
from sparkonce.txn_log.record import Incarnation, State, TransactionRecord
from sparkonce.watching import still_trying

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

logger = logging.getLogger("sparkonce")

_LONGEST_POLL_S: Final = 1.0
_LONGEST_WAIT_S: Final = 30.0

PERMANENT: Final = (
    CommitRejectedError,
    ConfigurationError,
    FencedError,
    LogCorruptError,
    PreparedBranchLostError,
    ProtocolError,
)
"""Errors that waiting does not resolve."""


class Run:
    """One run of one query of a pipeline.

    The caller of every method but `commit_soon` holds `lock`, the owner's.
    """

    def __init__(
        self, settings: Settings, query: RunningQuery, pipeline: Pipeline, lock: threading.RLock
    ) -> None:
        self.query = query
        self.pipeline = pipeline
        self.failure: Exception | None = None
        self._settings = settings
        self._lock = lock
        self._driver: Driver | None = None
        self._may_hold = False
        self._user: User | None = None
        self._seen_run: str | None = None
        self._delivered = -1
        self._validated_for: tuple[str, ...] | None = None
        self._learned = Learned(SmallBatches(settings.driver_rows, settings.small_batches_first))

    @property
    def has_driver(self) -> bool:
        """Whether this object holds the run's token."""
        return self._driver is not None

    @property
    def pending(self) -> TransactionRecord | None:
        """The batch that is prepared and waits for Spark's checkpoint."""
        return None if self._driver is None else self._driver.pending

    # -- batches ---------------------------------------------------------------------------------

    def deliver(self, batch_df: DataFrame, batch_id: int) -> None:
        """Deliver one batch; see `sparkonce.ExactlyOnce.__call__`."""
        # Spark replays nothing within a run. A call that failed may be made again.
        if batch_id <= self._delivered:
            raise _called_twice(self._settings, batch_id)
        if isinstance(self.failure, PERMANENT):
            raise self.failure
        self.failure = None  # the driver was let go, so a recovery comes first
        batch = SparkBatch(
            batch_df,
            batch_id,
            self._settings.sinks,
            self.query,
            self._learned,
            telemetry=self._settings.telemetry,
        )
        try:
            if self._driver is None:
                # What is decided must not wait for a sink that cannot be written now.
                if not self.pipeline.log.unfinished(self.pipeline.name):
                    self._validate(batch)
                self._driver = self._start(batch_id)
            self._validate(batch)
            self._deliver(self._driver, batch)
        except BaseException as error:
            self._let_go(error)
            raise
        self._delivered = batch_id
        if self.pending is not None:
            threading.Thread(target=self.commit_soon, args=(batch_id,), daemon=True).start()

    def _deliver(self, driver: Driver, batch: SparkBatch) -> None:
        try:
            driver.deliver(batch)
        except FencedError as error:
            with contextlib.suppress(LogError):
                if self.is_taken():
                    raise _called_twice(self._settings, batch.batch_id) from error
            raise

    def recover(self) -> None:
        """Recover without a batch: a start that finds no new data never calls foreachBatch.

        It does nothing if no batch is unfinished, another object serves this run, or another run
        has followed it.
        """
        if self._driver is not None or self.query.is_followed:
            return
        # A driver that runs must not be fenced by a start whose sinks nobody has checked.
        if not self.pipeline.log.unfinished(self.pipeline.name):
            return
        # In this order: once a run has ended, Spark has written its last commit.
        is_active, committed = self.query.is_active, self.query.committed()
        # It would abandon a batch that Spark is about to commit: another object's, or one of this
        # run whose commit failed, which its own thread repeats.
        if is_active and (
            self.is_taken() or self.failure is not None or committed < self._delivered
        ):
            return
        self._driver = self._start(committed + 1, has_batch=not is_active)
        self.failure = None

    def is_taken(self) -> bool:
        """Whether another object has taken a token in this run of the query."""
        head = self.pipeline.log.head(self.pipeline.name)
        if head is None or head.run_id != self.query.run.run_id:
            return False
        if self._user is None:
            return not self._may_hold
        return head.token != self._user[1]

    def _start(self, batch_id: int, *, has_batch: bool = True) -> Driver:
        """Take a token, which fences the driver before, and recover."""
        entrance = CheckpointEntrance.look(
            self.pipeline,
            self.query,
            batch_id,
            replaces=self._settings.replaces,
            adopt=self._settings.adopt,
            had_token=self._user is not None,
            seen_run=self._look_first(),
            has_batch=has_batch,
        )
        check_are_free(self._settings.sinks, self.query)
        try:
            claim = replace(entrance.claim, is_repeated=self._may_hold)
            driver = Driver.start(self.pipeline, claim, entrance)
            is_second = self._user is None and _is_called_elsewhere(
                self.pipeline, driver.incarnation, entrance, batch_id
            )
        except LogError:
            self._may_hold = True  # the log may have given a token before the error
            raise
        if is_second:
            raise _called_twice(self._settings, batch_id)
        self._user = take(self._settings.all_sinks, self.query, driver.incarnation.token)
        entrance.log_start(self._settings, driver)
        try:
            driver.recover()
        except BaseException as error:
            self._let_go(error)
            raise
        return driver

    def _look_first(self) -> str:
        """The run that held the pipeline when this run first looked; empty where none did."""
        if self._seen_run is None:
            head = self.pipeline.log.head(self.pipeline.name)
            self._seen_run = "" if head is None else head.run_id
        return self._seen_run

    def _validate(self, batch: SparkBatch) -> None:
        """Let the sinks check themselves; try again while a server is unreachable, for a time.

        A batch with other columns is checked again: sinks write by what they found.
        """
        if self._validated_for != batch.columns:
            check_are_free(self._settings.sinks, self.query)
            check_aggregates(self.query.files, self.query.executed_plan, self._settings.adopt)
            patiently(batch.validate, self.pipeline.name, lambda: not self.query.is_stopping)
            self._validated_for = batch.columns
            if self._settings.telemetry is not None:
                facts = facts_of(self.query, self._settings, batch.schemas)
                self._settings.telemetry.describe(self.pipeline.name, facts)

    # -- the commit of a batch that waits for Spark's checkpoint ---------------------------------

    def commit_soon(self, batch_id: int) -> None:
        """Commit the batch when Spark has committed it; runs in a thread of its own."""

        def commit() -> None:
            with self._lock:
                if self.failure is not None:
                    self._recover_after(batch_id, self.failure)
            self.commit_last(math.inf)

        name = self.pipeline.name
        try:
            while_active(self.query, commit, f"commit batch {batch_id} of pipeline {name!r}")
        except FencedError as error:
            logger.warning(
                "pipeline %r: another driver finishes batch %d: %s", name, batch_id, error
            )
        except Exception:
            # Kept in self.failure: the next batch, awaitTermination or close raises it.
            logger.exception("pipeline %r: the last batch is not committed", name)

    def _recover_after(self, batch_id: int, failure: Exception) -> None:
        """After a failure only the log shows how far the batch got: take a token, and recover."""
        # Before Spark has committed the batch, a new incarnation would abandon it.
        if not self.query.is_active or (committed := self.query.committed()) < batch_id:
            raise failure
        self._driver = self._start(committed + 1)
        self.failure = None

    def commit_last(self, patience_s: float) -> None:
        """Commit the batch that is pending now, once Spark's checkpoint has it."""
        pending: TransactionRecord | None = None
        deadline, wait_s = time.monotonic() + patience_s, 0.01
        while True:
            with self._lock:
                if self.failure is not None:
                    raise self.failure
                if self.pending is None or self._driver is None:
                    return
                pending = pending or self.pending
                if self.pending is not pending:
                    return
                # Asked before the commit log is read: nothing is added after the run's end.
                is_active = self.query.is_active
                if self._commit_pending(self._driver):
                    return
            if not is_active or time.monotonic() > deadline:
                logger.warning(
                    "%s is prepared, and Spark has not written it into the commit log of %s: the "
                    "next start commits or replays it",
                    pending.id,
                    self.query.checkpoint,
                )
                return
            time.sleep(wait_s)
            wait_s = min(wait_s * 1.5, _LONGEST_POLL_S)

    def _commit_pending(self, driver: Driver) -> bool:
        """Commit the pending batch if Spark has; returns whether nothing is pending any more."""
        pending = driver.pending
        try:
            return driver.commit_pending()
        except Exception as error:
            self.failure = error
            self._let_go(error)
            if isinstance(error, FencedError) and pending is not None:
                record = self.pipeline.log.find(pending.id)
                if record is not None and record.state.is_finished:
                    logger.info("%s was finished by another driver", pending.id)
                    self.failure = None
                    return True
            raise

    # -- the end ---------------------------------------------------------------------------------

    def _let_go(self, error: BaseException) -> None:
        """Release the lease: the next call takes a new token, and recovers first."""
        if self._driver is not None:
            self._driver.lease.release()
            self._driver = None
        if isinstance(error, FencedError) and self._user is not None:
            free(self._settings.all_sinks, self._user)


def while_active(query: RunningQuery, action: Callable[[], None], what: str) -> None:
    """Repeat an action that may succeed later, while the query runs: no batch may come for long."""
    Retrying(
        retry=retry_if_not_exception_type(PERMANENT),
        wait=wait_exponential(max=_LONGEST_WAIT_S),
        stop=lambda _: not query.is_active,
        before_sleep=still_trying(what),
        reraise=True,
    )(action)


def _called_twice(settings: Settings, batch_id: int) -> ProtocolError:
    fate = (
        "complete, or the next start completes it. No replay brings the rows of this call: if they "
        "are other ones, enter them manually"
        if settings.commit == "immediate"
        else "prepared; the next start replays the batch"
    )
    return ProtocolError(
        f"pipeline {settings.name!r} was called a second time for batch {batch_id} in one "
        "run of the query. Make one object, with all sinks, and call it once for a batch: "
        "transform= gives a sink rows of its own, and select= columns; or write two "
        "queries, each with a pipeline and a checkpoint of its own. What the first call "
        f"wrote is {fate}"
    )


def _is_called_elsewhere(
    pipeline: Pipeline, incarnation: Incarnation, entrance: CheckpointEntrance, batch_id: int
) -> bool:
    """Whether another object has delivered the batch in this run, as the log shows it.

    Asked after the token was taken, so that the other object cannot deliver it any more.
    """
    run_id, seen = entrance.claim.run_id, entrance.seen
    if incarnation.fenced_run != run_id:
        return False
    record = pipeline.log.find(incarnation.transaction_id(batch_id))
    if record is None or record.state is State.ABANDONED:
        return False
    # What this run held when it looked counts, too; the tokens of other runs do not.
    last = 0 if seen is None else seen.token - (seen.run_id == run_id)
    return record.token > last
