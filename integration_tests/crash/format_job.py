"""The driver program of `integration_tests.crash.job`, written with ``format("sparkonce")``.

    python -m integration_tests.crash.format_job CONFIG.json

If the environment names a Spark Connect server, the program is a client of it. Otherwise it has a
classic session.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import SparkSession

from integration_tests.crash.job import made, make_pipeline, rows_of
from sparkonce import ExactlyOnce, shaped
from sparkonce.testing.job import quiet_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

CONFIG = "SPARKONCE_CRASH_CONFIG"
"""The path of the configuration, for the Python processes of Spark's driver."""

SERVER = "SPARKONCE_CRASH_SERVER"
"""The address of a Spark Connect server."""


def pipeline() -> ExactlyOnce:
    return make_pipeline(json.loads(Path(os.environ[CONFIG]).read_text()))


def session(config: dict[str, Any]) -> SparkSession:
    if address := os.environ.get(SERVER):
        return SparkSession.builder.remote(address).getOrCreate()
    return quiet_session(config["master"], Path(config["folder"]), config["conf"])


def main(path: str) -> None:
    os.environ[CONFIG] = path
    config = json.loads(Path(path).read_text())
    spark = session(config)
    rows: DataFrame = shaped(rows_of(spark, config), [made(sink) for sink in config["sinks"]])
    query = (
        rows.writeStream.format("sparkonce")
        .option("pipeline", "integration_tests.crash.format_job:pipeline")
        .option("checkpointLocation", config["checkpoint"])
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    main(sys.argv[1])
