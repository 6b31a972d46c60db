"""The transaction log inside a checkpoint: through Hadoop, and under a real query."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest
from py4j.protocol import Py4JJavaError
from pyspark import SparkContext
from tests.support.binding_cases import assert_bound_once
from tests.support.storage_cases import assert_reads_what_spark_writes, put_below

from sparkonce import ExactlyOnce, failpoints
from sparkonce.errors import (
    ConfigurationError,
    DecisionUnknownError,
    LogUnavailableError,
    ProtocolError,
)
from sparkonce.sinks import FileSink
from sparkonce.storage.hadoop import HadoopFolder
from sparkonce.testing import checks
from sparkonce.testing.log_cases import claim, deliver
from sparkonce.testing.log_contract import LogContract
from sparkonce.testing.quick_spark import submit_args
from sparkonce.testing.services import Hdfs, ServiceKind, Services, s3a_jars, start_hdfs
from sparkonce.txn_log import TransactionLog, open_log
from sparkonce.txn_log.document import DocumentLog
from sparkonce.txn_log.folder import FolderPlace, check_create
from sparkonce.txn_log.record import State

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery


def hadoop_folder(root: str) -> HadoopFolder:
    context = SparkContext._active_spark_context
    return HadoopFolder(root, context._gateway, context._jsc.hadoopConfiguration())


@pytest.fixture(scope="session")
def hdfs() -> Iterator[Hdfs]:
    with start_hdfs() as running:
        yield running


@pytest.mark.slow
class TestHadoopLog(LogContract):
    """On HDFS, by rename without overwriting."""

    # These need a JVM in each process, or are of the place and not of Hadoop:
    # tests/txn_log/test_folder.py.
    test_tokens_of_racing_processes_differ = None  # type: ignore[assignment]
    test_racing_processes_never_both_decide = None  # type: ignore[assignment]
    test_forked_child_and_its_parent = None  # type: ignore[assignment]
    test_fork_while_another_thread_writes = None  # type: ignore[assignment]
    test_process_is_killed_at_every_round_trip = None  # type: ignore[assignment]
    test_answer_is_lost = None  # type: ignore[assignment]
    test_token_whose_answer_is_lost = None  # type: ignore[assignment]
    test_long_history_is_bounded = None  # type: ignore[assignment]
    test_history_is_bounded = None  # type: ignore[assignment]
    test_much_happens_between_two_round_trips = None  # type: ignore[assignment]

    @pytest.fixture
    def address(self, spark: SparkSession, hdfs: Hdfs, fresh_name: Callable[[], str]) -> str:
        return f"{hdfs.url}/{fresh_name()}/sparkonce-log"

    @staticmethod
    def open_log(address: str) -> TransactionLog:
        return DocumentLog(FolderPlace(hadoop_folder(address)))

    def files(self, address: str) -> dict[str, str]:
        folder = hadoop_folder(address)
        return {name: folder.read(name) or "" for name in folder.names("")}

    def damage(self, address: str, old: str, new: str) -> None:
        folder = hadoop_folder(address)
        for name, text in self.files(address).items():
            if name != "log.json":
                folder.delete(name)
                folder.create(name, text.replace(old, new))

    @contextmanager
    def out_of_reach(self, address: str) -> Iterator[None]:
        around = hadoop_folder(address.rpartition("/")[0])
        here, aside = (around._path(name) for name in ("sparkonce-log", "aside"))
        assert around._fs.rename(here, aside)
        assert around.create("sparkonce-log", "no folder")
        yield
        around.delete("sparkonce-log")
        assert around._fs.rename(aside, here)

    def remove(self, address: str) -> None:
        for name in self.files(address):
            hadoop_folder(address).delete(name)

    def stored_bytes(self, address: str) -> int:
        return sum(map(len, self.files(address).values()))

    def test_nothing_is_left_aside(self, log: TransactionLog, address: str) -> None:
        incarnation = log.begin(claim())
        for batch_id in range(10):
            deliver(log, incarnation, batch_id)
        names = hadoop_folder(address).files("orders/head")
        assert [name for name in names if name.startswith(".")] == []


@pytest.mark.slow
@pytest.mark.usefixtures("remote_checkpoints")
def test_checkpoint_and_log_on_hdfs(
    spark: SparkSession, hdfs: Hdfs, tmp_path: Path, fresh_name: Callable[[], str]
) -> None:
    """A query begins, its NameNode dies under a batch, and the next start goes on."""
    checkpoint = f"{hdfs.url}/{fresh_name()}"
    query = Query(spark, tmp_path, checkpoint)
    assert_bound_once(hadoop_folder(f"{checkpoint}-bound"))
    query.add("a")
    with query.pipeline() as pipeline:
        query.run(pipeline)
    query.add("b")
    went: list[str] = []

    def go(point: str, where: Mapping[str, object]) -> None:
        if point == "decide.before" and not went:
            went.append(point)
            hdfs.kill()

    failpoints.handler = go
    try:
        with query.pipeline() as pipeline, pytest.raises(Exception, match="hdfs://"):
            query.run(pipeline)
    finally:
        failpoints.handler = None
        hdfs.start()
    assert went == ["decide.before"]
    assert query.rows() == ["a"]
    with query.pipeline() as pipeline:
        query.run(pipeline)
    assert query.rows() == ["a", "b"]
    sink = f"FileSink({str(query.folder / 'out')!r})"
    jobs = f"""
