"""A query as a Python process of its driver finds it: by its checkpoint alone, without a JVM."""

from __future__ import annotations

from sparkonce.errors import ConfigurationError
from sparkonce.spark_hooks.checkpoint import open_checkpoint
from sparkonce.spark_hooks.query import CheckpointedQuery, RunId
from sparkonce.storage import local_path
from sparkonce.txn_log.record import Incarnation


class PlannedQuery(CheckpointedQuery):
    """One batch of a query, between Spark's plan for it and its commit.

    Args:
        location: of the checkpoint.
        run_id: under which the process that planned the batch has claimed the pipeline. Spark does
            not tell these processes the id of its own run.

    Raises:
        ConfigurationError: there is no checkpoint, or it is on no local disk.
    """

    def __init__(self, location: str, run_id: str) -> None:
        if local_path(location) is None:
            raise ConfigurationError(
                f"checkpointLocation {location} is on no local disk, and Spark gives this format "
                "no way to read it: use a local or mounted folder, or write with foreachBatch"
            )
        self.checkpoint = location
        self.files = open_checkpoint(location, None)
        self.run = RunId(self.files.query_id() or "", run_id)

    @property
    def is_stopping(self) -> bool:
        return False  # unknown; a run that follows takes a newer token

    def source_of(self, use: str) -> str | None:
        # A query that reads one source twice has fewer folders than uses. Then the digest of a
        # file source's files may be missing; its counters are compared all the same.
        return use

    def planned_batch(self) -> int:
        """The batch that Spark is planning: it has written the batch's offsets just before.

        Raises:
            ConfigurationError: there are none.
        """
        batch_id = self.files.begun()
        if batch_id < 0:
            raise ConfigurationError(
                f"the checkpoint {self.checkpoint} has no offsets yet, and Spark plans a batch: is "
                "it the query's own checkpointLocation?"
            )
        return batch_id


class Entered:
    """The checkpoint that an earlier process of this driver has entered.

    See `sparkonce.protocol.lease.Entrance`.
    """

    def __init__(self, query: PlannedQuery) -> None:
        self._query = query

    def check_may_begin(self, *, is_first_try: bool) -> None:
        raise NotImplementedError  # the plan took the token

    def enter(self, incarnation: Incarnation) -> bool:
        raise NotImplementedError

    def is_newest_entry(self) -> bool:
        return self._query.is_ours()
