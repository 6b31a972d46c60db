"""A query's checkpoint, as files in a folder.

    CHECKPOINT/metadata        the query id
              /offsets/N       written before batch N runs; N is replayed while commits/N is absent
              /commits/N       written after foreachBatch has returned
              /sources/0/N     the files of a file source, by its own counter; also N.compact
              /state/…         only where the query has a state
              /sparkonce.json  ours: which transaction log and pipeline the checkpoint belongs to
              /sparkonce-drivers/…  ours: which drivers have begun
              /sparkonce-log   ours: that log itself, with log="checkpoint"

The running query and the command line read it alike, on a local disk or through Hadoop's file
systems, so a checkpoint works wherever Spark can put it. Spark writes each of its files under a
hidden name first, and purges those of old batches; our files are created atomically
(`sparkonce.storage`).
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from sparkonce.errors import ConfigurationError, LogCorruptError, LogUnavailableError
from sparkonce.spark_hooks.binding import (
    Binding,
    Entry,
    bind,
    enter,
    is_newest_entry,
    last_entry,
    read_binding,
)
from sparkonce.spark_hooks.source_offsets import FoldersOf, is_repartition, shown_offsets
from sparkonce.steps import step
from sparkonce.storage import FileSystemFolder, local_path, open_folder
from sparkonce.txn_log.record import Head

P = ParamSpec("P")
ResultT = TypeVar("ResultT")

_BATCH: Final = re.compile("[0-9]+")


def open_checkpoint(
    location: str, query_id: str | None, *, start_jvm: bool = False, by_boto3: bool = False
) -> CheckpointFiles:
    """A checkpoint, read without a running query.

    Args:
        location: a path, or a URL, as Spark shows it.
        query_id: of the query whose checkpoint it must be; None for any.
        start_jvm: whether a JVM may be started for a location that is on no local disk.
        by_boto3: see `sparkonce.storage.open_folder`.

    Raises:
        ConfigurationError: it does not exist, or is another query's.
        LogUnavailableError: it cannot be read now.
    """
    if local_path(location) is None and not start_jvm:
        raise ConfigurationError(
            f"the checkpoint {location} is on no local disk: pass --checkpoint {location} to have "
            "it read by a JVM"
        )
    files = CheckpointFiles(checkpoint_folder(location, by_boto3=by_boto3), location)
    found = files.query_id()
    if found is None:
        raise ConfigurationError(f"there is no checkpoint in {location}, as seen from here")
    if query_id not in {None, found}:
        raise ConfigurationError(
            f"the checkpoint in {location} is of query {found}, not of {query_id}"
        )
    return files


def checkpoint_folder(
    location: str, conf: Callable[[], Any] | None = None, *, by_boto3: bool = False
) -> FileSystemFolder:
    """The folder of a checkpoint. Files that are created in it are as readable as Spark's own."""
    return open_folder(location, conf, scheme="checkpoint:", by_boto3=by_boto3)