from sparkonce import ExactlyOnce
from sparkonce.sinks import FileSink

pipeline = ExactlyOnce("orders", sinks=[{sink}])
"""
    (tmp_path / "jobs.py").write_text(jobs)
    shown = subprocess.run(
        [sys.executable, "-m", "sparkonce", "status", "jobs:pipeline", "--checkpoint", checkpoint],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert "orders  fine" in shown.stdout


def test_file_system_that_is_not_known(spark: SparkSession) -> None:
    with pytest.raises(ConfigurationError, match="nofs://x/ck"):
        open_log("checkpoint:nofs://x/ck")


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("hdfs://nowhere.invalid/ck", LogUnavailableError),
        ("hdfs://[/ck", ConfigurationError),
    ],
)
def test_file_system_that_cannot_be_opened(
    spark: SparkSession, location: str, expected: type[Exception]
) -> None:
    """A name that is not found now may be later; an address that is none stays none."""
    with pytest.raises(expected, match="cannot be used"):
        open_log(f"checkpoint:{location}")


def test_checkpoint_is_bound_once(spark: SparkSession, tmp_path: Path) -> None:
    """Through Hadoop: of two drivers that saw it free, or lost, only the first one binds it."""
    assert_bound_once(hadoop_folder(f"file:{tmp_path}"))


def test_folder_of_hadoop_reads_what_spark_writes(spark: SparkSession, tmp_path: Path) -> None:
    assert_reads_what_spark_writes(hadoop_folder(f"file:{tmp_path}"), put_below(tmp_path))


def test_location_is_the_one_that_spark_records(spark: SparkSession, tmp_path: Path) -> None:
    """In full, and with nothing quoted: the identity guard compares the two."""
    query = Query(spark, tmp_path, f"file:///{tmp_path}//a%20 b/")
    query.add("a")
    with query.pipeline() as pipeline:
        running = query.run(pipeline)
    recorded = str(running._jsq.streamingQuery().resolvedCheckpointRoot())
    assert hadoop_folder(query.checkpoint).location == recorded


def test_file_system_without_a_file_context(spark: SparkSession, tmp_path: Path) -> None:
    """Spark can keep a checkpoint there, so it can be bound."""
    context = SparkContext._active_spark_context
    conf = context._jvm.org.apache.hadoop.conf.Configuration(context._jsc.hadoopConfiguration())
    conf.unset("fs.AbstractFileSystem.file.impl")
    folder = HadoopFolder(f"file:{tmp_path}", context._gateway, conf)
    assert folder._context is None
    assert_bound_once(folder)


def test_call_that_was_interrupted_lets_the_next_one_through(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Hadoop's clients set the sign again, by which each further call would fail."""
    folder = hadoop_folder(f"file:{tmp_path}")
    thread = SparkContext._active_spark_context._jvm.java.lang.Thread

    def be_interrupted() -> None:
        thread.currentThread().interrupt()
        try:
            thread.sleep(1)
        finally:
            thread.currentThread().interrupt()

    with pytest.raises(LogUnavailableError, match="Interrupted"):
        folder._try(be_interrupted)
    assert not thread.currentThread().isInterrupted()
    with pytest.raises(DecisionUnknownError, match="Interrupted"):
        folder._decide(be_interrupted)
    assert not thread.currentThread().isInterrupted()


def test_look_that_was_interrupted_is_repeated(spark: SparkSession, tmp_path: Path) -> None:
    """An aborted batch is swept behind `query.stop()`, and there is no later for it."""
    folder = hadoop_folder(f"file:{tmp_path}")
    java = SparkContext._active_spark_context._jvm.java
    failed = java.util.concurrent.CompletableFuture.failedFuture
    closed: list[object] = []

    def look() -> str:
        if not closed:
            closed.append(java.lang.Thread.currentThread().interrupt())
            failed(java.nio.channels.ClosedByInterruptException()).join()
        return "seen"

    assert folder._try(look) == "seen"
    assert not java.lang.Thread.currentThread().isInterrupted()


