"""S3: sparkonce against Spark's own Parquet writer through S3A, with two of its committers.

    python benchmarks/s3.py [--rows 8000000] [--rounds 3] [--small-batches 10]

All three write the same rows as Parquet to one local server, in turn: sparkonce, S3A with the
default committer (which renames, and is not safe on S3), and S3A with the magic committer.
8,000,000 rows are more than 1 GiB. At the end the benchmark commits 1,000 objects as one batch,
and compares this with bare completions, and with completions and a HEAD each, which proves a
commit; all use the same number of threads and objects.
"""

from __future__ import annotations

import statistics
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from harness import (
    Run,
    arguments,
    finish,
    in_turn,
    make_source,
    report,
    run_query,
    scratch,
    spark_session,
)

from sparkonce import ExactlyOnce
from sparkonce.model import BranchId, Committable, Owner
from sparkonce.parallel import MAX_THREADS
from sparkonce.sinks import S3Connection, S3Sink, verbs
from sparkonce.sinks.s3.writing.staged import StagedFile
from sparkonce.testing.checks import s3_client
from sparkonce.testing.services import (
    S3Server,
    s3a_committer_jars,
    start_services,
    unavailable,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pyspark.sql import DataFrame

BUCKET = "bench"
# Random digits, which do not compress.
COLUMNS = (
    "id",
    "sha2(string(id), 512) AS name",
    "rand(7) * id AS amount",
    "timestamp_seconds(1767225600 + id) AS at",
)
OBJECTS = 1000
TURNS = 4
MAGIC = {
    "fs.s3a.committer.name": "magic",
    "fs.s3a.committer.magic.enabled": "true",
    "mapreduce.outputcommitter.factory.scheme.s3a": (
        "org.apache.hadoop.fs.s3a.commit.S3ACommitterFactory"
    ),
    "spark.sql.sources.commitProtocolClass": (
        "org.apache.spark.internal.io.cloud.PathOutputCommitProtocol"
    ),
    "spark.sql.parquet.output.committer.class": (
        "org.apache.spark.internal.io.cloud.BindingParquetOutputCommitter"
    ),
}


def sink(s3: S3Server, prefix: str) -> S3Sink:
    return S3Sink(
        f"s3://{BUCKET}/{prefix}",
        compression="snappy",  # Spark's default
        connection=S3Connection(**s3.boto3_settings),
    )


def exactly_once(s3: S3Server, folder: Path) -> ExactlyOnce:
    name = f"b{uuid.uuid4().hex[:10]}"
    return ExactlyOnce(name, sinks=[sink(s3, name)], log=f"sqlite:///{folder}/{name}.db")


def s3a(settings: Mapping[str, str]) -> Any:
    """A foreachBatch function that appends with S3A."""
    path = f"s3a://{BUCKET}/b{uuid.uuid4().hex[:10]}"

    def write(df: DataFrame, _batch_id: int) -> None:
        for key, value in settings.items():
            df.sparkSession.conf.set(key, value)
        df.write.mode("append").parquet(path)
        for key in settings:
            df.sparkSession.conf.unset(key)

    return write


def clear(s3: S3Server) -> int:
    """Remove every object, so that the disk holds one run at a time; return their size in bytes."""
    client = s3_client(s3)
    size = 0
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
        if found := page.get("Contents"):
            size += sum(entry["Size"] for entry in found)
            objects: Any = [{"Key": entry["Key"]} for entry in found]
            client.delete_objects(Bucket=BUCKET, Delete={"Objects": objects, "Quiet": True})
    client.close()
    return size


def commit_of_many_objects(s3: S3Server) -> list[float]:
    """Milliseconds for 1,000 objects: committed; completed; completed with a HEAD; in turn."""
    owner = Owner("0" * 16, "bench")
    rows = pa.RecordBatch.from_pydict({"id": list(range(10))})
    target = sink(s3, f"many-{uuid.uuid4().hex[:10]}")
    bare = s3_client(s3, connections=MAX_THREADS)

    def prepare(attempt: int) -> Committable:
        handle = target.beginTransaction(BranchId(owner, 0, 1, "s3", 0, attempt))
        target.write(handle, rows)
        return target.preCommit(handle)

    def complete(committable: Committable, *, look: bool) -> None:
        payload: Any = committable.payload
        (file,) = map(StagedFile.from_json, payload["files"])
        bare.complete_multipart_upload(
            Bucket=BUCKET, Key=file.key, UploadId=file.upload_id, **file.completion()
        )
        if look:
            bare.head_object(Bucket=BUCKET, Key=file.key)

    def commit(committables: list[Committable]) -> None:
        assert not any(verbs.commit_many(target, committables))

    with ThreadPoolExecutor(MAX_THREADS) as pool:

        def complete_all(committables: list[Committable], *, look: bool) -> None:
            list(pool.map(partial(complete, look=look), committables))

        contenders = [commit, partial(complete_all, look=False), partial(complete_all, look=True)]
        took_ms = [0.0] * len(contenders)
        prepared = iter(list(pool.map(prepare, range(len(contenders) * OBJECTS))))
        for _ in range(TURNS):
            for number, run in enumerate(contenders):
                committables = list(islice(prepared, OBJECTS // TURNS))
                begin = time.perf_counter()
                run(committables)
                took_ms[number] += 1000 * (time.perf_counter() - begin)
    target.close()
    bare.close()
    return took_ms


def main(*, rows: int, rounds: int, small_batches: int) -> None:
    kind: Any = "s3mock" if "versitygw" in unavailable() else "versitygw"
    with scratch() as folder, start_services([kind], quick_start=False) as up:
        (s3,) = up.s3.values()
        client = s3_client(s3)
        client.create_bucket(Bucket=BUCKET)
        client.close()
        spark = spark_session(up, s3a_committer_jars())
        contenders = {
            "sparkonce": lambda: exactly_once(s3, folder),
            "S3A, default": lambda: s3a({}),
            "S3A, magic": lambda: s3a(MAGIC),
        }

        sizes: list[int] = []

        def run_all(*, rows: int, batches: int) -> dict[str, list[Run]]:
            source = make_source(spark, folder, rows=rows, batches=batches, columns=COLUMNS)
            schema = "id long, name string, amount double, at timestamp"

            def run(writer: Any) -> Run:
                result = run_query(spark, source, writer, folder, schema)
                sizes.append(clear(s3))
                return result

            return in_turn(contenders, run, rounds=rounds)

        large = run_all(rows=rows, batches=4)
        small = run_all(rows=100 * small_batches, batches=small_batches)
        spark.stop()
        commit_ms, completions_ms, with_heads_ms = commit_of_many_objects(s3)
    figures = {
        name: {
            "all batches, rows/s": [run.rows_per_s(warm=False) for run in large[name]],
            "warm batches, rows/s": [run.rows_per_s(warm=True) for run in large[name]],
            "batch of 100 rows, ms": [run.small_ms for run in small[name]],
            "Python worker, MiB": [run.worker_mib for run in large[name]],
        }
        for name in contenders
    }
    title = f"{rows:,} rows ({sizes[0] >> 20:,} MiB) in 4 batches into S3 ({kind}), as Parquet"
    report(title, figures)
    print(
        f"{OBJECTS:,} objects by {MAX_THREADS} threads: commit {commit_ms:,.0f} ms, bare "
        f"completions {completions_ms:,.0f} ms, completions and HEADs {with_heads_ms:,.0f} ms"
    )
    medians = {
        name: {key: statistics.median(values) for key, values in of.items()}
        for name, of in figures.items()
    }
    ours = medians["sparkonce"]
    ratios = {
        f"ratio_{short}_to_{label}": ours[figure] / medians[name][figure]
        for name, label in (("S3A, default", "s3a"), ("S3A, magic", "s3a_magic"))
        for short, figure in (
            ("cold", "all batches, rows/s"),
            ("warm", "warm batches, rows/s"),
            ("small_batch", "batch of 100 rows, ms"),
        )
    }
    finish(
        rows_per_s=ours["all batches, rows/s"],
        rows_per_s_warm=ours["warm batches, rows/s"],
        small_batch_ms=ours["batch of 100 rows, ms"],
        worker_mib=ours["Python worker, MiB"],
        commit_1000_objects_ms=commit_ms,
        ratio_commit_to_completions=commit_ms / completions_ms,
        ratio_commit_to_completions_and_heads=commit_ms / with_heads_ms,
        **ratios,
    )


if __name__ == "__main__":
    main(**arguments(__doc__, rows=8_000_000))
