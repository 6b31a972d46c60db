"""Writers whose clock is wrong, and a broker whose clock is right."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from integration_tests.support.clock import DAY_S, HOUR_S, ShiftedClock
from integration_tests.support.kafka import ROWS, World, prepare
from sparkonce.errors import PreparedBranchLostError, PrepareRejectedError
from sparkonce.model import BranchId, Committable
from sparkonce.sinks import KafkaSink


def prepared(sink: KafkaSink, branch_id: BranchId) -> Committable:
    sink.validate(ROWS.schema)
    return prepare(sink, branch_id)


def test_broker_refuses_rows_of_a_clock_that_is_more_than_an_hour_ahead(
    sink: KafkaSink, branch: BranchId, world: World, fresh_clock: Callable[[], ShiftedClock]
) -> None:
    """Rows get the writer's time: the error names its clock, and nothing is visible or left."""
    clock = fresh_clock()
    clock.set_ahead(HOUR_S + 600)
    with (
        clock.process() as task,
        pytest.raises(PrepareRejectedError, match=r"row.*time of the executor's clock.*right\?"),
    ):
        task.submit(prepared, sink, branch).result()
    sink.abort(branch)
    assert world.messages() == []


@pytest.fixture(params=[HOUR_S - 600, -DAY_S])
def elsewhere(
    request: pytest.FixtureRequest,
    sink: KafkaSink,
    branch: BranchId,
    fresh_clock: Callable[[], ShiftedClock],
) -> tuple[Committable, ShiftedClock]:
    """A branch that a process with a wrong clock has prepared, and that clock."""
    clock = fresh_clock()
    clock.set_ahead(request.param)
    with clock.process() as task:
        return task.submit(prepared, sink, branch).result(), clock


def test_branch_is_committed_by_another_clock(
    sink: KafkaSink, world: World, elsewhere: tuple[Committable, ShiftedClock]
) -> None:
    """Neither EndTxn nor its proof goes by a clock; the rows keep the writer's time."""
    committable, clock = elsewhere
    sink.commit(committable)
    sink.commit(committable)
    world.sees("1", "2", "3")
    assert all(clock.is_near(message.timestamp()[1] / 1000) for message in world.messages())


def test_lost_branch_of_another_clock_is_proven_lost(
    sink: KafkaSink, world: World, elsewhere: tuple[Committable, ShiftedClock]
) -> None:
    """The state of the transaction proves it, not its age."""
    committable, clock = elsewhere
    sink.abort(committable)
    story = "timed out, or another process" if clock.ahead_s > 0 else "it timed out: the broker"
    with pytest.raises(PreparedBranchLostError, match=story):
        sink.commit(committable)
    assert world.messages() == []
