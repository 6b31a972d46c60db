"""The driver program that `assert_exactly_once` kills: it reads Parquet files into a pipeline.

python -m sparkonce.testing.job ORDER

ORDER is the path of a pickled `Order`. With front="format" the Python processes of Spark's driver
find it in an environment variable.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from pyspark import cloudpickle
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from sparkonce import SparkOnce, shaped

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming import DataStreamWriter

    from sparkonce import ExactlyOnce

FILES_PER_BATCH: Final = 2

Front: TypeAlias = Literal["foreachBatch", "format"]
"""`writeStream.foreachBatch(pipeline)`, or `writeStream.format("sparkonce")`."""

_ORDER: Final = "SPARKONCE_TEST_ORDER"


@dataclass(frozen=True)
class Order:
    """What to run.

    Attributes:
        pipeline: makes the pipeline from the address of its transaction log.
        log: that address.
        schema: of the rows.
        source: the folder of the files, `FILES_PER_BATCH` for each batch.
        checkpoint: the query's checkpoint folder.
        sinks: names of sinks that the pipeline must have.
        is_written_here: the driver writes small batches itself, from its first one on.
        front: how the query is written.
    """

    pipeline: Callable[[str], ExactlyOnce]
    log: str
    schema: pa.Schema
    source: Path
    checkpoint: Path
    sinks: tuple[str, ...]
    is_written_here: bool = False
    front: Front = "foreachBatch"


def quiet_session(master: str, folder: Path, conf: Mapping[str, str] | None = None) -> SparkSession:
    """A Spark session for a driver that lives for seconds and keeps its files in `folder`.

    Args:
        master: Spark's.
        folder: of the driver.
        conf: more of Spark's settings, such as a cluster's.
    """
    logging.basicConfig(level=logging.INFO)
    logging.getLogger("py4j").setLevel(logging.WARNING)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    return (
        SparkSession.builder.master(master)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.codegen.wholeStage", "false")  # compiling takes longer than the rows
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config(map=dict(conf or {}))
        .getOrCreate()
    )


def set_writer(pipeline: ExactlyOnce, *, is_driver: bool) -> None:
    """Let the driver write small batches itself, from its first one on, or never."""
    change: dict[str, Any] = {"small_batches_first": 0} if is_driver else {"driver_rows": 0}
    pipeline._serving.settings = replace(pipeline.settings, **change)  # noqa: SLF001 - for tests


def ordered() -> ExactlyOnce:
    """The pipeline of the order, for `format("sparkonce")`."""
    order: Order = cloudpickle.loads(Path(os.environ[_ORDER]).read_bytes())
    return order.pipeline(order.log)


def main(path: Path) -> None:
    order: Order = cloudpickle.loads(path.read_bytes())
    os.environ[_ORDER] = str(path)
    spark = quiet_session("local[2]", order.checkpoint.parent)
    pipeline = order.pipeline(order.log)
    if order.is_written_here:
        set_writer(pipeline, is_driver=True)
    names = [sink.name for sink in pipeline.sinks]
    if not set(order.sinks) <= set(names):
        raise ValueError(
            f"readers= names {order.sinks}, and the pipeline's sinks are {names}: use their names"
        )
    rows = (
        spark.readStream.schema(from_arrow_schema(order.schema, prefer_timestamp_ntz=True))
        .option("maxFilesPerTrigger", FILES_PER_BATCH)
        .parquet(str(order.source))
    )
    query = (
        _written(rows, pipeline, order.front)
        .option("checkpointLocation", str(order.checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    if order.front == "format":
        query.awaitTermination()
    else:
        pipeline.awaitTermination(query)
    pipeline.close()


def _written(rows: DataFrame, pipeline: ExactlyOnce, front: Front) -> DataStreamWriter:
    if front == "foreachBatch":
        return rows.writeStream.foreachBatch(pipeline)
    writer = shaped(rows, pipeline.sinks).writeStream.format(SparkOnce.name())
    return writer.option("pipeline", "sparkonce.testing.job:ordered")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
