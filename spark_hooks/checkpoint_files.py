"""A query's checkpoint, read without Spark: from a local disk, or by a JVM of Hadoop's alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from sparkonce.errors import ConfigurationError
from sparkonce.txn_log import local_path
from sparkonce.txn_log.record import Head


class _Files(Protocol):
    """The files of a checkpoint; names are paths with /."""

    def read(self, name: str) -> str | None: ...

    def names(self, folder: str) -> Sequence[str]: ...


class CheckpointFiles:
    """What Spark has written for one query.

    Args:
        location: a path, or a URL, as Spark shows it.
        query_id: of the query whose checkpoint it must be; None for any.
        start_jvm: whether a JVM may be started for what is not on a local disk.

    Raises:
        ConfigurationError: it cannot be read, is not there, or is another query's.
    """

    def __init__(self, location: str, query_id: str | None, *, start_jvm: bool = False) -> None:
        self.location = location
        self._files = _open(location, start_jvm=start_jvm)
        metadata = self._files.read("metadata")
        if metadata is None:
            raise ConfigurationError(f"there is no checkpoint in {location}, as seen from here")
        try:
            found = json.loads(metadata)["id"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f"{location}/metadata is not what Spark writes") from error
        if query_id not in {None, found}:
            raise ConfigurationError(
                f"the checkpoint in {location} is of query {found}, not of {query_id}"
            )

    def committed(self) -> int | None:
        """The highest batch of Spark's commit log; -1 when it is empty.

        None where the checkpoint has gone since: an unmounted folder has no files either.
        """
        names = [name.rpartition("/")[2] for name in self._files.names("commits")]
        if self._files.read("metadata") is None:  # asked behind it
            return None
        return max((int(name) for name in names if name.isdigit()), default=-1)

    def has_offsets(self, batch_id: int) -> bool:
        """Whether Spark has begun the batch in this checkpoint."""
        return self.read(f"offsets/{batch_id}") is not None

    def read(self, name: str) -> str | None:
        """A file of the checkpoint; None when it is not there."""
        return self._files.read(name)


class UnknownCheckpoint:
    """A checkpoint that cannot be read from here: nothing that depends on it is decided."""

    def __init__(self, location: str) -> None:
        self.location = location

    def committed(self) -> None:
        return None

    def has_offsets(self, batch_id: int) -> bool:
        del batch_id
        return False


class LostCheckpoint:
    """A checkpoint that is lost for good, with a batch that it is to have no commit of."""

    def __init__(self, location: str, *, abandoned: int) -> None:
        self.location = location
        self._committed = abandoned - 1

    def committed(self) -> int:
        return self._committed

    def has_offsets(self, batch_id: int) -> bool:
        del batch_id
        return True


def find_checkpoint(head: Head, location: str | None = None) -> CheckpointFiles | UnknownCheckpoint:
    """The query's checkpoint, where it can be read without Spark.

    Args:
        head: tells where the last run had it; it is looked for on local disks only.
        location: where it is now; a JVM is started for what is on no local disk.

    Raises:
        ConfigurationError: it is not at `location`.
    """
    if location is not None:
        return CheckpointFiles(location, head.query_id, start_jvm=True)
    try:
        return CheckpointFiles(head.checkpoint, head.query_id)
    except ConfigurationError:
        return UnknownCheckpoint(head.checkpoint or "(the log does not say where)")


def _open(location: str, *, start_jvm: bool) -> _Files:
    path = local_path(location)
    if path is not None:
        return _Disk(path)
    if not start_jvm:
        raise ConfigurationError(
            f"the checkpoint {location} is on no local disk: pass --checkpoint {location} to have "
            "it read by a JVM"
        )
    from sparkonce.txn_log import jvm  # noqa: PLC0415 - needs PySpark

    return jvm.hadoop_folder(location, f"checkpoint:{location}")


class _Disk:
    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, name: str) -> str | None:
        try:
            return (self._root / name).read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{self._root / name} cannot be read: {error}") from error

    def names(self, folder: str) -> Sequence[str]:
        try:
            return [path.name for path in (self._root / folder).iterdir()]
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise ConfigurationError(f"{self._root / folder} cannot be read: {error}") from error
