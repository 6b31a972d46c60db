"""The transaction log in SQLite, what is common to all logs, and records of older versions."""

from __future__ import annotations

import base64
import json
import shutil
import sqlite3
import zlib
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkonce.errors import (
    ConfigurationError,
    FencedError,
    LogCorruptError,
    LogUnavailableError,
)
from sparkonce.model import BranchId, Committable, Owner
from sparkonce.testing.log_cases import QUERY, claim, part, record
from sparkonce.testing.log_contract import LogContract
from sparkonce.txn_log import open_log
from sparkonce.txn_log.record import (
    Fingerprint,
    Head,
    Incarnation,
    Share,
    State,
    TransactionRecord,
)
from sparkonce.txn_log.sealing import FORMAT_VERSION, seal
from sparkonce.txn_log.settlement import Ruling, Settlement
from sparkonce.txn_log.sqlite import SqliteLog
from tests.support.local_logs import SqliteUnderTest, path_of

GOLDEN = Path(__file__).parents[1] / "golden"


class InterruptedWrite:
    """A connection in which Ctrl-C is pressed at a statement: Python raises it before or behind."""

    def __init__(self, real: sqlite3.Connection, statement: str, *, is_done: bool) -> None:
        self._real = real
        self._statement = statement
        self._is_done = is_done

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        if not statement.startswith(self._statement):
            return self._real.execute(statement, *values)
        self._statement = "no other one"
        if self._is_done:
            self._real.execute(statement, *values)
        raise KeyboardInterrupt

    @property
    def in_transaction(self) -> bool:
        return self._real.in_transaction

    def close(self) -> None:
        self._real.close()


class TestSqliteLog(SqliteUnderTest, LogContract):
    @pytest.mark.parametrize("is_done", [False, True])
    @pytest.mark.parametrize("statement", ["BEGIN", "INSERT", "COMMIT"])
    def test_interrupted_write_holds_no_lock(
        self, address: str, statement: str, is_done: bool
    ) -> None:
        """Else no other process could write until this one writes again, or ends."""
        log = SqliteLog(path_of(address), busy_timeout_s=0.1)
        interrupted = InterruptedWrite(log._connect(), statement, is_done=is_done)
        log._open = interrupted  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            log.begin(claim())
        other = SqliteLog(path_of(address), busy_timeout_s=0.1)
        is_known = other.head("orders") is not None
        assert is_known == (statement == "COMMIT" and is_done)
        token = other.begin(claim()).token
        assert log.begin(claim()).token > token

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
            "UPDATE sparkonce_records SET body = replace(body, '\"v\": 2', '\"v\": 3')",
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

    @pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs"])
    def test_network_file_system_is_refused(self, tmp_path: Path, kind: str) -> None:
        """SQLite's locks do not hold there; a list of mounts stands in for a real one."""
        spaced = tmp_path / "a b"
        (spaced / "local").mkdir(parents=True)
        mounts = tmp_path / "mounts"
        point = str(spaced).replace(" ", r"\040")
        mounts.write_text(
            f"/dev/vda / ext4 rw 0 0\nserver:/export {point} {kind} rw 0 0\n"
            f"/dev/vdb {point}/local ext4 rw 0 0\n"
        )
        with pytest.raises(ConfigurationError, match=f"network file system .{kind}.*locks"):
            SqliteLog(spaced / "txn.db", mounts=mounts)
        assert not (spaced / "txn.db").exists()
        for local in (spaced / "local", tmp_path):
            SqliteLog(local / "txn.db", mounts=mounts).close()
        SqliteLog(spaced / "txn.db", mounts=tmp_path / "no such list").close()

    @pytest.mark.parametrize("is_made_anew", [False, True])
    def test_empty_folder_below_a_mount(self, tmp_path: Path, *, is_made_anew: bool) -> None:
        """A log that was there is away; none is made in its place, nor is another one taken."""
        folder, away = tmp_path / "mount", tmp_path / "away"
        folder.mkdir()
        log = SqliteLog(folder / "txn.db")
        incarnation = log.begin(claim())
        log.decide(record(incarnation, 0))
        log.close()
        folder.rename(away)
        folder.mkdir()
        if is_made_anew:
            SqliteLog(folder / "txn.db").close()
        for act in (
            lambda: log.head("orders"),
            lambda: log.check_token(incarnation),
            lambda: log.complete(record(incarnation, 0), incarnation.token),
            lambda: log.begin(claim()),
        ):
            with pytest.raises(LogUnavailableError, match="mounted"):
                act()
        assert list(folder.glob("txn.db")) == [folder / "txn.db"] * is_made_anew
        shutil.rmtree(folder)
        away.rename(folder)
        log.check_token(incarnation)
        assert len(log.unfinished("orders")) == 1

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

    def test_newer_tables_are_refused(self, tmp_path: Path, address: str) -> None:
        """An older library does not write into tables that it does not know."""
        open_log(address).close()
        with closing(sqlite3.connect(tmp_path / "txn.db", isolation_level=None)) as connection:
            connection.execute("INSERT INTO sparkonce_meta VALUES ('version', '2')")
        with pytest.raises(ConfigurationError, match="version 2"):
            open_log(address)

    def test_only_the_owner_can_read_the_file(self, tmp_path: Path, address: str) -> None:
        open_log(address)
        assert (tmp_path / "txn.db").stat().st_mode & 0o077 == 0


