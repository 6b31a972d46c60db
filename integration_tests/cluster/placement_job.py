"""The driver program of test_placement.py: it also stops where the protocol has no step.

    python -m integration_tests.cluster.placement_job CONFIG.json

It is `integration_tests.crash.job`, and reaches the fail point `write.after` for two more names:

* `sink="snapshot"`, on the driver: Spark has copied a batch into a snapshot, and nothing has read
  it. The hit has the ids of the executors that hold it.
* `sink="source"`, on an executor: a row of the source is computed, and no sink has it.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql.functions import udf

from integration_tests.crash import job
from sparkonce.failpoints import reach

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def report_snapshots(kind: type[DataFrame]) -> None:
    """Let each `localCheckpoint` reach the fail point before its caller gets the snapshot."""
    snapshot = kind.localCheckpoint

    def reporting(df: DataFrame, **options: Any) -> DataFrame:
        rows = snapshot(df, **options)
        batch = df.sparkSession.sparkContext.getLocalProperty("streaming.sql.batchId")
        reach("write.after", sink="snapshot", batch=int(batch or -1), holders=holders(rows))
        return rows

    kind.localCheckpoint = reporting  # type: ignore[method-assign,assignment]


def holders(snapshot: DataFrame) -> list[str]:
    """The ids of the executors that hold at least one of its partitions."""
    context: Any = snapshot.sparkSession.sparkContext
    plan: Any = snapshot._jdf.queryExecution().logical()
    storage = context._jvm.org.apache.spark.storage
    blocks = context._gateway.new_array(storage.BlockId, plan.rdd().getNumPartitions())
    for partition in range(len(blocks)):
        blocks[partition] = storage.RDDBlockId(plan.rdd().id(), partition)
    places = storage.BlockManager.blockIdsToLocations(blocks, context._jsc.sc().env(), None)
    found = re.findall(r"executor_[^,)]*_(\w+)", str(places))  # of "executor_HOST_ID"
    return sorted(set(found))


def reporting_rows(df: DataFrame) -> DataFrame:
    """The same rows, each of which reaches the fail point in the task that computes it."""
    report_snapshots(type(df))

    @udf("long")
    def reported(run: int) -> int:
        reach("write.after", sink="source")
        return run

    return df.withColumn("run", reported("run"))


if __name__ == "__main__":
    job.main(json.loads(Path(sys.argv[1]).read_text()), reporting_rows)
