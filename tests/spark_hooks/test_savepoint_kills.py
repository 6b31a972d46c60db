"""The commands as processes that are killed before their changes, by SIGKILL.

Each command runs until its k-th change of the file system or of the log. The other modules kill it
in its own process, before and after each call of a folder.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from sparkonce.cli.main import ERROR, run
from sparkonce.sinks import FileSink
from sparkonce.spark_hooks.checkpoint import open_checkpoint
from sparkonce.spark_hooks.savepoints import Savepoints, create
from sparkonce.storage import LocalFolder
from tests.support.rewind_cases import RewindStage
from tests.support.savepoint_cases import QUERY
from tests.support.stopped_commands import kill_before_change

BATCHES = 2
ANOTHER = "22222222-2222-3333-4444-555555555555"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No power is lost here. The command logs as if it had a process of its own."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    logger = logging.getLogger("sparkonce")
    before = logger.level, logger.propagate, [*logger.handlers]
    yield
    logger.level, logger.propagate, logger.handlers = before
    logger.setLevel(logger.level)  # which forgets what was cached


class Folder:
    """A pipeline with its job as JSON, and the job of a fork."""

    def __init__(self, folder: Path, savepoint: int) -> None:
        self.stage = RewindStage(folder, batches=BATCHES, savepoint=savepoint)
        self.folder, self.new = folder, folder / "new"
        self.root = str(self.stage.root)
        self.job, self.fork = self._job("orders", "out"), self._job("fork", "fork-out")

    def _job(self, name: str, out: str) -> str:
        sink = {"type": "file", "folder": str(self.folder / out), "name": "out"}
        described = {"name": name, "log": f"sqlite:///{self.folder}/txn.db", "sinks": [sink]}
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(described))
        return str(path)

    def create(self, name: str, batch: int) -> None:
        files = open_checkpoint(str(self.stage.old), None)
        create(self.stage.place, self.stage.log, "orders", files, name=name, batch=batch)

    def savepoints(self) -> list[str]:
        """Names of the savepoints, each of which is whole; what is kept is what its name says."""
        place = Savepoints(LocalFolder(self.stage.root))
        for name in place.names():
            assert not list(place.verify(place.read(name)))
        for path in (self.stage.root / "files").glob("[!.]*"):
            assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name
        return place.names()

    @property
    def is_bound(self) -> bool:
        return (self.new / "sparkonce.1.json").exists()

    def check_new(self, name: str, batch: int) -> str:
        """The new checkpoint has each file of the savepoint; returns its query id, a new one."""
        manifest = self.stage.place.read(name)
        for file in manifest.files:
            if file != "metadata":
                expected = b"".join(self.stage.place.content(manifest, file))
                assert (self.new / file).read_bytes() == expected, file
        assert manifest.batch == batch
        query_id = str(json.loads((self.new / "metadata").read_text())["id"])
        assert query_id != QUERY
        return query_id

    def check_no_start(self, pipeline: str, batch: int, query_id: str) -> None:
        """Half of a checkpoint starts neither with its own query id nor with another one."""
        for id_, first in ((query_id, batch), (ANOTHER, 0)):
            targets = {"out": FileSink(self.folder / "fork-out").target}
            more = {"pipeline": pipeline, "targets": targets} if pipeline == "fork" else {}
            assert self.stage.is_refused(self.new, id_, first, **more)


def after_create(world: Folder) -> None:
    """No half of a savepoint can be read, and what is left is in nobody's way."""
    names = world.savepoints()
    assert names in (["good"], ["first", "good"])
    if "first" not in names:
        assert run(["savepoint", "create", world.job, world.root, "--name", "first"]) == 0
    assert run(["savepoint", "create", world.job, world.root, "--name", "third"]) == 0
    assert world.savepoints() == ["first", "good", "third"]


def after_restore(world: Folder) -> None:
    stage = world.stage
    head = stage.log.head("orders")
    assert head is not None
    if head.query_id != QUERY and not world.is_bound:
        assert stage.is_refused(stage.old, QUERY, BATCHES, replaces=head.query_id)
    if (world.new / "sparkonce.json").exists() and not world.is_bound:
        world.check_no_start("orders", BATCHES, head.query_id)
    repeated(world, ["restore", world.job], "--yes")
    assert stage.is_refused(stage.old, QUERY, BATCHES)
    query_id = world.check_new("good", BATCHES - 1)
    stage.incarnation = stage.begin(world.new, query_id, BATCHES)
    stage.deliver(BATCHES)
    assert stage.delivered() == stage.rows_of(*range(BATCHES + 1))


