"""What a power cut would leave: the order in which files and folders become lasting."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


class Disk:
    """Notes what is synced and what gets a name, from now on.

    Attributes:
        done: "sync NAME" of a file or folder, "name NAME" of a link, a rename or a new folder.
        fails: name of the file or folder whose next sync fails.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.fails: str | None = None
        self._synced: dict[int, bytes] = {}
        self._fsync = os.fsync
        patch.setattr(os, "fsync", self._sync)
        for call in ("link", "rename", "mkdir"):
            patch.setattr(os, call, self._naming(getattr(os, call)))

    def holds(self, path: Path) -> bool:
        """Whether all bytes of the file were there when it was synced."""
        return self._synced.get(path.stat().st_ino) == path.read_bytes()

    def _sync(self, descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.name == self.fails:
            self.fails = None
            raise OSError(f"{path.name} cannot be synced")
        self._fsync(descriptor)
        self.done.append(f"sync {path.name}")
        if path.is_file():
            self._synced[path.stat().st_ino] = path.read_bytes()

    def _naming(self, call: Any) -> Any:
        def naming(*paths: Any, **more: Any) -> None:
            call(*paths, **more)
            named = paths[-1] if call.__name__ != "mkdir" else paths[0]
            self.done.append(f"name {Path(named).name}")

        return naming
