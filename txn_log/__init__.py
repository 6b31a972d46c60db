"""The transaction log: `open_log` takes the ``log=`` of a pipeline."""

from __future__ import annotations

from sparkonce.errors import ConfigurationError
from sparkonce.txn_log.base import TransactionLog
from sparkonce.txn_log.sqlite import SqliteLog

__all__ = ["TransactionLog", "open_log"]

_SQLITE = "sqlite:///"


def open_log(url: str | TransactionLog) -> TransactionLog:
    """Open a transaction log by its address; created when it is not there.

    Args:
        url: ``sqlite:///relative/path.db`` or ``sqlite:////absolute/path.db``; a log that is open
            already is returned as it is.

    Raises:
        ConfigurationError: the address is of no known kind, or cannot be used.
    """
    if isinstance(url, TransactionLog):
        return url
    if url.startswith(_SQLITE) and len(url) > len(_SQLITE):
        return SqliteLog(url.removeprefix(_SQLITE))
    raise ConfigurationError(
        f"log={url!r}: expected sqlite:///relative/path.db or sqlite:////absolute/path.db"
    )
