"""Calls each optional verb of a sink: the sink's own if it has one, else the default.

    protocol ─► verbs.vote(sink, …) ─┬─ the sink is a Votes ─► sink.vote(…)
                                     └─ else ─────────────────► the default

The protocol, the command line and `SinkContract` call sinks only through these functions and the
verbs that every sink has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeAlias

from sparkonce.datasets import Dataset, without_secrets
from sparkonce.errors import (
    CommitUnresolvedError,
    SinkUnavailableError,
    SparkOnceError,
    TakeBackRefusedError,
)
from sparkonce.finding import Finding
from sparkonce.model import BranchId, Committable, CommittedBatch, Owner
from sparkonce.parallel import at_once
from sparkonce.sinks.base import AnySink
from sparkonce.sinks.capabilities import (
    AbortsDecided,
    AbortsMany,
    ChecksLog,
    ChecksOthers,
    CommitsMany,
    Delivered,
    Diagnoses,
    FindsBranches,
    ForgetsProofs,
    NamesDatasets,
    Publishes,
    TakesBack,
    Visible,
    Votes,
)

End: TypeAlias = "Callable[[Committable], None]"
"""A `commit` or an `abort`."""


def vote(
    sink: AnySink, branch_id: BranchId, committables: Sequence[Committable]
) -> Sequence[Committable]:
    """See `Votes`; by default the decision names the tasks' committables."""
    if isinstance(sink, Votes):
        return sink.vote(branch_id, committables)
    return committables


def commit_many(
    sink: AnySink, committables: Sequence[Committable]
) -> Sequence[SparkOnceError | None]:
    """See `CommitsMany`; by default `commit` is called for each, several at once."""
    if isinstance(sink, CommitsMany):
        return sink.commit_many(committables)
    return commit_each(sink, committables)


def abort_many(sink: AnySink, found: Sequence[Committable]) -> Sequence[Exception | None]:
    """See `AbortsMany`; by default `abort` is called for each, in order."""
    return sink.abort_many(found) if isinstance(sink, AbortsMany) else abort_each(sink, found)


def abort_decided(sink: AnySink, committable: Committable) -> None:
    """See `AbortsDecided`; by default `abort` is called."""
    if isinstance(sink, AbortsDecided):
        sink.abort_decided(committable)
    else:
        sink.abort(committable)


def publish(sink: AnySink, batch: CommittedBatch) -> None:
    """See `Publishes`; by default nothing happens."""
    if isinstance(sink, Publishes):
        sink.publish(batch)


def find_branches(sink: AnySink, owner: Owner) -> Iterable[Committable]:
    """See `FindsBranches`; by default there are none."""
    return sink.find_branches(owner) if isinstance(sink, FindsBranches) else ()


def forget_proofs(sink: AnySink, owner: Owner, below: int) -> None:
    """See `ForgetsProofs`; by default proofs stay."""
    if isinstance(sink, ForgetsProofs):
        sink.forget_proofs(owner, below)


def find_delivered(sink: AnySink, branches: Sequence[Delivered]) -> Sequence[Visible]:
    """See `TakesBack`; by default it is refused."""
    if isinstance(sink, TakesBack):
        return sink.find_delivered(branches)
    raise TakeBackRefusedError(f"{type(sink).__name__} {sink.why_kept}")


def take_back(sink: AnySink, branches: Sequence[Delivered]) -> None:
    """See `TakesBack`; by default it is refused."""
    if not isinstance(sink, TakesBack):
        raise TakeBackRefusedError(f"{type(sink).__name__} {sink.why_kept}")
    sink.take_back(branches)


def lists_uncommitted_only(sink: AnySink) -> bool:
    """See `FindsBranches`."""
    return isinstance(sink, FindsBranches) and sink.lists_uncommitted_only


def check_log(sink: AnySink, address: str) -> None:
    """See `ChecksLog`; by default every log is accepted."""
    if isinstance(sink, ChecksLog):
        sink.check_log(address)


def check_others(sink: AnySink, others: Sequence[AnySink]) -> None:
    """See `ChecksOthers`; by default every other sink is accepted."""
    if isinstance(sink, ChecksOthers):
        sink.check_others(others)


def diagnose(sink: AnySink) -> Iterable[Finding]:
    """See `Diagnoses`; by default nothing is checked."""
    return sink.diagnose() if isinstance(sink, Diagnoses) else ()


def dataset(sink: AnySink) -> Dataset:
    """See `NamesDatasets`; by default the sink's target, in a namespace of ours."""
    return sink.dataset() if isinstance(sink, NamesDatasets) else default_dataset(sink)


def default_dataset(sink: AnySink) -> Dataset:
    """The name of a sink that has none by OpenLineage's conventions."""
    return Dataset("sparkonce", without_secrets(sink.target))


def lacks_room(sink: AnySink, cores: int) -> str | None:
    """Why the server cannot take the sink's tasks on so many cores; None if it can."""
    room = None
    with contextlib.suppress(Exception):  # other checks report that the server is unreachable
        room = sink.room_for_tasks() if isinstance(sink, Diagnoses) else None
    tasks = min(cores, sink.writers or cores)
    if room is None or tasks <= room:
        return None
    return (
        f"{sink.where} has room for {max(room, 0)} tasks, and {tasks} may run at the same time: "
        "tasks will wait for connections, and fail after two minutes"
    )


# -- outcomes, for a sink's own commit_many and abort_many -----------------------------------------


def commit_each(
    sink: AnySink, committables: Iterable[Committable], commit: End | None = None
) -> list[SparkOnceError | None]:
    """Commit each branch, several at once, with `sink.commit` or `commit`; return each outcome."""
    return at_once(partial(outcome_of_commit, sink, commit=commit), committables)


def abort_each(
    sink: AnySink, found: Iterable[Committable], abort: End | None = None
) -> list[Exception | None]:
    """Abort each branch, in order; return the outcome of each."""
    return [outcome_of_abort(sink, committable, abort) for committable in found]


def outcome_of_commit(
    sink: AnySink, committable: Committable, commit: End | None = None
) -> SparkOnceError | None:
    """Commit one branch, and return its error instead of raising it."""
    try:
        (commit or sink.commit)(committable)
    except Exception as error:  # noqa: BLE001 - the caller raises it
        return outcome_of_error(sink, "commit", error, committable.branch_id)
    return None


def outcome_of_error(
    sink: AnySink, verb: str, error: Exception, branch_id: BranchId | None
) -> SparkOnceError:
    """What an error of a commit says about its outcome: the error itself, or that it is unknown.

    An unreachable target, or an error that sparkonce does not know, says nothing about it.
    """
    if isinstance(error, SparkOnceError) and not isinstance(error, SinkUnavailableError):
        return error
    unresolved = CommitUnresolvedError(
        f"{sink!r} raised {type(error).__name__} from {verb}: {error}", branch_id
    )
    unresolved.__cause__ = error
    return unresolved


def outcome_of_abort(
    sink: AnySink, committable: Committable, abort: End | None = None
) -> Exception | None:
    """Abort one branch, and return its error instead of raising it."""
    try:
        (abort or sink.abort)(committable)
    except Exception as error:  # noqa: BLE001 - the caller logs it, and the next sweep repeats it
        return error
    return None
