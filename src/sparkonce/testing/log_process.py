"""The programs that `LogContract` runs in other processes: begin, deliver, write, fork."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from sparkonce.errors import DecisionUnknownError, FencedError, LogUnavailableError
from sparkonce.testing import log_cases
from sparkonce.testing.forking import start_process
from sparkonce.testing.log_cases import (
    WRITES,
    Place,
    begin_after_repartitions,
    claim,
    record,
    repeated,
)
from sparkonce.txn_log import TransactionLog
from sparkonce.txn_log.record import Incarnation, State

_AGAIN = (DecisionUnknownError, LogUnavailableError)
_HANGS_S = 30
_PAUSED = "paused"


class LogProcess:
    """A process that opens the log and runs a program of this module; it answers by a pipe.

    Args:
        open_log: opens it there; the process gets it pickled.
        address: of the log.
        program: a function of this module.
        arguments: of the program.
    """

    def __init__(
        self,
        open_log: Callable[[str], TransactionLog],
        address: str,
        program: Callable[..., None],
        *arguments: object,
    ) -> None:
        self._here, there = Pipe()
        self._process = start_process(_main, there, open_log, address, program, *arguments)
        there.close()

    def answer(self) -> Any:
        """Wait for its end, and for that of its children; return what it answered, if anything.

        Raises:
            AssertionError: it failed.
        """
        said = self._until_the_end()
        assert self._process.exitcode == 0, f"another process failed: {said}"
        return said[0] if said else None

    def killed_at_its_pause(self) -> bool:
        """SIGKILL it when it pauses; return False if it ended without a pause.

        Raises:
            AssertionError: it failed.
        """
        try:
            said = self._here.recv()
        except EOFError:
            said = None
        if is_paused := bool(said == _PAUSED):
            self._process.kill()
        said = [said, *self._until_the_end()]
        assert is_paused or self._process.exitcode == 0, f"another process failed: {said}"
        return is_paused

    def _until_the_end(self) -> list[Any]:
        said = []
        with suppress(EOFError):
            while True:
                said.append(self._here.recv())
        self._process.join()
        self._here.close()
        return said


def begin(parent: Connection, log: TransactionLog, times: int) -> None:
    """Take tokens as fast as possible, and send the log's id with them."""
    parent.send((log.log_id, [_begin(log, 0).token for _ in range(times)]))


def deliver(parent: Connection, log: TransactionLog, rounds: int) -> None:
    """In each round, begin, complete unfinished batches and decide the next; send decisions."""
    made = []
    for _ in range(rounds):
        try:
            newest = log.history("orders", limit=1)
            upcoming = newest[0].id.batch_id + 1 if newest else 0
            incarnation = _begin(log, upcoming)
            for unfinished in log.unfinished("orders"):
                log.complete(unfinished, incarnation.token)
            decided = log.decide(record(incarnation, upcoming))
            if decided.state is State.DECIDED:
                made.append((upcoming, decided.token))
                log.complete(decided, incarnation.token)
        except (FencedError, *_AGAIN):
            continue
    parent.send(made)


def write(
    parent: Connection, log: TransactionLog, verb: str, incarnation: Incarnation, number: int
) -> None:
    """Pause at a round trip of one write; the parent process kills this one there."""

    def pause() -> None:
        parent.send(_PAUSED)
        parent.recv()

    with Place(number).call(pause):
        if verb == "begin":
            begin_after_repartitions(log, incarnation)
        else:
            WRITES[verb][1](log, incarnation)


def fork(_parent: Connection, log: TransactionLog, rounds: int) -> None:
    """Deliver in a parent and its child at once; the child delivers one more after the parent."""
    begun = {name: log.begin(claim(pipeline=name)) for name in ("parent", "child")}
    parent_ended, held_by_parent = os.pipe()
    is_child = os.fork() == 0
    signal.alarm(_HANGS_S)
    incarnation = begun["child" if is_child else "parent"]
    for batch_id in range(rounds):
        log_cases.deliver(log, incarnation, batch_id)
    if is_child:
        os.close(held_by_parent)
        os.read(parent_ended, 1)
        log_cases.deliver(log, incarnation, rounds)
        os.kill(os.getpid(), signal.SIGKILL)  # a decision needs no orderly exit


def fork_amid_a_write(_parent: Connection, log: TransactionLog) -> None:
    """Fork while another thread decides; the child completes what it decided."""
    incarnation = log.begin(claim())
    paused, forking = threading.Event(), threading.Event()
    os.register_at_fork(before=forking.set)

    def pause() -> None:
        paused.set()
        forking.wait()

    def decide() -> None:
        with Place(0).call(pause):
            log.decide(record(incarnation, 0))

    threading.Thread(target=decide).start()
    paused.wait()
    child = os.fork()
    signal.alarm(_HANGS_S)
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    log_cases.deliver(log, incarnation, 0)


def _begin(log: TransactionLog, batch_id: int) -> Incarnation:
    return repeated(lambda: log.begin(claim(batch_id, offsets={})))


def _main(
    parent: Connection,
    open_log: Callable[[str], TransactionLog],
    address: str,
    program: Callable[..., None],
    *arguments: object,
) -> None:
    try:
        log = repeated(lambda: open_log(address))
        program(parent, log, *arguments)
        log.close()
    except Exception:
        parent.send(traceback.format_exc())
        raise