def after_fork(world: Folder) -> None:
    stage, marker = world.stage, world.new / "sparkonce.json"
    before = json.loads(marker.read_text()).get("query_id") if marker.exists() else None
    if before is not None and not world.is_bound:
        world.check_no_start("fork", BATCHES, before)
    repeated(world, ["fork", world.fork])
    query_id = world.check_new("good", BATCHES - 1)
    assert before in {None, query_id}
    targets = {"out": FileSink(world.folder / "fork-out").target}
    stage.begin(world.new, query_id, BATCHES, pipeline="fork", targets=targets)
    stage.deliver(BATCHES)  # the first pipeline goes on


def after_rewind(world: Folder) -> None:
    stage = world.stage
    head = stage.log.head("orders")
    assert head is not None
    if head.query_id == QUERY:
        assert stage.delivered() == stage.rows_of(*range(BATCHES))
    elif not world.is_bound:
        assert stage.is_refused(stage.old, QUERY, BATCHES, replaces=head.query_id)
    if (world.new / "sparkonce.json").exists() and not world.is_bound:
        world.check_no_start("orders", 1, head.query_id)
    repeated(world, ["rewind", world.job], "--yes")
    assert stage.delivered() == stage.rows_of(0)
    assert stage.is_refused(stage.old, QUERY, BATCHES)
    stage.incarnation = stage.begin(world.new, world.check_new("good", 0), 1)
    stage.deliver(1)
    assert stage.delivered() == stage.rows_of(0, 1)


def after_delete(world: Folder) -> None:
    names = world.savepoints()
    assert names in (["good", "second"], ["second"])
    assert run(["savepoint", "delete", world.root, "good"]) == 0
    assert world.savepoints() == ["second"]
    kept = {file.sha256 for file in world.stage.place.read("second").files.values()}
    assert {path.name for path in (world.stage.root / "files").glob("[!.]*")} == kept


def repeated(world: Folder, command: Sequence[str], *more: str) -> None:
    """The same command finishes what was killed; a checkpoint that is ready is left as it is."""
    expected = ERROR if world.is_bound else 0
    arguments = [*command, world.root, "good", "--into", str(world.new), *more]
    assert run(["savepoint", *arguments]) == expected


@dataclass(frozen=True)
class Case:
    """A command, and what must hold after its kill.

    Attributes:
        arguments: of the command.
        check: what must hold.
        savepoint: the batch of the savepoint "good".
        some: numbers of the changes before which it is killed in every run of the tests.
    """

    arguments: Callable[[Folder], list[str]]
    check: Callable[[Folder], None]
    savepoint: int
    some: Sequence[int]


def into_new(job: str) -> Callable[[Folder], list[str]]:
    return lambda world: [getattr(world, job), world.root, "good", "--into", str(world.new)]


CASES = {
    "create": Case(lambda f: [f.job, f.root, "--name", "first"], after_create, 0, (2, 14)),
    "restore": Case(lambda f: [*into_new("job")(f), "--yes"], after_restore, 1, (20, 46, 50)),
    "fork": Case(into_new("fork"), after_fork, 1, (20, 54)),
    "rewind": Case(lambda f: [*into_new("job")(f), "--yes"], after_rewind, 0, (36, 38, 40)),
    "delete": Case(lambda f: [f.root, "good"], after_delete, 1, (5, 9)),
}


def killed(folder: Path, command: str, number: int) -> str | None:
    """Kill the command before the change of that number, and check; None if it has none."""
    case = CASES[command]
    folder.mkdir()
    world = Folder(folder, case.savepoint)
    if command == "delete":
        world.create("second", 0)
    arguments = ["savepoint", command, *case.arguments(world)]
    change = kill_before_change(number, folder, arguments)
    print(f"{command} {number}: {change}")
    if change is not None:
        case.check(world)
    return change


@pytest.mark.parametrize("command", CASES)
def test_command_is_killed_before_some_of_its_changes(tmp_path: Path, command: str) -> None:
    for number in CASES[command].some:
        assert killed(tmp_path / str(number), command, number) is not None


@pytest.mark.slow
@pytest.mark.parametrize("command", CASES)
def test_command_is_killed_before_each_of_its_changes(tmp_path: Path, command: str) -> None:
    for number in itertools.count(1):
        if killed(tmp_path / str(number), command, number) is None:
            break
    assert number > max(CASES[command].some)


def test_lost_is_refused_where_the_log_is_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was ignored: the log knows what the sinks have, whatever became of the checkpoint."""
    world = Folder(tmp_path, BATCHES - 1)
    arguments = [world.job, world.root, "good", "--into", str(world.new), "--yes"]
    assert run(["savepoint", "restore", *arguments, "--lost"]) == ERROR
    assert "is not in its checkpoint" in capsys.readouterr().err
    assert not world.new.exists()
    assert run(["savepoint", "restore", *arguments]) == 0


def test_settings_that_the_checkpoint_pins_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = Folder(tmp_path, BATCHES - 1)
    assert run(["savepoint", "show", world.root, "good", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"] == {"a": "b"}
