"""The transaction log in a checkpoint's folder, on a local disk."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sparkonce.errors import (
    ConfigurationError,
    DecisionUnknownError,
    LogCorruptError,
    LogUnavailableError,
)
from sparkonce.storage import LocalFolder
from sparkonce.storage.hadoop import HadoopFolder
from sparkonce.testing.log_cases import QUERY, claim, deliver
from sparkonce.testing.log_contract import LogContract
from sparkonce.txn_log import checkpoint_log, open_log, races
from sparkonce.txn_log.document import DocumentLog
from sparkonce.txn_log.folder import FolderPlace, check_create
from tests.support.disk import Disk
from tests.support.local_logs import FolderUnderTest


class LaggingFolder(LocalFolder):
    """It does not list a file that it has just created."""

    def names(self, folder: str) -> list[str]:
        return []


class TestCheckpointLog(FolderUnderTest, LogContract):
    """On a local disk, without Spark."""


class CountingFolder(LocalFolder):
    """Lets a reader that never gives up be seen."""

    reads = 0

    def read(self, name: str) -> str | None:
        self.reads += 1
        assert self.reads < 1000, "it reads for ever"
        return super().read(name)


def test_highest_file_that_is_listed_and_not_there_is_said(tmp_path: Path) -> None:
    """A link into nowhere after half a restore: an end, and a message, until it is put right."""
    folder = tmp_path / "sparkonce-log"
    writer = DocumentLog(FolderPlace(LocalFolder(folder)))
    incarnation = writer.begin(claim())
    deliver(writer, incarnation, 0)
    highest = max((folder / "orders" / "head").iterdir())
    text = highest.read_text()
    highest.unlink()
    highest.symlink_to(tmp_path / "nowhere")
    log = DocumentLog(FolderPlace(CountingFolder(folder)))
    with pytest.raises(LogUnavailableError, match=rf"orders/head/{highest.name}.*restore it"):
        log.head("orders")
    (tmp_path / "nowhere").write_text(text)
    assert log.head("orders") == writer.head("orders")


def test_file_that_a_faster_writer_removed_is_read_again(tmp_path: Path) -> None:
    """Between the listing and the reading others wrote so much that the file is gone."""
    folder = tmp_path / "sparkonce-log"
    writer = DocumentLog(FolderPlace(LocalFolder(folder)))
    incarnation = writer.begin(claim())

    class Slow(LocalFolder):
        is_slow = True

        def read(self, name: str) -> str | None:
            if self.is_slow and "/head/" in name:
                self.is_slow = False
                for batch_id in range(12):
                    deliver(writer, incarnation, batch_id)
            return super().read(name)

    log = DocumentLog(FolderPlace(Slow(folder)))
    newest = log.newest("orders", QUERY)
    assert newest is not None
    assert newest.id.batch_id == 11


@pytest.mark.parametrize(
    "name", ["backup.json", f"{99:020d}.json.json", "99.json", f"old/{99:020d}.json"]
)
def test_foreign_file_beside_the_heads(tmp_path: Path, name: str) -> None:
    """An operator's copy is no document: it neither counts nor goes."""
    folder = tmp_path / "sparkonce-log"
    log = DocumentLog(FolderPlace(LocalFolder(folder)))
    incarnation = log.begin(claim())
    foreign = folder / "orders" / "head" / name
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("{}")
    for batch_id in range(20):
        deliver(log, incarnation, batch_id)
    newest = DocumentLog(FolderPlace(LocalFolder(folder))).newest("orders", QUERY)
    assert newest is not None
    assert newest.id.batch_id == 19
    assert foreign.read_text() == "{}"


def test_id_that_is_gone_while_pipelines_stand_is_not_made_anew(tmp_path: Path) -> None:
    """Nobody would sweep what stands in the name of the old one."""
    folder = tmp_path / "sparkonce-log"
    log = DocumentLog(FolderPlace(LocalFolder(folder)))
    incarnation = log.begin(claim())
    deliver(log, incarnation, 0)
    text = (folder / "log.json").read_text()
    (folder / "log.json").unlink()
    for _ in range(2):
        with pytest.raises(LogUnavailableError, match=rf"{folder}: log.json is gone.*orders"):
            DocumentLog(FolderPlace(LocalFolder(folder)))
    assert not (folder / "log.json").exists()
    (folder / "log.json").write_text(text)
    assert DocumentLog(FolderPlace(LocalFolder(folder))).log_id == log.log_id


def test_log_that_another_driver_makes_at_the_same_time(tmp_path: Path) -> None:
    """Its first pipeline may stand before this driver has looked for any."""
    folder = tmp_path / "sparkonce-log"

    class Slow(LocalFolder):
        made: DocumentLog | None = None

        def read(self, name: str) -> str | None:
            text = super().read(name)
            if self.made is None:
                self.made = DocumentLog(FolderPlace(LocalFolder(folder)))
                self.made.begin(claim())
            return text

    slow = Slow(folder)
    log_id = DocumentLog(FolderPlace(slow)).log_id
    assert slow.made is not None
    assert log_id == slow.made.log_id


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (errno.ENOSPC, LogUnavailableError),
        (errno.EIO, LogUnavailableError),
        (errno.EMFILE, LogUnavailableError),
        (errno.EACCES, ConfigurationError),
        (errno.ENOTDIR, ConfigurationError),
        (errno.EROFS, ConfigurationError),
    ],
)
def test_folder_that_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, expected: type[Exception]
) -> None:
    """With commit="after_checkpoint" a start tries again what time may mend, and nothing else."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(expected, match=os.strerror(code)):
        checkpoint_log(str(tmp_path / "ckpt"))


@pytest.mark.parametrize("code", [errno.EACCES, errno.EMFILE, errno.EIO])
def test_folder_that_cannot_be_listed_is_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A log that is there and cannot be read says so, also to a process that never read it."""
    folder = tmp_path / "sparkonce-log"
    begun = DocumentLog(FolderPlace(LocalFolder(folder)))
    begun.begin(claim())
    fresh = DocumentLog(FolderPlace(LocalFolder(folder)))

    def refuse(path: object = ".") -> Iterator[os.DirEntry[str]]:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    for log in (begun, fresh):
        with pytest.raises(LogUnavailableError, match=os.strerror(code)):
            log.unfinished("orders")


