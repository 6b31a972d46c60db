"""A part of `LogContract`: crashes, lost answers, damage, moves, and a long history."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path

import pytest

from sparkonce.errors import (
    ConfigurationError,
    DecisionUnknownError,
    FencedError,
    LogCorruptError,
    LogUnavailableError,
    SparkOnceError,
)
from sparkonce.model import BranchId, Committable, TransactionId
from sparkonce.testing import log_process
from sparkonce.testing.log_cases import (
    OUTCOMES,
    QUERY,
    REACH,
    READS,
    WRITES,
    claim,
    deliver,
    numbers,
    part,
    places,
    record,
)
from sparkonce.testing.log_under_test import LogUnderTest
from sparkonce.txn_log import TransactionLog, copy, open_log
from sparkonce.txn_log.record import Incarnation, Share, State, TransactionRecord


class LogFaults(LogUnderTest):
    """What `LogContract` inherits; see there."""

    @pytest.mark.parametrize("verb", ["begin", *WRITES])
    def test_process_is_killed_at_every_round_trip(
        self, log: TransactionLog, address: str, verb: str
    ) -> None:
        """A write lands completely or not at all, and the next driver continues from there."""
        before, _ = WRITES.get(verb, (State.COMPLETE, None))
        for place in places():
            pipeline = place.pipeline
            incarnation = log.begin(claim(pipeline=pipeline))
            if before is not None:
                REACH[before](log, incarnation)
            was = list(log.history(pipeline))
            process = self.start(address, log_process.write, verb, incarnation, place.number)
            if process.killed_at_its_pause():
                place.reached = "in another process"
            after = self.open_log(address)
            _check_whole_step(after, incarnation, was, verb)
            newer = after.begin(claim(pipeline=pipeline))
            assert newer.token > incarnation.token
            found = after.find(record(incarnation, 0).id)
            if found is not None and found.state is State.PREPARED:
                found = after.decide(found, newer.token)
            if found is None or found.state is State.ABANDONED:
                found = after.decide(record(newer, 0))
            ended = State.SETTLED if found.settled else State.COMPLETE
            assert after.complete(found, newer.token).state is ended
            after.close()

    @pytest.mark.parametrize("verb", list(WRITES))
    def test_answer_is_lost(self, log: TransactionLog, address: str, verb: str) -> None:
        """The write lands, its answer is lost: `DecisionUnknownError`. A retry changes nothing."""
        before, act = WRITES[verb]
        incarnation = log.begin(claim())
        if before is not None:
            REACH[before](log, incarnation)
        with self.losing_the_answer(address) as losing:
            with pytest.raises(DecisionUnknownError, match="again"):
                act(losing, incarnation)
            written = log.find(record(incarnation, 0).id)
            if verb != "amend":  # its retry would amend the amendment; see the test of amendments
                act(losing, incarnation)
            assert log.find(record(incarnation, 0).id) == written
            losing.close()
        expected = OUTCOMES[verb][before]
        assert written is not None
        assert written.state is expected
        assert written.revision == (verb == "amend")

    def test_token_whose_answer_is_lost(self, log: TransactionLog, address: str) -> None:
        """A retry of `begin` takes a new token; no driver has the lost one."""
        log.begin(claim())
        with self.losing_the_answer(address) as losing:
            with pytest.raises(DecisionUnknownError):
                losing.begin(claim())
            lost = log.head("orders")
            assert lost is not None
            assert losing.begin(claim()).token > lost.token
            losing.close()

    def test_log_out_of_reach(
        self, log: TransactionLog, other: TransactionLog, address: str
    ) -> None:
        """Writes report it, and decide nothing. Reads report it, or answer as before.

        An unreachable log never reads as an empty one: a driver would abort what is decided.
        """
        incarnation = log.begin(claim())
        decided = log.decide(record(incarnation, 0))
        before = [read(log, decided.id) for read in READS]
        assert [read(other, decided.id) for read in READS] == before
        errors: list[Exception] = []
        with self.out_of_reach(address):
            for write in (
                lambda: log.decide(record(incarnation, 1)),
                lambda: log.begin(claim()),
            ):
                with pytest.raises((LogUnavailableError, DecisionUnknownError)) as raised:
                    write()
                errors.append(raised.value)
            for each in chain((log, other), self._opened(address, errors)):
                for read, expected in zip(READS, before, strict=True):
                    try:
                        assert read(each, decided.id) == expected, "it does not read as before"
                    except LogUnavailableError as error:
                        errors.append(error)
        for text in map(_said, errors):
            assert not any(secret in text for secret in self.secrets), "an error shows a secret"
        assert log.find(record(incarnation, 1).id) is None
        written = log.decide(record(incarnation, 1))
        assert list(other.unfinished("orders")) == [decided, written]

    def _opened(self, address: str, errors: list[Exception]) -> Iterator[TransactionLog]:
        """The log, opened again, if it can be; otherwise `errors` gets the error."""
        try:
            opened = self.open_log(address)
        except SparkOnceError as error:
            errors.append(error)
        else:
            with closing(opened):
                yield opened

    @pytest.mark.parametrize(
        ("old", "new"),
        [("topic", "tropic"), ('"v": 2', '"v": 99'), ('"sha256"', '"sha'), ('"body"', '"bod')],
    )
    def test_damaged_record_is_corrupt(
        self, log: TransactionLog, address: str, old: str, new: str
    ) -> None:
        """Reads and writes refuse a torn or tampered record; they never guess its content."""
        incarnation = log.begin(claim())
        log.decide(record(incarnation, 0))
        log.close()
        self.damage(address, old, new)
        after = self.open_log(address)
        for call in (
            lambda: after.history("orders"),
            lambda: after.find(record(incarnation, 0).id),
            lambda: after.begin(claim()),
            lambda: after.complete(record(incarnation, 0), incarnation.token),
        ):
            with pytest.raises(LogCorruptError, match="restore|newer"):
                call()
        after.close()

    def test_no_secret_is_shown(self, log: TransactionLog) -> None:
        """Neither the address nor the repr contains one."""
        assert log.address
        for secret in self.secrets:
            assert secret not in log.address + repr(log) + str(vars(log))

    def test_pipeline_moves_here_and_away(
        self, log: TransactionLog, other: TransactionLog, tmp_path: Path
    ) -> None:
        """It moves with its history, tokens and names; the old log's users learn where it went."""
        first, last = (open_log(f"sqlite:///{tmp_path}/{name}.db") for name in ("from", "to"))
        old = first.begin(claim())
        for batch_id in range(40):
            deliver(first, old, batch_id)
        copy(first, log, "orders")
        assert other.history("orders") == first.history("orders")
        newer = log.begin(claim(40, checkpoint_log_id=first.log_id))
        assert newer.owner == old.owner
        undone = log.decide(record(newer, 40))
        assert copy(log, last, "orders") == last.history("orders")
        assert list(last.unfinished("orders")) == [undone]
        with pytest.raises(FencedError, match="was moved to the transaction log sqlite:"):
            log.complete(undone, newer.token)
        with pytest.raises(ConfigurationError, match="was moved to the transaction log sqlite:"):
            other.begin(claim(40, checkpoint_log_id=first.log_id))
        for each in (first, last):
            each.close()


