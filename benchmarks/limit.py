"""Share of the limit: three sinks compared with what the bare clients do on the same cores.

    python benchmarks/limit.py [--rows 2000000] [--rounds 3]

The bare clients write from memory, in as many processes as Spark has tasks, without Spark and
without a transaction: messages that are ready, rows that are encoded for COPY, and Parquet with its
upload. Reading is Spark's own, into its format "noop". They take turns on the cores, so the limit
of a pipeline is the harmonic sum of its parts: 1 / (1/read + 1/kafka + 1/postgres + 1/s3).

The Python limit is what a sink in Python can reach at most: the same sum, where Spark computes the
sinks' columns and passes them to a Python worker that only counts the rows, in place of the read.
"""

from __future__ import annotations

import io
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from harness import arguments, finish, make_source, report, run_query, scratch, spark_session
from three_sinks import BUCKET, MESSAGE, Places

from sparkonce.testing.services import start_services, unavailable

if TYPE_CHECKING:
    from multiprocessing.synchronize import Barrier

PROCESSES = 2
BATCHES = 4
SINKS = ("kafka", "postgres", "s3")
COLUMNS = {"kafka": MESSAGE, "postgres": ["*"], "s3": ["*"], "three": ["*", *MESSAGE]}
"""What each pipeline passes to Python."""
_CHUNK = 10_000


def write_kafka(rows: pa.Table, server: str, topic: str, start: Barrier) -> None:
    """Messages of bytes that are ready, by confluent-kafka's own batches."""
    from confluent_kafka import Producer

    keys = [str(key).encode() for key in rows["id"].to_pylist()]
    values = [
        f'{{"id":{row["id"]},"name":"{row["name"]}","amount":{row["amount"]},'
        f'"at":"{row["at"].isoformat()}"}}'.encode()
        for row in rows.to_pylist()
    ]
    messages = [{"key": key, "value": value} for key, value in zip(keys, values, strict=True)]
    settings = {"linger.ms": 50, "compression.type": "lz4", "queue.buffering.max.messages": 10**7}
    producer = Producer({"bootstrap.servers": server, **settings})
    producer.list_topics(topic, timeout=30)
    start.wait()
    for first in range(0, len(messages), _CHUNK):
        producer.produce_batch(topic, messages[first : first + _CHUNK])
        producer.poll(0)
    if left := producer.flush(600):
        sys.exit(f"{left} messages were not delivered")


def write_postgres(rows: pa.Table, dsn: str, table: str, start: Barrier) -> None:
    """Rows that are encoded already, by COPY."""
    import psycopg
    from pgpq import ArrowToPostgresBinaryEncoder

    encoder = ArrowToPostgresBinaryEncoder(rows.schema)
    text = [encoder.write_header()]
    text += [encoder.write_batch(batch) for batch in rows.to_batches(_CHUNK)]
    text.append(encoder.finish())
    with psycopg.connect(dsn) as connection, connection.cursor() as cursor:
        start.wait()
        with cursor.copy(f"COPY {table} FROM STDIN (FORMAT binary)".encode()) as copy:
            for part in text:
                copy.write(part)


def write_s3(rows: pa.Table, settings: Mapping[str, str], key: str, start: Barrier) -> None:
    """Parquet, made in memory and put in one request."""
    import boto3
    from botocore.config import Config

    client = boto3.client("s3", **settings, config=Config(s3={"addressing_style": "path"}))
    client.list_buckets()
    start.wait()
    body = io.BytesIO()
    pq.write_table(rows, body, compression="zstd")
    client.put_object(
        Bucket=BUCKET, Key=f"{key}/{multiprocessing.current_process().pid}", Body=body.getvalue()
    )


