"""`ExactlyOnce`, which a user hands to foreachBatch: settings, and one run of one query.

    foreachBatch(df, N) ─► the query's Run ─► deliver N
    the query starts    ─► the query's Run ─► recover, where no batch may come
    awaitTermination, close, the interpreter's exit ─► commit the last batch (after_checkpoint)

One object serves one query and its restarts, and refuses another query. Each start of the query is
a run of its own with its own fencing token; so are a second ``start()`` and Spark's own retry after
an exception. An object that is recreated under the old name, as in a notebook, fences the older one
like any other driver.
"""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn, Self

from sparkonce.errors import ConfigurationError, ProtocolError
from sparkonce.protocol.pipeline import Checkpoint, CommitPolicy, Pipeline
from sparkonce.sinks.base import AnySink
from sparkonce.spark_hooks.lifecycle import call_at_exit, commit_at_exit
from sparkonce.spark_hooks.run import Run
from sparkonce.spark_hooks.running_query import RunningQuery
from sparkonce.spark_hooks.settings import Settings
from sparkonce.spark_hooks.small_batches import DEFAULT_ROWS
from sparkonce.spark_hooks.starts import Starts, is_bound
from sparkonce.txn_log import IN_CHECKPOINT, TransactionLog, checkpoint_log, open_log
from sparkonce.txn_log.identity import adopted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming import StreamingQuery

logger = logging.getLogger("sparkonce")


class _NotPicklableError(ConfigurationError, pickle.PickleError):
    """PySpark lets this kind of error through, and hides others behind advice that misleads."""

    def __init__(self) -> None:
        super().__init__(
            "an ExactlyOnce cannot leave its process. Over Spark Connect, foreachBatch runs on the "
            'server, without what sparkonce needs: write with df.writeStream.format("sparkonce") '
            "there (docs/howto/spark-connect.md)"
        )


