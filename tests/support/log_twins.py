"""Broken logs for the failing twins of `LogContract`, and how one of its tests runs on them.

SqliteTwin, FolderTwin ──subclass with one mistake──► .contract ──caught(test)──► must turn red

`contract` is the contract with the faults of the real log; it opens the broken one, also in other
processes.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest

from sparkonce.errors import SparkOnceError
from sparkonce.storage import LocalFolder
from sparkonce.testing import LogContract
from sparkonce.testing.log_under_test import LogUnderTest
from sparkonce.txn_log.base import ResultT, Store
from sparkonce.txn_log.document import DocumentLog
from sparkonce.txn_log.folder import FolderPlace
from sparkonce.txn_log.sqlite import SqliteLog, _SqliteStore
from tests.support.local_logs import FolderUnderTest, SqliteUnderTest, folder_of, path_of

RED = (AssertionError, pytest.fail.Exception, SparkOnceError, sqlite3.Error)
"""How a test of the contract turns red; an error that is no assertion must have a known text."""


def _contract(twin: Any, of: type[LogUnderTest]) -> type[LogContract]:
    """The contract for the twin; other processes find it as an attribute of the twin."""
    name = f"{twin.__qualname__}.contract"
    values = {"open_log": staticmethod(twin.at), "secrets": twin.secrets, "long_history": 200}
    return type(
        "contract",
        (of, LogContract),
        {**values, "__module__": twin.__module__, "__qualname__": name},
    )


class SqliteTwin(SqliteLog):
    """A log in SQLite. A subclass makes the mistake, or its `Store` does."""

    contract: ClassVar[type[LogContract]]
    secrets: ClassVar[Sequence[str]] = ()
    Store: ClassVar[type[_SqliteStore]] = _SqliteStore

    def __init_subclass__(cls) -> None:
        cls.contract = _contract(cls, SqliteUnderTest)

    @classmethod
    def at(cls, address: str) -> Self:
        return cls(path_of(address), busy_timeout_s=2.0)

    @staticmethod
    def address_in(folder: Path) -> str:
        return f"sqlite:///{folder}/txn.db"

    def _read(self, question: Callable[[Store], ResultT]) -> ResultT:
        with self._lock, self._named_errors():
            return question(self.Store(self._connect(), self.address))

    def _write(self, step: Callable[[Store], ResultT]) -> ResultT:
        with self._transaction() as connection:
            return step(self.Store(connection, self.address))


class DeletingStore(_SqliteStore):
    """Forgets by one statement. A subclass says which records it deletes."""

    deleted: ClassVar[str]
    """SQL over the columns of a record, with :pipeline, :query_id and :below."""

    def forget(self, pipeline: str, query_id: str, below: int) -> None:
        self._connection.execute(
            f"DELETE FROM sparkonce_records WHERE {self.deleted}",
            {"pipeline": pipeline, "query_id": query_id, "below": below},
        )


class FolderTwin(DocumentLog):
    """A log in a folder of a local disk. A subclass makes the mistake."""

    contract: ClassVar[type[LogContract]]
    secrets: ClassVar[Sequence[str]] = ()

    def __init_subclass__(cls) -> None:
        cls.contract = _contract(cls, FolderUnderTest)

    @classmethod
    def at(cls, address: str) -> Self:
        return cls(FolderPlace(LocalFolder(folder_of(address))))

    @staticmethod
    def address_in(folder: Path) -> str:
        return f"checkpoint:{folder}/ckpt"


Twin = type[SqliteTwin] | type[FolderTwin]


def caught(
    twin: Twin, test: Callable[..., None], folder: Path, says: str | None, **arguments: object
) -> None:
    """Run a test of the contract on the broken log: it must fail, and say why."""
    contract, address = twin.contract(), twin.address_in(folder)
    wanted = signature(test).parameters
    given: dict[str, Any] = {"address": address, "tmp_path": folder}
    with ExitStack() as stack:
        for name in {"log", "other"} & wanted.keys():
            given[name] = stack.enter_context(closing(contract.open_log(address)))
        given = {name: value for name, value in given.items() if name in wanted}
        with pytest.raises(RED if says else RED[:2], match=says):
            test(contract, **given, **arguments)
