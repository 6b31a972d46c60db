"""Plan, commit and abort of `format("sparkonce")`, as Spark's Python processes call them."""

from __future__ import annotations

import json
import re
import shutil
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.serializers import CloudPickleSerializer
from pyspark.sql.types import LongType, StructField, StructType

from sparkonce.errors import (
    ConfigurationError,
    DecisionUnknownError,
    FencedError,
    PreparedBranchLostError,
    PrepareRejectedError,
)
from sparkonce.once import forget
from sparkonce.sinks import FileSink
from sparkonce.spark_hooks.binding import enter
from sparkonce.spark_hooks.data_source.committing import abort, commit
from sparkonce.spark_hooks.data_source.job import Job
from sparkonce.spark_hooks.data_source.keyed import abort_keyed, commit_keyed, plan_keyed
from sparkonce.spark_hooks.data_source.planning import Holder, plan
from sparkonce.spark_hooks.data_source.source import SparkOnce
from sparkonce.spark_hooks.data_source.tasks import Prepared, TaskWriter
from sparkonce.storage import LocalFolder
from sparkonce.txn_log import opening
from sparkonce.txn_log.claim import Claim
from sparkonce.txn_log.record import Incarnation
from sparkonce.txn_log.sqlite import SqliteLog

SCHEMA = StructType([StructField("id", LongType())])
NAME = "format_job:pipeline"
JOB = """
from sparkonce import ExactlyOnce
from sparkonce.sinks import FileSink

sinks = [FileSink({folder!r}, name="files")]
pipeline = ExactlyOnce("orders", sinks=sinks, log={log!r})
"""


class Query:
    """A checkpoint, and what Spark does between the calls."""

    def __init__(self, folder: Path) -> None:
        self.target, self.checkpoint = folder / "target", folder / "checkpoint"
        self.module = folder / "format_job.py"
        self.target.mkdir()
        self.fill("1")

    def fill(self, digit: str) -> None:
        """Make the checkpoint of a query whose id has this digit."""
        (self.checkpoint / "offsets").mkdir(parents=True)
        (self.checkpoint / "commits").mkdir()
        (self.checkpoint / "metadata").write_text(
            json.dumps({"id": "0" * 8 + f"-{digit}-1-1-" + "0" * 12})
        )

    def plan(self, batch_id: int) -> TaskWriter:
        (self.checkpoint / "offsets" / str(batch_id)).write_text(f"v1\n{{}}\n{batch_id}")
        return plan(NAME, str(self.checkpoint), SCHEMA)

    def run(self, planned: TaskWriter, attempt: int = 0) -> list[Prepared | None]:
        """One task with three rows."""
        rows = pa.record_batch({"id": pa.array([1, 2, 3], pa.int64())})
        summary = planned.writer.write(iter([rows]), 0, attempt)
        return [Prepared(planned.ticket, summary.encode())]

    def commit(self, prepared: list[Prepared | None], batch_id: int) -> None:
        commit(NAME, str(self.checkpoint), SCHEMA, prepared, batch_id)
        (self.checkpoint / "commits" / str(batch_id)).write_text("v1\n{}")

    def abort(self, prepared: list[Prepared | None], batch_id: int) -> None:
        abort(NAME, str(self.checkpoint), prepared, batch_id)

    def forget(self) -> None:
        """The next call is in another process."""
        forget(Job, NAME)
        forget(Holder, NAME, str(self.checkpoint))
        sys.modules.pop("format_job", None)

    def rows(self) -> int:
        return sum(pq.read_table(path).num_rows for path in self.target.glob("*.parquet"))

    def prepared(self) -> int:
        return len(list((self.target / "_sparkonce").glob("*.parquet")))


@pytest.fixture
def query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Query]:
    query = Query(tmp_path)
    job = JOB.format(folder=str(query.target), log=f"sqlite:///{tmp_path}/log.db")
    query.module.write_text(job)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield query
    query.forget()


def test_token_is_kept_from_batch_to_batch(query: Query) -> None:
    """A process that has planned the batch before goes on; another one takes a token."""
    first = query.plan(0)
    query.commit(query.run(first), 0)
    second = query.plan(1)
    query.commit(query.run(second), 1)
    query.forget()
    third = query.plan(2)
    tokens = [planned.ticket.incarnation.token for planned in (first, second, third)]
    assert tokens[0] == tokens[1] < tokens[2]
    assert query.rows() == 6


@pytest.fixture
def query_with_log(query: Query) -> Query:
    """Its log is inside the checkpoint."""
    text = query.module.read_text()
    query.module.write_text(re.sub("log=.*", 'log="checkpoint")', text))
    return query


