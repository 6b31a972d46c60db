"""Documents in a folder of a file system that can create a file atomically, and nothing more.

    ROOT/orders/head/00000000000000000041.json     what is swapped is a sequence of files:
                    /00000000000000000042.json     the highest number counts

A swap creates the next number, if it is not there. Old numbers are removed, so a writer that stood
still for long finds its number free again, and creates a file in the past. Therefore it looks at
the folder after that: unless its number is the highest, its write did not count, or has been
followed already, and the log has to be read again. The highest file is always that of the last
write that counted, whatever lies below it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from errno import EACCES, EEXIST, ENAMETOOLONG, ENOTDIR, EPERM, EROFS
from pathlib import Path
from typing import Protocol, TypeVar

from sparkonce.errors import (
    ConfigurationError,
    DecisionUnknownError,
    LogCorruptError,
    LogUnavailableError,
)
from sparkonce.failpoints import reach
from sparkonce.txn_log.document import Found, Version

ResultT = TypeVar("ResultT")

_MOST_FILES = 16
_KEPT_FILES = 8
_MOST_READS = 16
_RACERS = 8
_RACES = 12
_START_S = 30.0
_LASTING = frozenset({EACCES, EPERM, EROFS, ENOTDIR, EEXIST, ENAMETOOLONG})
"""Errors of the place or of our rights there; a full disk may be emptied."""


class Folder(Protocol):
    """A folder on some file system; names are paths with /.

    All methods may raise `LogUnavailableError`: nothing was changed. `create` may raise
    `DecisionUnknownError`.
    """

    @property
    def address(self) -> str: ...

    def create(self, name: str, text: str) -> bool:
        """Make a file, whole and durable, with its folders; False when it exists."""

    def read(self, name: str) -> str | None: ...

    def names(self, folder: str) -> Sequence[str]:
        """Of all files somewhere below the folder, but hidden ones."""

    def delete(self, name: str) -> None:
        """Remove a file; no error when it is gone."""


class FolderPlace:
    """Documents in a `Folder`; see `sparkonce.txn_log.document.Place`."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    @property
    def address(self) -> str:
        return self._folder.address

    def close(self) -> None:
        pass

    def create(self, name: str, text: str) -> bool:
        return self._folder.create(name, text)

    def read(self, name: str) -> str | None:
        return self._folder.read(name)

    def names(self, folder: str) -> Sequence[str]:
        return self._folder.names(folder)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self._folder.delete(name)

    def load(self, name: str, known: Version | None) -> Found | None:
        for _ in range(_MOST_READS):  # others may have removed the file since it was listed
            numbers = self._numbers(name)
            if not numbers:
                return None
            if numbers[-1] == known:
                return Found(known, None)
            reach("log.before", request="read")
            text = self._folder.read(_file(name, numbers[-1]))
            if text is not None:
                return Found(numbers[-1], text)
        raise LogUnavailableError(
            f"{self.address}: {_file(name, numbers[-1])} is listed there, and reading it says that "
            "it is not there; nothing was written. If that stays (a link into nowhere, half a "
            "restore), stop the query and restore it from a whole copy that has the newest batch "
            "(docs/operations.md, LogCorruptError); do not delete it, or an older file counts"
        )

    def swap(self, name: str, seen: Version | None, text: str) -> Version | None:
        number = int(seen or 0) + 1
        reach("log.before", request="create")
        if not self._folder.create(_file(name, number), text):
            return None
        try:
            numbers = self._numbers(name)
        except LogUnavailableError as error:
            raise DecisionUnknownError(
                f"{self.address} went away while it was written to; read the log again"
            ) from error
        reach("log.after", request="create")
        if numbers[-1] != number:
            raise DecisionUnknownError(
                f"{self.address}: others wrote at the same time; read the log again"
            )
        if len(numbers) > _MOST_FILES:
            with contextlib.suppress(LogUnavailableError):
                self.delete(_file(name, old) for old in numbers[:-_KEPT_FILES])
        return number

    def _numbers(self, name: str) -> list[int]:
        reach("log.before", request="list")
        # Beside ours there may be an operator's copy of one.
        ours = re.compile(rf"(?:.*/)?{re.escape(name)}/([0-9]{{20}})\.json", re.DOTALL)
        found = map(ours.fullmatch, self._folder.names(name))
        return sorted(int(match[1]) for match in found if match)


