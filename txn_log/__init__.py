"""The transaction log: `open_log` takes the ``log=`` of a pipeline."""

from __future__ import annotations

import re
from pathlib import Path

from sparkonce.errors import ConfigurationError
from sparkonce.txn_log.base import TransactionLog
from sparkonce.txn_log.document import DocumentLog
from sparkonce.txn_log.folder import FolderPlace, LocalFolder, check_create
from sparkonce.txn_log.sqlite import SqliteLog

__all__ = ["TransactionLog", "open_log"]

_CHECKPOINT = "checkpoint:"
_FOLDER = "sparkonce-log"
_SQLITE = "sqlite:///"
_POSTGRES = ("postgresql://", "postgres://")


def open_log(url: str | TransactionLog) -> TransactionLog:
    """Open a transaction log by its address; created when it is not there.

    Args:
        url: ``sqlite:///relative/path.db`` or ``sqlite:////absolute/path.db``;
            ``postgresql://user@host/database?schema=sparkonce``; a log that is open already is
            returned as it is.

    Raises:
        ConfigurationError: the address is of no known kind, or cannot be used.
        LogUnavailableError: the log's server does not answer.
    """
    if isinstance(url, TransactionLog):
        return url
    if url.startswith(_SQLITE) and len(url) > len(_SQLITE):
        return SqliteLog(url.removeprefix(_SQLITE))
    if url.startswith(_POSTGRES):
        from sparkonce.txn_log.postgres import PostgresLog  # noqa: PLC0415 - an extra

        return PostgresLog(url)
    if url.startswith(_CHECKPOINT) and len(url) > len(_CHECKPOINT):
        return checkpoint_log(url.removeprefix(_CHECKPOINT))
    raise ConfigurationError(
        f"log={_without_secrets(url)!r}: expected sqlite:///relative/path.db, "
        "sqlite:////absolute/path.db or postgresql://host/database"
    )


def checkpoint_log(location: str) -> TransactionLog:
    """The log inside the checkpoint at `location`, a path or a URL."""
    folder = LocalFolder(Path(location) / _FOLDER)
    check_create(folder)
    return DocumentLog(FolderPlace(folder))


def _without_secrets(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//…@", url)
