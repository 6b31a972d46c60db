"""Queries, and what they write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from pyspark import TaskContext

from sparkonce import failpoints
from sparkonce.model import BranchId, Committable
from sparkonce.sinks import FileSink
from sparkonce.sinks.base import TwoPhaseCommitSink
from sparkonce.spark_hooks.shaping import NESTED_MAPS_CRASH

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from sparkonce import ExactlyOnce

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sparkonce.model import Owner
from sparkonce.txn_log.record import Incarnation

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

import os
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from sparkonce import ExactlyOnce

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery


class Job:
    """A query over a folder of JSON files, one file a batch, into folders."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark = spark
        self.folder = folder
        self.source = folder / "in"
        self.source.mkdir(exist_ok=True)
        self.out = self.sink_folder("out")
        self.checkpoint = "ckpt"
        self.files = len(list(self.source.iterdir()))

    @property
    def location(self) -> str:
        """Of the checkpoint, which is a folder in `folder` or a URL."""
        return self.checkpoint if "://" in self.checkpoint else str(self.folder / self.checkpoint)

    def sink_folder(self, name: str) -> Path:
        path = self.folder / name
        path.mkdir(exist_ok=True)
        return path

    def add(self, *rows: str) -> None:
        """One file of rows, and so one batch."""
        hidden = self.folder / "hidden"
        hidden.write_text("\n".join(rows))
        os.utime(hidden, (self.files, self.files))  # Spark takes the oldest first, in seconds
        hidden.rename(self.source / f"{self.files:05d}.json")
        self.files += 1

    def pipeline(self, **settings: Any) -> ExactlyOnce:
        defaults: dict[str, Any] = {
            "sinks": [FileSink(self.out)],
            "log": f"sqlite:///{self.folder}/txn.db",
        }
        return ExactlyOnce("orders", **{**defaults, **settings})

    def run(
        self,
        pipeline: ExactlyOnce,
        shape: Callable[[DataFrame], DataFrame] = lambda df: df,
        mode: str = "update",
    ) -> StreamingQuery:
        """Process all files; raises what the query failed with."""
        query = self.start(pipeline, shape, mode)
        query.awaitTermination()
        return query

    def start(
        self,
        pipeline: ExactlyOnce,
        shape: Callable[[DataFrame], DataFrame] = lambda df: df,
        mode: str = "update",
    ) -> StreamingQuery:
        return (
            shape(self.rows())
            .writeStream.foreachBatch(pipeline)
            .option("checkpointLocation", self.location)
            .outputMode(mode)
            .trigger(availableNow=True)
            .start()
        )

    def rows(self) -> DataFrame:
        return (
            self.spark.readStream.schema("id long, at timestamp")
            .option("maxFilesPerTrigger", 1)
            .json(str(self.source))
        )

    def forget_commit(self) -> None:
        """Leave the checkpoint as a driver leaves it that dies before Spark commits the batch."""
        commits = self.folder / self.checkpoint / "commits"
        newest = max(int(path.name) for path in commits.iterdir() if path.name.isdigit())
        (commits / str(newest)).unlink()
        (commits / f".{newest}.crc").unlink(missing_ok=True)

    def visible(self, folder: Path | None = None, column: str = "id") -> Counter[Any]:
        files = (folder or self.out).glob("*.parquet")
        return Counter(value for path in files for value in pq.read_table(path)[column].to_pylist())


def ids(*values: int) -> list[str]:
    return [f'{{"id": {value}, "at": "2026-01-01T00:00:{value % 60:02d}Z"}}' for value in values]


def numbered_by_state(df: DataFrame) -> DataFrame:
    """transformWithState: each row with its key's running number."""
    from pyspark.sql.streaming import StatefulProcessor

    class Count(StatefulProcessor):  # type: ignore[misc]
        def init(self, handle: Any) -> None:
            self.state = handle.getValueState("count", "n long")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:  # noqa: N803
            import pandas as pd

            seen = self.state.get()[0] if self.state.exists() else 0
            for frame in rows:
                seen += len(frame)
            self.state.update((seen,))
            yield pd.DataFrame({"id": [seen]})

        def close(self) -> None:
            pass

    return df.groupBy("id").transformWithStateInPandas(
        statefulProcessor=Count(),
        outputStructType="id long",
        outputMode="Update",
        timeMode="none",
    )


def fail_at(point: str) -> Callable[[str, object], None]:
    def fail(reached: str, where: object) -> None:
        if reached == point:
            raise failpoints.InjectedError(reached)

    return fail


