"""The listener of the guide: Spark's progress next to the rows of our sinks."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.guides import HOWTO, block_with

from integration_tests.support.spark import Job, ids
from sparkonce.sinks import FileSink, SqliteSink

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_listener_of_the_guide(spark: SparkSession, tmp_path: Path) -> None:
    """It shows each batch with what Spark read and what each sink got."""
    job = Job(spark, tmp_path)
    job.add(*ids(0, 1))
    job.add(*ids(2))
    sinks = [FileSink(job.out), SqliteSink(tmp_path / "shop.db", table="orders")]
    pipeline = job.pipeline(sinks=sinks)
    lines: list[str] = []
    names: dict[str, Any] = {"pipeline": pipeline, "spark": spark, "print": lines.append}
    exec(block_with("class Progress", HOWTO / "monitoring.md"), names)  # noqa: S102 - ours
    job.run(pipeline)
    deadline = time.monotonic() + 60  # Spark calls listeners some time after the batch
    while len(lines) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    found = [re.search(r"^(batch \d) .* is (\w+): (read .*)$", line) for line in lines]
    assert sorted(match.groups() for match in found if match) == [
        ("batch 0", "complete", "read 2, wrote {'file': 2, 'sqlite': 2}"),
        ("batch 1", "complete", "read 1, wrote {'file': 1, 'sqlite': 1}"),
    ]
    pipeline.close()
