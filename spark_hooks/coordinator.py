"""The protocol itself, free of Spark.

    begin ─► recover ─► for each batch:  write ─► vote ─► DECIDE ─► commit ─► complete ─► sweep
                                         └── any failure: abort ──┘    └── any failure: the log
                                                                           alone says what holds

A batch moves left to right and never back. The one point of no return is `TransactionLog.decide`:
before it is sent every failure aborts, after it nothing does.

Invariants (docs/protocol.md has all of them):

* I1, I2: only what a decision names is committed, and all of it;
* I6: nothing is aborted that belongs to a younger incarnation or that an unfinished record names.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol, TypeVar

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    stop_after_delay,
    wait_random_exponential,
)

from sparkonce.errors import (
    CommitUnresolvedError,
    DecisionUnknownError,
    FencedError,
    LogUnavailableError,
    PrepareRejectedError,
    ProtocolError,
    SparkOnceError,
)
from sparkonce.failpoints import reach
from sparkonce.model import DRIVER_ATTEMPT, BranchId, Committable
from sparkonce.sinks.base import AnySink
from sparkonce.txn_log.base import TransactionLog
from sparkonce.txn_log.identity import Claim, check_offsets
from sparkonce.txn_log.record import Incarnation, Share, State, TransactionRecord

logger = logging.getLogger("sparkonce")

ResultT = TypeVar("ResultT")

_PARALLEL_BRANCHES = 16
_FORGET_EVERY_BATCHES = 64


class Batch(Protocol):
    """One micro-batch, as foreachBatch hands it over."""

    @property
    def batch_id(self) -> int: ...

    @property
    def offsets(self) -> tuple[str, ...]:
        """Source offsets of the batch, as Spark's checkpoint shows them."""

    @property
    def checkpoint(self) -> str:
        """The checkpoint's location, for messages."""

    def write(self, incarnation: Incarnation) -> Mapping[str, Share]:
        """Write every sink on the executors and prepare; what Spark returned, by sink name."""

    def drain(self) -> None:
        """Read the batch to its end without writing it, so that Spark's own state moves on."""


