"""The logs on a local disk under `LogContract`: how to open them, and how they fail."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sparkonce.errors import LogUnavailableError
from sparkonce.storage import LocalFolder
from sparkonce.testing.log_under_test import LogUnderTest
from sparkonce.txn_log import TransactionLog
from sparkonce.txn_log.document import DocumentLog
from sparkonce.txn_log.folder import FolderPlace
from sparkonce.txn_log.sqlite import SqliteLog
from tests.support.sqlite_faults import FailingCommit


def path_of(address: str) -> str:
    return address.removeprefix("sqlite:///")


class SqliteUnderTest(LogUnderTest):
    @pytest.fixture
    def address(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path}/txn.db"

    @staticmethod
    def open_log(address: str) -> TransactionLog:
        return SqliteLog(path_of(address), busy_timeout_s=2.0)

    def damage(self, address: str, old: str, new: str) -> None:
        with sqlite3.connect(path_of(address)) as connection:
            for table in ("records", "heads"):
                connection.execute(
                    f"UPDATE sparkonce_{table} SET body = replace(body, ?, ?)", (old, new)
                )
        connection.close()

    @contextmanager
    def losing_the_answer(self, address: str) -> Iterator[TransactionLog]:
        log = self.open_log(address)
        assert isinstance(log, SqliteLog)
        log._open = FailingCommit(log._connect())  # type: ignore[assignment]
        yield log

    @contextmanager
    def out_of_reach(self, address: str) -> Iterator[None]:
        """Another process holds the lock."""
        holder = sqlite3.connect(path_of(address), isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        yield
        holder.execute("ROLLBACK")
        holder.close()

    def remove(self, address: str) -> None:
        for path in Path(path_of(address)).parent.glob("txn.db*"):
            path.unlink()

    def stored_bytes(self, address: str) -> int:
        connection = sqlite3.connect(path_of(address))
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.close()
        return Path(path_of(address)).stat().st_size


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


class FolderUnderTest(LogUnderTest):
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

    def remove(self, address: str) -> None:
        shutil.rmtree(folder_of(address))

    def stored_bytes(self, address: str) -> int:
        return sum(path.stat().st_size for path in folder_of(address).rglob("*.json"))