def check_create(folder: Folder) -> None:
    """Race for some files: of all who create one at the same time, one alone may succeed.

    Raises:
        ConfigurationError: the file system cannot do it; it names the way out.
    """
    race = f"probe-{secrets.token_hex(8)}"
    gate = threading.Barrier(_RACERS, timeout=_START_S)  # one may find no thread to run in

    def create(racer: int, name: str) -> bool:
        gate.wait()
        return folder.create(name, str(racer))

    winners = []
    with ThreadPoolExecutor(_RACERS) as pool:
        for number in range(_RACES):
            name = f"{race}-{number}.json"
            winners.append(sum(pool.map(create, range(_RACERS), [name] * _RACERS)))
            folder.delete(name)
    if winners != [1] * _RACES:
        raise ConfigurationError(
            f"{folder.address}: of {_RACERS} who created one file at the same time, up to "
            f"{max(winners)} were told that they had. A transaction log there would let two "
            "drivers decide; use log=postgresql://…, s3://… or sqlite:///…"
        )


class LocalFolder:
    """A folder of this machine: a file is written aside and linked to its name, which is atomic.

    Args:
        root: the folder.
        address: for messages; default: that of the checkpoint around it.
        create: make it when it is not there.
        mode: of its files, before the umask.

    Raises:
        ConfigurationError: it cannot be created there.
        LogUnavailableError: it cannot be created now.
    """

    def __init__(
        self, root: Path, address: str = "", *, create: bool = True, mode: int = 0o600
    ) -> None:
        self._root = root
        self._mode = mode
        self._address = address or f"checkpoint:{root.parent}"
        try:
            if create:
                _make_folders(root)
        except OSError as error:
            kind = ConfigurationError if error.errno in _LASTING else LogUnavailableError
            raise kind(f"the folder {root} cannot be made ({error})") from error

    @property
    def address(self) -> str:
        return self._address

    def create(self, name: str, text: str) -> bool:
        path = self._root / name
        hidden = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")

        def make() -> bool:
            _make_folders(path.parent)
            descriptor = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self._mode)
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                try:
                    os.link(hidden, path)
                except FileExistsError:
                    return False
            finally:
                hidden.unlink(missing_ok=True)
            return True

        if not self._try(make):
            return False
        try:
            _sync_folder(path.parent)
        except OSError as error:
            raise DecisionUnknownError(
                f"{path} may not be on the disk ({error}); read the log again"
            ) from error
        return True

    def read(self, name: str) -> str | None:
        def read() -> str | None:
            try:
                return (self._root / name).read_text(encoding="utf-8")
            except FileNotFoundError:
                return None

        try:
            return self._try(read)
        except UnicodeDecodeError as error:
            raise LogCorruptError(
                f"{self._root / name} is no text; restore the transaction log from a copy"
            ) from error

    def names(self, folder: str) -> Sequence[str]:
        # One reading of the folder; what is below it has folders of its own.
        return self._try(
            lambda: [
                str(Path(parent, file).relative_to(self._root))
                for parent, _, files in os.walk(self._root / folder, onerror=_unless_absent)
                for file in files
                if file.endswith(".json") and not file.startswith(".")
            ]
        )

    def delete(self, name: str) -> None:
        self._try(lambda: (self._root / name).unlink(missing_ok=True))

    def _try(self, action: Callable[[], ResultT]) -> ResultT:
        try:
            return action()
        except OSError as error:
            raise LogUnavailableError(
                f"{self.address} cannot be used now ({error}), nothing was written; check the disk "
                "and its rights"
            ) from error


def _unless_absent(error: OSError) -> None:
    """What cannot be read is not empty."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _make_folders(folder: Path) -> None:
    """Make it with its parents, so that they are on the disk before anything is in them."""
    if not folder.is_dir():
        _make_folders(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _file(name: str, number: int) -> str:
    return f"{name}/{number:020d}.json"
