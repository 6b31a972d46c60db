"""A stream of changes (inserts, updates, deletions) whose driver is killed in every batch."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest

from integration_tests.crash.scenario import ROOT
from sparkonce.testing import checks
from sparkonce.testing.crash import DriverProcess, Failpoints
from sparkonce.testing.quick_spark import submit_args
from sparkonce.testing.services import PostgresServer

JOB = """
import os, sys
os.environ["PYSPARK_PYTHON"] = sys.executable
from pyspark.sql import SparkSession
from sparkonce import ExactlyOnce
from sparkonce.sinks import PostgresSink

folder, dsn, schema = sys.argv[1:]
os.chdir(folder)  # Spark puts its work folder here
spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.ui.enabled", "false")
    .config("spark.driver.host", "127.0.0.1")
    .config("spark.driver.bindAddress", "127.0.0.1")
    .config("spark.sql.codegen.wholeStage", "false")
    .getOrCreate()
)
sink = PostgresSink(
    dsn, table=schema + ".orders", key=["id"], order_by="ts", delete="op = 'D'",
    dead_letter="rejects",
)
pipeline = ExactlyOnce("changes", sinks=[sink], log="sqlite:///" + folder + "/txn.db")
stream = spark.readStream.schema("op string, ts long, id long, status string")
rows = stream.option("maxFilesPerTrigger", 1).json(folder + "/in").repartition(2)
rows.writeStream.foreachBatch(pipeline).option("checkpointLocation", folder + "/ckpt").trigger(
    availableNow=True
).start().awaitTermination()
"""

POINTS = ("vote.after", "decide.after", "deliver.after")
"""Where the driver of batch 0, 1 and 2 is killed."""

KEYS, CHANGES = 12, 60


def changes_of(batch: int, randomness: random.Random) -> list[dict[str, Any]]:
    rows = [
        {
            "op": randomness.choice("IUD"),
            "ts": batch * CHANGES + number,
            "id": randomness.randrange(KEYS),
            "status": f"{batch}/{number}",
        }
        for number in range(CHANGES)
    ]
    # No other row has its key, so it is the last row of that key.
    return [*rows, {"op": "I", "ts": 0, "id": 1000 + batch, "status": "bad"}]


def apply(model: dict[int, str], rows: list[dict[str, Any]]) -> None:
    for row in sorted(rows, key=lambda row: row["ts"]):
        if row["op"] == "D":
            model.pop(row["id"], None)
        elif row["status"] != "bad":
            model[row["id"]] = row["status"]


@pytest.mark.slow
def test_driver_of_a_stream_of_changes_is_killed(
    postgres: PostgresServer, fresh_schema: str, tmp_path: Path
) -> None:
    """Before the decision, with a decided merge that is lost as well, and after the commit."""
    randomness = random.Random(6)  # noqa: S311  # the same changes in every run
    batches = [changes_of(batch, randomness) for batch in range(len(POINTS) + 1)]
    (tmp_path / "in").mkdir()
    for number, rows in enumerate(batches):
        path = tmp_path / "in" / f"{number}.json"
        path.write_text("\n".join(json.dumps(row) for row in randomness.sample(rows, len(rows))))
        os.utime(path, (number, number))  # Spark takes the oldest first

    def run(query: str) -> list[Any]:
        with psycopg.connect(postgres.dsn, autocommit=True) as connection:
            cursor = connection.execute(query.format(fresh_schema).encode())
            return cursor.fetchall() if cursor.description else []

    run("CREATE TABLE {}.orders (id bigint PRIMARY KEY, status text CHECK (status <> 'bad'))")
    points = Failpoints(tmp_path / "failpoints")
    log = tmp_path / "driver.log"
    argv = [sys.executable, "-c", JOB, str(tmp_path), postgres.dsn, fresh_schema]
    env = {"PYTHONPATH": str(ROOT / "src"), "PYSPARK_SUBMIT_ARGS": submit_args()}
    driver = DriverProcess(argv, points, log=log, env=env)
    model: dict[int, str] = {}
    try:
        for number, point in enumerate(POINTS):
            arm = points.arm(point, batch=number)
            driver.start()
            driver.wait_for(arm)
            driver.kill()
            points.disarm()
            before = dict(model)
            apply(model, batches[number])
            is_visible = point == "deliver.after"
            assert dict(run("SELECT * FROM {}.orders")) == (model if is_visible else before)
            if point == "decide.after":
                ((gid,),) = run("SELECT gid FROM pg_prepared_xacts")
                run(f"ROLLBACK PREPARED '{gid}'")
        driver.start()
        assert driver.wait() == 0, log.read_text()
    finally:
        driver.close()
    apply(model, batches[-1])
    assert dict(run("SELECT * FROM {}.orders")) == model
    numbers = list(range(len(batches)))
    assert run("SELECT batch_id, rows FROM {}.sparkonce_commits ORDER BY 1") == [
        (number, CHANGES + 1) for number in numbers
    ]
    rejected = run("SELECT batch_id, (record -> 'id')::int FROM {}.rejects ORDER BY 1")
    assert rejected == [(number, 1000 + number) for number in numbers]
    assert checks.postgres_leaks(postgres.dsn) == []
