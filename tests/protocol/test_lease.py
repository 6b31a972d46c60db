"""A driver's lease, its right to act: acquire, check, release."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkonce.errors import FencedError, LogUnavailableError
from sparkonce.protocol.driver import Driver
from sparkonce.protocol.lease import Lease
from sparkonce.txn_log.record import Incarnation
from sparkonce.txn_log.sqlite import SqliteLog
from tests.support.world import MemoryEntrance, Process, World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, [[[1]]])


def test_making_a_driver_fences_nobody(world: World) -> None:
    """Only `acquire` takes a token; a new object does not disturb the running driver."""
    running = world.driver(Process())
    Driver(Lease(running.lease.pipeline, running.incarnation, MemoryEntrance(world.spark, print)))
    running.lease.check()
    head = SqliteLog(world.path).head("orders")
    assert head is not None
    assert head.token == running.lease.token


def test_acquire_fences_the_driver_before(world: World) -> None:
    older = world.driver(Process())
    younger = world.driver(Process())
    assert older.lease.token < younger.lease.token
    younger.lease.check()
    tokens = f"holds token {older.lease.token}.*took token {younger.lease.token}"
    with pytest.raises(FencedError, match=tokens):
        older.lease.check()
    assert older.lease.fenced()
    assert younger.lease.fenced() is None


def test_lease_that_was_released(world: World) -> None:
    """It may no longer act, although the log knows no newer driver."""
    driver = world.driver(Process())
    driver.lease.release()
    with pytest.raises(FencedError, match="was released"):
        driver.lease.check()
    assert driver.lease.fenced() is None


def test_checkpoint_that_another_driver_has_entered(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other driver has a copy of the log: only the checkpoint shows that it runs."""
    monkeypatch.setattr(MemoryEntrance, "enter", lambda self, incarnation: False)
    with pytest.raises(FencedError, match="another driver has continued"):
        world.driver(Process())


def test_log_that_is_unreachable_proves_no_fence(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = world.driver(Process())

    def unreachable(self: SqliteLog, incarnation: object) -> None:
        raise LogUnavailableError("unreachable")

    monkeypatch.setattr(SqliteLog, "check_token", unreachable)
    assert driver.lease.fenced() is None
    with pytest.raises(LogUnavailableError):
        driver.lease.check()


def test_token_serves_the_next_batch_until_another_driver_takes_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that is unreachable for a moment is asked again."""
    driver = world.driver(process := Process())
    driver.deliver(world.batch(process))
    world.spark.committed, lease = 0, driver.lease
    check, failures = SqliteLog.check_token, iter([LogUnavailableError("unreachable")])

    def fail_once(self: SqliteLog, incarnation: Incarnation) -> None:
        for error in failures:
            raise error
        check(self, incarnation)

    monkeypatch.setattr(SqliteLog, "check_token", fail_once)
    assert lease.may_serve(1, last=0)
    assert not lease.may_serve(0, last=0)
    world.driver(Process())
    assert not lease.may_serve(1, last=0)
