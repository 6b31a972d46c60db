"""`ExactlyOnce`: what a user hands to foreachBatch.

    foreachBatch(df, N) ─► RunningQuery ─► [new run: validate, begin, bind, recover] ─► run N

Where a decided batch is unfinished, it is recovered first and the sinks are validated after.

A query id and run id that it has not seen make a new incarnation, with a token of its own: a
restart, a second ``start()`` in the same process, and Spark's retry after an exception alike.
"""

from __future__ import annotations

import inspect
import logging
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, cast

from pyspark.sql.pandas.types import to_arrow_schema

from sparkonce.errors import ConfigurationError, ProtocolError, SparkOnceError
from sparkonce.model import is_label
from sparkonce.sinks.base import AnySink, TwoPhaseCommitSink
from sparkonce.spark_hooks.checkpoint import RunningQuery, current_run
from sparkonce.spark_hooks.coordinator import Coordinator
from sparkonce.spark_hooks.fingerprint import free_name, is_plain, row_hash
from sparkonce.spark_hooks.partition_writer import (
    SUMMARY_SCHEMA,
    PartitionSummary,
    PartitionWriter,
)
from sparkonce.txn_log import TransactionLog, open_log
from sparkonce.txn_log.identity import Claim
from sparkonce.txn_log.record import Incarnation, Share

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

logger = logging.getLogger("sparkonce")


class ExactlyOnce:
    """Writes every micro-batch into all sinks once, or into none.

    Pass it to ``foreachBatch``; one object serves one query at a time.

    Args:
        name: the pipeline's lasting name: 1 to 32 of A-Z a-z 0-9 _ and -. It is bound to the
            query's checkpoint at the first batch.
        sinks: where the rows go; their names differ.
        log: address of the transaction log (see `sparkonce.txn_log.open_log`), or an open log.
        replaces: query id of the checkpoint that had this name before, to let a fresh checkpoint
            go on under it, once.
        adopt: take over a checkpoint that ran without this transaction log until now.
        commit_timeout_s: how long the commits of a decided batch are repeated before the query
            fails, in seconds. The next start carries on, so nothing is lost.
        retain: batches of history that the log keeps.

    Raises:
        ConfigurationError: a setting cannot work.
    """

    def __init__(
        self,
        name: str,
        *,
        sinks: Sequence[AnySink],
        log: str | TransactionLog,
        replaces: str | None = None,
        adopt: bool = False,
        commit_timeout_s: float = 600.0,
        retain: int = 10_000,
    ) -> None:
        if not is_label(name):
            raise ConfigurationError(
                f"{name!r}: a pipeline's name has 1 to 32 of the characters A-Z a-z 0-9 _ and -"
            )
        _check_sinks(sinks)
        if retain < 1 or commit_timeout_s <= 0:
            raise ConfigurationError(
                f"retain={retain} and commit_timeout_s={commit_timeout_s} must be positive"
            )
        self.name = name
        self.sinks = tuple(sinks)
        self.log = open_log(log)
        self._replaces = replaces
        self._adopt = adopt
        self._commit_timeout_s = commit_timeout_s
        self._retain = retain
        self._lock = threading.Lock()
        self._query: RunningQuery | None = None
        self._coordinator: Coordinator | None = None

    def __call__(self, batch_df: DataFrame, batch_id: int) -> None:
        """Deliver one micro-batch; when it returns, the batch is visible in every sink.

        Raises:
            SparkOnceError: see `sparkonce.errors` for what to do next. The query fails with it,
                and Spark replays the batch at the next start.
        """
        with self._lock:
            run = current_run(batch_df)
            if self._query is None or self._query.run != run:
                self._query, self._coordinator = RunningQuery(batch_df, run), None
            batch = _SparkBatch(batch_df, batch_id, self.sinks, self._query)
            try:
                if self._coordinator is None:
                    self._coordinator = self._begin(self._query, batch)
                self._coordinator.run(batch)
            except BaseException:
                # Whatever comes next is a new incarnation: it recovers first.
                self._coordinator = None
                raise

    def __repr__(self) -> str:
        return f"<ExactlyOnce {self.name!r} -> {list(self.sinks)}, log {self.log.address}>"

    def _begin(self, query: RunningQuery, batch: _SparkBatch) -> Coordinator:
        # What is decided must not wait for a sink that cannot be written to now: it may expire.
        decided = bool(self.log.unfinished(self.name))
        if not decided:
            batch.validate()
        log_id, pipeline = query.binding()
        shown = {b: query.offsets(b) for b in (batch.batch_id - 1, batch.batch_id) if b >= 0}
        claim = Claim(
            pipeline=self.name,
            query_id=query.run.query_id,
            run_id=query.run.run_id,
            driver=f"{socket.gethostname()}:{os.getpid()}",
            sinks={sink.name: sink.target for sink in self.sinks},
            batch_id=batch.batch_id,
            offsets={b: offsets for b, offsets in shown.items() if offsets is not None},
            checkpoint=query.checkpoint,
            checkpoint_log_id=log_id,
            checkpoint_pipeline=pipeline,
            replaces=self._replaces,
            adopt=self._adopt,
        )
        coordinator = Coordinator(
            self.sinks,
            self.log,
            claim,
            commit_timeout_s=self._commit_timeout_s,
            retain=self._retain,
        )
        query.bind(self.log.log_id, self.name)
        logger.info(
            "pipeline %r, query %s, token %d: %s; log %s",
            self.name,
            query.run.query_id,
            coordinator.incarnation.token,
            ", ".join(map(repr, self.sinks)),
            self.log.address,
        )
        coordinator.recover()
        if decided:
            batch.validate()
        return coordinator


