"""A Spark standalone cluster of two workers against local[2]: what a batch costs more, and where.

    python benchmarks/cluster.py [--rows 2000000] [--rounds 3]

Kafka, Postgres and S3 from one query, four large batches and then batches of 100 rows, which the
driver writes itself, or executors do (`driver_rows=0`). Workers have one core each and run on this
machine, so that both places have the same processors.
"""

from __future__ import annotations

import statistics
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from harness import (
    Run,
    arguments,
    finish,
    make_source,
    report,
    run_query,
    scratch,
    spark_session,
)
from three_sinks import Places

from sparkonce.observing import Event, observe
from sparkonce.testing.services import Services, start_services, start_spark_cluster, unavailable

PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "checks": ("validate", "probe"),
    "vote": ("vote",),
    "decide": ("decide",),
    "commit": ("commit", "publish"),
    "complete, sweep": ("complete", "sweep"),
}
"""Steps of the driver; what is left of a batch are Spark's tasks."""


@dataclass
class Steps:
    """Seconds by batch and step; sinks run side by side, so the slowest one counts."""

    seconds: dict[int, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    _batch: int = 0

    def on_step(
        self,
        event: Event,
        name: str,
        batch: int | None,
        sink: str | None,
        seconds: float,
        pipeline: str | None,
    ) -> None:
        del sink, pipeline
        self._batch = self._batch if batch is None else batch
        if event is Event.FINISHED:
            of_batch = self.seconds[self._batch]
            of_batch[name] = max(of_batch.get(name, 0.0), seconds)

    def part(self, batch: int, part: str) -> float:
        return sum(self.seconds[batch].get(name, 0.0) for name in PARTS[part])


@contextmanager
def watched() -> Iterator[Steps]:
    steps = Steps()
    end = observe(steps)
    try:
        yield steps
    finally:
        end()


@dataclass
class Measured:
    """What one place took: a run over large batches, and two over small ones."""

    large: list[Run] = field(default_factory=list)
    steps: list[Steps] = field(default_factory=list)
    by_driver: list[Run] = field(default_factory=list)
    by_tasks: list[Run] = field(default_factory=list)

    def figures(self) -> dict[str, list[float]]:
        return {
            "first batch, s": [run.batch_s[0] for run in self.large],
            "warm batches, rows/s": [run.rows_per_s(warm=True) for run in self.large],
            "100 rows by the driver, ms": [run.small_ms for run in self.by_driver],
            "100 rows by tasks, ms": [run.small_ms for run in self.by_tasks],
        }

    def shares(self, batches: slice) -> dict[str, list[float]]:
        """Milliseconds of a large batch, by part."""
        found: dict[str, list[float]] = defaultdict(list)
        for run, steps in zip(self.large, self.steps, strict=True):
            numbers = range(len(run.batch_s))[batches]
            parts = {p: statistics.median(steps.part(n, p) for n in numbers) for p in PARTS}
            whole = statistics.median(run.batch_s[n] for n in numbers)
            for part, seconds in {**parts, "tasks": whole - sum(parts.values())}.items():
                found[part].append(1000 * seconds)
        return found


def run_all(
    measured: Measured,
    services: Services,
    places: Places,
    folder: Path,
    *,
    conf: Mapping[str, str],
    rows: int,
    small_batches: int,
) -> None:
    spark = spark_session(services, conf=conf)
    large = make_source(spark, folder, rows=rows, batches=4)
    small = make_source(spark, folder, rows=100 * small_batches, batches=small_batches)
    with watched() as steps:
        measured.large.append(run_query(spark, large, places.exactly_once(folder), folder))
    measured.steps.append(steps)
    measured.by_driver.append(run_query(spark, small, places.exactly_once(folder), folder))
    by_tasks = places.exactly_once(folder, driver_rows=0)
    measured.by_tasks.append(run_query(spark, small, by_tasks, folder))
    spark.stop()


def main(*, rows: int, rounds: int, small_batches: int) -> None:
    s3 = "s3mock" if "versitygw" in unavailable() else "versitygw"
    measured = {"local[2]": Measured(), "two workers": Measured()}
    with (
        scratch() as folder,
        start_services(["kafka", "postgres", s3], quick_start=False) as up,
        start_spark_cluster(2, cores=1, memory_mb=2048) as cluster,
    ):
        on_cluster = {
            "spark.master": cluster.master_url,
            "spark.executor.memory": "1500m",
            **cluster.driver_conf,
        }
        places, confs = Places(up), {"local[2]": {}, "two workers": on_cluster}
        for number in range(rounds):
            for name in (*confs,) if number % 2 == 0 else (*reversed(confs),):
                run_folder = folder / uuid.uuid4().hex  # Spark takes [2] in a path for a pattern
                run_folder.mkdir()
                run_all(
                    measured[name],
                    up,
                    places,
                    run_folder,
                    conf=confs[name],
                    rows=rows,
                    small_batches=small_batches,
                )
    report(
        f"{rows:,} rows into Kafka, Postgres and S3", {n: m.figures() for n, m in measured.items()}
    )
    for title, batches in (("first batch", slice(0, 1)), ("warm batch", slice(1, None))):
        report(
            f"where a {title} spends its time, ms",
            {n: m.shares(batches) for n, m in measured.items()},
        )
    local, there = (
        {k: statistics.median(v) for k, v in m.figures().items()} for m in measured.values()
    )
    finish(
        first_batch_s=there["first batch, s"],
        rows_per_s=there["warm batches, rows/s"],
        ratio_first_batch_to_local=there["first batch, s"] / local["first batch, s"],
        ratio_to_local_warm=there["warm batches, rows/s"] / local["warm batches, rows/s"],
        ratio_small_batch_to_local=there["100 rows by the driver, ms"]
        / local["100 rows by the driver, ms"],
        ratio_small_batch_by_tasks_to_local=there["100 rows by tasks, ms"]
        / local["100 rows by tasks, ms"],
    )


if __name__ == "__main__":
    main(**arguments(__doc__))
