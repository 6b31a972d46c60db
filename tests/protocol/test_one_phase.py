"""One transaction for the rows and the record: a model of a database that holds both.

The simulation's worlds have three sinks, and one phase needs a pipeline of exactly one; what can
happen to it is little enough to try all of it: each point, each fate of the COMMIT's message, and
each point of the next driver at which a late one lands. Coordinator and log's rules are the real
ones.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pytest

from sparkonce.errors import (
    CommitUnresolvedError,
    DecisionUnknownError,
    FencedError,
    LogUnavailableError,
    PrepareRejectedError,
)
from sparkonce.failpoints import InjectedError
from sparkonce.model import BranchId, Committable, CommittedBatch, TransactionId
from sparkonce.protocol.deciders import choose
from sparkonce.protocol.driver import Driver
from sparkonce.sinks.capabilities import CommitsOnePhase, Publishes
from sparkonce.steps import POINTS
from sparkonce.txn_log import rules
from sparkonce.txn_log.base import ResultT, Store, TransactionLog
from sparkonce.txn_log.optimistic import OptimisticLog
from sparkonce.txn_log.record import Head, State, TransactionRecord
from sparkonce.txn_log.shared import SharedTransactions, SharedWrite
from tests.support.world import (
    Crash,
    MemoryEntrance,
    Process,
    QuietSink,
    World,
    at_point,
)

BATCHES = [[[1, 2], [3]], [[], []], [[4], []]]

Fate: TypeAlias = Literal["lost", "torn", "late", "crash", "crash after"]
"""Of the message with the COMMIT: its answer is lost; it never arrives; it arrives much later; the
driver dies before or after it."""

_ON_THE_WAY = {"vote.before", "vote.after", "decide.before"}
STEPS = [
    "begin.before",
    "begin.after",
    "recover.after",
    "prepare.after",
    *sorted(_ON_THE_WAY),
    "decide.after",
    "deliver.after",
]


class Database:
    """The log's tables and, in the world's store, the rows; `version` is that of the head."""

    def __init__(self) -> None:
        self.version = 0
        self.heads: dict[str, Head] = {}
        self.records: dict[TransactionId, TransactionRecord] = {}
        self.texts: dict[str, Callable[[], bool]] = {}
        self.late: list[Callable[[], None]] = []
        self.numbers = itertools.count()


class DatabaseView:
    """A step that writes if nobody has since it began."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._version = database.version
        self._puts: list[Head | TransactionRecord] = []

    def pipelines(self) -> Sequence[str]:
        return sorted(self._database.heads)

    def head(self, pipeline: str) -> Head | None:
        return self._database.heads.get(pipeline)

    def find(self, transaction_id: TransactionId) -> TransactionRecord | None:
        return self._database.records.get(transaction_id)

    def newest(self, pipeline: str, query_id: str) -> TransactionRecord | None:
        del query_id
        return next(iter(self.history(pipeline, 1)), None)

    def unfinished(self, pipeline: str) -> Sequence[TransactionRecord]:
        return [r for r in self.history(pipeline, 100) if r.state.is_unfinished][::-1]

    def history(self, pipeline: str, limit: int) -> Sequence[TransactionRecord]:
        del pipeline
        records = self._database.records.values()
        return sorted(records, key=lambda r: r.id.batch_id, reverse=True)[:limit]

    def put_head(self, head: Head) -> None:
        self._puts.append(head)

    def put(self, record: TransactionRecord) -> None:
        self._puts.append(record)

    def forget(self, pipeline: str, query_id: str, below: int) -> None:
        del pipeline, query_id, below

    @property
    def is_changed(self) -> bool:
        return bool(self._puts)

    def is_current(self) -> bool:
        return self._database.version == self._version

    def swap(self) -> bool:
        if not self.is_current():
            return False
        for value in self._puts:
            if isinstance(value, Head):
                self._database.heads[value.pipeline] = value
            else:
                self._database.records[value.id] = value
        self._database.version += 1
        return True


class DatabaseLog(OptimisticLog, SharedTransactions):
    """The log as `PostgresLog` is."""

    def __init__(self, database: Database, process: Process) -> None:
        self._database = database
        self._process = process

    log_id = "0" * 16
    address = "memory:"

    def close(self) -> None:
        pass

    def _view(self) -> DatabaseView:
        self._process.check()
        return DatabaseView(self._database)

    def _read(self, question: Callable[[Store], ResultT]) -> ResultT:
        return question(self._view())

    def why_apart(self, database: object) -> str | None:
        return None if database is self._database else "another database"

    def shared_write(self, record: TransactionRecord) -> SharedWrite:
        view = self._view()
        done = rules.one_phase(view, record, time.time())
        text = f"write {next(self._database.numbers)}"
        self._database.texts[text] = view.swap
        return SharedWrite(done, text)