def test_record_of_a_newer_format_is_not_called_torn() -> None:
    """Whoever restores an old log over it loses what was decided since."""
    with pytest.raises(LogCorruptError, match="use a newer one"):
        TransactionRecord.decode('{"v": 99, "what": {}, "crc": 1}', "it")
    for torn in ("{}", '{"v": 2, "body": {}}', "[]", '"v"', "{"):
        with pytest.raises(LogCorruptError, match="not a whole record"):
            TransactionRecord.decode(torn, "it")


def test_head_with_a_field_of_a_newer_version_is_refused() -> None:
    text = seal({**Head("orders", QUERY, 3, "run", "host:1", 0.0).to_json(), "news": 1})
    with pytest.raises(LogCorruptError, match="news.*use a newer one"):
        Head.decode(text, "it")


def test_record_of_many_branches_is_compressed() -> None:
    """2,000 tasks with three sinks, which would take 3 MB; a damaged byte is noticed."""
    incarnation = Incarnation("orders", Owner("0123456789abcdef", QUERY), 3)
    one = record(incarnation, 7)
    shares = {}
    for sink in ("kafka", "postgres", "s3"):
        ids = [BranchId(incarnation.owner, 7, 3, sink, 0, n) for n in range(2000)]
        parts = tuple(replace(part(n), partition=n, branch=i.name) for n, i in enumerate(ids))
        shares[sink] = Share(sink, parts, tuple(Committable(i, {"id": i.name}) for i in ids))
    many = replace(one, shares=shares)
    text = many.encode()
    assert len(text) < 1_000_000
    assert TransactionRecord.decode(text, "it") == many
    assert '"body"' in one.encode()
    start = text.index('"zlib"')
    for damaged in (
        text[:-100],
        text[: start + 5000] + ("A" if text[start + 5000] != "A" else "B") + text[start + 5001 :],
        text.replace(json.loads(text)["zlib"], "eAE="),
        text.replace(json.loads(text)["zlib"], json.loads(packed(one))["zlib"]),
    ):
        with pytest.raises(LogCorruptError, match="restore"):
            TransactionRecord.decode(damaged, "it")


def packed(found: TransactionRecord) -> str:
    """The record in its compressed form, though it is short."""
    body = json.dumps(found.to_json()).encode()
    return json.dumps({"v": 2, "zlib": base64.b64encode(zlib.compress(body)).decode()})


def test_fingerprints_add_up_modulo_2_to_the_64() -> None:
    parts = (part(1), part(2))
    assert parts[0].content + parts[1].content == Fingerprint("sum/1", 3, 2**64 - 3)
    assert (Share("topic", parts, ()).rows, Share("topic", parts, ()).bytes) == (3, 96)
    with pytest.raises(ValueError, match="sum/1 and other/1"):
        part(1).content + Fingerprint("other/1", 1, 1)


