"""A query as a Python process of its driver finds it: by its checkpoint alone.

Spark's JVM is not within reach there, and neither are the session's settings. So a bucket is read
with boto3 and what boto3 finds; any other file system through a JVM that this process starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from sparkonce.errors import ConfigurationError, LogUnavailableError
from sparkonce.spark_hooks.checkpoint import open_checkpoint
from sparkonce.spark_hooks.query import CheckpointedQuery, RunId
from sparkonce.storage import local_path
from sparkonce.txn_log.record import Incarnation

_BUCKET: Final = ("s3a:", "s3:", "s3n:")
_BY_BOTO3: Final = (
    'format("sparkonce") reads this bucket with boto3, which does not see Spark\'s settings '
    "(fs.s3a.*). Where Spark's driver or server starts, set AWS_ENDPOINT_URL_S3 for a server other "
    "than Amazon's, AWS_REGION, and credentials that boto3 finds"
)
_BY_JVM: Final = (
    'format("sparkonce") reads this file system through a JVM of its own, which sees '
    "spark-defaults.conf and HADOOP_CONF_DIR, but neither the session's settings nor its jars: put "
    "there what the file system needs"
)


class PlannedQuery(CheckpointedQuery):
    """One batch of a query, between Spark's plan for it and its commit.

    Args:
        location: of the checkpoint.
        run_id: under which the process that planned the batch has claimed the pipeline. Spark does
            not tell these processes the id of its own run.

    Raises:
        ConfigurationError: there is no checkpoint.
        LogUnavailableError: it cannot be read now.
    """

    def __init__(self, location: str, run_id: str) -> None:
        is_local = local_path(location) is not None
        try:
            self.files = open_checkpoint(location, None, start_jvm=True, by_boto3=True)
        except (ConfigurationError, LogUnavailableError) as error:
            if is_local:
                raise
            advice = _BY_BOTO3 if location.startswith(_BUCKET) else _BY_JVM
            raise type(error)(f"{error}. {advice}") from error
        # The log compares it with what foreachBatch has from Spark: hdfs:///a is hdfs://host/a.
        self.checkpoint = location if is_local else self.files.full_location
        self.run = RunId(self.files.query_id() or "", run_id)

    @property
    def is_stopping(self) -> bool:
        return False  # unknown; a run that follows takes a newer token

    def folders_of(self, uses: Sequence[str]) -> Mapping[str, str]:
        # A query that reads one source twice has fewer folders than uses, with other numbers. Which
        # folder is whose is not to be seen here; the counters are compared all the same.
        is_numbered = uses[0].isdigit()
        if is_numbered and not self.files.has_source(str(len(uses) - 1)):
            return {}
        return {use: use for use in uses}

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
