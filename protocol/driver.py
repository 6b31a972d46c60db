"""One driver of a pipeline: the lease and the decider with which it runs `transaction`.

Driver.start(pipeline, claim, entrance) ─► recover ─► (deliver, commit_pending)* ─► release
"""

from __future__ import annotations

from typing import Self

from sparkonce.protocol import transaction
from sparkonce.protocol.deciders import choose
from sparkonce.protocol.lease import Entrance, Lease
from sparkonce.protocol.pipeline import Batch, Pipeline
from sparkonce.protocol.rewriting import Rewrite
from sparkonce.protocol.sweeping import sweep
from sparkonce.txn_log.claim import Claim
from sparkonce.txn_log.record import Incarnation, TransactionRecord


class Driver:
    """Takes one pipeline through the transactions of one incarnation.

    Not safe for several threads: its caller holds a lock around each call. Making one fences
    nobody; `start` does.

    Attributes:
        lease: the right to act.
        two_phases: why a batch takes two phases; None where one transaction holds it all.
    """

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self._decider, self.two_phases = choose(lease.pipeline)

    @classmethod
    def start(cls, pipeline: Pipeline, claim: Claim, entrance: Entrance) -> Self:
        """Take a token, which fences the driver before; see `Lease.acquire`."""
        return cls(Lease.acquire(pipeline, claim, entrance))

    @classmethod
    def abort(cls, pipeline: Pipeline, claim: Claim, entrance: Entrance) -> None:
        """Abort a batch of this run in a process that does not know whether it is decided.

        Another process of the run may still be deciding it, or its decision may be on its way to
        the log. So this takes a token first: after that, what the older token has not decided is
        never decided.

        Raises:
            FencedError: another run holds the pipeline, and sweeps what is left.
            LogError: no token could be taken; the next start sweeps.
        """
        cls.start(pipeline, claim, entrance).sweep()

    @property
    def incarnation(self) -> Incarnation:
        """The token that this driver holds."""
        return self.lease.incarnation

    @property
    def pending(self) -> TransactionRecord | None:
        """The batch that is prepared and waits for Spark's checkpoint, until it is finished."""
        return self._decider.pending

    def recover(self) -> None:
        """See `transaction.recover`."""
        transaction.recover(self.lease)

    def deliver(self, batch: Batch) -> None:
        """See `transaction.deliver`."""
        transaction.deliver(batch, self.lease, self._decider)

    def remaining(self, batch: Batch) -> Rewrite | None:
        """See `transaction.remaining`."""
        return transaction.remaining(batch, self.lease)

    def commit_pending(self) -> bool:
        """See `transaction.commit_pending`."""
        return transaction.commit_pending(self.lease, self._decider)

    def sweep(self) -> int:
        """Abort every orphan of the pipeline; see `sparkonce.protocol.sweeping.sweep`."""
        return sweep(self.lease)