INCARNATION = Incarnation("orders", Owner("0" * 16, "5b1d"), 4)
TYPES = {
    "boolean": ["true", "false"],
    "tinyint": ["1Y", "-1Y"],
    "bigint": ["1L", "-9223372036854775808L"],
    "float": ["float('NaN')", "float('-inf')", "1.5f"],
    "double": ["double('NaN')", "0.0D", "1e-300D"],
    "decimal(38,10)": ["1.0BD", "1.0000000001BD"],
    "decimal(10,2)": ["1.01BD", "1.1BD"],
    "string": ["''", "'a'", "'A'", "'a '"],
    "string collate utf8_lcase": ["'a'", "'A'"],
    "char(3)": ["'a'", "'b'"],
    "binary": ["X''", "X'00'", "X'0000'"],
    "date": ["DATE'2026-01-01'", "DATE'0001-01-01'"],
    "timestamp": ["TIMESTAMP'2026-01-01 00:00:00.000001'", "TIMESTAMP'2026-01-01 00:00:00'"],
    "timestamp_ntz": ["TIMESTAMP_NTZ'2026-01-01 00:00:00.000001'", "TIMESTAMP_NTZ'9999-01-01'"],
    "interval day to second": ["INTERVAL '1' DAY", "INTERVAL '0.000001' SECOND"],
    "void": [],
    "array<string>": [
        "array()",
        "array(null)",
        "array('')",
        "array('a', null)",
        "array(null, 'a')",
    ],
    "array<array<int>>": [
        "array(array(1), array(2))",
        "array(array(1, 2))",
        "array(array(), null)",
    ],
    "struct<a: string, b: string>": [
        "named_struct('a', null, 'b', 'x')",
        "named_struct('a', 'x', 'b', null)",
        "named_struct('a', null, 'b', null)",
    ],
    "struct<a: int, A: timestamp>": [  # SQL can name neither field
        "named_struct('a', 1, 'A', null)",
        "named_struct('a', null, 'A', TIMESTAMP'2026-01-01 00:00:00.000001')",
        "named_struct('a', null, 'A', TIMESTAMP'2026-01-01 00:00:00.000002')",
    ],
    "struct<a: int, A: timestamp_ntz>": [
        "named_struct('a', null, 'A', TIMESTAMP_NTZ'2026-01-01 00:00:00.000001')",
        "named_struct('a', null, 'A', TIMESTAMP_NTZ'2026-01-01 00:00:00.000002')",
    ],
    "struct<a: array<struct<`x.y`: map<binary, int>>>, A: variant>": [
        "named_struct('a', array(), 'A', to_variant_object(named_struct('a', DATE'2026-01-01')))",
        "named_struct('a', array(), 'A', to_variant_object(named_struct('a', '2026-01-01')))",
        "named_struct('a', array(named_struct('x.y', map(X'FE', 1))), 'A', null)",
        "named_struct('a', array(named_struct('x.y', map(X'FF', 1))), 'A', null)",
        "named_struct('a', array(named_struct('x.y', null)), 'A', null)",
        "named_struct('a', array(null), 'A', null)",
        "named_struct('a', null, 'A', null)",
    ],
    "struct<`x.y`: struct<`b``c`: map<int, int>>>": [
        "named_struct('x.y', named_struct('b`c', map(1, 2)))",
        "named_struct('x.y', named_struct('b`c', null))",
        "named_struct('x.y', null)",
    ],
    "map<string, int>": [
        "map()",
        "map('a', 1)",
        "map('a', null)",
        "map('b', 1)",
        "map('a', 1, 'b', 2)",
    ],
    "map<binary, array<map<int, string>>>": [
        "map(X'00', array(map(1, 'a')))",
        "map(X'01', array(map(1, 'a')))",
        "map(X'01', array(map(1, null)))",
    ],
    "variant": [
        "parse_json('1')",
        "parse_json('\"1\"')",
        "parse_json('null')",
        "parse_json('{\"a\": null}')",
        "parse_json('{}')",
        "to_variant_object(named_struct('a', DATE'2026-01-01'))",
        "to_variant_object(named_struct('a', '2026-01-01'))",
        "TIMESTAMP'2026-01-01 00:00:00.000001'",
        "TIMESTAMP'2026-01-01 00:00:00.000002'",
        "TIMESTAMP_NTZ'2026-01-01 00:00:00.000001'",
        "TIMESTAMP_NTZ'2026-01-01 00:00:00.000002'",
    ],
    "array<struct<v: variant>>": [
        "array(named_struct('v', parse_json('1')))",
        "array(named_struct('v', parse_json('2')))",
        "array(named_struct('v', null))",
    ],
    "time": ["TIME'12:00:00.000001'", "TIME'12:00:00'"],
}


def typed(spark: SparkSession, kind: str, values: Sequence[str]) -> DataFrame:
    """A row for each value, in a column `v` of that type; skips where this Spark has no such."""
    from pyspark.errors import AnalysisException

    around = kind.rpartition("map<")[0]
    if NESTED_MAPS_CRASH and ("array<" in around or "map<" in around):
        pytest.skip(f"this Spark would crash Python with a {kind}, and is refused")
    query = " UNION ALL ".join(f"SELECT CAST({value} AS {kind}) AS v, 'x' AS w" for value in values)
    spark.conf.set("spark.sql.timeType.enabled", "true")  # off by default in Spark 4.1 to 4.3
    try:
        return spark.sql("SELECT NULL AS v, 'x' AS w" if kind == "void" else query)
    except AnalysisException:
        if not any(new in kind for new in ("variant", "time", "collate")):
            raise
        pytest.skip(f"this Spark has no type {kind}")


class Capturing(TwoPhaseCommitSink[list[str]]):
    """Puts all that it gets into its committable."""

    kind = "capturing"

    def beginTransaction(self, branch_id: BranchId) -> list[str]:
        return [str(branch_id), str(TaskContext.get() is None)]

    def write(self, handle: list[str], batch: pa.RecordBatch) -> None:
        schema = [(field.name, str(field.type), field.nullable) for field in batch.schema]
        handle += [f"{schema}: {row!r}" for row in batch.to_pylist()]

    def preCommit(self, handle: list[str]) -> Committable:
        branch_id = BranchId.from_name(handle[0])
        assert branch_id is not None
        return Committable(branch_id, {"on driver": handle[1], "rows": [*handle[2:]]})

    def commit(self, committable: Committable) -> None: ...

    def abort(self, branch: BranchId | Committable) -> None: ...


class NoQuery:
    """In the place of a query: one without state."""

    is_stateful = False

    def offsets_of_running(self, batch_id: int) -> tuple[str, ...]:
        return (str(batch_id),)


@contextmanager
def session_zone(spark: SparkSession, zone: str) -> Iterator[None]:
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        yield
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
