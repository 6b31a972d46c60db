"""The interface of a folder, wherever it is.

A file appears whole and never changes. Names are paths with `/`, relative to the folder. A name
whose last part begins with a dot is hidden: folders use such names for files that are not complete
yet, and never list them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Protocol

PIECE_BYTES: Final = 4 << 20


class Folder(Protocol):
    """A place for files.

    All methods may raise `LogUnavailableError` (nothing was changed; try again). `create` may raise
    `DecisionUnknownError` (the file may have been created; look again). `read` may raise
    `LogCorruptError` (the file is not text).
    """

    @property
    def address(self) -> str:
        """Where the folder is, without secrets; for messages."""

    def create(self, name: str, text: str) -> bool:
        """Create a file, whole and durable, with its parent folders; False if it exists."""

    def read(self, name: str) -> str | None:
        """The text of a file; None if it does not exist."""

    def names(self, folder: str) -> Sequence[str]:
        """All files at any depth below `folder`; below this folder if `folder` is empty."""

    def delete(self, name: str) -> None:
        """Remove a file; no error if it does not exist."""


class FileSystemFolder(Folder, Protocol):
    """A folder of a file system, where others may write too, as Spark does in its checkpoint."""

    @property
    def location(self) -> str:
        """Where the folder is, in full, as its file system writes it."""

    def exists(self, name: str) -> bool:
        """Whether there is a file or a folder of this name."""

    def files(self, folder: str) -> Sequence[str]:
        """The last parts of the names directly in `folder`; empty if it does not exist."""

    def read_end(self, name: str, most_bytes: int) -> str | None:
        """The last `most_bytes` bytes of a file as text; None if it does not exist.

        The first character may be damaged, because the cut may fall within it.
        """

    def pieces(self, name: str) -> Iterator[bytes] | None:
        """The bytes of a file, piece by piece; None if it does not exist.

        Each piece may raise `LogUnavailableError`, also because the file was deleted meanwhile.
        """

    def store(self, name: str, pieces: Callable[[], Iterable[bytes]]) -> None:
        """Create a file of bytes, whole and durable, with its parent folders.

        A file that exists is left as it is, and must have the same bytes. If the write is repeated,
        `pieces` is called again.
        """