class DatabaseSink(QuietSink, CommitsOnePhase):
    """Stages in tasks, merges in an open transaction that dies with its process."""

    def __init__(self, world: OneWorld, process: Process) -> None:
        super().__init__(world.stores["only"], process, "only")
        self.world = world
        self._open: dict[str, list[int]] = {}

    def why_two_phases(self, why_apart: Callable[[object], str | None]) -> str | None:
        return why_apart(self.world.database)

    def prepare_one_phase(
        self, branch_id: BranchId, committables: Sequence[Committable]
    ) -> Sequence[Committable]:
        self._called("prepare_one_phase")
        staged = [str(committable.branch_id) for committable in committables]
        if not staged:
            return ()
        self._open[str(branch_id)] = [row for name in staged for row in self.store.prepared[name]]
        return (Committable(branch_id),)

    def commit_one_phase(self, committable: Committable, log_write: object) -> None:
        self._called("commit_one_phase")
        name, database = str(committable.branch_id), self.world.database
        rows = self._open.pop(name)
        fate, self.world.fate = self.world.fate, None

        def arrive() -> None:
            if database.texts[str(log_write)]():
                self.store.visible[name] = rows  # what is staged is left to the sweep

        if fate == "crash":
            self.process.crash()
        if fate == "late":
            database.late.append(arrive)
        elif fate != "torn":
            arrive()
        if fate == "crash after":
            self.process.crash()
        if fate is not None or name not in self.store.visible:
            raise CommitUnresolvedError("no answer, or no", committable.branch_id)

    def abort(self, branch: BranchId | Committable) -> None:
        super().abort(branch)
        branch_id = branch.branch_id if isinstance(branch, Committable) else branch
        self._open.pop(str(branch_id), None)


class OneWorld(World):
    """A pipeline whose only sink is in the log's database."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, BATCHES)
        self.stores = {"only": self.stores["left"]}
        self.database = Database()
        self.fate: Fate | None = None

    def log(self, process: Process) -> TransactionLog:
        return DatabaseLog(self.database, process)

    def driver(
        self, process: Process, may_repeat: Callable[[], None] = lambda: None, **changes: Any
    ) -> Driver:
        self.sinks = [DatabaseSink(self, process)]
        self.prepare_sinks(self.sinks)
        pipeline = self.pipeline(self.sinks, self.log(process))
        return Driver.start(pipeline, self.claim(**changes), MemoryEntrance(self.spark, may_repeat))

    def land(self) -> None:
        """What was sent long ago reaches the server."""
        while self.database.late:
            self.database.late.pop()()

    def check(self) -> None:
        store = self.stores["only"]
        assert store.rows() == self.source()
        assert not store.prepared
        records = DatabaseView(self.database).history("orders", 100)
        assert [r.id.batch_id for r in records] == list(reversed(range(len(BATCHES))))
        assert {r.state for r in records} == {State.COMPLETE}
        assert all({State.DECIDED, State.COMPLETE} <= r.times.keys() for r in records)


@pytest.fixture
def world(tmp_path: Path) -> OneWorld:
    return OneWorld(tmp_path)


def test_undisturbed_run(world: OneWorld) -> None:
    """Each batch with rows is complete by one transaction; the empty one takes two writes."""
    world.start(Process())
    world.check()
    calls = world.sinks[0].calls
    assert calls.count("commit_one_phase") == 2
    assert "commit" not in calls
    assert world.database.version == 1 + 2 + 2  # begin; two batches; decide and complete


def test_log_elsewhere_takes_two_phases(world: OneWorld) -> None:
    world.log = lambda process: DatabaseLog(Database(), process)  # type: ignore[method-assign]
    assert world.driver(Process()).two_phases == "another database"


def test_policy_that_waits_for_spark_takes_two_phases(world: OneWorld) -> None:
    """What is PREPARED must stand in the log before Spark commits it."""
    world.commit = "after_checkpoint"
    assert "after_checkpoint" in str(world.driver(Process()).two_phases)


def test_sink_that_publishes_takes_two_phases(world: OneWorld) -> None:
    """Readers are told that a batch is whole before the log knows it, also after a crash."""

    class Publishing(DatabaseSink, Publishes):
        def publish(self, batch: CommittedBatch) -> None:
            raise NotImplementedError

    pipeline = world.pipeline([Publishing(world, Process())], world.log(Process()))
    assert "publishes" in str(choose(pipeline)[1])


def comes(point: str, nth: int) -> bool:
    """A start begins and recovers once, and has two batches with rows."""
    return nth == 1 or not point.startswith(("begin", "recover"))


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("point", STEPS)
def test_driver_crashes_at(world: OneWorld, point: str, nth: int) -> None:
    """The next driver goes on, and every row is visible once."""
    process = Process()
    with at_point(point, process.crash, nth=nth) as fault, contextlib.suppress(Crash):
        world.start(process)
    assert fault.fired is comes(point, nth)
    world.start(Process())
    world.check()


@pytest.mark.parametrize("fate", ["crash", "crash after"])
def test_driver_crashes_around_the_commit(world: OneWorld, fate: Fate) -> None:
    """Rows and record are both there, or none of both."""
    world.fate = fate
    with pytest.raises(Crash):
        world.start(Process())
    seen = len(world.stores["only"].visible), len(world.database.records)
    assert seen == ((1, 1) if fate == "crash after" else (0, 0))
    world.start(Process())
    world.check()
    assert len(world.spark.drained) == (fate == "crash after")


def test_answer_is_lost(world: OneWorld) -> None:
    """The log tells that it is committed: the query goes on, and nothing is written again."""
    world.fate = "lost"
    world.start(Process())
    world.check()
    assert world.spark.runs == 1
    assert world.spark.drained == []


def test_answer_is_lost_and_the_log_goes_away(
    world: OneWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows may be there, so nobody says that nothing was decided."""

    def away(self: DatabaseLog, record: TransactionRecord, token: int) -> TransactionRecord:
        raise LogUnavailableError("away; nothing was written")

    world.fate = "lost"
    with monkeypatch.context() as patched:
        patched.setattr(DatabaseLog, "complete", away)
        with pytest.raises(DecisionUnknownError, match="no answer, or no"):
            world.start(Process())
    world.start(Process())
    world.check()