def test_only_the_start_checks_the_place_of_the_log(
    query_with_log: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its race is many requests: later plans, commits and aborts open the log that exists."""
    query, checked = query_with_log, []
    monkeypatch.setattr(opening, "check_create", checked.append)
    for batch_id in range(2):
        query.commit(query.run(query.plan(batch_id)), batch_id)
    query.abort(query.run(query.plan(2)), 2)
    assert len(checked) == 1
    query.commit(query.run(query.plan(2), attempt=1), 2)
    assert len(checked) == 2
    assert query.rows() == 9


def test_commit_makes_no_log(query_with_log: Query) -> None:
    """A log that was deleted since the plan is missed, and no empty one takes its place."""
    query = query_with_log
    prepared = query.run(query.plan(0))
    shutil.rmtree(query.checkpoint / "sparkonce-log")
    with pytest.raises(ConfigurationError, match="no transaction log"):
        query.commit(prepared, 0)
    assert not (query.checkpoint / "sparkonce-log").exists()
    for told in ("no transaction log", "belongs to the transaction log with id"):
        with pytest.raises(ConfigurationError, match=told):
            query.plan(0)


def test_fresh_checkpoint_with_its_log_inside_in_the_same_process(query_with_log: Query) -> None:
    """It gets a log of its own, as with foreachBatch."""
    query = query_with_log
    query.commit(query.run(query.plan(0)), 0)
    shutil.rmtree(query.checkpoint)
    query.fill("2")
    assert query.plan(0).ticket.incarnation.fenced_run is None


def test_sinks_are_validated_when_the_columns_change_back(
    query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch jobs with other columns follow each other in one process."""
    seen: list[list[str]] = []
    monkeypatch.setattr(FileSink, "validate", lambda _, schema: seen.append(schema.names))
    other = StructType([*SCHEMA, StructField("name", LongType())])
    job = Job(NAME)
    for schema in (SCHEMA, other, SCHEMA, SCHEMA):
        job.validate(schema)
    assert seen == [["id"], ["id", "name"], ["id"]]
    assert query.rows() == 0


def test_driver_before_enters_late_and_the_answer_of_begin_is_lost(
    query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is fenced: its entry does not show that another driver continued from the checkpoint."""
    older = query.plan(0).ticket
    begin = SqliteLog.begin
    lost: list[Incarnation] = []

    def begin_without_an_answer(log: SqliteLog, claim: Claim) -> Incarnation:
        incarnation = begin(log, claim)
        if lost:
            return incarnation
        lost.append(incarnation)
        folder = LocalFolder(query.checkpoint)
        assert enter(folder, older.entry, "host:1", older.run.run_id) is not None
        raise DecisionUnknownError("no answer")

    query.forget()
    monkeypatch.setattr(SqliteLog, "begin", begin_without_an_answer)
    replay = query.plan(0)
    assert lost
    query.commit(query.run(replay), 0)
    assert query.rows() == 3


def test_replay_takes_a_token_of_its_own(query: Query) -> None:
    """The batch failed: what the first attempt has prepared is swept."""
    first = query.plan(0)
    query.run(first)
    replay = query.plan(0)
    assert replay.ticket.incarnation.token > first.ticket.incarnation.token
    assert query.prepared() == 0
    query.commit(query.run(replay), 0)
    assert query.rows() == 3


def test_nothing_is_decided_after_an_abort(query: Query) -> None:
    """Spark has given a commit process up, and aborts the batch; then that process goes on."""
    prepared = query.run(query.plan(0))
    query.abort(prepared, 0)
    assert query.prepared() == 0
    with pytest.raises(FencedError):
        query.commit(prepared, 0)
    query.commit(query.run(query.plan(0), attempt=1), 0)
    assert query.rows() == 3


def test_abort_after_the_commit_leaves_what_is_decided(query: Query) -> None:
    """The commit's answer was lost; the replay is read and not written."""
    prepared = query.run(query.plan(0))
    commit(NAME, str(query.checkpoint), SCHEMA, prepared, 0)
    query.abort(prepared, 0)
    replay = query.plan(0)
    assert replay.ticket.rewrite is not None
    assert not replay.ticket.rewrite.partitions
    query.commit(query.run(replay, attempt=1), 0)
    assert query.rows() == 3


def test_late_abort_harms_no_run_that_came_after(query: Query) -> None:
    """Another process has planned the batch again: the abort neither fences nor sweeps."""
    late = query.run(query.plan(0))
    query.forget()
    prepared = query.run(query.plan(0), attempt=1)
    query.abort(late, 0)
    assert query.prepared() == 1
    query.commit(prepared, 0)
    assert query.rows() == 3


def test_job_that_changed_while_the_batch_was_written(query: Query, tmp_path: Path) -> None:
    """The process that commits has one more sink: without its rows the batch is not decided."""
    prepared = query.run(query.plan(0))
    text = query.module.read_text()
    more = f'sinks = [FileSink({str(tmp_path / "more")!r}, name="more"), '
    (tmp_path / "more").mkdir()
    query.module.write_text(text.replace("sinks = [", more))
    query.forget()
    with pytest.raises(PrepareRejectedError, match=r"module was changed meanwhile"):
        query.commit(prepared, 0)
    query.abort(prepared, 0)
    query.commit(query.run(query.plan(0), attempt=1), 0)
    assert query.rows() == 3
    assert len(list((tmp_path / "more").glob("*.parquet"))) == 1


def test_nothing_of_a_batch_job_is_decided_after_its_abort(query: Query) -> None:
    """Its commit process goes on after the abort; the next job with the key writes the rows."""
    planned = plan_keyed(NAME, "monday", SCHEMA)
    assert planned is not None
    prepared = query.run(planned)
    abort_keyed(NAME, "monday", planned)
    assert query.prepared() == 0
    with pytest.raises(FencedError):
        commit_keyed(NAME, "monday", SCHEMA, planned, prepared)
    again = plan_keyed(NAME, "monday", SCHEMA)
    assert again is not None
    late, prepared = planned, query.run(again, attempt=1)
    abort_keyed(NAME, "monday", late)
    commit_keyed(NAME, "monday", SCHEMA, again, prepared)
    assert query.rows() == 3
    assert plan_keyed(NAME, "monday", SCHEMA) is None


def test_lost_branch_of_a_batch_job_names_the_key(
    query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before an operator enters the rows, the job that has them should try."""

    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    planned = plan_keyed(NAME, "monday", SCHEMA)
    assert planned is not None
    prepared = query.run(planned)
    with monkeypatch.context() as patch:
        patch.setattr(FileSink, "commit", die)
        with pytest.raises(Killed):
            commit_keyed(NAME, "monday", SCHEMA, planned, prepared)
    for path in (query.target / "_sparkonce").glob("*.parquet"):
        path.unlink()
    query.forget()
    with pytest.raises(PreparedBranchLostError, match="job with key 'monday'.* run it again first"):
        plan_keyed(NAME, "tuesday", SCHEMA)
    assert plan_keyed(NAME, "monday", SCHEMA) is not None


def test_batch_job_whose_key_is_complete_is_logged(
    query: Query, caplog: pytest.LogCaptureFixture
) -> None:
    planned = plan_keyed(NAME, "2026-11-26", SCHEMA)
    assert planned is not None
    commit_keyed(NAME, "2026-11-26", SCHEMA, planned, query.run(planned))
    assert plan_keyed(NAME, "2026-11-26", SCHEMA) is None
    (told,) = [r.getMessage() for r in caplog.records if "complete" in r.getMessage()]
    assert told == "pipeline 'orders': key '2026-11-26' is complete (batch 0): nothing is written"


@pytest.mark.parametrize(
    ("needs", "method"), [("checkpointLocation", "streamWriter"), ("key", "writer")]
)
def test_error_of_a_plan_is_not_hidden_by_pickling(query: Query, needs: str, method: str) -> None:
    """Spark pickles a writer, which plans. PySpark would name the class in the midst of its own."""
    query.module.write_text("pipeline = 7")
    source = SparkOnce({"pipeline": NAME, needs: "here"})
    writer = getattr(source, method)(SCHEMA, False)
    with pytest.raises(ConfigurationError, match="is of type int") as raised:
        CloudPickleSerializer().dumps(writer)
    (line,) = traceback.format_exception_only(raised.value)
    assert line.startswith("sparkonce.errors.ConfigurationError: 'format_job:pipeline' is of type")


def test_module_that_spark_does_not_find() -> None:
    """Its Python runs in a folder of Spark's: to go into another one does not help."""
    with pytest.raises(ConfigurationError, match="no module 'nowhere'") as raised:
        plan("nowhere:pipeline", "/none", SCHEMA)
    told = str(raised.value)
    assert told.endswith(
        "set PYTHONPATH where the Spark driver or the Connect server starts, and restart it"
    )
    assert "run sparkonce" not in told
