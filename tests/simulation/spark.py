"""A Spark of a few lines: it replays batch N until its commit log has N, and runs tasks.

offsets/N is written before batch N runs, commits/N after it. Each is written once: a second write
fails, as in Spark's checkpoint. Several drivers may use one checkpoint: all but one are zombies.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Self

from sparkonce.errors import BatchInterruptedError, PrepareRejectedError
from sparkonce.model import BranchId, Committable
from sparkonce.protocol.rewriting import Rewrite
from sparkonce.sinks.capabilities import Votes
from sparkonce.spark_hooks.binding import Binding, read_binding
from sparkonce.spark_hooks.partition_writer import PartitionSummary, shares_of
from sparkonce.txn_log.record import Fingerprint, Incarnation, Part, Share
from tests.simulation.lines import Line, MemoryFolder
from tests.simulation.systems import SimSink
from tests.simulation.world import OTHER_ROWS, TaskFailed
from tests.support.world import row_hash

if TYPE_CHECKING:
    from tests.simulation.drivers import Driver, SimWorld

Partitions = list[list[int]]

QUERY_ID = "11111111-2222-3333-4444-555555555555"

_COMMIT = "v1\n{}"


def _offsets(text: str) -> str:
    return f"v1\n{{}}\n{text}"


def _numbers(folder: MemoryFolder, kind: str) -> list[int]:
    return [int(name) for name in folder.files(kind)]


class SparkError(Exception):
    """Spark itself fails the query."""


class Spark:
    """The checkpoint of one query, and how it cuts the source into batches.

    Attributes:
        first: the first batch that the pipeline delivers.
        source: row ids by batch; a replay may give them other values.
        end: the batch after the last one of the source.
        commits: the batches in the commit log.
        folder: the checkpoint's files.
    """

    def __init__(self, world: SimWorld, line: Line, folder: MemoryFolder, first: int) -> None:
        self.world = world
        self.line = line
        self.folder = folder
        self.first = self.end = first
        self.source: dict[int, Partitions] = {}
        self._ends: dict[int, int] = {}
        self.commits = set(_numbers(folder, "commits"))
        self.written_offsets = set(_numbers(folder, "offsets"))
        self.query_id = str(json.loads(folder.read("metadata") or "{}").get("id"))

    @classmethod
    def fresh(cls, world: SimWorld, line: Line) -> Self:
        """The checkpoint of the first query, which has a log already, and its source."""
        first = world.rng.choice((0, 0, 0, 0, 63))
        folder = MemoryFolder(world, "memory:/checkpoint")
        folder.put("metadata", json.dumps({"id": QUERY_ID}))
        folder.put(
            "sparkonce.json", json.dumps({"log_id": line.disk.log_id, "pipeline": line.name})
        )
        if first:
            folder.put(f"offsets/{first - 1}", _offsets("0"))
            folder.put(f"commits/{first - 1}", _COMMIT)
        line.adopt = (f"batch {first}",)
        spark = cls(world, line, folder, first)
        for _ in range(world.rng.choice((1, 2, 2, 3))):
            spark.add_batch()
        return spark

    @classmethod
    def of_folder(cls, line: Line, folder: MemoryFolder, before: Spark, rng: Random) -> Self:
        """What Spark makes of a checkpoint's files; `before` has planned its batches.

        It plans the later ones again, with other ends or the same.
        """
        begun = max(_numbers(folder, "offsets"), default=-1)
        first = before.first if line is before.line else begun + 1
        spark = cls(before.world, line, folder, first)
        spark.end = max(begun + 1, first)
        is_same = rng.random() < 0.5
        for batch in range(before.first, before.end):
            end = before._ends[batch]
            if batch <= begun or is_same:
                if batch > begun or line is before.line:
                    spark.source[batch] = [list(rows) for rows in before.source[batch]]
                spark._ends[batch] = end
                spark.end = max(spark.end, batch + 1)
        if line is not before.line:
            line.other_rows |= before.line.other_rows
            line.rows = max(line.rows, before.line.rows)
        while not is_same and spark._last < line.rows:
            spark._plan(min(line.rows, spark._last + rng.choice((1, 2, 5))), rng)
        return spark

    @property
    def _last(self) -> int:
        """The last row of the source that a batch has."""
        return self._ends.get(self.end - 1, 0)

    def _plan(self, last: int, rng: Random) -> None:
        """Cut one batch that ends with the row."""
        partitions: Partitions = [[] for _ in range(rng.choice((1, 2, 2, 3)))]
        for row in range(self._last + 1, last + 1):
            rng.choice(partitions).append(row)
        self.source[self.end] = partitions
        self._ends[self.end] = last
        self.line.repartitioned.add(self.end)
        self.end += 1

    def see_all_rows(self, rng: Random) -> None:
        """Plan a batch for rows that the source has had since, if any."""
        if self._last < self.line.rows:
            self._plan(self.line.rows, rng)

    def add_batch(self) -> None:
        """Let the source have one more batch."""
        rng = self.world.rng
        partitions: Partitions = [[] for _ in range(rng.choice((1, 2, 2, 3)))]
        for _ in range(rng.choice((0, 2, 3, 4))):
            self.line.rows += 1
            rng.choice(partitions).append(self.line.rows)
        self.source[self.end] = partitions
        self._ends[self.end] = self.line.rows
        self.end += 1

    @property
    def other_rows(self) -> set[int]:
        return self.line.other_rows

    @property
    def repartitioned(self) -> set[int]:
        return self.line.repartitioned

    @property
    def location(self) -> str:
        return self.folder.location

    def binding(self) -> Binding:
        """What the checkpoint belongs to."""
        found = read_binding(self.folder)
        assert found is not None
        return found

    def offsets_of(self, batch_id: int) -> tuple[str, ...]:
        """The source offsets of the batch."""
        return (str(self._ends.get(batch_id, 0)),)

    def committed(self) -> int:
        return max(self.commits, default=-1)

    def begun(self) -> int:
        """The batch whose offsets were written last."""
        return max(self.written_offsets, default=-1)

    def has_offsets(self, batch_id: int) -> bool:
        return batch_id in self.written_offsets

    def write_offsets(self, batch_id: int) -> None:
        if batch_id in self.written_offsets:
            raise SparkError(f"offsets/{batch_id} exists")
        self.written_offsets.add(batch_id)
        self.folder.put(f"offsets/{batch_id}", _offsets(*self.offsets_of(batch_id)))

    def write_commit(self, batch_id: int) -> None:
        if batch_id in self.commits:
            raise SparkError(f"commits/{batch_id} exists")
        self.world.ledger.spark_commits(batch_id)
        self.world.note("spark", batch=batch_id)
        self.commits.add(batch_id)
        self.folder.put(f"commits/{batch_id}", _COMMIT)

    def delete_from(self, batch_id: int) -> None:
        """Close a gap in the commit log as the error message tells an operator to do."""
        self.commits = {known for known in self.commits if known < batch_id}
        self.written_offsets = {known for known in self.written_offsets if known <= batch_id}
        for kind, kept in (("commits", self.commits), ("offsets", self.written_offsets)):
            for number in set(_numbers(self.folder, kind)) - kept:
                del self.folder.content[f"{kind}/{number}"]

    def change_rows(self, batch_id: int) -> None:
        """Give a row of the batch another value, for all later replays."""
        for partition in self.source[batch_id]:
            if partition:
                partition[0] += OTHER_ROWS
                self.other_rows.add(batch_id)
                return

    def cut_otherwise(self, batch_id: int) -> None:
        """Put the rows into other partitions, for all later replays."""
        rows = [row for partition in self.source[batch_id] for row in partition]
        partitions: Partitions = [[] for _ in range(self.world.rng.choice((1, 2, 3)))]
        for row in rows:
            self.world.rng.choice(partitions).append(row)
        self.repartitioned.add(batch_id)
        self.source[batch_id] = partitions


class Tasks:
    """The tasks of one batch, as one driver runs them."""

    def __init__(self, driver: Driver, batch_id: int) -> None:
        self.batch_id = batch_id
        self._driver = driver
        self._world = driver.world
        self._spark = driver.spark

    def run(self, incarnation: Incarnation, rewrite: Rewrite | None) -> Iterator[PartitionSummary]:
        """Write each partition; yield what its task returns.

        Raises:
            BatchInterruptedError: a task has lost its executor.
            PrepareRejectedError: a task has failed.
        """
        self._world.ledger.batch_begins(self.batch_id)
        self._driver.looked_at = math.inf
        self._world.call("spark.write", self._choose_rows)
        partitions = [tuple(rows) for rows in self._spark.source[self.batch_id]]
        for partition, rows in enumerate(partitions):
            wanting = [
                s
                for s in self._driver.sinks
                if rows and (rewrite is None or rewrite.wants(s.name, partition))
            ]
            content = Fingerprint("sim", len(rows), sum(map(row_hash, rows)) % 2**64)
            done = (
                self._partition(wanting, incarnation, rewrite, rows, partition) if wanting else []
            )
            parts = {
                c.branch_id.sink: Part(partition, c.branch_id.name, 8 * len(rows), content)
                for c in done
            }
            yield PartitionSummary(partition, parts, tuple(done))
        self._driver.consumed.add(self.batch_id)

    def _choose_rows(self) -> None:
        match self._driver.take_fault():
            case "repartition":
                self._spark.cut_otherwise(self.batch_id)
            case "other_rows":
                self._spark.change_rows(self.batch_id)

    def _partition(
        self,
        sinks: list[SimSink],
        incarnation: Incarnation,
        rewrite: Rewrite | None,
        rows: tuple[int, ...],
        partition: int,
    ) -> list[Committable]:
        """Run the task; if it fails, run it once more, as Spark does."""
        write_pass = 0 if rewrite is None else rewrite.write_pass
        for _ in range(2):
            done: list[Committable] = []
            attempt = self._driver.process.next_attempt()
            try:
                for sink in sinks:
                    branch_id = BranchId(
                        incarnation.owner,
                        self.batch_id,
                        incarnation.token,
                        sink.name,
                        write_pass,
                        attempt,
                    )
                    done.append(self._prepare(sink, branch_id, rows, partition))
            except TaskFailed:
                for committable in done:  # the failed task aborts its branches, best effort
                    if self._world.rng.random() < 0.7:
                        self._world.systems[committable.branch_id.sink].end(
                            str(committable.branch_id)
                        )
            else:
                return done
        if self._world.rng.random() < 0.5:
            raise BatchInterruptedError("a task lost its executor twice")
        raise PrepareRejectedError("a task failed twice")

    def _prepare(
        self, sink: SimSink, branch_id: BranchId, rows: tuple[int, ...], partition: int
    ) -> Committable:
        def effect() -> Committable:
            if self._driver.take_fault() == "zombie":
                self._leave_zombie(sink, branch_id, rows)
            committable = sink.system.prepare(branch_id, rows)
            if not isinstance(sink, Votes):  # else the vote prepares the branch
                self._world.note(
                    "prepare",
                    batch=self.batch_id,
                    sink=sink.name,
                    part=partition,
                    name=str(branch_id),
                )
            return committable

        return self._world.call(f"{sink.name}.precommit", effect)

    def _leave_zombie(self, sink: SimSink, branch_id: BranchId, rows: tuple[int, ...]) -> None:
        zombie = replace(branch_id, attempt=self._driver.process.next_attempt())
        due = self._world.steps + self._world.rng.choice((3, 15, 40, 120))

        def prepare_late() -> None:
            self._world.trace(f"an executor zombie prepares {zombie}")
            running, self._world.driver = self._world.driver, self._driver
            self._world.ledger.zombies.add(str(zombie))
            try:
                sink.system.prepare(zombie, rows)
                if not isinstance(sink, Votes):
                    self._world.note("stray", batch=self.batch_id, sink=sink.name, name=str(zombie))
            finally:
                self._world.driver = running

        self._world.late.append((due, prepare_late))


class SimBatch:
    """A micro-batch that foreachBatch hands over."""

    def __init__(self, driver: Driver, batch_id: int) -> None:
        self.batch_id = batch_id
        self.offsets = driver.spark.offsets_of(batch_id)
        self._driver = driver
        self._world = driver.world

    def write(
        self, incarnation: Incarnation, rewrite: Rewrite | None = None
    ) -> Mapping[str, Share]:
        sinks = [s for s in self._driver.sinks if rewrite is None or s.name in rewrite.partitions]
        return shares_of(sinks, [*Tasks(self._driver, self.batch_id).run(incarnation, rewrite)])

    def drain(self) -> Mapping[str, Fingerprint]:
        self._world.call("spark.drain", self._drained)
        return {}

    def _drained(self) -> None:
        self._world.ledger.drained(self.batch_id)
        self._driver.consumed.add(self.batch_id)
