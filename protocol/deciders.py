"""When a batch is decided: three strategies behind one interface. `choose` picks one at the start.

    Immediate        decide as soon as all sinks have voted; Spark still holds the batch's replay,
                     so a branch that is lost after the decision is rewritten from it
    AfterCheckpoint  record the batch as PREPARED; decide it once Spark's commit log has reached it
    WithTheLog       one transaction in the database that the sink and the log share: rows and
                     record are committed together, so the decision is the commit

Until the record is sent to the log every failure aborts the batch. Once the log may have it,
nothing is aborted, whatever is raised, until the log has been read again. Only WithTheLog
may abort after that: its transaction holds rows and record, so an abort ends both or neither.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from sparkonce.errors import (
    CommitUnresolvedError,
    DecisionUnknownError,
    FencedError,
    LogUnavailableError,
    PrepareRejectedError,
    ProtocolError,
)
from sparkonce.model import BranchId, Committable
from sparkonce.protocol.decisions import is_checkpointed
from sparkonce.protocol.lease import Lease
from sparkonce.protocol.pipeline import Moment, Pipeline
from sparkonce.protocol.preparing import aborting_on_failure, check_safe
from sparkonce.protocol.sweeping import sweep
from sparkonce.sinks import verbs
from sparkonce.sinks.base import AnySink
from sparkonce.sinks.capabilities import CommitsOnePhase, Publishes
from sparkonce.steps import step
from sparkonce.txn_log.record import TransactionRecord
from sparkonce.txn_log.shared import SharedTransactions

logger = logging.getLogger("sparkonce")


class Decider(ABC):
    """How a prepared batch becomes a decision.

    Attributes:
        pending: the batch that waits for Spark's checkpoint; None where none does.
    """

    pending: TransactionRecord | None = None

    @abstractmethod
    def decide(
        self, record: TransactionRecord, lease: Lease, *, write_began: Moment
    ) -> TransactionRecord:
        """Decide the batch; returns the record that the log holds: DECIDED, PREPARED or COMPLETE.

        Args:
            record: what is prepared.
            lease: of this driver.
            write_began: when the batch's write began.
        """

    def decide_pending(self, lease: Lease) -> TransactionRecord | None:
        """Decide the pending batch if Spark's checkpoint has reached it.

        Returns:
            Its record as the log holds it; None while the checkpoint has not reached it, or where
            none is pending.
        """
        del lease
        return None

    def vote(
        self, sink: AnySink, branch_id: BranchId, committables: Sequence[Committable]
    ) -> Sequence[Committable]:
        """Let the sink vote, in the way that this decision needs."""
        return verbs.vote(sink, branch_id, committables)


class Immediate(Decider):
    """Decide as soon as all sinks have voted: commit="immediate"."""

    def decide(
        self, record: TransactionRecord, lease: Lease, *, write_began: Moment
    ) -> TransactionRecord:
        with _step("decide", record) as deciding:
            write = lease.pipeline.log.decide
            decided = _record_first(write, record, lease, deciding, write_began)
            deciding.result = decided
        return decided


class AfterCheckpoint(Decider):
    """Decide once Spark's checkpoint has the batch too: commit="after_checkpoint", as in Flink."""

    def decide(
        self, record: TransactionRecord, lease: Lease, *, write_began: Moment
    ) -> TransactionRecord:
        with _step("hold", record) as holding:
            write = lease.pipeline.log.prepare
            self.pending = _record_first(write, record, lease, holding, write_began)
            holding.result = self.pending
        safe_s = min((c.safe_until or math.inf for c in record.committables()), default=math.inf)
        limit = ""
        if math.isfinite(safe_s):
            limit = f"; its servers keep it for {safe_s - lease.pipeline.clock():.0f} s"
        logger.info("%s is prepared and waits for Spark's checkpoint%s", record.id, limit)
        return self.pending

    def decide_pending(self, lease: Lease) -> TransactionRecord | None:
        record = self.pending
        if record is None or not is_checkpointed(
            record.id.batch_id, lease.pipeline.checkpoint.committed()
        ):
            return None
        return decide_prepared(record, lease)


