"""Records, states and round trips for the tests of `log_contract`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from sparkonce import failpoints
from sparkonce.errors import DecisionUnknownError, LogUnavailableError, SparkOnceError
from sparkonce.model import BranchId, Committable, Owner, TransactionId
from sparkonce.txn_log import TransactionLog
from sparkonce.txn_log.claim import Claim
from sparkonce.txn_log.record import (
    Fingerprint,
    Head,
    Incarnation,
    Part,
    Share,
    State,
    TransactionRecord,
)
from sparkonce.txn_log.settlement import Ruling, Settlement

QUERY = "11111111-2222-3333-4444-555555555555"
OTHER_QUERY = "22222222-2222-3333-4444-555555555555"
_MOST_PLACES = 60
_MOST_CALLS = 1000

Verb = Callable[[TransactionLog, Incarnation], object]
ResultT = TypeVar("ResultT")


def claim(batch_id: int = 0, **changes: Any) -> Claim:
    """The claim of a driver that starts the pipeline "orders" at the batch."""
    values: dict[str, Any] = {
        "pipeline": "orders",
        "query_id": QUERY,
        "run_id": "run",
        "driver": "host:1",
        "sinks": {"kafka": "topic"},
        "batch_id": batch_id,
        "offsets": {batch_id: (f"[{batch_id}]",)},
        "checkpoint": "file:/ckpt",
    }
    return Claim(**{**values, **changes})


def part(rows: int) -> Part:
    """The part of a task that wrote `rows` rows."""
    return Part(0, "branch", 32 * rows, Fingerprint("sum/1", rows, 2**64 - rows))


def record(incarnation: Incarnation, batch_id: int, **changes: Any) -> TransactionRecord:
    """A record with one branch of one sink."""
    branch_id = BranchId(incarnation.owner, batch_id, incarnation.token, "kafka", 0, 3)
    committable = Committable(branch_id, {"path": "ü/1", "parts": ["a", "b"]}, safe_until=1.5)
    values: dict[str, Any] = {
        "id": TransactionId(incarnation.pipeline, incarnation.owner.query_id, batch_id),
        "token": incarnation.token,
        "state": State.DECIDED,
        "offsets": (f"[{batch_id}]",),
        "shares": {"kafka": Share("topic", (part(2),), (committable,))},
        "times": {State.DECIDED: 12.25},
    }
    return TransactionRecord(**{**values, **changes})


def full_head(pipeline: str) -> Head:
    """A head in which no field has its default."""
    return Head(
        pipeline,
        QUERY,
        7,
        "run",
        "host:1",
        1750000000.5,
        first_batch=3,
        sinks={"kafka": "töpic", "files": "folder /ü"},
        retired=(OTHER_QUERY, QUERY.replace("1", "3")),
        log_id="0123456789abcdef",
        moved_to="s3://bucket/log",
        checkpoint="file:/ü",
        rewound={OTHER_QUERY: 2},
        rewinding_to="before the release",
        starts=4,
    )


def full_record(pipeline: str) -> TransactionRecord:
    """A record in which no field has its default."""
    incarnation = Incarnation(pipeline, Owner("0123456789abcdef", QUERY), 7)
    given = record(incarnation, 3, offsets=("[3]", '{"ü": {"0": 9007199254740993}}'))
    settled = replace(given, settled=(_redo(given),))
    amended = settled.amended({"files": Share("folder /ü", (part(0),))}, given.committables())
    return amended.moved(State.PREPARED, 0.1).moved(State.SETTLED, 1750000000.123456)


def numbers(records: Iterable[TransactionRecord]) -> list[int]:
    """The batch numbers of the records, in their order."""
    return [found.id.batch_id for found in records]


def deliver(log: TransactionLog, incarnation: Incarnation, batch_id: int) -> TransactionRecord:
    """Decide and complete a batch."""
    decided = log.decide(record(incarnation, batch_id))
    return log.complete(decided, incarnation.token)


_P, _A, _D, _C = State.PREPARED, State.ABANDONED, State.DECIDED, State.COMPLETE

REACH: Mapping[State | None, Callable[[TransactionLog, Incarnation], TransactionRecord]] = {
    None: lambda log, inc: record(inc, 0),
    _P: lambda log, inc: log.prepare(record(inc, 0)),
    _A: lambda log, inc: log.abandon(log.prepare(record(inc, 0)), inc.token),
    _D: lambda log, inc: log.decide(record(inc, 0)),
    _C: lambda log, inc: deliver(log, inc, 0),
}
"""How batch 0 reaches each state."""


def _amended(found: TransactionRecord) -> TransactionRecord:
    return found.amended({"kafka": Share("topic", (part(2),))}, found.shares["kafka"].committables)


def _redo(found: TransactionRecord) -> Settlement:
    (branch,) = found.committables()
    return Settlement(str(branch.branch_id), Ruling.REDO, "ann@host", "seen", 7.5, found.token)


ACTS: Mapping[str, Callable[[TransactionLog, Incarnation, TransactionRecord], object]] = {
    "prepare": lambda log, inc, found: log.prepare(record(inc, 0)),
    "decide": lambda log, inc, found: log.decide(record(inc, 0)),
    "decide prepared": lambda log, inc, found: log.decide(replace(found, state=_P), inc.token),
    "abandon": lambda log, inc, found: log.abandon(found, inc.token),
    "amend": lambda log, inc, found: log.amend(_amended(found), inc.token),
    "complete": lambda log, inc, found: log.complete(found, inc.token),
    "settle": lambda log, inc, found: log.settle(found.id, [_redo(found)], inc.token),
    "forget": lambda log, inc, found: log.forget(found, inc.token, retain=1),
}
OUTCOMES: Mapping[str, Mapping[State | None, State | str | None]] = {
    "prepare": {None: _P, _P: _P, _A: _P, _D: _D, _C: _C},
    "decide": {None: _D, _P: _P, _A: _D, _D: _D, _C: _C},
    "decide prepared": {None: "abandoned", _P: _D, _A: "abandoned", _D: _D, _C: _C},
    "abandon": {None: None, _P: _A, _A: _A, _D: _D, _C: _C},
    "amend": {None: "amended", _P: "amended", _A: "amended", _D: _D, _C: "amended"},
    "complete": {None: "never", _P: "never", _A: "never", _D: _C, _C: _C},
    "settle": {None: "not known", _P: "prepared", _A: "abandoned", _D: _D, _C: "complete"},
    "forget": {None: None, _P: _P, _A: _A, _D: _D, _C: _C},
}
"""By verb and the state before it: the state after it, or a part of the refusal's message."""

