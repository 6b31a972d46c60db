"""The right of a driver to act for its pipeline: the one place that knows whether it still holds.

    acquire ─► the log gives a fencing token ─► the driver writes an entry into Spark's checkpoint
    check   ─► the log: does a newer driver hold the pipeline?
    check_not_overtaken ─► the checkpoint: is there a newer entry, or has Spark moved on?
    release ─► the driver is done; a check fails from then on, whatever the log says

Two places are asked, because a token orders only the drivers that use one log. If two drivers use
copies of a log (a backup was restored while one was paused), each copy has its own tokens. The
drivers share the checkpoint. An entry is a numbered file in its sparkonce-drivers/; a driver
creates the next number after those that it has seen, and of two drivers only one can.

Each write of the log checks the token itself, in the same step. The checks here name the driver
that is in the way, and keep a driver from acting outside the log.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Protocol, Self

from sparkonce.errors import FencedError, LogError, PrepareRejectedError
from sparkonce.model import Owner, TransactionId
from sparkonce.protocol.decisions import is_checkpointed, is_next_batch
from sparkonce.protocol.pipeline import Pipeline
from sparkonce.steps import step
from sparkonce.txn_log.claim import Claim
from sparkonce.txn_log.record import Incarnation


class Entrance(Protocol):
    """Spark's checkpoint, where each driver writes an entry when it starts."""

    def check_may_begin(self, *, is_first_try: bool) -> None:
        """Return if the driver may take a token now.

        Raises:
            FencedError: Spark's commit log has the batch that the driver is about to deliver.
            ProtocolError: the run has ended while it waited for its token.
        """

    def enter(self, incarnation: Incarnation) -> bool:
        """Bind the checkpoint to the log and write the entry; False when another driver has."""

    def is_newest_entry(self) -> bool:
        """Whether no other driver has written an entry since."""


class NoEntrance:
    """For an operator's command, which runs no batch."""

    def check_may_begin(self, *, is_first_try: bool) -> None:
        pass

    def enter(self, incarnation: Incarnation) -> bool:
        del incarnation
        return True

    def is_newest_entry(self) -> bool:
        return True


class Lease:
    """A fencing token and an entry in the checkpoint; made by `acquire`.

    Attributes:
        pipeline: whose it is.
        incarnation: the token that this driver holds, and whose names its branches carry.
    """

    def __init__(self, pipeline: Pipeline, incarnation: Incarnation, entrance: Entrance) -> None:
        self.incarnation = incarnation
        self.pipeline = pipeline
        self._entrance = entrance
        self._is_released = False

    @classmethod
    def acquire(cls, pipeline: Pipeline, claim: Claim, entrance: Entrance) -> Self:
        """Take the next fencing token, and write an entry into the checkpoint with it.

        Raises:
            ConfigurationError: the identity guard refuses the start; nobody is fenced.
            FencedError: another driver has continued from the checkpoint.
            ProtocolError: the run has ended meanwhile.
            LogError: the log stayed unreachable; no token, or one that nobody uses.
        """
        tries = itertools.count()

        def begin() -> Incarnation:
            is_again = next(tries) > 0
            entrance.check_may_begin(is_first_try=not is_again)
            return pipeline.log.begin(replace(claim, is_repeated=claim.is_repeated or is_again))

        with step("begin", batch=claim.batch_id, pipeline=pipeline.name) as begun:
            incarnation = begun.result = pipeline.ask_log(begin, begun)
        lease = cls(pipeline, incarnation, entrance)
        if not entrance.enter(incarnation):
            raise lease.overtaken(claim.batch_id)
        return lease

    @property
    def name(self) -> str:
        """The pipeline's name."""
        return self.pipeline.name

    @property
    def token(self) -> int:
        """The fencing token."""
        return self.incarnation.token

    @property
    def owner(self) -> Owner:
        """What the names of this driver's branches begin with."""
        return self.incarnation.owner

    def transaction_id(self, batch_id: int) -> TransactionId:
        return self.incarnation.transaction_id(batch_id)

    def check(self) -> None:
        """Return if this driver holds the pipeline, as far as the log says.

        Raises:
            FencedError: a newer driver does, or the lease was released.
            LogUnavailableError: the log cannot be asked now.
        """
        if self._is_released:
            raise FencedError(
                f"token {self.token} of pipeline {self.pipeline.name!r} was released: the next "
                "start of the query continues"
            )
        self.pipeline.log.check_token(self.incarnation)

    def check_not_overtaken(self, transaction_id: TransactionId) -> None:
        """Check that no other driver has continued the query, while all can still be aborted.

        Raises:
            FencedError: another driver has.
            PrepareRejectedError: the checkpoint cannot be read.
        """
        batch_id, checkpoint = transaction_id.batch_id, self.pipeline.checkpoint
        try:
            is_newest, committed = self.is_newest_entry(), checkpoint.committed()
        except Exception as error:
            raise PrepareRejectedError(
                f"{transaction_id}: {checkpoint.location} cannot be read: "
                f"{type(error).__name__}: {error}"
            ) from error
        if committed is None:
            raise PrepareRejectedError(
                f"{transaction_id}: the commit log of {checkpoint.location} cannot be read"
            )
        if not is_newest or is_checkpointed(batch_id, committed):
            raise self.overtaken(batch_id)

    def is_newest_entry(self) -> bool:
        """Whether no other driver has written an entry into the checkpoint since this one."""
        return self._entrance.is_newest_entry()

    def may_serve(self, batch_id: int, *, last: int) -> bool:
        """Whether the token that has served the batch `last` may serve this one, without a start.

        Raises:
            LogUnavailableError: the checkpoint cannot be read, or the log stayed unreachable.
        """
        committed = self.pipeline.checkpoint.committed()
        if not is_next_batch(batch_id, last=last, committed=committed):
            return False
        try:
            with step("look", batch=batch_id, pipeline=self.name) as looking:
                self.pipeline.ask_log(self.check, looking)
        except FencedError:
            return False
        return self.is_newest_entry()

    def release(self) -> None:
        """Act no more for this pipeline; the next driver takes a token of its own."""
        self._is_released = True

    def fenced(self) -> FencedError | None:
        """The error that names the newer driver; None where this log knows none, or cannot say."""
        try:
            self.pipeline.log.check_token(self.incarnation)
        except FencedError as fenced:
            return fenced
        except LogError:
            return None
        return None

    def raise_if_fenced(self, error: BaseException) -> None:
        """If a newer driver is the real cause of `error`, raise `FencedError` instead.

        The newer driver swept our branches, and a sink notices only that they are missing.
        """
        if isinstance(error, Exception) and (fenced := self.fenced()) is not None:
            raise fenced from error

    def overtaken(self, batch_id: int) -> FencedError:
        """The error where another driver has continued from the checkpoint."""
        return self.fenced() or overtaken_in_checkpoint(self.pipeline, batch_id)


def overtaken_in_checkpoint(pipeline: Pipeline, batch_id: int) -> FencedError:
    """The error where another driver has continued from the checkpoint, with another log."""
    return FencedError(
        f"batch {batch_id} of pipeline {pipeline.name!r} was about to be delivered, and another "
        f"driver has continued from {pipeline.checkpoint.location} meanwhile (the newest file of "
        "its sparkonce-drivers/ names it). If an older driver was still running when this one "
        "started, stop that one and start this query again. Otherwise the driver uses a copy of "
        f"this log ({pipeline.log.address}), or another log: let one of the two run, and keep its "
        "log"
    )
