"""A part of `LogContract`: every verb, in and out of order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparkonce.errors import ConfigurationError, FencedError, ProtocolError
from sparkonce.testing.log_cases import (
    ACTS,
    ORDERS,
    OTHER_QUERY,
    OUTCOMES,
    QUERY,
    REACH,
    claim,
    deliver,
    part,
    record,
)
from sparkonce.testing.log_under_test import LogUnderTest
from sparkonce.txn_log import TransactionLog
from sparkonce.txn_log.record import Share, State
from sparkonce.txn_log.settlement import Ruling, Settlement


class LogVerbs(LogUnderTest):
    """What `LogContract` inherits; see there."""

    def test_decided_record_reads_back_equal(
        self, log: TransactionLog, other: TransactionLog
    ) -> None:
        """Another process sees exactly what was decided."""
        given = record(log.begin(claim()), 0)
        decided = log.decide(given)
        assert decided == replace(given, times=decided.times)
        assert other.find(decided.id) == decided
        assert list(other.unfinished("orders")) == [decided]
        assert other.log_id == log.log_id

    @pytest.mark.parametrize(("verb", "state"), ORDERS)
    def test_verb_in_state(
        self, log: TransactionLog, other: TransactionLog, verb: str, state: State | None
    ) -> None:
        """Each write does what the diagram of states says, or refuses and changes nothing."""
        incarnation = log.begin(claim())
        found = REACH[state](log, incarnation)
        before = other.find(found.id)
        expected = OUTCOMES[verb][state]
        if isinstance(expected, State) or expected is None:
            ACTS[verb](log, incarnation, found)
        else:
            with pytest.raises(ProtocolError, match=expected):
                ACTS[verb](log, incarnation, found)
        after = other.find(found.id)
        if isinstance(expected, State):
            assert after is not None
            assert after.state is expected
        else:
            assert after == before

    def test_settled_branch_is_remembered_for_ever(
        self, log: TransactionLog, other: TransactionLog
    ) -> None:
        """The log keeps who settled it, when and why. The batch ends as SETTLED for ever (I3)."""
        incarnation = log.begin(claim())
        token = incarnation.token
        decided = log.decide(record(incarnation, 0))
        (branch,) = decided.committables()
        first, second = (
            Settlement(str(branch.branch_id), ruling, "ann@host", "the disk is gone: ü", 7.5, token)
            for ruling in (Ruling.REDO, Ruling.ABORTED)
        )
        log.settle(decided.id, [first], token)
        settled = log.settle(decided.id, [second], token)
        assert log.settle(decided.id, [second], token) == settled, "idempotent"
        assert other.find(decided.id) == settled
        assert (settled.state, settled.settled) == (State.DECIDED, (first, second))
        assert settled.ruling(branch) is Ruling.ABORTED, "the last ruling counts"
        done = log.complete(settled, token)
        assert (done.state, done.settled) == (State.SETTLED, (first, second))
        assert log.complete(settled, token) == done
        assert list(log.unfinished("orders")) == []
        for n in range(1, 10):
            log.complete(log.decide(record(incarnation, n)), token)
        (newest,) = log.history("orders", limit=1)
        log.forget(newest, token, retain=2)
        assert [r.id.batch_id for r in log.history("orders")] == [9, 8, 0]

    def test_only_what_is_decided_is_settled(self, log: TransactionLog) -> None:
        """An unknown branch is refused, and so is a batch that is prepared, complete or unknown."""
        incarnation = log.begin(claim())
        token = incarnation.token
        prepared = log.prepare(record(incarnation, 0))
        (branch,) = prepared.committables()
        ruling = Settlement(str(branch.branch_id), Ruling.COMMITTED, "ann@host", "seen", 7.5, token)
        with pytest.raises(ProtocolError, match="is prepared: only what is decided"):
            log.settle(prepared.id, [ruling], token)
        decided = log.decide(prepared)
        with pytest.raises(ProtocolError, match="has no branch nothing"):
            log.settle(decided.id, [replace(ruling, branch="nothing")], token)
        with pytest.raises(FencedError):
            log.settle(decided.id, [ruling], token - 1)
        assert log.complete(decided, token).state is State.COMPLETE
        with pytest.raises(ProtocolError, match="is complete"):
            log.settle(decided.id, [ruling], token)
        with pytest.raises(ProtocolError, match="is not known"):
            log.settle(record(incarnation, 1).id, [ruling], token)

    def test_namesake_is_found(self, log: TransactionLog) -> None:
        """A query id of another pipeline, now or before: both would use the same names outside."""
        log.begin(claim())
        log.begin(claim(query_id=OTHER_QUERY, replaces=QUERY))
        for query_id in (QUERY, OTHER_QUERY):
            assert log.namesake("orders", query_id) is None
            assert log.namesake("clicks", query_id) == "orders"
        assert log.namesake("clicks", QUERY.replace("1", "3")) is None

    def test_newest_record_of_a_query(self, log: TransactionLog) -> None:
        incarnation = log.begin(claim())
        assert log.newest("orders", QUERY) is None
        for n in range(3):
            log.decide(record(incarnation, n))
        newest = log.newest("orders", QUERY)
        assert newest is not None
        assert newest.id.batch_id == 2
        assert log.newest("orders", QUERY.replace("1", "2")) is None

    def test_history_is_read_page_by_page(self, log: TransactionLog, other: TransactionLog) -> None:
        """`before=` goes on where a page ended; the pages together are the whole history."""
        first = log.begin(claim())
        for n in range(90):
            deliver(log, first, n)
        second = log.begin(claim(query_id=OTHER_QUERY, replaces=QUERY))
        deliver(log, second, 0)
        sizes: list[int] = []
        seen: list[int] = []
        before = None
        while len(sizes) < 5 and (page := other.history("orders", 25, QUERY, before)):
            sizes.append(len(page))
            seen += [r.id.batch_id for r in page]
            before = seen[-1]
        assert sizes == [25, 25, 25, 15]
        assert seen == list(range(89, -1, -1))
        assert {r.id.query_id for r in other.history("orders", 9, before=2)} == {QUERY, OTHER_QUERY}
        assert list(other.history("orders", 9, QUERY, 0)) == []
        assert list(other.history("orders", 9, OTHER_QUERY, 0)) == []

    def test_checkpoint_is_remembered(self, log: TransactionLog) -> None:
        """A claim without a checkpoint, an operator's, keeps the one that the log knows."""
        for place in ("file:/ckpt", ""):
            log.begin(claim(checkpoint=place))
            head = log.head("orders")
            assert head is not None
            assert head.checkpoint == "file:/ckpt"

    def test_first_decision_stands(self, log: TransactionLog) -> None:
        """Deciding a decided batch again returns the first decision and changes nothing (I3)."""
        incarnation = log.begin(claim())
        first = log.decide(record(incarnation, 0))
        assert log.decide(record(incarnation, 0, offsets=("other",))) == first
        assert log.find(first.id) == first

    def test_prepared_record_is_decided_once(
        self, log: TransactionLog, other: TransactionLog
    ) -> None:
        """PREPARED is unfinished. A newer driver can decide it too, and then it stays decided."""
        old = log.begin(claim())
        prepared = log.prepare(record(old, 0))
        assert prepared.state is State.PREPARED
        assert log.prepare(record(old, 0)) == prepared
        assert list(other.unfinished("orders")) == [prepared]
        newer = other.begin(claim())
        decided = log.decide(prepared, newer.token)
        assert (decided.state, decided.token) == (State.DECIDED, old.token)
        assert log.decide(prepared, newer.token) == decided
        assert log.abandon(prepared, newer.token) == decided

    def test_abandoned_batch_is_recreated_by_its_replay(self, log: TransactionLog) -> None:
        """Only its replay can follow: it is never decided, and no later batch is accepted."""
        old = log.begin(claim())
        prepared = log.prepare(record(old, 0))
        newer = log.begin(claim())
        abandoned = log.abandon(prepared, newer.token)
        assert abandoned.state is State.ABANDONED
        assert log.abandon(prepared, newer.token) == abandoned
        assert list(log.unfinished("orders")) == []
        with pytest.raises(ProtocolError, match="abandoned"):
            log.decide(prepared, newer.token)
        with pytest.raises(ProtocolError, match="never decided"):
            log.complete(prepared, newer.token)
        with pytest.raises(ProtocolError, match="the next batch of the log is 0"):
            log.decide(record(newer, 1))
        assert log.prepare(record(newer, 0)).token == newer.token

    def test_abandonment_that_lands_late_spares_the_replay(self, log: TransactionLog) -> None:
        """A retry of an abandonment, after a lost answer, does not abandon the prepared replay."""
        prepared = log.prepare(record(log.begin(claim()), 0))
        newer = log.begin(claim())
        log.abandon(prepared, newer.token)
        replay = log.prepare(record(newer, 0))
        assert log.abandon(prepared, newer.token) == replay
        assert list(log.unfinished("orders")) == [replay]

    def test_batch_does_not_follow_an_undecided_one(self, log: TransactionLog) -> None:
        """N+1 is refused while N is prepared (I5); so is a batch that skips a number."""
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
        """It does so once, and keeps the lost branches. Nothing else changes a decision (I3)."""
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
        """The record keeps the time of the first completion."""
        incarnation = log.begin(claim())
        decided = log.decide(record(incarnation, 0))
        done = log.complete(decided, incarnation.token)
        assert done.state is State.COMPLETE
        assert done.times.keys() == {State.DECIDED, State.COMPLETE}
        assert log.complete(decided, incarnation.token) == done
        assert list(log.unfinished("orders")) == []

    def test_refused_claim_fences_nobody(self, log: TransactionLog, other: TransactionLog) -> None:
        """A start that the identity guard refuses takes no token from the healthy driver."""
        healthy = log.begin(claim())
        with pytest.raises(ConfigurationError, match="replaces="):
            other.begin(claim(query_id=OTHER_QUERY))
        log.decide(record(healthy, 0))

    def test_replaced_query_is_remembered(self, log: TransactionLog) -> None:
        """replaces= binds the name to a new query once; the old query's names are still swept."""
        first = log.begin(claim())
        deliver(log, first, 0)
        incarnation = log.begin(claim(query_id=OTHER_QUERY, replaces=QUERY))
        assert [owner.query_id for owner in incarnation.retired] == [QUERY]
        deliver(log, incarnation, 0)
        assert {r.id.query_id for r in log.history("orders")} == {QUERY, OTHER_QUERY}
        assert {r.id.query_id for r in log.history("orders", 10, OTHER_QUERY)} == {OTHER_QUERY}
        again = log.begin(claim(query_id=OTHER_QUERY, replaces=QUERY))
        assert again.retired == incarnation.retired, "the log does not keep the replaced query"
        with pytest.raises(ConfigurationError):
            log.begin(claim(query_id=QUERY.replace("1", "3"), replaces=QUERY))
