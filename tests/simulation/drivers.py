"""Drivers: the real protocol in a greenlet, so that the scheduler can pause one in any call.

A `Process` holds the connections (Postgres' open merges) and dies as a whole. A `Driver` runs in a
process: `ForeachBatch` is one run of a query that writes with foreachBatch, and is one incarnation.
`tests.simulation.data_source` has the drivers of `writeStream.format("sparkonce")`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial

from greenlet import greenlet

from sparkonce.errors import (
    ConfigurationError,
    DecisionUnknownError,
    LogUnavailableError,
    PreparedBranchLostError,
    SparkOnceError,
)
from sparkonce.failpoints import InjectedError
from sparkonce.protocol.driver import Driver as ProtocolDriver
from sparkonce.protocol.lease import NoEntrance
from sparkonce.protocol.pipeline import CommitPolicy, Patience, Pipeline, ResultT, by_name
from sparkonce.txn_log.claim import Claim
from tests.simulation.lines import Line
from tests.simulation.log import Disk, SimLog
from tests.simulation.spark import SimBatch, Spark, SparkError
from tests.simulation.systems import SINK_OF, Postgres, SimSink
from tests.simulation.world import Crash, Violation, World

_TRIES = 4

_OTHER_CHECKPOINT = (
    "was made with source offsets",
    "no longer remembers batch",
    "has not begun it",
    "never runs again",
)


class SimWorld(World):
    """The world with the log's disk and Spark."""

    @property
    def disk(self) -> Disk:
        return self.line.disk

    @property
    def spark(self) -> Spark:
        """The checkpoint of the running driver, or the one that the next driver gets."""
        return self.line.spark if self.driver is None else self.driver.spark


class SimPatience(Patience):
    """No threads and no sleeps; a number of tries instead of a deadline."""

    def __init__(self, world: SimWorld) -> None:
        self._world = world

    def together(
        self,
        action: Callable[[ResultT], object],
        items: Iterable[ResultT],
        interrupted: object = None,
    ) -> None:
        """Run the actions in a random order; try each, then raise the first error."""
        del interrupted
        work = list(items)
        self._world.rng.shuffle(order := list(range(len(work))))
        errors: dict[int, Exception] = {}
        for number in order:
            try:
                action(work[number])
            except Exception as error:  # noqa: BLE001 - raised below
                errors[number] = error
        if errors:
            raise errors[min(errors)]

    def attempts(
        self,
        what: object,
        *unsure: type[SparkOnceError],
        deadline: float | None = None,
        interrupted: object = None,
    ) -> Iterator[AbstractContextManager[object]]:
        """Yield at most `_TRIES` attempts; between the tries of a commit other drivers may run."""
        del what, deadline, interrupted
        for number in range(_TRIES):
            attempt = Try(
                unsure or (LogUnavailableError, DecisionUnknownError), is_last=number + 1 == _TRIES
            )
            yield attempt
            if attempt.is_done:
                return
            if unsure:
                self._world.call("commit.waits", lambda: None)


class Try:
    """One block of `SimPatience.attempts`: it swallows the error if another try follows."""

    def __init__(self, again: tuple[type[SparkOnceError], ...], *, is_last: bool) -> None:
        self.is_done = False
        self._again = again
        self._is_last = is_last

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self.is_done = error is None
        return isinstance(error, self._again) and not self._is_last


class Process:
    """One process of a driver.

    Attributes:
        planners: Python processes of a JVM that have planned batches, and remember the last one.
        line: its pipeline.
    """

    def __init__(self, world: SimWorld, number: int, line: Line | None = None) -> None:
        self.number = number
        self.line = line or world.line
        self.alive = True
        self.planners: list[Process] = []
        self._attempts = 0
        self.sinks: list[SimSink] = [
            SINK_OF[name](system, self) for name, system in world.systems.items()
        ]

    def next_attempt(self) -> int:
        """Spark numbers task attempts from 0 in each process, so that names differ by the token."""
        self._attempts += 1
        return self._attempts - 1


