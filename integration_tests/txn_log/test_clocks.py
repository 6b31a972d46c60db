"""Drivers whose clocks are days apart, in every kind of log: only the tokens say who is newer."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration_tests.support.clock import DAY_S, HOUR_S, ShiftedClock
from sparkonce.errors import FencedError, LogUnavailableError
from sparkonce.testing import log_cases
from sparkonce.testing.log_cases import claim
from sparkonce.testing.services import S3Server, ServiceKind, Services
from sparkonce.txn_log import TransactionLog, open_log
from sparkonce.txn_log.record import State

if TYPE_CHECKING:
    from sparkonce.txn_log.record import Incarnation

StartKind = Callable[[ServiceKind], Services]


@cache
def log_of(address: str) -> TransactionLog:
    """The log, which each process opens once."""
    return open_log(address)


def begin(address: str, batch_id: int) -> Incarnation:
    return log_of(address).begin(claim(batch_id))


def deliver(address: str, incarnation: Incarnation, batch_id: int) -> State:
    return log_cases.deliver(log_of(address), incarnation, batch_id).state


def began_at(address: str) -> float:
    head = log_of(address).head("orders")
    assert head is not None
    return head.started_at


@pytest.fixture
def ahead_s(address: str) -> float:
    """How far a clock may be off: S3 refuses requests from a quarter of an hour on."""
    return 600.0 if address.startswith("s3:") else DAY_S


@pytest.fixture(params=["sqlite", "checkpoint", "postgres", "versitygw"])
def address(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    start_kind: StartKind,
    fresh_name: Callable[[], str],
    fresh_log: Callable[[S3Server], str],
) -> str:
    """Of each kind of log."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/log.db"
    if request.param == "checkpoint":
        return f"checkpoint:{tmp_path}/ckpt"
    if request.param == "postgres":
        return f"{start_kind('postgres').postgres.dsn}?schema={fresh_name()}"
    return fresh_log(start_kind("versitygw").s3["versitygw"])


def test_driver_with_the_newer_token_wins_whatever_the_clocks_say(
    address: str, fresh_clock: Callable[[], ShiftedClock], ahead_s: float
) -> None:
    """The older driver is fenced, once with the later clock and once with the earlier one."""
    ahead, behind = fresh_clock(), fresh_clock()
    ahead.set_ahead(ahead_s)
    behind.set_ahead(-ahead_s)
    with ahead.process() as first, behind.process() as second:

        def take_over(older: Executor, newer: Executor, batch_id: int) -> int:
            overtaken = older.submit(begin, address, batch_id).result()
            current = newer.submit(begin, address, batch_id).result()
            assert overtaken.token < current.token
            with pytest.raises(FencedError, match=f"took token {current.token} at"):
                older.submit(deliver, address, overtaken, batch_id).result()
            assert newer.submit(deliver, address, current, batch_id).result() is State.COMPLETE
            return current.token

        by_behind = take_over(first, second, 0)
        assert behind.is_near(began_at(address), within_s=300)
        by_ahead = take_over(second, first, 1)
        assert ahead.is_near(began_at(address), within_s=300)
    assert by_behind < by_ahead
    log = log_of(address)
    tokens = [(r.id.batch_id, r.token) for r in log.history("orders")]
    assert tokens == [(1, by_ahead), (0, by_behind)]
    newest, _ = log.history("orders")
    assert ahead.is_near(newest.times[State.COMPLETE], within_s=300)


def test_log_in_s3_refuses_a_clock_that_is_an_hour_off(
    start_kind: StartKind,
    fresh_log: Callable[[S3Server], str],
    fresh_clock: Callable[[], ShiftedClock],
) -> None:
    """The error names the clock. Nothing is written, and the log goes on once it is right."""
    address = fresh_log(start_kind("versitygw").s3["versitygw"])
    clock = fresh_clock()
    with clock.process() as driver:
        held = driver.submit(begin, address, 0).result()
        clock.set_ahead(HOUR_S)
        with pytest.raises(LogUnavailableError, match=r"RequestTimeTooSkewed.*clock"):
            driver.submit(deliver, address, held, 0).result()
        clock.set_ahead(0)
        assert log_of(address).history("orders") == []
        assert driver.submit(deliver, address, held, 0).result() is State.COMPLETE
