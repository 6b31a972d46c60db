"""What the benchmarks share: servers, a session, a source, runs in turn, a table, a JSON line.

Contenders run in turn within one process (A B, B A, …), so that a machine whose speed drifts
treats all alike. Each run is a fresh query over the same files. Figures are medians over the runs;
the last line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.append(sys.path.pop(0))  # this folder last: its kafka.py would hide the package `kafka`

import psutil
from rich.console import Console
from rich.table import Table

from sparkonce.testing.services import Services, s3a_jars, spark_jdbc_jars, spark_kafka_jars

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = "id long, name string, amount double, at timestamp"
COLUMNS = (
    "id",
    "concat('customer ', id % 9973) AS name",
    "id * 0.25D AS amount",
    "timestamp_seconds(1767225600 + id) AS at",
)


def spark_session(
    services: Services | None,
    more_jars: Sequence[Path] = (),
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """A local session of two cores, with the connectors to `services` that Spark's own sinks need.

    `conf` changes settings, also "spark.master".
    """
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    connectors = [*spark_kafka_jars(), *spark_jdbc_jars(), *s3a_jars()] if services else []
    jars = [*connectors, *more_jars]
    settings = {
        "spark.jars": ",".join(map(str, jars)),
        "spark.ui.enabled": "false",
        "spark.python.unix.domain.socket.enabled": "true",  # over TCP a task waits 40 ms for an ACK
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "4g",
        "spark.sql.session.timeZone": "UTC",
        "spark.log.level": "ERROR",
    }
    for s3 in services.s3.values() if services else ():
        settings |= {
            "spark.hadoop.fs.s3a.endpoint": s3.endpoint_url,
            "spark.hadoop.fs.s3a.endpoint.region": s3.region,
            "spark.hadoop.fs.s3a.access.key": s3.access_key,
            "spark.hadoop.fs.s3a.secret.key": s3.secret_key,
            "spark.hadoop.fs.s3a.path.style.access": "true",
        }
    builder = SparkSession.builder.master("local[2]").appName("sparkonce-bench")
    for key, value in {**settings, **(conf or {})}.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def make_source(
    spark: SparkSession,
    folder: Path,
    *,
    rows: int,
    batches: int,
    columns: Sequence[str] = COLUMNS,
) -> Path:
    """Parquet files of `columns`, two for each batch (one a task), in the order of the batches."""
    path = folder / f"source-{rows}-{batches}"
    spark.range(0, rows, 1, 2 * batches).selectExpr(*columns).write.parquet(str(path))
    for number, file in enumerate(sorted(path.glob("part-*.parquet"))):
        os.utime(file, (number, number))  # Spark takes the oldest first
    return path


@dataclass
class Run:
    """One query over a source.

    Attributes:
        batch_s: seconds in addBatch, by batch.
        batch_rows: rows, by batch.
        worker_mib: peak resident memory of a Python worker, in MiB.
    """

    batch_s: list[float] = field(default_factory=list)
    batch_rows: list[int] = field(default_factory=list)
    worker_mib: float = 0.0

    def rows_per_s(self, *, warm: bool) -> float:
        """Over all batches, or over all but the first."""
        skip = 1 if warm else 0
        return sum(self.batch_rows[skip:]) / sum(self.batch_s[skip:])

    @property
    def small_ms(self) -> float:
        """Median of addBatch after the first three batches, in milliseconds."""
        return 1000 * statistics.median(self.batch_s[3:])


@dataclass(frozen=True)
class Format:
    """Writes with `format(name)`.

    Attributes:
        name: of the format.
        options: of the writer.
        shape: makes the rows that it gets.
    """

    name: str
    options: Mapping[str, str]
    shape: Callable[[DataFrame], DataFrame] = lambda df: df


def run_query(
    spark: SparkSession,
    source: Path,
    writer: Callable[[DataFrame, int], None] | Format,
    checkpoints: Path,
    schema: str = SCHEMA,
) -> Run:
    """Process all files of `source` through `writer`, a format or a foreachBatch function."""
    rows = spark.readStream.schema(schema).option("maxFilesPerTrigger", 2).parquet(str(source))
    if isinstance(writer, Format):
        stream = writer.shape(rows).writeStream.format(writer.name).options(**writer.options)
    else:
        stream = rows.writeStream.foreachBatch(writer)
    stream = stream.option("checkpointLocation", str(checkpoints / uuid.uuid4().hex))
    with _peak_worker_memory() as peak:
        query = stream.trigger(availableNow=True).start()
        query.awaitTermination()
    run = Run(worker_mib=peak[0])
    for progress in query.recentProgress:
        if progress.numInputRows:
            run.batch_s.append(progress.durationMs["addBatch"] / 1000)
            run.batch_rows.append(progress.numInputRows)
    return run


@contextmanager
def _peak_worker_memory() -> Iterator[list[float]]:
    peak, done = [0.0], threading.Event()

    def sample() -> None:
        while not done.wait(0.2):
            for process in psutil.Process().children(recursive=True):
                try:
                    if process.name().startswith("python"):
                        peak[0] = max(peak[0], process.memory_info().rss / 2**20)
                except psutil.NoSuchProcess:
                    continue

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def measure(
    contenders: Mapping[str, Callable[[], Any]],
    spark: SparkSession,
    folder: Path,
    *,
    title: str,
    rows: int,
    rounds: int,
    small_batches: int,
    schema: str = SCHEMA,
    columns: Sequence[str] = COLUMNS,
) -> dict[str, dict[str, float]]:
    """Run the contenders in turn over four large batches, then over small ones, and print them.

    Args:
        contenders: by name; each call makes a fresh writer (see `run_query`).
        spark: the session.
        folder: for sources and checkpoints.
        title: of the table.
        rows: of the four large batches.
        rounds: how many times each contender runs.
        small_batches: of 100 rows.
        schema: of the source.
        columns: of the source, as SQL over `id`.

    Returns:
        Medians, by contender and figure.
    """

    def run_all(*, rows: int, batches: int) -> dict[str, list[Run]]:
        source = make_source(spark, folder, rows=rows, batches=batches, columns=columns)
        return in_turn(
            contenders, lambda w: run_query(spark, source, w, folder, schema), rounds=rounds
        )

    large = run_all(rows=rows, batches=4)
    small = run_all(rows=100 * small_batches, batches=small_batches)
    figures = {
        name: {
            "all batches, rows/s": [run.rows_per_s(warm=False) for run in large[name]],
            "warm batches, rows/s": [run.rows_per_s(warm=True) for run in large[name]],
            "batch of 100 rows, ms": [run.small_ms for run in small[name]],
            "Python worker, MiB": [run.worker_mib for run in large[name]],
        }
        for name in contenders
    }
    report(title, figures)
    return {
        name: {key: statistics.median(values) for key, values in figures[name].items()}
        for name in contenders
    }


def beside(
    ours: Mapping[str, float], theirs: Mapping[str, float], *, baseline: str, prefix: str = ""
) -> dict[str, float]:
    """Our medians and their ratios to another contender's, as the JSON line has them.

    Args:
        ours: of one contender, from `measure`.
        theirs: of another.
        baseline: what the other one is called.
        prefix: of every key, where the line is about several contenders of ours.
    """
    ratios = {key: ours[key] / theirs[key] for key in ours}
    figures = {
        "rows_per_s": ours["all batches, rows/s"],
        "rows_per_s_warm": ours["warm batches, rows/s"],
        "small_batch_ms": ours["batch of 100 rows, ms"],
        "worker_mib": ours["Python worker, MiB"],
        f"ratio_to_{baseline}": ratios["all batches, rows/s"],
        f"ratio_to_{baseline}_warm": ratios["warm batches, rows/s"],
        f"ratio_small_batch_to_{baseline}": ratios["batch of 100 rows, ms"],
    }
    return {prefix + key: value for key, value in figures.items()}


def compare(
    contenders: Mapping[str, Callable[[], Any]],
    spark: SparkSession,
    folder: Path,
    *,
    title: str,
    baseline: str,
    rows: int,
    rounds: int,
    small_batches: int,
    schema: str = SCHEMA,
    columns: Sequence[str] = COLUMNS,
) -> None:
    """Measure two contenders, ours first, stop the session, and print both and their ratios.

    The arguments are those of `measure` and, for the second contender, of `beside`.
    """
    medians = measure(
        contenders,
        spark,
        folder,
        title=title,
        rows=rows,
        rounds=rounds,
        small_batches=small_batches,
        schema=schema,
        columns=columns,
    )
    spark.stop()
    ours, theirs = medians.values()
    finish(**beside(ours, theirs, baseline=baseline))


def arguments(description: str | None, *, rows: int = 2_000_000) -> dict[str, int]:
    """What the command line says of `rows`, `rounds` and `small_batches`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rows", type=int, default=rows)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small-batches", type=int, default=10)
    return vars(parser.parse_args())


