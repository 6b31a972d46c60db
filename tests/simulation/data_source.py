"""Drivers of `writeStream.format("sparkonce")`: Spark's JVM, and the Python processes that it runs.

    Format (the JVM) ─► Planner ─► ticket ─► tasks ─► Committer ─► commits/N
                                               └── any failure ──► Aborter ─► the query fails

The JVM waits for each of them. Each may die or be paused alone; when the scheduler lets the JVM
continue meanwhile, Spark has given that process up, and may have killed it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial

from sparkonce.errors import PrepareRejectedError, SparkOnceError
from sparkonce.failpoints import InjectedError
from sparkonce.protocol.driver import Driver as ProtocolDriver
from sparkonce.protocol.lease import Lease, NoEntrance
from sparkonce.protocol.pipeline import targets_of
from sparkonce.spark_hooks.binding import Entry
from sparkonce.spark_hooks.data_source.tasks import Ticket
from sparkonce.spark_hooks.data_source.written_batch import WrittenBatch, check_targets
from sparkonce.spark_hooks.partition_writer import PartitionSummary
from sparkonce.spark_hooks.query import RunId
from sparkonce.txn_log.record import Incarnation, TransactionRecord
from tests.simulation.drivers import Driver, Process, SimWorld
from tests.simulation.spark import SparkError, Tasks
from tests.simulation.world import Crash

_FAILURES = (SparkOnceError, SparkError, ConnectionError, InjectedError)


class PlannerProcess(Process):
    """A Python process that plans batches, and remembers the last one, as `planning.Holder`."""

    last: Ticket | None = None
    planned_by: Format | None = None


class SimEntrance(NoEntrance):
    """Lets the ledger know the token of a process that has taken one."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def check_may_begin(self, *, is_first_try: bool) -> None:
        del is_first_try
        self._driver.token = None

    def enter(self, incarnation: Incarnation) -> bool:
        self._driver.token = incarnation.token
        return True


class Format(Driver):
    """One run of a query with `format("sparkonce")`: the thread of the JVM that runs its batches.

    Attributes:
        child: the Python process that it waits for.
    """

    def __init__(self, world: SimWorld, process: Process) -> None:
        super().__init__(world, process, "immediate")
        self.child: Python | None = None

    @property
    def stands_at(self) -> str | None:
        return self.paused_at if self.child is None else self.child.paused_at

    def go(self) -> None:
        """Run until it ends, or it or its Python process pauses."""
        while True:
            super().go()
            child = self.child
            if child is None or self.outcome is not None:
                return
            child.run()
            if child.outcome is None:
                return

    def die(self) -> None:
        super().die()
        child = self.child
        if child is not None and child.process.alive and self.world.rng.random() < 0.5:
            child.die()

    # -- the query ---------------------------------------------------------------------------------

    def _query(self) -> None:
        world, spark = self.world, self.spark
        batch_id = world.call("spark.plan", spark.committed) + 1
        is_new = batch_id not in spark.written_offsets
        while batch_id < spark.end:
            if is_new:
                world.call("spark.offsets", partial(spark.write_offsets, batch_id))
            is_new = True
            self._run_batch(batch_id)
            world.call("spark.commit", partial(spark.write_commit, batch_id))
            batch_id += 1

    def _run_batch(self, batch_id: int) -> None:
        planner = Planner(self, self._planner_process())
        self._wait_for(planner)
        ticket = planner.ticket
        assert ticket is not None
        self.token = ticket.incarnation.token
        returned: list[PartitionSummary] = []
        try:
            if ticket.batch_id != batch_id:  # each task finds out
                self.world.states.add("a plan sees a later batch than its Spark runs")
                raise SparkError(f"batch {batch_id} runs, and {ticket.batch_id} was planned")
            for summary in Tasks(self, batch_id).run(ticket.incarnation, ticket.rewrite):
                returned.append(summary)  # noqa: PERF402 - they outlive a task that fails
            self._wait_for(Committer(self, ticket, returned, planner.found))
        except _FAILURES:
            if returned:
                with contextlib.suppress(*_FAILURES):
                    self._wait_for(Aborter(self, ticket))
            raise

    def _planner_process(self) -> PlannerProcess:
        """Mostly the process that has planned before, unless that still runs."""
        busy = {d.process for d in self.world.drivers if d.outcome is None}
        free = [p for p in self.process.planners if p.alive and p not in busy]
        if free and self.world.rng.random() < 0.75:
            found = self.world.rng.choice(free)
            assert isinstance(found, PlannerProcess)
            if found.planned_by is not self:
                self.world.states.add("a second run shares a planner's memory")
        else:
            found = PlannerProcess(self.world, self.process.number)
            self.process.planners.append(found)
        found.planned_by = self
        return found

    def _wait_for(self, child: Python) -> None:
        """Return when the Python process has done its work.

        Raises:
            SparkError: it died, or Spark has given it up.
            SparkOnceError: its own error.
        """
        self.world.drivers.append(child)
        self.child = child
        self.world.scheduler.switch()  # `go` runs it, and returns here when it has ended
        self.child = None
        if not self.process.alive:
            raise Crash
        if child.outcome is None:
            child.is_given_up = True
            self.world.trace(f"Spark gives {child} up")
            if self.world.rng.random() < 0.5:
                child.die()
            raise SparkError(f"{child} does not respond")
        if child.outcome == "crashed":
            self.world.states.add(f"a process that {child.does} dies alone")
            raise SparkError(f"{child} died")
        if isinstance(child.outcome, Exception):
            raise child.outcome


