"""A disk that is full, at each write of a batch: real sinks, a real log, a file system of 1 MB.

    n pages, or names for n files, are left ─► a batch fails ─► there is space again ─► a start

For n from none to enough, and from three moments on. Whatever the first driver could not write, the
second delivers, once.
"""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sparkonce.errors import (
    CommitUnresolvedError,
    LogError,
    PrepareRejectedError,
    SparkOnceError,
)
from tests.support.disk_world import BATCHES, DiskWorld
from tests.support.world import at_point

PAGE = 4096
MOST = 400


class FullWorld(DiskWorld):
    def __init__(self, disk: Path, kind: str) -> None:
        super().__init__(disk, kind)
        self.filler = disk / "filler"

    def fill(self, what: str, free: int) -> None:
        """Leave so many pages, or names."""
        if what == "pages":
            os.mknod(self.filler)
            left = os.statvfs(self.disk).f_bavail - free
            with self.filler.open("wb") as file:
                file.write(bytes(left * PAGE))
        else:
            self.filler.mkdir()
            for number in range(os.statvfs(self.disk).f_favail - free):
                os.mknod(self.filler / str(number))

    def free(self) -> None:
        if self.filler.is_file():
            self.filler.unlink()
        else:
            for path in self.filler.iterdir():
                path.unlink()
            self.filler.rmdir()


@pytest.fixture
def fresh_disk(tmp_path: Path) -> Iterator[Callable[[], Path]]:
    """A function that mounts an empty file system of one megabyte and 200 names."""
    mounted: list[Path] = []

    def mount() -> Path:
        folder = tmp_path / str(len(mounted))
        folder.mkdir()
        size = ["-o", "size=1m,nr_inodes=200"]
        done = subprocess.run(
            ["mount", "-t", "tmpfs", *size, "tmpfs", str(folder)],  # noqa: S607
            check=False,
            capture_output=True,
        )
        if done.returncode:
            pytest.skip("only root can mount a file system")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)  # noqa: S607


@pytest.mark.parametrize("what", ["pages", pytest.param("names", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["sqlite", "checkpoint"])
@pytest.mark.parametrize(
    ("moment", "error"),
    [
        ("begin.before", LogError),
        ("begin.after", PrepareRejectedError),
        ("decide.after", CommitUnresolvedError),
    ],
)
def test_each_write_of_a_batch_meets_a_full_disk(
    fresh_disk: Callable[[], Path], kind: str, what: str, moment: str, error: type[SparkOnceError]
) -> None:
    """From the moment on; with nothing left, its error is that of the first write that follows."""
    for free in itertools.count():
        assert free < MOST
        world = FullWorld(fresh_disk(), kind)
        world.deliver(1)
        failed: SparkOnceError | None = None
        try:
            with at_point(moment, functools.partial(world.fill, what, free)):
                world.deliver(2)
        except SparkOnceError as raised:
            failed = raised
        if free == 0 and what == "pages":
            assert isinstance(failed, error)
        world.free()
        world.deliver(len(BATCHES))
        assert world.shown() == [world.source()] * 2, (free, failed)
        assert world.left_over() == [], (free, failed)
        if failed is None:
            break