def test_unknown_address_says_what_is_expected() -> None:
    with pytest.raises(ConfigurationError, match="sqlite:///relative"):
        open_log("redis://localhost")


@pytest.mark.parametrize(
    "path",
    [*sorted(GOLDEN.glob("record-*.json")), *sorted(GOLDEN.glob("packed-*.json"))],
    ids=lambda p: p.stem,
)
def test_record_of_an_older_version_is_read(path: Path) -> None:
    """Every version that was ever written means the same today."""
    incarnation = Incarnation("orders", Owner("0123456789abcdef", QUERY), 3)
    expected = record(incarnation, 7, times={State.PREPARED: 10.5, State.DECIDED: 12.25})
    lost = expected.shares["kafka"].committables
    expected = expected.amended({"kafka": expected.shares["kafka"]}, lost)
    found = TransactionRecord.decode(path.read_text(), path.name)
    assert found == expected
    assert TransactionRecord.decode(found.encode(), "again") == expected


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("settled-*.json")), ids=lambda p: p.stem)
def test_settlement_of_an_older_version_is_read(path: Path) -> None:
    """An operator's word means the same for ever."""
    incarnation = Incarnation("orders", Owner("0123456789abcdef", QUERY), 3)
    expected = record(incarnation, 7, times={State.DECIDED: 12.25})
    (committable,) = expected.shares["kafka"].committables
    said = Settlement(str(committable.branch_id), Ruling.REDO, "ann@host", "bücket gone", 13.5, 4)
    found = TransactionRecord.decode(path.read_text(), path.name)
    assert found == replace(expected, settled=(said,))
    assert found.ruling(committable) is Ruling.REDO
    assert TransactionRecord.decode(found.encode(), "again") == found


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("head-*.json")), ids=lambda p: p.stem)
def test_head_of_an_older_version_is_read(path: Path) -> None:
    """Every version that was ever written means the same today."""
    found = Head.decode(path.read_text(), path.name)
    assert found == Head(
        "orders",
        QUERY,
        3,
        "run",
        "host:1",
        1750000000.5,
        first_batch=2,
        sinks={"kafka": "topic"},
        retired=(QUERY.replace("1", "9"),),
        log_id=None if path.stem == "head-v1" else "0123456789abcdef",
        moved_to=None if path.stem == "head-v1" else "s3://bucket/log",
    )


def test_every_version_has_its_golden_file() -> None:
    """Whoever changes the format adds what it wrote until then."""
    for kind, first in {"record": 1, "head": 1, "settled": 2, "packed": 2}.items():
        versions = {int(path.stem.rpartition("v")[2]) for path in GOLDEN.glob(f"{kind}-*.json")}
        assert versions == set(range(first, FORMAT_VERSION + 1))


def test_file_that_is_deleted_under_a_driver(tmp_path: Path) -> None:
    """What it decides would be in a file that nobody finds any more."""
    log = SqliteLog(tmp_path / "txn.db")
    incarnation = log.begin(claim())
    (tmp_path / "txn.db").unlink()
    for act in (lambda: log.decide(record(incarnation, 0)), lambda: log.head("orders")):
        with pytest.raises(LogUnavailableError, match="check that the file is there"):
            act()


def test_copy_that_is_restored_under_a_driver(tmp_path: Path) -> None:
    """The driver goes on in the file that is there now, and so it is fenced like any other."""
    path, copy = tmp_path / "txn.db", tmp_path / "copy.db"
    log = SqliteLog(path)
    incarnation = log.begin(claim())
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    for kind in ("wal", "shm"):
        (tmp_path / f"txn.db-{kind}").unlink()
    copy.replace(path)
    newer = SqliteLog(path).begin(claim())
    assert newer.token > incarnation.token
    with pytest.raises(FencedError):
        log.decide(record(incarnation, 0))
