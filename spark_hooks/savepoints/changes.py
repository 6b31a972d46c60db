"""How the files of a restored checkpoint differ from those of the savepoint.

metadata                   the query id of a fork
state/0/_metadata/v2/0     where the checkpoint is: transformWithState keeps absolute paths
sources/0/3                where the input is, if the folder of a file source has moved
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

METADATA: Final = "metadata"
_SCHEMAS: Final = re.compile(r"state/[0-9]+/_metadata/v2/[0-9]+")
_BEFORE: Final = re.compile(r".*?(?=/state/[0-9]+/_stateSchema/)")
_SOURCES: Final = "sources/"


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes of a checkpoint's files on their way out of a savepoint.

    Attributes:
        query_id: of the query that will use the checkpoint.
        location: of the new checkpoint.
        source_paths: beginnings of the paths of input files, as the savepoint has them, and what
            they are now.
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
            lines = b"".join(pieces).decode().splitlines()
            yield "\n".join(map(self._with_new_path, lines)).encode()
        else:
            yield from pieces

    def _moved(self, text: str) -> str:
        version, _, body = text.partition("\n")
        operator = json.loads(body)
        for store in operator.get("stateStoreInfo") or ():
            store["stateSchemaFilePaths"] = [
                _BEFORE.sub(lambda _: _as_url(self.location), path, count=1)
                for path in store.get("stateSchemaFilePaths") or ()
            ]
        return f"{version}\n{json.dumps(operator, separators=(',', ':'))}"

    def _with_new_path(self, line: str) -> str:
        entry = json.loads(line) if line.startswith("{") else None
        if not isinstance(entry, dict) or "path" not in entry:
            return line
        for old, new in self.source_paths.items():
            if entry["path"].startswith(old):
                entry["path"] = new + entry["path"].removeprefix(old)
                break
        return json.dumps(entry, separators=(",", ":"))


def _as_url(location: str) -> str:
    return f"file:{location}" if location.startswith("/") else location
