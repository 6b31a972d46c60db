"""The running query and its checkpoint, read through Spark's own JVM.

    CHECKPOINT/metadata        the query id
              /offsets/N       written before batch N runs; N is replayed while commits/N is absent
              /commits/N       written after foreachBatch has returned
              /state/…         only where the query has a state
              /sparkonce.json  ours: which transaction log and pipeline the checkpoint belongs to
              /sparkonce-drivers/…  ours: which drivers have begun
              /sparkonce-log   ours: that log itself, with log="checkpoint"

Spark's files are read with Hadoop's FileSystem, so a checkpoint works wherever Spark can put it;
ours are created atomically (`sparkonce.txn_log.folder`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
import time
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, Self, TypeVar

from py4j.protocol import Py4JJavaError
from pyspark import SparkContext

from sparkonce.errors import ConfigurationError
from sparkonce.spark_hooks.binding import (
    Binding,
    Entry,
    bind,
    enter,
    is_last_entry,
    last_entry,
    read_binding,
)
from sparkonce.steps import step
from sparkonce.txn_log import TransactionLog, checkpoint_folder, checkpoint_log
from sparkonce.txn_log.folder import Folder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

P = ParamSpec("P")
ResultT = TypeVar("ResultT")

_TAIL_BYTES = 1 << 18
_START_MS = 600_000
_ENDING_S = 0.1
_ENDING_LOOKS = 20
"""A thread that Spark calls ended may have its last steps before it."""


class RunId(NamedTuple):
    """One run of one query.

    Attributes:
        query_id: lasting id of the checkpoint.
        run_id: of this run of the query.
    """

    query_id: str
    run_id: str


_entered: set[RunId] = set()
"""The runs that have entered their checkpoint, by whichever object."""

_LOCATION = "spark.sql.streaming.checkpointLocation"
_TEMPORARY = "temporary-"
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""Of the name that Spark gives a checkpoint below `_LOCATION`, to a query without a name."""


def _calling_query(batch_df: DataFrame) -> str:
    """The id of the query that is calling foreachBatch in this thread.

    Raises:
        ConfigurationError: the call does not come from foreachBatch, or over Spark Connect.
    """
    session = batch_df.sparkSession
    if not hasattr(session, "_jsparkSession"):
        raise ConfigurationError(
            "sparkonce reads the query's checkpoint on the driver, which Spark Connect does "
            "not allow: run the query in a classic Spark session"
        )
    query_id = session.sparkContext.getLocalProperty("sql.streaming.queryId")
    if not query_id:
        raise ConfigurationError(
            "ExactlyOnce is called by a running query: pass it to "
            "df.writeStream.foreachBatch(…) and set a checkpointLocation. A function of your own "
            "calls it in the thread in which Spark calls that function"
        )
    return str(query_id)


def _active(session: SparkSession, query_id: Any) -> Any:
    """The one StreamExecution of the query that Spark lets run, by its id in the JVM."""
    jsession: Any = session._jsparkSession  # noqa: SLF001
    return jsession.sharedState().activeStreamingQueries().get(query_id)


