"""The driver program that the crash tests kill: it reads a folder of JSON files into any sinks.

    python -m integration_tests.crash.job CONFIG.json

CONFIG holds

* `source`, `checkpoint`, and `folder` for everything else;
* `master`: Spark's, such as "local[2]"; `conf`: its settings;
* `sinks`: for each sink its class `kind`, its positional `target` and its `settings`, in which a
  `transform` is a condition in SQL;
* `removed`: the same for sinks that the pipeline had before;
* `pipeline`: the settings of `ExactlyOnce`;
* `is_tagged`: whether the column `run` of each row has the id of the process that wrote it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql.functions import lit

from integration_tests.crash.recording import record
from sparkonce import ExactlyOnce, sinks
from sparkonce.sinks.base import AnySink
from sparkonce.testing.job import FILES_PER_BATCH, quiet_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def made(sink: dict[str, Any]) -> AnySink:
    settings = dict(sink["settings"])
    if "connection" in settings:
        settings["connection"] = sinks.S3Connection(**settings["connection"])
    if (condition := settings.get("transform")) is not None:
        settings["transform"] = lambda df: df.where(condition)
    built: AnySink = getattr(sinks, sink["kind"])(*sink["target"], **settings)
    return built


def make_pipeline(config: dict[str, Any]) -> ExactlyOnce:
    return ExactlyOnce(
        "crash",
        sinks=[made(sink) for sink in config["sinks"]],
        removed=[made(sink) for sink in config["removed"]],
        **config["pipeline"],
    )


def rows_of(spark: SparkSession, config: dict[str, Any]) -> DataFrame:
    """The source, with the process that writes each row."""
    return (
        spark.readStream.schema("id long, day string, name string, amount decimal(12,2)")
        .option("maxFilesPerTrigger", FILES_PER_BATCH)
        .json(config["source"])
        .withColumn("run", lit(os.getpid() if config["is_tagged"] else 0).cast("long"))
    )


def unchanged(df: DataFrame) -> DataFrame:
    return df


def main(config: dict[str, Any], transformed: Callable[[DataFrame], DataFrame] = unchanged) -> None:
    """Run the query over the source, or over what `transformed` makes of it, to its end."""
    folder, waits = Path(config["folder"]), config["pipeline"]["commit"] == "after_checkpoint"
    spark = quiet_session(config["master"], folder, config["conf"])
    pipeline = make_pipeline(config)
    record(folder, Path(config["checkpoint"]), waits=waits)
    query = (
        transformed(rows_of(spark, config))
        .writeStream.foreachBatch(pipeline)
        .option("checkpointLocation", config["checkpoint"])
        .trigger(availableNow=True)
        .start()
    )
    if waits:
        pipeline.awaitTermination(query)
    else:
        query.awaitTermination()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
