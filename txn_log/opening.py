"""Opens a transaction log by its address.

    sqlite:///FILE            SqliteLog
    postgresql://…            PostgresLog
    s3://BUCKET/PREFIX        DocumentLog in an ObjectPlace
    checkpoint:LOCATION       DocumentLog in a FolderPlace, in the folder sparkonce-log

The modules of an extra (psycopg, boto3) are imported at their first use.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from sparkonce.errors import ConfigurationError
from sparkonce.storage import open_folder
from sparkonce.txn_log.base import TransactionLog
from sparkonce.txn_log.document import DocumentLog
from sparkonce.txn_log.folder import FolderPlace, check_create
from sparkonce.txn_log.sqlite import SqliteLog

IN_CHECKPOINT = "checkpoint"
"""The ``log=`` of `ExactlyOnce` for a log inside its query's checkpoint."""

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
            ``checkpoint:/path/of/the/checkpoint`` or ``checkpoint:hdfs://…``. An open log is
            returned unchanged.
        create: make the log when it does not exist. Pass False to look at a log; otherwise a typing
            error in the address would create another one.

    Raises:
        ConfigurationError: the address is of no known kind, or cannot be used; or the log does not
            exist and may not be created.
        LogUnavailableError: the log's server cannot be reached now.
    """
    if isinstance(url, TransactionLog):
        return url
    create = create and _may_create.get()
    if url == IN_CHECKPOINT:
        raise ConfigurationError(
            'only the query that has the checkpoint can open log="checkpoint": give its location '
            "instead, as in checkpoint:/path/of/the/checkpoint"
        )
    if url.startswith(_SQLITE) and len(url) > len(_SQLITE):
        return SqliteLog(url.removeprefix(_SQLITE), create=create)
    if url.startswith(_POSTGRES):
        with _extra("postgres"):
            from sparkonce.txn_log.postgres import PostgresLog  # noqa: PLC0415 - an extra
        return PostgresLog(url, create=create)
    if url.startswith(_S3):
        return _s3_log(url, create=create)
    if url.startswith(_CHECKPOINT) and len(url) > len(_CHECKPOINT):
        return checkpoint_log(url.removeprefix(_CHECKPOINT), create=create)
    raise ConfigurationError(
        f"log={_kind(url)!r}: expected sqlite:///relative/path.db, "
        "sqlite:////absolute/path.db, postgresql://host/database, s3://bucket/prefix, or "
        '"checkpoint" (outside of its query: checkpoint:/path/of/the/checkpoint)'
    )


def checkpoint_log(
    location: str,
    conf: Callable[[], Any] | None = None,
    *,
    create: bool = True,
    by_boto3: bool = False,
) -> TransactionLog:
    """The log inside a checkpoint.

    Args:
        location: of the checkpoint: a path, or a URL that Hadoop knows.
        conf: see `sparkonce.storage.open_folder`.
        create: see `open_log`; the place is checked only then.
        by_boto3: see `sparkonce.storage.open_folder`.

    Raises:
        ConfigurationError: files cannot be created atomically there; or the log does not exist and
            `create` is False.
    """
    folder = open_folder(
        location,
        conf,
        inside=_FOLDER,
        scheme=_CHECKPOINT,
        create=create,
        mode=0o600,
        by_boto3=by_boto3,
    )
    if create:
        check_create(folder)
    return DocumentLog(FolderPlace(folder), create=create)


@contextlib.contextmanager
def without_making() -> Iterator[None]:
    """Inside the block, `open_log` creates no log, also where a pipeline opens its own."""
    before = _may_create.set(False)
    try:
        yield
    finally:
        _may_create.reset(before)


def _s3_log(url: str, *, create: bool) -> TransactionLog:
    with _extra("s3"):
        from sparkonce.txn_log.object_store import ObjectPlace  # noqa: PLC0415 - an extra
    place = ObjectPlace(url)
    if create:
        place.check()
    return DocumentLog(place, create=create)


@contextlib.contextmanager
def _extra(name: str) -> Iterator[None]:
    """Name the extra that is missing when an import in the block fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("sparkonce"):
            raise
        raise ConfigurationError(
            f"this kind of log= needs {error.name!r}: pip install 'sparkonce[{name}]'"
        ) from error


def _kind(url: str) -> str:
    """The part of an unknown address that may be shown; the rest may contain a password."""
    scheme, colon, _ = url.partition(":")
    return f"{scheme}:…" if colon and re.fullmatch(r"[\w+.-]+", scheme) else "…"
