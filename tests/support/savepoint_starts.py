"""A user who starts, copies, restores and forks queries: real logs and savepoints, a tiny Spark.

The source is one list of numbers, and a batch is a range of it. So a batch that is planned again
may get another end, as with Kafka. What each target shows is compared with the list.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from sparkonce.model import TransactionId
from sparkonce.spark_hooks.binding import bind, read_binding
from sparkonce.spark_hooks.checkpoint import open_checkpoint
from sparkonce.spark_hooks.savepoints import (
    Filling,
    Manifest,
    Savepoints,
    create,
    fork,
    restore,
    restore_lost,
)
from sparkonce.storage import LocalFolder
from sparkonce.txn_log import TransactionLog, checkpoint_log, open_log
from sparkonce.txn_log.claim import Claim
from sparkonce.txn_log.identity import check_offsets
from sparkonce.txn_log.record import State, TransactionRecord
from tests.support.savepoint_cases import QUERY, KilledError, commit, offsets, write

SIZE = 2
"""Numbers in a batch, unless a test gives another size."""


class Killed(LocalFolder):
    """A folder whose process dies before it creates the file that turns a marker into a binding."""

    def create(self, name: str, text: str) -> bool:
        if name == "sparkonce.1.json":
            raise KilledError(name)
        return super().create(name, text)


class User:
    """The user, with checkpoints and logs by name.

    Attributes:
        log: the address of the jobs' log, or "checkpoint".
        shown: what each target shows.
        began: the first number that a target must show.
    """

    def __init__(self, folder: Path, *, is_inside: bool = False) -> None:
        self.folder = folder
        self.log = "checkpoint" if is_inside else f"sqlite:///{folder}/txn.db"
        self.shown: dict[str, Counter[int]] = {}
        self.began: dict[str, int] = {}
        self.savepoints = Savepoints(LocalFolder(folder / "savepoints"))
        self._runs = itertools.count(1)
        write(folder / "old", [("metadata", json.dumps({"id": QUERY}))])
        write(folder / "old", [("sources/0/0", "v1\n{}")])

    def log_of(self, at: str, log: str | None = None) -> TransactionLog:
        if (log or self.log) == "checkpoint":
            return checkpoint_log(str(self.folder / at))
        return open_log(log or self.log)

    def start(
        self,
        at: str = "old",
        name: str = "orders",
        *,
        target: str = "out",
        log: str | None = None,
        size: int = SIZE,
        seen_run: str | None = None,
    ) -> Run:
        """Start the query of the checkpoint; its first batch takes a token."""
        return Run(self, at, name, target, self.log_of(at, log), size, seen_run, next(self._runs))

    # -- what a user does with folders and savepoints ----------------------------------------------

    def copy(self, source: str, target: str) -> None:
        shutil.copytree(self.folder / source, self.folder / target)

    def lose(self, name: str) -> None:
        path = self.folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    def savepoint(self, at: str = "old", name: str = "orders", called: str = "s") -> Manifest:
        files = open_checkpoint(str(self.folder / at), None)
        return create(self.savepoints, self.log_of(at), name, files, name=called)

    def restore(
        self,
        into: str,
        *,
        called: str = "s",
        parent: str | None = "old",
        is_killed: bool = False,
    ) -> None:
        """Restore a savepoint. `parent` has the log, if that is in a checkpoint; None: lost."""
        filling = self._filling(into, "orders", called, is_killed=is_killed)
        if parent is None:
            restore_lost(filling)
        else:
            restore(filling, self.log_of(parent))

    def fork(
        self,
        into: str = "fork",
        name: str = "fork",
        *,
        target: str = "fork-out",
        called: str = "s",
        shared: Iterable[str] = (),
        log: str | None = None,
        is_killed: bool = False,
    ) -> None:
        filling = self._filling(into, name, called, log=log, is_killed=is_killed)
        fork(filling, {"out": f"file:/{target}"}, shared)
        self.began[target] = end_of(json.loads(filling.manifest.record.offsets[0]))

    def _filling(
        self, into: str, pipeline: str, called: str, *, log: str | None = None, is_killed: bool
    ) -> Filling:
        return Filling(
            self.savepoints,
            self.savepoints.read(called),
            (Killed if is_killed else LocalFolder)(self.folder / into),
            pipeline,
            lambda: self.log_of(into, log),
        )

    # -- what must hold ----------------------------------------------------------------------------

    def check(self) -> None:
        """Each target shows each number from its first one to its last one once."""
        for target, shown in self.shown.items():
            first = self.began.get(target, 0)
            assert shown == Counter(range(first, max(shown, default=first - 1) + 1)), target


def end_of(offset: dict[str, dict[str, int]]) -> int:
    return offset["topic"]["0"]


class Run:
    """One run of a query, which has delivered its first batch.

    Attributes:
        batch: the batch that it runs next.
    """

    def __init__(
        self,
        user: User,
        at: str,
        name: str,
        target: str,
        log: TransactionLog,
        size: int,
        seen_run: str | None,
        number: int,
    ) -> None:
        self._folder = user.folder / at
        self._name, self._log, self._shown = name, log, user.shown.setdefault(target, Counter())
        files = open_checkpoint(str(self._folder), None)
        self._query_id = str(files.query_id())
        self.batch = (files.committed() or 0) + 1 if (self._folder / "commits").exists() else 0
        had_offsets = (self._folder / "offsets" / str(self.batch)).exists()
        self._plan(size)
        try:
            claim = self._claim(f"run {number}", f"file:/{target}", seen_run)
            self._token = log.begin(claim).token
            bind(LocalFolder(self._folder), files.binding(), log.id_of(name), name)
        except Exception:
            if not had_offsets:
                (self._folder / "offsets" / str(self.batch)).unlink()
            raise
        self._deliver()

    def run(self, batches: int = 1, size: int = SIZE) -> None:
        for _ in range(batches):
            self._plan(size)
            self._deliver()

    def _claim(self, run_id: str, target: str, seen_run: str | None) -> Claim:
        bound = read_binding(LocalFolder(self._folder))
        head = self._log.head(self._name)
        is_known = head is not None and head.query_id == self._query_id
        shown = {n: self._offsets(n) for n in (self.batch - 1, self.batch)}
        return Claim(
            self._name,
            self._query_id,
            run_id,
            "host:1",
            {"out": target},
            self.batch,
            offsets={n: (text,) for n, text in shown.items() if text},
            checkpoint=str(self._folder),
            checkpoint_log_id=None if bound is None else bound.log_id,
            checkpoint_pipeline=None if bound is None else bound.pipeline,
            namesake=None if is_known else self._log.namesake(self._name, self._query_id),
            seen_run=("" if head is None else head.run_id) if seen_run is None else seen_run,
        )

    def _offsets(self, batch: int) -> str:
        path = self._folder / "offsets" / str(batch)
        return path.read_text().splitlines()[2] if path.exists() else ""

    def _end(self, batch: int) -> int:
        return end_of(json.loads(self._offsets(batch))) if batch >= 0 else 0

    def _plan(self, size: int) -> None:
        """Spark writes the offsets of a batch once, and replays it with them."""
        if not self._offsets(self.batch):
            end = {"topic": {"0": self._end(self.batch - 1) + size}}
            write(self._folder, [(f"offsets/{self.batch}", offsets(end))])

    def _deliver(self) -> None:
        shown = (self._offsets(self.batch),)
        batch_id = TransactionId(self._name, self._query_id, self.batch)
        known = self._log.find(batch_id)
        if known is not None and known.state.is_finished:
            check_offsets(known, shown, str(self._folder))  # and the batch is drained
        else:
            record = TransactionRecord(batch_id, self._token, State.DECIDED, shown, {})
            decided = self._log.decide(record)
            self._shown.update(range(self._end(self.batch - 1), self._end(self.batch)))
            self._log.complete(decided, self._token)
        write(self._folder, [(f"commits/{self.batch}", commit())])
        self.batch += 1


def killed(action: Callable[[], object]) -> None:
    """Run a command that is killed on its way."""
    try:
        action()
    except KilledError:
        return
    raise AssertionError("the command was not killed")
