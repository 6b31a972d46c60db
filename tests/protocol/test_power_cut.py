"""The power is cut at each moment of a batch: what a disk has then, and no more, is started from.

    an ext4 image, mounted ─► a query runs ─► at each fail point: a copy of the image
    each copy, mounted at the same place ─► a start ─► every row once

What was not synced is in no copy: the kernel still has it in memory, and the file system commits
its journal only every five minutes, or when it is asked to.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from sparkonce import failpoints
from sparkonce.errors import SparkOnceError
from tests.support.disk_world import BATCHES, DiskWorld

SIZE = "12M"


class Disk:
    """An image with a file system; its copies are what a power cut leaves."""

    def __init__(self, folder: Path) -> None:
        self.image, self.mounted_at = folder / "image", folder / "disk"
        self.mounted_at.mkdir()
        self.copies: list[tuple[str, Path, int]] = []
        self._numbers = itertools.count()
        _run("truncate", "--size", SIZE, str(self.image))
        _run("mkfs.ext4", "-q", str(self.image))

    @contextmanager
    def mounted(self, image: Path) -> Iterator[None]:
        device = _run("losetup", "--find", "--show", str(image)).strip()
        try:
            _run("mount", "-t", "ext4", "-o", "commit=300", device, str(self.mounted_at))
            try:
                yield
            finally:
                _run("umount", "--lazy", str(self.mounted_at))  # a reader's file may still be open
        finally:
            _run("losetup", "--detach", device)

    def cut(self, moment: str, committed: int) -> None:
        """Note what the disk has now, and which batch Spark has committed."""
        copy = self.image.with_name(f"copy{next(self._numbers)}")  # commits have threads
        _run("cp", "--sparse=always", str(self.image), str(copy))
        self.copies.append((moment, copy, committed))


def _run(*command: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.fixture
def disk() -> Iterator[Disk]:
    """In memory, because each sync of the image would be one of the machine's disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        try:
            disk = Disk(Path(folder))
            with disk.mounted(disk.image):
                pass
        except (AssertionError, OSError) as error:
            pytest.skip(f"no loop devices here: {error}")
        yield disk


def run_with_cuts(disk: Disk, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with disk.mounted(disk.image):
        world = DiskWorld(disk.mounted_at, kind)
        _run("sync", "--file-system", str(disk.mounted_at))  # the user's folders

        def cut(point: str, where: Mapping[str, object]) -> None:
            del where
            disk.cut(point, world.spark.committed)

        with monkeypatch.context() as patch:
            patch.setattr(failpoints, "handler", cut)
            world.deliver(len(BATCHES))
        disk.cut("the end", world.spark.committed)


def go_on(disk: Disk, kind: str, committed: int) -> DiskWorld:
    """Start from a copy; Spark has committed this batch."""
    world = DiskWorld(disk.mounted_at, kind)
    world.spark.committed, world.spark.begun = committed, committed + 1
    world.spark.runs = 1  # the next run has another id than the first one
    world.deliver(len(BATCHES))
    return world


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["sqlite", "checkpoint"])
def test_every_row_is_there_once_after_a_power_cut(
    disk: Disk, kind: str, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_with_cuts(disk, kind, monkeypatch)
    assert len(disk.copies) > 90
    for moment, copy, committed in disk.copies[::-every]:
        with disk.mounted(copy):
            world = go_on(disk, kind, committed)
            assert world.shown() == [world.source()] * 2, (moment, committed)
            assert world.left_over() == [], (moment, committed)


def test_files_that_are_not_synced_are_missed(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would prove nothing."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        run_with_cuts(disk, "sqlite", monkeypatch)
    _, copy, committed = disk.copies[-1]
    with disk.mounted(copy):
        try:
            world = go_on(disk, "sqlite", committed)
            is_missed = world.shown()[0] != world.source()
        except (SparkOnceError, pa.ArrowInvalid):
            is_missed = True
    assert is_missed
