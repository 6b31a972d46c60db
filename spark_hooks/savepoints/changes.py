"""How the files of a restored checkpoint differ from those of the savepoint.

metadata                   the query id of a fork
state/0/_metadata/v2/0     where the checkpoint is: transformWithState keeps absolute paths
sources/0/3                where the input is, if the folder of a file source has moved
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from sparkonce.errors import SavepointError

METADATA: Final = "metadata"
_SCHEMAS: Final = re.compile(r"state/[0-9]+/_metadata/v2/[0-9]+")
_BEFORE: Final = re.compile(r".*?(?=/state/[0-9]+/_stateSchema/)")
_SOURCES: Final = "sources/"
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
_NO_HOST: Final = re.compile(r"(?!file:)[^:]+:///")
_ENCODED: Final = re.compile(r'[ "#?<>\\^`{|}\[\]]')
_SHOWN: Final = 2


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes of a checkpoint's files on their way out of a savepoint.

    Attributes:
        query_id: of the query that will use the checkpoint.
        location: of the new checkpoint.
        source_paths: folders of input files, as the savepoint has them, and where they are now.
    """

    query_id: str
    location: str
    source_paths: Mapping[str, str] = field(default_factory=dict)

    def applied(self, name: str, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """The new content of a file."""
        if name == METADATA:
            text = json.loads(b"".join(pieces))
            yield json.dumps({**text, "id": self.query_id}, separators=(",", ":")).encode()
        elif _SCHEMAS.fullmatch(name):
            yield self._moved(b"".join(pieces).decode()).encode()
        elif self.source_paths and name.startswith(_SOURCES):
            moved = [(_as_spark_writes(old), new) for old, new in self.source_paths.items()]
            moved.sort(key=lambda pair: len(pair[0]), reverse=True)
            lines = b"".join(pieces).decode().splitlines()
            yield "\n".join(_with_new_path(line, moved) for line in lines).encode()
        else:
            yield from pieces

    def check_source_paths(
        self, names: Iterable[str], content: Callable[[str], Iterable[bytes]]
    ) -> None:
        """Refuse new places of the input that no file would have.

        Args:
            names: of the savepoint's files.
            content: gives a file's bytes.

        Raises:
            SavepointError: a new place is no URL, or no input file was at the old one.
        """
        for new in self.source_paths.values():
            if not _URL.match(new):
                raise SavepointError(f"--source-path: {new} is no URL: write it as file://{new}")
            if _NO_HOST.match(new):
                raise SavepointError(f"--source-path: {new} names no host: write it as Spark does")
        logs = (b"".join(content(name)) for name in names if name.startswith(_SOURCES))
        entries = (_file_in(line) for log in logs for line in log.decode().splitlines())
        known = [entry["path"] for entry in entries if entry is not None]
        for old in self.source_paths:
            if not any(_is_below(path, _as_spark_writes(old)) for path in known):
                raise SavepointError(
                    f"--source-path: no input file is below {old}: in the savepoint they are such "
                    f"as {', '.join(known[:_SHOWN]) or 'none'}"
                )

    def _moved(self, text: str) -> str:
        version, _, body = text.partition("\n")
        operator = json.loads(body)
        for store in operator.get("stateStoreInfo") or ():
            store["stateSchemaFilePaths"] = [
                _BEFORE.sub(lambda _: _as_url(self.location), path, count=1)
                for path in store.get("stateSchemaFilePaths") or ()
            ]
        return f"{version}\n{json.dumps(operator, separators=(',', ':'))}"


def _with_new_path(line: str, moved: Iterable[tuple[str, str]]) -> str:
    """A line of a file source's log, for folders that have moved, the longest first."""
    entry = _file_in(line)
    if entry is None:
        return line
    for old, new in moved:
        if _is_below(entry["path"], old):
            entry["path"] = _as_spark_writes(
                new + _as_spark_writes(entry["path"]).removeprefix(old)
            )
            break
    return json.dumps(entry, separators=(",", ":"))


def _file_in(line: str) -> dict[str, Any] | None:
    """The file that a line in the log of a file source names; None if it names none."""
    entry = json.loads(line) if line.startswith("{") else None
    return entry if isinstance(entry, dict) and "path" in entry else None


def _as_spark_writes(url: str) -> str:
    """A path as Spark notes it in its log of files: `file:///in` for `file:/in/`.

    Spark knows an input file by this text alone.
    """
    scheme, _, rest = url.partition(":")
    host, _, path = rest[2:].partition("/") if rest.startswith("//") else ("", "", rest)
    path = re.sub("/+", "/", f"/{path}").rstrip("/")
    path = _ENCODED.sub(lambda found: f"%{ord(found[0]):02X}", path)
    return f"{scheme}:{f'//{host}' if host or scheme == 'file' else ''}{path}"


def _is_below(path: str, folder: str) -> bool:
    """Whether a file is in the folder, as `_as_spark_writes` gives that, or in one below it."""
    return _as_spark_writes(path).startswith(f"{folder}/")


def _as_url(location: str) -> str:
    return f"file:{location}" if location.startswith("/") else location