def _said(error: BaseException) -> str:
    """The messages of the error and of its causes, without their lines of code."""
    messages: list[str] = []
    seen = [error]
    for each in seen:
        messages += traceback.format_exception_only(each)
        seen += [
            more
            for more in (each.__cause__, each.__context__)
            if more is not None and more not in seen
        ]
    return "".join(messages)


def _check_whole_step(
    log: TransactionLog, incarnation: Incarnation, was: Sequence[TransactionRecord], verb: str
) -> None:
    """Check what the log holds after a process was killed in a write."""
    head, now = log.head(incarnation.pipeline), list(log.history(incarnation.pipeline))
    assert head is not None
    if verb == "begin":
        has_token = head.token > incarnation.token
        assert has_token == (numbers(now) == [2, 1, 0]) == (now != was), "half a step landed"
    elif now != was:
        assert [(r.id.batch_id, r.token) for r in now] == [(0, incarnation.token)]


class LogSizes(LogUnderTest):
    """What `LogContract` inherits; see there."""

    def test_forget_keeps_the_newest_and_what_is_unfinished(
        self, log: TransactionLog, other: TransactionLog
    ) -> None:
        """`retain` batches stay; the newest one always stays (I3)."""
        incarnation = log.begin(claim())
        done = [deliver(log, incarnation, n) for n in range(10)]
        log.forget(done[9], incarnation.token, retain=3)
        assert [r.id.batch_id for r in log.history("orders")] == [9, 8, 7]
        assert [r.id.batch_id for r in other.history("orders", limit=2)] == [9, 8]
        assert other.find(done[6].id) is None
        decided = log.decide(record(incarnation, 10))
        log.forget(done[9], incarnation.token, retain=1)
        assert [r.id.batch_id for r in other.history("orders")] == [10, 9]
        log.complete(decided, incarnation.token)

    def test_history_is_bounded(self, log: TransactionLog, address: str) -> None:
        """Old batches read back unchanged, and `retain` bounds the size of the log."""
        self.check_history(log, address, batches=200, retain=50)

    @pytest.mark.slow
    def test_long_history_is_bounded(self, log: TransactionLog, address: str) -> None:
        """The same for `long_history` batches."""
        self.check_history(log, address, batches=self.long_history, retain=self.long_history // 4)

    def check_history(
        self, log: TransactionLog, address: str, *, batches: int, retain: int
    ) -> None:
        incarnation = log.begin(claim())
        halfway = 0
        first = deliver(log, incarnation, 0)
        for batch_id in range(1, batches):
            done = deliver(log, incarnation, batch_id)
            if batch_id % 10 == 0:
                log.forget(done, incarnation.token, retain=retain)
            if batch_id == batches // 2:
                halfway = self.stored_bytes(address)
                assert log.find(first.id) is None
        log.forget(done, incarnation.token, retain=retain)
        with closing(self.open_log(address)) as reader:
            kept = reader.history("orders", limit=batches)
            assert list(reader.history("orders", retain, QUERY)) == list(kept)
            newest = batches - 1
            assert [r.id.batch_id for r in kept] == list(range(newest, newest - retain, -1))
            for found in (kept[0], kept[retain // 2], kept[-1]):
                assert reader.find(found.id) == found
                assert found.state is State.COMPLETE
            assert reader.find(TransactionId("orders", QUERY, newest - retain)) is None
        assert self.stored_bytes(address) < 1.5 * halfway

    def test_ten_thousand_branches_fit_a_record(
        self, log: TransactionLog, other: TransactionLog
    ) -> None:
        """The record is decided and completed as a whole."""
        incarnation = log.begin(claim())
        many = tuple(
            Committable(BranchId(incarnation.owner, 0, 1, "kafka", 0, n), {"n": n})
            for n in range(10_000)
        )
        share = Share("topic", (part(1),), many)
        decided = log.decide(record(incarnation, 0, shares={"kafka": share}))
        assert other.find(decided.id) == decided
        log.complete(decided, incarnation.token)
        deliver(log, incarnation, 1)
        deliver(log, incarnation, 2)
        found = other.find(decided.id)
        assert found is not None
        assert found.shares == decided.shares
