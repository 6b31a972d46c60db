"""The protocol itself, free of Spark.

    begin ─► recover ─► for each batch:  write ─► vote ─► DECIDE ─► commit ─► complete ─► sweep
                                         └── any failure: abort ──┘    └── any failure: the log
                                                                           alone says what holds

A batch moves left to right. The one point of no return is `TransactionLog.decide`: before it is
sent every failure aborts, after it nothing does.

    commit="immediate"     decide as soon as all has voted; Spark still holds the batch's replay, so
                          a branch that is lost after the decision is written again from it
    commit="after_checkpoint"   write ─► vote ─► PREPARED ─► Spark writes commits/N ─► decide …
                                               └─ or it does not: ABANDONED, abort, replay
    one sink, in the      write ─► vote ─► one COMMIT of rows and record: COMPLETE ─► sweep
    log's database                            └─ or none of both: abort, replay

Invariants (docs/protocol.md has all of them):

* I1, I2: only what a decision names is committed, and all of it;
* I3: a decision changes only by an amendment that takes out what is proven lost, or what an
  operator has ruled to be written again;
* I5: batch N+1 is not written while N is undecided;
* I6: nothing is aborted that belongs to a younger incarnation or that an unfinished record names.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from tenacity import (
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
    PreparedBranchLostError,
    PrepareRejectedError,
    ProtocolError,
    SparkOnceError,
    settle_command,
)
from sparkonce.failpoints import reach
from sparkonce.model import (
    ATTEMPT_BOUND,
    DRIVER_ATTEMPT,
    BranchId,
    Committable,
    CommittedBatch,
    TransactionId,
)
from sparkonce.sinks.base import (
    AnySink,
    OnePhaseSink,
    TwoPhaseCommitSink,
    at_once,
    check_committable,
)
from sparkonce.spark_hooks.orphans import find_orphans, named_by
from sparkonce.spark_hooks.rewrite import Lost, Rewrite, cannot_redo
from sparkonce.spark_hooks.ruled import End, end_ruled
from sparkonce.spark_hooks.waiting import still_trying, waiting_for
from sparkonce.txn_log.base import TransactionLog
from sparkonce.txn_log.identity import Claim, check_offsets
from sparkonce.txn_log.record import Incarnation, Share, State, TransactionRecord
from sparkonce.txn_log.settlement import Ruling
from sparkonce.txn_log.shared import SharedTransactions

logger = logging.getLogger("sparkonce")

ResultT = TypeVar("ResultT")

CommitPolicy: TypeAlias = Literal["immediate", "after_checkpoint"]
"""When a batch is decided: once it is prepared, or once Spark's checkpoint has it too."""

_FORGET_EVERY_BATCHES = 64
_MOST_REWRITES = 3
_NO_REPLAY = "Spark does not replay the batch any more"


class Batch(Protocol):
    """One micro-batch, as foreachBatch hands it over."""

    @property
    def batch_id(self) -> int: ...

    @property
    def offsets(self) -> tuple[str, ...]:
        """Source offsets of the batch, as Spark's checkpoint shows them."""

    def write(
        self, incarnation: Incarnation, rewrite: Rewrite | None = None
    ) -> Mapping[str, Share]:
        """Write the sinks on the executors and prepare.

        Args:
            incarnation: whose names the branches carry.
            rewrite: the sinks and partitions to write again; default: everything.

        Returns:
            What Spark returned, by sink name.
        """

    def drain(self) -> None:
        """Read the batch to its end without writing it, so that Spark's own state moves on."""


class Checkpoint(Protocol):
    """Spark's checkpoint of the query."""

    @property
    def location(self) -> str:
        """For messages."""

    def committed(self) -> int | None:
        """The highest batch that Spark's commit log has; -1 when it has none.

        None where it cannot be read: then nothing that depends on it is decided.
        """

    def has_offsets(self, batch_id: int) -> bool:
        """Whether Spark has begun the batch here: it plans its offsets first.

        A copy that was made before has none, and says nothing about what became of the batch.
        """


def overtaken(batch: str, checkpoint: Checkpoint, log: TransactionLog) -> FencedError:
    """Another driver has the batch, or is about to: by the checkpoint, and not by the log."""
    return FencedError(
        f"{batch} was about to be delivered, and another driver has gone on from "
        f"{checkpoint.location} meanwhile (the newest file of its sparkonce-drivers/ says which). "
        f"Unless that one is stopped by this log ({log.address}), it has a copy of it, or another "
        "one: let one of them run, and keep its log"
    )


