"""The primary is killed while a batch is between prepare and commit, and its standby promoted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from integration_tests.crash.faults import go_on
from integration_tests.crash.scenario import Scenario
from integration_tests.crash.targets import postgres_target
from integration_tests.support.postgres import OWNER, ROWS, World, eventually, merge_of, stage, task
from sparkonce.errors import (
    CommitRejectedError,
    CommitUnresolvedError,
    ConfigurationError,
    DecisionUnknownError,
    LogUnavailableError,
    PreparedBranchLostError,
    PrepareRejectedError,
)
from sparkonce.model import Committable
from sparkonce.protocol.rulings import end_for_rewrite
from sparkonce.sinks import PostgresSink
from sparkonce.sinks.postgres.merging import committing
from sparkonce.sinks.postgres.server.outcome import await_standbys
from sparkonce.testing.log_cases import claim, record
from sparkonce.testing.services import PostgresServer, start_services, unavailable
from sparkonce.testing.services.standby import PostgresPair
from sparkonce.txn_log.postgres import PostgresLog
from sparkonce.txn_log.record import State

LOADS = ("staged", "direct")


@pytest.fixture
def pair() -> Iterator[PostgresPair]:
    if "postgres" in (reasons := unavailable()):
        pytest.skip(f"postgres: {reasons['postgres']}")
    with (
        start_services(["postgres"]) as services,
        PostgresPair(services.postgres) as pair,
    ):
        yield pair


@pytest.fixture
def worlds(pair: PostgresPair, fresh_name: Callable[[], str]) -> Iterator[tuple[World, World]]:
    """The primary and the standby, seen from outside."""
    name = fresh_name()
    primary, standby = (
        World(server, name, prepares=True) for server in (pair.primary, pair.standby)
    )
    primary.run(f"CREATE SCHEMA {name}")
    primary.table()
    yield primary, standby
    for sink in primary.sinks:
        sink.close()


def prepare(sink: PostgresSink, batch: int = 0) -> Committable:
    of_task = stage(sink, ROWS, task(batch=batch))
    (committable,) = sink.vote(merge_of(batch), [of_task])
    return committable


@pytest.mark.parametrize("load", LOADS)
def test_standby_that_has_all_finishes_the_commit(
    pair: PostgresPair, worlds: tuple[World, World], load: str, caplog: pytest.LogCaptureFixture
) -> None:
    """While none of the two takes writes the outcome is unknown; then it is committed, once."""
    pair.wait_for_standby()
    primary, standby = worlds
    sink = primary.ready(dsn=pair.dsn, load=load)
    assert "does not wait for a standby" not in caplog.text
    sink.commit(prepare(sink))
    committable = prepare(sink, batch=1)
    assert len(primary.gids()) == 1
    pair.primary.kill()
    with pytest.raises(CommitUnresolvedError, match="batch 1"):
        sink.commit(committable)
    pair.promote()
    for _ in range(2):
        sink.commit(committable)
        assert standby.state() == (6, 2, 0, 0)
    sink.commit(prepare(sink, batch=2))
    assert list(sink.find_branches(OWNER)) == []
    assert standby.state() == (9, 3, 0, 0)


@pytest.mark.parametrize(
    "setting",
    ["synchronous_commit = off", "statement_timeout = 500", "client_min_messages = error"],
)
@pytest.mark.parametrize("load", ["staged", pytest.param("direct", marks=pytest.mark.slow)])
def test_commit_waits_for_the_standby_whatever_the_role_says(
    pair: PostgresPair, worlds: tuple[World, World], load: str, setting: str
) -> None:
    """COMMIT PREPARED takes its settings from the role: it may return before the standby has it."""
    primary, standby = worlds
    sink, committable = cut_off_once_prepared(pair, primary, setting, load=load, lock_timeout_s=2)
    for _ in range(2):
        with pytest.raises(CommitUnresolvedError, match="no standby .* has confirmed"):
            sink.commit(committable)
        assert primary.state()[:2] == (3, 1)  # visible all the same
    pair.join_again()
    sink.commit(committable)
    pair.primary.kill()
    pair.promote()
    assert standby.state() == (3, 1, 0, 0)


def test_wait_of_a_held_merge_that_is_cut_short_confirms_nothing(
    pair: PostgresPair, worlds: tuple[World, World]
) -> None:
    """COMMIT answers the same then, with a warning."""
    pair.wait_for_standby()
    primary, _ = worlds
    sink = primary.ready(dsn=pair.dsn, lock_timeout_s=2)
    assert sink._target is not None
    sink._target = replace(sink._target, why_open="so")
    committable = prepare(sink)
    pair.cut_off()
    with ThreadPoolExecutor() as pool:
        outcome = pool.submit(sink.commit, committable)
        eventually(lambda: ended_waits(primary, "cancel") > 0, "the COMMIT waits")
        with pytest.raises(CommitUnresolvedError, match="no standby .* has confirmed"):
            outcome.result(30)


@pytest.mark.parametrize("load", LOADS)
def test_prepare_whose_wait_is_cut_short_is_rejected(
    pair: PostgresPair, worlds: tuple[World, World], load: str
) -> None:
    """It answers as ever, with a warning; a failover would lose what it has prepared."""
    pair.wait_for_standby()
    primary, _ = worlds
    sink = primary.ready(dsn=pair.dsn, load=load)
    pair.cut_off()
    cancelled = threading.Event()

    def cancel() -> None:
        while not cancelled.wait(0.05):
            ended_waits(primary, "cancel")

    with ThreadPoolExecutor() as pool:
        pool.submit(cancel)
        try:
            with pytest.raises(PrepareRejectedError, match="no standby has confirmed it"):
                prepare(sink)
        finally:
            cancelled.set()
    pair.join_again()
    for branch in sink.find_branches(OWNER):
        sink.abort(branch)
    assert primary.state() == (0, 0, 0, 0)


def cut_off_once_prepared(
    pair: PostgresPair, primary: World, setting: str = "synchronous_commit = off", **options: Any
) -> tuple[PostgresSink, Committable]:
    """A branch that both servers have, of a role with this setting; the standby gets no more."""
    pair.wait_for_standby()
    primary.run(f"ALTER ROLE {pair.primary.settings.user} SET {setting}")
    sink = primary.ready(dsn=pair.dsn, **options)
    committable = prepare(sink)
    pair.cut_off()
    return sink, committable


def ended_waits(world: World, how: str) -> int:
    """Cancel or terminate whoever waits for the standby."""
    query = f"SELECT pg_{how}_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    return len(world.run(query))


@pytest.mark.parametrize("load", LOADS)
def test_commit_that_no_standby_confirms_is_not_written_again(
    pair: PostgresPair, worlds: tuple[World, World], load: str
) -> None:
    """An operator's `redo` of a branch that is visible: its rows would be there twice."""
    primary, _ = worlds
    sink, committable = cut_off_once_prepared(pair, primary, load=load, lock_timeout_s=1)
    with pytest.raises(CommitUnresolvedError) as caught:
        sink.commit(committable)
    told = end_for_rewrite(sink, committable, caught.value)
    assert not isinstance(told, PreparedBranchLostError)
    assert isinstance(told.__cause__, CommitRejectedError)
    assert "is committed" in str(told)
    assert primary.state()[:2] == (3, 1)