def _said(
    ask: Callable[Concatenate[RunningQuery, P], ResultT],
) -> Callable[Concatenate[RunningQuery, P], ResultT]:
    """Say so while the checkpoint's file system does not answer."""

    @functools.wraps(ask)
    def said(query: RunningQuery, /, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        with step("checkpoint", of=query.checkpoint):
            return ask(query, *args, **kwargs)

    return said


class RunningQuery:
    """A query while it runs, and its checkpoint. The checkpoint can be read after it has ended.

    Args:
        query: Spark's StreamExecution.
        run: which query.

    Attributes:
        run: which query.
        checkpoint: location of the checkpoint.
    """

    def __init__(self, query: Any, run: RunId) -> None:
        jvm: Any = SparkContext._active_spark_context._jvm  # noqa: SLF001 - py4j is the only way
        self.run = run
        self.checkpoint = str(query.resolvedCheckpointRoot())
        self._query = query
        # Py4J asks the JVM for each part of a class's name, every time: a dozen round trips.
        self._path_class: Any = jvm.org.apache.hadoop.fs.Path
        self._to_string: Any = jvm.org.apache.commons.io.IOUtils.toString
        self._root = self._path_class(self.checkpoint)
        self._conf = query.sparkSession().sessionState().newHadoopConf()
        self._fs = self._root.getFileSystem(self._conf)
        self._sources: list[str] = []
        self._entry: Entry | None = None

    @classmethod
    def find(cls, session: SparkSession, run: RunId) -> Self:
        """The active query of this run.

        Raises:
            ConfigurationError: the run is over, or another one has followed it.
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

        Which run it is only Spark's list of active queries tells: its one other trace there, the
        job group, is the user's to set.

        Raises:
            ConfigurationError: the call does not come from foreachBatch, or over Spark Connect; or
                the query has a checkpoint that its next start would not find.
        """
        found = cls._find(batch_df.sparkSession, _calling_query(batch_df))
        found._check_is_lasting(batch_df.sparkSession)  # noqa: SLF001 - of this class
        return found

    def _check_is_lasting(self, session: SparkSession) -> None:
        """Refuse a checkpoint that Spark has made up for a query without one."""
        name = str(self._root.getName())
        place = session.conf.get(_LOCATION, None)
        is_temporary = name.startswith(_TEMPORARY)
        if place is not None and self._query.name() is None and _UUID.fullmatch(name):
            made_up = self._path_class(place, name)
            made_up = made_up.getFileSystem(self._conf).makeQualified(made_up)
            is_temporary |= bool(made_up.equals(self._root))
        if is_temporary:
            raise ConfigurationError(
                f"the query has no checkpointLocation, so Spark made {self.checkpoint} for this "
                "start alone, and the next one would deliver all of its rows again: set "
                '.option("checkpointLocation", …)'
            )

    def is_calling(self, batch_df: DataFrame) -> bool:
        """Whether `calling` would find this very run."""
        if _calling_query(batch_df) != self.run.query_id:
            return False
        return bool(_active(batch_df.sparkSession, self._query.id()) == self._query)

    @classmethod
    def _find(cls, session: SparkSession, query_id: str) -> Self:
        jvm: Any = session.sparkContext._jvm  # noqa: SLF001
        query = _active(session, jvm.java.util.UUID.fromString(query_id))
        if query is None:
            raise ConfigurationError(f"the query {query_id} is not active any more")
        return cls(query, RunId(query_id, str(query.runId())))

    @classmethod
    def of(cls, query: StreamingQuery) -> Self:
        """The query that ``start()`` returned; it may have ended."""
        return cls(query._jsq.streamingQuery(), RunId(str(query.id), str(query.runId)))  # noqa: SLF001

    def is_of(self, session: SparkSession) -> bool:
        """Whether it was started in this session."""
        return bool(self._query.sparkSession().streams() == session._jsparkSession.streams())  # noqa: SLF001

    def is_running(self, query_id: str | None) -> bool:
        """Whether another query, by its id, is active in this Spark."""
        jvm: Any = SparkContext._active_spark_context._jvm  # noqa: SLF001 - py4j is the only way
        running: Any = self._query.sparkSession().sharedState().activeStreamingQueries()
        return running.get(jvm.java.util.UUID.fromString(query_id)) is not None

    @property
    def location(self) -> str:
        return self.checkpoint

    @property
    def is_active(self) -> bool:
        """Whether Spark may still write into the checkpoint.

        That is as long as the run's thread lives, a little longer than Spark calls it active:
        `stop` ends that first, and then waits for the batch that runs.
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
        """Whether the run has ended, or is being stopped and interrupts what its batch does."""
        return not self._query.isActive()

    @cached_property
    @_said
    def is_stateful(self) -> bool:
        """Whether the query has written state; known from its first batch on."""
        return bool(self._fs.exists(self._path("state")))

    @property
    def plan(self) -> Any:
        """Spark's optimized plan of the current batch, up to foreachBatch."""
        return self._query.lastExecution().optimizedPlan()

    @_said
    def committed(self) -> int:
        """The highest batch of Spark's commit log, as it is on the disk; -1 when it is empty."""
        latest = self._query.commitLog().getLatestBatchId()
        return int(latest.get()) if latest.isDefined() else -1

    @_said
    def has_offsets(self, batch_id: int) -> bool:
        """Whether Spark has begun the batch in this checkpoint."""
        return bool(self._fs.exists(self._path(f"offsets/{batch_id}")))

    @_said
    def offsets(self, batch_id: int) -> tuple[str, ...] | None:
        """The source offsets that the checkpoint shows for a batch, as JSON, for each use of one.

        None when Spark has purged them, or has not come as far as to have its sources. The file's
        first line is its format, the second the batch's watermark and settings; both may change in
        a replay.

        A file source's offset is only a counter of its own, equal in a checkpoint that was rolled
        back and met other files; so a digest of the batch's files is added to it.
        """
        text = self._read(f"offsets/{batch_id}")
        if text is None or "\n" not in text:  # torn: Spark itself fails on it, and names it
            return None
        version, _, *lines = text.splitlines()
        is_named = version != "v1"
        uses = [line.split(":", 1) for line in sorted(lines)] if is_named else enumerate(lines)
        shown = [(use, self._with_files(str(use), offset)) for use, offset in uses]
        known = [
            f"{use}:{offset}" if is_named else offset for use, offset in shown if offset is not None
        ]
        return tuple(known) if len(known) == len(shown) else None

    def _with_files(self, use: str, offset: str) -> str | None:
        """The offset, with a digest of its files if it is a file source's; None if they are gone.

        CHECKPOINT/sources/0/7 has the files of counter 7, and 9.compact those of 0 to 9.
        """
        value = json.loads(offset) if offset.startswith("{") else None
        if not isinstance(value, dict) or value.keys() != {"logOffset"}:
            return offset
        source = self._source_of(use)
        if source is None:
            return None
        folder, counter = f"sources/{source}", value["logOffset"]
        entries = self._entries(self._read(f"{folder}/{counter}"))
        if entries is None:
            entries = self._end_of_compacted(f"{folder}/{counter}.compact", counter)
        if entries is None:
            return None if self._fs.exists(self._path(folder)) else offset
        files = sorted((e["path"], e["timestamp"]) for e in entries if e["batchId"] == counter)
        digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16]
        return json.dumps({**value, "files": digest})

    def _source_of(self, use: str) -> str | None:
        """The source's folder: numbered by its first use, while each use has an offset.

        None when the query has failed before Spark had its sources.
        """
        if not use.isdigit():
            return use
        if not self._sources:
            with contextlib.suppress(Py4JJavaError):
                if self._query.sources().isEmpty():
                    self._query.awaitInitialization(_START_MS)
            found, distinct = self._query.sources(), []
            for n in range(found.size()):
                source = found.apply(n)
                if source not in distinct:
                    distinct.append(source)
                self._sources.append(str(distinct.index(source)))
        return self._sources[int(use)] if self._sources else None

    def _end_of_compacted(self, name: str, counter: int) -> list[dict[str, Any]] | None:
        """The log's entries from the counter's first one on; None when there is no such log.

        It ends with the newest files, and may be long, so it is read from its end.
        """
        window = _TAIL_BYTES
        while (text := self._read(name, window)) is not None:
            entries = self._entries(text) or []
            if len(text) < window // 4 or any(e["batchId"] < counter for e in entries):
                return entries
            window *= 4
        return None

    @staticmethod
    def _entries(text: str | None) -> list[dict[str, Any]] | None:
        """The lines but the first, which is the format, or the rest of a line."""
        return None if text is None else [json.loads(line) for line in text.splitlines()[1:]]

    @_said
    def binding(self) -> Binding | None:
        """What the checkpoint belongs to; None while it is nobody's."""
        return read_binding(self._folder)

    @_said
    def bind(self, seen: Binding | None, log_id: str, pipeline: str) -> None:
        """Write what the checkpoint belongs to, if nobody has written it since it was `seen`."""
        bind(self._folder, seen, log_id, pipeline)

    @_said
    def last_entry(self) -> Entry | None:
        """Which driver has begun last on the checkpoint."""
        return last_entry(self._folder)

    @_said
    def enter(self, seen: Entry | None, driver: str, fenced_run: str | None) -> bool:
        """Go on from the checkpoint, if no other driver has begun since `last_entry` was `seen`.

        A run that has entered before does not enter behind another one.
        """
        run_id = self.run.run_id
        if self.run in _entered and (seen is None or seen.run_id != run_id):
            return False
        self._entry = enter(self._folder, seen, driver, run_id, fenced_run)
        if self._entry is not None:
            _entered.add(self.run)
        return self._entry is not None

    @_said
    def is_ours(self) -> bool:
        """Whether no driver has entered the checkpoint since this one."""
        return self._entry is not None and is_last_entry(self._folder, self._entry)

    @_said
    def open_log(self, *, create: bool = True) -> TransactionLog:
        """Open the transaction log that is inside this checkpoint."""
        return checkpoint_log(self.checkpoint, self._conf, create=create)

    @cached_property
    def _folder(self) -> Folder:
        return checkpoint_folder(self.checkpoint, self._conf)

    def _path(self, name: str) -> Any:
        return self._path_class(self._root, name)

    def _read(self, name: str, last_bytes: int | None = None) -> str | None:
        path = self._path(name)
        if not self._fs.exists(path):
            return None
        stream = self._fs.open(path)
        try:
            if last_bytes is not None:
                size = int(self._fs.getFileStatus(path).getLen())
                stream.seek(max(0, size - last_bytes))
            return str(self._to_string(stream, "UTF-8"))
        finally:
            stream.close()
