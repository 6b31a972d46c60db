"""Starts that find no new data: Spark runs no batch, and something may be prepared.

    Spark starts a query ─► listener of its session ─► is it this pipeline's? ─► recover

The listener is only a nudge: the first batch recovers too, and so does `awaitTermination`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from sparkonce.errors import ConfigurationError, FencedError
from sparkonce.spark_hooks.lifecycle import StartListener
from sparkonce.spark_hooks.run import while_active
from sparkonce.spark_hooks.running_query import RunningQuery
from sparkonce.spark_hooks.serving import is_bound
from sparkonce.spark_hooks.settings import Settings
from sparkonce.txn_log import TransactionLog

logger = logging.getLogger("sparkonce")


class Starts:
    """Hears of a pipeline's starts, and recovers them.

    Args:
        settings: the pipeline's settings.
        log: the pipeline's log; None where it is in the checkpoint.
        may_serve: whether the pipeline serves no other query than the one with this id.
        recover: recovers a start, unless it is recovered already.
    """

    def __init__(
        self,
        settings: Settings,
        log: TransactionLog | None,
        may_serve: Callable[[str], bool],
        recover: Callable[[RunningQuery], None],
    ) -> None:
        self._settings = settings
        self._log = log
        self._may_serve = may_serve
        self._recover = recover
        self.listener: StartListener | None = None
        self._listen()

    def warn_if_unheard(self, query: RunningQuery) -> None:
        """Log that the pipeline does not hear of the query's starts, if that matters."""
        was_heard = self._listen()
        if self._settings.commit == "immediate":  # for which it hardly ever matters
            return
        if was_heard and self.listener is not None and self.listener.hears(query):
            return
        logger.warning(
            "pipeline %r was created %s, and hears of a start only by its first batch. A start "
            "that finds no new data has none, and leaves what is prepared unchanged: create the "
            "pipeline after the session and in the session of its query, or end its queries with "
            "pipeline.awaitTermination(query)",
            self._settings.name,
            "in another SparkSession than its query" if was_heard else "before the SparkSession",
        )

    def on_start(self, query: RunningQuery) -> bool:
        """Recover the start while the query runs, if the first batch may be too late for that.

        Returns:
            Whether it is this pipeline's.
        """
        is_mine = True

        def recover() -> None:
            nonlocal is_mine
            is_mine = self._may_serve(query.run.query_id)
            is_mine = is_mine and is_bound(query, self._settings, self._log)
            if is_mine and self._has_to_hear(query):
                self._recover(query)

        name = self._settings.name
        try:
            while_active(query, recover, f"recover the start of pipeline {name!r}")
        except FencedError as error:
            logger.warning("pipeline %r: its start was not recovered here: %s", name, error)
        except Exception as error:
            # If a setting does not fit, the start may be that of an older object with this name.
            is_mine = is_mine and not isinstance(error, ConfigurationError)
            # The first batch, or awaitTermination, tries again and raises.
            logger.warning(
                "pipeline %r: the start of its query %s was not recovered yet",
                name,
                query.run.query_id,
                exc_info=True,
            )
        return is_mine

    def _listen(self) -> bool:
        """Listen to the session's starts; returns whether it listened already."""
        if self.listener is not None and self.listener.is_heard:
            return True
        self.listener = StartListener.add(self.on_start)
        return False

    def _has_to_hear(self, query: RunningQuery) -> bool:
        """Whether the first batch may be too late to recover the start.

        With commit="immediate" Spark replays every incomplete batch. The exception is a batch that
        an earlier run with "after_checkpoint" left, and that Spark has committed.
        """
        if self._settings.commit == "after_checkpoint":
            return True
        # At this moment its first batch may be creating the log, or the user deleting it.
        log = query.open_log(create=False) if self._log is None else self._log
        committed = query.committed()
        return any(
            record.id.batch_id <= committed for record in log.unfinished(self._settings.name)
        )
