"""A user who makes savepoints of a pipeline that may be running, and restores and forks them.

    create ─► restore: another checkpoint of the pipeline; the old driver may still be paused
          └─► fork: a pipeline with its own name, on the same servers, in the same log or its own

The commands are the real ones. Each is a process that may be paused or killed at every write; then
the user runs it again. Random choices come from a generator of their own, so seeds without
savepoints keep their schedules.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from types import SimpleNamespace
from typing import Final
from unittest.mock import patch

from sparkonce.errors import DecisionUnknownError, SavepointError
from sparkonce.protocol.pipeline import targets_of
from sparkonce.spark_hooks.binding import read_binding
from sparkonce.spark_hooks.checkpoint import CheckpointFiles
from sparkonce.spark_hooks.savepoints import (
    Filling,
    Manifest,
    Savepoints,
    create,
    creating,
    filling,
    fork,
    restore,
    restoring,
    rewinding,
)
from sparkonce.txn_log.claim import RESTORING
from tests.simulation.drivers import Driver, Process, SimWorld
from tests.simulation.lines import Line, MemoryFolder
from tests.simulation.log import Disk, SimLog
from tests.simulation.spark import Spark

_SHARE_OF_SEEDS: Final = 0.25
_TRIES: Final = 12
_AWAY: Final = ("not the savepoint's", "is not empty", "already")
"""Refusals after which the user gives another folder."""


@contextmanager
def deterministic(user: User, clock: SimpleNamespace) -> Iterator[None]:
    """Inside the block, the commands take times and ids from the seed."""
    ids = SimpleNamespace(uuid4=lambda: uuid.UUID(int=user.rng.getrandbits(128), version=4))
    with ExitStack() as stack:
        for module, name, value in (
            (creating, "time", clock),
            (creating, "version", lambda _: "4.3.0"),
            (restoring, "time", clock),
            (rewinding, "time", clock),
            (filling, "uuid", ids),
        ):
            stack.enter_context(patch.object(module, name, value))
        yield


class Command(Driver):
    """One process of a command."""

    def __init__(self, user: User, line: Line, what: str, folder: MemoryFolder) -> None:
        super().__init__(user.world, Process(user.world, 0, line), "immediate")
        self.line = line
        self.spark = line.spark
        self.folder = folder
        self._user = user
        self._what = what

    def __str__(self) -> str:
        return f"d{self.number} {self._what}"

    def _query(self) -> None:
        getattr(self._user, f"_{self._what}")(self)


class User:
    """What the user does with savepoints.

    Attributes:
        is_on: whether this seed has any.
        half: a folder that a killed command has left, and the command.
    """

    def __init__(self, world: SimWorld) -> None:
        self.world = world
        self.rng = Random(f"savepoints {world.seed}")  # noqa: S311 - it makes schedules
        self.is_on = self.rng.random() < _SHARE_OF_SEEDS
        world.plan.command_rng = self.rng
        self.half: Command | None = None
        self._root = MemoryFolder(world, "memory:/savepoints", is_live=True)
        self._manifest: Manifest | None = None
        self._line: Line | None = None
        self._shares = self.rng.random() < 0.5
        self._last: Command | None = None
        self._made = 0
        self._sparks: list[Spark] = []
        self.todo: list[str] = []
        if self.is_on:
            more = self.rng.choice((["restore"], ["fork"], ["restore", "fork"]))
            self.todo = ["create", *self.rng.sample(more, k=len(more))]
            for _ in range(2):
                world.chosen.spark.add_batch()

    # -- the scheduler's side ----------------------------------------------------------------------

    def next_command(self) -> Command | None:
        """The command that the user runs now, if any."""
        if not self.todo or (self._last is not None and self._is_running(self._last)):
            return None
        what = self.todo[0]
        orders = self.world.pipelines["orders"]
        line = self._forked_line() if what == "fork" else orders
        self._last = Command(self, line, what, self._folder(what))
        self.world.trace(f"start of {self._last}")
        self.world.drivers.append(self._last)
        return self._last

    def note_end(self, command: Command) -> None:
        """Look at how the command has ended."""
        if command.outcome == "crashed" and command.folder.exists("metadata"):
            self.half = command
        if command.outcome == "crashed":
            self._see_whether_it_is_ready(command)
        refused = isinstance(command.outcome, SavepointError)
        if refused and self.todo and command is self._last:
            self.world.states.add(f"a {self.todo[0]} is refused")
            gives_up = self.todo[0] == "restore" and self.rng.random() < 0.5
            if gives_up and not self._must_go_on():
                self.todo.pop(0)

    def finish(self) -> None:
        """After all faults, run the commands that are left, or leave them."""
        last = self._last
        if last is not None and self._is_running(last) and self._must_go_on():
            last.die()
            self._see_whether_it_is_ready(last)
        for _ in range(_TRIES):
            if self.rng.random() < 0.1 and not self._must_go_on():
                return
            command = self.next_command()
            if command is None:
                return
            command.go()
            self.note_end(command)

    def choose(self) -> None:
        """Choose the pipeline, and mostly the right checkpoint, for the next start."""
        world, rng = self.world, self.rng
        if not self.is_on:
            return
        world.chosen = rng.choice([line for line in world.pipelines.values() if line.checkpoints])
        line = world.chosen
        if len(line.checkpoints) > 1 and rng.random() < 0.2:
            line.use(rng.choice(line.checkpoints))
            world.states.add("the user starts another checkpoint")
        line.spark.see_all_rows(rng)

    def choose_half(self) -> Spark | None:
        """Now and then the user starts a checkpoint whose restore was interrupted."""
        command, self.half = self.half, None
        if command is None or self.rng.random() < 0.5:
            return None
        self.world.states.add("half a checkpoint is started")
        self.world.chosen = command.line
        before = self.world.pipelines["orders"].spark
        return self._spark_of(command, before)

    def _spark_of(self, command: Command, before: Spark) -> Spark:
        """One Spark for each folder, also if it was started before its restore had ended."""
        found = next((s for s in self._sparks if s.folder is command.folder), None)
        if found is None:
            found = Spark.of_folder(command.line, command.folder, before, self.rng)
            self._sparks.append(found)
        return found

    # -- the commands ------------------------------------------------------------------------------

    def _create(self, command: Command) -> None:
        line = command.line
        spark = command.spark
        if any(d.paused_at for d in line.drivers() if not isinstance(d, Command)):
            self.world.states.add("a savepoint is made while a driver is paused")
        self._made += 1
        manifest = create(
            Savepoints(self._root),
            SimLog(line.disk),
            line.name,
            CheckpointFiles(spark.folder, spark.location),
            name=f"s{self._made}",
        )
        line.ledger.check_savepoint(manifest.batch, spark)
        self._manifest = manifest
        self._done("create")

    def _restore(self, command: Command) -> None:
        line = command.line
        decided = max(line.ledger.decided, default=-1)
        new = self._filling(command)
        restore(new, SimLog(line.disk))
        line.ledger.check_restored(new.manifest.batch, decided)
        if any(d.paused_at for d in line.drivers() if not isinstance(d, Command)):
            self.world.states.add("a savepoint is restored while the old driver is paused")
        line.use(self._spark_of(command, command.spark))
        self._done("restore")

    def _fork(self, command: Command) -> None:
        line = command.line
        shared = list(self.world.systems) if self._shares else ()
        fork(self._filling(command), targets_of(command.sinks), shared)
        orders = self.world.pipelines["orders"]
        line.use(self._spark_of(command, command.spark))
        where = "log" if line.disk is orders.disk else "log of its own"
        self.world.states.add(f"a fork runs, {'shared' * self._shares or 'own'} targets, {where}")
        self._done("fork")

    def _filling(self, command: Command) -> Filling:
        manifest, line = self._manifest, command.line
        assert manifest is not None
        place = Savepoints(self._root)
        return Filling(place, manifest, command.folder, line.name, lambda: SimLog(line.disk))

    def _forked_line(self) -> Line:
        """The fork, with its log; the user keeps both over all tries."""
        orders = self.world.pipelines["orders"]
        if self._line is None:
            disk = orders.disk if self.rng.random() < 0.5 else Disk(self.world, "1" * 16)
            target = orders.target if self._shares else "orders-b"
            self._line = Line(self.world, "orders-b", disk, target)
            self._line.spark = orders.spark  # until it has one
        return self._line

    def _done(self, what: str) -> None:
        if what in self.todo:
            self.todo.remove(what)
        self.half = None

    def _see_whether_it_is_ready(self, command: Command) -> None:
        """A restore that has made its last write was killed: its checkpoint is used."""
        head, bound = command.line.head, read_binding(command.folder)
        is_restored = head is not None and head.checkpoint == command.folder.location
        if is_restored and bound is not None and bound.log_id != RESTORING:
            command.line.use(self._spark_of(command, command.spark))
            self._done("restore")

    def _must_go_on(self) -> bool:
        """Whether a restore has or may have ended the old query, and its own cannot start yet."""
        orders = self.world.pipelines["orders"]
        ready = {spark.query_id for spark in orders.checkpoints}
        is_unknown = self._last is not None and isinstance(self._last.outcome, DecisionUnknownError)
        return is_unknown or (orders.head is not None and orders.head.query_id not in ready)

    def _is_running(self, command: Command) -> bool:
        return command.outcome is None and command.process.alive

    def _folder(self, what: str) -> MemoryFolder:
        """The folder of the try before, unless the user must give another one."""
        last = self._last
        is_again = last is not None and str(last).endswith(f" {what}")
        if last is not None and is_again and not any(s in str(last.outcome) for s in _AWAY):
            return last.folder
        number = len(self.world.drivers)
        return MemoryFolder(self.world, f"memory:/{what}{number}", is_live=True)
