"""A folder on a local disk: a file is written under a hidden name, then linked to its own name.

.1.json.8f0c….tmp ── fsync ──► link to 1.json, which fails if 1.json exists ── fsync the folder
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from errno import EACCES, EEXIST, ENAMETOOLONG, ENOTDIR, EPERM, EROFS
from pathlib import Path
from typing import IO, BinaryIO, Final, TypeVar

from sparkonce.errors import (
    ConfigurationError,
    DecisionUnknownError,
    LogCorruptError,
    LogUnavailableError,
)
from sparkonce.storage.base import PIECE_BYTES

ResultT = TypeVar("ResultT")

_PERMANENT: Final = frozenset({EACCES, EPERM, EROFS, ENOTDIR, EEXIST, ENAMETOOLONG})
"""Errors of the path or of our permissions; any other, such as a full disk, may pass."""

_FILE_URL: Final = re.compile(r"file:(?://(?:localhost)?(?=/)|(?!//))(/.*)", re.DOTALL)


def local_path(location: str) -> Path | None:
    """The path of a location on a local disk; None for a location elsewhere.

    Spark and Hadoop unquote nothing in a location: a %, a # or a ? is part of a name.

    Raises:
        ConfigurationError: it begins with ~ and a user that this machine does not know.
    """
    if match := _FILE_URL.fullmatch(location):
        return Path(f"/{match[1].lstrip('/')}")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", location):
        return None
    return expanded(location)


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path, with a leading ~ or ~user replaced by that user's home.

    Raises:
        ConfigurationError: this machine does not know the user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigurationError(
            f"{path}: this machine knows no home of {Path(path).parts[0]}: give the full path"
        ) from error


class LocalFolder:
    """A folder on a local disk; see `sparkonce.storage.base.FileSystemFolder`.

    `address` is for messages, and is the path by default; `mode` applies to new files, before the
    umask.

    Raises:
        ConfigurationError: the folder cannot be created there.
        LogUnavailableError: the folder cannot be created now, as on a full disk.
    """

    def __init__(
        self, root: Path, address: str = "", *, create: bool = True, mode: int = 0o600
    ) -> None:
        self._root = root
        self._mode = mode
        self._address = address or str(root)
        try:
            if create:
                _make_folders(root)
        except OSError as error:
            kind = ConfigurationError if error.errno in _PERMANENT else LogUnavailableError
            raise kind(f"the folder {root} cannot be created ({error})") from error

    @property
    def address(self) -> str:
        return self._address

    @property
    def location(self) -> str:
        return str(self._root)

    def create(self, name: str, text: str) -> bool:
        path = self._root / name
        if not self._try(lambda: self._link(path, lambda: [text.encode()])):
            return False
        try:
            fsync_folder(path.parent)
        except OSError as error:
            raise DecisionUnknownError(
                f"{path} may not be on the disk ({error}); read the log again"
            ) from error
        return True

    def store(self, name: str, pieces: Callable[[], Iterable[bytes]]) -> None:
        path = self._root / name
        if not self.exists(name):
            self._try(lambda: self._link(path, pieces))
        self._try(lambda: fsync_folder(path.parent))

    def _link(self, path: Path, pieces: Callable[[], Iterable[bytes]]) -> bool:
        _make_folders(path.parent)
        hidden = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        descriptor = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self._mode)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.writelines(pieces())
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(hidden, path)
            except FileExistsError:
                return False
        finally:
            # A hidden file that stays is harmless; the link decides about the file.
            with contextlib.suppress(OSError):
                hidden.unlink()
        return True

    def read(self, name: str) -> str | None:
        try:
            return self._unless_missing(lambda: (self._root / name).read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise LogCorruptError(
                f"{self._root / name} is not text; restore it from a copy"
            ) from error

    def read_end(self, name: str, most_bytes: int) -> str | None:
        def read() -> str:
            with (self._root / name).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - most_bytes))
                return file.read().decode(errors="replace")

        return self._unless_missing(read)

    def pieces(self, name: str) -> Iterator[bytes] | None:
        file = self._unless_missing(lambda: (self._root / name).open("rb"))
        return None if file is None else self._pieces_of(file)

    def _pieces_of(self, file: BinaryIO) -> Iterator[bytes]:
        with file:
            while piece := self._try(lambda: file.read(PIECE_BYTES)):
                yield piece

    def exists(self, name: str) -> bool:
        return self._unless_missing((self._root / name).stat) is not None

    def files(self, folder: str) -> Sequence[str]:
        def scan() -> list[str]:
            with os.scandir(self._root / folder) as entries:
                return [entry.name for entry in entries if entry.is_file()]

        return self._unless_missing(scan) or ()

    def names(self, folder: str) -> Sequence[str]:
        return self._try(
            lambda: [
                str(Path(parent, file).relative_to(self._root))
                for parent, _, files in os.walk(self._root / folder, onerror=_unless_absent)
                for file in files
                if not file.startswith(".")
            ]
        )

    def delete(self, name: str) -> None:
        self._try(lambda: (self._root / name).unlink(missing_ok=True))

    def _unless_missing(self, action: Callable[[], ResultT]) -> ResultT | None:
        def ask() -> ResultT | None:
            try:
                return action()
            except FileNotFoundError:
                return None

        return self._try(ask)

    def _try(self, action: Callable[[], ResultT]) -> ResultT:
        try:
            return action()
        except OSError as error:
            raise LogUnavailableError(
                f"{self.address} cannot be used now ({error}), nothing was written; check the disk "
                "and its permissions"
            ) from error


def _unless_absent(error: OSError) -> None:
    """Raise the error, unless the folder does not exist: an unreadable folder is not empty."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _make_folders(folder: Path) -> None:
    """Create the folder and its parents, each durable before anything is put into it."""
    if not folder.is_dir():
        _make_folders(folder.parent)
        folder.mkdir(exist_ok=True)
        fsync_folder(folder.parent)


def fsync_folder(folder: Path) -> None:
    """Make new names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def close_durably(file: IO[bytes], folder: Path) -> None:
    """Close a new file of `folder`, and make its bytes and its name durable."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    fsync_folder(folder)


def is_there(path: Path) -> bool:
    """Whether the file exists. `Path.exists` would take any error for "no" (Python 3.14)."""
    try:
        path.stat()
    except FileNotFoundError:
        return False
    return True
