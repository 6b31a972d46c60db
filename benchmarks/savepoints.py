"""Savepoints of a query with much state: size and seconds, whole, and after a small change.

    python benchmarks/savepoints.py [--keys 8000000] [--store rocksdb]

The state has about 120 bytes for each key. The query runs while each savepoint is made.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from harness import scratch, spark_session

from sparkonce import ExactlyOnce
from sparkonce.sinks import FileSink
from sparkonce.spark_hooks.savepoints import Savepoints, restore
from sparkonce.storage import open_folder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

ResultT = TypeVar("ResultT")

ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


def timed(action: Callable[[], ResultT]) -> tuple[float, ResultT]:
    begin = time.perf_counter()
    result = action()
    return round(time.perf_counter() - begin, 2), result


def add(spark: SparkSession, source: Path, keys: int) -> None:
    """One file of rows: one for each key."""
    rows = spark.range(0, keys, 1, 1).selectExpr("id", "sha2(string(id), 256) AS text")
    rows.write.mode("append").parquet(str(source))


def start(spark: SparkSession, folder: Path, pipeline: ExactlyOnce) -> StreamingQuery:
    source = spark.readStream.schema("id long, text string").option("maxFilesPerTrigger", 1)
    newest = source.parquet(str(folder / "in")).groupBy("id").agg({"text": "max", "*": "count"})
    query = newest.selectExpr("id", "`max(text)` AS text", "`count(1)` AS n").writeStream
    query = query.foreachBatch(pipeline).outputMode("update")
    return query.option("checkpointLocation", str(folder / "checkpoint")).start()


def main(*, keys: int, store: str) -> None:
    conf = {"spark.sql.shuffle.partitions": "4"}
    if store == "rocksdb":
        conf["spark.sql.streaming.stateStore.providerClass"] = ROCKSDB
    with scratch() as folder:
        spark = spark_session(None, conf=conf)
        for name in ("in", "out"):
            (folder / name).mkdir()
        root = str(folder / "savepoints")
        pipeline = ExactlyOnce(
            "bench", sinks=[FileSink(folder / "out")], log=f"sqlite:///{folder}/txn.db"
        )
        add(spark, folder / "in", keys)
        query = start(spark, folder, pipeline)
        query.processAllAvailable()
        whole_s, first = timed(lambda: pipeline.savepoint(query, root, name="first"))
        add(spark, folder / "in", keys // 100)
        query.processAllAvailable()
        again_s, second = timed(lambda: pipeline.savepoint(query, root, name="second"))
        stop_s, last = timed(lambda: pipeline.stop_with_savepoint(query, root, name="last"))
        place = Savepoints.at(root)
        manifests = [place.read(name) for name in (first, second, last)]
        verify_s, damaged = timed(lambda: list(place.verify(manifests[1])))
        assert not damaged
        into = str(folder / "restored")
        restore_s, _ = timed(
            lambda: restore(
                place,
                manifests[2],
                open_folder(into, create=True),
                pipeline="bench",
                open_log=lambda: pipeline.log,
                parent_log=pipeline.log,
            )
        )
        new = set(manifests[1].files.values()) - set(manifests[0].files.values())
        print(
            json.dumps(
                {
                    "keys": keys,
                    "store": store,
                    "bytes": manifests[0].bytes,
                    "files": len(manifests[0].files),
                    "whole_s": whole_s,
                    "changed_bytes": sum(file.size for file in new),
                    "after_a_change_s": again_s,
                    "stop_with_savepoint_s": stop_s,
                    "verify_s": verify_s,
                    "restore_s": restore_s,
                }
            )
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=8_000_000)
    parser.add_argument("--store", choices=["hdfs", "rocksdb"], default="rocksdb")
    main(**vars(parser.parse_args()))