class Python(Driver):
    """A Python process of the driver.

    Attributes:
        jvm: which has started it.
        does: what it does, for the names of steps.
        is_given_up: whether Spark waits for it no more.
    """

    does = ""
    step = ""

    def __init__(self, jvm: Format, process: Process) -> None:
        super().__init__(jvm.world, process, "immediate")
        self.jvm = jvm
        self.is_given_up = False

    def __str__(self) -> str:
        return f"{super().__str__()} {self.step}"

    @property
    def leader(self) -> Driver:
        return self.jvm

    def go(self) -> None:
        """Run until it ends or pauses; if it ends, the JVM continues."""
        self.run()
        if self.outcome is not None and self.jvm.child is self and self.jvm.outcome is None:
            self.jvm.go()

    def run(self) -> None:
        """Run until it ends or pauses."""
        if self.paused_at is not None:
            self._resumes()
        super().go()
        if self.outcome is not None and not isinstance(self.process, PlannerProcess):
            self.close()

    def close(self) -> None:
        """The process ends, and its connections with it."""
        self.process.alive = False
        self.close_connections()

    def die(self) -> None:
        super().die()
        jvm = self.jvm
        if jvm.child is self and jvm.process.alive and self.world.rng.random() < 0.2:
            jvm.die()  # the whole machine

    def _query(self) -> None:
        self.world.call(f"python.{self.step}", self._begins)
        self._work()
        self.world.call("python.answer", lambda: None)

    def _begins(self) -> None:
        """Apply a fault of the process's own, if any."""

    def _work(self) -> None:
        raise NotImplementedError

    def _resumes(self) -> None:
        """Note what is interesting about that."""

    def _is_overtaken(self, ticket: Ticket) -> bool:
        """Whether another run holds the token now."""
        head = self.line.head
        return head is not None and head.run_id != ticket.run.run_id

    def _record(self, batch_id: int) -> TransactionRecord | None:
        return self.line.record(self.spark, batch_id)


