"""The transaction log in a checkpoint's folder, on a local disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sparkonce.errors import LogUnavailableError
from sparkonce.testing.log_contract import LogContract
from sparkonce.txn_log import TransactionLog
from sparkonce.txn_log.document import DocumentLog
from sparkonce.txn_log.folder import FolderPlace, LocalFolder


def folder_of(address: str) -> Path:
    return Path(address.removeprefix("checkpoint:")) / "sparkonce-log"


class SilentFolder(LocalFolder):
    """Its first swap lands and is not answered."""

    is_silent = True

    def names(self, folder: str) -> list[str]:
        found = list(super().names(folder))
        if self.is_silent and folder.endswith("/head") and self._has_created:
            self.is_silent = False
            raise LogUnavailableError("the disk went away")
        return found

    _has_created = False

    def create(self, name: str, text: str) -> bool:
        created = super().create(name, text)
        self._has_created = self._has_created or (created and "/head/" in name)
        return created


class TestCheckpointLog(LogContract):
    @pytest.fixture
    def address(self, tmp_path: Path) -> str:
        return f"checkpoint:{tmp_path}/ckpt"

    def damage(self, address: str, old: str, new: str) -> None:
        for path in folder_of(address).rglob("*.json"):
            if path.name != "log.json":
                path.write_text(path.read_text().replace(old, new))

    @contextmanager
    def losing_the_answer(self, address: str) -> Iterator[TransactionLog]:
        yield DocumentLog(FolderPlace(SilentFolder(folder_of(address))))

    @contextmanager
    def out_of_reach(self, address: str) -> Iterator[None]:
        """Where the folder was is a file: even a superuser can do nothing there."""
        folder = folder_of(address)
        aside = folder.with_name("aside")
        folder.rename(aside)
        folder.write_text("")
        yield
        folder.unlink()
        aside.rename(folder)

    def stored_bytes(self, address: str) -> int:
        return sum(path.stat().st_size for path in folder_of(address).rglob("*.json"))