def test_message_is_lost(world: OneWorld) -> None:
    """The log does not show the batch: it is aborted, and the next start delivers it."""
    world.fate = "torn"
    with pytest.raises(PrepareRejectedError, match="start the query again"):
        world.start(Process())
    assert not world.stores["only"].prepared
    assert not world.database.records
    world.start(Process())
    world.check()


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("point", STEPS)
def test_message_arrives_late(world: OneWorld, point: str, nth: int) -> None:
    """At any point of the next driver: it is seen by its start, or it is refused."""
    world.fate = "late"
    with pytest.raises(PrepareRejectedError):
        world.start(Process())
    with at_point(point, world.land, nth=nth) as fault:
        world.start(Process())
    assert fault.fired is comes(point, nth)
    world.land()
    world.check()
    assert len(world.spark.drained) == ((point, nth) == ("begin.before", 1))


@pytest.mark.parametrize("point", sorted({"prepare.after"} | _ON_THE_WAY))
def test_newer_driver_takes_over_at(world: OneWorld, point: str) -> None:
    """Also between the merge and its COMMIT: the older one commits nothing, and says who did."""

    def take_over() -> None:
        sinks = world.sinks
        world.start(Process())
        world.sinks = sinks

    with at_point(point, take_over), pytest.raises(FencedError, match="took token"):
        world.start(Process())
    world.check()


def test_newer_driver_takes_over_behind_the_read(world: OneWorld) -> None:
    """The write is made from what was read, and does not count once a token was taken."""

    def take_over(verb: str) -> None:
        if verb == "commit_one_phase":
            world.prepare_sinks = lambda sinks: None
            world.start(Process())

    def prepare(sinks: Sequence[QuietSink]) -> None:
        sinks[0].fail = take_over

    world.prepare_sinks = prepare
    with pytest.raises(FencedError, match="took token"):
        world.start(Process())
    world.check()


@pytest.mark.parametrize("point", [p for p in STEPS if p in POINTS and not p.startswith("recover")])
def test_error_at(world: OneWorld, point: str) -> None:
    """The query fails, nothing stays prepared, and the next start delivers every row once."""

    def fail() -> None:
        raise InjectedError

    with at_point(point, fail), pytest.raises(InjectedError):
        world.start(Process())
    assert not world.stores["only"].prepared
    world.start(Process())
    world.check()


def test_log_that_cannot_be_read_sends_nothing(
    world: OneWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: DatabaseLog, record: TransactionRecord) -> SharedWrite:
        raise LogUnavailableError("away")

    with monkeypatch.context() as patched:
        patched.setattr(DatabaseLog, "shared_write", fail)
        with pytest.raises(LogUnavailableError):
            world.start(Process())
    assert "commit_one_phase" not in world.sinks[0].calls
    assert not world.stores["only"].prepared
    world.start(Process())
    world.check()


def test_replay_of_an_abandoned_batch_that_does_not_commit(world: OneWorld) -> None:
    """What stands in the log is of the attempt before, under another policy: it proves nothing."""
    world.commit, process = "after_checkpoint", Process()
    with at_point("hold.after", process.crash), pytest.raises(Crash):
        world.start(process)
    world.commit, world.fate = "immediate", "torn"
    with pytest.raises(PrepareRejectedError):
        world.start(Process())
    assert {r.state for r in world.database.records.values()} == {State.ABANDONED}
    world.start(Process())
    world.check()
