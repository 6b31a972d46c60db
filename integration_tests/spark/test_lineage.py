"""Lineage of a real Spark job, in a real receiver of HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.lineage import Receiver, check

from integration_tests.support.spark import Job, ids
from sparkonce.observe import OpenLineage
from sparkonce.sinks import FileSink, SqliteSink

if TYPE_CHECKING:
    import pytest
    from pyspark.sql import SparkSession


def test_lineage_of_two_batches(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folder in, folder and table out, with offsets, rows and the columns that Spark has."""
    job = Job(spark, tmp_path)
    job.add(*ids(0, 1))
    job.add(*ids(2))
    sinks = [FileSink(job.out), SqliteSink(tmp_path / "shop.db", table="orders")]
    with Receiver() as receiver:
        monkeypatch.setenv("OPENLINEAGE_URL", receiver.url)
        telemetry = OpenLineage(namespace="shop")
        pipeline = job.pipeline(sinks=sinks, telemetry=[telemetry])
        job.run(pipeline)
        pipeline.close()
        telemetry.end()
    events = receiver.events
    for event in events:
        check(event)
    assert [event["eventType"] for event in events] == ["START", "COMPLETE"] * 2
    for start, complete in (events[:2], events[2:]):
        assert start["run"]["runId"] == complete["run"]["runId"]
        (source,) = complete["inputs"]
        assert source["namespace"] == "file"
        assert Path(source["name"]).is_relative_to(tmp_path)
        file, table = complete["outputs"]
        assert (file["namespace"], file["name"]) == ("file", str(job.out))
        assert (table["namespace"], table["name"]) == (f"sqlite://{tmp_path}/shop.db", "orders")
        assert file["facets"]["schema"]["fields"][0] == {
            "name": "id",
            "type": "long",
            "ordinal_position": 1,
            "fields": [],
        }
    rows = [e["outputs"][0]["outputFacets"]["outputStatistics"]["rowCount"] for e in events[1::2]]
    assert sorted(rows) == [1, 2]
    offsets = [e["inputs"][0]["inputFacets"]["sparkonce_offsets"] for e in events[1::2]]
    assert "start" not in offsets[0]
    assert offsets[1]["start"] == offsets[0]["end"]
