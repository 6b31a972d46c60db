"""The driver program that runs under the release before, from its own source tree.

    PYTHONPATH=TREE/src:TREE python -P old_job.py CONFIG.json

It uses the names of that release and nothing of this tree, so it never changes. CONFIG holds

* `source`, `checkpoint`: folders;
* `sinks`: for each sink its class `kind`, its positional `target` and its `settings`;
* `pipeline`: the settings of `ExactlyOnce`, by the names of that release;
* `imported`: the file in which to record which `sparkonce` the driver and a worker imported.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.functions import lit

from sparkonce import ExactlyOnce, sinks


def imported(_: object = None) -> list[Any]:
    """The file of the package, and whether its sinks have a verb that only that release has."""
    import sparkonce
    from sparkonce.sinks import TwoPhaseCommitSink

    return [sparkonce.__file__, hasattr(TwoPhaseCommitSink, "prepareBatch")]


def main(config: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.INFO)
    logging.getLogger("py4j").setLevel(logging.WARNING)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.codegen.wholeStage", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.warehouse.dir", str(Path(config["checkpoint"]).parent / "warehouse"))
        .getOrCreate()
    )
    on_worker = spark.sparkContext.parallelize([0], 1).map(imported).collect()[0]
    seen = {"driver": imported(), "worker": on_worker}
    Path(config["imported"]).write_text(json.dumps(seen))
    pipeline = ExactlyOnce(
        "crash",
        sinks=[
            getattr(sinks, sink["kind"])(*sink["target"], **sink["settings"])
            for sink in config["sinks"]
        ],
        **config["pipeline"],
    )
    query = (
        spark.readStream.schema("id long, day string, name string, amount decimal(12,2)")
        .option("maxFilesPerTrigger", 2)
        .json(config["source"])
        .withColumn("run", lit(os.getpid()).cast("long"))
        .writeStream.foreachBatch(pipeline)
        .option("checkpointLocation", config["checkpoint"])
        .trigger(availableNow=True)
        .start()
    )
    pipeline.awaitTermination(query)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
