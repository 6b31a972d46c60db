"""A driver of its own, whose environment names a receiver of OTLP: `python -m … FOLDER`.

Four small batches into two sinks: the executors write three, and the driver writes the last one.
Prints how long the query and the end of the pipeline took, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from integration_tests.support.spark import Job, ids
from sparkonce.observe import OpenTelemetry
from sparkonce.sinks import FileSink, SqliteSink
from sparkonce.testing.job import quiet_session

LINGER_S = 2.0
"""The executors send their spans after half a second."""


def main(folder: Path) -> None:
    spark = quiet_session("local[2]", folder)
    job = Job(spark, folder)
    for n in range(4):
        job.add(*ids(2 * n, 2 * n + 1))
    sinks = [FileSink(job.out), SqliteSink(folder / "shop.db", table="orders")]
    pipeline = job.pipeline(sinks=sinks, telemetry=OpenTelemetry())
    began = time.monotonic()
    query = job.run(pipeline, lambda df: df.repartition(2, "id"))
    ran = time.monotonic()
    pipeline.close()
    closed = time.monotonic()
    figures = {
        "query_s": ran - began,
        "close_s": closed - ran,
        "query_id": str(query.id),
        "run_id": str(query.runId),
        "rows": sorted(job.visible().elements()),
    }
    print(json.dumps(figures), flush=True)
    time.sleep(LINGER_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
