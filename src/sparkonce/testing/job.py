"""The driver program that `assert_exactly_once` kills: it reads Parquet files into a pipeline.

python -m sparkonce.testing.job ORDER

ORDER is the path of a pickled `Order`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark import cloudpickle
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

if TYPE_CHECKING:
    import pyarrow as pa

    from sparkonce import ExactlyOnce

FILES_PER_BATCH: Final = 2


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
    """

    pipeline: Callable[[str], ExactlyOnce]
    log: str
    schema: pa.Schema
    source: Path
    checkpoint: Path
    sinks: tuple[str, ...]
    is_written_here: bool = False


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


def main(order: Order) -> None:
    spark = quiet_session("local[2]", order.checkpoint.parent)
    pipeline = order.pipeline(order.log)
    if order.is_written_here:
        settings = pipeline._settings  # noqa: SLF001 - what follows is for tests only
        pipeline._settings = replace(settings, small_batches_first=0)  # noqa: SLF001
    names = [sink.name for sink in pipeline.sinks]
    if not set(order.sinks) <= set(names):
        raise ValueError(
            f"readers= names {order.sinks}, and the pipeline's sinks are {names}: use their names"
        )
    query = (
        spark.readStream.schema(from_arrow_schema(order.schema, prefer_timestamp_ntz=True))
        .option("maxFilesPerTrigger", FILES_PER_BATCH)
        .parquet(str(order.source))
        .writeStream.foreachBatch(pipeline)
        .option("checkpointLocation", str(order.checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    pipeline.awaitTermination(query)
    pipeline.close()


if __name__ == "__main__":
    main(cloudpickle.loads(Path(sys.argv[1]).read_bytes()))
