"""`ExactlyOnce`: what a user hands to foreachBatch.

    foreachBatch(df, N) ─► RunningQuery ─► [new run: validate, begin, bind, recover] ─► run N
                                                                │
    the query starts, without new data ─────────────────────────┘ (left by after_checkpoint)
    Spark writes commits/N ─► a thread, batch N+1, awaitTermination, close or the interpreter's
                              exit, whichever comes first ─► settle N (after_checkpoint)

Where a decided batch is unfinished, it is recovered first and the sinks are validated after.

A query id and run id that it has not seen make a new incarnation, with a token of its own: a
restart, a second ``start()`` in the same process, and Spark's retry after an exception alike.

A new incarnation fences the one before, and abandons its batch where Spark is still to write
commits/N. So of the objects of one process (a notebook has old ones, and two pipelines may share a
name)

* one at a time turns to a query;
* that which a batch calls turns to it in any case, after whoever was faster;
* without a batch an object turns only to a run that no object has turned to yet.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Self, get_args

from tenacity import Retrying, retry_if_not_exception_type, wait_exponential

from sparkonce.errors import (
    CommitRejectedError,
    ConfigurationError,
    FencedError,
    LogCorruptError,
    PreparedBranchLostError,
    ProtocolError,
)
from sparkonce.model import is_label
from sparkonce.sinks.base import AnySink, TwoPhaseCommitSink
from sparkonce.spark_hooks.batch import SparkBatch
from sparkonce.spark_hooks.coordinator import Checkpoint, CommitPolicy, Coordinator, overtaken
from sparkonce.spark_hooks.drivers import this_driver
from sparkonce.spark_hooks.lifecycle import StartListener, call_at_exit
from sparkonce.spark_hooks.record_batches import RecordBatches
from sparkonce.spark_hooks.running_query import RunId, RunningQuery
from sparkonce.spark_hooks.small_batches import DEFAULT_ROWS, SmallBatches
from sparkonce.spark_hooks.waiting import still_trying
from sparkonce.txn_log import IN_CHECKPOINT, TransactionLog, checkpoint_log, open_log
from sparkonce.txn_log.identity import Claim, check_is_no_copy
from sparkonce.txn_log.record import TransactionRecord

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming import StreamingQuery

logger = logging.getLogger("sparkonce")

_LONGEST_POLL_S = 1.0
_EXIT_WAIT_S = 10.0
_LONGEST_WAIT_S = 30.0

_LASTING = (
    CommitRejectedError,
    ConfigurationError,
    FencedError,
    LogCorruptError,
    PreparedBranchLostError,
    ProtocolError,
)
"""Errors that time does not mend."""

_listening: list[weakref.ref[ExactlyOnce]] = []
"""The objects that hear of starts, oldest first."""

_serving: weakref.WeakValueDictionary[str, ExactlyOnce] = weakref.WeakValueDictionary()
"""By query id: the object that has turned to the query last."""

_begun: dict[tuple[str, str], RunId] = {}
"""The run that has had the last token of a pipeline here, by its log's id and its name."""

_returned: dict[str, tuple[RunId, int]] = {}
"""By query id: the run, and the highest batch of it that an object has delivered."""

_claiming = threading.Lock()
"""Held while an object finds its sinks free and turns to a query, which claims them."""

_turns: dict[str, threading.RLock] = {}
"""By query id: held by the object that turns to the query."""


