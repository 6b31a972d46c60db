"""The settings of a pipeline, checked when they are given; no live state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, get_args

import pyspark

from sparkonce.errors import ConfigurationError
from sparkonce.model import is_label
from sparkonce.observing import Telemetry
from sparkonce.protocol.pipeline import Checkpoint, CommitPolicy, Patience, Pipeline, by_name
from sparkonce.sinks import verbs
from sparkonce.sinks.base import AnySink, TwoPhaseCommitSink, check_attributes
from sparkonce.spark_hooks.small_batches import IN_A_ROW
from sparkonce.txn_log import IN_CHECKPOINT, TransactionLog

OLDEST_SPARK: Final = 4


@dataclass(frozen=True)
class Settings:
    """What `sparkonce.ExactlyOnce` was given; see there.

    Raises:
        ConfigurationError: a setting cannot work.
    """

    name: str
    sinks: tuple[AnySink, ...]
    log: str | TransactionLog
    commit: CommitPolicy
    removed: tuple[AnySink, ...]
    replaces: str | None
    adopt: tuple[str, ...]
    commit_timeout_s: float
    retain: int
    driver_rows: int
    telemetry: Telemetry | None = None
    small_batches_first: int = IN_A_ROW
    """After how many small batches in a row the driver writes the next one; tests change it."""

    def __post_init__(self) -> None:
        if int(pyspark.__version__.partition(".")[0]) < OLDEST_SPARK:
            raise ConfigurationError(
                f"the installed PySpark is {pyspark.__version__}, and sparkonce needs Spark "
                f"{OLDEST_SPARK} or later: pip install 'pyspark>={OLDEST_SPARK}', on a cluster "
                "with that Spark"
            )
        if not is_label(self.name):
            raise ConfigurationError(
                f"{self.name!r}: a pipeline's name has 1 to 32 of the characters A-Z a-z 0-9 _ and "
                "-"
            )
        _check_sinks(self.sinks, self.removed)
        if self.commit not in get_args(CommitPolicy):
            raise ConfigurationError(
                f'commit={self.commit!r}: expected "immediate" or "after_checkpoint"'
            )
        for setting, least in (("retain", 1), ("driver_rows", 0)):
            value = getattr(self, setting)
            if not isinstance(value, int) or value < least:
                raise ConfigurationError(
                    f"{setting}={value!r}: expected a whole number from {least}"
                )
        limit_s = self.commit_timeout_s
        if not isinstance(limit_s, int | float) or not limit_s > 0:
            raise ConfigurationError(
                f"commit_timeout_s={limit_s!r}: expected a positive number of seconds"
            )
        if not self.is_log_in_checkpoint:  # before a log is created there
            for sink in self.sinks:
                verbs.check_log(sink, self.log if isinstance(self.log, str) else self.log.address)

    @property
    def is_log_in_checkpoint(self) -> bool:
        """Whether the log is inside the checkpoint, and is opened once that is known."""
        return self.log == IN_CHECKPOINT

    @property
    def all_sinks(self) -> tuple[AnySink, ...]:
        """The sinks, and those that were removed."""
        return (*self.sinks, *self.removed)

    def pipeline(self, log: TransactionLog, checkpoint: Checkpoint) -> Pipeline:
        """The pipeline, over this log and checkpoint."""
        return Pipeline(
            name=self.name,
            sinks=by_name(self.sinks),
            log=log,
            checkpoint=checkpoint,
            commit=self.commit,
            removed=by_name(self.removed),
            commit_timeout_s=self.commit_timeout_s,
            retain=self.retain,
            patience=Patience(self.commit_timeout_s),
        )


def sinks_of(setting: str, sinks: Sequence[AnySink]) -> tuple[AnySink, ...]:
    """The sinks that the setting lists.

    Raises:
        ConfigurationError: it is a single sink, not a list.
    """
    if isinstance(sinks, TwoPhaseCommitSink):
        raise ConfigurationError(f"{setting}= is one sink: put it into a list, {setting}=[…]")
    return tuple(sinks)


def _check_sinks(sinks: Sequence[AnySink], removed: Sequence[AnySink]) -> None:
    if not sinks:
        raise ConfigurationError("sinks= is empty: give at least one sink")
    for sink in (*sinks, *removed):
        if not isinstance(sink, TwoPhaseCommitSink):
            raise ConfigurationError(f"sinks= holds {sink!r}, which is not a TwoPhaseCommitSink")
        check_attributes(sink)
    names = [sink.name for sink in (*sinks, *removed)]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(
                f"two sinks are named {name!r}: give each a permanent name of its own with name="
            )
