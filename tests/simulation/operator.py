"""An operator who settles what no server can prove any more, as `sparkonce settle` does."""

from __future__ import annotations

from collections.abc import Sequence

from sparkonce.errors import PreparedBranchLostError
from sparkonce.model import BranchId
from sparkonce.spark_hooks.recovery import claim_again
from sparkonce.txn_log.record import State, TransactionRecord
from sparkonce.txn_log.settlement import Ruling, Settlement
from tests.simulation.drivers import PIPELINE, Driver, Process, SimWorld
from tests.simulation.log import SimLog


def settle_lost(world: SimWorld, error: PreparedBranchLostError) -> None:
    """Rule on the branch that the error names."""
    assert error.branch_id is not None
    _settle(world, world.ledger.standing[str(error.branch_id)], [error.branch_id])


def settle_early(world: SimWorld) -> None:
    """Rule on some branches that stand, or are lost and nobody knows it yet."""
    for record in world.disk.unfinished():
        chosen = [
            c.branch_id
            for c in record.committables()
            if str(c.branch_id) not in world.systems[c.branch_id.sink].visible
            and world.rng.random() < 0.5
        ]
        if record.state is State.DECIDED and chosen:
            _settle(world, record, chosen)


def _settle(world: SimWorld, record: TransactionRecord, chosen: Sequence[BranchId]) -> None:
    """What is ruled committed, the operator puts into the target by hand first.

    No fault meets it: the command is a few writes of the log, and those meet theirs in drivers.
    """
    world.driver = Driver(world, Process(world, 0), "prepared")  # a process of the operator's own
    log = SimLog(world.disk)
    head = world.disk.heads[PIPELINE]
    token = log.begin(claim_again(log, head, head.sinks)).token
    words = []
    for branch_id in chosen:
        ruling = world.rng.choice((Ruling.COMMITTED, Ruling.ABORTED))
        words.append(Settlement(str(branch_id), ruling, "ann@host", "simulated", 0.0, token))
        world.ledger.is_ruled_on(branch_id, ruling)
    log.settle(record.id, words, token)
    world.driver = None