class ExactlyOnce:
    """Writes every micro-batch into all sinks once, or into none.

    Pass it to ``foreachBatch``; one object serves one query at a time. With
    commit="after_checkpoint" the last batch becomes visible a moment after the query has ended:
    wait for it with `awaitTermination`, or leave it to `close`, a ``with`` block or the
    interpreter's exit.

    Args:
        name: the pipeline's lasting name: 1 to 32 of A-Z a-z 0-9 _ and -. It is bound to the
            query's checkpoint at the first batch.
        sinks: where the rows go; their names differ. No other query that runs has them.
        log: address of the transaction log (see `sparkonce.txn_log.open_log`), or an open log;
            default: "checkpoint", inside the query's own checkpoint. Such a log is deleted with
            the checkpoint, and so cannot notice that rows are delivered again from a fresh one.
        commit: when a batch becomes visible. "immediate": as soon as every sink has prepared it;
            Spark can still replay it, so even a branch that a server has lost is written again.
            "after_checkpoint": once Spark's checkpoint has it too, so that output and state agree
            also for queries that compute other rows in a replay; a batch is visible about a
            second after that, and a prepared batch has to outlive a driver that is down. Make the
            pipeline after the SparkSession and in that of its query (Spark's listeners hear their own
            session only), so that it hears of a start that finds no new data.
        removed: sinks that the pipeline had: they get no rows any more, what is decided for them
            is finished, and what is left over in them is aborted.
        replaces: query id of the checkpoint that had this name before, to let a fresh checkpoint
            go on under it, once.
        adopt: "batch 12" takes over a checkpoint that ran without a transaction log until now and
            is at that batch, or goes on at that batch behind others that were delivered in some
            other way; True takes over such a checkpoint at whatever batch it is; the id of a
            transaction log takes over a checkpoint whose log with that id is lost. Each form says
            that nothing of the batch which Spark runs next is in any sink.
        commit_timeout_s: how long the commits of a decided batch are repeated before the query
            fails, in seconds. The next start carries on, so nothing is lost.
        retain: batches of history that the log keeps.
        driver_rows: after three batches of at most so many rows the driver itself writes the next
            one, as one branch per sink, which saves the pass through Python workers; one that has
            more rows all the same goes to the executors, which write all batches of a query with
            state. 0: the executors write every batch.

    Raises:
        ConfigurationError: a setting cannot work.
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
        adopt: bool | str = False,
        commit_timeout_s: float = 600.0,
        retain: int = 10_000,
        driver_rows: int = DEFAULT_ROWS,
    ) -> None:
        if not is_label(name):
            raise ConfigurationError(
                f"{name!r}: a pipeline's name has 1 to 32 of the characters A-Z a-z 0-9 _ and -"
            )
        _check_sinks(sinks, removed)
        if commit not in get_args(CommitPolicy):
            raise ConfigurationError(
                f'commit={commit!r}: expected "immediate" or "after_checkpoint"'
            )
        if retain < 1 or commit_timeout_s <= 0:
            raise ConfigurationError(
                f"retain={retain} and commit_timeout_s={commit_timeout_s} must be positive"
            )
        if driver_rows < 0:
            raise ConfigurationError(f"driver_rows={driver_rows}: expected 0 or more")
        if log != IN_CHECKPOINT:  # before one is made there
            for sink in sinks:
                sink.check_log(log if isinstance(log, str) else log.address)
        self.name = name
        self.sinks = tuple(sinks)
        # That in the checkpoint is opened as soon as a query tells where its checkpoint is.
        self._log: TransactionLog | None = None if log == IN_CHECKPOINT else open_log(log)
        self._is_log_in_checkpoint = self._log is None
        self._log_key = IN_CHECKPOINT if self._log is None else self._log.log_id
        self._removed = tuple(removed)
        self._commit: CommitPolicy = commit
        self._replaces = replaces
        self._adopt = adopt
        self._commit_timeout_s = commit_timeout_s
        self._retain = retain
        self._small = SmallBatches(driver_rows)
        self._record_batches = RecordBatches()
        self._lock = threading.RLock()
        self._query: RunningQuery | None = None
        self._checkpoint: str | None = None  # of the queries that are known to be this one's
        self._coordinator: Coordinator | None = None
        self._is_validated = False
        self._failure: Exception | None = None
        self._listener: StartListener | None = None
        _listening.append(weakref.ref(self, _listening.remove))
        self._listen()
        if commit == "after_checkpoint":
            call_at_exit(self._settle_at_exit)

    def __call__(self, batch_df: DataFrame, batch_id: int) -> None:
        """Deliver one micro-batch. A function of your own calls it once for each, empty ones too.

        When it returns, the batch is committed in every sink; with commit="after_checkpoint" it is
        prepared in every sink.

        Raises:
            SparkOnceError: see `sparkonce.errors` for what to do next. The query fails with it,
                and Spark replays the batch at the next start.
        """
        with self._lock:
            query = self._query
            if query is None or not query.is_calling(batch_df):
                query = RunningQuery.calling(batch_df)
                self._check_first_call(query, batch_id)
                self._leave_for(query)
                with _turn(query):  # whoever recovers the query's start comes to an end first
                    self._turn_to(query)
                self._warn_of_unheard_starts(query)
            self._check_first_call(query, batch_id)
            if self._failure is not None:
                raise self._failure
            batch = SparkBatch(
                batch_df,
                batch_id,
                self.sinks,
                query,
                small=self._small,
                record_batches=self._record_batches,
            )
            try:
                if self._coordinator is None:
                    # What is decided must not wait for a sink that cannot be written to now.
                    if not self.log.unfinished(self.name):
                        self._validate(batch)
                    self._coordinator = self._begin(query, batch_id)
                self._validate(batch)
                self._coordinator.run(batch)
            except BaseException as error:
                # Whatever comes next is a new incarnation: it recovers first.
                self._coordinator = None
                if isinstance(error, FencedError):
                    self._let_go()
                raise
            with _claiming:
                self._check_first_call(query, batch_id)  # another thread may have been before
                _returned[query.run.query_id] = (query.run, batch_id)
            if self._coordinator.pending is not None:
                threading.Thread(
                    target=self._settle_soon, args=(query, batch_id), daemon=True
                ).start()

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

    def awaitTermination(self, query: StreamingQuery, timeout: float | None = None) -> bool:  # noqa: N802 - as Spark's own
        """Wait for the query's end, and then for the commit of its last batch.

        Args:
            query: the running query.
            timeout: how long to wait for its end, in seconds; default: for ever.

        Returns:
            Whether the query has ended.

        Raises:
            StreamingQueryException: the query failed.
            SparkOnceError: the last batch is not committed; the next start goes on with it.
        """
        running = RunningQuery.of(query)
        self._checkpoint = running.checkpoint
        served = _served(running.run.query_id)
        if served is None or served.run != running.run:  # else its batch may hold the lock for long
            self._recover_at_start(running)
        try:
            ended = query.awaitTermination(timeout)
            return True if ended is None else bool(ended)
        finally:
            if not query.isActive:
                self._recover_at_start(running)  # again: a try of the listener may have failed
                server = _serving.get(str(query.id), self)
                server._settle_last(self._commit_timeout_s)  # noqa: SLF001 - of this class

    def close(self) -> None:
        """Commit the last batch if Spark's checkpoint has it, and free all connections.

        Call it when the query has ended. The object can be used again after it.

        Raises:
            SparkOnceError: the last batch is not committed; the next start goes on with it.
        """
        try:
            self._settle_last(self._commit_timeout_s)
        finally:
            for sink in self.all_sinks:
                sink.close()
            if self._log is not None:
                self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        log = IN_CHECKPOINT if self._log is None else self._log.address
        return f"<ExactlyOnce {self.name!r} -> {list(self.sinks)}, log {log}>"

    def open_log_in(self, checkpoint: str) -> None:
        """Open a log that is inside the checkpoint, at this location, without a query."""
        if self._is_log_in_checkpoint:
            self._log = checkpoint_log(checkpoint, create=False)

    @property
    def is_log_in_checkpoint(self) -> bool:
        """Whether the log is opened only when it is known where the checkpoint is."""
        return self._is_log_in_checkpoint

    @property
    def all_sinks(self) -> tuple[AnySink, ...]:
        """The sinks, and those that were removed."""
        return (*self.sinks, *self._removed)

    @property
    def commit(self) -> CommitPolicy:
        """When a batch becomes visible."""
        return self._commit

    def coordinator(
        self,
        claim: Claim,
        checkpoint: Checkpoint,
        may_repeat: Callable[[], None] = lambda: None,
        is_ours: Callable[[], bool] = lambda: True,
    ) -> Coordinator:
        """A coordinator with the pipeline's settings; it takes the token that `claim` asks for."""
        return Coordinator(
            self.sinks,
            self.log,
            claim,
            checkpoint,
            removed=self._removed,
            commit=self._commit,
            commit_timeout_s=self._commit_timeout_s,
            retain=self._retain,
            may_repeat=may_repeat,
            is_ours=is_ours,
        )

    def _let_go(self) -> None:
        """Free what the sinks hold open for a fenced driver: nobody else can, while it lives."""
        others = [
            sink
            for query_id, other in list(_serving.items())
            if other is not self and (served := _served(query_id)) is not None and served.is_active
            for sink in other.all_sinks
        ]
        for sink in self.all_sinks:
            if any(sink is other for other in others):
                continue
            try:
                sink.close()
            except Exception:
                logger.warning("%r could not be closed", sink, exc_info=True)

    # -- a new incarnation -------------------------------------------------------------------------

    def _leave_for(self, query: RunningQuery) -> None:
        """Settle what another query has left: no start of `query` looks into that one's log.

        Raises:
            ProtocolError: it cannot be settled now.
        """
        left = self._query
        if left is None or left.run.query_id == query.run.query_id:
            return
        if _serving.get(left.run.query_id) is not self:
            return  # whoever has turned to it since has recovered it
        try:
            self._settle_last(self._commit_timeout_s)
        except FencedError:
            pass  # so has another driver
        except Exception as error:
            raise ProtocolError(
                f"pipeline {self.name!r} cannot turn to the query {query.run.query_id}, since the "
                f"last batch of {left.run.query_id}, with the checkpoint {left.checkpoint}, is not "
                "committed: start it again, which goes on with the batch, and give each query an "
                f"ExactlyOnce of its own ({error})"
            ) from error

    def _turn_to(self, query: RunningQuery) -> None:
        # Opened again: the folder may be a new one of the same name.
        log = query.open_log() if self._is_log_in_checkpoint else self._log
        with _claiming:
            self._check_sinks_are_free(query)
            _serving[query.run.query_id] = self
            self._query, self._coordinator, self._log = query, None, log
        self._checkpoint = query.checkpoint
        self._small = SmallBatches(self._small.most_rows)
        self._record_batches = RecordBatches()
        self._failure, self._is_validated = None, False

    def _check_first_call(self, query: RunningQuery, batch_id: int) -> None:
        """Refuse a batch that was delivered in this run, by whichever object: it is no replay.

        Within a run Spark replays nothing, and a call that has failed may be made again.

        Raises:
            ProtocolError: it would pass for a replay, and its rows would be in no sink.
        """
        run, newest = _returned.get(query.run.query_id, (None, -1))
        if run == query.run and batch_id <= newest:
            fate = (
                "complete, and no replay brings the rows of this call, which are in no sink: put "
                "them in by hand"
                if self._commit == "immediate"
                else "prepared, and made anew at the next start"
            )
            raise ProtocolError(
                f"pipeline {self.name!r} is called a second time for batch {batch_id} in one run "
                "of the query. Make one object, with all sinks, and call it once for a batch: "
                "transform= gives a sink rows of its own, and select= columns; or write two "
                "queries, each with a pipeline and a checkpoint of its own. What the first call "
                f"wrote is {fate}"
            )

    def _check_sinks_are_free(self, query: RunningQuery) -> None:
        """Refuse a sink of another query that runs: what `validate` found out there is kept in it.

        Raises:
            ConfigurationError: naming the sink and its pipeline.
        """
        for query_id, other in list(_serving.items()):
            shared = [sink for sink in self.sinks if any(sink is its for its in other.sinks)]
            if other is self or query_id == query.run.query_id or not shared:
                continue
            served = _served(query_id)
            if served is not None and served.is_active:
                raise ConfigurationError(
                    f"{shared[0]!r} is in use by the pipeline {other.name!r}, whose query "
                    f"{query_id} runs: make a sink for each pipeline"
                )

    def _validate(self, batch: SparkBatch) -> None:
        if not self._is_validated:
            batch.validate()
            self._is_validated = True

    def _begin(self, query: RunningQuery, batch_id: int) -> Coordinator:
        bound, seen = query.binding(), query.last_entry()
        shown = {b: query.offsets(b) for b in (batch_id - 1, batch_id) if b >= 0}
        head = self.log.head(self.name)
        is_known = head is not None and head.query_id == query.run.query_id
        claim = Claim(
            pipeline=self.name,
            query_id=query.run.query_id,
            run_id=query.run.run_id,
            driver=this_driver(),
            sinks={sink.name: sink.target for sink in self.all_sinks},
            batch_id=batch_id,
            offsets={b: offsets for b, offsets in shown.items() if offsets is not None},
            has_begun=query.has_offsets(batch_id),
            checkpoint=query.checkpoint,
            checkpoint_log_id=None if bound is None else bound.log_id,
            checkpoint_pipeline=None if bound is None else bound.pipeline,
            replaces=self._replaces,
            adopt=self._adopt,
            goes_on=_begun.get((self.log.log_id, self.name)) == query.run,
            namesake=None if is_known else self._namesake(query),
        )
        had_ended = query.is_stopping

        def may_begin() -> None:
            """Late, it would fence whoever has gone on, and only then see that it is late."""
            if query.committed() >= batch_id:
                raise overtaken(f"batch {batch_id} of pipeline {self.name!r}", query, self.log)

        def may_repeat() -> None:
            if query.is_stopping and not had_ended:
                raise ProtocolError(
                    f"{query.run} has ended while it waited for its fencing token, and takes none: "
                    "it could fence a run that has followed it. The next start recovers"
                )
            may_begin()

        may_begin()
        coordinator = self.coordinator(claim, query, may_repeat, query.is_ours)
        _begun[self.log.log_id, self.name] = query.run
        if self.log.newest(self.name, query.run.query_id) is None:  # one of the name may be new
            check_is_no_copy(replace(claim, namesake=self._namesake(query)))
        query.bind(bound, coordinator.incarnation.owner.log_id, self.name)
        may_begin()
        if not query.enter(seen, claim.driver, coordinator.incarnation.fenced_run):
            raise coordinator.overtaken(batch_id)
        logger.info(
            "pipeline %r, query %s, token %d, commit=%r: %s; log %s%s; a batch and its record are "
            "committed in %s",
            self.name,
            query.run.query_id,
            coordinator.incarnation.token,
            self._commit,
            ", ".join(map(repr, self.sinks)),
            self.log.address,
            ", deleted with the checkpoint: it cannot notice a fresh one"
            * self._is_log_in_checkpoint,
            "one transaction"
            if coordinator.two_phases is None
            else f"two phases, since {coordinator.two_phases}",
        )
        for gone, target in sorted({} if head is None else head.sinks.items()):
            now = claim.sinks.get(gone)
            if now == target:
                continue
            logger.warning(
                "the sink %r of %s %s: what a crash has left over there is not aborted unless %s",
                gone,
                target,
                "is not among the pipeline's sinks any more" if now is None else f"has {now} now",
                "it is passed in removed=[…]"
                if now is None
                else "`sparkonce recover JOB` is run with a job that has it as it was",
            )
        coordinator.recover()
        return coordinator

    def _namesake(self, query: RunningQuery) -> str | None:
        return self.log.namesake(self.name, query.run.query_id)

    def _listen(self) -> bool:
        """Listen to the session's starts; returns whether that was so already."""
        if self._listener is not None and self._listener.is_heard:
            return True
        self._listener = StartListener.add(self._on_start)
        return False

    def _warn_of_unheard_starts(self, query: RunningQuery) -> None:
        was_heard = self._listen()
        if self._commit == "immediate":  # for which it hardly ever matters
            return
        if was_heard and self._listener is not None and self._listener.hears(query):
            return
        logger.warning(
            "pipeline %r was made %s, and hears of a start only by a batch. A start that finds no "
            "new data has none, and leaves what is prepared as it is: make the pipeline after the "
            "session and in that of its query, or end its queries with "
            "pipeline.awaitTermination(query)",
            self.name,
            "in another SparkSession than its query" if was_heard else "before the SparkSession",
        )

    def _on_start(self, query: RunningQuery) -> None:
        def recover() -> None:
            # Asked first: an object waits for no query but its own.
            if not (self._is_meant(query) and self._is_bound(query) and self._has_to_hear(query)):
                return
            with self._lock:
                if self._is_meant(query):
                    self._recover_at_start(query)

        try:
            _while_active(query, recover, f"recover the start of {query.run}")
        except Exception:
            # The first batch, or awaitTermination, tries again and raises.
            logger.warning("the start of %s was not recovered yet", query.run, exc_info=True)

    def _has_to_hear(self, query: RunningQuery) -> bool:
        """Whether the first batch may be too late to recover the start.

        With commit="immediate" Spark replays what is not complete, but for what
        commit="after_checkpoint" had left.
        """
        if self._commit == "after_checkpoint":
            return True
        # Its first batch may be making the log at this moment, or the user deleting it.
        log = query.open_log(create=False) if self._is_log_in_checkpoint else self.log
        committed = query.committed()
        return any(record.id.batch_id <= committed for record in log.unfinished(self.name))

    def _is_meant(self, query: RunningQuery) -> bool:
        """Whether this is the newest object of the pipeline, as far as its checkpoint is known."""
        for ref in _listening[::-1]:
            other = ref()
            if other is not None and other._may_be_called(self, query):  # noqa: SLF001
                return other is self
        return False

    def _may_be_called(self, instead_of: ExactlyOnce, query: RunningQuery) -> bool:
        if (self.name, self._log_key) != (instead_of.name, instead_of._log_key):
            return False
        return self._checkpoint in {None, query.checkpoint}

    def _recover_at_start(self, query: RunningQuery) -> None:
        """Recover without a batch: a start that finds no new data never calls foreachBatch.

        Nothing is done for a run that an object has turned to, or that was followed by another.
        """
        with self._lock, _turn(query):
            served = _served(query.run.query_id)
            if served is not None and (
                served.run == query.run or (served.is_active and not query.is_active)
            ):
                return
            if not self._is_bound(query):
                return
            self._leave_for(query)
            try:
                self._turn_to(query)
                self._coordinator = self._begin(query, query.committed() + 1)
            except BaseException:
                self._query = None  # whoever comes next tries again
                raise

    def _is_bound(self, query: RunningQuery) -> bool:
        """Whether the query's checkpoint belongs to this pipeline, as far as it tells."""
        bound = query.binding()
        if bound is None or bound.pipeline != self.name:
            return False
        # The second id is that from before a move.
        return self._is_log_in_checkpoint or bound.log_id in {
            self.log.log_id,
            self.log.id_of(self.name),
        }

    # -- the commit of a batch that waits for Spark's checkpoint ---------------------------------

    def _settle_soon(self, query: RunningQuery, batch_id: int) -> None:
        def settle() -> None:
            with self._lock:
                if self._query is not query or _serving.get(query.run.query_id) is not self:
                    return  # whoever has turned to the query since has recovered it
                if self._failure is not None:
                    self._settle_anew(query, batch_id, self._failure)
            self._settle_last(math.inf)

        try:
            _while_active(query, settle, f"commit batch {batch_id} of pipeline {self.name!r}")
        except Exception:
            # Kept in self._failure: the next batch, awaitTermination or close raises it.
            logger.exception("pipeline %r: the last batch is not committed", self.name)

    def _settle_anew(self, query: RunningQuery, batch_id: int, failure: Exception) -> None:
        """After a failure only the log tells how far it came; a new incarnation goes by that."""
        # Before Spark has the batch, a new incarnation would abandon it.
        if not query.is_active or (committed := query.committed()) < batch_id:
            raise failure
        self._coordinator = self._begin(query, committed + 1)
        self._failure = None

    def _settle_at_exit(self) -> None:
        if self._failure is not None:
            return  # it was said when it happened
        if not self._lock.acquire(timeout=_EXIT_WAIT_S):
            logger.warning(
                "pipeline %r: a batch is still being delivered at the interpreter's end; the next "
                "start goes on with what is decided of it",
                self.name,
            )
            return
        try:
            self._settle_last(_EXIT_WAIT_S)
        except Exception:
            logger.exception("pipeline %r: the last batch is not committed", self.name)
        finally:
            self._lock.release()

    def _settle_last(self, patience_s: float) -> None:
        """Settle the batch that is pending now, once Spark's checkpoint has it."""
        pending: TransactionRecord | None = None
        deadline, wait_s = time.monotonic() + patience_s, 0.01
        while True:
            with self._lock:
                if self._failure is not None:
                    raise self._failure
                coordinator, query = self._coordinator, self._query
                if coordinator is None or query is None or coordinator.pending is None:
                    return
                if _serving.get(query.run.query_id) not in {None, self}:
                    return  # whoever has turned to the query since has recovered it
                pending = pending or coordinator.pending
                if coordinator.pending is not pending:
                    return
                # Asked before the commit log is read: nothing comes after an end that was seen.
                is_active = query.is_active
                try:
                    if coordinator.settle():
                        return
                except Exception as error:
                    self._failure, self._coordinator = error, None
                    if isinstance(error, FencedError):
                        self._let_go()
                    raise
            if not is_active or time.monotonic() > deadline:
                logger.warning(
                    "%s is prepared, and Spark has not written it into the commit log of %s: the "
                    "next start commits or replays it",
                    pending.id,
                    query.checkpoint,
                )
                return
            time.sleep(wait_s)
            wait_s = min(wait_s * 1.5, _LONGEST_POLL_S)