class Driver:
    """A run of the query, or one of its processes.

    Attributes:
        line: its pipeline.
        spark: the checkpoint of its query.
        token: its fencing token; None until it has one.
        seen_run: the run that held the token when it first looked; empty if there was none.
        first_look: the step of the world at that time.
        outcome: None while it runs; then an exception, "crashed" or "done".
        paused_at: the step in which it is paused.
        fault: the fault that its present step must apply itself.
        is_recovering: whether it is in its recovery.
        looked_at: the clock as the protocol saw it last.
        consumed: batches that it has read to their end.
        tried: full ids of the branches that it has tried to commit.
    """

    def __init__(self, world: SimWorld, process: Process, policy: CommitPolicy) -> None:
        self.world = world
        self.line = world.line
        self.spark = world.spark
        self.process = process
        self.policy = policy
        self.number = len(world.drivers)
        self.sinks = process.sinks
        self.token: int | None = None
        self.seen_run: str | None = None
        self.first_look = 0
        self.outcome: Exception | str | None = None
        self.paused_at: str | None = None
        self.fault: str | None = None
        self.is_recovering = False
        self.looked_at = math.inf
        self.consumed: set[int] = set()
        self.tried: set[str] = set()
        self.looks_first = world.rng.random() < 0.25
        self._greenlet = greenlet(self._run, world.scheduler)

    def __str__(self) -> str:
        token = "" if self.token is None else f" t{self.token}"
        return f"d{self.number}/p{self.process.number}{token}"

    @property
    def leader(self) -> Driver:
        """The run of the query to which this belongs."""
        return self

    @property
    def stands_at(self) -> str | None:
        """The step in which the run is paused, in whichever of its processes."""
        return self.paused_at

    # -- the scheduler's side ----------------------------------------------------------------------

    def go(self) -> None:
        """Run until it ends or pauses."""
        self.world.driver = self
        if self.paused_at is not None:
            self.line.ledger.resumes(self)
            self.paused_at = None
        self._greenlet.switch()
        self.world.driver = None

    def pause(self, step: str) -> None:
        self.paused_at = step
        self.world.scheduler.switch()
        if not self.process.alive:
            raise Crash

    def crash(self) -> None:
        """Kill the process, with every driver in it, from inside this driver."""
        self.die()
        raise Crash

    def die(self) -> None:
        self.line.ledger.crashes(self)
        self.process.alive = False
        self.close_connections()

    def close_connections(self) -> None:
        """Let each server end what the process held open."""
        for system in self.world.systems.values():
            if isinstance(system, Postgres):
                system.close(self.process)

    def take_fault(self) -> str | None:
        """The fault that the present step must apply itself, if any."""
        fault, self.fault = self.fault, None
        return fault

    # -- the query ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._query()
            self.outcome = "done"
        except (Crash, Violation):
            self.outcome = "crashed"
        except (SparkOnceError, SparkError, ConnectionError, InjectedError) as error:
            self.outcome = error
            if isinstance(error, PreparedBranchLostError):
                with contextlib.suppress(Violation):
                    self.world.ledger.reports_loss(error)
        except Exception as error:  # noqa: BLE001 - a finding
            self.outcome = error
            text = f"{type(error).__name__} is no error that a caller expects: {error}"
            self.world.violation = self.world.violation or Violation(
                f"seed {self.world.seed}, step {self.world.steps}: {text}"
            )
        self.world.trace(f"ends: {self.outcome!r:.300}")

    def _query(self) -> None:
        raise NotImplementedError

    def look_at_log(self) -> str:
        """Look who holds the token; returns the run that held it at the first look."""
        head = SimLog(self.line.disk).head(self.line.name)
        if self.seen_run is None:
            self.seen_run = "" if head is None else head.run_id
            self.first_look = self.world.steps
        return self.seen_run

    def claim(
        self, batch_id: int, *, seen_run: str, run_id: str | None = None, had_token: bool = False
    ) -> Claim:
        """What this driver says of itself when it takes a token."""
        spark = self.spark
        shown = (b for b in (batch_id - 1, batch_id) if b in spark.written_offsets)
        bound = spark.binding()
        return Claim(
            pipeline=self.line.name,
            query_id=spark.query_id,
            run_id=run_id or str(self.number),
            driver=str(self),
            sinks={sink.name: sink.target for sink in self.sinks},
            batch_id=batch_id,
            offsets={b: spark.offsets_of(b) for b in shown},
            checkpoint=spark.location,
            checkpoint_log_id=bound.log_id,
            checkpoint_pipeline=bound.pipeline,
            has_begun=spark.has_offsets(batch_id),
            adopt=self.line.adopt,  # left in the settings: it changes nothing
            seen_run=seen_run,
            had_token=had_token,
        )

    def pipeline(self) -> Pipeline:
        """The pipeline, as this process has it."""
        return Pipeline(
            name=self.line.name,
            sinks=by_name(self.sinks),
            log=SimLog(self.line.disk),
            checkpoint=self.spark,
            commit=self.policy,
            commit_timeout_s=1.0,
            retain=1,
            patience=SimPatience(self.world),
            clock=self._now,
            steady=lambda: self.world.clock,
        )

    def start(self, claim: Claim) -> ProtocolDriver:
        """Take a token, and recover."""
        self.token = None
        driver = ProtocolDriver.start(self.pipeline(), claim, NoEntrance())
        self.token = driver.incarnation.token
        self.is_recovering = True
        driver.recover()
        self.is_recovering = False
        return driver

    def _now(self) -> float:
        self.looked_at = self.world.clock
        return self.looked_at

    def is_refused_checkpoint(self) -> bool:
        """Whether the identity guard refused a checkpoint because another one has run on."""
        return isinstance(self.outcome, ConfigurationError) and any(
            sentence in str(self.outcome) for sentence in _OTHER_CHECKPOINT
        )

    def is_refused_gap(self) -> bool:
        """Whether the identity guard refused a start that passes over an abandoned batch."""
        return isinstance(
            self.outcome, ConfigurationError
        ) and "it was abandoned and aborted" in str(self.outcome)


