"""A pipeline whose drivers are killed again and again, while an outsider looks at its targets.

    source files ─► driver (one or several, see `Driver`) ─► targets, each with an outsider's view

Tests compare whole rows, as multisets, per batch and per sink. With `is_tagged` every row also
names the driver process that wrote it. Then all rows of a batch, in all sinks, must come from one
process, and never from one that was killed while the batch could still be aborted.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple, Self

from sparkonce.model import Committable, Owner
from sparkonce.protocol.pipeline import CommitPolicy
from sparkonce.testing.crash import POLL_S, Arm, DriverProcess, Failpoints
from sparkonce.testing.job import FILES_PER_BATCH
from sparkonce.testing.quick_spark import submit_args
from sparkonce.txn_log import TransactionLog, open_log
from sparkonce.txn_log.record import State, TransactionRecord

ROOT = Path(__file__).parent.parent.parent
PIPELINE = "crash"
ROWS_PER_FILE = 50
ROWS_PER_BATCH = ROWS_PER_FILE * FILES_PER_BATCH
PLANNING_S = 120.0
ENDS_S = 900.0
"""On YARN, a busy machine takes minutes to start an executor."""
_INHERITED = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
"""Such as the PySpark of another version (spark/test_every_spark.py)."""
DAYS = ("2026-01-01", "2026-01-02")
POLICIES: tuple[CommitPolicy, ...] = ("immediate", "after_checkpoint")


class Row(NamedTuple):
    id: int
    day: str
    name: str | None
    amount: Decimal

    @classmethod
    def of_source(cls, number: int) -> Self:
        name = None if number % 7 == 0 else f"名前 {number}"
        return cls(number, DAYS[number % len(DAYS)], name, Decimal(f"{number}.25"))


class SeenRow(NamedTuple):
    """A row that a reader gets.

    Attributes:
        row: its values.
        run: the id of the driver process that wrote it; 0 if rows are not tagged.
    """

    row: Row
    run: int


@dataclass(frozen=True)
class Target:
    """A sink of the pipeline, and what an outsider sees of it and can do to it.

    Attributes:
        kind: class name in `sparkonce.sinks`.
        target: positional arguments.
        settings: keyword arguments.
        read: returns every row that a reader gets.
        leaks: lists everything of the owner that is left over.
        lose: destroys a prepared branch, as a timeout or an administrator does.
    """

    kind: str
    target: list[Any]
    settings: dict[str, Any]
    read: Callable[[], Iterable[SeenRow]]
    leaks: Callable[[Owner], list[str]]
    lose: Callable[[Committable], None]

    @property
    def name(self) -> str:
        return str(self.settings["name"])

    @property
    def config(self) -> dict[str, Any]:
        return {"kind": self.kind, "target": self.target, "settings": self.settings}


class Driver:
    """One driver program of the pipeline, with its own fail points."""

    def __init__(
        self, folder: Path, config: Path, command: Sequence[str], env: Mapping[str, str]
    ) -> None:
        folder.mkdir()
        self.failpoints = Failpoints(folder / "failpoints")
        self.process = DriverProcess(
            [*command, str(config)],
            self.failpoints,
            log=folder / "driver.log",
            env={
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src"), *_INHERITED]),
                "PYSPARK_SUBMIT_ARGS": submit_args(),
                **env,
            },
        )
        self._log_start = 0

    def arm(self, point: str, *, sink: str | None = None, **where: Any) -> Arm:
        named = where if sink is None else {**where, "sink": sink}
        return self.failpoints.arm(point, **named)

    def start(self, *arms: Arm) -> None:
        """Start it and wait until it is paused at every one of `arms`."""
        self._log_start = len(self._log())
        self.process.start()
        if arms:
            self.process.wait_for(*arms)

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def kill(self) -> None:
        """SIGKILL the whole program, and disarm its points, so that its successor passes them."""
        self.process.kill()
        self.failpoints.disarm()

    def let_go(self, *arms: Arm) -> None:
        """Let it continue from the points at which it is paused."""
        self.failpoints.disarm(*arms)

    def ends(self) -> tuple[int, str]:
        """Wait until it ends by itself; return its exit code, and its output since its start."""
        return self.process.wait(timeout_s=ENDS_S), self.said()

    def said(self) -> str:
        return self._log()[self._log_start :]

    def _log(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return self.process.log.read_text(errors="replace")
        return ""

    def frozen(self) -> AbstractContextManager[None]:
        """See `DriverProcess.frozen`."""
        return self.process.frozen()


@dataclass
class Scenario:
    """A source, drivers, and the outside view.

    Attributes:
        folder: for everything.
        targets: the sinks.
        batches: the number of batches in the source.
        commit: the commit policy.
        is_tagged: see the module. False if another process may rewrite branches.
        master: Spark's.
        conf: Spark's settings.
        settings: more settings of `ExactlyOnce`.
        command: starts a driver program, whose last argument is its configuration.
        env: more environment variables of the driver.
        log_address: of the transaction log; by default a SQLite file in `folder`.
        checkpoint_url: where the checkpoint is unless it is the folder `checkpoint`.
    """

    folder: Path
    targets: Sequence[Target]
    batches: int
    commit: CommitPolicy = "immediate"
    is_tagged: bool = True
    master: str = "local[2]"
    conf: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    command: Sequence[str] = (sys.executable, "-m", "integration_tests.crash.job")
    env: Mapping[str, str] = field(default_factory=dict)
    log_address: str = ""
    checkpoint_url: str = ""

    def __post_init__(self) -> None:
        self.source = self.folder / "in"
        self.checkpoint = self.folder / "ckpt"
        self.log_address = self.log_address or f"sqlite:///{self.folder}/txn.db"
        self.drivers: list[Driver] = []
        self.table: list[tuple[str, ...]] = []
        self.aborted: set[tuple[int, int]] = set()
        """Pairs of a batch and a process that was killed before it had decided the batch."""
        self.removed: dict[str, int] = {}
        """By the name of a removed sink, the number of batches that it got."""
        self.source.mkdir()
        for number in range(self.batches * FILES_PER_BATCH):
            self.write_file(number)
        self.config = self.write_config("config", self.checkpoint)
        self.driver = self.new_driver()

    def write_file(self, number: int, change: Callable[[Row], Row] = lambda row: row) -> None:
        """Write one file of the source, or overwrite it with other rows."""
        ids = range(number * ROWS_PER_FILE, (number + 1) * ROWS_PER_FILE)
        rows = (change(Row.of_source(n))._asdict() for n in ids)
        path = self.source / f"{number:05d}.json"
        path.write_text(
            "\n".join(json.dumps({**row, "amount": str(row["amount"])}) for row in rows)
        )
        os.utime(path, (number, number))  # Spark takes the oldest first

    def write_config(self, name: str, checkpoint: Path) -> Path:
        config = {
            "source": self.source.as_uri(),
            "folder": str(self.folder),
            "checkpoint": self.checkpoint_url or str(checkpoint),
            "master": self.master,
            "conf": dict(self.conf),
            "sinks": [t.config for t in self.targets if t.name not in self.removed],
            "removed": [t.config for t in self.targets if t.name in self.removed],
            "pipeline": {"log": self.log_address, "commit": self.commit, **self.settings},
            "is_tagged": self.is_tagged,
        }
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(config))
        return path

    def kill_at(self, point: str, batch: int) -> None:
        """Start the driver, and kill it when it is paused there."""
        self.driver.start(self.driver.arm(point, batch=batch))
        self.driver.kill()

    def new_driver(self, config: Path | None = None) -> Driver:
        """Make one more driver, of the same checkpoint unless `config` has another one."""
        folder = self.folder / f"driver-{len(self.drivers)}"
        self.drivers.append(Driver(folder, config or self.config, self.command, self.env))
        return self.drivers[-1]

    def remove(self, name: str, *, batches: int) -> None:
        """Remove the sink, which got `batches`, from the pipeline of all later drivers."""
        self.removed[name] = batches
        self.write_config("config", self.checkpoint)

    def wait_until_planned(self, batch: int) -> None:
        """Wait until Spark has recorded the files of `batch`.

        If a driver dies before that, the file source gives the batch two more files.
        """
        planned, deadline = self.checkpoint / "offsets" / str(batch), time.monotonic() + PLANNING_S
        while not planned.exists():
            assert self.driver.process.status() is None, self.driver.said()[-3000:]
            assert time.monotonic() < deadline, f"Spark does not plan batch {batch}"
            time.sleep(POLL_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        for driver in self.drivers:
            driver.process.close()
        if failed:
            print(*map(" | ".join, self.table), sep="\n")

    def target(self, name: str) -> Target:
        return next(target for target in self.targets if target.name == name)

    # -- what an outsider sees ---------------------------------------------------------------------

    def visible_of(self, batch: int) -> dict[str, str]:
        """By sink: "none", "all" or "some" of the batch is visible.

        Asserts that all earlier batches are visible once, and no row of an aborted attempt is.
        """
        seen = {}
        for target in self.targets:
            rows = self._rows(target)
            before = Counter({row: n for row, n in rows.items() if row.id < self._first_id(batch)})
            assert before == self._expected(0, batch), f"{target.name}: earlier batches differ"
            rest, wanted = rows - before, self._expected(batch, batch + 1)
            assert rest <= wanted, f"{target.name}: {rest - wanted} too often, or never written"
            seen[target.name] = "none" if not rest else "all" if rest == wanted else "some"
        return seen

    def _rows(self, target: Target) -> Counter[Row]:
        rows = list(target.read())
        revived = {(s.row.id // ROWS_PER_BATCH, s.run) for s in rows} & self.aborted
        assert not revived, f"{target.name}: rows of an aborted attempt: (batch, process) {revived}"
        return Counter(seen.row for seen in rows)

    @staticmethod
    def _first_id(batch: int) -> int:
        return batch * ROWS_PER_BATCH

    def _expected(self, start: int, end: int) -> Counter[Row]:
        return Counter(map(Row.of_source, range(self._first_id(start), self._first_id(end))))

    def check_agreement(self) -> None:
        """Assert that all rows of a batch, in all sinks, come from one process."""
        runs: dict[int, set[int]] = {}
        for target in self.targets:
            for seen in target.read():
                runs.setdefault(seen.row.id // ROWS_PER_BATCH, set()).add(seen.run)
        mixed = {batch: found for batch, found in runs.items() if len(found) > 1}
        assert not mixed, f"batches whose rows come from several attempts: {mixed}"

    def leaks(self) -> list[str]:
        with self.log() as log:
            head = log.head(PIPELINE)
            assert head is not None
            owner = Owner(log.log_id, head.query_id)
        return [f"{target.name}: {leak}" for target in self.targets for leak in target.leaks(owner)]

    @contextlib.contextmanager
    def log(self) -> Iterator[TransactionLog]:
        log = open_log(self.log_address)
        yield log
        log.close()

    def record(self, batch: int) -> TransactionRecord:
        with self.log() as log:
            return next(r for r in log.history(PIPELINE) if r.id.batch_id == batch)

    # -- the end -----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Run the query to its end, then check everything."""
        self.driver.failpoints.disarm()
        self.driver.start()
        status, said = self.driver.ends()
        assert status == 0, said[-3000:]
        self.check_end()

    def check_end(self) -> None:
        """Assert that every sink has the source, each batch from one attempt; nothing is left."""
        for target in self.targets:
            batches = self.removed.get(target.name, self.batches)
            rows, wanted = self._rows(target), self._expected(0, batches)
            assert rows == wanted, f"{target.name}: lost {wanted - rows}, too much {rows - wanted}"
        self.check_agreement()
        assert self.leaks() == []
        with self.log() as log:
            assert log.unfinished(PIPELINE) == []
            records = log.history(PIPELINE, self.batches + 1)
        assert [r.id.batch_id for r in records] == list(reversed(range(self.batches)))
        assert {r.state for r in records} == {State.COMPLETE}

    # -- the table that each test prints -----------------------------------------------------------

    def note(self, *cells: object) -> None:
        self.table.append(tuple(map(str, cells)))

    def print_table(self, *heads: str) -> None:
        lines = [heads, *self.table]
        width = [max(len(line[n]) for line in lines) for n in range(len(heads))]
        print()
        for line in lines:
            print(" | ".join(f"{cell:{w}}" for cell, w in zip(line, width, strict=True)).rstrip())
        print(f"{len(self.table)} cells; rows lost 0, duplicated 0 in {len(self.targets)} sinks")


def shown(seen: Mapping[str, str]) -> str:
    """One value such as ``none`` if all sinks agree, else the value of each."""
    values = set(seen.values())
    if len(values) == 1:
        return values.pop()
    return ", ".join(f"{name} {what}" for name, what in seen.items())


def first_match(pattern: str, text: str) -> str:
    """The first match of the pattern; if there is none, fail with the end of the text."""
    match = re.search(pattern, text)
    assert match, f"{pattern} is not in: {text[-3000:]}"
    return match[0]