class Leaky:
    """Of several who create a file at the same time, all are told that they have."""

    address = "checkpoint:leaky"

    def create(self, name: str, text: str) -> bool:
        return True

    def delete(self, name: str) -> None:
        pass


def test_file_system_that_lets_several_create_a_file_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="leaky: 8 writers.*up to 8.*postgresql"):
        check_create(Leaky())  # type: ignore[arg-type]


class FullDisk:
    """A file system on which the write of a new file fails; a stream that is closed publishes."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.calls: list[str] = []

    def exists(self, path: object) -> bool:
        return False

    def createFile(self, path: object) -> FullDisk:
        return self

    def __getattr__(self, name: str) -> Callable[..., FullDisk]:
        def call(*_: object) -> FullDisk:
            self.calls.append(name)
            if name == "write":
                raise self.error
            return self

        return call


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_file_that_could_not_be_written_is_not_published(
    spark: SparkSession, tmp_path: Path, is_interrupted: bool
) -> None:
    """Where closing the stream makes the file appear, one that is torn is aborted instead."""
    no_space = SparkContext._active_spark_context._jvm.java.io.IOException("No space left")
    error = KeyboardInterrupt() if is_interrupted else Py4JJavaError("write failed", no_space)
    folder = hadoop_folder(f"file:{tmp_path}")
    folder._context = None
    folder._fs = disk = FullDisk(error)
    with pytest.raises((DecisionUnknownError, KeyboardInterrupt)):
        folder.create("orders/head/1.json", "{}")
    assert disk.calls[-2:] == ["write", "abort"]


S3A = """
import json, sys
from pathlib import Path
import pyarrow.dataset as ds
from pyspark.sql import SparkSession
from sparkonce import ExactlyOnce
from sparkonce.sinks import FileSink
from tests.support.binding_cases import assert_bound_once
from sparkonce.errors import ConfigurationError, FencedError
from sparkonce.testing.log_cases import claim, deliver, record
from sparkonce.spark_hooks.checkpoint import checkpoint_folder
from sparkonce.txn_log import open_log

jars, folder, *settings = sys.argv[1:]
builder = SparkSession.builder.master("local[1]").config("spark.jars", jars)
for setting in settings:
    builder = builder.config(*setting.split("=", 1))
spark = builder.config("spark.ui.enabled", "false").getOrCreate()
told = {}
for n in range(50):  # a race that a busy machine may not show at once
    try:
        open_log(f"checkpoint:s3a://s3mock/orders{n}")
    except ConfigurationError as error:
        told["s3mock"] = str(error)
        break
log, other = (open_log("checkpoint:s3a://versitygw/orders") for _ in range(2))
old = log.begin(claim())
for batch_id in range(3):
    deliver(log, old, batch_id)
newer = other.begin(claim(3))
try:
    log.decide(record(old, 3))
except FencedError as error:
    told["versitygw"] = str(error)
told["batches"] = [r.id.batch_id for r in other.history("orders")]
assert_bound_once(checkpoint_folder("s3a://versitygw/orders"))
for sub in ("in", "out"):
    Path(folder, sub).mkdir()
for n in range(2):  # each with an object of its own, as two drivers have
    Path(folder, "in", f"{n}.txt").write_text(f"row {n}")
    with ExactlyOnce("query", sinks=[FileSink(f"{folder}/out")]) as pipeline:
        stream = spark.readStream.text(f"{folder}/in").writeStream.foreachBatch(pipeline)
        stream = stream.option("checkpointLocation", "s3a://versitygw/query")
        stream.trigger(availableNow=True).start().awaitTermination()