def _step(
    ask: Callable[Concatenate[CheckpointFiles, P], ResultT],
) -> Callable[Concatenate[CheckpointFiles, P], ResultT]:
    """Make the call a step, so that it is logged if the file system does not respond."""

    @functools.wraps(ask)
    def stepped(files: CheckpointFiles, /, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        with step("checkpoint", of=files.location):
            return ask(files, *args, **kwargs)

    return stepped


class CheckpointFiles:
    """What Spark and our drivers have written for one query.

    All methods may raise `LogUnavailableError`: the checkpoint cannot be reached now.
    """

    def __init__(self, folder: FileSystemFolder, location: str) -> None:
        self.location = location
        self._folder = folder

    @property
    def folder(self) -> FileSystemFolder:
        """The folder, for copies of it."""
        return self._folder

    @property
    def full_location(self) -> str:
        """Its location with the parts that Hadoop's settings add to a short one."""
        return self._folder.location

    # -- Spark's files -----------------------------------------------------------------------------

    @_step
    def query_id(self) -> str | None:
        """The id of the query; None where there is no checkpoint.

        Raises:
            ConfigurationError: the file is damaged.
        """
        try:
            text = self._folder.read("metadata")
            return None if text is None else str(json.loads(text)["id"])
        except (LogCorruptError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"{self.location}/metadata is not what Spark writes"
            ) from error

    @_step
    def committed(self) -> int | None:
        """The highest batch of Spark's commit log, as it is on the disk; -1 when it is empty.

        Spark's own `getLatestBatchId` takes the highest number too, of the files and of what the
        process remembers. The names of temporary files and checksums are not numbers.

        None where the checkpoint is gone: an unmounted folder has no files either.
        """
        names = self._folder.files("commits")
        if not self._folder.exists("metadata"):  # looked for after the listing
            return None
        return _highest(names)

    @_step
    def begun(self) -> int:
        """The highest batch that Spark has begun; -1 when it has begun none."""
        return _highest(self._folder.files("offsets"))

    @_step
    def has_offsets(self, batch_id: int) -> bool:
        """Whether Spark has begun the batch in this checkpoint."""
        return self._folder.exists(f"offsets/{batch_id}")

    @_step
    def has_state(self) -> bool:
        """Whether the query has written state."""
        return self._folder.exists("state")

    @_step
    def offsets(self, batch_id: int, folders_of: FoldersOf) -> tuple[str, ...] | None:
        """The source offsets of a batch; see `shown_offsets`."""
        return shown_offsets(self._folder, batch_id, folders_of)

    @_step
    def has_source(self, name: str) -> bool:
        """Whether a source has written files of its own, into the folder of this name."""
        return self._folder.exists(f"sources/{name}")

    @_step
    def repartitions_before(self, batch_id: int) -> int:
        """How many batches just before this one have only repartitioned the state."""
        texts = (self._folder.read(f"offsets/{b}") for b in range(batch_id - 1, -1, -1))
        whole = itertools.takewhile(lambda text: text is not None and "\n" in text, texts)
        pairs = itertools.pairwise(map(str, whole))
        return sum(1 for _ in itertools.takewhile(lambda p: is_repartition(p[1], p[0]), pairs))

    # -- our files ---------------------------------------------------------------------------------

    @_step
    def binding(self) -> Binding | None:
        """What the checkpoint belongs to; None while it belongs to nobody."""
        return read_binding(self._folder)

    @_step
    def bind(self, seen: Binding | None, log_id: str, pipeline: str) -> None:
        """Write what the checkpoint belongs to; see `sparkonce.spark_hooks.binding.bind`."""
        bind(self._folder, seen, log_id, pipeline)

    @_step
    def last_entry(self) -> Entry | None:
        """The driver that began last on the checkpoint."""
        return last_entry(self._folder)

    @_step
    def is_newest_entry(self, entry: Entry) -> bool:
        """Whether no driver has entered since."""
        return is_newest_entry(self._folder, entry)

    @_step
    def enter(
        self, seen: Entry | None, driver: str, run_id: str, fenced_run: str | None
    ) -> Entry | None:
        """See `sparkonce.spark_hooks.binding.enter`."""
        return enter(self._folder, seen, driver, run_id, fenced_run)


def _highest(names: Iterable[str]) -> int:
    """The highest batch among names of files; -1 when there is none."""
    return max((int(name) for name in names if _BATCH.fullmatch(name)), default=-1)


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
    """A checkpoint that is lost for good, and that never had the batch `abandoned`."""

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
        head: names its location in the last run, which is looked up on local disks only.
        location: where it is now; a JVM is started if that is on no local disk.

    Raises:
        ConfigurationError: it is not at `location`.
        LogUnavailableError: it cannot be read there now.
    """
    if location is not None:
        return open_checkpoint(location, head.query_id, start_jvm=True)
    try:
        return open_checkpoint(head.checkpoint, head.query_id)
    except (ConfigurationError, LogUnavailableError):
        return UnknownCheckpoint(head.checkpoint or "(the log does not say where)")
