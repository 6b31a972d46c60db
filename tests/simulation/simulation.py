"""One seed: faults and several drivers, then a run without faults, then the final checks."""

from __future__ import annotations

from dataclasses import dataclass
from time import gmtime, strftime
from types import SimpleNamespace
from unittest.mock import patch

from sparkonce import failpoints
from sparkonce.errors import CommitUnresolvedError, PreparedBranchLostError
from sparkonce.protocol.pipeline import CommitPolicy
from sparkonce.txn_log import base as log_rules
from tests.simulation.data_source import Format
from tests.simulation.drivers import Driver, ForeachBatch, Process, SimWorld
from tests.simulation.lines import Line
from tests.simulation.log import Disk
from tests.simulation.operator import settle_early, settle_lost
from tests.simulation.savepoints import Command, User, deterministic
from tests.simulation.spark import Spark
from tests.simulation.systems import SYSTEM_OF, Postgres
from tests.simulation.world import Violation

_STARTS = (2, 3, 4, 6)
_LAST_STARTS = 12
_BEFORE_A_REPEAT = "commit.waits"


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one seed.

    Attributes:
        failure: the invariant that broke; None if all held.
        fired: the (step, fault) pairs that happened.
        states: the interesting states that were reached.
        trace: every step, if requested.
    """

    seed: int
    failure: str | None
    fired: frozenset[tuple[str, str]]
    states: frozenset[str]
    steps: int
    trace: tuple[str, ...]


def simulate(seed: int, *, trace: bool = False) -> Result:
    """Run the schedule of one seed."""
    simulation = Simulation(seed, trace=trace)
    run(simulation)
    return result_of(simulation)


def result_of(simulation: Simulation) -> Result:
    """What came of a schedule that has run."""
    world = simulation.world
    return Result(
        world.seed,
        None if world.violation is None else str(world.violation),
        frozenset(world.plan.fired),
        frozenset(world.states),
        world.steps,
        tuple(world.lines or ()),
    )


def run(simulation: Simulation) -> None:
    """Run the schedule to its end, or to the first broken invariant."""
    world = simulation.world
    clock = SimpleNamespace(time=lambda: world.clock, strftime=strftime, gmtime=gmtime)
    with (
        deterministic(simulation.user, clock),
        patch.object(failpoints, "handler", world.reach),
        patch.object(log_rules, "time", clock),
    ):
        try:
            simulation.run()
        except Violation:
            pass
        finally:
            simulation.end()


class Simulation:
    """The scheduler, which decides which driver runs next."""

    def __init__(self, seed: int, *, trace: bool) -> None:
        world = self.world = SimWorld(seed, trace=trace)
        world.systems = {name: kind(world, name) for name, kind in SYSTEM_OF.items()}
        postgres = world.systems["postgres"]
        assert isinstance(postgres, Postgres)
        postgres.can_prepare = world.rng.random() < 0.5
        postgres.has_keys = world.rng.random() < 0.5
        line = world.chosen = Line(world, "orders", Disk(world), "orders")
        line.use(Spark.fresh(world, line))
        self.user = User(world)
        self._policy: CommitPolicy = "immediate"
        if world.plan.policy == "after_checkpoint" or world.rng.random() < 0.4:
            self._policy = "after_checkpoint"
        self._is_format = world.plan.is_of_format or world.rng.random() < 0.25
        self._is_mixed = self._is_format and world.rng.random() < 0.5
        self._processes = 0

    @property
    def is_of_format(self) -> bool:
        """Whether some of its drivers may write with `format("sparkonce")`."""
        return self._is_format or self._is_mixed

    def run(self) -> None:
        world, rng = self.world, self.world.rng
        starts = rng.choice(_STARTS) + (4 if self.user.is_on else 0)
        while starts > 0 or self._paused():
            paused = self._paused()
            if paused and (starts == 0 or len(paused) > 2 or rng.random() < 0.5):
                driver = rng.choice(paused)
                if starts == 0 and rng.random() < 0.3:
                    break  # it stays paused until all faults have stopped
            else:
                starts -= 1
                driver = self._start()
            self._go(driver)
            if self.user.todo and self.user.rng.random() < 0.6:
                self._command()
            if not self._paused() and driver.leader.outcome == "done" and not self.user.is_on:
                break
            if driver.leader.stands_at == _BEFORE_A_REPEAT and rng.random() < 0.5:
                break  # it is about to retry a commit, and no other driver starts
        self._be_quiet()
        self.user.finish()
        world.chosen = world.pipelines["orders"]
        if rng.random() < (0.8 if self._repeating() else 0.2):
            self._operate()
        self._finish_all()
        if zombies := self._paused():
            world.trace("the zombies resume after the end")
            for driver in zombies:
                self._go(driver)
            self._finish_all()

    def _command(self) -> None:
        """The user runs a command on savepoints, or resumes one."""
        command = self.user.next_command()
        if command is not None:
            self._go(command)

    def _finish_all(self) -> None:
        for line in list(self.world.pipelines.values()):
            if line.checkpoints:
                self.world.chosen = line
                self._finish()

    def _operate(self) -> None:
        """An operator rules, and then drivers that were paused meanwhile resume.

        If the command does not reach the sinks, only drivers that check the token first may resume.
        """
        world, rng, repeating = self.world, self.world.rng, self._repeating()
        reaches_sinks = rng.random() < 0.5
        settle_early(world, repeating, reaches_sinks=reaches_sinks)
        if world.ledger.rulings and repeating:
            world.states.add("an operator's ruling meets a driver that retries a commit")
        for driver in list(self._paused_of_line()) if reaches_sinks else repeating:
            if driver in repeating or rng.random() < 0.7:
                self._go(driver)

    def _repeating(self) -> list[Driver]:
        return [d for d in self._paused_of_line() if d.paused_at == _BEFORE_A_REPEAT]

    def _paused_of_line(self) -> list[Driver]:
        return [driver for driver in self._paused() if driver.line is self.world.line]

    def _paused(self) -> list[Driver]:
        return [d for d in self.world.drivers if d.outcome is None and d.process.alive]

    def _start(self, *, is_last: bool = False) -> Driver:
        world, rng = self.world, self.world.rng
        half = None
        if not is_last:
            self.user.choose()
            half = self.user.choose_half()
        world.clock += rng.choice((1.0, 1.0, 60.0, 1000.0)) if world.plan.is_on else 1.0
        if rng.random() < 0.15:
            self._policy = "after_checkpoint" if self._policy == "immediate" else "immediate"
            if world.ledger.named:
                world.states.add("the policy changes over an unfinished batch")
        if self._is_mixed and rng.random() < 0.3:
            self._is_format = not self._is_format
            if world.ledger.named:
                world.states.add("the front changes over an unfinished batch")
        if half is not None:
            return self._add_half(half)
        world.spark.see_all_rows(self.user.rng)
        last = next((d for d in reversed(world.drivers) if self._is_like_next(d)), None)
        is_idle = last is not None and last.outcome is not None and last.process.alive
        if last is not None and is_idle and rng.random() < 0.3:
            world.states.add("a second start in one process")
            return self._add(last.process)
        self._processes += 1
        return self._add(Process(world, self._processes))

    def _is_like_next(self, driver: Driver) -> bool:
        is_query = driver.leader is driver and not isinstance(driver, Command)
        return is_query and driver.spark is self.world.spark

    def _add_half(self, spark: Spark) -> Driver:
        """A start on a checkpoint whose restore was interrupted."""
        line = self.world.chosen
        before, line.spark = line.spark, spark
        self._processes += 1
        driver = self._add(Process(self.world, self._processes))
        line.spark = before
        return driver

    def _add(self, process: Process) -> Driver:
        driver: Driver
        if self._is_format:
            driver = Format(self.world, process)
            self.world.trace(f'start of {driver} with format("sparkonce")')
        else:
            driver = ForeachBatch(self.world, process, self._policy)
            self.world.trace(f"start of {driver}, commit={self._policy!r}")
        self.world.drivers.append(driver)
        return driver

    def _go(self, driver: Driver) -> None:
        if driver.outcome is None and driver.process.alive:
            driver.go()
        if isinstance(driver, Command):
            self.user.note_end(driver)
        if self.world.violation is not None:
            raise self.world.violation

    def _be_quiet(self) -> None:
        """Stop the faults; some of the paused drivers die, the others stay paused."""
        world = self.world
        world.trace("faults stop")
        world.plan.is_on = False
        for driver in self._paused():
            if world.rng.random() < 0.4:
                driver.die()

    def _finish(self) -> None:
        """Run a last healthy driver to the end, or until it stops with an error."""
        world = self.world
        world.fire_late(world.steps + 10_000)
        for _ in range(_LAST_STARTS):
            driver = self._start(is_last=True)
            self._go(driver)
            world.driver = None
            if driver.outcome == "done":
                if isinstance(driver, Format) and self._is_anything_left():
                    world.spark.add_batch()  # only a batch lets this front recover and sweep
                    continue
                world.ledger.check_end()
                return
            if isinstance(driver.outcome, PreparedBranchLostError):
                world.ledger.check_stopped(driver.outcome)
                if world.rng.random() < 0.3:
                    return
                settle_lost(world, driver.outcome)
                continue
            if isinstance(driver.outcome, CommitUnresolvedError):
                # It waited for the locks of a zombie's merge, which its recovery then swept.
                world.states.add("a commit waits for a zombie's locks until the next start")
                continue
            if driver.is_refused_checkpoint() and self._turn_to_another_checkpoint():
                continue
            if not driver.is_refused_gap():
                break
            world.states.add("an operator closes a gap")
            newest = max(record.id.batch_id for record in world.line.records())
            world.spark.delete_from(newest)
            world.note("gap", by=driver)
        world.fail(f"I8: the last healthy driver ends with {driver.outcome!r}")

    def _turn_to_another_checkpoint(self) -> bool:
        """As the error says: start with the checkpoint that wrote the batch."""
        line = self.world.line
        number = line.checkpoints.index(line.spark)
        line.use(line.checkpoints[(number + 1) % len(line.checkpoints)])
        self.world.states.add("a restored checkpoint and the old one differ")
        return len(line.checkpoints) > 1

    def _is_anything_left(self) -> bool:
        line = self.world.line
        prepared = any(system.prepared_by(line) for system in self.world.systems.values())
        return bool(line.unfinished()) or prepared

    def end(self) -> None:
        """End every greenlet of the seed."""
        world = self.world
        for driver in world.drivers:
            if driver.outcome is None:
                driver.process.alive = False
                driver.paused_at = None
                driver.go()
