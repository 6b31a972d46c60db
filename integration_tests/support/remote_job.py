"""A driver program whose query has its checkpoint elsewhere, with the log inside it.

    python -m integration_tests.support.remote_job FOLDER CHECKPOINT CONF.json FRONT…

For each FRONT, "foreachBatch" or "format", it adds a row and runs the query until it has processed
all rows. The last line of its output has, as JSON, the records of the log and the number of
prepared files that are left.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path

from integration_tests.support.format_job import FormatJob
from integration_tests.support.spark import ids
from sparkonce.testing.job import quiet_session
from sparkonce.txn_log import IN_CHECKPOINT, open_log


def main(folder: str, checkpoint: str, conf: str, *fronts: str) -> None:
    spark = quiet_session("local[2]", Path(folder), json.loads(Path(conf).read_text()))
    job = FormatJob(spark, Path(folder))
    job.checkpoint = checkpoint
    for front in fronts:
        job.add(*ids(job.files))
        if front == "format":
            job.write(job.publish(log=IN_CHECKPOINT))
        else:
            with job.pipeline(log=IN_CHECKPOINT) as pipeline:
                job.run(pipeline)
    with closing(open_log(f"checkpoint:{checkpoint}", create=False)) as log:
        records = [(r.id.batch_id, r.state.value, r.token) for r in log.history("orders")]
    print(json.dumps([records, len(job.left_over())]))


if __name__ == "__main__":
    main(*sys.argv[1:])