class ForeachBatch(Driver):
    """One run of a query that writes with foreachBatch."""

    def _query(self) -> None:
        world, spark = self.world, self.spark
        batch_id = world.call("spark.plan", self._plan)
        driver: ProtocolDriver | None = None
        if self.looks_first or batch_id >= spark.end:
            driver = self._look(batch_id)
        is_new = batch_id not in spark.written_offsets
        while batch_id < spark.end:
            if is_new:
                world.call("spark.offsets", partial(spark.write_offsets, batch_id))
            is_new = True
            if driver is None:
                driver = self._begin(batch_id)
            driver.deliver(SimBatch(self, batch_id))
            world.call("spark.commit", partial(spark.write_commit, batch_id))
            if world.rng.random() < 0.5:
                driver.commit_pending()
            batch_id += 1
        if driver is not None:
            driver.commit_pending()

    def _plan(self) -> int:
        self.world.note("plan", waits=self.policy == "after_checkpoint")
        return self.spark.committed() + 1

    def _look(self, batch_id: int) -> ProtocolDriver | None:
        """Recover without a batch, as the query's start does; the first batch retries a failure."""
        try:
            return self._begin(batch_id)
        except SparkOnceError as error:
            if batch_id >= self.spark.end:
                raise
            self.world.trace(f"the start was not recovered: {error!r:.200}")
            return None

    def _begin(self, batch_id: int) -> ProtocolDriver:
        return self.start(self.claim(batch_id, seen_run=self.look_at_log()))
