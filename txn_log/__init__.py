"""The transaction log: `open_log` takes the ``log=`` of a pipeline."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from sparkonce.errors import ConfigurationError
from sparkonce.paths import expanded
from sparkonce.txn_log.base import TransactionLog
from sparkonce.txn_log.document import DocumentLog
from sparkonce.txn_log.folder import Folder, FolderPlace, LocalFolder, check_create
from sparkonce.txn_log.moving import copy
from sparkonce.txn_log.sqlite import SqliteLog

__all__ = [
    "IN_CHECKPOINT",
    "TransactionLog",
    "checkpoint_folder",
    "checkpoint_log",
    "copy",
    "local_path",
    "open_log",
    "without_making",
]

IN_CHECKPOINT = "checkpoint"
"""What `ExactlyOnce` takes as ``log=`` for the log inside its query's checkpoint."""

_may_create = ContextVar("may_create", default=True)

_CHECKPOINT = "checkpoint:"
_FOLDER = "sparkonce-log"
_SQLITE = "sqlite:///"
_S3 = "s3://"
_POSTGRES = ("postgresql://", "postgres://")


def open_log(url: str | TransactionLog, *, create: bool = True) -> TransactionLog:
    """Open a transaction log by its address.

    Args:
        url: ``sqlite:///relative/path.db`` or ``sqlite:////absolute/path.db``;
            ``postgresql://user@host/database?schema=sparkonce``;
            ``s3://bucket/prefix?endpoint_url=…&region=…&path_style=true``;
            ``checkpoint:/path/of/the/checkpoint`` or ``checkpoint:hdfs://…``. A log that is open
            already is returned as it is.
        create: make the log when it is not there. False is for who looks at a log: a typing error
            in the address would make another.

    Raises:
        ConfigurationError: the address is of no known kind, or cannot be used; there is no log,
            and none may be made.
        LogUnavailableError: the log's server does not answer.
    """
    if isinstance(url, TransactionLog):
        return url
    create = create and _may_create.get()
    if url == IN_CHECKPOINT:
        raise ConfigurationError(
            'log="checkpoint" is opened by the query that has the checkpoint; give its location: '
            "checkpoint:/path/of/the/checkpoint"
        )
    if url.startswith(_SQLITE) and len(url) > len(_SQLITE):
        return SqliteLog(url.removeprefix(_SQLITE), create=create)
    if url.startswith(_POSTGRES):
        with _extra("postgres"):
            from sparkonce.txn_log.postgres import PostgresLog  # noqa: PLC0415 - an extra
        return PostgresLog(url, create=create)
    if url.startswith(_S3):
        with _extra("s3"):
            from sparkonce.txn_log.object_store import ObjectPlace  # noqa: PLC0415 - an extra
        place = ObjectPlace(url)
        if create:
            place.check()
        return DocumentLog(place, create=create)
    if url.startswith(_CHECKPOINT) and len(url) > len(_CHECKPOINT):
        return checkpoint_log(url.removeprefix(_CHECKPOINT), create=create)
    raise ConfigurationError(
        f"log={_kind(url)!r}: expected sqlite:///relative/path.db, "
        "sqlite:////absolute/path.db, postgresql://host/database, s3://bucket/prefix, or "
        "checkpoint:/path/of/the/checkpoint"
    )


@contextlib.contextmanager
def without_making() -> Iterator[None]:
    """Inside the block `open_log` makes no log: for who looks at a pipeline that opens its own."""
    before = _may_create.set(False)
    try:
        yield
    finally:
        _may_create.reset(before)


def checkpoint_log(location: str, conf: Any = None, *, create: bool = True) -> TransactionLog:
    """The log inside a checkpoint.

    Args:
        location: of the checkpoint: a path, or a URL that Hadoop knows.
        conf: Hadoop's configuration; default: that of the running Spark, or of a JVM that is
            started for it. A local path needs neither.
        create: see `open_log`.

    Raises:
        ConfigurationError: files cannot be created atomically there; there is no log, and none may
            be made.
    """
    folder = checkpoint_folder(location, conf, _FOLDER, create=create)
    if create:
        check_create(folder)
    return DocumentLog(FolderPlace(folder), create=create)


def checkpoint_folder(
    location: str, conf: Any = None, name: str = "", *, create: bool = False
) -> Folder:
    """A checkpoint as a folder in which files are created atomically, or a folder inside it.

    Args:
        location: see `checkpoint_log`.
        conf: see `checkpoint_log`.
        name: of the folder inside the checkpoint; default: the checkpoint itself.
        create: make a local one when it is not there.

    Raises:
        ConfigurationError: it cannot be used.
    """
    path = local_path(location)
    if path is not None:
        path = path.resolve()  # relative, it would be another one elsewhere
        # What is in the checkpoint itself is as readable as Spark's own files there.
        mode = 0o600 if name else 0o666
        return LocalFolder(path / name, f"{_CHECKPOINT}{path}", create=create, mode=mode)
    from sparkonce.txn_log import jvm  # noqa: PLC0415 - needs PySpark

    location = location.rstrip("/")
    root = f"{location}/{name}" if name else location
    return jvm.hadoop_folder(root, f"{_CHECKPOINT}{location}", conf)


def local_path(location: str) -> Path | None:
    """The path of a location on a local disk; None for one that is elsewhere.

    Spark and Hadoop quote nothing in a location: a %, a # or a ? is part of a name.

    Raises:
        ConfigurationError: it begins with ~ and a user that this machine does not know.
    """
    pattern = r"file:(?://(?:localhost)?(?=/)|(?!//))(/.*)"
    if match := re.fullmatch(pattern, location, re.DOTALL):
        return Path(f"/{match[1].lstrip('/')}")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", location):
        return None
    return expanded(location)


@contextlib.contextmanager
def _extra(name: str) -> Iterator[None]:
    """Around the import of what comes with an extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("sparkonce"):
            raise
        raise ConfigurationError(
            f"this kind of log= needs {error.name!r}: pip install 'sparkonce[{name}]'"
        ) from error


def _kind(url: str) -> str:
    """What may be shown of an address that cannot be read: any other part may be a password."""
    scheme, colon, _ = url.partition(":")
    return f"{scheme}:…" if colon and re.fullmatch(r"[\w+.-]+", scheme) else "…"
