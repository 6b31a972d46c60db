"""`format("sparkonce")` against foreachBatch: the same rows into the same three sinks.

    python benchmarks/data_source.py [--rows 2000000] [--rounds 3]

Both sides write Kafka, Postgres and S3, with the same protocol. Small batches are written by tasks
on both sides (`driver_rows=0`), since the format knows no other way.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from harness import Format, arguments, compare, scratch, spark_session
from pyspark import cloudpickle
from three_sinks import Places

from sparkonce import SparkOnce, shaped
from sparkonce.testing.services import start_services, unavailable

if TYPE_CHECKING:
    from pathlib import Path

_MODULE = """
from pathlib import Path

from pyspark import cloudpickle

from sparkonce import ExactlyOnce


def pipeline():
    return ExactlyOnce(**cloudpickle.loads(Path({recipe!r}).read_bytes()))
"""


def by_format(places: Places, folder: Path) -> Format:
    """A module of its own for each run: Spark's Python processes import a pipeline by its name."""
    made = places.exactly_once(folder)
    recipe = folder / f"{made.name}.pickle"
    settings = {"name": made.name, "sinks": made.sinks, "log": made.settings.log}
    recipe.write_bytes(cloudpickle.dumps(settings))
    (folder / f"job_{made.name}.py").write_text(_MODULE.format(recipe=str(recipe)))
    options = {"pipeline": f"job_{made.name}:pipeline"}
    return Format(SparkOnce.name(), options, partial(shaped, sinks=made.sinks))


def main(*, rows: int, rounds: int, small_batches: int) -> None:
    s3 = "s3mock" if "versitygw" in unavailable() else "versitygw"
    with scratch() as folder, start_services(["kafka", "postgres", s3], quick_start=False) as up:
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(folder), os.environ.get("PYTHONPATH")])
        )
        spark, places = spark_session(up), Places(up)
        compare(
            {
                "format": lambda: by_format(places, folder),
                "foreachBatch": lambda: places.exactly_once(folder, driver_rows=0),
            },
            spark,
            folder,
            title=f"{rows:,} rows in 4 batches into Kafka, Postgres and S3 ({s3})",
            baseline="foreach_batch",
            rows=rows,
            rounds=rounds,
            small_batches=small_batches,
        )


if __name__ == "__main__":
    main(**arguments(__doc__))