@pytest.mark.parametrize("how", ["terminate", "cancel"])
def test_decision_that_is_read_back_waits_for_the_standby(pair: PostgresPair, how: str) -> None:
    """Its COMMIT was ended in the wait, so it stands, and a failover could still take it back."""
    log = PostgresLog(f"{pair.primary.dsn}?schema=log&options=-cclient_min_messages%3Derror")
    incarnation = log.begin(claim())
    decided = record(incarnation, 0)
    pair.wait_for_standby()
    pair.cut_off()
    primary = World(pair.primary, "log", prepares=True)
    waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    with ThreadPoolExecutor() as pool:
        lost = pool.submit(log.decide, decided)
        eventually(lambda: ended_waits(primary, how) > 0, "the decision waits")
        with pytest.raises(DecisionUnknownError):
            lost.result()
        again = pool.submit(log.decide, decided)
        eventually(lambda: again.done() or primary.run(waiting) != [], "the repeat waits, too")
        is_early = again.done()
        pair.join_again()
        assert again.result().state is State.DECIDED
    assert not is_early
    log.close()


def test_log_is_not_read_from_a_standby(pair: PostgresPair) -> None:
    """It may lag behind a decision, whose branches would be aborted as left over."""
    known = [server.settings for server in (pair.primary, pair.standby)]
    hosts = ",".join(f"{each.host}:{each.port}" for each in known)
    url = f"postgresql://{known[0].user}@{hosts}/{known[0].database}?schema=lags"
    logs = [PostgresLog(url), PostgresLog(f"{url}&target_session_attrs=any")]
    incarnation = logs[0].begin(claim())
    pair.cut_off()
    decided = logs[0].decide(record(incarnation, 0))
    pair.primary.kill()
    try:
        for log in logs:
            with pytest.raises(LogUnavailableError, match="standby"):
                log.unfinished(decided.id.pipeline)
    finally:
        pair.primary.start()
        pair.join_again()
    for log in logs:
        assert log.unfinished(decided.id.pipeline) == [decided]
        log.close()


