"""Simulated external systems, and the sinks that speak with them.

    plain       a prepared branch stays until it is committed or aborted
    kafka       one transaction per name, and names leave the batch out; a transaction that outlives
                its timeout is aborted by the server; abort and commit go by the producer's epoch
    postgres    tasks stage, `vote` merges all of it in one driver's branch; the merge is a
                prepared transaction, or an open one that dies with its process and is made again;
                where rows have keys, a merge that stands holds their locks

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

KAFKA_TIMEOUT_S = 900.0
KAFKA_MARGIN_S = 60.0

Rows = tuple[int, ...]


@dataclass
class Standing:
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
        prepared: by full branch id, what stands and is not visible (staged rows among it).
        visible: by full branch id, what readers see.
        gone: branches that the system lost.
        aborted: branches that a driver has aborted.
        ever: every branch that was ever prepared.
        rows: what each of those held.
    """

    world: World
    name: str
    prepared: dict[str, Standing] = field(default_factory=dict)
    visible: dict[str, Rows] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    aborted: set[str] = field(default_factory=set)
    ever: set[str] = field(default_factory=set)
    rows: dict[str, Rows] = field(default_factory=dict)

    def stand(self, branch_id: BranchId, rows: Rows) -> Committable:
        """What `preCommit` leaves behind."""
        self.put(Standing(branch_id, rows))
        return Committable(branch_id)

    def put(self, standing: Standing) -> None:
        full = str(standing.branch_id)
        self.world.require(full not in self.ever, f"I6: the name {full} is taken twice")
        self.prepared[full] = standing
        self.ever.add(full)
        self.rows[full] = standing.rows

    def show(self, full: str, rows: Rows) -> None:
        self.prepared.pop(full, None)
        self.visible[full] = rows
        self.world.ledger.became_visible(self, full, rows)

    def end(self, full: str) -> None:
        """Abort; what is visible stays so."""
        if full in self.visible:
            return
        if full in self.prepared:
            self.world.ledger.aborted(self, full, self.prepared[full].branch_id)
            del self.prepared[full]
        self.aborted.add(full)

    def forget(self, full: str) -> None:
        """Lose a prepared branch."""
        del self.prepared[full]
        self.gone.add(full)
        self.world.say(f"{self.name} loses {full}")

    def drop(self, rng: Random) -> None:
        """Lose one of the branches that stand, or all; there is one."""
        names = list(self.prepared)
        for full in names if rng.random() < 0.3 else [rng.choice(names)]:
            self.forget(full)

    def lost(self, branch_id: BranchId) -> Never:
        raise PreparedBranchLostError(f"{branch_id} is gone", branch_id)


class Kafka(System):
    """Transactions of `prepared` by their name; the newest epoch of a name fences the others."""

    def expire(self) -> None:
        for full, standing in list(self.prepared.items()):
            if standing.until is not None and standing.until < self.world.clock:
                self.world.states.add("a prepared branch outlives its timeout")
                self.forget(full)

    def stand(self, branch_id: BranchId, rows: Rows) -> Committable:
        epoch = 1 + len(self.ever)
        until = self.world.clock + KAFKA_TIMEOUT_S
        self.put(Standing(branch_id, rows, epoch, until))
        return Committable(branch_id, {"epoch": epoch}, safe_until=until - KAFKA_MARGIN_S)

    def of_epoch(self, committable: Committable) -> str | None:
        self.expire()
        for full, standing in self.prepared.items():
            if (standing.branch_id.name, standing.epoch) == (
                committable.branch_id.name,
                committable.payload["epoch"],
            ):
                return full
        return None


