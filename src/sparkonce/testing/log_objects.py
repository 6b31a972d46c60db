"""A part of `LogContract`: a log object that is interrupted, shared by threads, or closed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import pytest

from sparkonce.errors import FencedError, LogUnavailableError
from sparkonce.testing.log_cases import (
    OUTCOMES,
    REACH,
    WRITES,
    begin_after_repartitions,
    claim,
    deliver,
    numbers,
    places,
    record,
    repeated,
)
from sparkonce.testing.log_under_test import LogUnderTest
from sparkonce.txn_log import TransactionLog
from sparkonce.txn_log.record import Head, State, TransactionRecord

_THREADS = 4
_HANGS_S = 30


class LogObjects(LogUnderTest):
    """What `LogContract` inherits; see there."""

    @pytest.mark.parametrize("verb", ["begin", *WRITES])
    def test_interrupted_write(self, log: TransactionLog, other: TransactionLog, verb: str) -> None:
        """Ctrl-C at any round trip: the whole step landed or nothing, and nothing stays locked.

        The object that was interrupted sees only what the log holds, and continues from there.
        """
        before, act = WRITES.get(verb, (State.COMPLETE, begin_after_repartitions))
        for place in places():
            pipeline = place.pipeline
            incarnation = log.begin(claim(pipeline=pipeline))
            if before is not None:
                REACH[before](log, incarnation)
            was = _seen(other, pipeline)
            with place.call(_interrupt), suppress(KeyboardInterrupt):
                act(log, incarnation)
            now = _seen(other, pipeline)
            _check_no_lock(other, now[0], record(incarnation, 0))
            assert _seen(log, pipeline) == now, "the object sees what the log does not hold"
            if verb == "begin":
                is_new = [was[0] != now[0], numbers(now[1]) == [2, 1, 0]]
                assert is_new[0] == is_new[1] == (was[1] != now[1]), f"half a step landed: {place}"
            act(log, incarnation)
            after = _seen(other, pipeline)
            if verb == "begin":
                is_written = after[0] != now[0] and numbers(after[1]) == [2, 1, 0]
            else:
                is_written = [found.state for found in after[1][-1:]] == [OUTCOMES[verb][before]]
            assert is_written, f"the retry was not written: {place}"
            assert _seen(log, pipeline) == after

    def test_first_drivers_share_one_log_id(self, address: str) -> None:
        """Drivers that create the log at the same time all get the id that the log keeps.

        No later driver would sweep the branches that carry another id.
        """
        start = threading.Barrier(_THREADS)

        def create(_: int) -> str:
            start.wait(_HANGS_S)
            with closing(repeated(lambda: self.open_log(address))) as log:
                return log.log_id

        with ThreadPoolExecutor(_THREADS) as pool:
            ids = set(pool.map(create, range(_THREADS)))
        with closing(self.open_log(address)) as log:
            assert ids == {log.log_id}, "drivers that created the log have different ids"

    def test_threads_share_one_log(self, log: TransactionLog, other: TransactionLog) -> None:
        """Any thread may use the object: each call is a step of its own."""
        begun = [log.begin(claim(pipeline=f"p{n}")) for n in range(_THREADS)]
        start = threading.Barrier(_THREADS)

        def run(number: int) -> None:
            start.wait(_HANGS_S)
            for batch_id in range(12):
                deliver(log, begun[number], batch_id)
                assert numbers(log.history(f"p{number}", limit=1)) == [batch_id]

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(run, range(_THREADS)))
        for each in begun:
            assert numbers(other.history(each.pipeline)) == list(range(11, -1, -1))

    def test_closed_log_can_be_used_again(self, log: TransactionLog, other: TransactionLog) -> None:
        """`close` frees connections; later calls see what others have written since."""
        incarnation = log.begin(claim())
        deliver(log, incarnation, 0)
        log.close()
        log.close()
        deliver(other, incarnation, 1)
        assert log.history("orders") == other.history("orders"), "a closed log sees an older state"
        log.close()
        deliver(log, incarnation, 2)
        log.close()
        newer = other.begin(claim(3))
        with pytest.raises(FencedError):
            log.decide(record(incarnation, 3))
        log.close()
        assert log.begin(claim(3)).token > newer.token

    def test_deleted_log_does_not_read_as_empty(self, log: TransactionLog, address: str) -> None:
        """A driver that has used the log reports that it is gone.

        If it took the log for a new one, it would abort what is decided.
        """
        decided = log.decide(record(log.begin(claim()), 0))
        log.close()
        self.remove(address)
        for call in (
            lambda: log.head("orders"),
            lambda: log.unfinished("orders"),
            lambda: log.find(decided.id),
            lambda: log.history("orders"),
        ):
            with pytest.raises(LogUnavailableError):
                call()


def _interrupt() -> None:
    raise KeyboardInterrupt


def _check_no_lock(other: TransactionLog, head: Head, first: TransactionRecord) -> None:
    """Write as another process with the same token would; nothing is dropped."""
    try:
        other.forget(first, head.token, retain=9)
    except LogUnavailableError as error:
        raise AssertionError("an interrupted write holds its lock") from error


def _seen(log: TransactionLog, pipeline: str) -> tuple[Head, Sequence[TransactionRecord]]:
    """The pipeline's head and history."""
    head = log.head(pipeline)
    assert head is not None
    return head, list(log.history(pipeline))