class Coordinator:
    """Drives one pipeline's sinks through the transactions of one incarnation.

    Args:
        sinks: in the order in which they vote.
        log: the transaction log.
        claim: what this driver says of itself.
        commit_timeout_s: how long commits are repeated, in seconds.
        retain: how many batches of history the log keeps.
        clock: gives Unix time in seconds.
    """

    def __init__(
        self,
        sinks: Sequence[AnySink],
        log: TransactionLog,
        claim: Claim,
        *,
        commit_timeout_s: float,
        retain: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._sinks = {sink.name: sink for sink in sinks}
        self._log = log
        self._commit_timeout_s = commit_timeout_s
        self._retain = retain
        self._clock = clock
        reach("begin.before", batch=claim.batch_id)
        self.incarnation = self._patiently(lambda: log.begin(claim), "take a fencing token")
        reach("begin.after", batch=claim.batch_id, token=self.incarnation.token)

    def recover(self) -> None:
        """Finish what older incarnations decided, and abort what they left undecided."""
        pipeline = self.incarnation.pipeline
        unfinished = self._patiently(
            lambda: self._log.unfinished(pipeline), f"read the log of pipeline {pipeline!r}"
        )
        for record in unfinished:
            logger.info("%s was decided and is not finished: committing it", record.id)
            reach("recover.before_finish", batch=record.id.batch_id)
            self._complete(self._commit(record))
        reach("recover.before_sweep")
        self._sweep()

    def run(self, batch: Batch) -> None:
        """Take one batch through the protocol; when it returns, the batch is complete.

        Raises:
            SinkError: see `sparkonce.errors`; Spark's replay of the batch goes on from there.
            FencedError: a newer incarnation owns the pipeline.
        """
        transaction_id = self.incarnation.transaction_id(batch.batch_id)
        standing = self._patiently(lambda: self._log.find(transaction_id), f"find {transaction_id}")
        if standing is None:
            self._finish(self._decide(self._prepare(batch)))
        else:
            check_offsets(standing, batch.offsets, batch.checkpoint)
            if standing.state is not State.COMPLETE:
                # Our recovery left nothing unfinished: another driver decided it since. Moving on
                # would take Spark's replay away from it.
                raise FencedError(
                    f"{standing.id} was decided by another driver (token {standing.token}) after "
                    f"this one (token {self.incarnation.token}) had begun; let that one run, or "
                    "stop it and start again"
                )
            logger.info("%s is complete: its replay is read to the end, not written", standing.id)
            batch.drain()
        reach("return.before", batch=batch.batch_id)

    # -- before the decision: every failure aborts -----------------------------------------------

    def _prepare(self, batch: Batch) -> TransactionRecord:
        try:
            shares = self._vote(batch, batch.write(self.incarnation))
            record = TransactionRecord(
                id=self.incarnation.transaction_id(batch.batch_id),
                token=self.incarnation.token,
                state=State.DECIDED,
                offsets=batch.offsets,
                shares=shares,
                decided_at=self._clock(),
            )
        except BaseException:
            # Presumed abort: no decision says commit, so nothing needs to be written. Tasks that
            # still run may prepare later; the next incarnation finds those.
            self._sweep()
            raise
        return record

    def _vote(self, batch: Batch, shares: Mapping[str, Share]) -> dict[str, Share]:
        voted = {}
        for name, sink in self._sinks.items():
            branch_id = BranchId(
                owner=self.incarnation.owner,
                batch_id=batch.batch_id,
                token=self.incarnation.token,
                sink=name,
                write_pass=0,
                attempt=DRIVER_ATTEMPT,
            )
            share = shares[name]
            reach("prepare_batch.before", batch=batch.batch_id, sink=name)
            committables = tuple(sink.prepareBatch(branch_id, share.committables))
            reach("prepare_batch.after", batch=batch.batch_id, sink=name)
            voted[name] = replace(share, committables=committables)
        names = [c.branch_id.name for share in voted.values() for c in share.committables]
        if len(set(names)) != len(names):
            raise ProtocolError(
                f"batch {batch.batch_id}: two branches have one name; the sinks must return each "
                "committable once"
            )
        return voted

    def _check_safe(self, record: TransactionRecord) -> None:
        now = self._clock()
        for committable in record.committables():
            if committable.safe_until is not None and committable.safe_until <= now:
                raise PrepareRejectedError(
                    f"{record.id}: the sink {committable.branch_id.sink!r} prepared a branch that "
                    f"its server may drop since {now - committable.safe_until:.0f} s ago, because "
                    "writing the batch took too long. Make the batches smaller, or the server's "
                    "transaction timeout longer.",
                    committable.branch_id,
                )

    # -- from the decision on: nothing aborts ----------------------------------------------------

    def _decide(self, record: TransactionRecord) -> TransactionRecord:
        """Make the decision and return the record that stands.

        Once it may have been written, nothing is aborted, whatever is raised. Deciding is
        idempotent, so an unknown outcome is settled by deciding again.
        """
        batch_id = record.id.batch_id
        reach("decide.before", batch=batch_id)
        unknown = False

        def decide() -> TransactionRecord:
            nonlocal unknown
            if not unknown:
                self._check_safe(record)  # again before each try: the log may have been away
            try:
                return self._log.decide(record)
            except DecisionUnknownError:
                unknown = True
                raise

        try:
            standing = self._patiently(decide, f"decide {record.id}")
        except PrepareRejectedError:
            self._sweep()  # every try before was answered: nothing was written
            raise
        reach("decide.after", batch=batch_id)
        return standing

    def _finish(self, record: TransactionRecord) -> None:
        done = self._complete(self._commit(record))
        self._sweep()
        if done.id.batch_id % _FORGET_EVERY_BATCHES == 0:
            try:
                self._log.forget(done, self.incarnation.token, retain=self._retain)
            except (LogUnavailableError, DecisionUnknownError):
                logger.warning("old records could not be dropped now; tried later", exc_info=True)

    def _commit(self, record: TransactionRecord) -> TransactionRecord:
        # Those that their servers drop first come first, so that no slow sink lets them expire.
        by_sink: dict[str, list[Committable]] = {}
        for committable in sorted(record.committables(), key=lambda c: c.safe_until or math.inf):
            by_sink.setdefault(committable.branch_id.sink, []).append(committable)
        self._all(self._commit_branches, by_sink.values())
        return record

    def _commit_branches(self, committables: Sequence[Committable]) -> None:
        """Commit one sink's branches of a transaction; repeat those whose outcome is unknown."""
        sink = self._sinks[committables[0].branch_id.sink]
        batch_id = committables[0].branch_id.batch_id
        left = list(committables)
        failed: list[SparkOnceError] = []
        for _ in left:
            reach("commit.before", batch=batch_id, sink=sink.name)

        def once() -> None:
            outcomes = list(zip(left, _commit_once(sink, left), strict=True))
            unsure = [(c, e) for c, e in outcomes if isinstance(e, CommitUnresolvedError)]
            left[:] = [committable for committable, _ in unsure]
            for committable, error in outcomes:
                if error is not None and not isinstance(error, CommitUnresolvedError):
                    # Said at once: the others may take long, and the query fails after them.
                    logger.error("%s is not committed: %s", committable.branch_id, error)
                    failed.append(error)
            for _, error in outcomes:
                if error is None:
                    reach("commit.after", batch=batch_id, sink=sink.name)
            if unsure:
                raise unsure[0][1]

        self._patiently(once, f"commit batch {batch_id} in {sink!r}", CommitUnresolvedError)
        if failed:
            raise failed[0]

    def _complete(self, record: TransactionRecord) -> TransactionRecord:
        reach("complete.before", batch=record.id.batch_id)
        done = self._patiently(
            lambda: self._log.complete(record, self.incarnation.token), f"complete {record.id}"
        )
        reach("complete.after", batch=record.id.batch_id)
        return done

    # -- orphans ---------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Abort what stands in our name and belongs to no unfinished decision (I7, I8).

        Called only while this incarnation has no batch in the making, so that all that carries
        its own token is either named by a record or left over. What cannot be swept now is
        swept after the next batch, so a failure here fails nothing.
        """
        try:
            unfinished = self._log.unfinished(self.incarnation.pipeline)
            named = {c.branch_id.name for record in unfinished for c in record.committables()}
            self._all(lambda sink: self._sweep_sink(sink, named), self._sinks.values())
        except Exception:
            logger.warning("orphans could not be aborted now; tried again later", exc_info=True)

    def _sweep_sink(self, sink: AnySink, named: set[str]) -> None:
        aborted = 0
        for owner in (self.incarnation.owner, *self.incarnation.retired):
            for found in sink.find_branches(owner):
                branch_id = found.branch_id
                of_other_sink = branch_id.sink != sink.name and branch_id.sink in self._sinks
                younger = branch_id.token > self.incarnation.token
                if of_other_sink or younger or branch_id.name in named:
                    continue
                try:
                    sink.abort(found)
                    aborted += 1
                except Exception:  # one that cannot be aborted keeps none of the others alive
                    logger.warning("%s could not be aborted now", branch_id, exc_info=True)
        if aborted:
            logger.info("%r: aborted %d left-over branches", sink, aborted)

    # -- helpers that hold no choices --------------------------------------------------------------

    def _all(self, action: Callable[[ResultT], None], items: Iterable[ResultT]) -> None:
        """Run `action` on all items at once; wait for every one, then raise the first error."""
        work = list(items)
        if len(work) == 1:
            action(work[0])
            return
        with ThreadPoolExecutor(min(_PARALLEL_BRANCHES, max(len(work), 1))) as pool:
            futures = [pool.submit(action, item) for item in work]
        for future in futures:
            future.result()

    def _patiently(
        self,
        action: Callable[[], ResultT],
        what: str,
        *unsure: type[SparkOnceError],
    ) -> ResultT:
        """Repeat `action` with backoff while its error says that repeating can help."""

        def say(state: RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome else None
            logger.warning("still trying to %s, attempt %d: %s", what, state.attempt_number, error)

        retrying = Retrying(
            retry=retry_if_exception_type(unsure or (LogUnavailableError, DecisionUnknownError)),
            wait=wait_random_exponential(multiplier=0.05, max=5.0),
            stop=stop_after_delay(self._commit_timeout_s),
            before_sleep=say,
            reraise=True,
        )
        return retrying(action)


def _commit_once(
    sink: AnySink, committables: Sequence[Committable]
) -> Sequence[SparkOnceError | None]:
    try:
        return sink.commitBatch(committables)
    except SparkOnceError:
        raise
    except Exception as error:
        raise CommitUnresolvedError(
            f"{sink!r} raised {type(error).__name__} from commitBatch: {error}",
            committables[0].branch_id,
        ) from error