class Postgres(System):
    """Staged rows and merges, both under `prepared`; merges have their staging's names."""

    can_prepare = True
    has_keys = True

    def is_locked(self, rows: Rows) -> bool:
        """Whether another merge that stands holds the lock of one of the rows."""
        keys = {row % OTHER_ROWS for row in rows}
        held = {
            row % OTHER_ROWS
            for standing in self.prepared.values()
            if standing.branch_id.attempt == DRIVER_ATTEMPT
            for row in standing.rows
        }
        if self.has_keys and keys & held:
            self.world.states.add("a merge waits for the locks of another")
            return True
        return False

    def close(self, process: Process) -> None:
        """The process is gone, and with it the transactions that it held open."""
        for full, standing in list(self.prepared.items()):
            if standing.holder is process:
                del self.prepared[full]
                self.world.states.add("an open merge dies with its process")

    def drop(self, rng: Random) -> None:
        names = list(self.prepared)
        full = rng.choice(names)
        standing = self.prepared[full]
        if standing.holder is not None:
            del self.prepared[full]  # its connection broke: no loss, staging is there
            return
        for staged in standing.staging:
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

    def beginTransaction(self, branch_id: BranchId) -> None:
        raise NotImplementedError

    def write(self, handle: None, batch: object) -> None:
        raise NotImplementedError

    def preCommit(self, handle: None) -> Never:
        raise NotImplementedError

    def commit_many(self, committables: Sequence[Committable]) -> Sequence[SparkOnceError | None]:
        """All at once means in any order."""
        self.world.rng.shuffle(order := list(range(len(committables))))
        outcomes = {number: outcome_of_commit(self, committables[number]) for number in order}
        return [outcomes[number] for number in sorted(outcomes)]

    def commit(self, committable: Committable) -> None:
        assert self.world.driver is not None
        self.world.driver.tried.add(str(committable.branch_id))
        self.world.call(f"{self.name}.commit", lambda: self._commit(committable))

    def _commit(self, committable: Committable) -> None:
        full = str(committable.branch_id)
        standing = self.system.prepared.get(full)
        if standing is not None:
            self.system.show(full, standing.rows)
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
        for standing in self.system.prepared.values():
            if standing.branch_id.owner == owner:
                yield Committable(standing.branch_id)


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
        for standing in self.system.prepared.values():
            seen = BranchId.from_name(standing.branch_id.name)
            if seen is not None and seen.owner == owner:
                yield Committable(seen, {"epoch": standing.epoch})


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
        self.system.put(Standing(branch_id, rows, holder=holder, staging=names))
        return (Committable(branch_id, {"staging": list(names)}),)

    def _are_staged(self, names: Sequence[str]) -> bool:
        return all(name in self.system.prepared for name in names)

    def _rows(self, names: Sequence[str]) -> Rows:
        return tuple(row for name in names for row in self.system.prepared[name].rows)

    def _commit(self, committable: Committable) -> None:
        full = str(committable.branch_id)
        names = tuple(committable.payload["staging"])  # type: ignore[arg-type]
        standing = self.system.prepared.get(full)
        if full not in self.system.visible:
            if standing is not None:
                if standing.holder is not None and standing.holder is not self.process:
                    del self.system.prepared[full]  # its session is ended
                    self.world.states.add("another process holds the merge that is committed")
                    raise CommitUnresolvedError("another session is at it", committable.branch_id)
                self.system.show(full, standing.rows)
            elif self._are_staged(names):
                if self.system.is_locked(self._rows(names)):
                    raise CommitUnresolvedError("lock timeout", committable.branch_id)
                self.world.states.add("a merge is made again from staging")
                self.system.show(full, self._rows(names))
            else:
                self.system.lost(committable.branch_id)
        if not self.world.plan.is_on or self.world.rng.random() < 0.9:
            self.system.drop_staging(names)  # best effort: somebody may read them

    def _abort(self, committable: Committable) -> None:
        full = str(committable.branch_id)
        if committable.branch_id.attempt != DRIVER_ATTEMPT and any(
            full in standing.staging for standing in self.system.prepared.values()
        ):
            raise CommitUnresolvedError("a merge locks the staging", committable.branch_id)
        self.system.end(full)
        for staged in committable.payload.get("staging", ()):  # type: ignore[union-attr]
            self.system.end(str(staged))

    def _find(self, owner: Owner) -> Iterator[Committable]:
        """Merges first, as they lock their staging."""
        mine = [s for s in self.system.prepared.values() if s.branch_id.owner == owner]
        for standing in sorted(mine, key=lambda s: s.branch_id.attempt != DRIVER_ATTEMPT):
            yield Committable(standing.branch_id)


SINK_OF = {"plain": SimSink, "kafka": KafkaSink, "postgres": PostgresSink}
SYSTEM_OF = {"plain": System, "kafka": Kafka, "postgres": Postgres}
