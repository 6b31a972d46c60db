"""What the protocol works with: a pipeline's sinks, log and checkpoint, and its patience."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from threading import Event
from typing import Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    sleep_using_event,
    stop_after_delay,
    stop_when_event_set,
    wait_random_exponential,
)

from sparkonce.errors import DecisionUnknownError, LogUnavailableError, SparkOnceError
from sparkonce.parallel import at_once
from sparkonce.protocol.rewriting import Rewrite
from sparkonce.sinks.base import AnySink
from sparkonce.steps import step
from sparkonce.txn_log.base import TransactionLog
from sparkonce.txn_log.record import Fingerprint, Incarnation, Share
from sparkonce.watching import still_trying

ResultT = TypeVar("ResultT")

CommitPolicy: TypeAlias = Literal["immediate", "after_checkpoint"]
"""When a batch is decided: once it is prepared, or once Spark's checkpoint has it too."""


class Moment(NamedTuple):
    """A moment, by the driver's two clocks.

    Attributes:
        unix_s: Unix time in seconds, which jumps when somebody sets the clock.
        steady_s: seconds since some earlier moment, which no change of the clock moves.
    """

    unix_s: float
    steady_s: float


def steady_clock() -> float:
    """Seconds that no change of the clock moves; on Linux, they pass in a suspended machine too."""
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


class Batch(Protocol):
    """One micro-batch, as foreachBatch hands it over."""

    @property
    def batch_id(self) -> int: ...

    @property
    def offsets(self) -> tuple[str, ...]:
        """Source offsets of the batch, as Spark's checkpoint shows them."""

    def write(
        self, incarnation: Incarnation, rewrite: Rewrite | None = None
    ) -> Mapping[str, Share]:
        """Write the sinks on the executors and prepare.

        Args:
            incarnation: whose names the branches carry.
            rewrite: the sinks and partitions to write again; default: everything.

        Returns:
            What Spark returned, by sink name.

        Raises:
            BatchInterruptedError: executors were lost; another call may succeed.
        """

    def drain(self) -> Mapping[str, Fingerprint]:
        """Read the batch to its end without writing it, so that Spark's own state moves on.

        Returns:
            By sink name, the rows that the sink would get; only for sinks whose rows another
            reading of the same batch does not change.
        """


class Checkpoint(Protocol):
    """Spark's checkpoint of the query."""

    @property
    def location(self) -> str:
        """For messages."""

    def committed(self) -> int | None:
        """The highest batch that Spark's commit log has; -1 when it has none.

        None for an operator's command without a checkpoint: then nothing that depends on it is
        decided.

        Raises:
            LogUnavailableError: the checkpoint is unreachable.
        """

    def has_offsets(self, batch_id: int) -> bool:
        """Whether Spark has begun the batch here: it plans its offsets first.

        An older copy of the checkpoint has none, and cannot show what became of the batch.
        """


class Patience:
    """How calls are repeated, and which calls run at the same time.

    Args:
        timeout_s: how long a call is repeated unless its caller says otherwise, in seconds.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    together = staticmethod(at_once)
    """Calls an action with each item, several at a time; the first error is raised at the end."""

    def attempts(
        self,
        what: step,
        *unsure: type[SparkOnceError],
        deadline: float | None = None,
        interrupted: Event | None = None,
    ) -> Iterator[AbstractContextManager[object]]:
        """A block for each try, with backoff, while its error says that repeating can help.

        Args:
            what: the step that it belongs to, for messages.
            unsure: the errors to repeat after; default: those of a log that is unreachable, or
                whose answer was lost.
            deadline: of time.monotonic, in seconds; default: the pipeline's timeout from now on.
            interrupted: ends the repeats when it is set.
        """
        interrupted, log = interrupted or Event(), still_trying(what)

        def before_sleep(state: RetryCallState) -> None:
            what.retries += 1
            log(state)

        left_s = self._timeout_s if deadline is None else deadline - time.monotonic()
        yield from Retrying(
            retry=retry_if_exception_type(unsure or (LogUnavailableError, DecisionUnknownError)),
            wait=wait_random_exponential(multiplier=0.05, max=5.0),
            stop=stop_after_delay(max(left_s, 0.0)) | stop_when_event_set(interrupted),
            sleep=sleep_using_event(interrupted),
            before_sleep=before_sleep,
            reraise=True,
        )


class _RememberingUnknown:
    """An outcome that one try has left unknown stays so when the log is unreachable later."""

    def __init__(self) -> None:
        self._unknown: DecisionUnknownError | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, DecisionUnknownError):
            self._unknown = self._unknown or error
        elif isinstance(error, LogUnavailableError) and self._unknown is not None:
            raise DecisionUnknownError(f"{self._unknown}; and now: {error}") from error


@dataclass(frozen=True)
class Pipeline:
    """One pipeline: its settings, and where its rows and decisions go.

    Attributes:
        name: the pipeline's permanent name.
        sinks: by name, in the order in which they vote.
        removed: sinks that get no rows; what exists in them is finished or swept.
        log: the transaction log.
        checkpoint: of the query.
        commit: when a batch is decided.
        commit_timeout_s: how long the commits of one batch are repeated, in seconds.
        retain: how many batches of history the log keeps.
        patience: how calls are repeated.
        clock: gives Unix time in seconds.
        steady: see `Moment.steady_s`.
    """

    name: str
    sinks: Mapping[str, AnySink]
    log: TransactionLog
    checkpoint: Checkpoint
    commit: CommitPolicy = "immediate"
    removed: Mapping[str, AnySink] = field(default_factory=dict)
    commit_timeout_s: float = 600.0
    retain: int = 10_000
    patience: Patience = field(default_factory=lambda: Patience(600.0))
    clock: Callable[[], float] = time.time
    steady: Callable[[], float] = steady_clock

    @property
    def all_sinks(self) -> Mapping[str, AnySink]:
        """The sinks, and those that were removed, by name."""
        return {**self.sinks, **self.removed}

    def moment(self) -> Moment:
        """Now, by both clocks."""
        return Moment(self.clock(), self.steady())

    def ask_log(self, question: Callable[[], ResultT], what: step) -> ResultT:
        """The log's answer, once it is reachable."""
        remembering = _RememberingUnknown()
        for attempt in self.patience.attempts(what):
            with attempt, remembering:
                return question()
        raise AssertionError("tries end with an answer or an error")


def targets_of(sinks: Iterable[AnySink]) -> dict[str, str]:
    """The sinks' targets, by their names."""
    return {sink.name: sink.target for sink in sinks}


def by_name(sinks: Sequence[AnySink]) -> dict[str, AnySink]:
    """The sinks by their names."""
    return {sink.name: sink for sink in sinks}
