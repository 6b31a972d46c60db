"""Simulated external systems, and their sinks.

    plain       a prepared branch stays until it is committed or aborted
    kafka       one transaction per name, and names leave out the batch; the server aborts a
                transaction after its timeout; abort and commit use the producer's epoch
    postgres    tasks stage rows, and `vote` merges them in one branch of the driver; the merge is a
                prepared transaction, or an open one that dies with its process and is repeated;
                if rows have keys, a prepared merge holds their locks

The state outlives every driver; a sink belongs to one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Never

from sparkonce.errors import (
    CommitUnresolvedError,
    PreparedBranchLostError,
    PrepareRejectedError,
    SparkOnceError,
)
from sparkonce.model import DRIVER_ATTEMPT, BranchId, Committable, Owner
from sparkonce.sinks.base import TwoPhaseCommitSink
from sparkonce.sinks.capabilities import CommitsMany, FindsBranches, Votes
from sparkonce.sinks.verbs import outcome_of_commit
from tests.simulation.world import OTHER_ROWS, World

if TYPE_CHECKING:
    from tests.simulation.drivers import Process
    from tests.simulation.lines import Line

KAFKA_TIMEOUT_S = 900.0
KAFKA_MARGIN_S = 60.0

Rows = tuple[int, ...]


@dataclass
class PreparedBranch:
    """A prepared branch."""

    branch_id: BranchId
    rows: Rows
    epoch: int = 0
    until: float | None = None
    holder: Process | None = None
    staging: tuple[str, ...] = ()


@dataclass
class System:
    """One external system.

    Attributes:
        prepared: by full branch id, the prepared branches, including staged rows.
        visible: by full branch id, the rows that readers see.
        gone: branches that the system lost.
        aborted: branches that a driver aborted.
        ever: every branch that was ever prepared.
        rows: the rows of each of those.
        lines: the pipeline whose driver has prepared it.
    """

    world: World
    name: str
    prepared: dict[str, PreparedBranch] = field(default_factory=dict)
    visible: dict[str, Rows] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    aborted: set[str] = field(default_factory=set)
    ever: set[str] = field(default_factory=set)
    rows: dict[str, Rows] = field(default_factory=dict)
    lines: dict[str, Line] = field(default_factory=dict)

    def prepare(self, branch_id: BranchId, rows: Rows) -> Committable:
        """Prepare a branch, as `preCommit` does."""
        self.put(PreparedBranch(branch_id, rows))
        return Committable(branch_id)

    def put(self, branch: PreparedBranch) -> None:
        full = str(branch.branch_id)
        self.world.require(full not in self.ever, f"I6: the name {full} is taken twice")
        self.prepared[full] = branch
        self.ever.add(full)
        self.rows[full] = branch.rows
        self.lines[full] = self.world.line

    def prepared_by(self, line: Line) -> list[str]:
        """The prepared branches of a pipeline."""
        return [full for full in self.prepared if self.lines[full] is line]

    def show(self, full: str, rows: Rows) -> None:
        self.prepared.pop(full, None)
        self.visible[full] = rows
        self.world.note("show", name=full)
        self.world.ledger.became_visible(self, full, rows)

    def end(self, full: str) -> None:
        """Abort the branch; if it is visible, do nothing."""
        if full in self.visible:
            return
        if full in self.prepared:
            self.world.ledger.aborted(self, full, self.prepared[full].branch_id)
            self.world.note("abort", name=full)
            del self.prepared[full]
        self.aborted.add(full)

    def forget(self, full: str) -> None:
        """Lose a prepared branch."""
        del self.prepared[full]
        self.gone.add(full)
        self.world.trace(f"{self.name} loses {full}")

    def drop(self, rng: Random) -> None:
        """Lose one prepared branch, or all; there is at least one."""
        names = list(self.prepared)
        for full in names if rng.random() < 0.3 else [rng.choice(names)]:
            self.forget(full)

    def lost(self, branch_id: BranchId) -> Never:
        self.world.note("lost", name=str(branch_id))
        raise PreparedBranchLostError(f"{branch_id} is gone", branch_id)


class Kafka(System):
    """Each prepared branch has an epoch, and ends only by a call with that epoch."""

    def expire(self) -> None:
        for full, branch in list(self.prepared.items()):
            if branch.until is not None and branch.until < self.world.clock:
                self.world.states.add("a prepared branch outlives its timeout")
                self.forget(full)

    def prepare(self, branch_id: BranchId, rows: Rows) -> Committable:
        epoch = 1 + len(self.ever)
        until = self.world.clock + KAFKA_TIMEOUT_S
        self.put(PreparedBranch(branch_id, rows, epoch, until))
        return Committable(branch_id, {"epoch": epoch}, safe_until=until - KAFKA_MARGIN_S)

    def of_epoch(self, committable: Committable) -> str | None:
        self.expire()
        for full, branch in self.prepared.items():
            if (branch.branch_id.name, branch.epoch) == (
                committable.branch_id.name,
                committable.payload["epoch"],
            ):
                return full
        return None


class Postgres(System):
    """Staged rows and merges are both in `prepared`; a merge has the names of its staged rows."""

    can_prepare = True
    has_keys = True

    def is_locked(self, rows: Rows) -> bool:
        """Whether another prepared merge holds the lock of one of the rows."""
        keys = {row % OTHER_ROWS for row in rows}
        held = {
            row % OTHER_ROWS
            for full, branch in self.prepared.items()
            if branch.branch_id.attempt == DRIVER_ATTEMPT and self.lines[full] is self.world.line
            for row in branch.rows
        }
        if self.has_keys and keys & held:
            self.world.states.add("a merge waits for the locks of another")
            return True
        return False

    def close(self, process: Process) -> None:
        """Drop the transactions that the dead process held open."""
        for full, branch in list(self.prepared.items()):
            if branch.holder is process:
                del self.prepared[full]
                self.world.states.add("an open merge dies with its process")

    def drop(self, rng: Random) -> None:
        names = list(self.prepared)
        full = rng.choice(names)
        branch = self.prepared[full]
        if branch.holder is not None:
            del self.prepared[full]  # its connection broke: no loss, since staging exists
            return
        for staged in branch.staging:
            if staged in self.prepared:
                self.forget(staged)
        for merge, other in list(self.prepared.items()):
            if full in other.staging:
                self.forget(merge)
        self.forget(full)

    def drop_staging(self, names: Iterable[str]) -> None:
        for full in names:
            self.prepared.pop(full, None)


class SimSink(TwoPhaseCommitSink[None], CommitsMany, FindsBranches):
    """The sink of `System`; the base of the others."""

    kind = "plain"

    def __init__(self, system: System, process: Process) -> None:
        super().__init__(name=system.name)
        self.system = system
        self.process = process
        self.world = system.world

    @property
    def target(self) -> str:
        return f"{self.kind}:{self.process.line.target}"

    def beginTransaction(self, branch_id: BranchId) -> None:
        raise NotImplementedError

    def write(self, handle: None, batch: object) -> None:
        raise NotImplementedError

    def preCommit(self, handle: None) -> Never:
        raise NotImplementedError

    def commit_many(self, committables: Sequence[Committable]) -> Sequence[SparkOnceError | None]:
        """Commit in a random order, since real commits run in parallel."""
        self.world.rng.shuffle(order := list(range(len(committables))))
        outcomes = {number: outcome_of_commit(self, committables[number]) for number in order}
        return [outcomes[number] for number in sorted(outcomes)]

    def commit(self, committable: Committable) -> None:
        assert self.world.driver is not None
        self.world.driver.tried.add(str(committable.branch_id))
        self.world.call(f"{self.name}.commit", lambda: self._commit(committable))

    def _commit(self, committable: Committable) -> None:
        full = str(committable.branch_id)
        branch = self.system.prepared.get(full)
        if branch is not None:
            self.system.show(full, branch.rows)
        elif full not in self.system.visible:
            self.system.lost(committable.branch_id)

    def abort(self, branch: BranchId | Committable) -> None:
        assert isinstance(branch, Committable)
        self.world.call(f"{self.name}.abort", lambda: self._abort(branch))

    def _abort(self, committable: Committable) -> None:
        self.system.end(str(committable.branch_id))

    def find_branches(self, owner: Owner) -> Iterable[Committable]:
        return self.world.call(f"{self.name}.find_branches", lambda: list(self._find(owner)))

    def _find(self, owner: Owner) -> Iterator[Committable]:
        for branch in self.system.prepared.values():
            if branch.branch_id.owner == owner:
                yield Committable(branch.branch_id)


class KafkaSink(SimSink):
    kind = "kafka"
    system: Kafka

    def _commit(self, committable: Committable) -> None:
        full = self.system.of_epoch(committable)
        if full is not None:
            self.system.show(full, self.system.prepared[full].rows)
        elif str(committable.branch_id) not in self.system.visible:  # the marker's metadata
            self.system.lost(committable.branch_id)

    def _abort(self, committable: Committable) -> None:
        full = self.system.of_epoch(committable)
        if full is not None:
            self.system.end(full)

    def _find(self, owner: Owner) -> Iterator[Committable]:
        self.system.expire()
        for branch in self.system.prepared.values():
            seen = BranchId.from_name(branch.branch_id.name)
            if seen is not None and seen.owner == owner:
                yield Committable(seen, {"epoch": branch.epoch})


class PostgresSink(SimSink, Votes):
    kind = "postgres"
    system: Postgres

    def vote(
        self, branch_id: BranchId, committables: Sequence[Committable]
    ) -> Sequence[Committable]:
        if not committables:
            return ()
        return self.world.call(
            "postgres.prepare_batch", lambda: self._merge(branch_id, committables)
        )

    def _merge(
        self, branch_id: BranchId, committables: Sequence[Committable]
    ) -> tuple[Committable, ...]:
        names = tuple(str(committable.branch_id) for committable in committables)
        if not self._are_staged(names):
            raise PrepareRejectedError("a staging table is gone", branch_id)
        rows = self._rows(names)
        if self.system.is_locked(rows):
            raise PrepareRejectedError("lock timeout", branch_id)
        holder = None if self.system.can_prepare else self.process
        self.system.put(PreparedBranch(branch_id, rows, holder=holder, staging=names))
        self.world.note(
            "prepare",
            batch=branch_id.batch_id,
            sink=self.name,
            part="merge",
            name=str(branch_id),
        )
        return (Committable(branch_id, {"staging": list(names)}),)

    def _are_staged(self, names: Sequence[str]) -> bool:
        return all(name in self.system.prepared for name in names)

    def _rows(self, names: Sequence[str]) -> Rows:
        return tuple(row for name in names for row in self.system.prepared[name].rows)

    def _commit(self, committable: Committable) -> None:
        full = str(committable.branch_id)
        names = tuple(committable.payload["staging"])  # type: ignore[arg-type]
        branch = self.system.prepared.get(full)
        if full not in self.system.visible:
            if branch is not None:
                if branch.holder is not None and branch.holder is not self.process:
                    del self.system.prepared[full]  # the server ends its session
                    self.world.states.add("another process holds the merge that is committed")
                    raise CommitUnresolvedError("another session has it", committable.branch_id)
                self.system.show(full, branch.rows)
            elif self._are_staged(names):
                if self.system.is_locked(self._rows(names)):
                    raise CommitUnresolvedError("lock timeout", committable.branch_id)
                self.world.states.add("a merge is repeated from staging")
                self.system.show(full, self._rows(names))
            else:
                self.system.lost(committable.branch_id)
        if not self.world.plan.is_on or self.world.rng.random() < 0.9:
            self.system.drop_staging(names)  # best effort: a reader may hold a lock

    def _abort(self, committable: Committable) -> None:
        full = str(committable.branch_id)
        if committable.branch_id.attempt != DRIVER_ATTEMPT and any(
            full in branch.staging for branch in self.system.prepared.values()
        ):
            raise CommitUnresolvedError("a merge locks the staging", committable.branch_id)
        self.system.end(full)
        for staged in committable.payload.get("staging", ()):  # type: ignore[union-attr]
            self.system.end(str(staged))

    def _find(self, owner: Owner) -> Iterator[Committable]:
        """List merges first, as they lock their staging."""
        mine = [s for s in self.system.prepared.values() if s.branch_id.owner == owner]
        for branch in sorted(mine, key=lambda s: s.branch_id.attempt != DRIVER_ATTEMPT):
            yield Committable(branch.branch_id)


SINK_OF = {"plain": SimSink, "kafka": KafkaSink, "postgres": PostgresSink}
SYSTEM_OF = {"plain": System, "kafka": Kafka, "postgres": Postgres}
