"""Rewinds of real queries into files, Postgres and S3: bad code, back to a savepoint, good code."""

from __future__ import annotations

import contextlib
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow.parquet as pq
import pytest
from pyspark.errors import StreamingQueryException
from tests.support.s3_sinks import s3_sink
from tests.support.savepoint_cases import KilledError

from integration_tests.support.savepoints import aggregated, counted, delivered, rows
from integration_tests.support.spark import Job
from sparkonce import ExactlyOnce
from sparkonce.cli.looking import FOUND
from sparkonce.cli.main import ERROR, run
from sparkonce.sinks import FileSink, PostgresSink, verbs
from sparkonce.spark_hooks.savepoints import rewinding
from sparkonce.testing import checks

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from pyspark.sql import DataFrame, SparkSession

    from sparkonce.sinks.base import AnySink
    from sparkonce.testing.services import PostgresServer, S3Server, ServiceKind, Services

BEFORE, AFTER = 3, 2
"""Batches before and after the savepoint."""

SINKS: list[AnySink] = []
"""Those of the job that the commands load."""

MODULE = """
import integration_tests.spark.test_rewinds as test
from sparkonce import ExactlyOnce

def pipeline():
    return ExactlyOnce("orders", sinks=test.SINKS, log={log!r})
"""


def wrong(df: DataFrame) -> DataFrame:
    return aggregated(df).selectExpr("id", "count + 1000 AS count")


class Targets:
    """A folder, a table and a bucket, and what readers see there."""

    def __init__(self, job: Job, dsn: str, table: str, client: S3Client, bucket: str) -> None:
        self.job, self.dsn, self.table = job, dsn, table
        self.client, self.bucket = client, bucket

    def seen(self) -> list[Counter[Any]]:
        return [delivered(self.job.out), self._in_postgres(), self._in_s3()]

    def everything(self) -> list[Any]:
        """Every file, row and object, and not only their content."""
        files = {
            str(path): (path.stat().st_mtime_ns, path.read_bytes())
            for path in self.job.folder.rglob("*")
            if path.is_file() and "txn.db" not in path.name
        }
        with psycopg.connect(self.dsn) as connection:
            query = f"SELECT xmin::text, ctid::text, t.* FROM {self.table} AS t ORDER BY 1, 2"
            marks = f"SELECT xmin::text, t.* FROM {self._schema}.sparkonce_commits AS t ORDER BY 2"
            found = [connection.execute(q.encode()).fetchall() for q in (query, marks)]
        listed = self.client.list_object_versions(Bucket=self.bucket)
        objects = [(v["Key"], v["ETag"], v["LastModified"]) for v in listed.get("Versions", ())]
        return [files, found, objects]

    @property
    def _schema(self) -> str:
        return self.table.partition(".")[0]

    def run(self, query: str) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(query.encode())

    def _in_postgres(self) -> Counter[Any]:
        with psycopg.connect(self.dsn) as connection:
            query = f"SELECT id, count FROM {self.table}"
            return Counter(connection.execute(query.encode()).fetchall())

    def _in_s3(self) -> Counter[Any]:
        found: Counter[Any] = Counter()
        for entry in self.client.list_objects_v2(Bucket=self.bucket).get("Contents", ()):
            body = self.client.get_object(Bucket=self.bucket, Key=entry["Key"])["Body"].read()
            found.update(tuple(r.values()) for r in pq.read_table(io.BytesIO(body)).to_pylist())
        return found


class Story:
    """A query into all targets, with the command line around it."""

    def __init__(self, job: Job, targets: Targets, folder: Path, log: str | None) -> None:
        self.job, self.targets, self.folder = job, targets, folder
        self.log = log
        self.root = str(folder / "savepoints")
        self.name = f"rewound_{folder.name.replace('-', '_')}:pipeline"
        module = folder / f"{self.name.partition(':')[0]}.py"
        module.write_text(MODULE.format(log=log or "checkpoint"))

    def run(self, shape: Callable[[DataFrame], DataFrame], files: range = range(0)) -> None:
        for n in files:
            self.job.add(*rows(n))
        pipeline = ExactlyOnce("orders", sinks=SINKS, log=self.log or "checkpoint")
        self.job.run(pipeline, shape)

    def command(self, verb: str, *arguments: str) -> int:
        return run(["savepoint", verb, self.name, self.root, *arguments])

    def create(self) -> None:
        inside = [] if self.log else ["--checkpoint", self.job.location]
        assert self.command("create", "--name", "good", *inside) == 0

    def rewind(self, into: str, *more: str) -> int:
        folder = str(self.job.folder / into)
        return self.command("rewind", "good", "--into", folder, "--yes", *more)