class Planner(Python):
    """Plans one batch, as `sparkonce.spark_hooks.data_source.planning` does.

    Attributes:
        ticket: its plan, once there is one.
        found: the batch's record when it was planned.
    """

    does = "plans"
    step = "plan"
    ticket: Ticket | None = None
    found: TransactionRecord | None = None
    process: PlannerProcess

    def _work(self) -> None:
        ticket = self._next_ticket() or self._new_ticket()
        self.found = self._record(ticket.batch_id)
        if ticket.rewrite is not None:
            what = "a rewrite" if ticket.rewrite.partitions else "nothing to write"
            self.world.states.add(f"a batch is planned with {what}")
        if self.is_given_up:
            self.world.states.add("a plan is made that Spark has given up")
        self.ticket = self.process.last = ticket

    def _next_ticket(self) -> Ticket | None:
        last = self.process.last
        if last is None:
            return None
        batch_id = self.spark.begun()
        lease = Lease(self.pipeline(), last.incarnation, NoEntrance())
        is_kept = lease.may_serve(batch_id, last=last.batch_id)
        if batch_id == last.batch_id + 1 and self._is_overtaken(last):
            self.world.states.add(
                "a planner remembers the batch before, and another run came since"
            )
        if not is_kept:
            return None
        self.token = last.incarnation.token
        self.world.states.add("a plan keeps the token")
        return Ticket(batch_id, last.run, last.incarnation, last.entry, None, last.targets)

    def _new_ticket(self) -> Ticket:
        seen_run = self.look_at_log()
        batch_id = self.spark.begun()
        driver = self.start(self.claim(batch_id, seen_run=seen_run))
        others = self.world.drivers[self.jvm.number + 1 :]
        if any(d.leader is d and d.process.alive and d.outcome is None for d in others):
            self.world.states.add("a paused run plans on, and fences the run that came after")
        rewrite = driver.remaining(WrittenBatch(batch_id, self.spark.offsets_of(batch_id)))
        run = RunId(self.spark.query_id, str(self.number))
        targets = targets_of(self.sinks)
        entry = Entry(0, run.run_id, "")
        return Ticket(batch_id, run, driver.incarnation, entry, rewrite, targets)

    def _resumes(self) -> None:
        if self.is_given_up:
            self.world.states.add("a planner resumes that Spark has given up")


class Committer(Python):
    """Commits one batch, as `sparkonce.spark_hooks.data_source.committing.commit` does."""

    does = "commits"
    step = "commit"

    def __init__(
        self,
        jvm: Format,
        ticket: Ticket,
        returned: Sequence[PartitionSummary],
        planned: TransactionRecord | None,
    ) -> None:
        super().__init__(jvm, Process(jvm.world, jvm.process.number))
        self.ticket = ticket
        self.token = ticket.incarnation.token
        self._returned = returned
        self._planned = planned

    def _begins(self) -> None:
        if self.take_fault() == "other_job":  # the pipeline's module was changed meanwhile
            self.sinks = self.world.rng.sample(self.sinks, k=len(self.sinks) - 1)

    def _work(self) -> None:
        batch_id, ticket = self.ticket.batch_id, self.ticket
        check_targets(ticket, self.sinks)
        if ticket.rewrite is not None and self._record(batch_id) != self._planned:
            self.world.states.add("a record changes between the plan of its replay and the commit")
        lease = Lease(self.pipeline(), ticket.incarnation, NoEntrance())
        batch = WrittenBatch(
            batch_id, self.spark.offsets_of(batch_id), self.sinks, ticket, self._returned
        )
        try:
            ProtocolDriver(lease).deliver(batch)
        except PrepareRejectedError as error:
            if "makes a new plan" in str(error):
                self.world.states.add("a commit asks for other branches than were planned")
            raise

    def _resumes(self) -> None:
        if self._is_overtaken(self.ticket):
            self.world.states.add("a process that commits resumes behind a newer driver")


class Aborter(Python):
    """Aborts one batch, as `sparkonce.spark_hooks.data_source.committing.abort` does."""

    does = "aborts"
    step = "abort"

    def __init__(self, jvm: Format, ticket: Ticket) -> None:
        super().__init__(jvm, Process(jvm.world, jvm.process.number))
        self.ticket = ticket
        self.token = ticket.incarnation.token

    def _work(self) -> None:
        self._note()
        run, batch_id = self.ticket.run.run_id, self.ticket.batch_id
        claim = self.claim(batch_id, run_id=run, seen_run=run, had_token=True)
        ProtocolDriver.abort(self.pipeline(), claim, SimEntrance(self))

    def _note(self) -> None:
        states, record = self.world.states, self._record(self.ticket.batch_id)
        is_ours = record is not None and record.token == self.ticket.incarnation.token
        if is_ours and record is not None and record.state.is_unfinished:
            states.add("an abort is called after the decision")
        if any(
            isinstance(d, Committer) and d.ticket == self.ticket and d.outcome is None
            for d in self.world.drivers
            if d.process.alive
        ):
            states.add("an abort is called while its batch may still be decided")
        if self._is_overtaken(self.ticket):
            states.add("an abort is late: another run holds the token")

    def _resumes(self) -> None:
        if self._is_overtaken(self.ticket):
            self.world.states.add("an abort resumes behind a newer driver")