ORDERS = [(verb, state) for verb, row in OUTCOMES.items() for state in row]

WRITES: Mapping[str, tuple[State | None, Verb]] = {
    "prepare": (None, lambda log, inc: log.prepare(record(inc, 0))),
    "decide": (None, lambda log, inc: log.decide(record(inc, 0))),
    "decide prepared": (_P, lambda log, inc: log.decide(_recorded(log, inc), inc.token)),
    "abandon": (_P, lambda log, inc: log.abandon(_recorded(log, inc), inc.token)),
    "amend": (_D, lambda log, inc: log.amend(_amended(_recorded(log, inc)), inc.token)),
    "complete": (_D, lambda log, inc: log.complete(record(inc, 0), inc.token)),
    "settle": (
        _D,
        lambda log, inc: log.settle(record(inc, 0).id, [_redo(record(inc, 0))], inc.token),
    ),
    "forget": (_C, lambda log, inc: log.forget(record(inc, 0), inc.token, retain=1)),
}
"""Every write after `begin`: the state of batch 0 that it needs, and the call."""


def begin_after_repartitions(log: TransactionLog, incarnation: Incarnation) -> object:
    """Begin at batch 3 after 0 is complete: one step that writes a head and two records."""
    offsets = {2: ("[0]",), 3: ("[3]",)}
    return log.begin(claim(3, pipeline=incarnation.pipeline, offsets=offsets, repartitions=2))


READS: Sequence[Callable[[TransactionLog, TransactionId], object]] = (
    lambda log, batch: log.head(batch.pipeline),
    lambda log, batch: log.find(batch),
    lambda log, batch: log.newest(batch.pipeline, batch.query_id),
    lambda log, batch: list(log.unfinished(batch.pipeline)),
    lambda log, batch: list(log.history(batch.pipeline)),
    lambda log, _: list(log.pipelines()),
)
"""Every way to read what the log holds of a batch and its pipeline."""


def _recorded(log: TransactionLog, incarnation: Incarnation) -> TransactionRecord:
    found = log.find(record(incarnation, 0).id)
    assert found is not None
    return found


@dataclass
class Place:
    """The nth place that a log reports during a write: the start or end of a round trip.

    Attributes:
        number: n, from 0.
        reached: the place as text, once the log has reached it.
    """

    number: int
    reached: str = ""

    @property
    def pipeline(self) -> str:
        """A pipeline of its own."""
        return f"p{self.number}"

    @contextmanager
    def call(self, action: Callable[[], None]) -> Iterator[None]:
        """Call `action` when the log reaches the place within the block."""
        count = itertools.count()

        def handle(point: str, where: Mapping[str, object]) -> None:
            if point in failpoints.LOG_POINTS and next(count) == self.number:
                self.reached = f"{point} {where.get('request')}"
                action()

        before, failpoints.handler = failpoints.handler, handle
        try:
            yield
        finally:
            failpoints.handler = before


def places() -> Iterator[Place]:
    """Each place of a write in turn, and one more, which it does not reach."""
    for number in range(_MOST_PLACES):
        place = Place(number)
        yield place
        if not place.reached:
            assert number > 0, "the log reports no round trips"
            return
    raise AssertionError("the log's round trips do not end")


@contextmanager
def no_handler() -> Iterator[None]:
    before, failpoints.handler = failpoints.handler, None
    try:
        yield
    finally:
        failpoints.handler = before


class Passed(NamedTuple):
    """What a newer driver did while an older one was paused.

    Attributes:
        token: its token.
        found: the token of the decision of batch 0 that it found, if any.
        history: the records that it left.
    """

    token: int
    found: int | None
    history: list[TransactionRecord]


def pass_by_far(log: TransactionLog, pipeline: str, seen: list[Passed]) -> None:
    """Begin, deliver forty batches and forget all but one; do nothing if another holds a lock."""
    with no_handler():
        try:
            newer = log.begin(claim(pipeline=pipeline))
        except LogUnavailableError:
            return
        found = log.find(record(newer, 0).id)
        for batch_id in range(40):
            if not log.find(record(newer, batch_id).id):
                deliver(log, newer, batch_id)
        log.forget(record(newer, 39), newer.token, retain=1)
        history = list(log.history(pipeline))
        seen.append(Passed(newer.token, None if found is None else found.token, history))


def landed(act: Callable[[], object]) -> bool:
    """Whether the write succeeded; it is retried while its outcome is unknown, as drivers do."""
    for _ in range(3):
        try:
            act()
        except DecisionUnknownError:
            continue
        except SparkOnceError:
            return False
        return True
    return False


def repeated(call: Callable[[], ResultT]) -> ResultT:
    """The answer of the call, which is repeated while others write or the outcome is unknown."""
    for _ in range(_MOST_CALLS):
        with suppress(DecisionUnknownError, LogUnavailableError):
            return call()
    return call()
