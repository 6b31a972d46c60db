"""A part of `LogContract`: tokens, racing processes, forks, and a newer driver in between."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from itertools import chain
from typing import Any

import pytest

from sparkonce.errors import FencedError, LogUnavailableError
from sparkonce.testing import log_process
from sparkonce.testing.log_cases import (
    ACTS,
    OUTCOMES,
    REACH,
    WRITES,
    Passed,
    claim,
    deliver,
    landed,
    no_handler,
    pass_by_far,
    places,
    record,
)
from sparkonce.testing.log_under_test import LogUnderTest
from sparkonce.txn_log import TransactionLog
from sparkonce.txn_log.record import State, TransactionRecord


class LogRaces(LogUnderTest):
    """What `LogContract` inherits; see there."""

    def test_older_token_can_write_nothing(
        self, log: TransactionLog, other: TransactionLog
    ) -> None:
        """After a newer incarnation began, every write of the older one raises (I6)."""
        old = log.begin(claim())
        decided = log.decide(record(old, 0))
        newer = other.begin(claim(driver="other:7"))
        assert newer.token > old.token
        with pytest.raises(FencedError, match=f"other:7 took token {newer.token}"):
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
        """A call that changes nothing, or is refused, is not answered from an older read (I6)."""
        old = log.begin(claim())
        done = deliver(log, old, 0)
        other.begin(claim(1))
        with pytest.raises(FencedError, match="took token"):
            ACTS[verb](log, old, done)

    def test_tokens_of_racing_processes_differ(self, address: str) -> None:
        """The first processes of a log and its pipeline get one log id, and different tokens.

        No process has the token of a `begin` whose outcome was unknown.
        """
        racers = [self.start(address, log_process.begin, 10) for _ in range(4)]
        log_ids, taken = zip(*(racer.answer() for racer in racers), strict=True)
        tokens = list(chain.from_iterable(taken))
        assert len(set(tokens)) == 40
        with closing(self.open_log(address)) as log:
            assert set(log_ids) == {log.log_id}
            head = log.head("orders")
        assert head is not None
        assert head.token == max(tokens)

    def test_racing_processes_never_both_decide(self, log: TransactionLog, address: str) -> None:
        """Each batch has one decision, and every process that decided it got that one (I3, I6)."""
        log.begin(claim())
        racers = [self.start(address, log_process.deliver, 12) for _ in range(3)]
        decided = [each for racer in racers for each in racer.answer()]
        recorded = {r.id.batch_id: r for r in log.history("orders")}
        assert sorted(recorded) == list(range(len(recorded)))
        assert decided, "no process decided anything"
        for batch_id, token in decided:
            assert recorded[batch_id].token == token
        tokens = [recorded[batch_id].token for batch_id in sorted(recorded)]
        assert tokens == sorted(tokens)

    def test_forked_child_and_its_parent(self, address: str) -> None:
        """Both write, and the child still writes after its parent has ended: others see it all."""
        self.start(address, log_process.fork, 20).answer()
        with closing(self.open_log(address)) as log:
            seen = {name: len(log.history(name)) for name in ("parent", "child")}
        assert seen == {"parent": 20, "child": 21}

    def test_fork_while_another_thread_writes(self, address: str) -> None:
        """The child does not wait for a thread that exists only in its parent."""
        self.start(address, log_process.fork_amid_a_write).answer()
        with closing(self.open_log(address)) as log:
            assert [record.state for record in log.history("orders")] == [State.COMPLETE]

    @pytest.mark.parametrize("verb", list(WRITES))
    def test_newer_driver_passes_between_two_round_trips(
        self, log: TransactionLog, other: TransactionLog, verb: str
    ) -> None:
        """Wherever the older one is paused, it can write nothing after the newer began (I6)."""
        before, act = WRITES[verb]
        for place in places():
            pipeline = place.pipeline
            incarnation = log.begin(claim(pipeline=pipeline))
            if before is not None:
                REACH[before](log, incarnation)
            seen: list[list[TransactionRecord]] = []

            def pass_by(pipeline: str = pipeline, seen: list[Any] = seen) -> None:
                with no_handler():
                    try:
                        other.begin(claim(pipeline=pipeline))
                    except LogUnavailableError:  # the older one holds a lock, and the newer waits
                        return
                    seen.append(list(other.history(pipeline)))

            with place.call(pass_by):
                written = landed(lambda: act(log, incarnation))
            found = list(other.history(pipeline))
            assert written or seen, place
            assert not seen or found == seen[0], place
            if written:
                states = [each.state for each in found]
                assert states == [OUTCOMES[verb][before]], f"a write did not land: {place}"

    @pytest.mark.parametrize("verb", ["begin", "decide"])
    def test_much_happens_between_two_round_trips(
        self, log: TransactionLog, other: TransactionLog, verb: str
    ) -> None:
        """A newer driver writes and forgets a long history while an older one is paused.

        The older one's write must not land in a place that was used and has become empty again.
        """
        for place in places():
            pipeline = place.pipeline
            old = log.begin(claim(pipeline=pipeline))
            seen: list[Passed] = []
            tokens: list[int] = []

            def act(pipeline: str = pipeline, old: Any = old, tokens: list[int] = tokens) -> None:
                if verb == "decide":
                    log.decide(record(old, 0))
                else:
                    far = claim(40, pipeline=pipeline, adopt=("batch 40",))
                    tokens.append(log.begin(far).token)

            with place.call(partial(pass_by_far, other, pipeline, seen)):
                has_landed = landed(act)
            for passed in seen:
                assert verb == "begin" or not has_landed or passed.found == old.token, place
                assert list(other.history(pipeline)) == passed.history, place
                head = other.head(pipeline)
                assert head is not None
                assert head.token == max(passed.token, *tokens, 0), place
                assert passed.token not in tokens, place
