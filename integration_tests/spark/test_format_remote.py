"""``format("sparkonce")`` where the checkpoint, with the log inside it, is on S3 or on HDFS.

The same query is run with foreachBatch too, which reads the checkpoint through Spark's JVM.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import pyarrow.dataset as ds
import pytest
from pyspark import __version__ as version

from sparkonce.testing import checks
from sparkonce.testing.crash import DriverProcess, Failpoints
from sparkonce.testing.quick_spark import submit_args
from sparkonce.testing.services import (
    S3Server,
    ServiceError,
    ServiceKind,
    Services,
    s3a_jars,
    start_hdfs,
)
from sparkonce.testing.services.process import import_path
from sparkonce.txn_log import checkpoint_log
from sparkonce.txn_log.record import State

pytestmark = pytest.mark.skipif(version < "4.1", reason="Spark 4.0 gives a data source no Arrow")


class Remote:
    """A query whose every driver is a process of its own."""

    def __init__(
        self, folder: Path, checkpoint: str, conf: Mapping[str, str], env: Mapping[str, str]
    ) -> None:
        self.folder, self.checkpoint, self._env = folder, checkpoint, env
        self.points = Failpoints(folder / "failpoints")
        self._conf = folder / "conf.json"
        self._conf.write_text(json.dumps(dict(conf)))

    @contextmanager
    def begin(self, *fronts: str) -> Iterator[DriverProcess]:
        program = ("-m", "integration_tests.support.remote_job")
        process = DriverProcess(
            [sys.executable, *program, str(self.folder), self.checkpoint, str(self._conf), *fronts],
            self.points,
            log=self.folder / "driver.log",
            env={**import_path(), "PYSPARK_SUBMIT_ARGS": submit_args({}), **self._env},
        )
        try:
            process.start()
            yield process
        finally:
            process.close()

    def run(self, *fronts: str) -> tuple[list[tuple[int, str, int]], int]:
        """Batch, state and token of each record, and the number of prepared files that are left."""
        with self.begin(*fronts) as process:
            assert process.wait() == 0, process.log.read_text()[-3000:]
        records, left_over = json.loads(process.log.read_text().splitlines()[-1])
        return records, left_over

    def refused(self, *fronts: str) -> str:
        with self.begin(*fronts) as process:
            assert process.wait() == 1
        return process.log.read_text()

    def rows(self) -> Counter[int]:
        files = [str(path) for path in (self.folder / "out").glob("*.parquet")]
        return Counter(ds.dataset(files).to_table()["id"].to_pylist() if files else [])


@pytest.fixture
def bucket(start_kind: Callable[[ServiceKind], Services], fresh_name: Callable[[], str]) -> str:
    return fresh_name()


@pytest.fixture
def server(start_kind: Callable[[ServiceKind], Services], bucket: str) -> S3Server:
    server = start_kind("versitygw").s3["versitygw"]
    server.start()
    with closing(checks.s3_client(server)) as client:
        client.create_bucket(Bucket=bucket)
    return server


def s3a_settings(server: S3Server) -> dict[str, str]:
    """What a user of S3A gives to Spark; no Python process of Spark sees it."""
    try:
        jars = s3a_jars()
    except ServiceError as error:  # an older Spark has another Hadoop
        pytest.skip(str(error))
    return {
        "spark.jars": ",".join(map(str, jars)),
        "spark.hadoop.fs.s3a.endpoint": server.endpoint_url,
        "spark.hadoop.fs.s3a.endpoint.region": server.region,
        "spark.hadoop.fs.s3a.access.key": server.access_key,
        "spark.hadoop.fs.s3a.secret.key": server.secret_key,
        "spark.hadoop.fs.s3a.path.style.access": "true",
    }


def boto3_environment(server: S3Server) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL_S3": server.endpoint_url,
        "AWS_REGION": server.region,
        "AWS_ACCESS_KEY_ID": server.access_key,
        "AWS_SECRET_ACCESS_KEY": server.secret_key,
    }


def kill_between_decision_and_commit(query: Remote) -> None:
    """Batch 0 with foreachBatch, batch 1 with the format, whose driver dies; then back again."""
    arm = query.points.arm("decide.after", batch=1)
    with query.begin("foreachBatch", "format") as process:
        process.wait_for(arm, timeout_s=600)  # JVMs start one after the other
        process.kill()
    assert query.rows() == Counter([0])
    query.points.disarm()
    records, left_over = query.run("format", "foreachBatch")
    assert query.rows() == Counter([0, 1, 2, 3])
    assert [batch_id for batch_id, _, _ in records] == [3, 2, 1, 0]
    assert {state for _, state, _ in records} == {State.COMPLETE.value}
    tokens = [token for _, _, token in reversed(records)]
    assert tokens == sorted(tokens)
    assert tokens[0] < tokens[1]  # each driver took its own
    assert left_over == 0


@pytest.mark.slow
def test_driver_is_killed_with_its_checkpoint_on_s3a(
    server: S3Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row arrives once; both fronts and boto3 alone read one log."""
    checkpoint, env = f"s3a://{bucket}/queries//a%20 b/", boto3_environment(server)
    query = Remote(tmp_path, checkpoint, s3a_settings(server), env)
    kill_between_decision_and_commit(query)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with closing(checkpoint_log(checkpoint, create=False, by_boto3=True)) as log:
        assert [record.id.batch_id for record in log.history("orders")] == [3, 2, 1, 0]


def test_bucket_that_only_spark_can_reach(server: S3Server, bucket: str, tmp_path: Path) -> None:
    """The error names the settings that Spark's Python processes have."""
    env = {**boto3_environment(server), "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"}
    query = Remote(tmp_path, f"s3a://{bucket}/orders", s3a_settings(server), env)
    said = query.refused("format")
    assert "check the server at http://127.0.0.1:9, which the environment variable" in said
    assert "does not see Spark's settings (fs.s3a.*)" in said
    assert query.rows() == Counter()


@pytest.mark.slow
def test_driver_is_killed_with_its_checkpoint_on_hdfs(
    tmp_path: Path, fresh_name: Callable[[], str]
) -> None:
    """The Python processes of Spark's driver read it through a JVM of their own."""
    with start_hdfs() as hdfs:
        query = Remote(tmp_path, f"{hdfs.url}/{fresh_name()}/a%20 b/", {}, {})
        kill_between_decision_and_commit(query)