def bare(write: Callable[..., None], rows: int) -> float:
    """Rows a second of `PROCESSES` processes that begin together."""
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(PROCESSES + 1, timeout=600)
    share = rows // PROCESSES
    processes = [
        context.Process(target=_run, args=(write, n * share, share, start))
        for n in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    start.wait()
    began = time.perf_counter()
    for process in processes:
        process.join()
        if process.exitcode != 0:
            sys.exit(f"a bare client ended with {process.exitcode}")
    return rows / (time.perf_counter() - began)


def _run(write: Callable[..., None], first: int, rows: int, start: Barrier) -> None:
    ids = pa.array(range(first, first + rows), pa.int64())
    table = pa.table(
        {
            "id": ids,
            "name": pa.array([f"customer {n % 9973}" for n in range(first, first + rows)]),
            "amount": pa.array([n * 0.25 for n in range(first, first + rows)]),
            "at": ids.cast(pa.timestamp("us", "UTC")),
        }
    )
    write(table, start=start)


def main(*, rows: int, rounds: int, small_batches: int) -> None:
    del small_batches
    kind = "s3mock" if "versitygw" in unavailable() else "versitygw"
    with scratch() as folder, start_services(["kafka", "postgres", kind], quick_start=False) as up:
        spark, places = spark_session(up), Places(up)
        source = make_source(spark, folder, rows=rows, batches=BATCHES)
        contenders = {sink: partial(places.exactly_once, folder, only=sink) for sink in SINKS}
        contenders["three"] = partial(places.exactly_once, folder)
        found: dict[str, list[float]] = {}
        for number in range(rounds):
            print(f"round {number + 1} of {rounds} …", file=sys.stderr, flush=True)
            name = places.fresh()
            clients = {
                "kafka": partial(write_kafka, server=up.kafka.bootstrap_servers, topic=name),
                "postgres": partial(write_postgres, dsn=up.postgres.dsn, table=name),
                "s3": partial(write_s3, settings=places.s3.boto3_settings, key=name),
            }
            for sink, write in clients.items():
                found.setdefault(f"bare {sink}", []).append(bare(write, rows))
            noop = run_query(spark, source, read_only, folder)
            found.setdefault("read", []).append(noop.rows_per_s(warm=True))
            for pipeline, columns in COLUMNS.items():
                run = run_query(spark, source, partial(count_only, columns), folder)
                found.setdefault(f"count {pipeline}", []).append(run.rows_per_s(warm=True))
            for sink, make in contenders.items():
                run = run_query(spark, source, make(), folder)
                found.setdefault(f"sparkonce {sink}", []).append(run.rows_per_s(warm=True))
        spark.stop()
    report(f"{rows:,} rows", {key: {"rows/s": values} for key, values in found.items()})
    finish(**shares({key: statistics.median(values) for key, values in found.items()}))


def read_only(df: Any, _batch_id: int) -> None:
    df.write.format("noop").mode("overwrite").save()


def count_only(columns: list[str], df: Any, _batch_id: int) -> None:
    counted = df.selectExpr(*columns).mapInArrow(_count, "rows long")
    counted.write.format("noop").mode("overwrite").save()


def _count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    rows = sum(batch.num_rows for batch in batches)
    yield pa.RecordBatch.from_pydict({"rows": [rows]})


def shares(found: Mapping[str, float]) -> dict[str, float]:
    """Each pipeline's share of its limit and of its Python limit."""
    parts = {sink: [sink] for sink in SINKS} | {"three": [*SINKS]}
    shown: dict[str, float] = {}
    for name, sinks in parts.items():
        clients = sum(1 / found[f"bare {sink}"] for sink in sinks)
        limit = 1 / (1 / found["read"] + clients)
        python_limit = 1 / (1 / found[f"count {name}"] + clients)
        reached = found[f"sparkonce {name}"]
        shown |= {f"limit_{name}": limit, f"share_{name}": reached / limit}
        shown |= {
            f"python_limit_{name}": python_limit,
            f"share_of_python_limit_{name}": reached / python_limit,
        }
    return shown


if __name__ == "__main__":
    main(**arguments(__doc__))
