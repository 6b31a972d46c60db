"""Where a `DocumentLog` keeps its documents; `FolderPlace` and `ObjectPlace` implement it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

Version = str | int


class Found(NamedTuple):
    """A document as it was read; `text` is None when the reader already knows that version."""

    version: Version
    text: str | None


class Place(Protocol):
    """Where documents are kept; names are paths with /. Every write is durable and whole.

    All methods may raise `LogUnavailableError`, and those that write `DecisionUnknownError`.
    """

    @property
    def address(self) -> str: ...

    def close(self) -> None: ...

    def create(self, name: str, text: str) -> bool:
        """Write a document that does not exist yet; False, and no change, when it does."""

    def read(self, name: str) -> str | None: ...

    def names(self, folder: str) -> Sequence[str]:
        """The names of all documents at any depth below `folder`; of all, if it is empty."""

    def delete(self, names: Iterable[str]) -> None: ...

    def load(self, name: str, known: Version | None) -> Found | None:
        """Read the current version of a swapped document; None only if it is proven absent."""

    def swap(self, name: str, seen: Version | None, text: str) -> Version | None:
        """Replace the document if it has the version that was seen, or is new.

        Returns:
            The new version; None, and no change, when another writer was faster.
        """
