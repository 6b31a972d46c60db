"""An operator who settles what no server can prove any more, as `sparkonce settle` does."""

from __future__ import annotations

from collections.abc import Sequence

from sparkonce.errors import PreparedBranchLostError
from sparkonce.model import BranchId
from sparkonce.protocol.operating import claim_again
from sparkonce.protocol.rulings import End, end_ruled
from sparkonce.txn_log.record import State, TransactionRecord
from sparkonce.txn_log.settlement import Ruling, Settlement
from tests.simulation.drivers import PIPELINE, Driver, Process, SimWorld
from tests.simulation.log import SimLog


def settle_lost(world: SimWorld, error: PreparedBranchLostError) -> None:
    """Rule on the branch that the error names."""
    assert error.branch_id is not None
    record = world.ledger.standing[str(error.branch_id)]
    _settle(world, record, [error.branch_id], reaches_sinks=True)


def settle_early(world: SimWorld, repeating: Sequence[Driver], *, reaches_sinks: bool) -> None:
    """Rule on some branches that stand, or are lost and nobody knows it yet.

    Args:
        world: with all its faults over.
        repeating: drivers that stand before they repeat a commit, and will wake up behind the word.
        reaches_sinks: whether the command ends the branches too, as it does with a JOB. Else it is
            of use only where those drivers have tried them: a first try looks at nothing.
    """
    for record in world.disk.unfinished():
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
    """What is ruled committed, the operator has put into the target by hand.

    No fault meets it: the command is a few writes of the log, and those meet theirs in drivers.
    """
    process = Process(world, 0)  # the operator's own
    world.driver = Driver(world, process, "immediate")
    log = SimLog(world.disk)
    head = world.disk.heads[PIPELINE]
    token = log.begin(claim_again(log, head, head.sinks)).token
    words = []
    for branch_id in chosen:
        ruling = world.rng.choice((Ruling.COMMITTED, Ruling.ABORTED))
        words.append(Settlement(str(branch_id), ruling, "ann@host", "simulated", 0.0, token))
        world.ledger.is_ruled_on(branch_id, ruling)
    log.settle(record.id, words, token)
    sinks = {sink.name: sink for sink in process.sinks}
    for committable in record.committables() if reaches_sinks else ():
        if committable.branch_id in chosen:
            sink = sinks[committable.branch_id.sink]
            how = end_ruled(sink, committable, sink.target).how
            world.require(how is End.ENDED, f"I7: {committable.branch_id} is ruled on and {how}")
    world.driver = None
