"""A part of `LogContract`: what is listed, kept, forgotten and read back."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace

import pytest

from sparkonce.model import TransactionId
from sparkonce.testing.log_cases import (
    OTHER_QUERY,
    QUERY,
    claim,
    deliver,
    full_head,
    full_record,
    numbers,
    record,
)
from sparkonce.testing.log_under_test import LogUnderTest
from sparkonce.txn_log import TransactionLog
from sparkonce.txn_log.founding import found
from sparkonce.txn_log.record import State

SIMILAR_QUERY = QUERY[:-1] + "6"
SIMILAR_NAMES = (
    "orders",
    "Orders",
    "orders-eu",
    "orders_eu",
    "ordersXeu",
    "orders-" + "x" * 24 + "1",
    "orders-" + "x" * 24 + "2",
)
"""Names of pipelines that a pattern, a prefix, a short column or a lack of case would mix up."""


MIXED_UP = "pipelines with similar names are mixed up"


class LogRecords(LogUnderTest):
    """What `LogContract` inherits; see there."""

    def test_unfinished_are_listed_oldest_first(
        self, log: TransactionLog, other: TransactionLog
    ) -> None:
        """Every decided batch is listed until it is complete, those of a replaced query too."""
        first = log.begin(claim())
        decided = [log.decide(record(first, n)) for n in range(12)]
        for done in decided[3:9]:
            log.complete(done, first.token)
        left = [*decided[:3], *decided[9:]]
        for each in (log, other):
            assert list(each.unfinished("orders")) == left, "unfinished: all, in order of batches"
        second = log.begin(claim(query_id=OTHER_QUERY, replaces=QUERY))
        left.append(log.decide(record(second, 0)))
        seen = other.unfinished("orders")
        assert {r.id for r in seen} == {r.id for r in left}, "unfinished: of every query"
        assert sorted(numbers(seen)) == numbers(seen)

    def test_forget_keeps_what_is_decided(self, log: TransactionLog, other: TransactionLog) -> None:
        """A decided batch stays, however old it is: its branches are not all committed yet (I3)."""
        incarnation = log.begin(claim())
        decided = log.decide(record(incarnation, 0))
        done = [deliver(log, incarnation, n) for n in range(1, 41)]
        log.forget(done[-1], incarnation.token, retain=2)
        for each in (log, other):
            assert list(each.unfinished("orders")) == [decided], "a decided batch was forgotten"
            assert each.find(decided.id) == decided, "a decided batch was forgotten"
            assert numbers(each.history("orders")) == [40, 39, 0]
        assert log.complete(decided, incarnation.token).state is State.COMPLETE
        log.forget(done[-1], incarnation.token, retain=2)
        assert numbers(other.history("orders")) == [40, 39]

    def test_forget_spares_other_queries_and_pipelines(
        self, log: TransactionLog, other: TransactionLog
    ) -> None:
        """Only records of the named query and pipeline are dropped."""
        kept = {("orders", QUERY), *((name, SIMILAR_QUERY) for name in SIMILAR_NAMES[1:])}
        for name, query_id in sorted(kept):
            incarnation = log.begin(claim(pipeline=name, query_id=query_id))
            for n in range(3):
                deliver(log, incarnation, n)
        incarnation = log.begin(claim(query_id=SIMILAR_QUERY, replaces=QUERY))
        done = [deliver(log, incarnation, n) for n in range(3)]
        log.forget(done[-1], incarnation.token, retain=1)
        assert numbers(other.history("orders", 9, SIMILAR_QUERY)) == [2]
        for name, query_id in kept:
            seen = numbers(other.history(name, 9, query_id))
            assert seen == [2, 1, 0], f"records of {name}, {query_id} were forgotten too"

    def test_pipelines_are_listed(self, log: TransactionLog) -> None:
        assert list(log.pipelines()) == []
        log.begin(claim())
        log.begin(claim(pipeline="clicks", query_id=QUERY.replace("1", "2")))
        assert list(log.pipelines()) == ["clicks", "orders"]
        many = [f"p{n}" for n in range(100, 210)]
        for name in many:
            log.begin(claim(pipeline=name))
        assert list(log.pipelines()) == ["clicks", "orders", *many], "some pipelines are not listed"

    def test_pipelines_are_separate(self, log: TransactionLog) -> None:
        """One log serves many pipelines; a token of one fences no driver of another."""
        orders = log.begin(claim())
        europe = log.begin(claim(pipeline="orders-eu", query_id=OTHER_QUERY))
        log.decide(record(orders, 0))
        assert list(log.unfinished("orders-eu")) == []
        log.decide(record(europe, 0))
        assert [r.id.pipeline for r in log.history("orders")] == ["orders"]

    def test_similar_names_are_separate(self, log: TransactionLog, other: TransactionLog) -> None:
        """Case, an underscore, and the last of 32 characters each make another pipeline."""
        for count, name in enumerate(SIMILAR_NAMES, 1):
            incarnation = log.begin(claim(pipeline=name))
            head = log.head(name)
            assert head is not None, MIXED_UP
            assert (head.pipeline, head.starts) == (name, 1), MIXED_UP
            for n in range(count):
                log.decide(record(incarnation, n))
        for count, name in enumerate(SIMILAR_NAMES, 1):
            head, newest = other.head(name), other.newest(name, QUERY)
            last = TransactionId(name, QUERY, count - 1)
            assert [head and head.pipeline, newest and newest.id] == [name, last], MIXED_UP
            for records in (other.unfinished(name), other.history(name)[::-1]):
                ids = [(r.id.pipeline, r.id.batch_id) for r in records]
                assert ids == [(name, n) for n in range(count)], MIXED_UP
        assert sorted(other.pipelines()) == sorted(SIMILAR_NAMES)

    def test_head_and_record_read_back_equal(
        self, log: TransactionLog, other: TransactionLog
    ) -> None:
        """Every field is kept, those of a savepoint, a rewind, a move and a ruling too."""
        head, given = full_head("orders"), full_record("orders")
        for each in (head, given):
            usual = {f.name: f.default for f in fields(each) if f.default is not MISSING}
            usual |= {
                f.name: f.default_factory()
                for f in fields(each)
                if f.default_factory is not MISSING
            }
            assert not [n for n, value in usual.items() if getattr(each, n) == value]
        found(log, head, [given])
        assert other.head("orders") == head, "a field of the head is lost"
        assert other.find(given.id) == given, "a field of the record is lost"
        assert list(other.history("orders")) == [given]

    @pytest.mark.parametrize("edge", [2**31, 2**32, 2**53])
    def test_large_batch_numbers(
        self, log: TransactionLog, other: TransactionLog, edge: int
    ) -> None:
        """Batches on both sides of the number are found, in order, and forgotten."""
        begun = log.begin(claim(edge - 2, adopt=(f"batch {edge - 2}",)))
        decided = [log.decide(record(begun, n)) for n in range(edge - 2, edge + 2)]
        assert list(other.unfinished("orders")) == decided
        assert [other.find(each.id) for each in decided] == decided, "a batch is not found"
        assert other.newest("orders", QUERY) == decided[-1]
        assert list(other.history("orders", 9, QUERY, edge)) == decided[1::-1]
        done = [log.complete(each, begun.token) for each in decided]
        log.forget(done[-1], begun.token, retain=1)
        assert list(other.history("orders")) == done[-1:]
        assert other.find(replace(done[-1].id, batch_id=1)) is None
