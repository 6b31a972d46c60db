"""Opens a folder by its location: a path, or a URL that Hadoop knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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

    Raises:
        ConfigurationError: the location cannot be used.
        LogUnavailableError: it cannot be reached now.
    """
    path = local_path(location)
    if path is not None:
        path = path.resolve()
        return LocalFolder(path / inside, f"{scheme}{path}", create=create, mode=mode)
    from sparkonce.storage.hadoop import hadoop_folder  # noqa: PLC0415 - imports PySpark

    location = location.rstrip("/")
    root = f"{location}/{inside}" if inside else location
    return hadoop_folder(root, f"{scheme}{location}", conf)