def test_document_is_on_the_disk_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders before what is in them, bytes before their name, the name before the answer (I3)."""
    disk = Disk(monkeypatch)
    folder = LocalFolder(tmp_path / "ckpt" / "sparkonce-log")
    assert folder.create("orders/head/1.json", "{}")
    aside = ".1.json.tmp"
    assert [re.sub(r"\.[0-9a-f]{16}\.", ".", step) for step in disk.done] == [
        *("name ckpt", f"sync {tmp_path.name}", "name sparkonce-log", "sync ckpt"),
        *("name orders", "sync sparkonce-log", "name head", "sync orders"),
        *(f"sync {aside}", "name 1.json", "sync head"),
    ]
    assert disk.holds(tmp_path / "ckpt/sparkonce-log/orders/head/1.json")


def test_name_that_may_not_be_on_the_disk_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands, and a power cut may undo it: whoever wrote it has to look again."""
    disk = Disk(monkeypatch)
    folder = LocalFolder(tmp_path)
    disk.fails = tmp_path.name
    with pytest.raises(DecisionUnknownError, match=r"1\.json may not be on the disk"):
        folder.create("1.json", "{}")
    assert disk.fails is None
    assert folder.read("1.json") == "{}"
    assert not folder.create("1.json", "[]")


class Stream:
    """One of Hadoop's, as Py4J shows it."""

    def __init__(self, failing: str = "") -> None:
        self.calls: list[str] = []
        self._failing = failing

    def __getattr__(self, verb: str) -> Any:
        def call(*_: object) -> None:
            self.calls.append(verb)
            if verb == self._failing:
                raise ConnectionError(verb)

        return call


def test_document_is_on_the_disks_of_hadoop_before_it_counts() -> None:
    """Closed alone, it may be in the memory of the data nodes; a store's stream knows no hsync."""
    HadoopFolder._write(stream := Stream(), [b"{}"])
    assert stream.calls == ["write", "hsync", "close"]
    HadoopFolder._write(stream := Stream(), [b"{}"], close_publishes=True)
    assert stream.calls == ["write", "close"]


@pytest.mark.parametrize(
    ("failing", "is_store"), [("write", False), ("hsync", False), ("write", True)]
)
def test_document_that_hadoop_does_not_take_whole(failing: str, is_store: bool) -> None:
    """The error comes out; in a store, where closing would publish a part of it, it is aborted."""
    stream = Stream(failing)
    with pytest.raises(ConnectionError, match=failing):
        HadoopFolder._write(stream, [b"{}"], close_publishes=is_store)
    assert stream.calls[-2:] == [failing, "abort" if is_store else "close"]


def test_race_for_which_a_thread_cannot_start_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others would wait for it for ever, at each start of a query."""

    class Few(ThreadPoolExecutor):
        def submit(self, *args: Any, **kwargs: Any) -> Any:
            if len(self._threads) == 3:
                raise RuntimeError("can't start new thread")
            return super().submit(*args, **kwargs)

    monkeypatch.setattr(races, "_START_S", 0.1)
    monkeypatch.setattr(races, "ThreadPoolExecutor", Few)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        check_create(LocalFolder(tmp_path))


def test_foreign_folders_are_no_pipelines(tmp_path: Path) -> None:
    """Whatever else was put into the log's place: each of ours has a head."""
    root = tmp_path / "sparkonce-log"
    log = DocumentLog(FolderPlace(LocalFolder(root)))
    log.begin(claim())
    for folder in ("day=1", "lake/orders"):
        (root / folder).mkdir(parents=True)
        (root / folder / "head.json").write_text("{}")
    assert log.pipelines() == ["orders"]


def test_checkpoint_is_named_from_the_root_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it was given: the address stands in messages and in the log that was moved."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for given, path in (("~/ck", "home/ck"), ("ck", "ck"), (f"file:{tmp_path}/~", "~")):
        log = open_log(f"checkpoint:{given}")
        assert log.address == f"checkpoint:{tmp_path}/{path}"
        assert (tmp_path / path / "sparkonce-log" / "log.json").is_file()


def test_copies_of_a_pipelines_folder_are_no_pipelines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator's; whoever opens one by its name is told what it is."""
    root = tmp_path / "sparkonce-log"
    log = DocumentLog(FolderPlace(LocalFolder(root)))
    log.begin(claim())
    for copy in ("orders.bak", "orders-old"):
        shutil.copytree(root / "orders", root / copy)
    assert log.pipelines() == ["orders"]
    assert "orders-old" in caplog.text
    assert "'orders'" in caplog.text
    with pytest.raises(LogCorruptError, match="is that of 'orders'"):
        log.head("orders-old")


def test_listing_that_lags(tmp_path: Path) -> None:
    """Whether the swap is the newest is not known then."""
    with pytest.raises(DecisionUnknownError):
        FolderPlace(LaggingFolder(tmp_path)).swap("orders/head", None, "{}")
