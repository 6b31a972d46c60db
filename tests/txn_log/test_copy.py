"""Moving a pipeline from one transaction log to another."""

from __future__ import annotations

import itertools
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from sparkonce.errors import (
    ConfigurationError,
    DecisionUnknownError,
    FencedError,
    LogCorruptError,
    LogUnavailableError,
)
from sparkonce.protocol.operating import claim_again
from sparkonce.testing.log_cases import OTHER_QUERY, QUERY, claim, deliver, record
from sparkonce.txn_log import TransactionLog, copy, moving, open_log
from sparkonce.txn_log.base import Store
from sparkonce.txn_log.record import State
from tests.support.sqlite_faults import FailingCommit


@pytest.fixture(params=["sqlite to checkpoint", "checkpoint to sqlite", "sqlite to sqlite"])
def logs(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[TransactionLog, TransactionLog]:
    kinds = request.param.split(" to ")
    return open_kind(kinds[0], tmp_path / "a"), open_kind(kinds[1], tmp_path / "b")


def open_kind(kind: str, folder: Path) -> TransactionLog:
    folder.mkdir()
    return open_log(f"sqlite:///{folder}/txn.db" if kind == "sqlite" else f"checkpoint:{folder}")


def test_pipeline_goes_on_where_it_was(logs: tuple[TransactionLog, TransactionLog]) -> None:
    """Records, tokens, retired queries and the id in its branches' names go along."""
    source, target = logs
    deliver(source, source.begin(claim()), 0)
    old = source.begin(claim(query_id=OTHER_QUERY, replaces=QUERY))
    for batch_id in range(50):
        deliver(source, old, batch_id)
    undone = source.decide(record(old, 50))
    before = source.history("orders", 1000)
    assert copy(source, target, "orders") == before
    assert target.history("orders", 1000) == before
    assert list(target.unfinished("orders")) == [undone]
    ckpt = {"query_id": OTHER_QUERY, "checkpoint_log_id": source.log_id}
    newer = target.begin(claim(51, checkpoint_pipeline="orders", **ckpt))
    assert newer.owner == old.owner
    assert newer.retired == old.retired
    assert newer.token > old.token + 1, "no name of an older driver is taken again"
    assert target.id_of("orders") == source.log_id
    target.complete(undone, newer.token)
    deliver(target, newer, 51)


def test_old_log_says_where_the_pipeline_is(logs: tuple[TransactionLog, TransactionLog]) -> None:
    """A driver that runs is fenced, one that starts is refused, and both are told."""
    source, target = logs
    old = source.begin(claim())
    other = source.begin(claim(pipeline="other", query_id=OTHER_QUERY))
    copy(source, target, "orders")
    with pytest.raises(FencedError, match="was moved to the transaction log") as fenced:
        source.decide(record(old, 0))
    assert target.address in str(fenced.value)
    with pytest.raises(ConfigurationError, match="was moved to the transaction log"):
        source.begin(claim())
    with pytest.raises(FencedError):
        target.decide(record(old, 0))
    deliver(source, other, 0)


def test_copy_that_is_cut_off_anywhere(
    logs: tuple[TransactionLog, TransactionLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At no moment can a driver start in both logs; the same call finishes it, and again does
    nothing."""
    source, target = logs
    monkeypatch.setattr(moving, "_PART_CHARACTERS", 2000)
    old = source.begin(claim())
    for batch_id in range(8):
        deliver(source, old, batch_id)
    source.decide(record(old, 8))
    cut_off = 0
    while True:
        with monkeypatch.context() as patch:
            cut = CutOff(cut_off, patch, source, target)
            try:
                copy(source, target, "orders")
            except LogUnavailableError:
                cut_off += 1
            else:
                break
        starts = [can_start(log, source.log_id) for log in logs]
        assert sum(starts) <= 1
        assert starts[0] is not cut.is_closed
    assert cut_off > 5, "it goes over in several parts, before the old log is closed and after"
    assert [can_start(log, source.log_id) for log in logs] == [False, True]
    assert list(target.history("orders")) == list(source.history("orders"))
    newer = target.begin(claim(9, checkpoint_log_id=source.log_id))
    target.complete(record(old, 8), newer.token)
    deliver(target, newer, 9)
    copy(source, target, "orders")
    assert [r.id.batch_id for r in target.history("orders")] == list(range(9, -1, -1))


class CutOff:
    """Of all writes of a copy, those from the given one on do not arrive."""

    def __init__(
        self,
        number: int,
        patch: pytest.MonkeyPatch,
        source: TransactionLog,
        target: TransactionLog,
    ) -> None:
        self.left = number
        self.is_closed = is_closed(source)
        for log in (source, target):
            patch.setattr(log, "_write", self.instead_of(log))
        self.source = source

    def instead_of(self, log: TransactionLog) -> Callable[[Callable[[Store], object]], object]:
        real = log._write

        def write(step: Callable[[Store], object]) -> object:
            if self.left == 0:
                raise LogUnavailableError("away")
            self.left -= 1
            done = real(step)
            self.is_closed = is_closed(self.source)
            return done

        return write


def is_closed(log: TransactionLog) -> bool:
    head = log.head("orders")
    return head is not None and head.moved_to is not None


def can_start(log: TransactionLog, log_id: str) -> bool:
    """Whether a driver that has the pipeline's checkpoint is admitted; it takes no token."""

    class AdmittedError(Exception):
        pass

    real = log._write

    def admit(step: Callable[[Store], object]) -> object:
        def look(store: Store) -> None:
            step(store)
            raise AdmittedError

        return real(look)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "_write", admit)
        try:
            log.begin(claim(9, checkpoint_log_id=log_id))
        except ConfigurationError:
            return False
        except AdmittedError:
            return True
    raise AssertionError


def test_log_with_a_damaged_record_stays_open(
    logs: tuple[TransactionLog, TransactionLog], tmp_path: Path
) -> None:
    """What normal running never reads is found before anything is closed or fenced."""
    source, target = logs
    old = source.begin(claim())
    for batch_id in range(40):
        deliver(source, old, batch_id)
    source.close()
    damage_batch_3(tmp_path / "a")
    for _ in range(2):
        with pytest.raises(LogCorruptError):
            copy(source, target, "orders")
    deliver(source, old, 40)
    deliver(source, source.begin(claim(41)), 41)
    assert target.head("orders") is None


def damage_batch_3(folder: Path) -> None:
    if (folder / "txn.db").exists():
        with sqlite3.connect(folder / "txn.db") as connection:
            connection.execute("UPDATE sparkonce_records SET body = '{}' WHERE batch_id = 3")
        connection.close()
        return
    (archive,) = (folder / "sparkonce-log").glob("orders/archive/*/000000000000-*.json")
    archive.write_text(archive.read_text().replace("topic", "tropic", 1))


def test_batches_that_end_while_it_copies(
    logs: tuple[TransactionLog, TransactionLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that runs until the old log is closed: all that it did goes along."""
    source, target = logs
    old = source.begin(claim())
    deliver(source, old, 0)
    undone = source.decide(record(old, 1))
    real = target._write

    def meanwhile(step: Callable[[Store], object]) -> object:
        monkeypatch.setattr(target, "_write", real)
        source.complete(undone, old.token)
        for batch_id in range(2, 50):
            deliver(source, old, batch_id)
        source.forget(record(old, 49), old.token, retain=10)
        source.decide(record(old, 50))
        return real(step)

    monkeypatch.setattr(target, "_write", meanwhile)
    before = copy(source, target, "orders")
    assert list(source.history("orders")) == before
    assert list(target.history("orders", len(before))) == before
    assert [r.id.batch_id for r in target.unfinished("orders")] == [50]


@pytest.mark.parametrize("number", range(1, 5))
def test_copy_that_stood_still_while_another_finished(
    logs: tuple[TransactionLog, TransactionLog], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """It writes nothing over what a driver did since, at whichever write it stood still."""
    source, target = logs
    deliver(source, source.begin(claim()), 0)
    undone = source.decide(record(source.begin(claim(1)), 1))
    real = target._write
    left = itertools.count(1)

    def stand_still(step: Callable[[Store], object]) -> object:
        if next(left) == number:
            monkeypatch.setattr(target, "_write", real)
            copy(source, target, "orders")
            newer = target.begin(claim(2, checkpoint_log_id=source.log_id))
            target.complete(undone, newer.token)
            deliver(target, newer, 2)
        return real(step)

    monkeypatch.setattr(target, "_write", stand_still)
    with pytest.raises((LogUnavailableError, ConfigurationError)):
        copy(source, target, "orders")
    assert [r.state for r in target.history("orders")] == [State.COMPLETE] * 3
    assert not is_closed(target)


def test_copy_that_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the old log is closed the pipeline runs on, and may go to another log instead."""
    first, broken, third = (open_kind("sqlite", tmp_path / name) for name in "abc")
    old = first.begin(claim())
    for batch_id in range(3):
        deliver(first, old, batch_id)
    with monkeypatch.context() as patch:
        CutOff(2, patch, first, broken)
        with pytest.raises(LogUnavailableError):
            copy(first, broken, "orders")
    deliver(first, old, 3)
    with pytest.raises(
        ConfigurationError, match="from .*/a/txn.db to here was cut off: run the same"
    ):
        broken.begin(claim(4, checkpoint_log_id=first.log_id))
    copy(first, third, "orders")
    copy(third, broken, "orders")
    assert broken.history("orders") == third.history("orders")
    deliver(broken, broken.begin(claim(4, checkpoint_log_id=first.log_id)), 4)
    with pytest.raises(ConfigurationError, match="already has .*, which was moved"):
        copy(broken, first, "orders")


def test_new_log_that_is_lost_before_it_has_the_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty one at the same address takes it."""
    source, target = open_kind("sqlite", tmp_path / "a"), open_kind("sqlite", tmp_path / "b")
    deliver(source, source.begin(claim()), 0)
    with monkeypatch.context() as patch:
        CutOff(3, patch, source, target)
        with pytest.raises(LogUnavailableError):
            copy(source, target, "orders")
    assert is_closed(source)
    target.close()
    for path in (tmp_path / "b").iterdir():
        path.unlink()
    target = open_log(target.address)
    copy(source, target, "orders")
    deliver(target, target.begin(claim(1, checkpoint_log_id=source.log_id)), 1)


def test_writes_of_a_long_history_stay_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that takes so much in one statement, and so long, takes any history."""
    source, target = open_kind("sqlite", tmp_path / "a"), open_kind("sqlite", tmp_path / "b")
    old = source.begin(claim())
    for batch_id in range(100):
        deliver(source, old, batch_id)
    monkeypatch.setattr(moving, "_PART_CHARACTERS", 10_000)
    sizes = []
    real = target._write

    def write(step: Callable[[Store], object]) -> object:
        def counted(store: Store) -> object:
            put, size = store.put, []
            monkeypatch.setattr(
                store, "put", lambda each: (size.append(len(each.encode())), put(each))
            )
            done = step(store)
            sizes.append(sum(size))
            return done

        return real(counted)

    monkeypatch.setattr(target, "_write", write)
    copy(source, target, "orders")
    assert max(sizes) < 12_000
    assert len(target.history("orders", 1000)) == 100


def test_lost_answer_of_the_first_write(tmp_path: Path) -> None:
    """Called again, it goes on with what it had closed."""
    source, target = open_kind("sqlite", tmp_path / "a"), open_kind("sqlite", tmp_path / "b")
    deliver(source, source.begin(claim()), 0)
    source._open = FailingCommit(source._connect())  # type: ignore[attr-defined]
    with pytest.raises(DecisionUnknownError):
        copy(source, target, "orders")
    assert [r.state for r in copy(source, target, "orders")] == [State.COMPLETE]


def test_moves_that_are_refused(logs: tuple[TransactionLog, TransactionLog]) -> None:
    """To itself, of what is not there, onto a pipeline that is another one, back, and twice."""
    source, target = logs
    source.begin(claim())
    with pytest.raises(ConfigurationError, match="are the same log"):
        copy(source, open_log(source.address), "orders")
    with pytest.raises(ConfigurationError, match="has no pipeline"):
        copy(source, target, "missing")
    foreign = target.begin(claim())
    with pytest.raises(ConfigurationError, match="already"):
        copy(source, target, "orders")
    target.decide(record(foreign, 0))
    source.begin(claim(pipeline="p"))
    copy(source, target, "p")
    with pytest.raises(ConfigurationError, match="already has .*, which was moved"):
        copy(target, source, "p")


def test_moved_twice(tmp_path: Path) -> None:
    """The id of the first log stays; the first one tells of the second, and that of the third."""
    first, second, third = (open_kind("sqlite", tmp_path / name) for name in "abc")
    deliver(first, first.begin(claim()), 0)
    copy(first, second, "orders")
    copy(second, third, "orders")
    with pytest.raises(ConfigurationError, match="copy it from there"):
        copy(first, third, "orders")
    newer = third.begin(claim(1, checkpoint_log_id=first.log_id))
    assert newer.owner.log_id == first.log_id


def test_copied_checkpoint_with_its_log_fences_nobody(tmp_path: Path) -> None:
    """Both would write under equal names; a move takes a word, and is noted."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    (old / "metadata").write_text(f'{{"id":"{QUERY}"}}')
    first = open_log(f"checkpoint:{old}")
    running = first.begin(claim(checkpoint=f"file:{old}"))
    deliver(first, running, 0)
    shutil.copytree(old, new)
    copied = open_log(f"checkpoint:{new}")
    before = copied.head("orders")
    assert before is not None
    asks = claim(1, run_id="copy", checkpoint=f"file:{new}")
    for start in (asks, claim_again(copied, before, before.sinks)):
        with pytest.raises(ConfigurationError, match=f"adopt=.moved from file:{old}."):
            copied.begin(start)
    assert copied.head("orders") == before
    deliver(first, running, 1)
    word = (f"moved from {old}",)
    moved = copied.begin(claim(1, checkpoint=f"file:{new}", adopt=word))
    deliver(copied, moved, 1)
    head = copied.head("orders")
    assert head is not None
    assert head.checkpoint == f"file:{new}"
    assert copied.begin(claim_again(copied, head, head.sinks)).token > moved.token
