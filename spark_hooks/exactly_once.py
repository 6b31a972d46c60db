"""`ExactlyOnce`, which a user hands to foreachBatch: settings, and one run of one query.

    foreachBatch(df, N) ─► the query's Run ─► deliver N
    the query starts    ─► the query's Run ─► recover, where no batch may come
    awaitTermination, close, the interpreter's exit ─► commit the last batch (after_checkpoint)
    stop, held              ─► no batch begins; the one that runs is finished
    savepoint               ─► a copy of the checkpoint at the last complete batch

One object serves one query and its restarts, and refuses another query. Each start of the query is
a run of its own with its own fencing token; so are a second ``start()`` and Spark's own retry after
an exception. An object that is recreated under the old name, as in a notebook, fences the older one
like any other driver.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn, Self

from sparkonce.errors import ConfigurationError
from sparkonce.observing import Telemetry, as_one
from sparkonce.protocol.pipeline import Checkpoint, CommitPolicy, Pipeline
from sparkonce.sinks.base import AnySink
from sparkonce.spark_hooks.gate import Gate
from sparkonce.spark_hooks.lifecycle import call_at_exit
from sparkonce.spark_hooks.running_query import RunningQuery
from sparkonce.spark_hooks.serving import Serving
from sparkonce.spark_hooks.settings import Settings, sinks_of
from sparkonce.spark_hooks.shown import in_html, in_text
from sparkonce.spark_hooks.small_batches import DEFAULT_ROWS
from sparkonce.spark_hooks.starts import Starts
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
            "changed state": the state that other aggregates made is right for the query.
        commit_timeout_s: how long the commits of a decided batch are repeated before the query
            fails, in seconds. The next start continues, so nothing is lost.
        retain: how many batches of history the log keeps.
        driver_rows: after three batches of at most this many rows, the driver itself writes the
            next one, as one branch per sink, unless the query has state. 0: no batch.
        telemetry: metrics, traces and lineage: from `sparkonce.observe`, also several in a list.

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
        telemetry: Telemetry | Sequence[Telemetry] | None = None,
    ) -> None:
        settings = Settings(
            name=name,
            sinks=sinks_of("sinks", sinks),
            log=log,
            commit=commit,
            removed=sinks_of("removed", removed),
            replaces=replaces,
            adopt=adopted(adopt),
            commit_timeout_s=commit_timeout_s,
            retain=retain,
            driver_rows=driver_rows,
            telemetry=as_one(telemetry),
        )
        # The log in the checkpoint is opened as soon as a query shows where its checkpoint is.
        opened = None if settings.is_log_in_checkpoint else open_log(log)
        self._serving = serving = Serving(settings, opened)
        self._gate = Gate(serving)
        self._starts = Starts(settings, opened, serving.may_serve, serving.recover_at_start)
        if commit == "after_checkpoint":
            call_at_exit(serving.commit_at_exit)

    def __call__(self, batch_df: DataFrame, batch_id: int) -> None:
        """Deliver one micro-batch.

        A function of your own must call it once for every batch, empty ones too. When it returns,
        every sink has committed the batch, or prepared it with commit="after_checkpoint".

        Raises:
            SparkOnceError: see `sparkonce.errors` for what to do next. The query fails with it,
                and Spark replays the batch at the next start.
        """
        with self._gate.passing(batch_df, batch_id), self._serving.lock:
            run, is_new = self._serving.run_calling(batch_df)
            if is_new:
                self._starts.warn_if_unheard(run.query)
            run.deliver(batch_df, batch_id)

    @property
    def settings(self) -> Settings:
        """What this object was given."""
        return self._serving.settings

    @property
    def name(self) -> str:
        """The pipeline's permanent name."""
        return self.settings.name

    @property
    def sinks(self) -> tuple[AnySink, ...]:
        """Where the rows go."""
        return self.settings.sinks

    @property
    def all_sinks(self) -> tuple[AnySink, ...]:
        """The sinks, and those that were removed."""
        return self.settings.all_sinks

    @property
    def adopt(self) -> tuple[str, ...]:
        """What lets a start pass the identity guard."""
        return self.settings.adopt

    @property
    def log(self) -> TransactionLog:
        """The transaction log.

        Raises:
            ProtocolError: it is in the checkpoint, and no query has started yet.
        """
        return self._serving.opened_log

    def open_log_in(self, checkpoint: str, *, create: bool = False, by_boto3: bool = False) -> None:
        """Open a log that is inside the checkpoint, at this location, without a running query."""
        if self.settings.is_log_in_checkpoint:
            self._serving.log = checkpoint_log(checkpoint, create=create, by_boto3=by_boto3)

    def pipeline(self, checkpoint: Checkpoint) -> Pipeline:
        """The pipeline over this checkpoint, for the protocol."""
        return self._serving.pipeline(checkpoint)

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
        self._serving.recover_before_wait(running)
        try:
            ended = query.awaitTermination(timeout)
            return True if ended is None else bool(ended)
        finally:
            if not query.isActive:
                self._serving.end(running)

    def stop(self, query: StreamingQuery, timeout: float | None = None) -> None:
        """Stop the query between two batches.

        It waits for the batch that runs now and for its commit. After it, every batch is complete
        in every sink, and Spark's checkpoint has the same batches. The next start, of this object
        or another, continues with the next batch. If it raises, the query has failed or runs on.

        Args:
            query: the running query. One that has ended already is only checked.
            timeout: how long to wait before the query is stopped, in seconds; default: for ever.

        Raises:
            StreamingQueryException: the query failed.
            TimeoutError: the batch took longer. The query continues.
            ProtocolError: this object does not serve the query, the call comes from its own
                foreachBatch, or something else stopped the query during a batch.
            SparkOnceError: the last batch cannot be committed.
        """
        with self.held(query, timeout):
            query.stop()
            query.awaitTermination()  # raises what the query failed with in the same moment

    @contextmanager
    def held(self, query: StreamingQuery, timeout: float | None = None) -> Iterator[None]:
        """Hold the query between two batches during a ``with`` block.

        In the block every batch is complete in every sink and in Spark's checkpoint, and no batch
        begins. After it the query continues, unless the block has stopped it. A query that has
        ended between two batches is held too. Arguments and errors are those of `stop`.
        """
        with self._gate.held(query, timeout):
            yield

    def savepoint(self, query: StreamingQuery, location: str, *, name: str | None = None) -> str:
        """Make a savepoint of the query, which runs on.

        Args:
            query: the running query.
            location: folder for savepoints: a path, or a URL that Spark's Hadoop knows.
            name: of the savepoint; default: the pipeline's, the batch and the time.

        Returns:
            The savepoint's name.

        Raises:
            SavepointError: no batch is complete yet, or the name is taken. Nothing was made.
        """
        return self._serving.save(query, location, name, lambda: self.held(query))

    def stop_with_savepoint(
        self,
        query: StreamingQuery,
        location: str,
        *,
        name: str | None = None,
        timeout: float | None = None,
    ) -> str:
        """Stop the query, with a savepoint of its last batch; see `stop` and `savepoint`."""
        with self.held(query, timeout):
            name = self._serving.save(query, location, name)
            query.stop()
            query.awaitTermination()
        return name

    def close(self) -> None:
        """Commit the last batch if Spark's checkpoint has it, and free all connections.

        Call it when the query has ended. The object can be used again after it.

        Raises:
            SparkOnceError: the last batch is not committed; the next start continues with it.
        """
        self._serving.close()

    def __getstate__(self) -> NoReturn:
        raise _NotPicklableError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return in_text(self.settings, self._serving.log)

    def _repr_html_(self) -> str:
        return in_html(self.settings, self._serving.log)