class Coordinator:
    """Drives one pipeline's sinks through the transactions of one incarnation.

    Not safe for several threads: its caller holds a lock around each call.

    Args:
        sinks: in the order in which they vote.
        log: the transaction log.
        claim: what this driver says of itself.
        checkpoint: of the query.
        removed: sinks that get no rows; what stands in them is finished or swept.
        commit: when a batch is decided: "immediate" or "after_checkpoint".
        commit_timeout_s: how long the commits of one batch are repeated, in seconds.
        retain: how many batches of history the log keeps.
        may_repeat: raises where the claim is nobody's any more; asked before each further try to
            take a token.
        is_ours: whether no driver has begun on the checkpoint since this one, by whatever log.
        clock: gives Unix time in seconds.

    Attributes:
        incarnation: the token that this driver holds.
        pending: the batch that is prepared and waits for Spark's checkpoint, until it is finished.
        two_phases: why a batch takes two phases; None where one transaction holds it all.
    """

    def __init__(
        self,
        sinks: Sequence[AnySink],
        log: TransactionLog,
        claim: Claim,
        checkpoint: Checkpoint,
        *,
        removed: Sequence[AnySink] = (),
        commit: CommitPolicy = "immediate",
        commit_timeout_s: float,
        retain: int,
        may_repeat: Callable[[], None] = lambda: None,
        is_ours: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        tries = itertools.count()

        def begin() -> Incarnation:
            if next(tries):
                may_repeat()
            return log.begin(claim)

        self._sinks = {sink.name: sink for sink in sinks}
        self._all_sinks = {**self._sinks, **{sink.name: sink for sink in removed}}
        self._log = log
        self._checkpoint = checkpoint
        self._policy = commit
        self._commit_timeout_s = commit_timeout_s
        self._retain = retain
        self._is_ours = is_ours
        self._clock = clock
        self.pending: TransactionRecord | None = None
        self._write_began = math.inf
        reach("begin.before", batch=claim.batch_id)
        self.incarnation = self._patiently(
            begin, f"take a fencing token of pipeline {claim.pipeline!r}"
        )
        reach("begin.after", batch=claim.batch_id, token=self.incarnation.token)
        self._one_phase: OnePhaseSink[Any] | None = None
        self._shared: SharedTransactions | None = None
        self.two_phases = self._choose_phases()

    def _choose_phases(self) -> str | None:
        if self._policy != "immediate":
            return f"commit={self._policy!r} decides only when Spark's checkpoint has the batch"
        if len(self._sinks) != 1:
            return "the pipeline has several sinks"
        (sink,) = self._sinks.values()
        if not isinstance(sink, OnePhaseSink):
            return f"{sink!r} shares no transaction with a log"
        if type(sink).publish is not TwoPhaseCommitSink.publish:
            return f"{sink!r} publishes each batch before the log knows that it is complete"
        if not isinstance(self._log, SharedTransactions):
            return "the transaction log is in no sink's database"
        self._shared = self._log
        reason = sink.why_two_phases(self._log.why_apart)
        self._one_phase = sink if reason is None else None
        return reason

    def recover(self) -> None:
        """Finish what older incarnations decided, and abort what they left undecided.

        Lost branches of the batch that Spark is about to replay are left to `run`; where Spark's
        checkpoint cannot be read, those of every batch are that was not prepared for it, and what
        is prepared and undecided.

        Raises:
            PreparedBranchLostError: branches of a batch are lost that Spark does not replay.
        """
        committed = self._checkpoint.committed()
        replay = None if committed is None else self.incarnation.transaction_id(committed + 1)
        pipeline = self.incarnation.pipeline
        unfinished = self._patiently(
            lambda: self._log.unfinished(pipeline), f"read the log of pipeline {pipeline!r}"
        )
        problems: list[SparkOnceError] = []
        for found in unfinished:
            record = found
            if record.state is State.PREPARED:
                record = self._settle(record)
            if record.state is not State.DECIDED:
                continue
            logger.info("%s was decided and is not finished: committing it", record.id)
            reach("recover.before_finish", batch=record.id.batch_id)
            try:
                lost = self._commit(record, is_replayed=record.id == replay)
            except SparkOnceError as error:  # the others must not expire meanwhile
                problems.append(error)
                continue
            if not lost:
                self._complete(record)
            elif record.id != replay and (replay is not None or State.PREPARED in record.times):
                problems.append(cannot_redo(record, lost, _NO_REPLAY))
        reach("recover.before_sweep")
        if not any(isinstance(problem, FencedError) for problem in problems):
            self.sweep()  # what is left over may be what a commit waits for
        if problems:
            raise problems[0]

    def run(self, batch: Batch) -> None:
        """Take one batch through the protocol.

        When it returns, the batch is complete, or, with commit="after_checkpoint", `pending`.

        Raises:
            SinkError: see `sparkonce.errors`; Spark's replay of the batch goes on from there.
            FencedError: a newer incarnation owns the pipeline.
        """
        if self.pending is not None and not self.settle():
            raise ProtocolError(
                f"batch {batch.batch_id} begins, but the commit log of {self._checkpoint.location} "
                f"has no batch {self.pending.id.batch_id} yet"
            )
        transaction_id = self.incarnation.transaction_id(batch.batch_id)
        standing = self._patiently(lambda: self._log.find(transaction_id), f"find {transaction_id}")
        if standing is not None:
            check_offsets(standing, batch.offsets, self._checkpoint.location)
            if standing.state is State.PREPARED and standing.token < self.incarnation.token:
                standing = self._settle(standing)  # recovery could not: Spark had not begun it yet
                self.sweep()
        if standing is None or standing.state is State.ABANDONED:
            self._deliver(batch)
        else:
            if standing.state is State.PREPARED:
                # Nothing older is undecided any more: another driver prepared it, and settles it.
                raise FencedError(
                    f"{standing.id} was prepared by another driver (token {standing.token}) after "
                    f"this one (token {self.incarnation.token}) had begun; let that one run, or "
                    "stop it and start again"
                )
            if standing.state is State.DECIDED:
                self._finish(standing, batch)
            logger.info("%s is complete: its replay is read to the end, not written", standing.id)
            batch.drain()
        reach("return.before", batch=batch.batch_id)

    def settle(self) -> bool:
        """Decide and commit the `pending` batch if Spark's checkpoint has reached it.

        Returns:
            Whether nothing is pending any more.

        Raises:
            SinkError: see `run`.
            FencedError: a newer incarnation settles it.
        """
        if self.pending is not None and self._is_checkpointed(self.pending):
            if not self._is_ours():  # it is another driver's commit that is seen there
                raise self.overtaken(self.pending.id.batch_id)
            record = self._decide(self.pending)
            if record.state is State.DECIDED:
                self._finish(record)
            self.pending = None  # not before: who is interrupted (Ctrl-C) goes on in the next call
        return self.pending is None

    def _deliver(self, batch: Batch) -> None:
        record = self._prepare(batch)
        if record.state is State.COMPLETE:
            self._clean_up(record)
            return
        if self._policy == "immediate":
            self._finish(self._decide(record), batch)
            return
        reach("prepared.before", batch=batch.batch_id)
        self.pending = self._record(self._log.prepare, record, f"note {record.id} as prepared")
        safe_s = min((c.safe_until or math.inf for c in record.committables()), default=math.inf)
        logger.info(
            "%s is prepared and waits for Spark's checkpoint%s",
            record.id,
            f"; its servers keep it for {safe_s - self._clock():.0f} s" * math.isfinite(safe_s),
        )
        reach("prepared.after", batch=batch.batch_id)

    def _settle(self, record: TransactionRecord) -> TransactionRecord:
        """Decide or abandon what an older incarnation prepared. Spark's checkpoint says which."""
        is_checkpointed = self._is_checkpointed(record)
        if is_checkpointed:
            return self._decide(record)
        batch_id = record.id.batch_id
        if is_checkpointed is None or not self._checkpoint.has_offsets(batch_id):
            logger.warning(
                "%s is prepared, and is left so: %s cannot be read, or has not begun it",
                record.id,
                self._checkpoint.location,
            )
            return record
        reach("abandon.before", batch=batch_id)
        standing = self._patiently(
            lambda: self._log.abandon(record, self.incarnation.token), f"abandon {record.id}"
        )
        reach("abandon.after", batch=batch_id)
        logger.info("%s was prepared and Spark did not commit it: it is replayed", record.id)
        return standing

    def _is_checkpointed(self, record: TransactionRecord) -> bool | None:
        """Whether Spark has committed the batch; None where that cannot be read (any more)."""
        # "Has reached it", not "its file exists": Spark removes old files.
        committed = self._checkpoint.committed()
        return None if committed is None else committed >= record.id.batch_id

    # -- before the decision: every failure aborts -----------------------------------------------

    def _prepare(self, batch: Batch) -> TransactionRecord:
        try:
            self._write_began = self._clock()
            shares = self._vote(batch, batch.write(self.incarnation), write_pass=0)
            record = TransactionRecord(
                id=self.incarnation.transaction_id(batch.batch_id),
                token=self.incarnation.token,
                state=State.DECIDED,
                offsets=batch.offsets,
                shares=shares,
            )
            if self._one_phase and self._shared and any(record.committables()):
                return self._commit_one_phase(self._one_phase, self._shared, record)
            return record  # noqa: TRY300
        except FencedError:
            raise  # whoever has fenced us sweeps: beside a copy of the log tokens tell nothing
        except BaseException as error:
            # Presumed abort: no decision says commit, so nothing needs to be written. Tasks that
            # still run may prepare later; the next incarnation finds those.
            self.sweep()
            self._raise_if_fenced(error)
            raise

    def _commit_one_phase(
        self, sink: OnePhaseSink[Any], shared: SharedTransactions, record: TransactionRecord
    ) -> TransactionRecord:
        """Commit rows and record in one transaction; returns the record as it stands.

        It commits all of it or nothing, on the condition that nobody has written the log meanwhile.
        So whatever is raised, nothing is decided that an abort could hurt.
        """
        (committable,) = record.committables()
        reach("decide.before", batch=record.id.batch_id)
        write = self._patiently(
            lambda: shared.shared_write(record), f"read the log for {record.id}"
        )
        done = write.record
        self._check_is_next(record)
        try:
            with waiting_for(f"commit {record.id} and its record in {sink!r}"):
                sink.commit_one_phase(committable, write.statement)
        except CommitUnresolvedError as error:
            try:  # not only found: what is seen there may not have reached the log's standbys
                self._patiently(lambda: self._log.complete(done, record.token), f"find {record.id}")
            except (ProtocolError, FencedError):
                # Should it still land, then before the next start takes its token, which sees it.
                raise PrepareRejectedError(
                    f"{record.id}: its one transaction is not committed as far as the log shows; "
                    f"start the query again, which goes by the log: {error}",
                    committable.branch_id,
                ) from error
            except LogUnavailableError as away:
                raise DecisionUnknownError(
                    f"{record.id}: whether its one transaction is committed is not known; start "
                    f"the query again when the log is back, which tells: {error}; {away}"
                ) from away
            logger.info("%s is committed, though its answer was lost: %s", record.id, error)
        reach("complete.after", batch=record.id.batch_id)
        return done

    def _vote(
        self, batch: Batch, shares: Mapping[str, Share], *, write_pass: int
    ) -> dict[str, Share]:
        voted = {}
        for name, share in shares.items():
            branch_id = BranchId(
                owner=self.incarnation.owner,
                batch_id=batch.batch_id,
                token=self.incarnation.token,
                sink=name,
                write_pass=write_pass,
                attempt=DRIVER_ATTEMPT,
            )
            reach("vote.before", batch=batch.batch_id, sink=name)
            sink = self._sinks[name]
            # What is written again is decided already, so it takes two phases.
            one_phase = self._one_phase if write_pass == 0 else None
            vote = sink.vote if one_phase is None else one_phase.prepare_one_phase
            with waiting_for(f"prepare {self._name_of(batch.batch_id)} in {sink!r}"):
                prepared = [
                    check_committable(sink, committable, branch_id)
                    for committable in vote(branch_id, share.committables)
                ]
            reach("vote.after", batch=batch.batch_id, sink=name)
            voted[name] = replace(share, committables=tuple(prepared))
        names = [c.branch_id.name for share in voted.values() for c in share.committables]
        if len(set(names)) != len(names):
            raise ProtocolError(
                f"batch {batch.batch_id}: two branches have one name. Either a sink returned one "
                f"twice, or more than {ATTEMPT_BOUND:,} tasks ran in this Spark application while "
                "the batch was written: then give it fewer tasks, with coalesce() or writers=, or "
                "an application of its own"
            )
        return voted

    def _check_safe(
        self, transaction_id: TransactionId, committables: Iterable[Committable]
    ) -> None:
        now = self._clock()
        for committable in committables:
            if committable.safe_until is not None and committable.safe_until <= now:
                # The sink went by the clock of the executor.
                ahead_s = self._write_began - committable.safe_until
                why = (
                    "which is before its write began: the clocks of the executor and of the "
                    f"driver are at least {ahead_s:.0f} s apart. Correct them"
                    if ahead_s > 0
                    else f"because writing the batch took {now - self._write_began:.0f} s by the "
                    "driver's clock. Make the batches smaller, or the server's transaction timeout "
                    "longer; if that is far longer already, the executor's clock is behind the "
                    "driver's: correct them"
                )
                raise PrepareRejectedError(
                    f"{transaction_id}: the sink {committable.branch_id.sink!r} prepared a branch "
                    "that its server may drop since "
                    f"{now - committable.safe_until:.0f} s ago, {why}",
                    committable.branch_id,
                )

    def _check_is_next(self, record: TransactionRecord) -> None:
        """See that no other driver goes on with the query, while all can still be aborted.

        Raises:
            FencedError: one does.
            PrepareRejectedError: the checkpoint cannot be read.
        """
        try:
            is_next = self._is_ours() and not self._is_checkpointed(record)
        except Exception as error:
            raise PrepareRejectedError(
                f"{record.id}: {self._checkpoint.location} cannot be read: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not is_next:
            raise self.overtaken(record.id.batch_id)

    def overtaken(self, batch_id: int) -> FencedError:
        """Another driver goes on with the query by a copy of the log, whose tokens fence nobody.

        Such a copy is a backup that was restored while this driver stood still. The checkpoint is
        what the two share: each enters it, and Spark commits a batch there behind us only.

        Raises:
            FencedError: by this log it is told better.
        """
        with contextlib.suppress(LogUnavailableError):
            self._log.check_token(self.incarnation)
        return overtaken(self._name_of(batch_id), self._checkpoint, self._log)

    def _record(
        self,
        write: Callable[[TransactionRecord], TransactionRecord],
        record: TransactionRecord,
        what: str,
    ) -> TransactionRecord:
        """Write the first record of a batch; returns the one that stands.

        Once it may have been written nothing is aborted, whatever is raised. Writing it is
        idempotent, so an unknown outcome is settled by writing again.
        """
        unknown = False

        def attempt() -> TransactionRecord:
            nonlocal unknown
            if not unknown:
                # Again before each try: the log may have been away.
                self._check_safe(record.id, record.committables())
                self._check_is_next(record)
            try:
                return write(record)
            except DecisionUnknownError:
                unknown = True
                raise

        try:
            return self._patiently(attempt, what)
        except (PrepareRejectedError, ProtocolError):
            self.sweep()  # every try before was answered: nothing was written
            raise

    def _raise_if_fenced(self, error: BaseException) -> None:
        """A newer incarnation sweeps our branches; all that a sink sees is that they are gone."""
        if isinstance(error, Exception):
            with contextlib.suppress(LogUnavailableError):
                try:
                    self._log.check_token(self.incarnation)
                except FencedError as fenced:
                    raise fenced from error

    # -- from the decision on: nothing aborts ----------------------------------------------------

    def _decide(self, record: TransactionRecord) -> TransactionRecord:
        """Make the decision and return the record that stands."""
        what, batch_id = f"decide {record.id}", record.id.batch_id
        reach("decide.before", batch=batch_id)
        if record.state is State.PREPARED:  # Spark has moved on: there is no way back
            token = self.incarnation.token
            standing = self._patiently(lambda: self._log.decide(record, token), what)
        else:
            standing = self._record(self._log.decide, record, what)
        reach("decide.after", batch=batch_id)
        return standing

    def _finish(self, record: TransactionRecord, batch: Batch | None = None) -> None:
        """Commit what is decided; `batch` is Spark's replay of it, if there is one."""
        is_replayed = batch is not None
        lost = self._commit(record, is_replayed=is_replayed)
        for _ in range(_MOST_REWRITES):
            if lost and batch is not None:
                record = self._redo(record, lost, batch)
                lost = self._commit(record, is_replayed=is_replayed)
        if lost:
            why = _NO_REPLAY if batch is None else "each time they were lost again"
            error = cannot_redo(record, lost, why)
            self._raise_if_fenced(error)  # an operator may have ended them
            raise error
        self._clean_up(self._complete(record))

    def _clean_up(self, done: TransactionRecord) -> None:
        self.sweep()
        if done.id.batch_id % _FORGET_EVERY_BATCHES == 0:
            try:
                self._log.forget(done, self.incarnation.token, retain=self._retain)
            except (LogUnavailableError, DecisionUnknownError):
                logger.warning("old records could not be dropped now; tried later", exc_info=True)

    def _commit(self, record: TransactionRecord, *, is_replayed: bool) -> Lost:
        """Commit every branch, and publish the batch when none is lost; returns what is.

        Args:
            record: the batch.
            is_replayed: whether Spark replays it: only then may a branch be given up to be written
                again.

        Raises:
            SinkError: an outcome is not known, or the target refuses it.
        """
        deadline = time.monotonic() + self._commit_timeout_s
        # Those that their servers drop first come first, so that no slow sink lets them expire.
        by_sink: dict[str, list[Committable]] = {}
        settled: list[Committable] = []
        for committable in sorted(record.committables(), key=lambda c: c.safe_until or math.inf):
            if record.is_ruled_out(committable):
                settled.append(committable)
                continue
            by_sink.setdefault(committable.branch_id.sink, []).append(committable)
        visible: set[BranchId] = set()
        unsure: list[Committable] = []

        def end(committable: Committable) -> None:
            how = self._end_settled(record, committable)
            if how is End.VISIBLE:
                visible.add(committable.branch_id)
            elif how is End.UNKNOWN:
                unsure.append(committable)

        self._all(end, settled)
        lost: list[tuple[Committable, PreparedBranchLostError]] = []
        redo = {
            c.branch_id
            for c in record.committables()
            if is_replayed and record.ruling(c) is Ruling.REDO
        }
        self._all(
            lambda some: lost.extend(self._commit_branches(some, deadline, redo)), by_sink.values()
        )
        if not lost:
            self._all(end, unsure)  # its server may be back: the manifest is written once
            self._publish(record, deadline, visible)
        return lost

    def _end_settled(self, record: TransactionRecord, committable: Committable) -> End:
        """Let no older driver that wakes up commit it. Best effort: its server may be gone."""
        branch_id, ruling = committable.branch_id, record.ruling(committable)
        logger.warning("%s: settled by an operator: %s", branch_id, ruling)
        sink, target = self._all_sinks.get(branch_id.sink), record.shares[branch_id.sink].target
        with waiting_for(f"end {branch_id} in {sink!r}"):
            ended = end_ruled(sink, committable, target)
        if ended.how is End.VISIBLE:
            logger.error(
                "%s is committed, though it is settled as %s: its rows are visible, and twice if "
                "they were put in by hand too",
                branch_id,
                ruling,
            )
        elif ended.how is End.UNKNOWN:
            logger.warning("%s is not proven to have ended: %s", branch_id, ended.why)
        return ended.how

    def _commit_branches(
        self, committables: Sequence[Committable], deadline: float, redo: Collection[BranchId]
    ) -> Lost:
        """Commit one sink's branches of a transaction; repeat those whose outcome is unknown."""
        sink = self._all_sinks[committables[0].branch_id.sink]
        batch_id = committables[0].branch_id.batch_id
        left = list(committables)
        lost: list[tuple[Committable, PreparedBranchLostError]] = []
        failed: list[SparkOnceError] = []
        for _ in left:
            reach("commit.before", batch=batch_id, sink=sink.name)

        def once() -> None:
            ruled = [c for c in left if c.branch_id in redo]
            asked = [c for c in left if c.branch_id not in redo]
            outcomes = [(c, _redone(sink, c)) for c in ruled]
            outcomes += zip(asked, _commit_once(sink, asked) if asked else (), strict=True)
            left[:] = [c for c, error in outcomes if isinstance(error, CommitUnresolvedError)]
            for committable, error in outcomes:
                if isinstance(error, PreparedBranchLostError):
                    logger.warning("%s is lost: %s", committable.branch_id, error)
                    lost.append((committable, error))
                elif error is None:
                    reach("commit.after", batch=batch_id, sink=sink.name)
                elif not isinstance(error, CommitUnresolvedError):
                    # Said at once: the others may take long, and the query fails after them.
                    logger.error("%s is not committed: %s", committable.branch_id, error)
                    failed.append(error)
            for _, error in outcomes:
                if isinstance(error, CommitUnresolvedError):
                    raise error

        self._until_known(once, f"commit {self._name_of(batch_id)} in {sink!r}", deadline)
        if failed:
            raise failed[0]
        return lost

    def _until_known(self, action: Callable[[], None], what: str, deadline: float) -> None:
        """Repeat `action` while its outcome is unknown, and while nobody has taken over.

        An outage is when an operator may rule on what is repeated here, and that takes a token. So
        the log is asked before each repeat; the first try goes by what it has just said. A log that
        is away puts the repeat off until the deadline: to wait can cost a branch, which is proven
        and said, but to show what was put in by hand meanwhile doubles its rows in silence.

        Raises:
            CommitUnresolvedError: the deadline has passed.
            FencedError: there is a younger token; what is left is its owner's.
        """
        unknown: CommitUnresolvedError | None = None

        def attempt() -> None:
            nonlocal unknown
            if unknown is not None:
                self._check_token_again(unknown)
            try:
                action()
            except CommitUnresolvedError as error:
                unknown = error
                raise

        self._patiently(attempt, what, CommitUnresolvedError, deadline=deadline)

    def _check_token_again(self, unknown: CommitUnresolvedError) -> None:
        try:
            self._log.check_token(self.incarnation)
        except LogUnavailableError as away:
            raise CommitUnresolvedError(
                f"{unknown}; not tried again until the log can say who owns the pipeline: {away}",
                unknown.branch_id,
            ) from away

    def _redo(self, record: TransactionRecord, lost: Lost, batch: Batch) -> TransactionRecord:
        """Write lost branches again from Spark's replay, and amend the decision.

        Raises:
            PreparedBranchLostError: the replay holds other rows than the batch had.
        """
        gone = [committable for committable, _ in lost]
        rewrite = Rewrite.of(record, gone)
        if rewrite is None:
            raise cannot_redo(record, lost, "others of the sink that hold its rows are committed")
        if not rewrite.partitions.keys() <= self._sinks.keys():
            raise cannot_redo(record, lost, "the sink was removed from the pipeline")
        logger.warning("%s: writing again what is lost: %s", record.id, rewrite)
        reach("redo.before", batch=batch.batch_id)
        try:
            self._write_began = self._clock()
            written = batch.write(self.incarnation, rewrite)
            if told := rewrite.difference(record, written):
                raise cannot_redo(record, lost, f"Spark's replay differs: {told}")  # noqa: TRY301
            voted = self._vote(batch, written, write_pass=rewrite.write_pass)
            self._check_safe(record.id, (c for s in voted.values() for c in s.committables))
        except BaseException as error:
            self.sweep()  # presumed abort, as before any decision: no record names them
            self._raise_if_fenced(error)
            if isinstance(error, PrepareRejectedError):  # of which the runbook says: all is aborted
                logger.error(  # noqa: TRY400 - raised
                    "%s stays decided: what is lost of it could not be written again now. The next "
                    "start tries once more; or %s",
                    record.id,
                    settle_command(gone[0].branch_id),
                )
            raise
        amended = rewrite.amend(record, voted, gone)
        reach("amend.before", batch=batch.batch_id)

        def amend() -> TransactionRecord:
            self._check_is_next(record)
            return self._log.amend(amended, self.incarnation.token)

        standing = self._patiently(amend, f"amend {record.id}")
        reach("amend.after", batch=batch.batch_id)
        return standing

    def _complete(self, record: TransactionRecord) -> TransactionRecord:
        reach("complete.before", batch=record.id.batch_id)
        done = self._patiently(
            lambda: self._log.complete(record, self.incarnation.token), f"complete {record.id}"
        )
        reach("complete.after", batch=record.id.batch_id)
        return done

    def _publish(
        self, record: TransactionRecord, deadline: float, visible: Collection[BranchId]
    ) -> None:
        """Let each sink tell its readers that the batch is whole.

        Args:
            record: of the batch.
            deadline: until when it is tried again.
            visible: branches that show, though an operator has said otherwise.
        """
        owner = replace(self.incarnation.owner, query_id=record.id.query_id)

        def publish(item: tuple[str, Share]) -> None:
            name, share = item
            sink = self._all_sinks[name]
            batch = CommittedBatch(
                pipeline=record.id.pipeline,
                owner=owner,
                batch_id=record.id.batch_id,
                revision=record.revision,
                offsets=record.offsets,
                # What an operator has settled was not committed: readers must not look for it.
                committables=tuple(
                    c
                    for c in share.committables
                    if not record.is_ruled_out(c) or c.branch_id in visible
                ),
            )

            def once() -> None:
                with _unresolved(sink, "publish"):
                    sink.publish(batch)

            self._until_known(
                once,
                f"publish {self._name_of(batch.batch_id)} in {sink!r}",
                deadline,
            )

        # A sink that is gone from the pipeline has no branches left in it: the start refuses that.
        self._all(publish, [(n, s) for n, s in record.shares.items() if n in self._all_sinks])

    # -- orphans ---------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Abort what stands in our name and belongs to no unfinished decision (I7, I8).

        Called only while this incarnation has no batch in the making, so that all that carries
        its own token is either named by a record or left over. What cannot be swept now is
        swept after the next batch, so a failure here fails nothing.
        """
        pipeline = self.incarnation.pipeline
        with self._sweeping(self._log.address):
            with waiting_for(f"read what is open of pipeline {pipeline!r}, before a sweep"):
                unfinished = self._log.unfinished(pipeline)
            named = named_by(unfinished)
            self._all(lambda sink: self._sweep_sink(sink, named), self._all_sinks.values())

    def _sweep_sink(self, sink: AnySink, named: set[str]) -> None:
        told = f"abort left-over branches of pipeline {self.incarnation.pipeline!r} in {sink!r}"
        with self._sweeping(repr(sink)), waiting_for(told):
            self._abort_orphans(sink, named)

    @contextlib.contextmanager
    def _sweeping(self, where: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            logger.warning(
                "pipeline %r, %s: orphans could not be aborted now; tried again later: %s",
                self.incarnation.pipeline,
                where,
                error,
            )
            logger.debug("why orphans could not be aborted", exc_info=True)

    def _abort_orphans(self, sink: AnySink, named: set[str]) -> None:
        failures: list[Exception] = []
        orphans = list(
            find_orphans(
                sink,
                (self.incarnation.owner, *self.incarnation.retired),
                token=self.incarnation.token,
                named=named,
                others=self._all_sinks.keys(),
                failures=failures,
            )
        )
        if sink.lists_uncommitted_only:
            orphans = [found for found in orphans if not self._commit_again(sink, found)]
        errors = sink.abort_many(orphans) if orphans else ()
        for found, error in zip(orphans, errors, strict=True):
            if error is not None:
                logger.warning("%s could not be aborted now: %s", found.branch_id, error)
                logger.debug("why %s could not be aborted", found.branch_id, exc_info=error)
        if aborted := sum(error is None for error in errors):
            logger.info("%r: aborted %d left-over branches", sink, aborted)
        if failures:
            raise failures[0]

    def _commit_again(self, sink: AnySink, found: Committable) -> bool:
        """Commit a branch of a complete batch that is not committed any more; False if it is none.

        That is so where a standby was promoted that had not received the commit, or a backup
        restored that was made before it. An abort would take the last copy of its rows.
        """
        branch_id = found.branch_id
        if branch_id.batch_id is None:
            return False
        record = self._log.find(
            TransactionId(self.incarnation.pipeline, branch_id.owner.query_id, branch_id.batch_id)
        )
        if record is None or not record.state.is_finished:
            return False
        for committable in record.committables():
            if committable.branch_id == branch_id and not record.is_ruled_out(committable):
                sink.commit(committable)
                logger.error(
                    "%s is complete, and %s was found prepared in %r: its server went back in "
                    "time (a standby was promoted that had not all of it, or a backup restored). "
                    "It is committed again; look there for the batches behind it",
                    record.id,
                    branch_id,
                    sink,
                )
                return True
        return False

    # -- helpers that hold no choices --------------------------------------------------------------

    def _name_of(self, batch_id: int | None) -> str:
        return f"batch {batch_id} of pipeline {self.incarnation.pipeline!r}"

    def _all(self, action: Callable[[ResultT], None], items: Iterable[ResultT]) -> None:
        at_once(action, items)

    def _patiently(
        self,
        action: Callable[[], ResultT],
        what: str,
        *unsure: type[SparkOnceError],
        deadline: float | None = None,
    ) -> ResultT:
        """Repeat `action` with backoff while its error says that repeating can help.

        An outcome that one try has left unknown stays so when the log is away from then on.
        """
        left_s = self._commit_timeout_s if deadline is None else deadline - time.monotonic()
        unknown: list[DecisionUnknownError] = []

        def attempt() -> ResultT:
            try:
                return action()
            except DecisionUnknownError as error:
                unknown.append(error)
                raise
            except LogUnavailableError as error:
                if unknown:
                    raise DecisionUnknownError(f"{unknown[0]}; and now: {error}") from error
                raise

        retrying = Retrying(
            retry=retry_if_exception_type(unsure or (LogUnavailableError, DecisionUnknownError)),
            wait=wait_random_exponential(multiplier=0.05, max=5.0),
            stop=stop_after_delay(max(left_s, 0.0)),
            before_sleep=still_trying(what),
            reraise=True,
        )
        with waiting_for(what):
            return retrying(attempt)


@contextlib.contextmanager
def _unresolved(sink: AnySink, verb: str, branch_id: BranchId | None = None) -> Iterator[None]:
    """Any other error of a sink than ours leaves the outcome unknown."""
    try:
        yield
    except SparkOnceError:
        raise
    except Exception as error:
        raise CommitUnresolvedError(
            f"{sink!r} raised {type(error).__name__} from {verb}: {error}", branch_id
        ) from error


def _commit_once(
    sink: AnySink, committables: Sequence[Committable]
) -> Sequence[SparkOnceError | None]:
    with _unresolved(sink, "commit_many", committables[0].branch_id):
        return sink.commit_many(committables)


def _redone(sink: AnySink, committable: Committable) -> SparkOnceError | None:
    """The outcome of a branch that is to be written again, by an operator's word.

    It is asked to commit first only where the sink's own `abort_decided` sees what that has come
    to: the word is older, and says nothing of a commit whose answer was lost.
    """
    error: SparkOnceError | None = CommitUnresolvedError("it was ended before it was asked")
    if type(sink).abort_decided is not TwoPhaseCommitSink.abort_decided:
        (error,) = _commit_once(sink, [committable])
    return _given_up(sink, committable, error)


def _given_up(
    sink: AnySink, committable: Committable, error: SparkOnceError | None
) -> SparkOnceError | None:
    """End a branch that could not be committed, and ask again.

    What is proven, either way, stands above an operator's word. An abort undoes no commit, and need
    not say that there was one.
    """
    if error is None or isinstance(error, PreparedBranchLostError):
        return error
    try:
        sink.abort_decided(committable)
    except Exception as failure:  # noqa: BLE001 - repeated, as any unknown outcome
        unresolved = CommitUnresolvedError(
            f"{sink!r}: an operator ruled that {committable.branch_id} is written again, and it "
            f"cannot be ended now: {failure}",
            committable.branch_id,
        )
        unresolved.__cause__ = failure
        return unresolved
    (proven,) = _commit_once(sink, [committable])
    if proven is None or isinstance(proven, PreparedBranchLostError):
        return proven
    lost = PreparedBranchLostError(
        f"an operator ruled that it is written again; before: {error}", committable.branch_id
    )
    lost.__cause__ = error
    return lost
