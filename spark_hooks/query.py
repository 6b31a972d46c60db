"""A query as its checkpoint shows it: which one it is, and how far Spark and our drivers have come.

    RunningQuery              finds the rest in Spark's own JVM (foreachBatch)
    data_source.PlannedQuery  has no JVM (`writeStream.format("sparkonce")`)

The checkpoint is read without Spark's help, so it can be read after the query has ended.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sparkonce.errors import ConfigurationError, LogUnavailableError
from sparkonce.spark_hooks.binding import Entry
from sparkonce.spark_hooks.checkpoint import CheckpointFiles


class RunId(NamedTuple):
    """One run of one query: the permanent id of its checkpoint, and the id of the run."""

    query_id: str
    run_id: str


class CheckpointedQuery(ABC):
    """One run of a query, and its checkpoint.

    Attributes:
        run: which run of which query.
        checkpoint: location of the checkpoint.
        files: the checkpoint, which can be read after the query has ended.
        entry: this run's own entry in the checkpoint; None before it has entered.
    """

    run: RunId
    checkpoint: str
    files: CheckpointFiles
    entry: Entry | None = None

    @property
    @abstractmethod
    def is_stopping(self) -> bool:
        """Whether the run has ended, or Spark is stopping it and interrupting its batch."""

    @abstractmethod
    def folders_of(self, uses: Sequence[str]) -> Mapping[str, str] | None:
        """The folders of sources; see `sparkonce.spark_hooks.source_offsets.FoldersOf`."""

    @property
    def location(self) -> str:
        return self.checkpoint

    def committed(self) -> int:
        """See `CheckpointFiles.committed`.

        Raises:
            LogUnavailableError: the checkpoint is not there now.
        """
        committed = self.files.committed()
        if committed is None:
            raise LogUnavailableError(
                f"the checkpoint {self.checkpoint} of the query {self.run.query_id} is not there "
                "now, nothing was written: was it deleted, or is its disk not mounted?"
            )
        return committed

    def has_offsets(self, batch_id: int) -> bool:
        """Whether Spark has begun the batch in this checkpoint."""
        return self.files.has_offsets(batch_id)

    def offsets(self, batch_id: int) -> tuple[str, ...] | None:
        """The source offsets of a batch; see `sparkonce.spark_hooks.source_offsets`."""
        return self.files.offsets(batch_id, self.folders_of)

    def offsets_of_running(self, batch_id: int) -> tuple[str, ...]:
        """The source offsets of the batch that Spark runs.

        Raises:
            ConfigurationError: the checkpoint has none.
        """
        offsets = self.offsets(batch_id)
        if offsets is None:
            raise ConfigurationError(
                f"the checkpoint {self.checkpoint} has no offsets for batch {batch_id}: was it "
                "deleted under the running query?"
            )
        return offsets

    def enter(self, seen: Entry | None, driver: str, fenced_run: str | None) -> bool:
        """Enter the checkpoint, unless another driver has since the last entry was `seen`.

        A run that has entered once does not enter after another run.
        """
        if self.entry is not None and (seen is None or seen.run_id != self.run.run_id):
            return False
        entry = self.files.enter(seen, driver, self.run.run_id, fenced_run)
        self.entry = entry or self.entry
        return entry is not None

    def is_ours(self) -> bool:
        """Whether no driver has entered the checkpoint since this one."""
        return self.entry is not None and self.files.is_newest_entry(self.entry)
