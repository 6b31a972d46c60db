"""The query that runs, through Spark's own JVM: which run it is, whether it is active, its plan.

foreachBatch(df, N) ─► RunningQuery.calling(df)  ─┐
a start, heard of   ─► RunningQuery.find(…)      ─┼─► StreamExecution in the JVM
awaitTermination    ─► RunningQuery.of(query)    ─┘     └─► its checkpoint: `CheckpointedQuery`
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkContext

from sparkonce.errors import ConfigurationError
from sparkonce.observing import Source
from sparkonce.spark_hooks.checkpoint import CheckpointFiles, checkpoint_folder
from sparkonce.spark_hooks.query import CheckpointedQuery, RunId
from sparkonce.storage.hadoop import java_class
from sparkonce.txn_log import TransactionLog, checkpoint_log

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

_START_MS = 600_000
_ENDING_S = 0.1
_ENDING_LOOKS = 20
"""A thread that Spark reports as ended may still have its last steps to do."""

_SERVERS = "kafka.bootstrap.servers"
_LOCATION = "spark.sql.streaming.checkpointLocation"
_TEMPORARY = "temporary-"
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""The folder below `_LOCATION` that Spark makes for the checkpoint of a query without a name."""


class RunningQuery(CheckpointedQuery):
    """A query while it runs: a StreamExecution in the JVM."""

    def __init__(self, query: Any, run: RunId) -> None:
        self._query = query  # before the checkpoint, which needs `hadoop_conf`
        self.run = run
        self.checkpoint = str(query.resolvedCheckpointRoot())
        self.files = CheckpointFiles(
            checkpoint_folder(self.checkpoint, self.hadoop_conf), self.checkpoint
        )
        self._sources: dict[str, str] = {}

    # -- finding it --------------------------------------------------------------------------------

    @classmethod
    def find(cls, session: SparkSession, run: RunId) -> Self:
        """The active query of this run.

        Raises:
            ConfigurationError: the run has ended, or another one has followed it.
        """
        found = cls._find(session, run.query_id)
        if found.run != run:
            raise ConfigurationError(
                f"the run {run.run_id} of the query {run.query_id} is not active any more: it was "
                f"followed by {found.run.run_id}"
            )
        return found

    @classmethod
    def calling(cls, batch_df: DataFrame) -> Self:
        """The query that is calling foreachBatch in this thread.

        Only Spark's list of active queries shows which run it is. Its one other trace in the thread
        is the job group, which a user may set.

        Raises:
            ConfigurationError: the call does not come from foreachBatch, or over Spark Connect; or
                the query has a checkpoint that its next start would not find.
        """
        found = cls._find(batch_df.sparkSession, query_calling(batch_df))
        found._check_is_permanent(batch_df.sparkSession)  # noqa: SLF001 - of this class
        return found

    @classmethod
    def of(cls, query: StreamingQuery) -> Self:
        """The query that ``start()`` returned; it may have ended."""
        return cls(query._jsq.streamingQuery(), RunId(str(query.id), str(query.runId)))  # noqa: SLF001

    @classmethod
    def _find(cls, session: SparkSession, query_id: str) -> Self:
        jvm: Any = session.sparkContext._jvm  # noqa: SLF001
        query = _active(session, java_class(jvm, "java.util.UUID").fromString(query_id))
        if query is None:
            raise ConfigurationError(f"the query {query_id} is not active any more")
        return cls(query, RunId(query_id, str(query.runId())))

    def _check_is_permanent(self, session: SparkSession) -> None:
        """Refuse a checkpoint that Spark made up for a query without one."""
        name = self.checkpoint.rstrip("/").rpartition("/")[2]
        is_temporary = name.startswith(_TEMPORARY)
        place = session.conf.get(_LOCATION, None)
        if place is not None and self._query.name() is None and _UUID.fullmatch(name):
            jvm: Any = SparkContext._active_spark_context._jvm  # noqa: SLF001 - py4j is the only way
            path_class = java_class(jvm, "org.apache.hadoop.fs.Path")
            made_up = path_class(place, name)
            made_up = made_up.getFileSystem(self.hadoop_conf()).makeQualified(made_up)
            is_temporary |= bool(made_up.equals(path_class(self.checkpoint)))
        if is_temporary:
            raise ConfigurationError(
                f"the query has no checkpointLocation, so Spark made {self.checkpoint} for this "
                "start only, and the next one would deliver all of its rows again: set "
                '.option("checkpointLocation", …)'
            )

    def is_calling(self, batch_df: DataFrame) -> bool:
        """Whether `calling` would find this very run."""
        if query_calling(batch_df) != self.run.query_id:
            return False
        return bool(_active(batch_df.sparkSession, self._query.id()) == self._query)

    def is_running(self, query_id: str) -> bool:
        """Whether any query with this id is active in this Spark."""
        jvm: Any = SparkContext._active_spark_context._jvm  # noqa: SLF001 - py4j is the only way
        key = java_class(jvm, "java.util.UUID").fromString(query_id)
        return self._active_queries().get(key) is not None

    @property
    def is_followed(self) -> bool:
        """Whether another run of the query is active."""
        active = self._active_queries().get(self._query.id())
        return active is not None and active != self._query

    def _active_queries(self) -> Any:
        return self._query.sparkSession().sharedState().activeStreamingQueries()

    def is_of(self, session: SparkSession) -> bool:
        """Whether it was started in this session."""
        return bool(self._query.sparkSession().streams() == session._jsparkSession.streams())  # noqa: SLF001

    # -- its run -----------------------------------------------------------------------------------

    @property
    def is_active(self) -> bool:
        """Whether Spark may still write into the checkpoint.

        It may while the run's thread lives, a little longer than Spark reports the run as active:
        `stop` first marks the run as inactive, then waits for its batch.
        """
        if not self.is_stopping:
            return True
        thread = self._query.queryExecutionThread()
        for _ in range(_ENDING_LOOKS):
            if not thread.isAlive():
                return False
            time.sleep(_ENDING_S / _ENDING_LOOKS)
        return True

    @property
    def is_stopping(self) -> bool:
        """Whether the run has ended, or Spark is stopping it and interrupting its batch."""
        return not self._query.isActive()

    @property
    def is_this_thread(self) -> bool:
        """Whether Spark runs the query's batches in the calling thread."""
        jvm: Any = SparkContext._active_spark_context._jvm  # noqa: SLF001 - py4j is the only way
        this = java_class(jvm, "java.lang.Thread").currentThread()
        return bool(this == self._query.queryExecutionThread())

    @property
    def is_planning_first(self) -> bool:
        """Whether Spark may be about to write ``offsets/0`` into a fresh checkpoint."""
        if self.files.begun() >= 0:
            return False
        status = self._query.status()
        return bool(status.isTriggerActive() or status.message().startswith("Initializing"))

    @property
    def plan(self) -> Any:
        """Spark's optimized plan of the current batch, up to foreachBatch."""
        return self._query.lastExecution().optimizedPlan()

    @property
    def executed_plan(self) -> Any:
        """Spark's physical plan of the current batch."""
        return self._query.lastExecution().executedPlan()

    @property
    def is_deterministic(self) -> bool:
        """Whether Spark says that another computation of the batch gives the same rows."""
        plan = self.plan
        return bool(plan.deterministic()) and not self.files.has_state()

    def folders_of(self, uses: Sequence[str]) -> Mapping[str, str] | None:
        """The sources' folders. Spark numbers one by its source's first use.

        None when the query failed before Spark had created its sources.
        """
        if not uses[0].isdigit():
            return {use: use for use in uses}
        if not self._sources:
            with contextlib.suppress(Py4JJavaError):
                if self._query.sources().isEmpty():
                    self._query.awaitInitialization(_START_MS)
            found, distinct = self._query.sources(), []
            for n in range(found.size()):
                source = found.apply(n)
                if source not in distinct:
                    distinct.append(source)
                self._sources[str(n)] = str(distinct.index(source))
        return self._sources or None

    def described_sources(self) -> list[Source]:
        """The sources, in the order of their offsets; empty before Spark has created them."""
        sources, servers = self._query.sources(), {}
        leaves = self._query.logicalPlan().collectLeaves()
        for n in range(leaves.size()):
            with contextlib.suppress(Py4JError):  # an older kind of source has no such members
                leaf = leaves.apply(n)
                servers[leaf.stream()] = leaf.relation().options().get(_SERVERS)
        found = (sources.apply(n) for n in range(sources.size()))
        return [Source(str(source.toString()), servers.get(source)) for source in found]

    # -- its checkpoint ----------------------------------------------------------------------------

    @cached_property
    def is_stateful(self) -> bool:
        """Whether the query has written state; known from its first batch on."""
        return self.files.has_state()

    def open_log(self, *, create: bool = True) -> TransactionLog:
        """Open the transaction log that is inside this checkpoint."""
        return checkpoint_log(self.checkpoint, self.hadoop_conf, create=create)

    def hadoop_conf(self) -> Any:
        """Hadoop's configuration with the query's own settings."""
        return self._query.sparkSession().sessionState().newHadoopConf()


def query_calling(batch_df: DataFrame) -> str:
    """The id of the query that is calling foreachBatch in this thread.

    Raises:
        ConfigurationError: the call does not come from foreachBatch, or over Spark Connect.
    """
    session = batch_df.sparkSession
    if not hasattr(session, "_jsparkSession"):
        raise ConfigurationError(
            "in foreachBatch sparkonce needs the driver's JVM, which Spark Connect hides: write "
            'with df.writeStream.format("sparkonce") (docs/howto/spark-connect.md), or run the '
            "query in a classic Spark session"
        )
    query_id = session.sparkContext.getLocalProperty("sql.streaming.queryId")
    if not query_id:
        raise ConfigurationError(
            "ExactlyOnce must be called by a running query: pass it to "
            "df.writeStream.foreachBatch(…) and set a checkpointLocation. A function of your own "
            "must call it in the thread in which Spark calls that function"
        )
    return str(query_id)


def _active(session: SparkSession, query_id: Any) -> Any:
    """The query's active StreamExecution, by the query's id in the JVM; Spark allows only one."""
    jsession: Any = session._jsparkSession  # noqa: SLF001
    return jsession.sharedState().activeStreamingQueries().get(query_id)