class _SparkBatch:
    """A micro-batch as the coordinator sees it; see `sparkonce.spark_hooks.coordinator.Batch`."""

    def __init__(
        self, df: DataFrame, batch_id: int, sinks: Sequence[AnySink], query: RunningQuery
    ) -> None:
        self.batch_id = batch_id
        self.checkpoint = query.checkpoint
        offsets = query.offsets(batch_id)
        if offsets is None:
            raise ConfigurationError(
                f"the checkpoint {query.checkpoint} has no offsets for batch {batch_id}: "
                "was it deleted under the running query?"
            )
        self.offsets = offsets
        self._df = df
        self._sinks = sinks

    def validate(self) -> None:
        """Let every sink check its settings, its server and its schema, before any data moves."""
        schemas = [self._schema(sink) for sink in self._sinks]

        def check(sink: AnySink, schema: pa.Schema) -> None:
            try:
                sink.validate(schema)
            except SparkOnceError:
                raise
            except Exception as error:
                raise ConfigurationError(
                    f"{sink!r} cannot be used: {type(error).__name__}: {error}"
                ) from error

        with ThreadPoolExecutor(len(self._sinks)) as pool:
            list(pool.map(check, self._sinks, schemas))

    def _schema(self, sink: AnySink) -> pa.Schema:
        df = self._df if sink.transform is None else sink.transform(self._df)
        return _arrow_schema(_selected(df, sink.select))

    def write(self, incarnation: Incarnation) -> Mapping[str, Share]:
        plain = [sink for sink in self._sinks if sink.transform is None]
        if len(plain) == len(self._sinks):
            return self._write_pass(self._df, plain, incarnation)
        # Several passes must see the same rows, and a transform that Spark can prune must not
        # starve a stateful query: a snapshot, not `persist`, which a lost executor recomputes.
        snapshot = self._df.localCheckpoint(eager=True)
        shares = self._write_pass(snapshot, plain, incarnation) if plain else {}
        for sink in self._sinks:
            if sink.transform is not None:
                shares |= self._write_pass(sink.transform(snapshot), [sink], incarnation)
        return shares

    def drain(self) -> None:
        self._df.write.format("noop").mode("append").save()

    def _write_pass(
        self, df: DataFrame, sinks: Sequence[AnySink], incarnation: Incarnation
    ) -> dict[str, Share]:
        df, lanes = _with_hashes(df, [sink.select for sink in sinks])
        writer = PartitionWriter(sinks, incarnation, self.batch_id, lanes)
        # As Arrow, since `collect` takes longer to bring a few rows back than the tasks to write.
        returned = df.mapInArrow(writer, SUMMARY_SCHEMA).toArrow()
        summaries = [PartitionSummary.decode(text) for text in returned.column(0).to_pylist()]
        partitions = {summary.partition for summary in summaries}
        if len(partitions) != len(summaries):
            raise ProtocolError(f"batch {self.batch_id}: Spark returned a partition twice")
        committables = [c for summary in summaries for c in summary.committables]
        return {
            sink.name: Share(
                sink.target,
                tuple(s.parts[sink.name] for s in summaries if s.parts),
                tuple(c for c in committables if c.branch_id.sink == sink.name),
            )
            for sink in sinks
        }


def _with_hashes(
    df: DataFrame, selects: Sequence[Sequence[str] | None]
) -> tuple[DataFrame, list[int] | None]:
    """The rows with their hashes, and in which lane each `select` is, as `PartitionWriter` wants.

    A column of structs per distinct `select`; the columns themselves where all share one and
    Spark finds columns of such names again.
    """
    distinct = list(dict.fromkeys(selects))
    if len(distinct) == 1:
        rows = _selected(df, distinct[0])
        if is_plain(schema := rows.schema):
            name = free_name(schema.names)
            return rows.selectExpr("*", f"{row_hash(schema)} AS {name}"), None
    structs = (", ".join(columns or "*") for columns in distinct)
    rows = df.selectExpr(*(f"struct({columns}) AS lane{n}" for n, columns in enumerate(structs)))
    hashes = (
        f"{row_hash(cast('StructType', lane.dataType), lane.name)} AS hash{n}"
        for n, lane in enumerate(rows.schema)
    )
    return rows.selectExpr("*", *hashes), [distinct.index(select) for select in selects]


def _arrow_schema(df: DataFrame) -> pa.Schema:
    """The schema with which the rows reach a sink on the executors."""
    timezone = df.sparkSession.conf.get("spark.sql.session.timeZone")
    # Older versions of PySpark take no zone and show UTC.
    takes_zone = "timezone" in inspect.signature(to_arrow_schema).parameters
    schema: pa.Schema = to_arrow_schema(df.schema, **({"timezone": timezone} if takes_zone else {}))
    return schema


def _selected(df: DataFrame, columns: Sequence[str] | None) -> DataFrame:
    return df if columns is None else df.selectExpr(*columns)


def _check_sinks(sinks: Sequence[AnySink]) -> None:
    if not sinks:
        raise ConfigurationError("sinks= is empty: give at least one sink")
    for sink in sinks:
        if not isinstance(sink, TwoPhaseCommitSink):
            raise ConfigurationError(f"sinks= holds {sink!r}, which is no TwoPhaseCommitSink")
    names = [sink.name for sink in sinks]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(
                f"two sinks are named {name!r}: give each a lasting name of its own with name="
            )
