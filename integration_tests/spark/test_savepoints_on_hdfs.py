"""Savepoints on HDFS of a query whose checkpoint is there too, by the command line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration_tests.support.savepoints import aggregated, counted, delivered, rows
from integration_tests.support.spark import Job
from sparkonce import ExactlyOnce
from sparkonce.cli.looking import FOUND
from sparkonce.cli.main import ERROR, run
from sparkonce.sinks import FileSink
from sparkonce.storage import open_folder
from sparkonce.testing.services import Hdfs, start_hdfs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("remote_checkpoints")]

BEFORE, AFTER = 3, 2
"""Batches before and after the savepoint."""


@pytest.fixture(scope="module")
def hdfs() -> Iterator[Hdfs]:
    with start_hdfs() as running:
        yield running


class Story:
    """A query with its checkpoint on HDFS, and a job for the commands of each pipeline."""

    def __init__(self, spark: SparkSession, folder: Path, url: str, log: str) -> None:
        self.job, self.url, self.root = Job(spark, folder), url, f"{url}/savepoints"
        self.job.checkpoint = f"{url}/ckpt"
        self.log = log
        self.names = {"orders": self.job.out, "fork": self.job.sink_folder("fork-out")}
        for name, out in self.names.items():
            described = {"name": name, "log": log, "sinks": [{"type": "file", "folder": str(out)}]}
            (folder / f"{name}.json").write_text(json.dumps(described))

    def run(self, files: range, name: str = "orders") -> None:
        for n in files:
            self.job.add(*rows(n))
        with ExactlyOnce(name, sinks=[FileSink(self.names[name])], log=self.log) as pipeline:
            self.job.run(pipeline, aggregated)

    def command(self, verb: str, *arguments: str, of: str | None = None) -> int:
        job = [] if of is None else [str(self.job.folder / f"{of}.json")]
        return run(["savepoint", verb, *job, self.root, *arguments])

    def into(self, name: str) -> list[str]:
        return ["--into", f"{self.url}/{name}"]


@pytest.fixture(params=["sqlite", "checkpoint"])
def story(
    request: pytest.FixtureRequest,
    spark: SparkSession,
    hdfs: Hdfs,
    tmp_path: Path,
    fresh_name: Callable[[], str],
) -> Story:
    log = f"sqlite:///{tmp_path}/txn.db" if request.param == "sqlite" else "checkpoint"
    return Story(spark, tmp_path, f"{hdfs.url}/{fresh_name()}", log)


def test_savepoint_on_hdfs(story: Story, capsys: pytest.CaptureFixture[str]) -> None:
    """Made, listed, verified, restored, rewound to, forked and deleted; damage is noticed."""
    at = ["--checkpoint", story.job.checkpoint]
    story.run(range(BEFORE))
    assert story.command("create", "--name", "good", *at, of="orders") == 0
    capsys.readouterr()
    assert story.command("list", "--json") == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["name"], listed["batch"]) == ("good", BEFORE - 1)
    assert story.command("verify", "good") == 0

    assert story.command("restore", "good", *story.into("restored"), "--yes", of="orders") == 0
    story.job.checkpoint = f"{story.url}/restored"
    story.run(range(BEFORE, BEFORE + AFTER))
    assert delivered(story.job.out) == counted(range(BEFORE + AFTER))

    assert story.command("restore", "good", *story.into("late"), "--yes", of="orders") == ERROR
    assert story.command("fork", "good", *story.into("forked"), of="fork") == 0
    before, story.job.checkpoint = story.job.checkpoint, f"{story.url}/forked"
    story.run(range(0), "fork")
    assert delivered(story.names["fork"]) == counted(range(BEFORE, BEFORE + AFTER))

    story.job.checkpoint = before
    assert story.command("rewind", "good", *story.into("rewound"), "--yes", of="orders") == 0
    assert delivered(story.job.out) == counted(range(BEFORE))
    story.job.checkpoint = f"{story.url}/rewound"
    story.run(range(0))
    assert delivered(story.job.out) == counted(range(BEFORE + AFTER))

    folder = open_folder(story.root)
    assert story.command("export", "good", f"{story.url}/other") == 0
    stored = folder.names("files")[0]
    folder.delete(stored)
    assert folder.create(stored, "damaged")
    assert story.command("verify", "good") == FOUND
    assert story.command("delete", "good") == 0
    assert list(folder.names("")) == []
    story.root = f"{story.url}/other"
    assert story.command("verify", "good") == 0
