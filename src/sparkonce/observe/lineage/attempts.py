"""The attempts at batches, from the steps of the driver: when one begins, and how it ends.

tasks begin ──────────────────────────────────► START
the log has the record as complete, settled ──► COMPLETE    also when a later driver finds it so
                       … as abandoned ────────► FAIL
deliver failed, and the log has no record ────► FAIL
… and the log may have one ───────────────────► nothing yet: the record that the next start finds,
                                                or its absence, is what counts

An attempt is one driver's try at one batch. Its id follows from names in the log, so the driver
that finishes a decided batch after a crash gives it the id of the driver that began it.
"""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from sparkonce.errors import (
    CommitUnresolvedError,
    FencedError,
    LogError,
    PrepareRejectedError,
    ProtocolError,
)
from sparkonce.model import Owner
from sparkonce.observing import Event, Seen
from sparkonce.txn_log.record import Incarnation, Share, TransactionRecord

STEPS: Final = frozenset(
    {"begin", "look", "deliver", "tasks", "rewrite", "hold", "decide", "abandon", "complete"}
)
"""The steps that matter here."""

_IDS: Final = uuid.UUID("7a1e5c0e-9a5b-5d0c-8f0e-5b7f3f1d2c64")
"""The name space of the ids; it never changes."""

_MOST_ENDED: Final = 1_000
"""The number of attempts that are remembered as ended."""

_NOT_WRITTEN: Final = (PrepareRejectedError, ProtocolError, FencedError)
"""What the write of a decision may fail with so that the log has no record for certain."""


@dataclass(frozen=True)
class Attempt:
    """One driver's try at one batch.

    Attributes:
        pipeline: its name.
        owner: log id and query id.
        batch_id: Spark's number of the micro-batch.
        token: of the driver that writes the batch.
    """

    pipeline: str
    owner: Owner
    batch_id: int
    token: int

    @property
    def id(self) -> str:
        """The run id, a UUID that every driver computes alike."""
        owner = self.owner
        return str(
            uuid.uuid5(_IDS, f"{owner.log_id}/{owner.query_id}/{self.batch_id}/{self.token}")
        )


class Kind(StrEnum):
    """What has happened to an attempt, in OpenLineage's words."""

    START = "START"
    COMPLETE = "COMPLETE"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Change:
    """An attempt has begun or ended.

    Attributes:
        kind: which of it.
        attempt: whose.
        at_s: Unix time in seconds.
        state: of the batch: "begun", "aborted", or one of `State`.
        record: what the log has of it; None where it has nothing.
        error: why the attempt failed.
    """

    kind: Kind
    attempt: Attempt
    at_s: float
    state: str
    record: TransactionRecord | None = None
    error: BaseException | None = None

    @property
    def shares(self) -> Mapping[str, Share]:
        """What each sink got, by its name."""
        return {} if self.record is None else self.record.shares


@dataclass
class _Open:
    """An attempt that has begun here and whose end is not known."""

    attempt: Attempt
    is_recorded: bool = False
    may_be_recorded: bool = False


@dataclass
class _Pipeline:
    incarnation: Incarnation | None = None
    open: _Open | None = None
    is_rewriting: bool = False
    ended: OrderedDict[str, None] = field(default_factory=OrderedDict)


class Attempts:
    """Takes the steps of this process, in one thread, in order."""

    def __init__(self) -> None:
        self._pipelines: dict[str, _Pipeline] = {}

    def follow(self, pipeline: str) -> None:
        """Take the pipeline's steps from now on."""
        self._pipelines.setdefault(pipeline, _Pipeline())

    def take(self, seen: Seen) -> Iterator[Change]:
        """What a step has changed."""
        of = self._pipelines.get(seen.step.pipeline or "")
        if of is None or seen.step.name not in STEPS:
            return
        if seen.event is Event.STARTED:
            yield from self._started(of, seen)
            return
        if seen.step.name == "rewrite":
            of.is_rewriting = False
        result = seen.step.result
        if isinstance(result, Incarnation):
            of.incarnation = result
        elif isinstance(result, TransactionRecord):
            yield from self._recorded(of, result)
        if seen.error is not None:
            yield from self._failed(of, seen, seen.error)

    def _started(self, of: _Pipeline, seen: Seen) -> Iterator[Change]:
        began = seen.step
        if began.name in {"deliver", "rewrite"}:
            of.is_rewriting = began.name == "rewrite"
        if began.name != "tasks" or of.is_rewriting or of.incarnation is None:
            return
        if of.open is not None and began.batch == of.open.attempt.batch_id:
            # Tasks run only after the log was found to have no record of the batch.
            yield from _end(of, _failure(of.open.attempt, seen))
        attempt = Attempt(
            of.incarnation.pipeline, of.incarnation.owner, began.batch or 0, of.incarnation.token
        )
        of.open = _Open(attempt)
        yield Change(Kind.START, attempt, seen.at_ns / 1e9, "begun")

    def _recorded(self, of: _Pipeline, record: TransactionRecord) -> Iterator[Change]:
        if of.incarnation is None:
            return
        owners = (of.incarnation.owner, *of.incarnation.retired)
        owner = next((o for o in owners if o.query_id == record.id.query_id), owners[0])
        attempt = Attempt(record.id.pipeline, owner, record.id.batch_id, record.token)
        if of.open is not None and of.open.attempt == attempt:
            of.open.is_recorded = True
        if record.state.is_unfinished:
            return
        kind = Kind.COMPLETE if record.state.is_finished else Kind.FAIL
        at_s = record.times.get(record.state, 0.0)
        yield from _end(of, Change(kind, attempt, at_s, str(record.state), record))

    def _failed(self, of: _Pipeline, seen: Seen, error: BaseException) -> Iterator[Change]:
        ended = seen.step
        if of.open is None or of.open.is_recorded or ended.batch != of.open.attempt.batch_id:
            return
        if ended.name in {"hold", "decide"}:
            of.open.may_be_recorded = ended.retries > 0 or not _is_not_written(error)
        elif ended.name == "deliver" and not of.open.may_be_recorded:
            yield from _end(of, _failure(of.open.attempt, seen))


def _end(of: _Pipeline, change: Change) -> Iterator[Change]:
    """End the attempt, once: a record is seen more than once."""
    if of.open is not None and of.open.attempt == change.attempt:
        of.open = None
    if change.attempt.id in of.ended:
        return
    of.ended[change.attempt.id] = None
    while len(of.ended) > _MOST_ENDED:
        of.ended.popitem(last=False)
    yield change


def _failure(attempt: Attempt, seen: Seen) -> Change:
    return Change(Kind.FAIL, attempt, seen.at_ns / 1e9, "aborted", error=seen.error)


def _is_not_written(error: BaseException) -> bool:
    """Whether the error proves that the log has no record of the batch."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    is_unknown = any(isinstance(each, LogError | CommitUnresolvedError) for each in chain)
    return isinstance(error, _NOT_WRITTEN) and not is_unknown