class WithTheLog(Decider):
    """Commit rows and record in one transaction of the database that sink and log share."""

    def __init__(self, sink: CommitsOnePhase, log: SharedTransactions) -> None:
        self._sink = sink
        self._log = log

    def vote(
        self, sink: AnySink, branch_id: BranchId, committables: Sequence[Committable]
    ) -> Sequence[Committable]:
        del sink
        return self._sink.prepare_one_phase(branch_id, committables)

    def decide(
        self, record: TransactionRecord, lease: Lease, *, write_began: Moment
    ) -> TransactionRecord:
        # The one transaction commits rows and record or nothing, and only if nobody has written to
        # the log meanwhile. So an abort is safe, whatever is raised.
        committables = tuple(record.committables())
        if not committables:  # no rows, and so no transaction of the sink's
            return Immediate().decide(record, lease, write_began=write_began)
        with aborting_on_failure(lease), _step("decide", record) as deciding:
            write = lease.pipeline.ask_log(lambda: self._log.shared_write(record), deciding)
            lease.check_not_overtaken(record.id)
            try:
                self._sink.commit_one_phase(committables[0], write.statement)
            except CommitUnresolvedError as error:
                self._find_out(error, write.record, committables[0], lease)
            deciding.result = write.record
        return write.record

    @staticmethod
    def _find_out(
        error: CommitUnresolvedError,
        done: TransactionRecord,
        committable: Committable,
        lease: Lease,
    ) -> None:
        """Return if the log shows that the one transaction was committed, though no answer came."""
        pipeline = lease.pipeline
        with _step("look", done) as looking:
            try:  # a write, not a read: a record that is read may not be on the log's standbys yet
                pipeline.ask_log(lambda: pipeline.log.complete(done, lease.token), looking)
            except (ProtocolError, FencedError):
                # If it still commits, it does so before the next start gets its token, and that
                # start finds the record.
                raise PrepareRejectedError(
                    f"{done.id}: its one transaction is not committed as far as the log shows; "
                    f"start the query again, which goes by the log: {error}",
                    committable.branch_id,
                ) from error
            except LogUnavailableError as unreachable:
                raise DecisionUnknownError(
                    f"{done.id}: whether its one transaction is committed is not known; start "
                    "the query again when the log is reachable, which shows it: "
                    f"{error}; {unreachable}"
                ) from unreachable
        logger.info("%s is committed, though the answer was lost: %s", done.id, error)


def decide_prepared(record: TransactionRecord, lease: Lease) -> TransactionRecord:
    """Decide a batch that the log holds as PREPARED, and that Spark has moved on from.

    Raises:
        FencedError: the commit log that shows it is the work of another driver.
    """
    if not lease.is_newest_entry():
        raise lease.overtaken(record.id.batch_id)
    with _step("decide", record) as deciding:
        decided = deciding.result = lease.pipeline.ask_log(
            lambda: lease.pipeline.log.decide(record, lease.token), deciding
        )
    return decided


def choose(pipeline: Pipeline) -> tuple[Decider, str | None]:
    """The decider for a pipeline's settings.

    Returns:
        The decider, and why a batch takes two phases; None where one transaction holds it all.
    """
    if pipeline.commit == "after_checkpoint":
        return AfterCheckpoint(), (
            f"commit={pipeline.commit!r} decides only when Spark's checkpoint has the batch"
        )
    if len(pipeline.sinks) != 1:
        return Immediate(), "the pipeline has several sinks"
    (sink,) = pipeline.sinks.values()
    if not isinstance(sink, CommitsOnePhase):
        return Immediate(), f"{sink!r} shares no transaction with a log"
    if isinstance(sink, Publishes):
        return (
            Immediate(),
            f"{sink!r} publishes each batch before the log knows that it is complete",
        )
    if not isinstance(pipeline.log, SharedTransactions):
        return Immediate(), "the transaction log is in no sink's database"
    reason = sink.why_two_phases(pipeline.log.why_apart)
    return (WithTheLog(sink, pipeline.log), None) if reason is None else (Immediate(), reason)


def _record_first(
    write: Callable[[TransactionRecord], TransactionRecord],
    record: TransactionRecord,
    lease: Lease,
    what: step,
    write_began: Moment,
) -> TransactionRecord:
    """Write the first record of a batch; returns the one that the log holds.

    Once it may have been written nothing is aborted, whatever is raised. Writing it is idempotent,
    so an unknown outcome is resolved by writing again.
    """
    unknown = False

    def attempt() -> TransactionRecord:
        nonlocal unknown
        if not unknown:  # again before each try: the log may have been unreachable for long
            now = lease.pipeline.moment()
            check_safe(record.id, record.committables(), now=now, write_began=write_began)
            lease.check_not_overtaken(record.id)
        elif not lease.is_newest_entry():  # the other driver's log may be a copy without the record
            raise lease.overtaken(record.id.batch_id)
        try:
            return write(record)
        except DecisionUnknownError:
            unknown = True
            raise

    try:
        return lease.pipeline.ask_log(attempt, what)
    except (PrepareRejectedError, ProtocolError):
        sweep(lease)  # it reads the log first, and leaves what a record names
        raise


def _step(name: str, record: TransactionRecord) -> step:
    return step(name, batch=record.id.batch_id, pipeline=record.id.pipeline)
