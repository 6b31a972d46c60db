"""How a start claims its pipeline, and how it enters Spark's checkpoint.

    look at the checkpoint and the log ─► Claim ─► the log admits it: a token
        ─► bind the checkpoint to the log ─► enter the checkpoint

The claim holds what was seen before the token was taken. So a driver that was paused at any of
these steps finds out before it acts.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Self

from sparkonce.errors import FencedError, ProtocolError
from sparkonce.protocol.driver import Driver
from sparkonce.protocol.lease import overtaken_in_checkpoint
from sparkonce.protocol.pipeline import Pipeline, targets_of
from sparkonce.protocol.processes import this_driver
from sparkonce.spark_hooks.query import CheckpointedQuery
from sparkonce.spark_hooks.settings import Settings
from sparkonce.txn_log.claim import Claim
from sparkonce.txn_log.identity import check_is_no_copy
from sparkonce.txn_log.record import Head, Incarnation

logger = logging.getLogger("sparkonce")


class CheckpointEntrance:
    """The query's checkpoint, as one start enters it; see `sparkonce.protocol.lease.Entrance`.

    Attributes:
        claim: what this start says of itself.
        seen: the pipeline's head before the token was taken; None where the name was new.
    """

    def __init__(
        self, pipeline: Pipeline, query: CheckpointedQuery, claim: Claim, seen: Head | None
    ) -> None:
        self.claim = claim
        self.seen = seen
        self._pipeline = pipeline
        self._query = query
        self._bound = query.files.binding()
        self._last_entry = query.files.last_entry()
        self._had_ended = query.is_stopping

    @classmethod
    def look(
        cls,
        pipeline: Pipeline,
        query: CheckpointedQuery,
        batch_id: int,
        *,
        replaces: str | None,
        adopt: tuple[str, ...],
        had_token: bool,
        seen_run: str,
        has_batch: bool,
        driver: str | None = None,
    ) -> Self:
        """Look at the log and the checkpoint, and make the claim.

        Args:
            pipeline: the pipeline.
            query: its running query.
            batch_id: the batch that Spark is about to run.
            replaces: see `sparkonce.ExactlyOnce`.
            adopt: see `sparkonce.ExactlyOnce`.
            had_token: whether this run has had a token before.
            seen_run: the run that held the pipeline when this run first looked at the log.
            has_batch: whether Spark has called with a batch.
            driver: its process, as the log keeps it; default: this one.
        """
        log, run = pipeline.log, query.run
        bound = query.files.binding()
        shown = {b: query.offsets(b) for b in (batch_id - 1, batch_id) if b >= 0}
        seen = log.head(pipeline.name)
        is_known = seen is not None and seen.query_id == run.query_id
        claim = Claim(
            pipeline=pipeline.name,
            query_id=run.query_id,
            run_id=run.run_id,
            driver=driver or this_driver(),
            sinks=targets_of(pipeline.all_sinks.values()),
            batch_id=batch_id,
            offsets={b: offsets for b, offsets in shown.items() if offsets is not None},
            has_begun=query.has_offsets(batch_id),
            checkpoint=query.checkpoint,
            checkpoint_log_id=None if bound is None else bound.log_id,
            checkpoint_pipeline=None if bound is None else bound.pipeline,
            replaces=replaces,
            adopt=adopt,
            had_token=had_token,
            seen_run=seen_run,
            has_batch=has_batch,
            repartitions=query.files.repartitions_before(batch_id),
            namesake=None if is_known else log.namesake(pipeline.name, run.query_id),
        )
        return cls(pipeline, query, claim, seen)

    def check_may_begin(self, *, is_first_try: bool) -> None:
        if not is_first_try and self._query.is_stopping and not self._had_ended:
            raise ProtocolError(
                f"pipeline {self._pipeline.name!r}: the run {self.claim.run_id} of query "
                f"{self.claim.query_id} ended while it waited for its fencing token, and takes "
                "none: it could fence a run that has followed it. The next start recovers"
            )
        if self._query.committed() >= self.claim.batch_id:
            self._raise_if_taken_over()
            raise overtaken_in_checkpoint(self._pipeline, self.claim.batch_id)

    def enter(self, incarnation: Incarnation) -> bool:
        name, log, query_id = self._pipeline.name, self._pipeline.log, self.claim.query_id
        if log.newest(name, query_id) is None:  # another pipeline of the name may be new
            check_is_no_copy(replace(self.claim, namesake=log.namesake(name, query_id)))
        self._query.files.bind(self._bound, incarnation.owner.log_id, name)
        if self._query.committed() >= self.claim.batch_id:
            return False  # a late driver would fence its successor before noticing that it is late
        fenced_run = incarnation.fenced_run
        if fenced_run == self.claim.run_id:  # an earlier try has fenced the driver before
            fenced_run = self.claim.seen_run
        return self._query.enter(self._last_entry, self.claim.driver, fenced_run)

    def is_newest_entry(self) -> bool:
        return self._query.is_ours()

    def log_start(self, settings: Settings, driver: Driver) -> None:
        """Log the start line, and the sinks that were removed or have another target."""
        log = self._pipeline.log
        fields = {"pipeline": settings.name}  # no step is under way that would add it
        logger.info(
            "pipeline %r, query %s, token %d, commit=%r: %s; log %s%s; a batch and its record are "
            "committed in %s",
            settings.name,
            self.claim.query_id,
            driver.incarnation.token,
            settings.commit,
            ", ".join(map(repr, settings.sinks)),
            log.address,
            ", deleted with the checkpoint: it cannot notice a fresh one"
            * settings.is_log_in_checkpoint,
            "one transaction"
            if driver.two_phases is None
            else f"two phases, since {driver.two_phases}",
            extra=fields,
        )
        for name, target in sorted({} if self.seen is None else self.seen.sinks.items()):
            now = self.claim.sinks.get(name)
            if now == target:
                continue
            logger.warning(
                "the sink %r of %s %s: what a crash has left over there is not aborted unless %s",
                name,
                target,
                "is no longer among the pipeline's sinks" if now is None else f"has {now} now",
                "it is passed in removed=[…]"
                if now is None
                else "`sparkonce recover JOB` is run with a job that has its old target",
                extra=fields,
            )

    def _raise_if_taken_over(self) -> None:
        """Name the driver that has taken over, if it did so in this log."""
        head = self._pipeline.log.head(self._pipeline.name)
        if head is not None and head != self.seen and head.run_id != self.claim.run_id:
            raise FencedError(
                f"pipeline {self._pipeline.name!r} was taken over by {head.driver} (token "
                f"{head.token}, run {head.run_id}) while this driver was paused: let that one run, "
                "or stop it and start this query again"
            )
