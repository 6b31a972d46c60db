"""The whole proof as one call: a real query, killed at every point, compared with its source.

    assert_exactly_once(
        pipeline,                          # the address of a log -> ExactlyOnce, in each driver
        source=[table, table, …],          # one pyarrow table for each batch
        readers={"redis": read_rows},      # by sink name: what a reader gets
        kills=crash_points(["redis"]),
    )

Each kill is gated on the state: the driver stands at the point, an outsider looks, then SIGKILL.
Executors write the first batch, the driver itself the second one, and so on in turn.
Rows are compared as multisets, at every kill and at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from sparkonce.testing.crash import POLL_S, DriverProcess, Failpoints
from sparkonce.testing.kills import Kill, crash_points, sample
from sparkonce.testing.quick_spark import submit_args
from sparkonce.testing.services.process import log_tail
from sparkonce.testing.sink_world import Row, canonical, shown
from sparkonce.txn_log import open_log

if TYPE_CHECKING:
    from sparkonce import ExactlyOnce

PLANNING_S = 120.0
PATIENCE_S = 600.0
"""For a driver to reach a point, or its end, also where many tests share a machine."""

Reader = Callable[[], Iterable[Row]]


def assert_exactly_once(
    pipeline: Callable[[str], ExactlyOnce],
    source: Sequence[pa.Table],
    readers: Mapping[str, Reader],
    kills: Sequence[Kill] | int | None = None,
    *,
    standing: Mapping[str, Callable[[], Collection[object]]] | None = None,
    seed: int = 0,
    folder: Path | None = None,
    progress: Callable[[str], None] = print,
) -> None:
    """Run a streaming query, kill its driver again and again, and compare every row.

    Args:
        pipeline: makes the pipeline from the address of its transaction log. Called in each driver
            process, so it is pickled as Spark pickles functions.
        source: the batches. One more than the kills have batches, so that the last one shows that
            the pipeline goes on.
        readers: for each sink by its name, what a reader gets, in the columns and values of the
            source; by a client of its own.
        kills: where the driver is killed; default: `crash_points` of the readers' sinks. A number
            takes as many batches of these, chosen by `seed`.
        standing: for each sink by its name, what is left open, prepared or staged; asked at the
            end.
        seed: see `kills`.
        folder: for source, checkpoint, log and the drivers' output; default: a temporary one, which
            is kept where the call fails.
        progress: gets a line for each kill.

    Raises:
        AssertionError: with the rows that are lost or too often, their batches, and the kill after
            which that was seen.
        ValueError: `source` has too few batches for `kills`.
    """
    chain = crash_points(list(readers)) if kills is None or isinstance(kills, int) else list(kills)
    if isinstance(kills, int):
        chain = sample(chain, kills, seed)
    needed = sum(not kill.again for kill in chain) + 1
    if len(source) < needed:
        raise ValueError(
            f"source has {len(source)} batches, and these kills need {needed}: give more batches, "
            f"or fewer kills (kills={max(len(source) - 1, 0)} takes some of them by seed=)"
        )
    place = folder or Path(tempfile.mkdtemp(prefix="sparkonce-"))
    run = _Run(pipeline, source, readers, place)
    told = f"seed {seed}, " if isinstance(kills, int) else ""
    with closing(run.driver):
        batch = -1
        for number, kill in enumerate(chain, 1):
            batch += not kill.again
            run.history.append(f"{told}kill {number} of {len(chain)}: batch {batch}, {kill}")
            seen = run.meet(kill, batch)
            progress(f"{run.history[-1]}; visible then: {seen}")
        run.finish(batch + 1, standing or {})
    if folder is None:
        shutil.rmtree(place)
    progress(f"{len(chain)} kills; every row once in {', '.join(readers)}")


class _Run:
    """One query with its source, its drivers and the outside view."""

    def __init__(
        self,
        pipeline: Callable[[str], ExactlyOnce],
        source: Sequence[pa.Table],
        readers: Mapping[str, Reader],
        folder: Path,
    ) -> None:
        from pyspark import cloudpickle  # noqa: PLC0415 - as Spark pickles functions

        from sparkonce.testing.job import Order  # noqa: PLC0415 - imports Spark

        self._readers = readers
        self._folder = folder
        self._checkpoint = folder / "checkpoint"
        self._log = f"sqlite:///{folder}/log.db"
        self._batches = [Counter(map(canonical, table.to_pylist())) for table in source]
        self.history: list[str] = []
        self._write(source)
        where = (folder / "source", self._checkpoint)
        order = Order(pipeline, self._log, source[0].schema, *where, tuple(readers))
        self._orders = [
            cloudpickle.dumps(replace(order, is_written_here=is_here)) for is_here in (False, True)
        ]
        self._failpoints = Failpoints(folder / "failpoints")
        self.driver = DriverProcess(
            [sys.executable, "-P", "-m", "sparkonce.testing.job", str(folder / "order")],
            self._failpoints,
            log=folder / "driver.log",
            env={
                "PYTHONPATH": os.pathsep.join(filter(None, map(str, sys.path))),
                "PYSPARK_SUBMIT_ARGS": submit_args(),
            },
        )

    def _write(self, source: Sequence[pa.Table]) -> None:
        """Two files for each batch, so that it has two tasks."""
        folder = self._folder / "source"
        folder.mkdir(parents=True)
        for batch, table in enumerate(source):
            half = (table.num_rows + 1) // 2
            for part, rows in enumerate((table.slice(0, half), table.slice(half))):
                path = folder / f"{batch:05d}-{part}.parquet"
                pq.write_table(rows, path)
                age = batch * 2 + part
                os.utime(path, (age, age))  # Spark takes the oldest first

    def _start(self, batch: int) -> None:
        """Start a driver for the batch; each second batch it may write itself, if that is small."""
        (self._folder / "order").write_bytes(self._orders[batch % 2])
        self.driver.start()

    def meet(self, kill: Kill, batch: int) -> dict[str, str]:
        """Kill a driver there; what each sink showed of the batch."""
        arms = kill.arm(self._failpoints, batch, self._readers)
        self._start(batch)
        try:
            self.driver.wait_for(*arms, timeout_s=PATIENCE_S)
        except AssertionError as error:
            raise AssertionError(self._report(str(error))) from None
        seen = {name: self._seen(name, batch) for name in self._readers}
        if kill.is_beside_planning:
            self._wait_until_planned(batch + 1)
        self.driver.kill()
        self._failpoints.disarm()
        try:
            kill.check(seen)
        except AssertionError as error:
            raise AssertionError(self._report(str(error))) from None
        return seen

    def finish(self, batch: int, standing: Mapping[str, Callable[[], Collection[object]]]) -> None:
        """Let a driver run from the batch to the end, then compare everything."""
        self.history.append("the last driver, which nobody killed")
        self._start(batch)
        if self.driver.wait(timeout_s=PATIENCE_S) != 0:
            raise AssertionError(self._report("it failed"))
        for name in self._readers:
            if (seen := self._seen(name, len(self._batches))) != "none":
                raise AssertionError(self._report(f"{name}: {seen}"))
        left = {name: found for name, ask in standing.items() if (found := list(ask()))}
        if left:
            raise AssertionError(self._report(f"left over at the end: {left}"))
        bound = json.loads((self._checkpoint / "sparkonce.json").read_text())
        with closing(open_log(self._log)) as log:
            unfinished = log.unfinished(bound["pipeline"])
        if unfinished:
            raise AssertionError(self._report(f"the log has unfinished batches: {unfinished}"))

    def _seen(self, name: str, batch: int) -> str:
        """How much of the batch the sink shows; all before it must be there, and nothing else."""
        found = Counter(map(canonical, self._readers[name]()))
        before = sum(self._batches[:batch], Counter[str]())
        own = self._batches[batch] if batch < len(self._batches) else Counter[str]()
        lost, rest = before - found, found - before
        too_much = rest - own
        if lost or too_much:
            raise AssertionError(
                self._report(
                    f"sink {name!r}: {lost.total()} rows lost, {too_much.total()} too often\n"
                    f"  lost: {self._placed(lost)}\n  too often: {self._placed(too_much)}"
                )
            )
        return "none" if not rest else "all" if rest == own else "some"

    def _placed(self, rows: Counter[str]) -> str:
        batches = {
            number
            for number, batch in enumerate(self._batches)
            if any(row in batch for row in rows)
        }
        return f"{shown(rows)} (of batches {sorted(batches)})" if rows else "nothing"

    def _report(self, what: str) -> str:
        kills = "\n  ".join(self.history)
        return (
            f"{what}\nseen at {self.history[-1]}\nkills so far:\n  {kills}\n"
            f"everything is kept in {self._folder}; the driver said last: "
            f"{log_tail(self.driver.log)}"
        )

    def _wait_until_planned(self, batch: int) -> None:
        # A driver that dies before Spark has written which files the next batch holds gives them
        # to that batch *and* those of the one after.
        planned, deadline = self._checkpoint / "offsets" / str(batch), time.monotonic() + PLANNING_S
        while not planned.exists():
            if self.driver.status() is not None or time.monotonic() > deadline:
                raise AssertionError(self._report(f"Spark does not plan batch {batch}"))
            time.sleep(POLL_S)