def _while_active(query: RunningQuery, action: Callable[[], None], what: str) -> None:
    """Repeat it while time may help and the query runs: it may be long until its next batch."""
    Retrying(
        retry=retry_if_not_exception_type(_LASTING),
        wait=wait_exponential(max=_LONGEST_WAIT_S),
        stop=lambda _: not query.is_active,
        before_sleep=still_trying(what),
        reraise=True,
    )(action)


def _turn(query: RunningQuery) -> threading.RLock:
    return _turns.setdefault(query.run.query_id, threading.RLock())


def _served(query_id: str) -> RunningQuery | None:
    """The run of the query that an object serves."""
    server = _serving.get(query_id)
    served = None if server is None else server._query  # noqa: SLF001 - of this module
    # It may have turned to another query since, or failed to.
    return served if served is not None and served.run.query_id == query_id else None


def _check_sinks(sinks: Sequence[AnySink], removed: Sequence[AnySink]) -> None:
    if not sinks:
        raise ConfigurationError("sinks= is empty: give at least one sink")
    for sink in (*sinks, *removed):
        if not isinstance(sink, TwoPhaseCommitSink):
            raise ConfigurationError(f"sinks= holds {sink!r}, which is no TwoPhaseCommitSink")
        if not hasattr(sink, "name"):
            raise ConfigurationError(
                f"{type(sink).__name__} has no name: call super().__init__(name=name) in its "
                "__init__"
            )
        if sink.dealt_by and sink.writers is None:
            raise ConfigurationError(
                f"{sink!r} has dealt_by={sink.dealt_by!r} and no writers=: say to how many tasks "
                "its rows are dealt out"
            )
    names = [sink.name for sink in (*sinks, *removed)]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(
                f"two sinks are named {name!r}: give each a lasting name of its own with name="
            )
