"""An operator who settles branches, as `sparkonce settle` does."""

from __future__ import annotations

from collections.abc import Sequence

from sparkonce.errors import PreparedBranchLostError
from sparkonce.model import BranchId
from sparkonce.protocol.operating import claim_again
from sparkonce.protocol.rulings import End, end_ruled
from sparkonce.txn_log.record import State, TransactionRecord
from sparkonce.txn_log.settlement import Ruling, Settlement
from tests.simulation.drivers import Driver, Process, SimWorld
from tests.simulation.log import SimLog


def settle_lost(world: SimWorld, error: PreparedBranchLostError) -> None:
    """Rule on the branch that the error names."""
    assert error.branch_id is not None
    record = world.ledger.named[str(error.branch_id)]
    _settle(world, record, [error.branch_id], reaches_sinks=True)


def settle_early(world: SimWorld, repeating: Sequence[Driver], *, reaches_sinks: bool) -> None:
    """Rule on some branches that are still prepared, or whose loss is not known yet.

    Args:
        world: its faults have stopped.
        repeating: drivers that are paused before a retry of a commit, and resume after the ruling.
        reaches_sinks: whether the command also ends the branches, as it does with a JOB. Without
            that, it rules only on branches that those drivers have tried: only a retry checks the
            token.
    """
    for record in world.line.unfinished():
        chosen = [
            c.branch_id
            for c in record.committables()
            if str(c.branch_id) not in world.systems[c.branch_id.sink].visible
            and (reaches_sinks or all(str(c.branch_id) in driver.tried for driver in repeating))
            and world.rng.random() < 0.5
        ]
        if record.state is State.DECIDED and chosen:
            _settle(world, record, chosen, reaches_sinks=reaches_sinks)


def _settle(
    world: SimWorld, record: TransactionRecord, chosen: Sequence[BranchId], *, reaches_sinks: bool
) -> None:
    """Record rulings; the operator has inserted the rows of branches ruled committed manually.

    No fault hits it: the command is a few writes of the log, which faults hit in drivers.
    """
    process = Process(world, 0)  # the operator's own
    world.driver = Driver(world, process, "immediate")
    log = SimLog(world.disk)
    head = world.disk.heads[world.line.name]
    token = log.begin(claim_again(log, head, head.sinks)).token
    stored = log.find(record.id)
    named = [c.branch_id for c in stored.committables()] if stored else []
    if not set(chosen) <= set(named):  # amended since the operator looked: the command is refused
        world.driver = None
        return
    settlements = []
    for branch_id in chosen:
        ruling = world.rng.choice((Ruling.COMMITTED, Ruling.ABORTED))
        settlements.append(Settlement(str(branch_id), ruling, "ann@host", "simulated", 0.0, token))
        world.ledger.is_ruled_on(branch_id, ruling)
    log.settle(record.id, settlements, token)
    sinks = {sink.name: sink for sink in process.sinks}
    for committable in record.committables() if reaches_sinks else ():
        if committable.branch_id in chosen:
            sink = sinks[committable.branch_id.sink]
            how = end_ruled(sink, committable, sink.target).how
            world.require(how is End.ENDED, f"I7: {committable.branch_id} is ruled on and {how}")
    world.driver = None
