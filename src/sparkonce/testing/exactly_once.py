"""The whole proof as one call: a real query, killed at every point, compared with its source.

    assert_exactly_once(
        pipeline,                          # the address of a log -> ExactlyOnce, in each driver
        source=[table, table, …],          # one pyarrow table for each batch
        readers={"redis": read_rows},      # by sink name: what a reader gets
        kills=crash_points(["redis"]),
    )

At each kill the driver pauses at the point, an outsider looks, and then the driver gets SIGKILL.
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
from sparkonce.testing.services.process import import_path, log_tail
from sparkonce.testing.sink_world import Row, canonical, shown
from sparkonce.txn_log import open_log

if TYPE_CHECKING:
    from sparkonce import ExactlyOnce
    from sparkonce.testing.job import Front

PLANNING_S = 120.0
PATIENCE_S = 600.0
"""How long a driver may take to reach a point, or its end, even if many tests share a machine."""

Reader = Callable[[], Iterable[Row]]


def assert_exactly_once(
    pipeline: Callable[[str], ExactlyOnce],
    source: Sequence[pa.Table],
    readers: Mapping[str, Reader],
    kills: Sequence[Kill] | int | None = None,
    *,
    unfinished: Mapping[str, Callable[[], Collection[object]]] | None = None,
    seed: int = 0,
    folder: Path | None = None,
    progress: Callable[[str], None] = print,
    front: Front = "foreachBatch",
) -> None:
    """Run a streaming query, kill its driver again and again, and compare every row.

    Args:
        pipeline: makes the pipeline from the address of its transaction log. Each driver process
            calls it, so it is pickled as Spark pickles functions.
        source: the batches, one more than the kills need: the last one shows that the pipeline
            still runs.
        readers: by sink name, a function that reads the sink with its own client. It returns rows
            with the columns and values of the source.
        kills: where the driver is killed; default: `crash_points` of the readers' sinks. A number
            takes that many batches of the default, chosen by `seed`.
        unfinished: by sink name, a function that lists everything left open, prepared or staged. It
            is called at the end and must list nothing.
        seed: see `kills`.
        folder: for source, checkpoint, log and the drivers' output; default: a temporary one, which
            is kept if the call fails.
        progress: is called with a line for each kill.
        front: "foreachBatch", or "format" to write with ``writeStream.format("sparkonce")``.

    Raises:
        AssertionError: rows are lost or duplicated, something is left over, or a driver failed. The
            message names the rows, their batches, and the kill after which they were noticed.
        ValueError: `source` has too few batches for `kills`.
    """
    chain = crash_points(list(readers)) if kills is None or isinstance(kills, int) else list(kills)
    if isinstance(kills, int):
        chain = sample(chain, kills, seed)
    needed = sum(not kill.again for kill in chain) + 1
    if len(source) < needed:
        raise ValueError(
            f"source has {len(source)} batches, and these kills need {needed}: give more batches, "
            f"or fewer kills (kills={max(len(source) - 1, 0)} picks that many, chosen by seed=)"
        )
    place = folder or Path(tempfile.mkdtemp(prefix="sparkonce-"))
    run = _Run(pipeline, source, readers, place, front)
    by_seed = f"seed {seed}, " if isinstance(kills, int) else ""
    with closing(run.driver):
        batch = -1
        for number, kill in enumerate(chain, 1):
            batch += not kill.again
            run.history.append(f"{by_seed}kill {number} of {len(chain)}: batch {batch}, {kill}")
            seen = run.meet(kill, batch)
            progress(f"{run.history[-1]}; visible then: {seen}")
        run.finish(batch + 1, unfinished or {})
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
        front: Front,
    ) -> None:
        from pyspark import cloudpickle  # noqa: PLC0415 - Spark's own copy

        from sparkonce.testing.job import Order  # noqa: PLC0415 - imports Spark

        self._readers = readers
        self._folder = folder
        self._checkpoint = folder / "checkpoint"
        self._log = f"sqlite:///{folder}/log.db"
        self._batches = [Counter(map(canonical, table.to_pylist())) for table in source]
        self.history: list[str] = []
        self._write(source)
        where = (folder / "source", self._checkpoint)
        order = Order(pipeline, self._log, source[0].schema, *where, tuple(readers), front=front)
        self._orders = [
            cloudpickle.dumps(replace(order, is_written_here=is_here)) for is_here in (False, True)
        ]
        self._failpoints = Failpoints(folder / "failpoints")
        self.driver = DriverProcess(
            [sys.executable, "-P", "-m", "sparkonce.testing.job", str(folder / "order")],
            self._failpoints,
            log=folder / "driver.log",
            env={**import_path(), "PYSPARK_SUBMIT_ARGS": submit_args()},
        )

    def _write(self, source: Sequence[pa.Table]) -> None:
        """Write two files for each batch, so that it has two tasks."""
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
        """Start a driver; it writes every second batch itself, if the batch is small."""
        (self._folder / "order").write_bytes(self._orders[batch % 2])
        self.driver.start()

    def meet(self, kill: Kill, batch: int) -> dict[str, str]:
        """Kill a driver there; return what each sink showed of the batch at that moment."""
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

    def finish(
        self, batch: int, unfinished: Mapping[str, Callable[[], Collection[object]]]
    ) -> None:
        """Let a driver run from the batch to the end, then compare everything."""
        self.history.append("the last driver, which was not killed")
        self._start(batch)
        if self.driver.wait(timeout_s=PATIENCE_S) != 0:
            raise AssertionError(self._report("the driver failed"))
        for name in self._readers:
            if (seen := self._seen(name, len(self._batches))) != "none":
                raise AssertionError(self._report(f"{name}: {seen}"))
        left = {name: found for name, ask in unfinished.items() if (found := list(ask()))}
        if left:
            raise AssertionError(self._report(f"left over at the end: {left}"))
        bound = json.loads((self._checkpoint / "sparkonce.json").read_text())
        with closing(open_log(self._log)) as log:
            batches = log.unfinished(bound["pipeline"])
        if batches:
            raise AssertionError(self._report(f"the log has unfinished batches: {batches}"))

    def _seen(self, name: str, batch: int) -> str:
        """How much of the batch the sink shows; it must also show every earlier batch, once."""
        found = Counter(map(canonical, self._readers[name]()))
        before = sum(self._batches[:batch], Counter[str]())
        own = self._batches[batch] if batch < len(self._batches) else Counter[str]()
        lost, rest = before - found, found - before
        surplus = rest - own
        if lost or surplus:
            raise AssertionError(
                self._report(
                    f"sink {name!r}: {lost.total()} rows lost, {surplus.total()} too often\n"
                    f"  lost: {self._placed(lost)}\n  too often: {self._placed(surplus)}"
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
        tail = log_tail(self.driver.log)
        end = "" if tail in what else f"; the end of the driver's log: {tail}"
        return (
            f"{what}\nnoticed at {self.history[-1]}\nkills so far:\n  {kills}\n"
            f"everything is kept in {self._folder}{end}"
        )

    def _wait_until_planned(self, batch: int) -> None:
        # If a driver dies before Spark has recorded the files of the next batch, that batch gets
        # the files of the batch after it as well.
        planned, deadline = self._checkpoint / "offsets" / str(batch), time.monotonic() + PLANNING_S
        while not planned.exists():
            if self.driver.status() is not None or time.monotonic() > deadline:
                raise AssertionError(self._report(f"Spark does not plan batch {batch}"))
            time.sleep(POLL_S)
