"""What every transaction log promises. `LogContract` is inherited by each backend's tests."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkonce.errors import (
    ConfigurationError,
    DecisionUnknownError,
    FencedError,
    LogCorruptError,
    LogUnavailableError,
    ProtocolError,
)
from sparkonce.model import BranchId, Committable, TransactionId
from sparkonce.txn_log import TransactionLog, open_log
from sparkonce.txn_log.identity import Claim
from sparkonce.txn_log.record import (
    Fingerprint,
    Head,
    Incarnation,
    Part,
    Share,
    State,
    TransactionRecord,
)
from sparkonce.txn_log.settlement import Ruling, Settlement
from sparkonce.txn_log.sqlite import SqliteLog

QUERY = "11111111-2222-3333-4444-555555555555"


def claim(batch_id: int = 0, **changes: Any) -> Claim:
    values: dict[str, Any] = {
        "pipeline": "orders",
        "query_id": QUERY,
        "run_id": "run",
        "driver": "host:1",
        "sinks": {"kafka": "topic"},
        "batch_id": batch_id,
        "offsets": {batch_id: (f"[{batch_id}]",)},
        "checkpoint": "file:/ckpt",
    }
    return Claim(**{**values, **changes})


def part(rows: int) -> Part:
    return Part(0, "branch", 32 * rows, Fingerprint("sum/1", rows, 2**64 - rows))


def record(incarnation: Incarnation, batch_id: int, **changes: Any) -> TransactionRecord:
    branch_id = BranchId(incarnation.owner, batch_id, incarnation.token, "kafka", 0, 3)
    committable = Committable(branch_id, {"path": "ü/1", "parts": ["a", "b"]}, safe_until=1.5)
    values: dict[str, Any] = {
        "id": TransactionId(incarnation.pipeline, incarnation.owner.query_id, batch_id),
        "token": incarnation.token,
        "state": State.DECIDED,
        "offsets": (f"[{batch_id}]",),
        "shares": {"kafka": Share("topic", (part(2),), (committable,))},
        "times": {State.DECIDED: 12.25},
    }
    return TransactionRecord(**{**values, **changes})


class LogContract:
    """Subclass it with an `address` fixture; `log` opens it, and can be opened again."""

    @pytest.fixture
    def log(self, address: str) -> TransactionLog:
        return open_log(address)

    def test_decided_record_reads_back_equal(self, log: TransactionLog, address: str) -> None:
        """A second process sees exactly what was decided."""
        given = record(log.begin(claim()), 0)
        decided = log.decide(given)
        assert decided == replace(given, times=decided.times)
        assert open_log(address).find(decided.id) == decided
        assert open_log(address).unfinished("orders") == [decided]

    def test_first_decision_stands(self, log: TransactionLog) -> None:
        """Deciding a known batch again returns what stands and changes nothing (I3)."""
        incarnation = log.begin(claim())
        first = log.decide(record(incarnation, 0))
        assert log.decide(record(incarnation, 0, offsets=("other",))) == first
        assert log.find(first.id) == first

    def test_prepared_record_is_decided_once(self, log: TransactionLog, address: str) -> None:
        """PREPARED is unfinished, becomes DECIDED by a newer driver too, and stays decided."""
        old = log.begin(claim())
        prepared = log.prepare(record(old, 0))
        assert prepared.state is State.PREPARED
        assert log.prepare(record(old, 0)) == prepared
        assert open_log(address).unfinished("orders") == [prepared]
        newer = log.begin(claim())
        decided = log.decide(prepared, newer.token)
        assert (decided.state, decided.token) == (State.DECIDED, old.token)
        assert log.decide(prepared, newer.token) == decided
        assert log.abandon(prepared, newer.token) == decided

    def test_abandoned_batch_is_made_anew_by_its_replay(self, log: TransactionLog) -> None:
        """It is finished for all but its replay: never decided, never followed."""
        old = log.begin(claim())
        prepared = log.prepare(record(old, 0))
        newer = log.begin(claim())
        abandoned = log.abandon(prepared, newer.token)
        assert abandoned.state is State.ABANDONED
        assert log.abandon(prepared, newer.token) == abandoned
        assert log.unfinished("orders") == []
        with pytest.raises(ProtocolError, match="abandoned"):
            log.decide(prepared, newer.token)
        with pytest.raises(ProtocolError, match="never decided"):
            log.complete(prepared, newer.token)
        with pytest.raises(ProtocolError, match="the next batch of the log is 0"):
            log.decide(record(newer, 1))
        assert log.prepare(record(newer, 0)).token == newer.token

    def test_abandonment_that_lands_late_spares_the_replay(self, log: TransactionLog) -> None:
        """Sent twice because its answer was lost, it must not abandon what was prepared since."""
        prepared = log.prepare(record(log.begin(claim()), 0))
        newer = log.begin(claim())
        log.abandon(prepared, newer.token)
        replay = log.prepare(record(newer, 0))
        assert log.abandon(prepared, newer.token) == replay
        assert log.unfinished("orders") == [replay]

    def test_batch_does_not_follow_an_undecided_one(self, log: TransactionLog) -> None:
        """N+1 is refused while N is prepared (I5), and when a batch between was left out."""
        incarnation = log.begin(claim())
        prepared = log.prepare(record(incarnation, 0))
        for write in (log.prepare, log.decide):
            with pytest.raises(ProtocolError, match="undecided"):
                write(record(incarnation, 1))
        log.decide(prepared)
        with pytest.raises(ProtocolError, match="the next batch of the log is 1"):
            log.decide(record(incarnation, 2))
        log.decide(record(incarnation, 1))

    def test_amendment_takes_the_place_of_the_decision_it_amends(self, log: TransactionLog) -> None:
        """Once; the log keeps what was lost. Nothing else changes a decision (I3)."""
        incarnation = log.begin(claim())
        decided = log.decide(record(incarnation, 0))
        lost = decided.shares["kafka"].committables
        amended = decided.amended({"kafka": Share("topic", (part(2),))}, lost)
        assert log.amend(amended, incarnation.token) == amended
        assert log.amend(amended, incarnation.token) == amended
        assert log.find(decided.id) == amended
        assert (amended.revision, amended.lost) == (1, lost)
        with pytest.raises(ProtocolError, match="cannot be amended"):
            log.amend(decided.amended({}, ()), incarnation.token)
        done = log.complete(amended, incarnation.token)
        with pytest.raises(ProtocolError, match="cannot be amended"):
            log.amend(done.amended({}, ()), incarnation.token)

    def test_complete_is_idempotent(self, log: TransactionLog) -> None:
        incarnation = log.begin(claim())
        decided = log.decide(record(incarnation, 0))
        done = log.complete(decided, incarnation.token)
        assert done.state is State.COMPLETE
        assert log.complete(decided, incarnation.token) == done
        assert log.unfinished("orders") == []

    def test_complete_needs_a_decision(self, log: TransactionLog) -> None:
        incarnation = log.begin(claim())
        with pytest.raises(ProtocolError, match="never decided"):
            log.complete(record(incarnation, 0), incarnation.token)

    def test_older_token_can_write_nothing(self, log: TransactionLog, address: str) -> None:
        """Once a newer incarnation began, decide, complete and forget of the older raise (I6)."""
        old = log.begin(claim())
        decided = log.decide(record(old, 0))
        newer = open_log(address).begin(claim(driver="other:7"))
        assert newer.token == old.token + 1
        with pytest.raises(FencedError, match="other:7 took token 2"):
            log.decide(record(old, 1))
        with pytest.raises(FencedError):
            log.complete(decided, old.token)
        for write in (log.prepare, log.decide):
            with pytest.raises(FencedError):
                write(record(old, 1))
        with pytest.raises(FencedError):
            log.abandon(decided, old.token)
        with pytest.raises(FencedError):
            log.amend(decided.amended({}, ()), old.token)
        with pytest.raises(FencedError):
            log.forget(decided, old.token, retain=1)
        assert log.find(record(old, 1).id) is None

    def test_tokens_of_racing_processes_differ(self, log: TransactionLog, address: str) -> None:
        """Many processes that begin at the same time each get a token of their own."""
        log.begin(claim())
        program = (
            "import sys; from sparkonce.txn_log import open_log;"
            "from tests.test_log import claim; log = open_log(sys.argv[1]);"
            "print(*[log.begin(claim()).token for _ in range(20)])"
        )
        racers = [
            subprocess.Popen(
                [sys.executable, "-c", program, address], stdout=subprocess.PIPE, text=True
            )
            for _ in range(4)
        ]
        tokens = [int(t) for racer in racers for t in racer.communicate()[0].split()]
        assert sorted(tokens) == list(range(2, 82))

    def test_pipelines_are_separate(self, log: TransactionLog) -> None:
        """One log serves many pipelines; a token of one fences nobody of another."""
        orders = log.begin(claim())
        log.begin(claim(pipeline="orders-eu", query_id=QUERY.replace("1", "2")))
        log.decide(record(orders, 0))
        assert log.unfinished("orders-eu") == []

    def test_refused_claim_fences_nobody(self, log: TransactionLog) -> None:
        """A start that the identity guard refuses leaves the healthy driver's token alone."""
        healthy = log.begin(claim())
        with pytest.raises(ConfigurationError, match="replaces="):
            log.begin(claim(query_id=QUERY.replace("1", "2")))
        log.decide(record(healthy, 0))

    def test_forget_keeps_the_newest_and_what_is_unfinished(self, log: TransactionLog) -> None:
        incarnation = log.begin(claim())
        done = [
            log.complete(log.decide(record(incarnation, n)), incarnation.token) for n in range(10)
        ]
        log.forget(done[9], incarnation.token, retain=3)
        assert [r.id.batch_id for r in log.history("orders")] == [9, 8, 7]
        assert [r.id.batch_id for r in log.history("orders", limit=2)] == [9, 8]

    def test_settled_branch_is_remembered_for_ever(self, log: TransactionLog, address: str) -> None:
        """Who, when and why read back; the batch ends as SETTLED, and is never forgotten (I3)."""
        incarnation = log.begin(claim())
        decided = log.decide(record(incarnation, 0))
        (branch,) = decided.committables()
        first, second = (
            Settlement(str(branch.branch_id), ruling, "ann@host", "the disk is gone: ü", 7.5, 1)
            for ruling in (Ruling.REDO, Ruling.ABORTED)
        )
        log.settle(decided.id, [first], 1)
        settled = log.settle(decided.id, [second], 1)
        assert log.settle(decided.id, [second], 1) == settled, "idempotent"
        assert open_log(address).find(decided.id) == settled
        assert (settled.state, settled.settled) == (State.DECIDED, (first, second))
        assert settled.ruling(branch) is Ruling.ABORTED, "the last word counts"
        done = log.complete(settled, 1)
        assert (done.state, done.settled) == (State.SETTLED, (first, second))
        assert log.complete(settled, 1) == done
        assert log.unfinished("orders") == []
        for n in range(1, 10):
            log.complete(log.decide(record(incarnation, n)), 1)
        (newest,) = log.history("orders", limit=1)
        log.forget(newest, 1, retain=2)
        assert [r.id.batch_id for r in log.history("orders")] == [9, 8, 0]

    def test_only_what_is_decided_is_settled(self, log: TransactionLog) -> None:
        """Not a branch that is not there, nor a batch that is prepared, finished or unknown."""
        incarnation = log.begin(claim())
        prepared = log.prepare(record(incarnation, 0))
        (branch,) = prepared.committables()
        word = Settlement(str(branch.branch_id), Ruling.COMMITTED, "ann@host", "seen", 7.5, 1)
        with pytest.raises(ProtocolError, match="is prepared: only what is decided"):
            log.settle(prepared.id, [word], 1)
        decided = log.decide(prepared)
        with pytest.raises(ProtocolError, match="has no branch nothing"):
            log.settle(decided.id, [replace(word, branch="nothing")], 1)
        with pytest.raises(FencedError):
            log.settle(decided.id, [word], 0)
        assert log.complete(decided, 1).state is State.COMPLETE
        with pytest.raises(ProtocolError, match="is complete"):
            log.settle(decided.id, [word], 1)
        with pytest.raises(ProtocolError, match="is not known"):
            log.settle(record(incarnation, 1).id, [word], 1)

    def test_pipelines_are_listed(self, log: TransactionLog) -> None:
        assert log.pipelines() == []
        log.begin(claim())
        log.begin(claim(pipeline="clicks", query_id=QUERY.replace("1", "2")))
        assert log.pipelines() == ["clicks", "orders"]

    def test_newest_record_of_a_query(self, log: TransactionLog) -> None:
        incarnation = log.begin(claim())
        assert log.newest("orders", QUERY) is None
        for n in range(3):
            log.decide(record(incarnation, n))
        newest = log.newest("orders", QUERY)
        assert newest is not None
        assert newest.id.batch_id == 2
        assert log.newest("orders", QUERY.replace("1", "2")) is None

    def test_checkpoint_is_remembered(self, log: TransactionLog) -> None:
        """An operator who does not know where it is takes the token and keeps it."""
        for place in ("file:/ckpt", ""):
            log.begin(claim(checkpoint=place))
            head = log.head("orders")
            assert head is not None
            assert head.checkpoint == "file:/ckpt"

    def test_replaced_query_is_remembered(self, log: TransactionLog) -> None:
        """replaces= binds the name to the new query once; the old one's names are still swept."""
        log.begin(claim())
        fresh = QUERY.replace("1", "2")
        incarnation = log.begin(claim(query_id=fresh, replaces=QUERY))
        assert [owner.query_id for owner in incarnation.retired] == [QUERY]
        log.begin(claim(query_id=fresh, replaces=QUERY))
        with pytest.raises(ConfigurationError):
            log.begin(claim(query_id=QUERY.replace("1", "3"), replaces=QUERY))