@pytest.fixture
def targets(
    spark: SparkSession,
    tmp_path: Path,
    postgres: PostgresServer,
    fresh_table: Callable[[str], str],
    start_kind: Callable[[ServiceKind], Services],
    fresh_name: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Targets]:
    server: S3Server = start_kind("versitygw").s3["versitygw"]
    server.start()
    (tmp_path / "job").mkdir()
    job = Job(spark, tmp_path / "job")
    table, bucket = fresh_table("id bigint, count bigint"), fresh_name().replace("_", "-")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with contextlib.closing(checks.s3_client(server)) as client:
        client.create_bucket(Bucket=bucket)
        SINKS[:] = [
            FileSink(job.out),
            PostgresSink(postgres.dsn, table=table),
            s3_sink(f"s3://{bucket}/rows", **server.boto3_settings),
        ]
        yield Targets(job, postgres.dsn, table, client, bucket)
        for sink in SINKS:
            sink.close()


@pytest.fixture
def story(
    request: pytest.FixtureRequest,
    targets: Targets,
    tmp_path: Path,
    set_conf: Callable[[str, str], None],
) -> Story:
    """With the log in SQLite, or inside the checkpoint."""
    set_conf("spark.sql.shuffle.partitions", "2")
    is_inside = getattr(request, "param", "outside") == "inside"
    log = None if is_inside else f"sqlite:///{targets.job.folder}/txn.db"
    return Story(targets.job, targets, tmp_path, log)


BOTH = pytest.mark.parametrize(
    "story", ["outside", pytest.param("inside", marks=pytest.mark.slow)], indirect=True
)
INSIDE = pytest.mark.parametrize("story", ["inside"], indirect=True)


def started_wrong(story: Story) -> None:
    """Batches of good code, a savepoint, and batches of bad code."""
    story.run(aggregated, range(BEFORE))
    story.create()
    story.run(wrong, range(BEFORE, BEFORE + AFTER))


TRUTH = counted(range(BEFORE + AFTER))
GOOD = counted(range(BEFORE))


@BOTH
def test_bad_code_is_taken_back(story: Story, capsys: pytest.CaptureFixture[str]) -> None:
    """In every target; the old checkpoint is refused, and good code delivers the rest."""
    started_wrong(story)
    job, targets = story.job, story.targets
    before, dirty = targets.everything(), targets.seen()
    assert all(found != TRUTH for found in dirty)
    capsys.readouterr()
    assert story.rewind("new", "--dry-run", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert {s["sink"]: (s["batches"], s["rows"]) for s in shown["sinks"]} == {
        name: (list(range(BEFORE, BEFORE + AFTER)), sum(dirty[0].values()) - sum(GOOD.values()))
        for name in ("file", "postgres", "s3")
    }
    assert targets.everything() == before
    kept = next(Path(story.root, "files").iterdir())
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-1] + b"?")
    assert story.rewind("new", "--dry-run") == ERROR
    assert "is damaged" in capsys.readouterr().err
    kept.write_bytes(whole)
    assert story.rewind("new") == 0
    assert targets.seen() == [GOOD] * 3
    job.add(*rows(BEFORE + AFTER))
    with pytest.raises(StreamingQueryException, match=r"never runs again|was moved"):
        story.run(aggregated)
    job.checkpoint = "new"
    story.run(aggregated)
    assert targets.seen() == [counted(range(BEFORE + AFTER + 1))] * 3
    story.run(aggregated, range(BEFORE + AFTER + 1, BEFORE + AFTER + 2))
    assert targets.seen() == [counted(range(BEFORE + AFTER + 2))] * 3