def test_standby_that_is_promoted_during_the_wait_confirms_nothing(
    pair: PostgresPair, worlds: tuple[World, World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for no other one, and does not have the COMMIT PREPARED that nobody confirmed."""
    primary, standby = worlds
    sink, committable = cut_off_once_prepared(pair, primary)

    def fail_over(*args: Any) -> None:
        monkeypatch.undo()
        pair.promote()
        pair.primary.kill()
        await_standbys(*args)

    monkeypatch.setattr(committing, "await_standbys", fail_over)
    with pytest.raises(CommitUnresolvedError, match="does not have the commit"):
        sink.commit(committable)
    assert standby.state()[:2] == (0, 0)
    sink.commit(committable)
    assert standby.state() == (3, 1, 0, 0)


@pytest.mark.parametrize("load", LOADS)
def test_branch_that_the_standby_never_received_is_lost(
    pair: PostgresPair, worlds: tuple[World, World], load: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Never silent: the commit says so, and the start has warned."""
    primary, standby = worlds
    sink = primary.ready(dsn=pair.dsn, load=load)
    assert "a failover may silently lose" in caplog.text
    sink.commit(prepare(sink))
    pair.cut_off()
    committable = prepare(sink, batch=1)
    pair.primary.kill()
    pair.promote()
    with pytest.raises(PreparedBranchLostError, match="batch 1"):
        sink.commit(committable)
    assert "merged again" not in caplog.text
    assert standby.state() == (3, 1, 0, 0)


@pytest.mark.parametrize("load", LOADS)
def test_standby_is_refused_and_proves_nothing(
    pair: PostgresPair, worlds: tuple[World, World], load: str
) -> None:
    """What it has not received yet is not lost."""
    primary, standby = worlds
    sink = primary.ready(load=load)
    pair.cut_off()
    committable = prepare(sink)
    astray = standby.sink(load=load)
    with pytest.raises(ConfigurationError, match="standby.*target_session_attrs=read-write"):
        astray.validate(ROWS.schema)
    with pytest.raises(CommitUnresolvedError, match="standby|recovery|read-only"):
        astray.commit(committable)
    sink.commit(committable)
    with pytest.raises(CommitUnresolvedError, match="standby|recovery|read-only"):
        astray.commit(committable)
    astray.close()
    assert primary.state() == (3, 1, 0, 0)


def test_merge_that_was_held_open_is_not_refused_by_a_standby(
    pair: PostgresPair, worlds: tuple[World, World]
) -> None:
    """A standby cannot merge again; that is no verdict on the batch."""
    primary, standby = worlds
    sink = primary.ready()
    committable = prepare(sink)
    open_one = Committable(
        committable.branch_id, {**committable.payload, "prepared": False}, committable.version
    )
    with pytest.raises(CommitUnresolvedError, match="standby; promote it"):
        standby.sink().commit(open_one)
    standby.sinks[0].close()
    sink.commit(committable)
    assert primary.state() == (3, 1, 0, 0)


class AfterFailover(PostgresServer):
    """The server that takes writes, for an outsider."""

    def __init__(self, pair: PostgresPair) -> None:
        self._pair = pair
        self.failed_over = False

    def start(self) -> None:
        pass

    @property
    def dsn(self) -> str:
        return (self._pair.standby if self.failed_over else self._pair.primary).dsn


@pytest.mark.parametrize("load", LOADS)
def test_query_writes_again_what_the_standby_never_received(
    pair: PostgresPair, tmp_path: Path, fresh_name: Callable[[], str], load: str
) -> None:
    """The decided batch is redone from Spark's replay: every row is there once."""
    server: Any = AfterFailover(pair)
    target = postgres_target(server, fresh_name(), dsn=pair.dsn, load=load)
    with Scenario(tmp_path, [target], 3, is_tagged=False) as scenario:
        driver = scenario.driver
        begun = driver.arm("open.after", batch=1)
        decided = driver.arm("decide.after", batch=1)
        driver.start(begun)
        pair.cut_off()
        driver.let_go(begun)
        driver.process.wait_for(decided)
        pair.primary.kill()
        pair.promote()
        server.failed_over = True
        assert scenario.visible_of(1) == {"postgres": "none"}
        driver.let_go()
        go_on(driver, [])
        scenario.check_end()
        assert scenario.record(1).revision == 1
        assert "rewriting what is lost" in driver.said()