def in_turn(
    contenders: Mapping[str, Callable[[], Any]],
    run: Callable[[Any], Run],
    *,
    rounds: int,
) -> dict[str, list[Run]]:
    """Run each contender `rounds` times; each run gets a fresh writer.

    Every round begins with another one (A B C, B C A, …): what a run leaves to a server's disk is
    then not always written out during the same one's next run.
    """
    runs: dict[str, list[Run]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            print(f"round {number + 1} of {rounds}: {name} …", file=sys.stderr, flush=True)
            runs[name].append(run(contenders[name]()))
    return runs


def report(title: str, figures: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Print a table: contender by figure, each as min, median and max."""
    table = Table(title=title)
    columns = list(next(iter(figures.values())))
    table.add_column("")
    for column in columns:
        table.add_column(f"{column}\nmin / median / max", justify="right")
    for name, values in figures.items():
        cells = [
            f"{min(v):,.0f} / {statistics.median(v):,.0f} / {max(v):,.0f}" for v in values.values()
        ]
        table.add_row(name, *cells)
    Console(width=120).print(table)


def finish(**figures: float) -> None:
    """Print the last line: one JSON object."""
    print(json.dumps({key: round(value, 3) for key, value in figures.items()}))


@contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sparkonce-bench-") as folder:
        yield Path(folder)
