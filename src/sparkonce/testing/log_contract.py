"""What every transaction log promises, as tests: inherit them for a backend of your own.

    class TestMyLog(LogContract):
        @pytest.fixture
        def address(self, tmp_path):                  # a fresh, empty log
            return f"mylog://{tmp_path}"

        @staticmethod
        def open_log(address):                        # called in other processes too
            return MyLog(address, patience_s=0.2)

The methods below that raise `NotImplementedError` are the faults: how a stored record is damaged,
how the answer to a write is lost, and how the log is out of reach. A backend tells of its round
trips with `sparkonce.failpoints.reach("log.before" | "log.after", request=…)`; the contract kills
a process at each of them, and lets a newer driver pass between any two. A backend that keeps
connections or locks gives itself to `sparkonce.txn_log.forks.closed_at_forks`.

The module of your test class must be importable by its name in another process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

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
from sparkonce.testing.log_cases import (
    ACTS,
    MOST_ROUND_TRIPS,
    ORDERS,
    OTHER_QUERY,
    OUTCOMES,
    QUERY,
    REACH,
    WRITES,
    Passed,
    at_round_trip,
    claim,
    deliver,
    landed,
    no_handler,
    part,
    pass_by_far,
    record,
)
from sparkonce.txn_log import TransactionLog, copy, open_log
from sparkonce.txn_log.record import Share, State, TransactionRecord
from sparkonce.txn_log.settlement import Ruling, Settlement


class LogContract:
    """Give it an `address` fixture of an empty log, and the faults.

    Attributes:
        secrets: parts of the address that must be shown nowhere.
        long_history: batches of the long test.
    """

    secrets: ClassVar[Sequence[str]] = ()
    long_history: ClassVar[int] = 10_000

    @staticmethod
    def open_log(address: str) -> TransactionLog:
        """Open the log. One that waits for others, such as for a lock, gives up within a second."""
        return open_log(address)

    def damage(self, address: str, old: str, new: str) -> None:
        """Replace `old` by `new` in all that is stored."""
        raise NotImplementedError

    def losing_the_answer(self, address: str) -> AbstractContextManager[TransactionLog]:
        """A log that writes, and does not get the answer to its first write."""
        raise NotImplementedError

    def out_of_reach(self, address: str) -> AbstractContextManager[None]:
        """While it lasts, the log at `address` cannot be used."""
        raise NotImplementedError

    def stored_bytes(self, address: str) -> int:
        """How much the log takes at `address`."""
        raise NotImplementedError

    @pytest.fixture
    def log(self, address: str) -> Iterator[TransactionLog]:
        log = self.open_log(address)
        yield log
        log.close()

    @pytest.fixture
    def other(self, address: str) -> Iterator[TransactionLog]:
        """The same log as another driver has it open."""
        log = self.open_log(address)
        yield log
        log.close()

    def start(self, address: str, program: str, *arguments: object) -> subprocess.Popen[str]:
        """Run a program of `log_process` in a process of its own."""
        name = f"{type(self).__module__}:{type(self).__qualname__}"
        words = [name, address, program, *map(str, arguments)]
        return subprocess.Popen(
            [sys.executable, "-m", "sparkonce.testing.log_process", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    # -- every verb, in and out of order -----------------------------------------------------------

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
        assert other.find(decided.id) == settled
        assert (settled.state, settled.settled) == (State.DECIDED, (first, second))
        assert settled.ruling(branch) is Ruling.ABORTED, "the last word counts"
        done = log.complete(settled, 1)
        assert (done.state, done.settled) == (State.SETTLED, (first, second))
        assert log.complete(settled, 1) == done
        assert list(log.unfinished("orders")) == []
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
        assert list(log.pipelines()) == []
        log.begin(claim())
        log.begin(claim(pipeline="clicks", query_id=QUERY.replace("1", "2")))
        assert list(log.pipelines()) == ["clicks", "orders"]

    def test_namesake_is_found(self, log: TransactionLog) -> None:
        """The query of another pipeline, now or before: both would have its names outside."""
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

    def test_checkpoint_is_remembered(self, log: TransactionLog) -> None:
        """An operator who does not know where it is takes the token and keeps it."""
        for place in ("file:/ckpt", ""):
            log.begin(claim(checkpoint=place))
            head = log.head("orders")
            assert head is not None
            assert head.checkpoint == "file:/ckpt"

    def test_first_decision_stands(self, log: TransactionLog) -> None:
        """Deciding a known batch again returns what stands and changes nothing (I3)."""
        incarnation = log.begin(claim())
        first = log.decide(record(incarnation, 0))
        assert log.decide(record(incarnation, 0, offsets=("other",))) == first
        assert log.find(first.id) == first

    def test_prepared_record_is_decided_once(
        self, log: TransactionLog, other: TransactionLog
    ) -> None:
        """PREPARED is unfinished, becomes DECIDED by a newer driver too, and stays decided."""
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

    def test_abandoned_batch_is_made_anew_by_its_replay(self, log: TransactionLog) -> None:
        """It is finished for all but its replay: never decided, never followed."""
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
        """Sent twice because its answer was lost, it must not abandon what was prepared since."""
        prepared = log.prepare(record(log.begin(claim()), 0))
        newer = log.begin(claim())
        log.abandon(prepared, newer.token)
        replay = log.prepare(record(newer, 0))
        assert log.abandon(prepared, newer.token) == replay
        assert list(log.unfinished("orders")) == [replay]

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
        """The time of the first completion stays."""
        incarnation = log.begin(claim())
        decided = log.decide(record(incarnation, 0))
        done = log.complete(decided, incarnation.token)
        assert done.state is State.COMPLETE
        assert done.times.keys() == {State.DECIDED, State.COMPLETE}
        assert log.complete(decided, incarnation.token) == done
        assert list(log.unfinished("orders")) == []

    def test_pipelines_are_separate(self, log: TransactionLog) -> None:
        """One log serves many pipelines; a token of one fences nobody of another."""
        orders = log.begin(claim())
        europe = log.begin(claim(pipeline="orders-eu", query_id=OTHER_QUERY))
        log.decide(record(orders, 0))
        assert list(log.unfinished("orders-eu")) == []
        log.decide(record(europe, 0))
        assert [r.id.pipeline for r in log.history("orders")] == ["orders"]

    def test_refused_claim_fences_nobody(self, log: TransactionLog, other: TransactionLog) -> None:
        """A start that the identity guard refuses leaves the healthy driver's token alone."""
        healthy = log.begin(claim())
        with pytest.raises(ConfigurationError, match="replaces="):
            other.begin(claim(query_id=OTHER_QUERY))
        log.decide(record(healthy, 0))

    def test_replaced_query_is_remembered(self, log: TransactionLog) -> None:
        """replaces= binds the name to the new query once; the old one's names are still swept."""
        first = log.begin(claim())
        deliver(log, first, 0)
        incarnation = log.begin(claim(query_id=OTHER_QUERY, replaces=QUERY))
        assert [owner.query_id for owner in incarnation.retired] == [QUERY]
        deliver(log, incarnation, 0)
        assert {r.id.query_id for r in log.history("orders")} == {QUERY, OTHER_QUERY}
        assert {r.id.query_id for r in log.history("orders", 10, OTHER_QUERY)} == {OTHER_QUERY}
        log.begin(claim(query_id=OTHER_QUERY, replaces=QUERY))
        with pytest.raises(ConfigurationError):
            log.begin(claim(query_id=QUERY.replace("1", "3"), replaces=QUERY))

    # -- fencing -----------------------------------------------------------------------------------

    def test_older_token_can_write_nothing(
        self, log: TransactionLog, other: TransactionLog
    ) -> None:
        """Once a newer incarnation began, every write of the older raises (I6)."""
        old = log.begin(claim())
        decided = log.decide(record(old, 0))
        newer = other.begin(claim(driver="other:7"))
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
        with pytest.raises(FencedError):
            log.check_token(old)
        log.check_token(newer)
        assert log.find(record(old, 1).id) is None

    @pytest.mark.parametrize("verb", ["decide", "complete", "abandon", "amend"])
    def test_answer_without_a_write_is_of_the_newest_state(
        self, log: TransactionLog, other: TransactionLog, verb: str
    ) -> None:
        """What changes nothing, or is refused, is not answered from what was seen before (I6)."""
        old = log.begin(claim())
        done = deliver(log, old, 0)
        other.begin(claim(1))
        with pytest.raises(FencedError, match="took token 2"):
            ACTS[verb](log, old, done)

    def test_tokens_of_racing_processes_differ(self, log: TransactionLog, address: str) -> None:
        """Many processes that begin at the same time each get a token of their own.

        One whose answer was unknown is nobody's.
        """
        log.begin(claim())
        racers = [self.start(address, "begin", 10) for _ in range(4)]
        answers = [racer.communicate()[0] for racer in racers]
        tokens = [token for answer in answers for token in json.loads(answer)]
        assert len(set(tokens)) == 40
        head = log.head("orders")
        assert head is not None
        assert head.token == max(tokens)

    def test_racing_processes_never_both_decide(self, log: TransactionLog, address: str) -> None:
        """Each batch has one decision, and whoever was told of it, of that one (I3, I6)."""
        log.begin(claim())
        racers = [self.start(address, "deliver", 12) for _ in range(3)]
        told = [tuple(each) for r in racers for each in json.loads(r.communicate()[0])]
        assert all(racer.returncode == 0 for racer in racers)
        standing = {r.id.batch_id: r for r in log.history("orders")}
        assert sorted(standing) == list(range(len(standing)))
        assert told, "nobody was told anything"
        for batch_id, token in told:
            assert standing[batch_id].token == token
        tokens = [standing[batch_id].token for batch_id in sorted(standing)]
        assert tokens == sorted(tokens)

    def test_forked_child_and_its_parent(self, address: str) -> None:
        """Both write, and the child goes on when its parent has ended: others see all of it."""
        process = self.start(address, "fork", 20)
        process.communicate()
        assert process.returncode == 0
        with closing(self.open_log(address)) as log:
            seen = {name: len(log.history(name)) for name in ("parent", "child")}
        assert seen == {"parent": 20, "child": 21}

    def test_fork_while_another_thread_writes(self, address: str) -> None:
        """The child does not wait for a thread that only its parent has."""
        process = self.start(address, "fork_amid_a_write")
        process.communicate()
        assert process.returncode == 0
        with closing(self.open_log(address)) as log:
            assert [record.state for record in log.history("orders")] == [State.COMPLETE]

    @pytest.mark.parametrize("verb", list(WRITES))
    def test_newer_driver_passes_between_two_round_trips(
        self, log: TransactionLog, other: TransactionLog, verb: str
    ) -> None:
        """Wherever the older one stands, nothing is written once the newer has its token (I6)."""
        before, act = WRITES[verb]
        for number in range(MOST_ROUND_TRIPS):
            pipeline = f"p{number}"
            incarnation = log.begin(claim(pipeline=pipeline))
            if before is not None:
                REACH[before](log, incarnation)
            seen: list[list[TransactionRecord]] = []

            def pass_by(pipeline: str = pipeline, seen: list[Any] = seen) -> None:
                with no_handler():
                    try:
                        other.begin(claim(pipeline=pipeline))
                    except LogUnavailableError:  # the older one holds a lock: the newer has to wait
                        return
                    seen.append(list(other.history(pipeline)))

            with at_round_trip(number, pass_by) as reached:
                written = landed(lambda: act(log, incarnation))
            if not reached:
                assert number > 0, "the log tells of no round trips"
                return
            if seen:
                assert list(other.history(pipeline)) == seen[0], reached
            else:
                assert written, reached
        raise AssertionError("the log's round trips do not end")

    @pytest.mark.parametrize("verb", ["begin", "decide"])
    def test_much_happens_between_two_round_trips(
        self, log: TransactionLog, other: TransactionLog, verb: str
    ) -> None:
        """A newer driver writes and forgets a long history while an older one stands still.

        What the older one was about to write must not find an empty place that was in use before.
        """
        for number in range(MOST_ROUND_TRIPS):
            pipeline = f"p{number}"
            old = log.begin(claim(pipeline=pipeline))
            seen: list[Passed] = []
            tokens: list[int] = []

            def act(pipeline: str = pipeline, old: Any = old, tokens: list[int] = tokens) -> None:
                if verb == "decide":
                    log.decide(record(old, 0))
                else:
                    far = claim(40, pipeline=pipeline, adopt=("batch 40",))
                    tokens.append(log.begin(far).token)

            with at_round_trip(number, partial(pass_by_far, other, pipeline, seen)) as at:
                told = landed(act)
            if not at:
                return
            for passed in seen:
                assert verb == "begin" or not told or passed.found == old.token, at
                assert list(other.history(pipeline)) == passed.history, at
                head = other.head(pipeline)
                assert head is not None
                assert head.token == max(passed.token, *tokens, 0), at
                assert passed.token not in tokens, at
        raise AssertionError("the log's round trips do not end")

    # -- crashes, lost answers, faults -------------------------------------------------------------

    @pytest.mark.parametrize("verb", ["begin", *WRITES])
    def test_process_is_killed_at_every_round_trip(
        self, log: TransactionLog, address: str, verb: str
    ) -> None:
        """A write is there whole or not at all, and the next driver goes on from it."""
        before, _ = WRITES.get(verb, (None, None))
        for number in range(MOST_ROUND_TRIPS):
            pipeline = f"p{number}"
            incarnation = log.begin(claim(pipeline=pipeline))
            if before is not None:
                REACH[before](log, incarnation)
            was = list(log.history(pipeline))
            process = self.start(address, "write", verb, pipeline, incarnation.token, number)
            assert process.stdout is not None
            reached = process.stdout.readline().strip() == "standing"
            process.kill()
            process.communicate()
            after = self.open_log(address)
            newer = after.begin(claim(pipeline=pipeline))
            assert newer.token - incarnation.token in ((1, 2) if verb == "begin" else (1,))
            now = list(after.history(pipeline))
            if now != was:
                assert [(r.id.batch_id, r.token) for r in now] == [(0, incarnation.token)]
            standing = after.find(record(incarnation, 0).id)
            if standing is not None and standing.state is State.PREPARED:
                standing = after.decide(standing, newer.token)
            if standing is None or standing.state is State.ABANDONED:
                standing = after.decide(record(newer, 0))
            ended = State.SETTLED if standing.settled else State.COMPLETE
            assert after.complete(standing, newer.token).state is ended
            after.close()
            if not reached:
                assert number > 0, "the log tells of no round trips"
                return
        raise AssertionError("the log's round trips do not end")

    @pytest.mark.parametrize("verb", list(WRITES))
    def test_answer_is_lost(self, log: TransactionLog, address: str, verb: str) -> None:
        """The write landed, its answer did not: `DecisionUnknownError`, and again is harmless."""
        before, act = WRITES[verb]
        incarnation = log.begin(claim())
        if before is not None:
            REACH[before](log, incarnation)
        with self.losing_the_answer(address) as losing:
            with pytest.raises(DecisionUnknownError, match="again"):
                act(losing, incarnation)
            written = log.find(record(incarnation, 0).id)
            if verb != "amend":  # what stands is amended by then; see the test of amendments
                act(losing, incarnation)
            assert log.find(record(incarnation, 0).id) == written
            losing.close()
        expected = OUTCOMES[verb][before]
        assert written is not None
        assert written.state is expected
        assert written.revision == (verb == "amend")

    def test_token_whose_answer_is_lost(self, log: TransactionLog, address: str) -> None:
        """`begin` again takes a new token; the lost one is nobody's."""
        log.begin(claim())
        with self.losing_the_answer(address) as losing:
            with pytest.raises(DecisionUnknownError):
                losing.begin(claim())
            assert losing.begin(claim()).token == 3
            losing.close()

    def test_log_out_of_reach(self, log: TransactionLog, address: str) -> None:
        """`LogUnavailableError` or unknown; nothing is decided, and later the same calls work."""
        incarnation = log.begin(claim())
        calls: list[Callable[[], object]] = [
            lambda: log.decide(record(incarnation, 0)),
            lambda: log.begin(claim()),
        ]
        with self.out_of_reach(address):
            for call in calls:
                with pytest.raises((LogUnavailableError, DecisionUnknownError)) as told:
                    call()
                assert not any(secret in str(told.value) for secret in self.secrets)
        assert log.find(record(incarnation, 0).id) is None
        assert log.decide(record(incarnation, 0)).state is State.DECIDED

    @pytest.mark.parametrize(
        ("old", "new"),
        [("topic", "tropic"), ('"v": 2', '"v": 99'), ('"sha256"', '"sha'), ('"body"', '"bod')],
    )
    def test_damaged_record_is_corrupt(
        self, log: TransactionLog, address: str, old: str, new: str
    ) -> None:
        """A torn or tampered record is never guessed from, neither by a read nor by a write."""
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
        """Neither the address nor the repr holds one."""
        assert log.address
        for secret in self.secrets:
            assert secret not in log.address + repr(log) + str(vars(log))

    def test_pipeline_moves_here_and_away(
        self, log: TransactionLog, other: TransactionLog, tmp_path: Path
    ) -> None:
        """With its whole history, tokens and names; who stays behind is told where it went."""
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

    # -- size --------------------------------------------------------------------------------------

    def test_forget_keeps_the_newest_and_what_is_unfinished(
        self, log: TransactionLog, other: TransactionLog
    ) -> None:
        """`retain` batches stay; the newest one stays always (I3)."""
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
        """Old batches are found again as they were, and `retain` bounds what is kept."""
        self.check_history(log, address, batches=200, retain=50)

    @pytest.mark.slow
    def test_long_history_is_bounded(self, log: TransactionLog, address: str) -> None:
        """Ten thousand batches."""
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
        """Decided and completed whole."""
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
