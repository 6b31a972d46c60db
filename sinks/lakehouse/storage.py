"""The files of a table, wherever they are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyarrow import fs

from sparkonce.parallel import MAX_THREADS, at_once


@dataclass(frozen=True)
class Stored:
    """A file in a folder."""

    name: str
    bytes: int


class Storage:
    """Files at locations that mean something to the table's format.

    Args:
        at: the file system and the path of a location.
    """

    def __init__(self, at: Callable[[str], tuple[fs.FileSystem, str]]) -> None:
        self._at = at

    def files(self, folder: str) -> Iterator[Stored]:
        """List the files of a folder; none if it does not exist."""
        system, path = self._at(folder)
        for info in system.get_file_info(fs.FileSelector(path, allow_not_found=True)):
            if info.is_file:
                yield Stored(info.base_name, info.size)

    def exists(self, location: str) -> bool:
        system, path = self._at(location)
        return bool(system.get_file_info(path).is_file)

    def read(self, location: str) -> bytes:
        """Read a file.

        Raises:
            FileNotFoundError: it does not exist.
        """
        system, path = self._at(location)
        with system.open_input_file(path) as file:
            return bytes(file.read())

    def create(self, location: str) -> pa.NativeFile:
        """Open a file for writing; one of that name is replaced."""
        system, path = self._at(location)
        return system.open_output_stream(path)

    def write(self, location: str, content: bytes) -> None:
        """Write a file; one of that name is replaced."""
        with self.create(location) as file:
            file.write(content)

    def remove_folder(self, location: str) -> None:
        """Delete a folder with all that is in it."""
        system, path = self._at(location)
        for info in system.get_file_info(
            fs.FileSelector(path, recursive=True, allow_not_found=True)
        ):
            if info.is_file:
                system.delete_file(info.path)
        with contextlib.suppress(OSError):  # some servers do not delete the names of folders
            system.delete_dir(path)

    def remove_all(self, locations: Iterable[str]) -> None:
        """Delete files that may be gone already; in a bucket, several at a time."""
        names = list(locations)
        if not names:
            return
        is_local = isinstance(self._at(names[0])[0], fs.LocalFileSystem)
        threads = 1 if is_local else min(MAX_THREADS, len(names))
        at_once(self._remove_each, [names[n::threads] for n in range(threads)])

    def _remove_each(self, locations: Iterable[str]) -> None:
        for location in locations:
            self.remove(location)

    def remove(self, location: str) -> None:
        """Delete a file that may be gone already."""
        system, path = self._at(location)
        try:
            system.delete_file(path)
        except FileNotFoundError:
            return
