"""The query that an `ExactlyOnce` serves, and the run of it that is alive now.

    foreachBatch(df, N)        ─► run_calling ─► Run ─► deliver N
    a start is heard of        ─► recover_at_start ─► Run, where no batch may come
    awaitTermination, stop     ─► end ─► recover, commit the last batch

The first query that calls is the one that is served, with its restarts; another query is refused.
"""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING

from sparkonce.errors import ConfigurationError, ProtocolError
from sparkonce.protocol.pipeline import Checkpoint, Pipeline
from sparkonce.spark_hooks.describing import facts_of
from sparkonce.spark_hooks.lifecycle import commit_at_exit
from sparkonce.spark_hooks.run import PERMANENT, Run
from sparkonce.spark_hooks.running_query import RunningQuery
from sparkonce.spark_hooks.savepoints import Hold, Savepoints, create
from sparkonce.spark_hooks.settings import Settings
from sparkonce.txn_log import TransactionLog

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming import StreamingQuery


logger = logging.getLogger("sparkonce")


class Serving:
    """What one `ExactlyOnce` serves.

    Args:
        settings: the pipeline's settings.
        log: its transaction log; None where it is in the checkpoint, until a query shows where.

    Attributes:
        lock: held while a batch is delivered or recovered.
        run: the newest run of the query.
    """

    def __init__(self, settings: Settings, log: TransactionLog | None) -> None:
        self.settings = settings
        self.log = log
        self.lock = threading.RLock()
        self.run: Run | None = None
        self._served: RunningQuery | None = None  # the query whose batches the object gets

    @property
    def opened_log(self) -> TransactionLog:
        """The transaction log.

        Raises:
            ProtocolError: it is in the checkpoint, and no query has started yet.
        """
        if self.log is None:
            raise ProtocolError(
                f"the transaction log of {self.settings.name!r} is in its query's checkpoint: "
                'start the query first, or open it with open_log("checkpoint:<location>")'
            )
        return self.log

    def pipeline(self, checkpoint: Checkpoint) -> Pipeline:
        """The pipeline over this checkpoint, for the protocol."""
        return self.settings.pipeline(self.opened_log, checkpoint)

    def run_calling(self, batch_df: DataFrame) -> tuple[Run, bool]:
        """The run that is calling foreachBatch in this thread, and whether it is new here.

        Raises:
            ProtocolError: it is another query's.
        """
        run = self.run
        is_new = run is None or not run.query.is_calling(batch_df)
        if run is None or is_new:
            run = self.run = self.run_of(RunningQuery.calling(batch_df))
        self._served = run.query
        return run, is_new

    def run_of(self, query: RunningQuery) -> Run:
        """A new run of the query, which must be the one that is served.

        Raises:
            ProtocolError: it is another query.
        """
        self.check_serves(query)
        if self.settings.telemetry is not None:
            self.settings.telemetry.follow(self.settings.name, *query.run)
            facts = facts_of(query, self.settings)
            self.settings.telemetry.describe(self.settings.name, facts)
        # Opened again: the folder may be a new one of the same name.
        self.log = query.open_log() if self.settings.is_log_in_checkpoint else self.opened_log
        return Run(self.settings, query, self.pipeline(query), self.lock)

    def may_serve(self, query_id: str) -> bool:
        """Whether no other query has called this object."""
        return self._served is None or self._served.run.query_id == query_id

    def check_serves(self, query: RunningQuery) -> None:
        """Refuse a query if another one has called this object.

        Raises:
            ProtocolError: it has.
        """
        served = self._served
        if served is not None and not self.may_serve(query.run.query_id):
            raise ProtocolError(
                f"this ExactlyOnce {self.settings.name!r} serves the query {served.run.query_id} "
                f"with the checkpoint {served.checkpoint}, not the query {query.run.query_id} with "
                f"{query.checkpoint}: make an ExactlyOnce for each query"
            )

    def recover_at_start(self, query: RunningQuery) -> None:
        """Recover without a batch, unless this object serves another query, or this run already."""
        run = self.run
        if run is not None and run.query.run == query.run and run.has_driver:
            return  # without the lock, which its batch may hold for long
        with self.lock:
            if query.is_followed or not self.may_serve(query.run.query_id):
                return
            if not is_bound(query, self.settings, self.log):
                return
            if self.run is None or self.run.query.run != query.run:
                self.run = self.run_of(query)
            self.run.recover()

    def recover_before_wait(self, query: RunningQuery) -> None:
        """Recover a start of which nobody has heard, unless a thread is at work on a run already.

        The program may wait for a query that goes on: what time can mend is left to `end`.
        """
        if not self.lock.acquire(blocking=False):
            return
        try:
            self.recover_at_start(query)
        except PERMANENT:
            raise
        except Exception as error:  # noqa: BLE001 - `end` raises it
            logger.warning(
                "pipeline %r: its start was not recovered yet: %s", self.settings.name, error
            )
        finally:
            self.lock.release()

    def commit_last(self, patience_s: float) -> None:
        """Commit the batch that is pending now, once Spark's checkpoint has it."""
        if self.run is not None:
            self.run.commit_last(patience_s)

    def end(self, query: RunningQuery) -> None:
        """Finish what can be finished of a run that has ended."""
        self.recover_at_start(query)  # again: the listener's try may have failed
        self.commit_last(self.settings.commit_timeout_s)

    def commit_at_exit(self) -> None:
        """Commit the last batch when the interpreter exits."""
        if self.run is None or self.run.failure is None:  # a failure was logged already
            commit_at_exit(self.settings.name, self.lock, self.commit_last)

    def close(self) -> None:
        """See `sparkonce.ExactlyOnce.close`."""
        try:
            self.commit_last(self.settings.commit_timeout_s)
        finally:
            with self.lock, ExitStack() as closing:  # a batch may be using them
                if self.settings.telemetry is not None:
                    closing.callback(self.settings.telemetry.flush)
                if self.log is not None:
                    closing.callback(self.log.close)
                for sink in self.settings.all_sinks:
                    closing.callback(sink.close)

    # -- savepoints --------------------------------------------------------------------------------

    def save(
        self, query: StreamingQuery, location: str, name: str | None, hold: Hold = nullcontext
    ) -> str:
        """Make a savepoint of the query; returns its name."""
        running = RunningQuery.of(query)
        place = Savepoints.at(location, running.hadoop_conf, create=True)
        log, pipeline = self.opened_log, self.settings.name
        return create(place, log, pipeline, running.files, name=name, hold=hold).name


def is_bound(query: RunningQuery, settings: Settings, log: TransactionLog | None) -> bool:
    """Whether the query's checkpoint says that it belongs to the pipeline with this log."""
    bound = query.files.binding()
    if bound is None or bound.pipeline != settings.name:
        return False
    if settings.is_log_in_checkpoint:
        try:
            log = query.open_log(create=False)
        except ConfigurationError:
            return False  # it has none: it belongs to a pipeline with its log elsewhere
    # The second id is the one from before the log was moved.
    return log is not None and bound.log_id in {log.log_id, log.id_of(settings.name)}
