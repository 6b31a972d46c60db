"""Opens a folder by its location: a path, or a URL that Hadoop knows.

a path, file:     LocalFolder
s3a:, s3:, s3n:   HadoopFolder; S3FileFolder in a process that Spark's JVM has started
any other URL     HadoopFolder, over Spark's JVM, or over one that is started for it
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from sparkonce.errors import ConfigurationError
from sparkonce.once import once
from sparkonce.storage.base import FileSystemFolder
from sparkonce.storage.local import LocalFolder, local_path


def open_folder(
    location: str,
    conf: Callable[[], Any] | None = None,
    *,
    inside: str = "",
    scheme: str = "",
    create: bool = False,
    mode: int = 0o666,
    by_boto3: bool = False,
) -> FileSystemFolder:
    """The folder at a location. A relative path is resolved against the working directory.

    Args:
        location: a path, or a URL that Hadoop knows.
        conf: returns Hadoop's configuration; default: that of the running Spark, or of a JVM that
            is started for it, which takes seconds. It is not called for a local path.
        inside: name of a folder inside the location; that one is opened.
        scheme: prefix of the folder's address, before the location.
        create: make a local folder that does not exist.
        mode: of local files, before the umask.
        by_boto3: open a bucket through boto3 instead of Hadoop; its client is kept for the process.

    Raises:
        ConfigurationError: the location cannot be used.
        LogUnavailableError: it cannot be reached now.
    """
    path = local_path(location)
    if path is not None:
        path = path.resolve()
        return LocalFolder(path / inside, f"{scheme}{path}", create=create, mode=mode)
    location = location.rstrip("/")
    root = f"{location}/{inside}" if inside else location
    if by_boto3 and (bucket := _in_bucket(root, f"{scheme}{location}")):
        return bucket
    from sparkonce.storage.hadoop import hadoop_folder  # noqa: PLC0415 - imports PySpark

    return hadoop_folder(root, f"{scheme}{location}", conf)


def _in_bucket(root: str, address: str) -> FileSystemFolder | None:
    """The folder through boto3; None where it is in no bucket."""
    if not re.match("s3[an]?:", root):
        return None
    try:
        from sparkonce.storage.s3_files import S3FileFolder  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("sparkonce"):
            raise
        raise ConfigurationError(
            f"{address} is read with {error.name!r} here: pip install 'sparkonce[s3]'"
        ) from error
    return once(S3FileFolder, root, address)
