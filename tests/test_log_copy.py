"""Moving a pipeline from one transaction log to another."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkonce.errors import (
    ConfigurationError,
    DecisionUnknownError,
    FencedError,
    LogUnavailableError,
)
from sparkonce.testing.log_cases import OTHER_QUERY, QUERY, claim, deliver, record
from sparkonce.txn_log import TransactionLog, copy, open_log
from sparkonce.txn_log.record import State
from tests.test_log import FailingCommit


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


def test_crash_between_the_two_writes(
    logs: tuple[TransactionLog, TransactionLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipeline can be started in neither; the same call finishes it, and again does nothing."""
    source, target = logs
    deliver(source, source.begin(claim()), 0)

    def away(step: object) -> None:
        raise LogUnavailableError("away")

    with monkeypatch.context() as patch:
        patch.setattr(target, "_write", away)
        with pytest.raises(LogUnavailableError):
            copy(source, target, "orders")
    with pytest.raises(ConfigurationError, match="was moved"):
        source.begin(claim(1))
    with pytest.raises(ConfigurationError, match="belongs to the transaction log with id"):
        target.begin(claim(1, checkpoint_log_id=source.log_id))
    for _ in range(2):
        copy(source, target, "orders")
    head = target.head("orders")
    assert head is not None
    deliver(target, target.begin(claim(1, checkpoint_log_id=source.log_id)), 1)
    copy(source, target, "orders")
    assert [r.id.batch_id for r in target.history("orders")] == [1, 0]


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
    with pytest.raises(ConfigurationError, match="are one log"):
        copy(source, open_log(source.address), "orders")
    with pytest.raises(ConfigurationError, match="does not know"):
        copy(source, target, "missing")
    foreign = target.begin(claim())
    with pytest.raises(ConfigurationError, match="already"):
        copy(source, target, "orders")
    target.decide(record(foreign, 0))
    source.begin(claim(pipeline="p"))
    copy(source, target, "p")
    with pytest.raises(ConfigurationError, match="already, that was moved"):
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