class ExactlyOnce:
    """Writes every micro-batch into all sinks once, or into none.

    Pass it to ``foreachBatch``; one object serves one query and its restarts. With
    commit="after_checkpoint" the last batch becomes visible a moment after the query has ended:
    wait for it with `awaitTermination`, or leave it to `close`, a ``with`` block or the
    interpreter's exit.

    Args:
        name: the pipeline's permanent name: 1 to 32 of the characters A-Z a-z 0-9 _ and -. It is
            bound to the query's checkpoint at the first batch.
        sinks: where the rows go. Their names differ, and no other running query uses them.
        log: address of the transaction log (see `sparkonce.txn_log.open_log`), or an open log;
            default: "checkpoint", inside the query's own checkpoint. Such a log is deleted with
            the checkpoint, so it cannot notice that a fresh one delivers the rows again.
        commit: when a batch becomes visible. "immediate": as soon as every sink has prepared it.
            Spark can still replay it, so even a branch that a server has lost is rewritten.
            "after_checkpoint": once Spark's checkpoint has it too, about a second later. Output
            and state then agree even if a replay computes other rows, but servers must keep a
            prepared batch while a driver is down. Create the pipeline after the SparkSession, and
            in the session of its query: Spark reports a start, which may find no new data, to
            listeners of that session only.
        removed: sinks that the pipeline had before. They get no rows; what is decided for them is
            committed, and what is left over in them is aborted.
        replaces: query id of the checkpoint that had this name before: lets a fresh checkpoint
            continue under the name, once.
        adopt: lets one start pass the identity guard; one string or several. "batch 12": the
            checkpoint, now at batch 12, ran without this log. The id of a transaction log: the log
            with that id is lost. Both assert that every earlier batch is complete in every sink,
            and that no sink holds rows of the next one. "moved from /old/checkpoint": the
            checkpoint was moved with the log inside it, and the old location never runs again.
        commit_timeout_s: how long the commits of a decided batch are repeated before the query
            fails, in seconds. The next start continues, so nothing is lost.
        retain: how many batches of history the log keeps.
        driver_rows: after three batches of at most this many rows, the driver itself writes the
            next one, as one branch per sink, which saves the pass through Python workers. The
            executors write larger batches, and all batches of a stateful query. 0: every batch.

    Raises:
        ConfigurationError: a setting cannot work.
        LogUnavailableError: the log's server cannot be reached now.
    """

    def __init__(
        self,
        name: str,
        *,
        sinks: Sequence[AnySink],
        log: str | TransactionLog = IN_CHECKPOINT,
        commit: CommitPolicy = "immediate",
        removed: Sequence[AnySink] = (),
        replaces: str | None = None,
        adopt: str | Sequence[str] | None = None,
        commit_timeout_s: float = 600.0,
        retain: int = 10_000,
        driver_rows: int = DEFAULT_ROWS,
    ) -> None:
        self._settings = Settings(
            name=name,
            sinks=tuple(sinks),
            log=log,
            commit=commit,
            removed=tuple(removed),
            replaces=replaces,
            adopt=adopted(adopt),
            commit_timeout_s=commit_timeout_s,
            retain=retain,
            driver_rows=driver_rows,
        )
        # The log in the checkpoint is opened as soon as a query shows where its checkpoint is.
        self._log = None if self._settings.is_log_in_checkpoint else open_log(log)
        self._lock = threading.RLock()
        self._run: Run | None = None
        self._served: RunningQuery | None = None  # the query whose batches this object gets
        self._starts = Starts(self._settings, self._log, self._may_serve, self._recover_at_start)
        if commit == "after_checkpoint":
            call_at_exit(self._commit_at_exit)

    def __call__(self, batch_df: DataFrame, batch_id: int) -> None:
        """Deliver one micro-batch.

        A function of your own must call it once for every batch, empty ones too. When it returns,
        the batch is committed in every sink; with commit="after_checkpoint" it is prepared in every
        sink.

        Raises:
            SparkOnceError: see `sparkonce.errors` for what to do next. The query fails with it,
                and Spark replays the batch at the next start.
        """
        with self._lock:
            run = self._run
            if run is None or not run.query.is_calling(batch_df):
                run = self._run = self._run_of(RunningQuery.calling(batch_df))
                self._starts.warn_if_unheard(run.query)
            self._served = run.query
            run.deliver(batch_df, batch_id)

    @property
    def settings(self) -> Settings:
        """What this object was given."""
        return self._settings

    @property
    def name(self) -> str:
        """The pipeline's permanent name."""
        return self._settings.name

    @property
    def sinks(self) -> tuple[AnySink, ...]:
        """Where the rows go."""
        return self._settings.sinks

    @property
    def all_sinks(self) -> tuple[AnySink, ...]:
        """The sinks, and those that were removed."""
        return self._settings.all_sinks

    @property
    def adopt(self) -> tuple[str, ...]:
        """What lets a start pass the identity guard."""
        return self._settings.adopt

    @property
    def log(self) -> TransactionLog:
        """The transaction log.

        Raises:
            ProtocolError: it is in the checkpoint, and no query has started yet.
        """
        if self._log is None:
            raise ProtocolError(
                f"the transaction log of {self.name!r} is in its query's checkpoint: start the "
                'query first, or open it with open_log("checkpoint:<location>")'
            )
        return self._log

    def open_log_in(self, checkpoint: str, *, create: bool = False, by_boto3: bool = False) -> None:
        """Open a log that is inside the checkpoint, at this location, without a running query."""
        if self._settings.is_log_in_checkpoint:
            self._log = checkpoint_log(checkpoint, create=create, by_boto3=by_boto3)

    def pipeline(self, checkpoint: Checkpoint) -> Pipeline:
        """The pipeline over this checkpoint, for the protocol."""
        return self._settings.pipeline(self.log, checkpoint)

    def awaitTermination(self, query: StreamingQuery, timeout: float | None = None) -> bool:  # noqa: N802 - as Spark's own
        """Wait for the query's end, and then for the commit of its last batch.

        Args:
            query: the running query.
            timeout: how long to wait for its end, in seconds; default: for ever.

        Returns:
            Whether the query has ended.

        Raises:
            StreamingQueryException: the query failed.
            SparkOnceError: the last batch is not committed; the next start continues with it.
        """
        running = RunningQuery.of(query)
        self._recover_at_start(running)
        try:
            ended = query.awaitTermination(timeout)
            return True if ended is None else bool(ended)
        finally:
            if not query.isActive:
                self._recover_at_start(running)  # again: the listener's try may have failed
                self._commit_last(self._settings.commit_timeout_s)

    def close(self) -> None:
        """Commit the last batch if Spark's checkpoint has it, and free all connections.

        Call it when the query has ended. The object can be used again after it.

        Raises:
            SparkOnceError: the last batch is not committed; the next start continues with it.
        """
        try:
            self._commit_last(self._settings.commit_timeout_s)
        finally:
            with self._lock:  # a batch may be using them
                for sink in self.all_sinks:
                    sink.close()
                if self._log is not None:
                    self._log.close()

    def __getstate__(self) -> NoReturn:
        raise _NotPicklableError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        log = IN_CHECKPOINT if self._log is None else self._log.address
        return f"<ExactlyOnce {self.name!r} -> {list(self.sinks)}, log {log}>"

    # -- one run of one query ----------------------------------------------------------------------

    def _run_of(self, query: RunningQuery) -> Run:
        """A new run of the query, which must be the one that this object serves.

        Raises:
            ProtocolError: it is another query.
        """
        served = self._served
        if served is not None and not self._may_serve(query):
            raise ProtocolError(
                f"this ExactlyOnce {self.name!r} serves the query {served.run.query_id} with the "
                f"checkpoint {served.checkpoint}, and was called by the query "
                f"{query.run.query_id} with {query.checkpoint}: make an ExactlyOnce for each query"
            )
        # Opened again: the folder may be a new one of the same name.
        self._log = query.open_log() if self._settings.is_log_in_checkpoint else self.log
        return Run(self._settings, query, self.pipeline(query), self._lock)

    # -- starts that find no new data --------------------------------------------------------------

    def _recover_at_start(self, query: RunningQuery) -> None:
        """Recover without a batch, unless this object serves another query, or this run already."""
        run = self._run
        if run is not None and run.query.run == query.run and run.has_driver:
            return  # without the lock, which its batch may hold for long
        with self._lock:
            if query.is_followed or not self._may_serve(query):
                return
            if not is_bound(query, self._settings, self._log):
                return
            if self._run is None or self._run.query.run != query.run:
                self._run = self._run_of(query)
            self._run.recover()

    def _may_serve(self, query: RunningQuery) -> bool:
        """Whether no other query has called this object."""
        return self._served is None or self._served.run.query_id == query.run.query_id

    # -- the end -----------------------------------------------------------------------------------

    def _commit_last(self, patience_s: float) -> None:
        run = self._run
        if run is not None:
            run.commit_last(patience_s)

    def _commit_at_exit(self) -> None:
        if self._run is None or self._run.failure is None:  # a failure was logged already
            commit_at_exit(self.name, self._lock, self._commit_last)
