"""What the tests of `SinkContract` share: fixtures, settings, rows and branches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from sparkonce.sinks.base import AnySink
from sparkonce.testing.sink_world import (
    GUIDE,
    SCHEMA,
    SinkWorld,
    Stage,
    branch,
    lists_branches,
    rows_of,
)

if TYPE_CHECKING:
    import pyarrow as pa

A, B, C = rows_of(range(3)), rows_of(range(3, 8)), rows_of(range(8, 10))
BRANCH = branch(1)


def at_the_same_time(calls: list[Callable[[], Any]]) -> list[Any]:
    """Make the calls at the same time, each in a thread; return their results."""
    gate = Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        gate.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [done.result() for done in [pool.submit(run, call) for call in calls]]


@contextmanager
def must_return(what: str) -> Iterator[None]:
    """Turn an error of the sink into a failure that says what the sink must do."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{what} ({type(error).__name__}: {error})") from error


@contextmanager
def apart(part: str) -> Iterator[None]:
    """Say of a failure in which part two branches differ, and what their names must hold."""
    why = (
        f"two branches that differ only in their {part} got in each other's way: the name in the "
        f"store must hold the whole str(branch_id) ({GUIDE}#checklist)"
    )
    try:
        yield
    except AssertionError as error:
        error.add_note(why)
        raise
    except Exception as error:
        raise AssertionError(f"{why} ({type(error).__name__}: {error})") from error


def needs_many_branches(stage: Stage) -> None:
    """Skip the test if the target accepts only one branch of a batch."""
    if stage.world.one_branch_a_batch:
        pytest.skip("the target accepts one branch of each batch, in the order of the batches")


def needs_listing(sink: AnySink) -> None:
    """Skip the test if the sink cannot list its branches."""
    if not lists_branches(sink):
        pytest.skip("the sink has no find_branches: branches of dead processes are never swept")


class SinkCase:
    """The base of every part of `SinkContract`."""

    large_rows: ClassVar[int] = 50_000
    parallel: ClassVar[int] = 4
    many_branches: ClassVar[int] = 120
    most_faults: ClassVar[int] = 12
    race_rounds: ClassVar[int] = 200
    longest_pause_s: ClassVar[float] = 1.0

    @pytest.fixture
    def make_world(self) -> Callable[[pa.Schema], SinkWorld]:
        """Override it: return a function from a schema to the `SinkWorld` of an empty target."""
        pytest.fail(f"{type(self).__name__}: define the fixture make_world (see SinkContract)")

    @pytest.fixture(autouse=True)
    def _where_to_read(self) -> Iterator[None]:
        """Name the guide in each red test: pytest shows what is printed only there."""
        yield
        print(f"What a sink must do: {GUIDE}#checklist")  # noqa: T201

    @pytest.fixture
    def stage(self, make_world: Callable[[pa.Schema], SinkWorld]) -> Iterator[Stage]:
        stage = Stage(make_world(SCHEMA))
        yield stage
        stage.close()

    @pytest.fixture
    def sink(self, stage: Stage) -> AnySink:
        return stage.sink()