def test_writer_that_interferes_is_noticed(
    story: Story, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is changed in any target, and the query can go on; or the sink is kept."""
    started_wrong(story)
    targets = story.targets
    targets.run(f"UPDATE {targets.table} SET count = 7 WHERE count > 1000 AND id = 1")
    before = targets.everything()
    capsys.readouterr()
    assert story.rewind("new", "--dry-run") == FOUND
    assert "refused" in capsys.readouterr().out
    assert story.rewind("new") == ERROR
    assert "another writer has changed" in capsys.readouterr().err
    assert targets.everything() == before
    assert not list((story.job.folder / "new").iterdir())
    bad = targets.seen()[1]
    assert story.rewind("new", "--keep", "postgres") == 0
    assert targets.seen() == [GOOD, bad, GOOD]
    story.job.checkpoint = "new"
    story.run(aggregated)
    assert targets.seen() == [TRUTH, bad + (TRUTH - GOOD), TRUTH]


@INSIDE
def test_rewind_is_killed_again_and_again(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after each sink and each write of the log; then a run finishes it."""
    started_wrong(story)
    job, targets = story.job, story.targets
    take_back, replace_query = verbs.take_back, rewinding.replace_query
    moments: list[str] = []
    seen: list[list[Counter[Any]]] = []

    def note(what: str, reached: list[str], moment: int) -> None:
        reached.append(what)
        if len(reached) == moment + 1:
            raise KilledError(what)

    for moment in range(100):
        reached: list[str] = []

        def dying(
            sink: AnySink,
            branches: Sequence[Any],
            reached: list[str] = reached,
            moment: int = moment,
        ) -> None:
            note(f"before {sink.name}", reached, moment)
            take_back(sink, branches)
            note(f"after {sink.name}", reached, moment)

        def dying_log(*args: Any, reached: list[str] = reached, moment: int = moment) -> None:
            note("before the head", reached, moment)
            replace_query(*args)
            note("after the head", reached, moment)

        with monkeypatch.context() as patch:
            patch.setattr(verbs, "take_back", dying)
            patch.setattr(rewinding, "replace_query", dying_log)
            try:
                assert story.rewind("new") == 0
            except KilledError as killed:
                moments.append(str(killed))
                seen.append(targets.seen())
                continue
        break
    assert moments[:2] == ["before the head", "after the head"]
    assert "after s3" in moments
    assert targets.seen() == [GOOD] * 3
    assert seen[0] != seen[-1]
    job.checkpoint = "new"
    story.run(aggregated)
    assert targets.seen() == [TRUTH] * 3


@BOTH
def test_no_start_while_it_is_half_done(
    story: Story, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the old query nor the new one, into whose folder Spark has written a plan by then."""
    started_wrong(story)
    job, targets = story.job, story.targets

    def dying(*_: object) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(verbs, "take_back", dying)
        with pytest.raises(KilledError):
            story.rewind("new")
    half = targets.seen()
    job.add(*rows(BEFORE + AFTER))
    with pytest.raises(StreamingQueryException, match=r"never runs again|was moved"):
        story.run(aggregated)
    job.checkpoint = "new"
    with pytest.raises(StreamingQueryException, match="a savepoint is being restored"):
        story.run(aggregated)
    assert targets.seen() == half
    assert story.rewind("new") == ERROR
    assert "was a query started there" in capsys.readouterr().err
    assert story.rewind("newer") == 0
    job.checkpoint = "newer"
    story.run(aggregated)
    assert targets.seen() == [counted(range(BEFORE + AFTER + 1))] * 3


def test_commands_show_what_was_taken_back(
    story: Story, capsys: pytest.CaptureFixture[str]
) -> None:
    started_wrong(story)
    assert story.rewind("new") == 0
    inside = [] if story.log else ["--checkpoint", str(story.job.folder / "new")]
    capsys.readouterr()
    assert run(["log", "list", story.name, "--json", *inside]) == 0
    states = {r["batch"]: r["state"] for r in json.loads(capsys.readouterr().out)}
    assert states == {n: "complete" if n < BEFORE else "rewound" for n in range(BEFORE + AFTER)}
    assert run(["log", "list", story.name, *inside]) == 0
    assert "rewound" in capsys.readouterr().out
    assert run(["status", story.name, *inside]) == 0
    assert "fine" in capsys.readouterr().out
    assert run(["recover", story.name, "--yes", *inside]) == 0
    assert "nothing to recover" in capsys.readouterr().out
    run(["doctor", story.name, *inside])  # warns of disks and rights of this machine
    found = " ".join(capsys.readouterr().out.split())
    assert f"batch {BEFORE - 1} is the last" in found
    assert "error" not in found