class TestSqliteLog(LogContract):
    @pytest.fixture
    def address(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path}/txn.db"

    def test_write_is_synced_to_the_disk(self, tmp_path: Path) -> None:
        """synchronous=FULL and a write-ahead log: a decision survives a power loss."""
        log = SqliteLog(tmp_path / "txn.db")
        connection = log._connect()
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)

    @pytest.mark.parametrize(
        "damage",
        [
            "UPDATE sparkonce_records SET body = substr(body, 1, 100)",
            "UPDATE sparkonce_records SET body = replace(body, 'topic', 'tropic')",
            "UPDATE sparkonce_records SET body = replace(body, '\"v\": 1', '\"v\": 2')",
            "UPDATE sparkonce_records SET batch_id = 1",
            "UPDATE sparkonce_records SET state = 'complete'",
            "UPDATE sparkonce_heads SET token = 9",
            "UPDATE sparkonce_heads SET body = ''",
        ],
    )
    def test_changed_record_is_corrupt(self, tmp_path: Path, address: str, damage: str) -> None:
        """A torn or tampered record is never guessed from."""
        log = open_log(address)
        incarnation = log.begin(claim())
        log.decide(record(incarnation, 0))
        log.close()
        with sqlite3.connect(tmp_path / "txn.db") as connection:
            connection.execute(damage)
        connection.close()
        read = log.head if "heads" in damage else log.history
        with pytest.raises(LogCorruptError, match="restore|newer"):
            read("orders")

    def test_file_that_is_no_database_is_corrupt(self, tmp_path: Path, address: str) -> None:
        (tmp_path / "txn.db").write_bytes(b"not a database, but long enough to look like one" * 9)
        with pytest.raises(LogCorruptError, match="SQLite"):
            open_log(address)

    def test_locked_log_is_unavailable_and_nothing_is_written(self, tmp_path: Path) -> None:
        """Another process holds the lock: LogUnavailableError, and later the same call works."""
        path = tmp_path / "txn.db"
        log = SqliteLog(path, busy_timeout_s=0.01)
        incarnation = log.begin(claim())
        holder = sqlite3.connect(path, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(LogUnavailableError, match="nothing was written"):
            log.decide(record(incarnation, 0))
        holder.execute("ROLLBACK")
        holder.close()
        assert log.find(record(incarnation, 0).id) is None
        log.decide(record(incarnation, 0))

    def test_failing_commit_is_unknown(self, address: str) -> None:
        """COMMIT was sent and failed: the caller must read the log again."""
        log = open_log(address)
        assert isinstance(log, SqliteLog)
        incarnation = log.begin(claim())

        class Failing:
            def __init__(self, real: sqlite3.Connection) -> None:
                self._real = real

            def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
                if statement == "COMMIT":
                    self._real.execute("COMMIT")
                    raise sqlite3.OperationalError("disk I/O error")
                return self._real.execute(statement, *values)

            def close(self) -> None:
                self._real.close()

        log._open = Failing(log._connect())  # type: ignore[assignment]
        with pytest.raises(DecisionUnknownError, match="read the log again"):
            log.decide(record(incarnation, 0))
        standing = log.find(record(incarnation, 0).id)
        assert standing is not None
        assert standing.state is State.DECIDED

    def test_missing_folder_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="nowhere does not exist"):
            open_log(f"sqlite:///{tmp_path}/nowhere/txn.db")

    def test_relative_path_is_resolved(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A relative path means another log in another folder, so messages show the whole path."""
        monkeypatch.chdir(tmp_path)
        log = open_log("sqlite:///txn.db")
        assert log.address == f"sqlite:///{tmp_path.resolve()}/txn.db"

    def test_only_the_owner_can_read_the_file(self, tmp_path: Path, address: str) -> None:
        open_log(address)
        assert (tmp_path / "txn.db").stat().st_mode & 0o077 == 0

    def test_ten_thousand_branches_fit_a_record(self, address: str) -> None:
        log = open_log(address)
        incarnation = log.begin(claim())
        many = tuple(
            Committable(BranchId(incarnation.owner, 0, 1, "kafka", 0, n), {"n": n})
            for n in range(10_000)
        )
        decided = log.decide(
            record(incarnation, 0, shares={"kafka": Share("topic", (part(1),), many)})
        )
        assert log.find(decided.id) == decided


def test_fingerprints_add_up_modulo_2_to_the_64() -> None:
    parts = (part(1), part(2))
    assert parts[0].content + parts[1].content == Fingerprint("sum/1", 3, 2**64 - 3)
    assert (Share("topic", parts, ()).rows, Share("topic", parts, ()).bytes) == (3, 96)
    with pytest.raises(ValueError, match="sum/1 and other/1"):
        part(1).content + Fingerprint("other/1", 1, 1)


OLD_RECORD = (
    '{"v": 1, "body": {"id": {"pipeline": "orders", "query_id": "q", "batch_id": 3}, "token": 2, '
    '"state": "decided", "offsets": ["[3]"], "shares": {"kafka": {"target": "topic", "parts": [], '
    '"committables": []}}, "times": {"decided": 12.25}, "revision": 0, "lost": []}, "sha256": '
    '"48ca028e4a35ef871a65b5795cc598e68ed0d210a0aa41babc7b7f265e8f9d0c"}'
)
OLD_HEAD = (
    '{"v": 1, "body": {"pipeline": "orders", "query_id": "q", "token": 2, "run_id": "run", '
    '"driver": "host:1", "started_at": 1.5, "first_batch": 0, "sinks": {"kafka": "topic"}, '
    '"retired": []}, "sha256": '
    '"96a60a154f3895f103023a8d2a66e9ef2c46b69ada19b19d2b14bf3fc0c9c60f"}'
)


def test_record_from_before_settlements_is_read_and_written_as_it_was() -> None:
    """Format 1: so that an older sparkonce goes on reading what nobody has settled."""
    old = OLD_RECORD
    found = TransactionRecord.decode(old, "a record")
    assert found.settled == ()
    assert found.encode() == old
    assert Head.decode(OLD_HEAD, "a head").checkpoint == ""


def test_settled_record_is_refused_by_what_does_not_know_settlements() -> None:
    """Its format is 2, and the format is under the checksum."""
    found = TransactionRecord.decode(OLD_RECORD, "a record")
    word = Settlement("branch", Ruling.REDO, "ann@host", "why", 1.0, 2)
    text = replace(found, settled=(word,)).encode()
    assert json.loads(text)["v"] == 2
    assert TransactionRecord.decode(text, "a record").settled == (word,)
    for version in (1, 3):
        with pytest.raises(LogCorruptError):
            TransactionRecord.decode(text.replace('"v": 2', f'"v": {version}'), "a record")


def test_unknown_address_says_what_is_expected() -> None:
    with pytest.raises(ConfigurationError, match="sqlite:///relative"):
        open_log("redis://localhost")
