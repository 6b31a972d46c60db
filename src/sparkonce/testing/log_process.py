"""The programs that `LogContract` runs in other processes: begin, deliver, write, fork.

python -m sparkonce.testing.log_process MODULE:CLASS ADDRESS PROGRAM ARGUMENTS…
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from sparkonce.errors import DecisionUnknownError, FencedError, LogUnavailableError
from sparkonce.model import Owner
from sparkonce.testing import log_cases
from sparkonce.testing.log_cases import (
    QUERY,
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


def begin(log: TransactionLog, times: str) -> None:
    """Take tokens as fast as possible, and print them with the log's id."""
    tokens = [_begin(log, 0).token for _ in range(int(times))]
    print(json.dumps({"log_id": log.log_id, "tokens": tokens}))


def deliver(log: TransactionLog, rounds: str) -> None:
    """In each round, begin, complete unfinished batches and decide the next; print decisions."""
    made = []
    for _ in range(int(rounds)):
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
    print(json.dumps(made))


def write(log: TransactionLog, verb: str, pipeline: str, token: str, number: str) -> None:
    """Pause at a round trip of one write; the parent process kills this one there."""
    incarnation = Incarnation(pipeline, Owner(log.log_id, QUERY), int(token))

    def pause() -> None:
        print("paused", flush=True)
        sys.stdin.read()

    with Place(int(number)).call(pause):
        if verb == "begin":
            begin_after_repartitions(log, incarnation)
        else:
            WRITES[verb][1](log, incarnation)


def fork(log: TransactionLog, rounds: str) -> None:
    """Deliver in a parent and its child at once; the child delivers one more after the parent."""
    begun = {name: log.begin(claim(pipeline=name)) for name in ("parent", "child")}
    parent_ended, held_by_parent = os.pipe()
    is_child = os.fork() == 0
    signal.alarm(_HANGS_S)
    incarnation = begun["child" if is_child else "parent"]
    for batch_id in range(int(rounds)):
        log_cases.deliver(log, incarnation, batch_id)
    if is_child:
        os.close(held_by_parent)
        os.read(parent_ended, 1)
        log_cases.deliver(log, incarnation, int(rounds))
        os.kill(os.getpid(), signal.SIGKILL)  # a decision needs no orderly exit


def fork_amid_a_write(log: TransactionLog) -> None:
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


_PROGRAMS: Mapping[str, Callable[..., None]] = {
    program.__name__: program for program in (begin, deliver, write, fork, fork_amid_a_write)
}


def main(name: str, address: str, program: str, *arguments: str) -> None:
    module, _, qualified = name.partition(":")
    contract: Any = importlib.import_module(module)
    for part in qualified.split("."):
        contract = getattr(contract, part)
    log: TransactionLog = repeated(lambda: contract.open_log(address))
    _PROGRAMS[program](log, *arguments)
    log.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
