"""The invariants I1 to I8, checked at every change of the world.

The ledger sees everything: each write of the log, each branch that becomes visible or is aborted,
each step of Spark's commit log. Its checks trust only the simulated systems, never the code under
test.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from sparkonce.errors import PreparedBranchLostError
from sparkonce.model import DRIVER_ATTEMPT, BranchId, Committable
from sparkonce.txn_log.record import Head, State, TransactionRecord
from sparkonce.txn_log.settlement import Ruling
from tests.simulation.systems import System
from tests.simulation.world import OTHER_ROWS

if TYPE_CHECKING:
    from tests.simulation.drivers import Driver, SimWorld
    from tests.simulation.lines import Line
    from tests.simulation.spark import Spark


class Ledger:
    """Records what happened, and fails the seed if it may not happen."""

    def __init__(self, world: SimWorld, line: Line) -> None:
        self.world = world
        self.line = line
        self.decided: set[int] = set()
        self.complete: set[int] = set()
        self.named: dict[str, TransactionRecord] = {}
        """Full ids of all branches that an unfinished record names."""
        self.shown: dict[str, set[int]] = {name: set() for name in world.systems}
        self.zombies: set[str] = set()
        self.rulings: dict[str, Ruling] = {}
        self.by_ruling: dict[str, list[int]] = {name: [] for name in world.systems}
        """By system, the rows that an operator inserted manually or abandoned."""
        self.crashed = 0
        self._begun_at = 0

    # -- the log -----------------------------------------------------------------------------------

    def begins(self, old: Head | None, new: Head) -> None:
        self.world.require(
            new.token == (1 if old is None else old.token + 1), "I6: a token is taken twice"
        )
        is_other = old is not None and old.run_id != new.run_id
        if new.run_id.isdecimal():  # and not an operator's
            driver = self.world.drivers[int(new.run_id)]
            self.world.require(
                not is_other or driver.first_look >= self._begun_at,
                f"I6: {driver} was paused since it looked, and fences its successor",
            )
        if is_other or old is None:
            self._begun_at = self.world.steps
        self.world.note("begin")

    def writes(self, old: TransactionRecord | None, new: TransactionRecord) -> None:
        world, batch_id = self.world, new.id.batch_id
        driver = world.driver
        assert driver is not None
        head = self.line.head
        assert head is not None
        world.require(
            driver.token in {None, head.token},
            f"I6: {driver} writes {new.state} of batch {batch_id} after token {head.token}",
        )
        world.trace(f"log: batch {batch_id} {new.state} revision {new.revision} token {new.token}")
        if old != new:
            world.note("record", batch=batch_id, state=str(new.state), names=sorted(_names(new)))
        was = None if old is None else old.state
        match was, new.state:
            case ((None | State.ABANDONED), (State.PREPARED | State.DECIDED)):
                self._first(old, new)
            case State.PREPARED, (State.DECIDED | State.ABANDONED):
                assert old is not None
                world.require(_names(old) == _names(new), "I3: a prepared record changed")
                if new.state is State.DECIDED:
                    self._follows_spark(new, driver)
                else:
                    world.require(
                        driver.token != new.token, f"I5: {driver} abandons its own prepared batch"
                    )
            case State.DECIDED, State.DECIDED:
                assert old is not None
                if new.settled == old.settled:
                    self._amends(old, new)
                else:
                    self._settles(old, new)
            case State.DECIDED, (State.COMPLETE | State.SETTLED):
                assert old is not None
                self._completes(old, new)
            case _:
                world.fail(f"I3: batch {batch_id} turns from {was} to {new.state}")
        if new.state in {State.DECIDED, State.COMPLETE, State.SETTLED}:
            self.decided.add(batch_id)
        self._note(old, new)

    def _note(self, old: TransactionRecord | None, new: TransactionRecord) -> None:
        if old is not None:
            for full in (*_names(old), *_parts(old)):
                self.named.pop(full, None)
        if new.state.is_unfinished:
            self.named |= dict.fromkeys((*_names(new), *_parts(new)), new)

    def _follows_spark(self, record: TransactionRecord, driver: Driver) -> None:
        batch_id = record.id.batch_id
        self.world.require(
            self.world.spark.committed() >= batch_id,
            f"I5: prepared batch {batch_id} is decided before Spark's checkpoint has it",
        )
        if driver.token != record.token:
            self.world.states.add("a newer driver decides a batch that an older one prepared")

    def _first(self, old: TransactionRecord | None, new: TransactionRecord) -> None:
        world, batch_id, driver = self.world, new.id.batch_id, self.world.driver
        assert driver is not None
        if old is not None:
            world.states.add("an abandoned batch is replayed")
        undecided = self._undecided_before(batch_id)
        world.require(not undecided, f"I5: batch {batch_id} follows undecided {undecided}")
        for committable in new.committables():
            system, full = self._where(committable)
            world.require(full in system.ever, f"I2: {full} is decided and was never prepared")
            world.require(full not in system.aborted, f"I7: {full} was aborted and is decided")
            world.require(full not in system.visible, f"I2: {full} was visible before its decision")
            world.require(
                committable.safe_until is None or committable.safe_until > driver.looked_at,
                f"I2: {full} is decided without a check that it is still safe",
            )
        ids = Counter(
            row % OTHER_ROWS for partition in world.spark.source[batch_id] for row in partition
        )
        for name, share in new.shares.items():
            world.require(
                share.rows == ids.total(), f"I2: {name} has {share.rows} rows of {ids.total()}"
            )

    def _amends(self, old: TransactionRecord, new: TransactionRecord) -> None:
        world = self.world
        before, after = _names(old), _names(new)
        world.require(new.revision == old.revision + 1, "I3: an amendment skips a revision")
        out = before - after
        world.require(out, "I3: an amendment replaces nothing")
        listed = {str(c.branch_id) for c in new.lost} - {str(c.branch_id) for c in old.lost}
        world.require(out == listed, "I3: an amendment does not list what it replaces")
        for committable in old.committables():
            system, full = self._where(committable)
            if full in out:
                world.require(full not in system.visible, f"I3: {full} is replaced and visible")
                world.require(full not in system.prepared, f"I3: {full} is replaced and prepared")
        for name, share in new.shares.items():
            world.require(share.rows == old.shares[name].rows, "I3: an amendment changes the rows")
            whole = not {str(c.branch_id) for c in share.committables} & before
            if share != old.shares[name]:
                world.states.add(
                    "a whole sink is rewritten" if whole else "one branch is rewritten"
                )
                if whole and new.id.batch_id in world.spark.repartitioned:
                    world.states.add("a whole sink is rewritten from other partitions")
        if new.revision > 1:
            world.states.add("a branch is lost twice")

    def _completes(self, old: TransactionRecord, new: TransactionRecord) -> None:
        self.world.require(_names(old) == _names(new), "I3: a decision changed when it completed")
        self.world.require(
            (new.state is State.SETTLED) == bool(new.settled),
            f"I3: {new.id} ends as {new.state} with {len(new.settled)} rulings",
        )
        for committable in new.committables():
            system, full = self._where(committable)
            if full in self.rulings:
                self.world.require(
                    full not in system.prepared, f"I7: {full} is settled and still prepared"
                )
                continue
            self.world.require(full in system.visible, f"I1: complete, but {full} is not visible")
        self.complete.add(new.id.batch_id)
        if new.settled:
            self.world.states.add("a batch ends by an operator's ruling")

    def _settles(self, old: TransactionRecord, new: TransactionRecord) -> None:
        world = self.world
        world.require(
            replace(new, settled=old.settled) == old, "I3: a ruling changes the rest of the record"
        )
        world.require(
            new.settled[: len(old.settled)] == old.settled, "I3: an earlier ruling is gone"
        )

    def is_ruled_on(self, branch_id: BranchId, ruling: Ruling) -> None:
        """An operator is about to record the ruling on a branch that is not visible."""
        full, system = str(branch_id), self.world.systems[branch_id.sink]
        self.world.trace(f"an operator settles {full} as {ruling}")
        if full in system.prepared:
            self.world.states.add("an operator settles a prepared branch")
        if full not in self.rulings:
            rows = system.rows[full]
            self.by_ruling[branch_id.sink] += rows
            self.shown[branch_id.sink] |= {row % OTHER_ROWS for row in rows}
        self.rulings[full] = ruling

    def forgets(self, record: TransactionRecord) -> None:
        above = any(batch_id > record.id.batch_id for batch_id in self.complete)
        self.world.require(above, f"I3: {record.id} is forgotten and nothing above is complete")

    # -- branches ----------------------------------------------------------------------------------

    def became_visible(self, system: System, full: str, rows: tuple[int, ...]) -> None:
        world = self.world
        record = self.named.get(full)
        world.require(
            system.lines[full] is self.line, f"I6: {full} is another pipeline's, and is committed"
        )
        named = record is not None and record.state is State.DECIDED and full in _names(record)
        world.require(named, f"I2: {full} becomes visible and no decision names it")
        world.require(full not in system.aborted, f"I7: {full} was aborted and becomes visible")
        ids = {row % OTHER_ROWS for row in rows}
        again = ids & self.shown[system.name]
        world.require(not again, f"I4: rows {sorted(again)} of {system.name} are visible twice")
        self.shown[system.name] |= ids

    def aborted(self, system: System, full: str, branch_id: BranchId) -> None:
        world, driver = self.world, self.world.driver
        self.world.require(
            system.lines[full] is self.line, f"I6: {full} is another pipeline's, and is aborted"
        )
        record = self.named.get(full)
        is_ruled = record is not None and self._is_ruled_on(record, full)
        world.require(record is None or is_ruled, f"I1: {full} is aborted and a record names it")
        if driver is not None and driver.token is not None:
            world.require(
                branch_id.token <= driver.token, f"I6: {driver} aborts {full} of a younger driver"
            )
        if full in self.zombies:
            world.states.add("a sweep finds a branch of an executor zombie")
        world.trace(f"{system.name} aborts {full}")

    def _is_ruled_on(self, record: TransactionRecord, full: str) -> bool:
        """Whether the branch is settled, or the driver's branch that was merged from it."""
        for share in record.shares.values():
            parts = {f"{part.branch}b{record.id.batch_id}." for part in share.parts}
            for committable in share.committables:
                own = str(committable.branch_id)
                of_driver = committable.branch_id.attempt == DRIVER_ATTEMPT and full in parts
                if own in self.rulings and (own == full or of_driver):
                    return True
        return False

    def _where(self, committable: Committable) -> tuple[System, str]:
        return self.world.systems[committable.branch_id.sink], str(committable.branch_id)

    # -- Spark -------------------------------------------------------------------------------------

    def batch_begins(self, batch_id: int) -> None:
        undecided = self._undecided_before(batch_id)
        self.world.require(
            not undecided, f"I5: batch {batch_id} is written, {undecided} is undecided"
        )

    def drained(self, batch_id: int) -> None:
        self.world.require(
            batch_id in self.decided, f"I5: batch {batch_id} is drained and was never decided"
        )

    def spark_commits(self, batch_id: int) -> None:
        """A zombie's Spark may pass an abandoned batch: the identity guard stops the next start."""
        world = self.world
        assert world.driver is not None
        world.require(
            batch_id in world.driver.consumed,
            f"I5: {world.driver} did not read batch {batch_id}, so Spark's own state lags",
        )
        record = self.line.record(world.spark, batch_id)
        state = None if record is None else record.state
        if batch_id in self.decided:
            # Nothing holds back the Spark of a zombie that prepared the batch and was replaced.
            may_pass = world.driver.policy == "after_checkpoint"
            world.require(
                may_pass or state in {None, State.COMPLETE, State.SETTLED},
                f"I5: batch {batch_id} is decided and unfinished, and Spark will not replay it",
            )
            return
        head = self.line.head
        is_zombie = head is not None and head.token != world.driver.token
        is_held = state is State.PREPARED or (state is State.ABANDONED and is_zombie)
        world.require(is_held, f"I5: Spark commits batch {batch_id}, which is {state}")
        if state is State.ABANDONED:
            world.states.add("a zombie's Spark commits an abandoned batch")

    def _undecided_before(self, batch_id: int) -> list[int]:
        return [b for b in range(self.world.spark.first, batch_id) if b not in self.decided]

    # -- interesting states ------------------------------------------------------------------------

    def crashes(self, driver: Driver) -> None:
        self._note_partial_commits()
        if driver.is_recovering and self.crashed:
            self.world.states.add("a second crash inside recovery")
        self.crashed += 1

    def resumes(self, driver: Driver) -> None:
        newest = 0 if self.line.head is None else self.line.head.token
        if driver.token is not None and driver.token < newest:
            if driver.paused_at in {"decide.after", "commit.before"}:
                self.world.states.add("a zombie resumes between decision and commit")
            elif driver.paused_at in {"decide.before", "log.decide", "log.prepare"}:
                self.world.states.add("a zombie resumes before its decision")
            elif driver.paused_at in {"amend.before", "log.amend", "rewrite.before"}:
                self.world.states.add("a zombie resumes inside a rewrite")
            elif driver.paused_at and driver.paused_at.endswith(("abort", "find_branches")):
                self.world.states.add("a zombie resumes inside a sweep")
        if sum(d.outcome is None and d.leader is d for d in self.line.drivers()) > 2:
            self.world.states.add("three drivers are alive")

    def _note_partial_commits(self) -> None:
        for record in {id(r): r for r in self.named.values()}.values():
            if record.state is not State.DECIDED:
                continue
            done = [
                all(self._where(c)[1] in self._where(c)[0].visible for c in share.committables)
                for share in record.shares.values()
                if share.committables
            ]
            if 0 < sum(done) < len(done):
                self.world.states.add(f"decided, {sum(done)} of {len(done)} sinks committed")

    # -- savepoints --------------------------------------------------------------------------------

    def check_savepoint(self, batch_id: int, spark: Spark) -> None:
        """A savepoint has been made that ends with the batch."""
        self.world.require(
            batch_id in self.complete, f"I5: a savepoint holds batch {batch_id}, not complete"
        )
        self.world.require(
            batch_id in spark.commits, f"I5: a savepoint holds batch {batch_id}, not committed"
        )

    def check_restored(self, batch_id: int, decided: int) -> None:
        """A savepoint has been restored; `decided` was the newest batch when that began."""
        self.world.require(
            decided <= batch_id,
            f"I5: a savepoint of batch {batch_id} is restored, and batch {decided} was decided",
        )

    # -- the end -----------------------------------------------------------------------------------

    def reports_loss(self, error: PreparedBranchLostError) -> None:
        """A driver reports a loss: an operator will act on what it says of the replay."""
        branch_id, spark = error.branch_id, self.world.spark
        if branch_id is not None and "Spark's replay differs" in str(error):
            changed = spark.other_rows | spark.repartitioned
            self.world.require(
                branch_id.batch_id in changed,
                f"I3: the replay of {branch_id} is reported to differ, and does not: {error}",
            )

    def check_stopped(self, error: PreparedBranchLostError) -> None:
        """After a loss that cannot be rewritten, the pipeline stops with an error."""
        world = self.world
        branch_id = error.branch_id
        world.require(branch_id is not None, "I8: the error names no branch")
        assert branch_id is not None
        assert branch_id.batch_id is not None
        batch_id = branch_id.batch_id
        record = self.named.get(str(branch_id))
        world.require(record is not None, f"I1: {branch_id} is reported lost; no record names it")
        assert record is not None
        held_in = {str(branch_id)} | (
            _parts(record) if branch_id.attempt == DRIVER_ATTEMPT else set()
        )
        lost = held_in & world.systems[branch_id.sink].gone
        world.require(lost, f"I1: {branch_id} is reported lost and is not")
        excused = (
            world.spark.committed() >= batch_id
            or batch_id in world.spark.other_rows
            or batch_id in world.spark.repartitioned
        )
        world.require(excused, f"I1: {branch_id} could be rewritten: {error}")
        world.require(not any(b > batch_id for b in self.decided), "I5: batches follow a loss")
        world.states.add("a loss that cannot be rewritten stops the pipeline")

    def check_end(self) -> None:
        """Every sink has every row of the source once, with the same values; nothing is left."""
        world = self.world
        unfinished = self.line.unfinished()
        world.require(not unfinished, f"I8: {unfinished} is unfinished at the end")
        source = Counter(
            row % OTHER_ROWS
            for partitions in world.spark.source.values()
            for partition in partitions
            for row in partition
        )
        values = set()
        for name, system in world.systems.items():
            rows = Counter(
                row
                for full, part in system.visible.items()
                if system.lines[full] is self.line
                for row in part
            )
            rows.update(self.by_ruling[name])
            ids: Counter[int] = Counter()
            for row, count in rows.items():
                ids[row % OTHER_ROWS] += count
            world.require(ids == source, f"I4, I5: {name} shows {ids - source} / {source - ids}")
            values.add(tuple(sorted(rows)))
            left = system.prepared_by(self.line)
            world.require(not left, f"I8: {name} keeps {left}")
        world.require(len(values) == 1, f"I1: the sinks show different rows: {values}")


def _names(record: TransactionRecord) -> set[str]:
    return {str(committable.branch_id) for committable in record.committables()}


def _parts(record: TransactionRecord) -> set[str]:
    batch_id = record.id.batch_id
    return {
        f"{part.branch}b{batch_id}." for share in record.shares.values() for part in share.parts
    }
