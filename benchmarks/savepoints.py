"""Savepoints of a query with much state: size and seconds, whole, and after a small change.

    python benchmarks/savepoints.py [--rows 100000]

One row is one key of the state, in RocksDB, with about ten kilobytes: 100 rows are a megabyte, and
100,000 a gigabyte. The query runs while each savepoint but the last one is made.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from harness import arguments, finish, scratch, spark_session

from sparkonce import ExactlyOnce
from sparkonce.sinks import FileSink
from sparkonce.spark_hooks.savepoints import Filling, Savepoints, restore
from sparkonce.storage import open_folder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

ResultT = TypeVar("ResultT")

ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


def timed(action: Callable[[], ResultT]) -> tuple[float, ResultT]:
    begin = time.perf_counter()
    result = action()
    return time.perf_counter() - begin, result


def add(spark: SparkSession, source: Path, keys: int) -> None:
    """One file of rows: one for each key."""
    random = "array_join(transform(sequence(1, 160), i -> sha2(concat(id, '-', i), 256)), '')"
    rows = spark.range(0, keys, 1, 1).selectExpr("id", f"{random} AS text")
    rows.write.mode("append").parquet(str(source))


def start(spark: SparkSession, folder: Path, pipeline: ExactlyOnce) -> StreamingQuery:
    source = spark.readStream.schema("id long, text string").option("maxFilesPerTrigger", 1)
    newest = source.parquet(str(folder / "in")).groupBy("id").agg({"text": "max", "*": "count"})
    query = newest.selectExpr("id", "length(`max(text)`) AS n", "`count(1)` AS m").writeStream
    query = query.foreachBatch(pipeline).outputMode("update")
    return query.option("checkpointLocation", str(folder / "checkpoint")).start()


def main(*, rows: int, rounds: int, small_batches: int) -> None:
    del rounds, small_batches
    conf = {
        "spark.sql.shuffle.partitions": "4",
        "spark.sql.streaming.stateStore.providerClass": ROCKSDB,
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    }
    with scratch() as folder:
        spark = spark_session(None, conf=conf)
        for name in ("in", "out"):
            (folder / name).mkdir()
        root = str(folder / "savepoints")
        pipeline = ExactlyOnce(
            "bench", sinks=[FileSink(folder / "out")], log=f"sqlite:///{folder}/txn.db"
        )
        add(spark, folder / "in", rows)
        query = start(spark, folder, pipeline)
        query.processAllAvailable()
        whole_s, first = timed(lambda: pipeline.savepoint(query, root, name="first"))
        add(spark, folder / "in", rows // 100)
        query.processAllAvailable()
        again_s, second = timed(lambda: pipeline.savepoint(query, root, name="second"))
        stop_s, last = timed(lambda: pipeline.stop_with_savepoint(query, root, name="last"))
        place = Savepoints.at(root)
        manifests = [place.read(name) for name in (first, second, last)]
        verify_s, damaged = timed(lambda: list(place.verify(manifests[1])))
        assert not damaged
        into = str(folder / "restored")
        new_folder = open_folder(into, create=True)
        filling = Filling(place, manifests[2], new_folder, "bench", lambda: pipeline.log)
        restore_s, _ = timed(lambda: restore(filling, pipeline.log))
        new = set(manifests[1].files.values()) - set(manifests[0].files.values())
        finish(
            rows_per_s=rows / whole_s,
            bytes=manifests[0].bytes,
            files=len(manifests[0].files),
            whole_s=whole_s,
            changed_bytes=sum(file.size for file in new),
            after_a_change_s=again_s,
            stop_with_savepoint_s=stop_s,
            verify_s=verify_s,
            restore_s=restore_s,
        )


if __name__ == "__main__":
    main(**arguments(__doc__, rows=100_000))
