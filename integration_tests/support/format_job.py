"""The pipelines of tests of ``format("sparkonce")``, which Spark's own Python processes import.

``of_<path in hexadecimal>`` is a function that makes the pipeline that a test has put into that
folder. It arms the fail points of the folder in the process that calls it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark import cloudpickle

from integration_tests.support.spark import Job
from sparkonce import ExactlyOnce, failpoints, shaped
from sparkonce.sinks import FileSink
from sparkonce.testing.crash import Failpoints

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

    from sparkonce.sinks.base import AnySink

_RECIPE = "pipeline"


def __getattr__(name: str) -> Callable[[], ExactlyOnce]:
    if not name.startswith("of_"):
        raise AttributeError(name)
    folder = Path(bytes.fromhex(name.removeprefix("of_")).decode())

    def pipeline() -> ExactlyOnce:
        failpoints.handler = failpoints._from_folder(folder / "failpoints")
        sinks, settings = cloudpickle.loads((folder / _RECIPE).read_bytes())
        return ExactlyOnce("orders", sinks=sinks, **settings)

    return pipeline


class FormatJob(Job):
    """A query over a folder of JSON files, one file a batch, written with the format."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        super().__init__(spark, folder)
        self.points = Failpoints(folder / "failpoints")
        self.log = f"sqlite:///{folder}/txn.db"
        self._published = 0

    def publish(self, sinks: Sequence[AnySink] | None = None, **settings: Any) -> str:
        """The option "pipeline"; a new one each time, since a process imports it once."""
        self._published += 1
        folder = self.folder / f"job{self._published}-{os.getpid()}"
        folder.mkdir()
        (folder / "failpoints").symlink_to(self.points.folder)
        recipe = (sinks or [FileSink(self.out)], {"log": self.log, **settings})
        (folder / _RECIPE).write_bytes(cloudpickle.dumps(recipe))
        return f"{__name__}:of_{str(folder).encode().hex()}"

    def begin(
        self, pipeline: str, shape: Callable[[DataFrame], DataFrame] = lambda df: df
    ) -> StreamingQuery:
        """Start the query over all files."""
        return (
            shape(self.rows())
            .writeStream.format("sparkonce")
            .option("pipeline", pipeline)
            .option("checkpointLocation", self.location)
            .trigger(availableNow=True)
            .start()
        )

    def write(self, pipeline: str, shape: Callable[[DataFrame], DataFrame] = lambda df: df) -> None:
        """Process all files; raises what the query failed with."""
        self.begin(pipeline, shape).awaitTermination()

    def left_over(self, *folders: Path) -> list[Path]:
        """What is written and not visible."""
        found = [folder / "_sparkonce" for folder in folders or (self.out,)]
        return [path for folder in found if folder.exists() for path in folder.iterdir()]


def shaped_for(*sinks: AnySink) -> Callable[[DataFrame], DataFrame]:
    return lambda df: shaped(df, sinks)