told["rows"] = ds.dataset(f"{folder}/out").to_table()["value"].to_pylist()
print(json.dumps(told))
"""


def test_checkpoint_on_s3a(start_kind: Callable[[ServiceKind], Services], tmp_path: Path) -> None:
    """S3A creates a file on a condition: as good as the server that is asked to keep it."""
    settings = []
    kinds: tuple[ServiceKind, ...] = ("s3mock", "versitygw")
    for kind in kinds:
        server = start_kind(kind).s3[kind]
        client = checks.s3_client(server)
        client.create_bucket(Bucket=kind)
        client.close()
        of_bucket = f"spark.hadoop.fs.s3a.bucket.{kind}"
        settings += [
            f"{of_bucket}.endpoint={server.endpoint_url}",
            f"{of_bucket}.endpoint.region={server.region}",
            f"{of_bucket}.access.key={server.access_key}",
            f"{of_bucket}.secret.key={server.secret_key}",
            f"{of_bucket}.path.style.access=true",
        ]
    done = subprocess.run(
        [sys.executable, "-c", S3A, ",".join(map(str, s3a_jars())), str(tmp_path), *settings],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PYSPARK_SUBMIT_ARGS": submit_args({}),
        },
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert re.search(r"s3a://s3mock/orders\d+: 8 writers created one file", told["s3mock"])
    assert "host:1 took token" in told["versitygw"]
    assert told["batches"] == [2, 1, 0]
    assert sorted(told["rows"]) == ["row 0", "row 1"]


class Query:
    """Rows of a folder into another, with the log in the checkpoint."""

    def __init__(self, spark: SparkSession, folder: Path, checkpoint: str = "") -> None:
        self.spark, self.folder = spark, folder
        self.checkpoint = checkpoint or f"{folder}/ckpt"
        for name in ("in", "out"):
            (folder / name).mkdir()

    def add(self, row: str) -> None:
        hidden = self.folder / "hidden"
        hidden.write_text(row)
        hidden.rename(self.folder / "in" / f"{row}.txt")

    def pipeline(self, commit: str = "immediate") -> ExactlyOnce:
        return ExactlyOnce("orders", sinks=[FileSink(self.folder / "out")], commit=commit)  # type: ignore[arg-type]

    def run(self, pipeline: ExactlyOnce) -> StreamingQuery:
        stream = self.spark.readStream.option("maxFilesPerTrigger", 1).text(f"{self.folder}/in")
        query = (
            stream.writeStream.foreachBatch(pipeline)
            .option("checkpointLocation", self.checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        pipeline.awaitTermination(query)
        return query

    def rows(self) -> list[str]:
        files = (self.folder / "out").glob("*.parquet")
        return sorted(row for path in files for row in pq.read_table(path)["value"].to_pylist())


@pytest.fixture
def query(spark: SparkSession, tmp_path: Path) -> Query:
    return Query(spark, tmp_path)


@pytest.mark.parametrize("commit", ["immediate", "after_checkpoint"])
def test_query_without_a_log_of_its_own(
    query: Query, commit: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The log is in its checkpoint, a replay is known, and the start says what it cannot notice."""
    query.add("a")
    query.add("b")
    pipeline = query.pipeline(commit)
    with pytest.raises(ProtocolError, match="start the query first"):
        _ = pipeline.log
    with caplog.at_level(logging.INFO, logger="sparkonce"):
        query.run(pipeline)
    assert f"log checkpoint:{query.folder}/ckpt, deleted with the checkpoint" in caplog.text
    pipeline.close()
    (query.folder / "ckpt" / "commits" / "1").unlink()
    (query.folder / "ckpt" / "commits" / ".1.crc").unlink()
    query.add("c")
    again = query.pipeline(commit)
    query.run(again)
    again.close()
    assert query.rows() == ["a", "b", "c"]
    outside = open_log(f"checkpoint:{query.folder}/ckpt")
    assert [r.id.batch_id for r in outside.history("orders")] == [2, 1, 0]
    assert {r.state for r in outside.history("orders")} == {State.COMPLETE}


def test_checkpoint_that_is_deleted_under_a_living_object(query: Query) -> None:
    """The next start is another query's, so it takes an object of its own, which makes a new log.

    Another process finds that log again.
    """
    query.add("a")
    pipeline = query.pipeline()
    query.run(pipeline)
    before = pipeline.log.log_id
    shutil.rmtree(query.folder / "ckpt")
    with pytest.raises(Exception, match="make an ExactlyOnce for each query"):
        query.run(pipeline)
    pipeline = query.pipeline()
    query.run(pipeline)
    assert pipeline.log.log_id != before
    assert open_log(f"checkpoint:{query.folder}/ckpt").log_id == pipeline.log.log_id


def test_another_log_for_a_checkpoint_that_has_its_own(query: Query) -> None:
    """Is refused, as any other log would be."""
    query.add("a")
    query.run(query.pipeline())
    query.add("b")
    other = ExactlyOnce(
        "orders",
        sinks=[FileSink(query.folder / "out")],
        log=f"sqlite:///{query.folder}/txn.db",
    )
    with pytest.raises(Exception, match="belongs to the transaction log with id"):
        query.run(other)


def test_file_system_whose_jar_is_missing(spark: SparkSession) -> None:
    """Such as ABFS, or S3A, which come with no PySpark: the message names the settings."""
    with pytest.raises(ConfigurationError, match=r"ClassNotFound.*spark\.jars\.packages"):
        hadoop_folder("abfs://lake@account.dfs.core.windows.net/ck")
