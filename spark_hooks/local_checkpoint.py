"""A query's checkpoint on a local disk, read without Spark."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sparkonce.errors import ConfigurationError


class LocalCheckpoint:
    """What Spark has written into the folder of one query.

    Args:
        location: a path, or a ``file:`` URL, as Spark shows it.
        query_id: of the query whose checkpoint it must be.

    Raises:
        ConfigurationError: it is not on a local disk, is not there, or is another query's.
    """

    def __init__(self, location: str, query_id: str) -> None:
        url = urlsplit(location)
        if url.scheme not in {"", "file"} or url.netloc not in {"", "localhost"}:
            raise ConfigurationError(f"the checkpoint {location} can be read by Spark only")
        self._root = Path(unquote(url.path) if url.scheme else location)
        try:
            found = json.loads((self._root / "metadata").read_text())["id"]
        except FileNotFoundError:
            raise ConfigurationError(
                f"there is no checkpoint in {self._root} on this machine"
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"{self._root}/metadata cannot be read: {type(error).__name__}"
            ) from error
        if found != query_id:
            raise ConfigurationError(
                f"the checkpoint in {self._root} is of query {found}, not of {query_id}"
            )

    @property
    def location(self) -> str:
        return str(self._root)

    def committed(self) -> int:
        """The highest batch of Spark's commit log; -1 when it is empty."""
        folder = self._root / "commits"
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        return max((int(name) for name in names if name.isdigit()), default=-1)


class UnknownCheckpoint:
    """A checkpoint that cannot be read from here: nothing that depends on it is decided."""

    def __init__(self, location: str) -> None:
        self.location = location

    def committed(self) -> None:
        return None
